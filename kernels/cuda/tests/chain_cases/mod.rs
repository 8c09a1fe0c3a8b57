//! Attention as tile chains in text form: forward, backward by rows, backward by columns.

#![allow(dead_code)]

use graph::{ContainerId, DType, Graph, Tensor};

/// What is added to or taken from the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Nothing.
    None,
    /// Row i sees the columns up to i.
    Causal,
    /// Row i sees the columns before i: the first one sees nothing, and is NaN.
    Before,
    /// Row i sees the columns up to i + 1.
    After,
    /// Row i sees the columns from i − 1 up to i + 1.
    Band,
    /// A container `[batch, rows, columns]` is added, some of it −∞.
    Added,
    /// A fifth of the probabilities is dropped.
    Dropout,
    /// The same, by random numbers whose places need 64 bits.
    FarDropout,
}

/// Sizes of one attention.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    pub dtype: &'static str,
    pub batch: i64,
    pub heads: i64,
    pub rows: i64,
    pub columns: i64,
    /// Widths of queries and keys, and of values.
    pub widths: [i64; 2],
    pub mask: Mask,
    pub is_backward: bool,
    /// Probabilities and their gradients are results.
    pub is_stored: bool,
}

struct Text<'c> {
    case: &'c Case,
    containers: String,
    nodes: String,
    inputs: Vec<String>,
    outputs: Vec<String>,
}

impl Text<'_> {
    fn declare(&mut self, name: &str, dtype: &str, sizes: &[i64], kind: &str) {
        let sizes: Vec<String> = sizes.iter().map(i64::to_string).collect();
        let c = self.case.name;
        self.containers += &format!("  %{c}_{name}: {dtype}[{}]{kind}\n", sizes.join(", "));
        match kind {
            " input" => self.inputs.push(format!("%{c}_{name}")),
            "" => self.outputs.push(format!("%{c}_{name}")),
            _ => (),
        }
    }

    /// A map over the scores' points and perhaps more dimensions.
    fn map(&mut self, stage: &str, params: &str, tasklet: &str) {
        let c = self.case;
        let sizes = [
            ("B", c.batch),
            ("H", c.heads),
            ("I", c.rows),
            ("J", c.columns),
            ("D", c.widths[0]),
            ("E", c.widths[1]),
        ];
        let mut params = params.to_string();
        for (letter, size) in sizes {
            params = params.replace(&format!("< {letter}"), &format!("< {size}"));
        }
        let tasklet = tasklet.replace('%', &format!("%{}_", c.name));
        self.nodes += &format!(
            "      map [{params}] sequential @\"{0}\"{stage} {{\n        tasklet {tasklet} @\"{0}\"{stage}\n      }}\n",
            c.name
        );
    }

    fn kernel(&mut self, stage: &str, members: impl FnOnce(&mut Self)) {
        let name = self.case.name;
        self.nodes += &format!("    map [] kernel @\"{name}\"{stage} {{\n");
        members(self);
        self.nodes += "    }\n";
    }

    /// The scores as an expression of inputs from `$first` on, and what these are.
    fn score(&self, tile: &str) -> (String, String) {
        let at = "[u, v, w, x]";
        let scaled = "$0 * 0.125";
        match self.case.mask {
            Mask::None | Mask::Dropout | Mask::FarDropout => {
                (scaled.into(), format!("%{tile}{at}"))
            }
            Mask::Causal => (
                format!("select({{x}} <= {{w}}, {scaled}, -inf)"),
                format!("%{tile}{at}"),
            ),
            Mask::Before => (
                format!("select({{x}} < {{w}}, {scaled}, -inf)"),
                format!("%{tile}{at}"),
            ),
            Mask::After => (
                format!("select({{x}} <= {{w + 1}}, {scaled}, -inf)"),
                format!("%{tile}{at}"),
            ),
            Mask::Band => (
                format!("select(and({{x}} <= {{w + 1}}, {{x}} > {{w - 2}}), {scaled}, -inf)"),
                format!("%{tile}{at}"),
            ),
            Mask::Added => (
                format!("({scaled} + $1)"),
                format!("%{tile}{at}, %mask[u, w, x]"),
            ),
        }
    }

    /// How many inputs the scores have.
    fn n(&self) -> usize {
        if self.case.mask == Mask::Added { 2 } else { 1 }
    }

    fn kept(&self, value: &str) -> String {
        let c = self.case;
        let n = self.n();
        let (j, i, h) = (c.columns, c.columns * c.rows, c.columns * c.rows * c.heads);
        match c.mask {
            Mask::Dropout | Mask::FarDropout => {
                let first = if c.mask == Mask::Dropout {
                    0
                } else {
                    1i64 << 33
                };
                format!(
                    "select(uniform(${} + 7, {{{first} + {h}*u + {i}*v + {j}*w + x}}) >= 0.2, {value} * 1.25, 0.0)",
                    n + 2
                )
            }
            _ => value.into(),
        }
    }

    fn seed(&self) -> &'static str {
        match self.case.mask {
            Mask::Dropout | Mask::FarDropout => ", %seed[]",
            _ => "",
        }
    }

    /// `exp(score − m) / l` with `m` and `l` after the scores' inputs.
    fn probability(&self, tile: &str) -> (String, String) {
        let (score, from) = self.score(tile);
        let n = self.n();
        (
            format!("exp({score} - ${n}) / ${}", n + 1),
            format!("{from}, %m[u, v, w], %l[u, v, w]{}", self.seed()),
        )
    }

    fn forward(&mut self) {
        let every = "u < B, v < H, w < I, x < J";
        self.kernel("", |t| {
            t.map(
                "",
                &format!("{every}, d < D"),
                "%t[u, v, w, x] (sum) = $0 * $1 from %q[u, w, v, d], %k[u, x, v, d]",
            );
            let (score, from) = t.score("t");
            t.map(
                "",
                every,
                &format!("%m[u, v, w] (max) = {score} from {from}"),
            );
            let n = t.n();
            t.map(
                "",
                every,
                &format!("%l[u, v, w] (sum) = exp({score} - ${n}) from {from}, %m[u, v, w]"),
            );
            let (p, from) = t.probability("t");
            let p = t.kept(&p);
            t.map("", every, &format!("%p[u, v, w, x] = {p} from {from}"));
            t.map(
                "",
                &format!("{every}, e < E"),
                "%o[u, w, v, e] (sum) = $0 * $1 from %p[u, v, w, x], %v[u, x, v, e]",
            );
        });
    }

    fn backward(&mut self, by_rows: bool) {
        let every = "u < B, v < H, w < I, x < J";
        let stage = " !backward";
        let of = if by_rows { "r" } else { "c" };
        self.kernel(stage, |t| {
            let (s, dp, ds, pr) = (format!("s{of}"), format!("dp{of}"), format!("ds{of}"), format!("pr{of}"));
            t.map(stage, &format!("{every}, d < D"), &format!("%{s}[u, v, w, x] (sum) = $1 * $0 from %k[u, x, v, d], %q[u, w, v, d]"));
            t.map(stage, &format!("{every}, e < E"), &format!("%{dp}[u, v, w, x] (sum) = $0 * $1 from %go[u, w, v, e], %v[u, x, v, e]"));
            let (p, from) = t.probability(&s);
            let n = t.n() + 2 + usize::from(!t.seed().is_empty());
            let from = format!("{from}, %{dp}[u, v, w, x]");
            let back = t.kept(&format!("${n}"));
            if by_rows {
                t.map(stage, every, &format!("%delta[u, v, w] (sum) = {back} * ({p}) from {from}"));
            } else {
                let kept = t.kept(&p);
                t.map(stage, every, &format!("%{pr}[u, v, w, x] = {kept} from {from}"));
            }
            t.map(stage, every, &format!("%{ds}[u, v, w, x] = ({p}) * ({back} - ${}) * 0.125 from {from}, %delta[u, v, w]", n + 1));
            if by_rows {
                t.map(stage, &format!("{every}, d < D"), &format!("%gq[u, w, v, d] (sum) = $0 * $1 from %{ds}[u, v, w, x], %k[u, x, v, d]"));
            } else {
                t.map(stage, &format!("{every}, d < D"), &format!("%gk[u, x, v, d] (sum) = $1 * $0 from %q[u, w, v, d], %{ds}[u, v, w, x]"));
                t.map(stage, &format!("{every}, e < E"), &format!("%gv[u, x, v, e] (sum) = $0 * $1 from %{pr}[u, v, w, x], %go[u, w, v, e]"));
            }
        });
    }

    fn containers(&mut self) {
        let c = *self.case;
        let [d, e] = c.widths;
        let (b, h, i, j) = (c.batch, c.heads, c.rows, c.columns);
        self.declare("q", c.dtype, &[b, i, h, d], " input");
        self.declare("k", c.dtype, &[b, j, h, d], " input");
        self.declare("v", c.dtype, &[b, j, h, e], " input");
        match c.mask {
            Mask::Added => self.declare("mask", "f32", &[b, i, j], " input"),
            Mask::Dropout | Mask::FarDropout => self.declare("seed", "i64", &[], " input"),
            _ => (),
        }
        let mut tiles = vec!["t", "p"];
        self.declare("m", "f32", &[b, h, i], "");
        self.declare("l", "f32", &[b, h, i], "");
        self.declare("o", c.dtype, &[b, i, h, e], "");
        if c.is_backward {
            self.declare("go", c.dtype, &[b, i, h, e], " input");
            self.declare("delta", "f32", &[b, h, i], "");
            self.declare("gq", c.dtype, &[b, i, h, d], "");
            self.declare("gk", c.dtype, &[b, j, h, d], "");
            self.declare("gv", c.dtype, &[b, j, h, e], "");
            tiles.extend(["sr", "dpr", "dsr", "sc", "dpc", "dsc", "prc"]);
        }
        for tile in tiles {
            let is_stored = c.is_stored && ["p", "dsr"].contains(&tile);
            let kind = if is_stored { "" } else { " local" };
            self.declare(tile, c.dtype, &[b, h, i, j], kind);
        }
    }
}

/// All cases in one graph, since compiling dominates.
pub fn graph(cases: &[Case]) -> Graph {
    let (mut containers, mut nodes) = (String::new(), String::new());
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for case in cases {
        let mut text = Text {
            case,
            containers: String::new(),
            nodes: String::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        text.containers();
        text.forward();
        if case.is_backward {
            text.backward(true);
            text.backward(false);
        }
        containers += &text.containers;
        nodes += &text.nodes;
        inputs.append(&mut text.inputs);
        outputs.append(&mut text.outputs);
    }
    let text = format!(
        "graph \"chains\" {{\n{containers}  inputs {}\n  state {{\n{nodes}  }}\n  outputs {}\n}}\n",
        inputs.join(", "),
        outputs.join(", ")
    );
    graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Numbers in [-2, 2); in a mask, a quarter is −∞ after the first column; the seed is 5.
pub fn input(graph: &Graph, id: ContainerId) -> Tensor {
    let c = graph.container(id);
    let sizes = c.shape.iter().map(|s| s.as_const().unwrap() as usize);
    let shape: Vec<usize> = sizes.collect();
    if c.dtype == DType::I64 {
        return Tensor::from_i64(DType::I64, &shape, vec![5]);
    }
    let unit = |i: usize| f64::from(graph::philox::uniform(u64::from(id.0), i as u64));
    let columns = shape.last().copied().unwrap_or(1);
    let number = |i: usize| {
        let masked = c.name.ends_with("mask") && !i.is_multiple_of(columns) && unit(i) < 0.25;
        if masked {
            f64::NEG_INFINITY
        } else {
            c.dtype.round(unit(i) * 4.0 - 2.0)
        }
    };
    Tensor::from_f64(
        c.dtype,
        &shape,
        (0..shape.iter().product()).map(number).collect(),
    )
}
