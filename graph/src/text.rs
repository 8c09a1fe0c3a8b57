//! The text form of a graph: readable, one node a line, made for `diff`; [`crate::parse`] reads it.
//!
//! ```text
//! graph "toy" {
//!   symbols batch
//!   %x: f32[batch, 8] input
//!   %w: f32[4, 8] <1,0> parameter
//!   %half: f32[] constant [0.5]
//!   %y: f32[batch, 4]
//!   %z: f32[batch, 4] local
//!   inputs %x, %w
//!   state {
//!     %y = linear(%x, %w, -) {bias=false} @ "fc" in "model.fc" at "net.py:3"
//!     map [n < batch, k < 4] kernel {
//!       tasklet %z[n, k] (sum) = $0 * select($1 > 0.0, $1, 0.0) from %x[n, 2*k - 1 | 0.0], %y[n, k] !backward
//!     }
//!   }
//!   outputs %z -> %w
//! }
//! ```
//!
//! A container is `%name: type[sizes]`, then its layout unless it is row-major, its storage if it is
//! local, its lifetime unless it is transient. `-` is an absent operand. In a tasklet `$i` is input `i`,
//! as a value or as an index; `{2*k + 1}` is an integer from map parameters; `| 0.0` is a fill;
//! `(sum)` a conflict resolution. `@ node in module at source` is an origin, `!backward` a stage.
//! The input that an output replaces follows `->`.
//!
//! Numbers are written so that they are read back bit by bit. Constants of at most
//! [`INLINE_ELEMENTS`] elements, or with all elements equal, are in the text; larger ones
//! appear as `#` and a hash of their content. [`Graph::large_constants`] returns their values, which
//! [`crate::parse_with`] takes.

use crate::expr::Expr;
use crate::function::Binary;
use crate::graph::{
    Attr, Block, Container, ContainerId, Graph, Index, Library, Lifetime, Memlet, Node, NodeKind,
    Origin, Schedule, Stage, Tasklet,
};
use crate::layout::{Layout, Storage};
use crate::scalar::Scalar;
use crate::size::SymExpr;
use crate::tensor::{Tensor, Values};
use std::collections::BTreeMap;
use std::fmt::{self, Display, Write};
use std::sync::Arc;

/// Largest number of elements of a constant written out in the text.
pub const INLINE_ELEMENTS: usize = 64;

/// Values of large constants by the hash that stands for them in the text.
pub type ConstantTable = BTreeMap<String, Arc<Tensor>>;

impl Graph {
    /// The constants that the text form leaves out, by content hash (32 hexadecimal digits).
    pub fn large_constants(&self) -> ConstantTable {
        let mut table = ConstantTable::new();
        for container in &self.containers {
            if let Lifetime::Constant(value) = &container.lifetime
                && !is_inline(value)
            {
                table.insert(value.content_hash(), value.clone());
            }
        }
        table
    }
}

impl Tensor {
    /// FNV-1a (128 bits) of type, shape and elements, as 32 hexadecimal digits.
    pub fn content_hash(&self) -> String {
        let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        let mut feed = |bytes: &[u8]| {
            for b in bytes {
                hash ^= u128::from(*b);
                hash = hash.wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
            }
        };
        feed(self.dtype.name().as_bytes());
        for n in &self.shape {
            feed(&(*n as u64).to_le_bytes());
        }
        match &self.values {
            Values::Float(v) => v.iter().for_each(|x| feed(&x.to_bits().to_le_bytes())),
            Values::Int(v) => v.iter().for_each(|x| feed(&x.to_le_bytes())),
        }
        format!("{hash:032x}")
    }
}

impl Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Printer {
            graph: self,
            out: String::new(),
            indent: 0,
        };
        text.graph();
        f.write_str(&text.out)
    }
}

impl Display for Expr {
    /// `$0 * tanh({i} + 1.5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        expr(&mut out, self, 0);
        f.write_str(&out)
    }
}

impl Display for Scalar {
    /// Writes the number as in tasklets: reals always have a point or an exponent, or are `inf` or `nan`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Float(x) => f.write_str(&float(*x)),
            Scalar::Int(i) => write!(f, "{i}"),
            Scalar::Bool(b) => write!(f, "{b}"),
        }
    }
}

impl Node {
    /// The text of this node of `graph`, for reports: one line, or several for a map.
    pub fn text(&self, graph: &Graph) -> String {
        let mut text = Printer {
            graph,
            out: String::new(),
            indent: 0,
        };
        text.node(self);
        text.out
    }
}

impl Memlet {
    /// The text of this access to a container of `graph`: `%x[i, 2*j | 0.0]`.
    pub fn text(&self, graph: &Graph) -> String {
        let text = Printer {
            graph,
            out: String::new(),
            indent: 0,
        };
        text.memlet(self)
    }
}

fn is_inline(value: &Tensor) -> bool {
    value.len() <= INLINE_ELEMENTS || splat(value).is_some()
}

/// The value of all elements, if there are several and they are equal.
fn splat(value: &Tensor) -> Option<Scalar> {
    let first = (value.len() > 1).then(|| value.at(0))?;
    (1..value.len())
        .all(|i| value.at(i) == first)
        .then_some(first)
}

/// A real number that reads back to the same bits.
fn float(x: f64) -> String {
    match x {
        x if x.to_bits() == f64::NAN.to_bits() => "nan".into(),
        x if x.is_nan() => format!("nan({:#x})", x.to_bits()),
        x => format!("{x:?}"),
    }
}

/// Whether a name can stand without quotes.
pub(crate) fn is_identifier(name: &str) -> bool {
    let mut chars = name.chars();
    chars
        .next()
        .is_some_and(|c| c == '_' || c.is_ascii_alphabetic())
        && chars.all(|c| c == '_' || c == '.' || c.is_ascii_alphanumeric())
}

fn name(name: &str) -> String {
    if is_identifier(name) {
        name.to_string()
    } else {
        format!("{name:?}")
    }
}

fn joined<T>(items: &[T], one: impl Fn(&T) -> String) -> String {
    items.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn sizes(shape: &[SymExpr]) -> String {
    joined(shape, SymExpr::to_string)
}

/// `expression`, in parentheses if it binds less tightly than `above`.
fn expr(out: &mut String, e: &Expr, above: u8) {
    let call = |out: &mut String, function: &str, operands: &[&Expr]| {
        out.push_str(function);
        out.push('(');
        for (i, operand) in operands.iter().enumerate() {
            out.push_str(if i > 0 { ", " } else { "" });
            expr(out, operand, 0);
        }
        out.push(')');
    };
    match e {
        Expr::Const(s) => out.push_str(&s.to_string()),
        Expr::In(i) => out.push_str(&format!("${i}")),
        Expr::Index(i) => out.push_str(&format!("{{{i}}}")),
        Expr::Unary(f, a) => call(out, f.name(), &[a]),
        Expr::Cast(d, a) => call(out, d.name(), &[a]),
        Expr::Uniform(k, n) => call(out, "uniform", &[k, n]),
        Expr::Select(c, a, b) => call(out, "select", &[c, a, b]),
        Expr::Binary(f, a, b) => match infix(*f) {
            None => call(out, f.name(), &[a, b]),
            Some((sign, level)) => {
                let parentheses = level < above;
                out.push_str(if parentheses { "(" } else { "" });
                // Left-associative; a comparison's operands are never bare comparisons.
                expr(out, a, if level == 1 { 2 } else { level });
                out.push_str(&format!(" {sign} "));
                expr(out, b, level + 1);
                out.push_str(if parentheses { ")" } else { "" });
            }
        },
    }
}

/// Sign and tightness of functions written between their operands.
pub(crate) fn infix(f: Binary) -> Option<(&'static str, u8)> {
    Some(match f {
        Binary::Lt => ("<", 1),
        Binary::Le => ("<=", 1),
        Binary::Gt => (">", 1),
        Binary::Ge => (">=", 1),
        Binary::Eq => ("==", 1),
        Binary::Ne => ("!=", 1),
        Binary::Add => ("+", 2),
        Binary::Sub => ("-", 2),
        Binary::Mul => ("*", 3),
        Binary::Div => ("/", 3),
        _ => return None,
    })
}

struct Printer<'g> {
    graph: &'g Graph,
    out: String,
    indent: usize,
}

impl Printer<'_> {
    fn line(&mut self, text: &str) {
        for _ in 0..self.indent {
            self.out.push_str("  ");
        }
        self.out.push_str(text);
        self.out.push('\n');
    }

    fn open(&mut self, text: &str) {
        self.line(&format!("{text} {{"));
        self.indent += 1;
    }

    fn close(&mut self) {
        self.indent -= 1;
        self.line("}");
    }

    fn graph(&mut self) {
        let g = self.graph;
        self.open(&format!("graph {:?}", g.name));
        if !g.symbols.is_empty() {
            let symbols = joined(&g.symbols, |s| s.to_string());
            self.line(&format!("symbols {symbols}"));
        }
        for c in &g.containers {
            self.container(c);
        }
        if !g.inputs.is_empty() {
            let inputs = joined(&g.inputs, |id| self.id(*id));
            self.line(&format!("inputs {inputs}"));
        }
        self.blocks(&g.body);
        if !g.outputs.is_empty() {
            let outputs = joined(&g.outputs, |o| match o.updates {
                None => self.id(o.container),
                Some(u) => format!("{} -> {}", self.id(o.container), self.id(u)),
            });
            self.line(&format!("outputs {outputs}"));
        }
        self.close();
    }

    /// The container's name; an id the graph does not have prints as `%?id`, which does not parse.
    fn id(&self, id: ContainerId) -> String {
        match self.graph.containers.get(id.idx()) {
            Some(c) => format!("%{}", name(&c.name)),
            None => format!("%?{}", id.0),
        }
    }

    fn optional(&self, id: &Option<ContainerId>) -> String {
        id.map_or("-".to_string(), |id| self.id(id))
    }

    fn container(&mut self, c: &Container) {
        let mut text = format!("%{}: {}[{}]", name(&c.name), c.dtype, sizes(&c.shape));
        if c.layout != Layout::row_major(c.shape.len()) {
            text.push_str(&format!(" {}", c.layout));
        }
        if c.storage == Storage::Local {
            text.push_str(" local");
        }
        match &c.lifetime {
            Lifetime::Transient => {}
            Lifetime::Input => text.push_str(" input"),
            Lifetime::Parameter => text.push_str(" parameter"),
            Lifetime::Constant(value) => {
                text.push_str(" constant ");
                text.push_str(&constant(value, c));
            }
        }
        self.line(&text);
    }

    fn blocks(&mut self, blocks: &[Block]) {
        for block in blocks {
            match block {
                Block::State(s) => {
                    self.open("state");
                    s.nodes.iter().for_each(|n| self.node(n));
                }
                Block::Loop(l) => {
                    self.open(&format!("loop {} < {}", l.symbol, l.count));
                    self.blocks(&l.body);
                }
                Block::Branch(b) => {
                    self.open(&format!("branch {}", self.id(b.condition)));
                    self.blocks(&b.then);
                    self.indent -= 1;
                    self.open("} else");
                    self.blocks(&b.otherwise);
                }
            }
            self.close();
        }
    }

    fn node(&mut self, node: &Node) {
        let mark = annotation(&node.origin, node.stage);
        match &node.kind {
            NodeKind::Library(l) => {
                let text = self.library(l);
                self.line(&format!("{text}{mark}"));
            }
            NodeKind::Tasklet(t) => {
                let text = self.tasklet(t);
                self.line(&format!("{text}{mark}"));
            }
            NodeKind::Map(m) => {
                let params = joined(&m.params, |p| format!("{} < {}", p.name, p.size));
                let schedule = match m.schedule {
                    Schedule::Default => "",
                    Schedule::Kernel => " kernel",
                    Schedule::Sequential => " sequential",
                };
                self.open(&format!("map [{params}]{schedule}{mark}"));
                m.body.iter().for_each(|n| self.node(n));
                self.close();
            }
        }
    }

    fn library(&self, l: &Library) -> String {
        let outputs = joined(&l.outputs, |id| self.optional(id));
        let inputs = joined(&l.inputs, |id| self.optional(id));
        let space = if l.outputs.is_empty() { "" } else { " " };
        let mut text = format!("{outputs}{space}= {}({inputs})", name(&l.op));
        if !l.attrs.is_empty() {
            let attrs: Vec<_> = l.attrs.iter().collect();
            let attrs = joined(&attrs, |(key, value)| {
                format!("{}={}", name(key), attr(value))
            });
            text.push_str(&format!(" {{{attrs}}}"));
        }
        text
    }

    fn tasklet(&self, t: &Tasklet) -> String {
        let mut text = "tasklet".to_string();
        if !t.outputs.is_empty() {
            let outputs = joined(&t.outputs, |(m, e)| format!("{} = {e}", self.memlet(m)));
            text.push_str(&format!(" {outputs}"));
        }
        if !t.inputs.is_empty() {
            let inputs = joined(&t.inputs, |m| self.memlet(m));
            text.push_str(&format!(" from {inputs}"));
        }
        text
    }

    fn memlet(&self, m: &Memlet) -> String {
        let subset = joined(&m.subset, |i| match i {
            Index::At(e) => e.to_string(),
            Index::Data(i) => format!("${i}"),
        });
        let mut text = format!("{}[{subset}", self.id(m.container));
        if let Some(fill) = m.fill {
            text.push_str(if m.subset.is_empty() { "| " } else { " | " });
            text.push_str(&fill.to_string());
        }
        text.push(']');
        if let Some(r) = m.conflict {
            text.push_str(&format!(" ({})", r.name()));
        }
        text
    }
}

fn annotation(origin: &Origin, stage: Stage) -> String {
    let mut text = String::new();
    if *origin != Origin::default() {
        let _ = write!(text, " @ {:?}", origin.node);
        if !origin.module.is_empty() {
            let _ = write!(text, " in {:?}", origin.module);
        }
        if !origin.source.is_empty() {
            let _ = write!(text, " at {:?}", origin.source);
        }
    }
    text.push_str(match stage {
        Stage::Forward => "",
        Stage::Backward => " !backward",
        Stage::Optimizer => " !optimizer",
    });
    text
}

fn attr(value: &Attr) -> String {
    match value {
        Attr::Int(i) => i.to_string(),
        Attr::Float(x) => float(*x),
        Attr::Bool(b) => b.to_string(),
        Attr::Str(s) => format!("{s:?}"),
        Attr::Ints(v) => format!("[{}]", joined(v, i64::to_string)),
        Attr::Floats(v) => format!("floats[{}]", joined(v, |x| float(*x))),
        Attr::Sizes(v) => format!("sizes[{}]", sizes(v)),
        Attr::DType(d) => d.to_string(),
        Attr::Expr(e) => format!("({e})"),
    }
}

/// `f32[2, 3] [1.0, …]`. The type is written only if it is not the container's.
fn constant(value: &Tensor, container: &Container) -> String {
    let shape: Vec<SymExpr> = value.shape.iter().map(|n| SymExpr::from(*n)).collect();
    let mut text = String::new();
    if value.dtype != container.dtype || shape != container.shape {
        text = format!("{}[{}] ", value.dtype, sizes(&shape));
    }
    let element = |i: usize| value.at(i).to_string();
    if let Some(all) = splat(value) {
        text.push_str(&format!("all {all}"));
    } else if is_inline(value) {
        let elements: Vec<_> = (0..value.len()).map(element).collect();
        text.push_str(&format!("[{}]", elements.join(", ")));
    } else {
        text.push_str(&format!("#{}", value.content_hash()));
    }
    text
}
