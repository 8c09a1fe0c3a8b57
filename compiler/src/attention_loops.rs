//! Which attention is computed on a CPU by one kernel that does not store the scores.
//!
//! Owns the replacement of `attention` by `attention_with_lse` before differentiation, for the sizes that the model was
//! captured with. Its gradient then computes the scores again, which costs one more product of seven; the scores are
//! not written, not read, and not kept for the backward pass. Never says how the kernel looks (`kernels`).

use crate::attention::RESULT_ORDER;
use crate::attention_pattern;
use graph::{Attr, Bindings, Builder, ContainerId, DType, Graph, Library, NodeKind, SymExpr};
use ops::OpError;

/// Fewest scores of a head for which this is faster, where every row sees all keys.
const SCORES: i64 = 512 * 512;
/// Fewest scores of a head if half of them are left out, or if dropout would otherwise store a number for each.
const FEWER_SCORES: i64 = 256 * 256;
/// Fewest heads of all batches: threads share the heads of the backward pass.
const HEADS: i64 = 4;

/// What decides whether an attention is replaced.
pub(crate) struct Candidate {
    /// Queries, keys and values.
    pub(crate) operands: [ContainerId; 3],
    /// Sizes whose product is the number of heads of all batches.
    pub(crate) heads: Vec<SymExpr>,
    /// How many queries a head has.
    pub(crate) rows: SymExpr,
    /// How many keys a head has.
    pub(crate) columns: SymExpr,
    /// What hides keys.
    pub(crate) mask: Option<ContainerId>,
    /// Whether a row sees the keys up to its own only.
    pub(crate) is_causal: bool,
    /// Whether there is dropout.
    pub(crate) drops: bool,
}

impl Candidate {
    fn from_library(graph: &Graph, library: &Library) -> Option<Candidate> {
        let operand = |n: usize| library.inputs.get(n).copied().flatten();
        let operands = [operand(0)?, operand(1)?, operand(2)?];
        let rows = |id: ContainerId| -> Option<SymExpr> {
            graph.container(id).shape.iter().rev().nth(1).cloned()
        };
        let dropout = library.attrs.get("dropout");
        let q = &graph.container(operands[0]).shape;
        Some(Candidate {
            operands,
            heads: q[..q.len().checked_sub(2)?].to_vec(),
            rows: rows(operands[0])?,
            columns: rows(operands[2])?,
            mask: operand(3),
            is_causal: library.attrs.get("causal") == Some(&Attr::Bool(true)),
            drops: matches!(dropout, Some(Attr::Float(p)) if *p > 0.0),
        })
    }
}

/// Replaces each attention that is large enough, whether it is one operator or several
/// ([`attention_pattern`](crate::attention_pattern)); `wrt` are the positions of the inputs whose gradients are wanted.
/// Operands of 16 bits are computed with in single precision; those in bf16 are taken only if `widens`, which is for CPUs
/// without instructions that multiply them faster.
///
/// # Errors
/// An operator refuses its operands.
pub(crate) fn replace(
    graph: &mut Graph,
    hints: &Bindings,
    wrt: &[usize],
    widens: bool,
) -> Result<(), OpError> {
    let inputs: Vec<ContainerId> = wrt.iter().map(|n| graph.inputs[*n]).collect();
    let trained = autodiff::active(graph, &inputs);
    let is_taken = |graph: &Graph, own: &Candidate| {
        // The gradient of a mask is that of the scores, which then is stored anyway.
        let trains_mask = own.mask.is_some_and(|id| trained.contains(&id));
        !trains_mask && is_large(graph, own, hints, widens)
    };
    attention_pattern::recognize(graph, is_taken)?;
    let Some(state) = graph.single_state() else {
        return Ok(());
    };
    let mut nodes = Vec::new();
    for node in state.nodes.clone() {
        let attention = match &node.kind {
            NodeKind::Library(library) if library.op == "attention" => Some(library),
            _ => None,
        };
        let own = attention.and_then(|library| Candidate::from_library(graph, library));
        match attention.filter(|_| own.is_some_and(|own| is_taken(graph, &own))) {
            Some(library) => {
                let mut builder = Builder::new(graph, node.origin.clone(), node.stage);
                append(&mut builder, library, !wrt.is_empty());
                nodes.append(&mut builder.nodes);
            }
            None => nodes.push(node),
        }
    }
    graph.last_state().nodes = nodes;
    Ok(())
}

/// Whether the attention has operands of a type that is taken, and many scores.
fn is_large(graph: &Graph, own: &Candidate, hints: &Bindings, widens: bool) -> bool {
    let size = |n: &SymExpr| n.bind(hints).as_const().filter(|n| *n > 0);
    let dtype = graph.container(own.operands[0]).dtype;
    let takes_type = match dtype {
        DType::F32 | DType::F16 => true,
        DType::BF16 => widens,
        _ => false,
    };
    let is_known = own.operands.iter().all(|id| {
        let container = graph.container(*id);
        let sizes = &container.shape;
        container.dtype == dtype
            && [3, 4].contains(&sizes.len())
            && sizes.iter().all(|n| size(n).is_some())
    });
    let mask = own.mask.map(|id| graph.container(id).dtype);
    let takes_mask = mask.is_none_or(|mask| mask == dtype || mask == DType::Bool);
    let (Some(rows), Some(columns)) = (size(&own.rows), size(&own.columns)) else {
        return false;
    };
    let least = match own.is_causal || own.drops {
        true => FEWER_SCORES,
        false => SCORES,
    };
    let heads = own.heads.iter().filter_map(size);
    let has_heads = heads.fold(1, i64::saturating_mul) >= HEADS;
    takes_type && is_known && takes_mask && has_heads && rows.saturating_mul(columns) >= least
}

/// Appends the node. If gradients are wanted, it keeps the logarithm of each row's sum and the rest of that logarithm.
fn append(builder: &mut Builder, library: &Library, with_gradients: bool) {
    let query: Option<ContainerId> = library.inputs[0];
    let query = query.map(|id| builder.graph.container(id).clone());
    let for_row = |builder: &mut Builder, name: &str| {
        let q = query.as_ref().filter(|_| with_gradients)?;
        let rows = &q.shape[..q.shape.len() - 1];
        Some(builder.transient(&format!("{}_{name}", q.name), DType::F32, rows))
    };
    let (lse, rest) = (for_row(builder, "lse"), for_row(builder, "rest"));
    let mut attrs = library.attrs.clone();
    let rank = library.inputs[0].map(|id| builder.graph.container(id).shape.len());
    if rank == Some(RESULT_ORDER.len()) {
        attrs.insert("order".into(), Attr::Ints(RESULT_ORDER.to_vec()));
    }
    builder.library(Library {
        op: "attention_with_lse".into(),
        attrs,
        inputs: library.inputs.clone(),
        outputs: vec![library.outputs[0], lse, rest],
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::text_graph;

    /// The operators after the pass, for an attention with four heads. `rest` has further operands and attributes.
    fn operators(rows: i64, dtype: &str, rest: &str, wrt: &[usize]) -> Vec<String> {
        operators_of((2, true), rows, dtype, rest, wrt)
    }

    /// The same for a batch size, and with or without attention of 16 bits.
    fn operators_of(
        (batch, widens): (i64, bool),
        rows: i64,
        dtype: &str,
        rest: &str,
        wrt: &[usize],
    ) -> Vec<String> {
        let containers = format!(
            "%q: {dtype}[{batch}, 2, {rows}, 8] input
             %k: {dtype}[{batch}, 2, {rows}, 8] input
             %v: {dtype}[{batch}, 2, {rows}, 8] input
             %m: {dtype}[{rows}, {rows}] input
             %s: i64[] input
             %y: {dtype}[{batch}, 2, {rows}, 8]"
        );
        let node = format!("%y = attention(%q, %k, %v{rest}");
        let mut graph = text_graph(&containers, &node, "%y");
        replace(&mut graph, &Bindings::new(), wrt, widens).expect("its operands fit");
        let nodes = &graph.single_state().expect("a state").nodes;
        let names = nodes.iter().map(|node| match &node.kind {
            NodeKind::Library(library) => library.op.clone(),
            _ => String::new(),
        });
        names.collect()
    }

    #[test]
    fn attention_with_many_scores_is_replaced() {
        assert_eq!(operators(512, "f32", ")", &[0]), ["attention_with_lse"]);
        assert_eq!(operators(512, "f32", ", %m)", &[0]), ["attention_with_lse"]);
        let causal = ") {causal=true}";
        assert_eq!(operators(256, "f32", causal, &[]), ["attention_with_lse"]);
        let dropout = ", -, %s) {dropout=0.5, id=3}";
        assert_eq!(operators(256, "f32", dropout, &[0]), ["attention_with_lse"]);
        assert_eq!(
            operators(512, "bf16", ", %m)", &[0]),
            ["attention_with_lse"]
        );
        assert_eq!(operators(512, "f16", ")", &[0]), ["attention_with_lse"]);
    }

    #[test]
    fn each_condition_alone_keeps_attention() {
        let kept = ["attention"];
        assert_eq!(operators(511, "f32", ")", &[0]), kept, "few scores");
        let causal = ") {causal=true}";
        assert_eq!(operators(255, "f32", causal, &[0]), kept, "few are seen");
        let dropout = ", -, %s) {dropout=0.5}";
        assert_eq!(
            operators(255, "f32", dropout, &[0]),
            kept,
            "few, with dropout"
        );
        assert_eq!(operators(512, "f64", ")", &[0]), kept, "its type");
        let two_heads = operators_of((1, true), 512, "f32", ")", &[0]);
        assert_eq!(two_heads, kept, "two heads");
        let narrow = operators_of((2, false), 512, "bf16", ")", &[0]);
        assert_eq!(narrow, kept, "bf16 is multiplied as it is");
        assert_eq!(operators(512, "f32", ", %m)", &[3]), kept, "trained mask");
    }
}
