//! Operators whose gradient by itself would be loops, written as others whose gradients are operators.
//!
//! | operator | becomes |
//! |---|---|
//! | `batch_norm_inference` | element-wise arithmetic, for the gradient only |
//! | `slice` by steps | the part from its start, cut into steps; the first element of each |
//! | `pad` by what x holds | slices of x before and after it |
//!
//! Used for training graphs as files only: in compiled steps loops are as good as operators.

use graph::{
    Attr, Binary, Builder, ContainerId, Expr, Graph, Library, Node, NodeKind, Stage, SymExpr,
};
use ops::slicing::slice_attrs;
use ops::{Call, OpBuilder, OpError, attrs};
use std::collections::{BTreeMap, BTreeSet};

/// Nodes that were replaced for the gradient, to be put back where they were.
#[derive(Debug, Default)]
pub(crate) struct Composed {
    kept: Vec<(ContainerId, Library)>,
}

/// Replaces what the table of this file names.
///
/// # Errors
/// An operator whose inputs or attributes do not fit.
pub(crate) fn compose(graph: &mut Graph) -> Result<Composed, OpError> {
    let mut composed = Composed::default();
    let Some(state) = graph.single_state_mut() else {
        return Ok(composed);
    };
    let mut nodes = Vec::new();
    for node in std::mem::take(&mut state.nodes) {
        let made = match &node.kind {
            NodeKind::Library(library) => {
                let mut builder = Builder::new(graph, node.origin.clone(), node.stage);
                let replaced = replace(&mut builder, library)?;
                if let (true, "batch_norm_inference", Some(Some(y))) =
                    (replaced, library.op.as_str(), library.outputs.first())
                {
                    composed.kept.push((*y, library.clone()));
                }
                replaced.then(|| std::mem::take(&mut builder.nodes))
            }
            _ => None,
        };
        nodes.extend(made.unwrap_or_else(|| vec![node]));
    }
    graph.last_state().nodes = nodes;
    Ok(composed)
}

impl Composed {
    /// Puts each node back where several stood for it. What only those read is dead then.
    pub(crate) fn restore(&self, graph: &mut Graph) {
        let given: BTreeSet<ContainerId> = graph.inputs.iter().copied().collect();
        let Some(state) = graph.single_state_mut() else {
            return;
        };
        let written: BTreeSet<ContainerId> = state.nodes.iter().flat_map(Node::writes).collect();
        let is_there = |id: &ContainerId| written.contains(id) || given.contains(id);
        for node in &mut state.nodes {
            let writes = node.writes();
            let own = self.kept.iter().find(|(y, _)| writes.as_slice() == [*y]);
            if let Some((_, library)) = own
                && node.stage == Stage::Forward
                && library.inputs.iter().flatten().all(is_there)
            {
                node.kind = NodeKind::Library(library.clone());
            }
        }
    }
}

/// Turns sums of pads that lie side by side into concatenations: `Σ pad(x_i, low_i, high_i) → concat(x_0, x_1, …)`,
/// where each begins where the one before it ends. The gradient of a value that is read in slices is such a sum. Saves
/// a pass over the whole for each part.
pub(crate) fn join(graph: &mut Graph) {
    let Some(state) = graph.single_state() else {
        return;
    };
    let mut makers: BTreeMap<ContainerId, &Library> = BTreeMap::new();
    let mut readers: BTreeMap<ContainerId, usize> = BTreeMap::new();
    for node in &state.nodes {
        if let (NodeKind::Library(library), [made]) = (&node.kind, node.writes().as_slice()) {
            makers.insert(*made, library);
        }
        for id in node.reads() {
            *readers.entry(id).or_default() += 1;
        }
    }
    let mut joined = Vec::new();
    for (at, node) in state.nodes.iter().enumerate() {
        let NodeKind::Library(library) = &node.kind else {
            continue;
        };
        let inputs: Vec<ContainerId> = library.inputs.iter().flatten().copied().collect();
        let once = inputs.iter().all(|id| readers.get(id) == Some(&1));
        let sums =
            matches!(library.attrs.get("expr"), Some(Attr::Expr(e)) if is_sum(e, inputs.len()));
        if library.op != "elementwise" || inputs.len() < 2 || !once || !sums {
            continue;
        }
        let parts = inputs
            .iter()
            .map(|id| PaddedOperand::of(graph, makers.get(id)?));
        if let Some(parts) = parts.collect::<Option<Vec<PaddedOperand>>>()
            && let Some((axis, parts)) = side_by_side(parts)
        {
            let concat = Library {
                op: "concat".to_string(),
                attrs: attrs([("axis", Attr::Int(axis as i64))]),
                inputs: parts.into_iter().map(Some).collect(),
                outputs: library.outputs.clone(),
            };
            joined.push((at, concat));
        }
    }
    for (at, concat) in joined {
        graph.last_state().nodes[at].kind = NodeKind::Library(concat);
    }
}

/// Whether the expression adds each of n operands once.
fn is_sum(e: &Expr, n: usize) -> bool {
    fn leaves(e: &Expr, found: &mut Vec<usize>) -> bool {
        match e {
            Expr::In(i) => {
                found.push(*i);
                true
            }
            Expr::Binary(Binary::Add, a, b) => leaves(a, found) && leaves(b, found),
            _ => false,
        }
    }
    let mut found = Vec::new();
    let only_sums = leaves(e, &mut found);
    found.sort_unstable();
    only_sums && found.into_iter().eq(0..n)
}

/// A value padded by zeros along one axis.
struct PaddedOperand {
    x: ContainerId,
    axis: usize,
    low: SymExpr,
    size: SymExpr,
    high: SymExpr,
}

impl PaddedOperand {
    fn of(graph: &Graph, pad: &Library) -> Option<PaddedOperand> {
        let call = Call::of(graph, pad);
        let is_plain = pad.op == "pad"
            && call.str_or("mode", "constant".into()).ok()? == "constant"
            && call.float_or("value", 0.0).ok()? == 0.0;
        let (low, high) = (call.sizes("low").ok()?, call.sizes("high").ok()?);
        let mut padded = (0..low.len()).filter(|d| !low[*d].is_zero() || !high[*d].is_zero());
        let (Some(axis), None, true) = (padded.next(), padded.next(), is_plain) else {
            return None;
        };
        let x = call.input_id(0).ok()?;
        Some(PaddedOperand {
            size: graph.container(x).shape[axis].clone(),
            low: low[axis].clone(),
            high: high[axis].clone(),
            x,
            axis,
        })
    }
}

/// The parts in their order, if they follow each other without gap or overlap.
fn side_by_side(mut parts: Vec<PaddedOperand>) -> Option<(usize, Vec<ContainerId>)> {
    let axis = parts.first()?.axis;
    let (mut end, mut order) = (SymExpr::constant(0), Vec::new());
    while !parts.is_empty() {
        let next = parts.iter().position(|p| p.axis == axis && p.low == end)?;
        let part = parts.remove(next);
        end = end + part.size;
        order.push(part.x);
        if parts.is_empty() && !part.high.is_zero() {
            return None;
        }
    }
    Some((axis, order))
}

/// Appends what stands for the operator, if it is one of the table.
fn replace(b: &mut Builder, library: &Library) -> Result<bool, OpError> {
    let call = Call::of(b.graph, library);
    match library.op.as_str() {
        "batch_norm_inference" => normalize(b, &call).map(|()| true),
        "slice" if call.int_or("step", 1)? > 1 => step(b, &call).map(|()| true),
        "pad" if call.str_or("mode", "constant".into())? != "constant" => surround(b, &call),
        _ => Ok(false),
    }
}

/// Appends an operator that writes the containers of `call`.
fn into(b: &mut Builder, op: &str, inputs: &[ContainerId], list: graph::Attrs, call: &Call) {
    b.library(Library {
        op: op.to_string(),
        attrs: list,
        inputs: inputs.iter().copied().map(Some).collect(),
        outputs: vec![call.output_id(0)],
    });
}

/// `y = (x − mean) / √(variance + eps) · weight + bias`, all but x along the channels.
fn normalize(b: &mut Builder, call: &Call) -> Result<(), OpError> {
    let (x, eps) = (call.input_id(0)?, call.float_or("eps", 1e-5)?);
    let shape = b.shape(x);
    let mut along = vec![SymExpr::constant(1); shape.len() - 1];
    along[0] = shape[1].clone();
    let mut inputs = vec![x];
    for position in [3, 4, 1, 2] {
        if let Some(id) = call.optional_id(position) {
            let list = attrs([("shape", Attr::Sizes(along.clone()))]);
            inputs.push(b.op1("reshape", &[id], list)?);
        }
    }
    let variance = Expr::In(2).add(Expr::float(eps));
    let mut y = Expr::In(0).sub(Expr::In(1)).mul(variance.rsqrt());
    let mut next = 3;
    if call.optional_id(1).is_some() {
        y = y.mul(Expr::In(next));
        next += 1;
    }
    if call.optional_id(2).is_some() {
        y = y.add(Expr::In(next));
    }
    into(
        b,
        "elementwise",
        &inputs,
        attrs([("expr", Attr::Expr(y))]),
        call,
    );
    Ok(())
}

/// Every `step`-th element from `start`: what follows the start, filled up to whole steps, as a
/// matrix of steps whose first column is the result.
fn step(b: &mut Builder, call: &Call) -> Result<(), OpError> {
    let x = call.input_id(0)?;
    let (shape, step) = (b.shape(x), call.int_or("step", 1)?);
    let Some(out) = call.output_id(0) else {
        return Ok(());
    };
    let result = b.shape(out);
    let axis = call.int("axis")?;
    let axis = if axis < 0 {
        axis + shape.len() as i64
    } else {
        axis
    } as usize;
    let start = call.sizes("start")?[0].clone();
    let start = match start.as_const() {
        Some(n) if n < 0 => shape[axis].clone() + n,
        _ => start,
    };
    let zero = SymExpr::constant(0);
    let (mut low, mut high) = (
        vec![zero.clone(); shape.len()],
        vec![zero.clone(); shape.len()],
    );
    high[axis] = start.clone() + result[axis].clone() * step - shape[axis].clone();
    low[axis] = -start;
    let amounts = attrs([("low", Attr::Sizes(low)), ("high", Attr::Sizes(high))]);
    let whole = b.op1("pad", &[x], amounts)?;
    let mut split = result.clone();
    split.insert(axis + 1, SymExpr::constant(step));
    let split = b.op1("reshape", &[whole], attrs([("shape", Attr::Sizes(split))]))?;
    let column = slice_attrs(axis as i64 + 1, zero, SymExpr::constant(1), 1);
    let column = b.op1("slice", &[split], column)?;
    let list = attrs([("shape", Attr::Sizes(result))]);
    into(b, "reshape", &[column], list, call);
    Ok(())
}

/// Pads one dimension after the other: concatenates what comes before, x, and what comes after. Returns `false` if an
/// amount is symbolic or negative, or the mode is another; what is appended by then stays unused.
fn surround(b: &mut Builder, call: &Call) -> Result<bool, OpError> {
    let mode = call.str("mode")?;
    let amounts = |name: &str| -> Result<Option<Vec<i64>>, OpError> {
        let sizes = call.sizes(name)?;
        Ok(sizes
            .iter()
            .map(|s| s.as_const().filter(|n| *n >= 0))
            .collect())
    };
    let (Some(low), Some(high)) = (amounts("low")?, amounts("high")?) else {
        return Ok(false);
    };
    let mut x = call.input_id(0)?;
    for axis in 0..low.len() {
        let size = b.shape(x)[axis].clone();
        let end = |n: i64| size.clone() - n;
        let (at, amounts) = (|n: i64| SymExpr::constant(n), (low[axis], high[axis]));
        let (before, after) = match mode.as_str() {
            "reflect" => ((at(1), at(1 + amounts.0)), (end(1 + amounts.1), end(1))),
            "replicate" => ((at(0), at(1)), (end(1), end(0))),
            "wrap" => ((end(amounts.0), end(0)), (at(0), at(amounts.1))),
            _ => return Ok(false),
        };
        let mut parts = Vec::new();
        if amounts.0 > 0 {
            parts.push(border(b, (x, axis), before, (&mode, amounts.0))?);
        }
        parts.push(x);
        if amounts.1 > 0 {
            parts.push(border(b, (x, axis), after, (&mode, amounts.1))?);
        }
        if parts.len() > 1 {
            x = b.op1("concat", &parts, attrs([("axis", Attr::Int(axis as i64))]))?;
        }
    }
    let list = attrs([("shape", Attr::Sizes(b.shape(x)))]);
    into(b, "reshape", &[x], list, call);
    Ok(true)
}

/// A slice of x as a border of `amount` elements: mirrored, repeated or as it is.
fn border(
    b: &mut Builder,
    (x, axis): (ContainerId, usize),
    (start, stop): (SymExpr, SymExpr),
    (mode, amount): (&str, i64),
) -> Result<ContainerId, OpError> {
    let part = b.op1("slice", &[x], slice_attrs(axis as i64, start, stop, 1))?;
    match mode {
        "reflect" => b.op1(
            "flip",
            &[part],
            attrs([("axes", Attr::Ints(vec![axis as i64]))]),
        ),
        "replicate" => {
            let mut shape = b.shape(part);
            shape[axis] = SymExpr::constant(amount);
            b.op1("expand", &[part], attrs([("shape", Attr::Sizes(shape))]))
        }
        _ => Ok(part),
    }
}
