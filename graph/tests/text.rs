//! The text form: what it looks like, that it is read back exactly, and what the parser says.

use graph::{
    Attr, Binary, Block, Branch, Container, ContainerId, DType, Expr, Graph, Index, Layout,
    Library, Lifetime, Loop, Map, Memlet, Node, NodeKind, Origin, Output, Param, Reduction, Scalar,
    Schedule, Stage, State, Storage, SymExpr, Tasklet, Tensor, Unary, parse, parse_with,
};
use proptest::prelude::*;
use std::sync::Arc;

const EXAMPLE: &str = r#"graph "toy" {
  symbols batch
  %x: f32[batch, 8] input
  %w: f32[4, 8] <1,0> parameter
  %half: f32[] constant [0.5]
  %zeros: f32[4, 1000] constant all 0.0
  %y: f32[batch, 4]
  %z: f32[batch, 4] local
  %"odd name": i64[mod(batch, 3) + 1]
  inputs %x, %w
  state {
    %y, - = linear(%x, %w, -) {bias=false, dims=[0, 1], dtype=bf16, eps=1e-5, expr=($0 + 1.0), mode="same", scales=floats[2.0], sizes=sizes[batch, 4]} @ "fc" in "model.fc" at "net.py:3"
    map [n < batch, k < 4] kernel {
      map [] sequential @ "inner" !backward {
        tasklet %z[n, k] (sum) = $0 * select($1 > 0.0, $1 - ($0 - 2.0), -inf) from %x[n, 2*k - 1 | 0.0], %y[n, $2], %"odd name"[floordiv(n, 2)] !optimizer
      }
    }
  }
  loop t < batch - 1 {
    branch %half {
      state {
        = debug.print(%y)
      }
    } else {
    }
  }
  outputs %z -> %w, %y
}
"#;

#[test]
fn the_example_reads_and_prints_as_it_stands() {
    let g = parse(EXAMPLE).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(g.to_string(), EXAMPLE);
    assert_eq!(g.containers.len(), 7);
    assert_eq!(g.outputs[0].updates, g.find("w"));
}

#[test]
fn comments_and_line_breaks_do_not_matter() {
    let short = parse("graph \"g\" { // nothing\n\n %x : f32 [ ] input\n outputs %x }").unwrap();
    assert_eq!(
        short.to_string(),
        "graph \"g\" {\n  %x: f32[] input\n  outputs %x\n}\n"
    );
}

#[test]
fn large_constants_stand_aside() {
    let mut g = Graph::new("big");
    let data: Vec<f64> = (0..100).map(f64::from).collect();
    g.add_constant("c", Tensor::from_f64(DType::F32, &[10, 10], data));
    let text = g.to_string();
    let table = g.large_constants();
    assert_eq!(table.len(), 1);
    let hash = table.keys().next().unwrap();
    assert!(
        text.contains(&format!("%c: f32[10, 10] constant #{hash}\n")),
        "{text}"
    );
    assert_eq!(parse_with(&text, &table).unwrap(), g);
    let error = parse(&text).unwrap_err().to_string();
    assert!(
        error.contains("expected a constant of the given table"),
        "{error}"
    );
}

#[test]
fn errors_name_the_place_and_what_was_expected() {
    let check = |text: &str, expect: &str| {
        assert_eq!(parse(text).unwrap_err().to_string(), expect, "{text}");
    };
    check(
        "",
        "line 1, column 1: expected `graph`, found the end of the text",
    );
    check(
        "graph \"g\" {\n  %x: float[]\n}",
        "line 2, column 7: expected an element type such as `f32`, found `float`",
    );
    check(
        "graph \"g\" {\n  %x: f32[]\n  %x: f32[]\n}",
        "line 3, column 4: expected a name no other container has, found `x`",
    );
    check(
        "graph \"g\" {\n  outputs %y\n}",
        "line 2, column 12: expected the name of a container declared above, found `y`",
    );
    check(
        "graph \"g\" {\n  %x: f32[2, <0,0>]\n}",
        "line 2, column 14: expected a size, found `<`",
    );
    check(
        "graph \"g\" {\n  %x: f32[2, 2] <0,0>\n}",
        "line 2, column 17: expected a permutation of the dimensions, found `<`",
    );
    check(
        "graph \"g\" {\n  %x: f32[2] constant [1.0]\n}",
        "line 2, column 23: expected 2 elements, found `[`",
    );
    check(
        "graph \"g\" {\n  %x: f32[n] constant [1.0]\n}",
        "line 2, column 23: expected the constant's own type and shape, found `[`",
    );
    check(
        "graph \"g\" { %x: f32[] state { tasklet %x[] = foo(1.0) } }",
        "line 1, column 46: expected the name of a function, found `foo`",
    );
    check(
        "graph \"g\" { %x: f32[] state { tasklet %x[] = exp(1.0, 2.0) } }",
        "line 1, column 50: expected 1 operands of `exp`, found 2",
    );
    check(
        "graph \"g\" { %x: f32[] state { tasklet %x[0 = 1.0 } }",
        "line 1, column 44: expected `,`, `|` or `]`, found `=`",
    );
    check(
        "graph \"g\" { %x: f32[] state { %x = f(%x) {a=} } }",
        "line 1, column 45: expected the value of an attribute, found `}`",
    );
    check(
        "graph \"g\" { state { relu } }",
        "line 1, column 21: expected `map`, `tasklet`, an operator or `}`, found `relu`",
    );
    check(
        "graph \"g\" { %x: f32[] state { tasklet %x[] (avg) = 1.0 } }",
        "line 1, column 45: expected `sum`, `prod`, `max` or `min`, found `avg`",
    );
    check(
        "graph \"g",
        "line 1, column 7: expected a text in quotes, found `\"g`",
    );
    check(
        "graph \"g\" { } more",
        "line 1, column 15: expected the end of the text, found `more`",
    );
}

/// Choices from which a graph is made; an empty tape makes the smallest.
struct Tape {
    choices: Vec<u32>,
    at: usize,
}

impl Tape {
    fn below(&mut self, n: usize) -> usize {
        let choice = self.choices.get(self.at).copied().unwrap_or(0) as usize;
        self.at += 1;
        choice % n
    }
    fn of<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())].clone()
    }
    fn up_to<T>(&mut self, n: usize, mut item: impl FnMut(&mut Tape) -> T) -> Vec<T> {
        (0..self.below(n + 1)).map(|_| item(self)).collect()
    }
    fn maybe<T>(&mut self, item: impl FnOnce(&mut Tape) -> T) -> Option<T> {
        (self.below(2) == 1).then(|| item(self))
    }
    fn dtype(&mut self) -> DType {
        self.of(&DType::ALL)
    }
    fn word(&mut self) -> String {
        self.of(&[
            "",
            "a",
            "conv1.0",
            "a b",
            "ü\"\\\n\t\u{1}",
            "map",
            "-",
            "_",
            "state",
            "0",
        ])
        .to_string()
    }
    fn symbol(&mut self) -> String {
        self.of(&["n", "batch", "i0", "min", "loop", "_s.1", "f32"])
            .to_string()
    }
    fn real(&mut self) -> f64 {
        let any =
            f64::from_bits((self.below(usize::MAX) as u64) << 32 | self.below(1 << 31) as u64);
        let any = if any.is_nan() { 0.1 } else { any };
        self.of(&[
            0.0,
            -0.0,
            1.0,
            -2.5,
            1e-7,
            1e300,
            5e-324,
            f64::INFINITY,
            f64::NEG_INFINITY,
            any,
        ])
    }
    fn integer(&mut self) -> i64 {
        self.of(&[0, 1, -1, 7, i64::MAX, i64::MIN])
    }
    fn scalar(&mut self) -> Scalar {
        match self.below(4) {
            0 => Scalar::Float(self.real()),
            1 => Scalar::Int(self.integer()),
            2 => Scalar::Bool(self.below(2) == 1),
            _ => Scalar::Float(f64::from_bits(self.of(&[
                f64::NAN.to_bits(),
                f64::NAN.to_bits() | 5,
                f64::NAN.to_bits() | 1 << 63,
            ]))),
        }
    }
    fn size(&mut self, depth: usize) -> SymExpr {
        let small = |t: &mut Tape| SymExpr::from(t.below(9) as i64 - 4);
        if depth == 0 {
            return match self.below(2) {
                0 => small(self),
                _ => SymExpr::symbol(self.symbol().as_str()),
            };
        }
        let (a, b) = (self.size(depth - 1), self.size(depth - 1));
        match self.below(8) {
            0 => a,
            1 => a + b,
            2 => a - b,
            3 => a * b,
            4 => a.floor_div(&b),
            5 => a.modulo(&b),
            6 => a.min_with(&b),
            _ => a.max_with(&b),
        }
    }
    fn expr(&mut self, depth: usize) -> Expr {
        if depth == 0 {
            return match self.below(3) {
                0 => Expr::In(self.below(4)),
                1 => Expr::Const(self.scalar()),
                _ => Expr::Index(self.size(1)),
            };
        }
        let (a, b) = (self.expr(depth - 1), self.expr(depth - 1));
        match self.below(6) {
            0 => a,
            1 => Expr::unary(self.of(&Unary::ALL), a),
            2 | 3 => Expr::binary(self.of(&Binary::ALL), a, b),
            4 => Expr::select(self.expr(0), a, b),
            _ => match self.below(2) {
                0 => a.cast(self.dtype()),
                _ => Expr::Uniform(a.into(), b.into()),
            },
        }
    }
    fn constant(&mut self) -> Tensor {
        let dtype = self.dtype();
        let n = 1 + self.below(4);
        let value = match dtype.is_float() {
            true => Scalar::Float(self.real()),
            false => Scalar::Int(i64::from(self.below(2) == 1)),
        };
        let mut t = Tensor::filled(dtype, &[n, self.below(3)], value);
        if !t.is_empty() {
            t.set(0, Scalar::Int(1));
        }
        t
    }
    fn container(&mut self, n: usize) -> Container {
        let shape = self.up_to(3, |t| t.size(1));
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.rotate_left(self.below(shape.len() + 1) % shape.len().max(1));
        Container {
            name: format!("{}{n}", self.word()),
            dtype: self.dtype(),
            layout: Layout::from_order(order).unwrap(),
            shape,
            storage: self.of(&[Storage::Global, Storage::Local]),
            lifetime: match self.below(4) {
                0 => Lifetime::Transient,
                1 => Lifetime::Input,
                2 => Lifetime::Parameter,
                _ => Lifetime::Constant(Arc::new(self.constant())),
            },
        }
    }
    fn id(&mut self, n: usize) -> ContainerId {
        ContainerId(self.below(n) as u32)
    }
    fn memlet(&mut self, n: usize) -> Memlet {
        Memlet {
            container: self.id(n),
            subset: self.up_to(3, |t| match t.below(3) {
                0 => Index::Data(t.below(3)),
                _ => Index::At(t.size(2)),
            }),
            fill: self.maybe(Tape::scalar),
            conflict: self.maybe(|t| t.of(&Reduction::ALL)),
        }
    }
    fn attr(&mut self) -> Attr {
        match self.below(9) {
            0 => Attr::Int(self.integer()),
            1 => Attr::Float(self.real()),
            2 => Attr::Bool(self.below(2) == 1),
            3 => Attr::Str(self.word()),
            4 => Attr::Ints(self.up_to(3, Tape::integer)),
            5 => Attr::Floats(self.up_to(3, Tape::real)),
            6 => Attr::Sizes(self.up_to(3, |t| t.size(1))),
            7 => Attr::DType(self.dtype()),
            _ => Attr::Expr(self.expr(2)),
        }
    }
    fn node(&mut self, n: usize, depth: usize) -> Node {
        let kind = match self.below(if depth > 0 { 3 } else { 2 }) {
            0 => NodeKind::Library(Library {
                op: self.word(),
                attrs: self
                    .up_to(3, |t| (t.word(), t.attr()))
                    .into_iter()
                    .collect(),
                inputs: self.up_to(3, |t| t.maybe(|t| t.id(n))),
                outputs: self.up_to(3, |t| t.maybe(|t| t.id(n))),
            }),
            1 => NodeKind::Tasklet(Tasklet {
                inputs: self.up_to(3, |t| t.memlet(n)),
                outputs: self.up_to(3, |t| (t.memlet(n), t.expr(4))),
            }),
            _ => NodeKind::Map(Map {
                params: self.up_to(3, |t| Param {
                    name: t.symbol().as_str().into(),
                    size: t.size(1),
                }),
                body: self.up_to(3, |t| t.node(n, depth - 1)),
                schedule: self.of(&[Schedule::Default, Schedule::Kernel, Schedule::Sequential]),
            }),
        };
        let origin = Origin {
            node: self.word(),
            module: self.word(),
            source: self.word(),
        };
        Node {
            kind,
            origin: Arc::new(origin),
            stage: self.of(&[Stage::Forward, Stage::Backward, Stage::Optimizer]),
        }
    }
    fn block(&mut self, n: usize, depth: usize) -> Block {
        match self.below(if depth > 0 { 3 } else { 1 }) {
            0 => Block::State(State {
                nodes: self.up_to(3, |t| t.node(n, 2)),
            }),
            1 => Block::Loop(Loop {
                symbol: self.symbol().as_str().into(),
                count: self.size(1),
                body: self.up_to(2, |t| t.block(n, depth - 1)),
            }),
            _ => Block::Branch(Branch {
                condition: self.id(n),
                then: self.up_to(2, |t| t.block(n, depth - 1)),
                otherwise: self.up_to(2, |t| t.block(n, depth - 1)),
            }),
        }
    }
    fn graph(&mut self) -> Graph {
        let n = 1 + self.below(4);
        Graph {
            name: self.word(),
            symbols: self.up_to(2, |t| t.symbol().as_str().into()),
            containers: (0..n).map(|i| self.container(i)).collect(),
            inputs: self.up_to(2, |t| t.id(n)),
            outputs: self.up_to(2, |t| Output {
                container: t.id(n),
                updates: t.maybe(|t| t.id(n)),
            }),
            body: self.up_to(3, |t| t.block(n, 2)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn parsing_undoes_printing(choices in prop::collection::vec(any::<u32>(), 0..600)) {
        let graph = Tape { choices, at: 0 }.graph();
        let text = graph.to_string();
        match parse(&text) {
            Ok(read) => {
                prop_assert_eq!(&read, &graph, "{}", text);
                // Equality of floats does not see the sign of zero; the text does.
                prop_assert_eq!(read.to_string(), text);
            }
            Err(e) => prop_assert!(false, "{}\n{}", e, text),
        }
    }
}
