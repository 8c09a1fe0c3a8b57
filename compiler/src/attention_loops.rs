//! Which attention is computed on a CPU by one kernel that does not store the scores.
//!
//! Owns the replacement of `attention` by `attention_with_lse` before differentiation, for the sizes that the model was
//! captured with. Its gradient then computes the scores again, which costs one more product of seven; the scores are
//! not written, not read, and not kept for the backward pass. Never says how the kernel looks (`kernels`).

use crate::attention::RESULT_ORDER;
use graph::{Attr, Bindings, Builder, ContainerId, DType, Graph, Library, NodeKind};
use std::collections::BTreeSet;

/// Fewest scores of a head for which this is faster, where every row sees all keys.
const SCORES: i64 = 512 * 512;
/// The same, where half of the scores are left out.
const CAUSAL_SCORES: i64 = 256 * 256;

/// Replaces each attention that is large enough; `wrt` are the positions of the inputs whose gradients are wanted.
pub(crate) fn replace(graph: &mut Graph, hints: &Bindings, wrt: &[usize]) {
    let Some(state) = graph.single_state() else {
        return;
    };
    let inputs: Vec<ContainerId> = wrt.iter().map(|n| graph.inputs[*n]).collect();
    let trained = autodiff::active(graph, &inputs);
    let mut nodes = Vec::new();
    for node in state.nodes.clone() {
        match &node.kind {
            NodeKind::Library(library)
                if is_large(graph, library, hints) && !has_trained_mask(library, &trained) =>
            {
                let mut builder = Builder::new(graph, node.origin.clone(), node.stage);
                append(&mut builder, library, !wrt.is_empty());
                nodes.append(&mut builder.nodes);
            }
            _ => nodes.push(node),
        }
    }
    graph.last_state().nodes = nodes;
}

/// Whether gradients of the mask are wanted: they are the scores' own, so these are stored anyway.
fn has_trained_mask(library: &Library, trained: &BTreeSet<ContainerId>) -> bool {
    let mask = library.inputs.get(3).copied().flatten();
    mask.is_some_and(|id| trained.contains(&id))
}

/// Whether the node is an attention in f32 with many scores.
fn is_large(graph: &Graph, library: &Library, hints: &Bindings) -> bool {
    if library.op != "attention" {
        return false;
    }
    let operand = |n: usize| library.inputs.get(n).copied().flatten();
    let sizes = |n: usize| -> Option<Vec<i64>> {
        let container = graph.container(operand(n)?);
        let bound = container.shape.iter().map(|s| s.bind(hints).as_const());
        let sizes: Vec<i64> = bound.collect::<Option<_>>()?;
        (container.dtype == DType::F32 && sizes.iter().all(|n| *n > 0)).then_some(sizes)
    };
    let (Some(q), Some(v)) = (sizes(0), sizes(2)) else {
        return false;
    };
    let mask = operand(3).map(|id| graph.container(id).dtype);
    let takes_mask = mask.is_none_or(|dtype| matches!(dtype, DType::F32 | DType::Bool));
    if !takes_mask || q.len() != RESULT_ORDER.len() {
        return false;
    }
    let scores = q[2].saturating_mul(v[2]);
    match library.attrs.get("causal") == Some(&Attr::Bool(true)) {
        true => scores >= CAUSAL_SCORES,
        false => scores >= SCORES,
    }
}

/// Appends the node that keeps the logarithm of each row's sum, where gradients need it.
fn append(builder: &mut Builder, library: &Library, with_gradients: bool) {
    let query: Option<ContainerId> = library.inputs[0];
    let query = query.map(|id| builder.graph.container(id).clone());
    let lse = query.filter(|_| with_gradients).map(|q| {
        let rows = &q.shape[..q.shape.len() - 1];
        builder.transient(&format!("{}_lse", q.name), q.dtype, rows)
    });
    let mut attrs = library.attrs.clone();
    attrs.retain(|name, _| matches!(name.as_str(), "scale" | "causal" | "dropout" | "id"));
    attrs.insert("order".into(), Attr::Ints(RESULT_ORDER.to_vec()));
    builder.library(Library {
        op: "attention_with_lse".into(),
        attrs,
        inputs: library.inputs.clone(),
        outputs: vec![library.outputs[0], lse],
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::text_graph;

    /// Operators after the pass, of an attention with these sizes, further operands and attributes.
    fn operators(rows: i64, dtype: &str, rest: &str, wrt: &[usize]) -> Vec<String> {
        let containers = format!(
            "%q: {dtype}[1, 2, {rows}, 8] input
             %k: {dtype}[1, 2, {rows}, 8] input
             %v: {dtype}[1, 2, {rows}, 8] input
             %m: {dtype}[{rows}, {rows}] input
             %s: i64[] input
             %y: {dtype}[1, 2, {rows}, 8]"
        );
        let node = format!("%y = attention(%q, %k, %v{rest}");
        let mut graph = text_graph(&containers, &node, "%y");
        replace(&mut graph, &Bindings::new(), wrt);
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
        assert_eq!(operators(512, "f32", dropout, &[0]), ["attention_with_lse"]);
    }

    #[test]
    fn each_condition_alone_keeps_attention() {
        let kept = ["attention"];
        assert_eq!(operators(511, "f32", ")", &[0]), kept, "few scores");
        let causal = ") {causal=true}";
        assert_eq!(operators(255, "f32", causal, &[0]), kept, "few are seen");
        assert_eq!(operators(512, "f64", ")", &[0]), kept, "its type");
        assert_eq!(operators(512, "f32", ", %m)", &[3]), kept, "trained mask");
    }
}
