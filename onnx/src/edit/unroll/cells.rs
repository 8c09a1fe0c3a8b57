//! LSTM, GRU and RNN over a known length, one step after the other.
//!
//! Before: `Y, Y_h = GRU(X, W, R, B)` over 5 steps; after: one product of all steps with `W`, then for each step a
//! product with `R`, the gates, and the next state. Formulas: the ONNX standard's operators LSTM, GRU and RNN.
//! Legal where every sequence has the full length and the activations are the usual ones.

use super::*;
use crate::rewrite::patch::{int, ints};

/// Most hidden values of one cell.
const MOST_HIDDEN: i64 = 1 << 24;

/// What a cell is made of.
struct Cell<'n> {
    old: &'n NodeProto,
    kind: Kind,
    n_steps: i64,
    hidden: i64,
    /// Names of the node's inputs; empty for those that are absent.
    x: String,
    linear_before_reset: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Lstm,
    Gru,
    Rnn,
}

impl Kind {
    fn n_gates(self) -> i64 {
        match self {
            Kind::Lstm => 4,
            Kind::Gru => 3,
            Kind::Rnn => 1,
        }
    }

    fn activations(self) -> &'static [&'static str] {
        match self {
            Kind::Lstm => &["sigmoid", "tanh", "tanh"],
            Kind::Gru => &["sigmoid", "tanh"],
            Kind::Rnn => &["tanh"],
        }
    }
}

pub(super) fn write(cx: &mut Written, old: &NodeProto) -> Option<()> {
    let kind = match old.op_type.as_str() {
        "LSTM" => Kind::Lstm,
        "GRU" => Kind::Gru,
        "RNN" => Kind::Rnn,
        _ => return None,
    };
    let attributes = Attributes::new(old);
    let backward: &[bool] = match attributes.text("direction").unwrap_or("forward") {
        "forward" => &[false],
        "reverse" => &[true],
        "bidirectional" => &[false, true],
        _ => return None,
    };
    let unusual = attributes.float("clip").is_some()
        || attributes.int("input_forget").unwrap_or(0) != 0
        || !has_usual_activations(old, kind);
    if unusual {
        return None;
    }
    let batch_first = attributes.int("layout").unwrap_or(0) == 1;
    let x = given(old, 0)?;
    let shape = cx.facts.get(x)?.shape.clone()?;
    let n_steps = shape.get(usize::from(batch_first))?.as_const()?;
    if let Some(lengths) = given(old, 4) {
        let lengths = cx.facts.get(lengths)?.known_ints()?;
        if lengths.iter().any(|n| *n != n_steps) {
            return None;
        }
    }
    let recurrent = cx.facts.get(given(old, 2)?)?.shape.clone()?;
    let hidden = recurrent.get(2)?.as_const()?;
    if !(1..=MOST_TRIPS).contains(&n_steps) || !(1..=MOST_HIDDEN).contains(&hidden) {
        return None;
    }
    let name = |n: usize| old.output.get(n).filter(|o| !o.is_empty()).cloned();
    let base = old.output.iter().find(|o| !o.is_empty())?.clone();
    let x = match batch_first {
        true => cx.add(
            &format!("{base}.x"),
            "Transpose",
            &[x],
            vec![ints("perm", &[1, 0, 2])],
        ),
        false => x.to_string(),
    };
    let cell = Cell {
        old,
        kind,
        n_steps,
        hidden,
        x,
        linear_before_reset: attributes.int("linear_before_reset").unwrap_or(0) != 0,
    };
    let mut last: [Vec<String>; 2] = Default::default();
    let mut all = Vec::new();
    for (direction, backward) in backward.iter().enumerate() {
        let steps = cell.direction(cx, &base, direction as i64, *backward, batch_first)?;
        let end = steps.last()?.clone();
        last[0].push(end.0);
        last[1].extend(end.1);
        let mut steps: Vec<String> = steps.into_iter().map(|(h, _)| h).collect();
        if *backward {
            steps.reverse();
        }
        if name(0).is_some() {
            let stacked = cx.fresh(&format!("{base}.steps"));
            cx.stack(&stacked, &steps, 0);
            all.push(stacked);
        }
    }
    // Y is [steps, directions, batch, hidden], or [batch, steps, directions, hidden].
    if let Some(y) = name(0) {
        match batch_first {
            false => cx.stack(&y, &all, 1),
            true => {
                let stacked = cx.fresh(&format!("{base}.all"));
                cx.stack(&stacked, &all, 1);
                cx.push(
                    "Transpose",
                    &[&stacked],
                    &[&y],
                    vec![ints("perm", &[2, 0, 1, 3])],
                );
            }
        }
    }
    for (n, states) in last.iter().enumerate() {
        if let Some(y) = name(n + 1) {
            cx.stack(&y, states, i64::from(batch_first));
        }
    }
    Some(())
}

fn given(old: &NodeProto, n: usize) -> Option<&str> {
    let name = old.input.get(n)?.as_str();
    (!name.is_empty()).then_some(name)
}

fn has_usual_activations(old: &NodeProto, kind: Kind) -> bool {
    let given = old.attribute.iter().find(|a| a.name == "activations");
    let Some(given) = given else { return true };
    let usual = kind.activations().iter().cycle();
    let same = |(a, b): (&bytes::Bytes, &&str)| a.eq_ignore_ascii_case(b.as_bytes());
    given.strings.len() % kind.activations().len() == 0 && given.strings.iter().zip(usual).all(same)
}

/// Hidden state, and for LSTM the cell state.
type State = (String, Option<String>);

impl Cell<'_> {
    /// The states of one direction after each of its steps, in the order in which they are computed.
    fn direction(
        &self,
        cx: &mut Written,
        base: &str,
        direction: i64,
        backward: bool,
        batch_first: bool,
    ) -> Option<Vec<State>> {
        let n = format!("{base}.{direction}");
        let weight = |cx: &mut Written, at: usize, what: &str| -> Option<String> {
            let one = cx.at(&format!("{n}.{what}"), given(self.old, at)?, direction, 0);
            Some(cx.add(
                &format!("{n}.{what}.t"),
                "Transpose",
                &[&one],
                vec![ints("perm", &[1, 0])],
            ))
        };
        let (w, r) = (weight(cx, 1, "w")?, weight(cx, 2, "r")?);
        let gates = self.kind.n_gates() * self.hidden;
        let mut biases = None;
        if let Some(b) = given(self.old, 3) {
            let one = cx.at(&format!("{n}.b"), b, direction, 0);
            biases = Some(self.split(cx, &format!("{n}.b"), &one, 0, &[gates, gates]));
        }
        let mut projected = cx.add(&format!("{n}.xw"), "MatMul", &[&self.x, &w], Vec::new());
        // GRU with linear_before_reset adds a part of the second bias inside.
        let mut reset_bias = None;
        if let Some(pair) = &biases {
            projected = cx.add(
                &format!("{n}.xwb"),
                "Add",
                &[&projected, &pair[0]],
                Vec::new(),
            );
            if self.kind == Kind::Gru && self.linear_before_reset {
                let sizes = [2 * self.hidden, self.hidden];
                let parts = self.split(cx, &format!("{n}.rb"), &pair[1], 0, &sizes);
                let zeros = cx.add(
                    &format!("{n}.zero"),
                    "Sub",
                    &[&parts[1], &parts[1]],
                    Vec::new(),
                );
                let outside = vec![int("axis", 0)];
                let outside = cx.add(&format!("{n}.rb0"), "Concat", &[&parts[0], &zeros], outside);
                projected = cx.add(
                    &format!("{n}.xwbb"),
                    "Add",
                    &[&projected, &outside],
                    Vec::new(),
                );
                reset_bias = Some(parts[1].clone());
            } else {
                projected = cx.add(
                    &format!("{n}.xwbb"),
                    "Add",
                    &[&projected, &pair[1]],
                    Vec::new(),
                );
            }
        }
        let state = |cx: &mut Written, at: usize, what: &str| {
            let axis = i64::from(batch_first);
            given(self.old, at).map(|s| cx.at(&format!("{n}.{what}"), s, direction, axis))
        };
        let mut h = state(cx, 5, "h0");
        let mut c = match self.kind {
            Kind::Lstm => state(cx, 6, "c0"),
            _ => None,
        };
        let peepholes = match (self.kind, given(self.old, 7)) {
            (Kind::Lstm, Some(p)) => {
                let one = cx.at(&format!("{n}.p"), p, direction, 0);
                Some(self.split(cx, &format!("{n}.p"), &one, 0, &[self.hidden; 3]))
            }
            _ => None,
        };
        let both = [2 * self.hidden, self.hidden];
        let parts_of_r = match self.kind {
            Kind::Gru => self.split(cx, &format!("{n}.r"), &r, 1, &both),
            _ => Vec::new(),
        };
        let mut states = Vec::new();
        for step in 0..self.n_steps {
            let place = if backward {
                self.n_steps - 1 - step
            } else {
                step
            };
            let x = cx.at(&format!("{n}.x"), &projected, place, 0);
            let next = match self.kind {
                Kind::Lstm => self.lstm(
                    cx,
                    &n,
                    &x,
                    &r,
                    (h.as_deref(), c.as_deref()),
                    peepholes.as_deref(),
                ),
                Kind::Gru => self.gru(cx, &n, &x, &parts_of_r, h.as_deref(), reset_bias.as_deref()),
                Kind::Rnn => {
                    let sum = self.plus_recurrent(cx, &n, &x, &r, h.as_deref());
                    (cx.add(&format!("{n}.h"), "Tanh", &[&sum], Vec::new()), None)
                }
            };
            h = Some(next.0.clone());
            c.clone_from(&next.1);
            states.push(next);
            if cx.nodes.len() > MOST_NODES {
                return None;
            }
        }
        Some(states)
    }

    fn split(
        &self,
        cx: &mut Written,
        base: &str,
        x: &str,
        axis: i64,
        sizes: &[i64],
    ) -> Vec<String> {
        let pieces: Vec<String> = sizes
            .iter()
            .map(|_| cx.fresh(&format!("{base}.part")))
            .collect();
        let sizes = cx.ints(&format!("{base}.sizes"), sizes);
        let names: Vec<&str> = pieces.iter().map(String::as_str).collect();
        cx.push("Split", &[x, &sizes], &names, vec![int("axis", axis)]);
        pieces
    }

    fn plus_recurrent(
        &self,
        cx: &mut Written,
        n: &str,
        x: &str,
        r: &str,
        h: Option<&str>,
    ) -> String {
        let Some(h) = h else { return x.to_string() };
        let product = cx.add(&format!("{n}.hr"), "MatMul", &[h, r], Vec::new());
        cx.add(&format!("{n}.gates"), "Add", &[x, &product], Vec::new())
    }

    /// i, o, f, c: `C = f⊙c + i⊙g`, `H = o⊙tanh(C)`; without a state before, it is zero.
    fn lstm(
        &self,
        cx: &mut Written,
        n: &str,
        x: &str,
        r: &str,
        (h, c): (Option<&str>, Option<&str>),
        peepholes: Option<&[String]>,
    ) -> State {
        let gates = self.plus_recurrent(cx, n, x, r, h);
        let parts = self.split(cx, &format!("{n}.g"), &gates, 1, &[self.hidden; 4]);
        let peeped = |cx: &mut Written, gate: &str, at: usize, c: Option<&str>| match (peepholes, c)
        {
            (Some(p), Some(c)) => {
                let product = cx.add(&format!("{n}.pc"), "Mul", &[&p[at], c], Vec::new());
                cx.add(&format!("{n}.pg"), "Add", &[gate, &product], Vec::new())
            }
            _ => gate.to_string(),
        };
        let sigmoid = |cx: &mut Written, gate: &str| {
            cx.add(&format!("{n}.s"), "Sigmoid", &[gate], Vec::new())
        };
        let i = peeped(cx, &parts[0], 0, c);
        let i = sigmoid(cx, &i);
        let g = cx.add(&format!("{n}.t"), "Tanh", &[&parts[3]], Vec::new());
        let mut next = cx.add(&format!("{n}.ig"), "Mul", &[&i, &g], Vec::new());
        if let Some(c) = c {
            let f = peeped(cx, &parts[2], 2, Some(c));
            let f = sigmoid(cx, &f);
            let kept = cx.add(&format!("{n}.fc"), "Mul", &[&f, c], Vec::new());
            next = cx.add(&format!("{n}.c"), "Add", &[&kept, &next], Vec::new());
        }
        let o = peeped(cx, &parts[1], 1, Some(&next));
        let o = sigmoid(cx, &o);
        let shown = cx.add(&format!("{n}.tc"), "Tanh", &[&next], Vec::new());
        let h = cx.add(&format!("{n}.h"), "Mul", &[&o, &shown], Vec::new());
        (h, Some(next))
    }

    /// z, r, g: `H = g + z⊙(h − g)`.
    fn gru(
        &self,
        cx: &mut Written,
        n: &str,
        x: &str,
        rs: &[String],
        h: Option<&str>,
        reset_bias: Option<&str>,
    ) -> State {
        let both = [2 * self.hidden, self.hidden];
        let xs = self.split(cx, &format!("{n}.x"), x, 1, &both);
        let gates = self.plus_recurrent(cx, n, &xs[0], &rs[0], h);
        let gates = cx.add(&format!("{n}.s"), "Sigmoid", &[&gates], Vec::new());
        let gates = self.split(cx, &format!("{n}.g"), &gates, 1, &[self.hidden; 2]);
        let inner = match (h, self.linear_before_reset) {
            (Some(h), false) => {
                let reset = cx.add(&format!("{n}.rh"), "Mul", &[&gates[1], h], Vec::new());
                Some(cx.add(&format!("{n}.rhr"), "MatMul", &[&reset, &rs[1]], Vec::new()))
            }
            (h, true) => {
                let product =
                    h.map(|h| cx.add(&format!("{n}.hr"), "MatMul", &[h, &rs[1]], Vec::new()));
                let sum = match (product, reset_bias) {
                    (Some(p), Some(b)) => {
                        Some(cx.add(&format!("{n}.hrb"), "Add", &[&p, b], Vec::new()))
                    }
                    (p, b) => p.or(b.map(str::to_string)),
                };
                sum.map(|s| cx.add(&format!("{n}.rs"), "Mul", &[&gates[1], &s], Vec::new()))
            }
            (None, false) => None,
        };
        let sum = match inner {
            Some(inner) => cx.add(&format!("{n}.sum"), "Add", &[&xs[1], &inner], Vec::new()),
            None => xs[1].clone(),
        };
        let g = cx.add(&format!("{n}.t"), "Tanh", &[&sum], Vec::new());
        let next = match h {
            Some(h) => {
                let change = cx.add(&format!("{n}.d"), "Sub", &[h, &g], Vec::new());
                let change = cx.add(&format!("{n}.zd"), "Mul", &[&gates[0], &change], Vec::new());
                cx.add(&format!("{n}.h"), "Add", &[&g, &change], Vec::new())
            }
            None => {
                let lost = cx.add(&format!("{n}.zg"), "Mul", &[&gates[0], &g], Vec::new());
                cx.add(&format!("{n}.h"), "Sub", &[&g, &lost], Vec::new())
            }
        };
        (next, None)
    }
}
