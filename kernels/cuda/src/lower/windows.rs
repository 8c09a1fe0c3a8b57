//! Windows that are added to their places, as sums that each place gathers.
//!
//! Before: `out[2*p + r - 1 | dropped] (+)= y[p] * w[r]`, of which no thread can own an element: one has
//! to run all p and r.
//! After: `out[2*j + h] = sum over t of y[j + (h + 1)/2 - t | 0] * w[(h + 1)%2 + 2*t | 0]`, and 0 for what
//! lies outside of either, so that an infinite factor of no term makes no NaN.
//! Legal: for each place `2*j + h` the terms are those p and r that reach it; r is then
//! `(h + 1)%2 + 2*t`, which gives p, and what lies outside of y or w is no term. Each place is made
//! once, so it needs no zero beforehand, and no wider array where it is of 16 bits. For the gradient of a
//! depthwise convolution, the result is moved once instead of four times.

use graph::{
    Expr, Graph, Index, Map, Memlet, Node, NodeKind, Param, Reduction, SymExpr, Symbol, Tasklet,
};

/// The map of a single sum with every window of its result gathered; `None` if it has none, or one of
/// another form.
pub(super) fn gathered(graph: &Graph, node: &Node) -> Option<Node> {
    let NodeKind::Map(map) = &node.kind else {
        return None;
    };
    let [body] = map.body.as_slice() else {
        return None;
    };
    let NodeKind::Tasklet(tasklet) = &body.kind else {
        return None;
    };
    let [(out, _)] = tasklet.outputs.as_slice() else {
        return None;
    };
    if out.conflict != Some(Reduction::Sum) {
        return None;
    }
    let (mut map, mut tasklet, body) = (map.clone(), tasklet.clone(), body.clone());
    let is_window = |i: &Index| matches!(i, Index::At(e) if e.symbols().len() > 1);
    let windows = (0..out.subset.len()).filter(|d| is_window(&out.subset[*d]));
    let windows: Vec<usize> = windows.collect();
    for dim in &windows {
        gather(graph, &mut map, &mut tasklet, *dim)?;
    }
    tasklet.outputs[0].0.fill = None;
    let inside = |n: &Memlet| n.subset.iter().all(|i| !matches!(i, Index::Data(_)));
    if windows.is_empty() || !inside(&tasklet.outputs[0].0) {
        return None;
    }
    map.body = vec![Node {
        kind: NodeKind::Tasklet(tasklet),
        ..body
    }];
    Some(Node {
        kind: NodeKind::Map(map),
        ..node.clone()
    })
}

/// `stride * position + tap - pad` along a dimension.
struct Window {
    position: Symbol,
    stride: i64,
    tap: Symbol,
    dilation: i64,
    pad: i64,
}

impl Window {
    fn of(index: &Index, map: &Map, inputs: &[Memlet]) -> Option<Window> {
        let Index::At(e) = index else { return None };
        let (terms, offset) = e.as_affine()?;
        let [(a, of_a), (b, of_b)] = terms.as_slice() else {
            return None;
        };
        let window = |position: &Symbol, stride, tap: &Symbol, dilation| Window {
            position: position.clone(),
            stride,
            tap: tap.clone(),
            dilation,
            pad: -offset,
        };
        let size = |s: &Symbol| size_of(map, s);
        // The positions are those of the larger array, the taps of the smaller; either way is right.
        let found = match size(a)? >= size(b)? {
            true => window(a, *of_a, b, *of_b),
            false => window(b, *of_b, a, *of_a),
        };
        let known = found.pad >= 0
            && found.stride >= 1
            && (found.dilation == 1 || found.stride == 1 && found.dilation > 1);
        // Neither is in the other's array, so what lies outside of one is no term.
        let apart = |m: &Memlet| !(mentions(m, &found.position) && mentions(m, &found.tap));
        (known && inputs.iter().all(apart)).then_some(found)
    }
}

fn size_of(map: &Map, name: &Symbol) -> Option<i64> {
    let param = map.params.iter().find(|p| p.name == *name)?;
    param.size.as_const()
}

fn mentions(m: &Memlet, name: &Symbol) -> bool {
    let has = |i: &Index| matches!(i, Index::At(e) if e.mentions(name));
    m.subset.iter().any(has)
}

/// Whether a value is computed from a parameter itself.
fn computes_with(value: &Expr, name: &Symbol) -> bool {
    let mut found = false;
    value.visit(&mut |e| found |= matches!(e, Expr::Index(index) if index.mentions(name)));
    found
}

/// Gathers along one dimension of the result.
fn gather(graph: &Graph, map: &mut Map, tasklet: &mut Tasklet, dim: usize) -> Option<()> {
    let (out, _) = &tasklet.outputs[0];
    let window = Window::of(&out.subset[dim], map, &tasklet.inputs)?;
    let shape = |m: &Memlet, d: usize| graph.container(m.container).shape[d].as_const();
    let (places, taps) = (shape(out, dim)?, size_of(map, &window.tap)?);
    let elsewhere = |(d, i): (usize, &Index)| {
        let has = |s: &Symbol| matches!(i, Index::At(e) if e.mentions(s));
        d != dim && (has(&window.position) || has(&window.tap))
    };
    // The map must reach past no array but by these two.
    if places % window.stride != 0 || out.subset.iter().enumerate().any(elsewhere) {
        return None;
    }
    for name in [&window.position, &window.tap] {
        is_whole(graph, map, &tasklet.inputs, name)?;
        // Both mean something else afterwards.
        if computes_with(&tasklet.outputs[0].1, name) {
            return None;
        }
    }
    let phase = Symbol::new(format!("{}_phase", window.position));
    let [p, t, h] = [&window.position, &window.tap, &phase].map(SymExpr::from);
    let (position, tap, place) = if window.stride == 1 {
        let position = p.clone() + window.pad - t.clone() * window.dilation;
        (position, t, p)
    } else {
        let stride = SymExpr::constant(window.stride);
        let from = h.clone() + window.pad;
        let position = p.clone() + from.floor_div(&stride) - t.clone();
        let tap = from.modulo(&stride) + t * window.stride;
        (position, tap, p * window.stride + h)
    };
    let replaced = |s: &Symbol| match s {
        s if *s == window.position => Some(position.clone()),
        s if *s == window.tap => Some(tap.clone()),
        _ => None,
    };
    for m in &mut tasklet.inputs {
        if mentions(m, &window.position) || mentions(m, &window.tap) {
            for index in &mut m.subset {
                if let Index::At(e) = index {
                    *e = e.substitute(&replaced);
                }
            }
            *m = m.clone().or_fill(0.0);
        }
    }
    let positions = size_of(map, &window.position)?;
    let mut is_term = vec![(position.clone(), positions, true)];
    if taps % window.stride != 0 {
        is_term.push((tap.clone(), taps, false));
    }
    let (out, value) = &mut tasklet.outputs[0];
    for (index, size, below) in is_term {
        let index = Expr::Index(index);
        let mut inside = index.clone().lt(Expr::int(size));
        if below {
            inside = inside.and(index.ge(Expr::int(0)));
        }
        *value = Expr::select(inside, value.clone(), Expr::float(0.0));
    }
    out.subset[dim] = Index::At(place);
    let resized = |name: &Symbol, size: i64| Param {
        name: name.clone(),
        size: SymExpr::constant(size),
    };
    let at = |name: &Symbol| map.params.iter().position(|p| p.name == *name);
    let (at_position, at_tap) = (at(&window.position)?, at(&window.tap)?);
    let stride = window.stride;
    map.params[at_tap] = resized(&window.tap, (taps + stride - 1) / stride);
    map.params[at_position] = resized(&window.position, places / stride);
    if stride > 1 {
        map.params.insert(at_position + 1, resized(&phase, stride));
    }
    Some(())
}

/// Checks that `name` spans one whole dimension of one array, and nothing else.
fn is_whole(graph: &Graph, map: &Map, inputs: &[Memlet], name: &Symbol) -> Option<()> {
    let mut found = None;
    for m in inputs {
        let zero = m.fill.is_none_or(|fill| fill.as_f64() == 0.0);
        for (d, index) in m.subset.iter().enumerate() {
            let Index::At(e) = index else { return None };
            if !e.mentions(name) {
                continue;
            }
            let size = graph.container(m.container).shape[d].as_const();
            let whole = e.as_symbol() == Some(name) && size == size_of(map, name) && zero;
            if !whole || found.replace(d).is_some() {
                return None;
            }
        }
    }
    found.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The map that gathers a depthwise sum of windows with stride 2 whose value is `value`.
    fn of(value: &str) -> Option<Node> {
        let text = format!(
            "graph \"g\" {{
               %y: f32[8, 3] input
               %w: f32[3, 3] input
               %out: f32[16, 3]
               inputs %y, %w
               state {{
                 map [p < 8, c < 3, r < 3] {{
                   tasklet %out[2*p + r - 1, c | 0.0] (sum) = {value} from %y[p, c], %w[r, c]
                 }}
               }}
               outputs %out
             }}"
        );
        let graph = graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let node = &graph.single_state().expect("one state").nodes[0];
        gathered(&graph, node)
    }

    #[test]
    fn what_is_computed_from_positions_is_not_gathered() {
        assert!(of("$0 * $1").is_some());
        assert!(of("$0 * $1 * {c}").is_some());
        for replaced in ["p", "r", "2*p + c"] {
            let value = format!("$0 * $1 * {{{replaced}}}");
            assert!(of(&value).is_none(), "{value}");
        }
    }
}
