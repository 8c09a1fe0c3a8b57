//! The reference interpreter on graphs small enough to compute by hand.

use graph::{
    Block, Branch, Builder, ContainerId, DType, Expr, Graph, Index, InterpretError, Library,
    LibraryMeaning, Lifetime, Loop, Map, Memlet, NoLibrary, Node, NodeKind, Origin, Param,
    Precision, Reduction, Refusal, Schedule, Stage, State, SymExpr, Tasklet, Tensor, interpret,
};
use std::collections::BTreeMap;
use std::sync::Arc;

fn s(name: &str) -> SymExpr {
    SymExpr::symbol(name)
}

fn origin(name: &str) -> Arc<Origin> {
    Arc::new(Origin {
        node: name.into(),
        ..Origin::default()
    })
}

fn build(g: &mut Graph, f: impl FnOnce(&mut Builder)) {
    let mut b = Builder::new(g, origin("node"), Stage::Forward);
    f(&mut b);
    let nodes = b.nodes;
    g.last_state().nodes.extend(nodes);
}

fn run(g: &Graph, inputs: &[Tensor]) -> Result<Vec<Tensor>, InterpretError> {
    interpret(g, inputs, &BTreeMap::new(), &NoLibrary, Precision::Double)
}

fn input(g: &mut Graph, name: &str, dtype: DType, shape: &[SymExpr]) -> ContainerId {
    g.add_input(name, dtype, shape.to_vec(), Lifetime::Input)
}

fn f32s(data: &[f64]) -> Tensor {
    Tensor::from_f64(DType::F32, &[data.len()], data.to_vec())
}

/// One-dimensional convolution, kernel 3, padding 1: a reduction with fill.
#[test]
fn convolution_with_padding() {
    let mut g = Graph::new("conv");
    g.symbols.push("n".into());
    let x = input(&mut g, "x", DType::F32, &[s("n")]);
    let w = input(&mut g, "w", DType::F32, &[3.into()]);
    let y = g.add_transient("y", DType::F32, vec![s("n")]);
    build(&mut g, |b| {
        b.map(&[("o", s("n")), ("r", 3.into())], |i| Tasklet {
            inputs: vec![
                Memlet::new(x, [i[0].clone() + i[1].clone() - 1]).or_fill(0.0),
                Memlet::new(w, [i[1].clone()]),
            ],
            outputs: vec![(
                Memlet::new(y, [i[0].clone()]).reduce(Reduction::Sum),
                Expr::In(0).mul(Expr::In(1)),
            )],
        });
    });
    g.add_output(y);
    let out = run(
        &g,
        &[f32s(&[1.0, 2.0, 3.0, 4.0]), f32s(&[1.0, 10.0, 100.0])],
    )
    .unwrap();
    assert_eq!(out, [f32s(&[210.0, 321.0, 432.0, 43.0])]);
}

#[test]
fn gather_and_scatter_through_data() {
    let mut g = Graph::new("embedding");
    let table = input(&mut g, "table", DType::F32, &[4.into()]);
    let ids = input(&mut g, "ids", DType::I64, &[3.into()]);
    let rows = g.add_transient("rows", DType::F32, vec![3.into()]);
    let counts = g.add_transient("counts", DType::F32, vec![4.into()]);
    build(&mut g, |b| {
        b.map(&[("i", 3.into())], |i| {
            let mut gathered = Memlet::new(table, [SymExpr::constant(0)]);
            gathered.subset = vec![Index::Data(1)];
            let mut counted = Memlet::new(counts, [SymExpr::constant(0)]).reduce(Reduction::Sum);
            counted.subset = vec![Index::Data(1)];
            Tasklet {
                inputs: vec![gathered, Memlet::new(ids, [i[0].clone()])],
                outputs: vec![
                    (Memlet::new(rows, [i[0].clone()]), Expr::In(0)),
                    (counted, Expr::float(1.0)),
                ],
            }
        });
    });
    g.add_output(rows);
    g.add_output(counts);
    let ids = |v: &[i64]| Tensor::from_i64(DType::I64, &[3], v.to_vec());
    let table = f32s(&[0.0, 10.0, 20.0, 30.0]);
    let out = run(&g, &[table.clone(), ids(&[3, 1, 3])]).unwrap();
    assert_eq!(
        out,
        [f32s(&[30.0, 10.0, 30.0]), f32s(&[0.0, 1.0, 0.0, 2.0])]
    );

    let error = run(&g, &[table, ids(&[0, 4, 0])]).unwrap_err().to_string();
    assert_eq!(error, "node: index [4] is outside `table` of shape [4]");
}

/// A fused softmax-like row kernel: inner maps consume what earlier ones made at the same point.
#[test]
fn a_fused_kernel_runs_its_body_in_sequence() {
    let mut g = Graph::new("rows");
    let x = input(&mut g, "x", DType::F32, &[2.into(), 3.into()]);
    let top = g.add_transient("top", DType::F32, vec![2.into()]);
    let y = g.add_transient("y", DType::F32, vec![2.into(), 3.into()]);
    let at = || [s("i"), s("j")];
    let mut inner = Builder::new(&mut g, origin("inner"), Stage::Forward);
    inner.map(&[("j", 3.into())], |_| Tasklet {
        inputs: vec![Memlet::new(x, at())],
        outputs: vec![(
            Memlet::new(top, [s("i")]).reduce(Reduction::Max),
            Expr::In(0),
        )],
    });
    inner.map(&[("j", 3.into())], |_| Tasklet {
        inputs: vec![Memlet::new(x, at()), Memlet::new(top, [s("i")])],
        outputs: vec![(Memlet::new(y, at()), Expr::In(0).sub(Expr::In(1)))],
    });
    let body = inner.nodes;
    build(&mut g, |b| {
        b.push(NodeKind::Map(Map {
            params: vec![Param {
                name: "i".into(),
                size: 2.into(),
            }],
            body,
            schedule: Schedule::Kernel,
        }));
    });
    g.add_output(y);
    let x = Tensor::from_f64(DType::F32, &[2, 3], vec![1.0, 5.0, 2.0, -3.0, -1.0, -2.0]);
    let out = run(&g, &[x]).unwrap();
    assert_eq!(out[0].to_f64(), [-4.0, 0.0, -3.0, -2.0, 0.0, -1.0]);
}

#[test]
fn declared_precision_rounds_containers_but_not_partial_sums() {
    let mut g = Graph::new("sum");
    g.symbols.push("n".into());
    let x = input(&mut g, "x", DType::BF16, &[s("n")]);
    let total = g.add_transient("total", DType::BF16, vec![]);
    build(&mut g, |b| {
        let shape = [s("n")];
        b.reduce_over(
            &shape,
            (&[0], false),
            total,
            (Reduction::Sum, Expr::In(0)),
            |i| vec![Memlet::new(x, [i[0].clone()])],
        );
    });
    g.add_output(total);
    // In bfloat16 256 + 1 is 256: rounding each partial sum would stop there.
    let ones = Tensor::from_f64(DType::BF16, &[300], vec![1.001; 300]);
    let exact = run(&g, std::slice::from_ref(&ones)).unwrap()[0].to_f64()[0];
    assert!((exact - 300.3).abs() < 1e-9);
    let rounded = interpret(
        &g,
        &[ones],
        &BTreeMap::new(),
        &NoLibrary,
        Precision::Declared,
    );
    assert_eq!(rounded.unwrap()[0].to_f64(), [300.0]);
}

#[test]
fn unset_elements_are_an_error_and_reductions_start_at_their_identity() {
    let mut g = Graph::new("partial");
    let y = g.add_transient("y", DType::F32, vec![3.into()]);
    let write = |g: &mut Graph, reduction: Option<Reduction>| {
        build(g, |b| {
            b.map(&[("i", 2.into())], |i| {
                let mut to = Memlet::new(y, [i[0].clone() * 2]);
                to.conflict = reduction;
                Tasklet {
                    inputs: vec![],
                    outputs: vec![(to, Expr::float(2.0))],
                }
            });
        });
    };
    write(&mut g, None);
    g.add_output(y);
    let error = run(&g, &[]).unwrap_err().to_string();
    assert_eq!(
        error,
        "graph outputs: element [1] of `y` is read but was never written"
    );

    g.last_state().nodes.clear();
    write(&mut g, Some(Reduction::Prod));
    assert_eq!(run(&g, &[]).unwrap(), [f32s(&[2.0, 1.0, 2.0])]);
}

#[test]
fn loops_carry_state_and_branches_choose() {
    let mut g = Graph::new("control");
    let flag = input(&mut g, "flag", DType::Bool, &[]);
    let sum = g.add_transient("sum", DType::I64, vec![]);
    let tasklet = |expr: Expr| {
        Block::State(State {
            nodes: vec![Node {
                kind: NodeKind::Tasklet(Tasklet {
                    inputs: vec![],
                    outputs: vec![(Memlet::new(sum, []).reduce(Reduction::Sum), expr)],
                }),
                origin: origin("add"),
                stage: Stage::Forward,
            }],
        })
    };
    g.body = vec![
        Block::Loop(Loop {
            symbol: "t".into(),
            count: 5.into(),
            body: vec![tasklet(Expr::Index(s("t")))],
        }),
        Block::Branch(Branch {
            condition: flag,
            then: vec![tasklet(Expr::int(100))],
            otherwise: vec![tasklet(Expr::int(-100))],
        }),
    ];
    g.add_output(sum);
    let of = |flag: i64| {
        let flag = Tensor::from_i64(DType::Bool, &[], vec![flag]);
        run(&g, &[flag]).unwrap()[0].to_i64()
    };
    assert_eq!((of(1), of(0)), (vec![110], vec![-90]));
}

struct Doubling;

impl LibraryMeaning for Doubling {
    fn evaluate(&self, l: &Library, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, Refusal> {
        let x = inputs[0].ok_or("needs an input")?;
        let n = if l.op == "double" { 1 } else { 2 };
        let data = x
            .to_f64()
            .iter()
            .map(|v| 2.0 * v)
            .collect::<Vec<_>>()
            .repeat(n);
        Ok(vec![Tensor::from_f64(x.dtype, &[data.len()], data)])
    }
    fn is_random(&self, _: &str) -> bool {
        false
    }
}

#[test]
fn library_nodes_mean_what_they_are_told_to() {
    let mut g = Graph::new("library");
    let x = input(&mut g, "x", DType::F32, &[2.into()]);
    let y = g.add_transient("y", DType::F32, vec![2.into()]);
    let node = |op: &str, x: Option<ContainerId>| Library {
        op: op.into(),
        attrs: BTreeMap::new(),
        inputs: vec![x],
        outputs: vec![Some(y)],
    };
    g.add_output(y);
    let mut result = |op: &str, x: Option<ContainerId>| {
        g.last_state().nodes.clear();
        build(&mut g, |b| b.library(node(op, x)));
        let inputs = [f32s(&[1.0, 2.0])];
        interpret(&g, &inputs, &BTreeMap::new(), &Doubling, Precision::Double)
    };
    assert_eq!(result("double", Some(x)).unwrap(), [f32s(&[2.0, 4.0])]);
    assert_eq!(
        result("double", None).unwrap_err().to_string(),
        "node: operator `double`: needs an input"
    );
    assert_eq!(
        result("quadruple", Some(x)).unwrap_err().to_string(),
        "node: operator `quadruple` gave f32 [4] for `y`, declared f32 [2]"
    );
}
