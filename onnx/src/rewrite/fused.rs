//! For ONNX Runtime: its own operators of the domain `com.microsoft`, which stand for several.
//!
//! - `skip-normalization`: `s = x + y; z = LayerNormalization(s, g, b)` → `z = SkipLayerNormalization(x, y, g,
//!   b)`, with `s` as its fourth output where others read it.
//! - The forms of Gelu are in `activations.rs`.
//!
//! Legal for three dimensions, x and y of the same sizes, a normalization of the last dimension with
//! constant g and b, in `f32` or `f16`. Saves a node and, on GPUs, a pass over the sum. Only for GPUs:
//! ONNX Runtime's kernel for CPUs takes several times as long as the two it replaces
//! (`bench/onnx/operator_times.py`).

use super::noop::same_sizes;
use super::patch::{Patch, float, heir, node};
use super::scope::Scope;
use super::{Rule, Target};
use crate::attributes::{Attributes, bodies};
use crate::element::Element;
use crate::proto::{ModelProto, NodeProto, OperatorSetIdProto};

/// The domain of the runtime's own operators.
pub const DOMAIN: &str = "com.microsoft";

pub const RULES: &[Rule] = &[Rule {
    name: "skip-normalization",
    at: skip_normalization,
}];

fn skip_normalization(scope: &Scope, n: usize) -> Option<Patch> {
    if scope.around().target != Target::OrtCuda || !scope.is(n, "LayerNormalization") {
        return None;
    }
    let old = scope.node(n);
    let a = Attributes::new(old);
    let others = old.output.iter().skip(1).any(|o| scope.is_used(o));
    let sum = scope.input(n, 0)?;
    let add = scope.made_by(sum, "Add")?;
    let (x, y) = (scope.input(add, 0)?, scope.input(add, 1)?);
    let (fact, of_x, of_y) = (scope.fact(sum)?, scope.fact(x)?, scope.fact(y)?);
    let alike = same_sizes(of_x, fact) && same_sizes(of_y, fact) && fact.rank() == Some(3);
    let is_last = matches!(a.int("axis").unwrap_or(-1), -1 | 2);
    let element = matches!(fact.element, Some(Element::F32 | Element::F16));
    if others || !alike || !is_last || !element || a.int("stash_type").unwrap_or(1) != 1 {
        return None;
    }
    let mut operands = vec![x, y];
    for at in [1, 2] {
        match scope.input(n, at) {
            Some(name) if scope.constant(name).is_some() => operands.push(name),
            Some(_) => return None,
            None => {}
        }
    }
    let epsilon = float("epsilon", a.float("epsilon").unwrap_or(1e-5));
    let mut made = node("SkipLayerNormalization", &operands, vec![epsilon]);
    made.domain = DOMAIN.to_string();
    made.output = vec![old.output.first()?.clone()];
    if scope.sole_reader(sum).is_none() {
        let none = String::new;
        made.output.extend([none(), none(), sum.to_string()]);
    }
    Some(Patch {
        remove: vec![add, n],
        insert: vec![heir(old, made)],
        ..Patch::default()
    })
}

/// Imports the domain where its operators have come in.
pub fn import(model: &mut ModelProto) {
    fn uses(node: &NodeProto) -> bool {
        node.domain == DOMAIN || bodies(node).flat_map(|b| &b.node).any(uses)
    }
    let add = |sets: &mut Vec<OperatorSetIdProto>| {
        if sets.iter().all(|set| set.domain != DOMAIN) {
            sets.push(OperatorSetIdProto {
                domain: DOMAIN.to_string(),
                version: 1,
            });
        }
    };
    let mut is_used = model.graph.iter().flat_map(|g| &g.node).any(uses);
    for function in &mut model.functions {
        if function.node.iter().any(uses) {
            add(&mut function.opset_import);
            is_used = true;
        }
    }
    if is_used {
        add(&mut model.opset_import);
    }
}

#[cfg(test)]
mod tests {
    use super::super::patch::int;
    use super::super::trial::{Trial, reals};
    use super::*;

    const RULE: &[&str] = &["skip-normalization", "gelu"];

    fn skipping(target: Target, y: &str, axis: i64) -> Trial {
        Trial::new(17)
            .input("x", "N 4 8")
            .input("y", y)
            .output("z", "N 4 8")
            .constant("g", reals(&[8]))
            .constant("b", reals(&[8]))
            .node("s = Add(x, y)")
            .with("z = LayerNormalization(s, g, b)", vec![int("axis", axis)])
            .target(target)
            .only(RULE)
    }

    const FUSED: &str = "z = SkipLayerNormalization(x, y, g, b) {epsilon=0.00001}";

    #[test]
    fn a_sum_that_is_normalized_is_one_operator() {
        skipping(Target::OrtCuda, "N 4 8", -1).gives(&[FUSED]);
        let imports = skipping(Target::OrtCuda, "N 4 8", 2).rewritten().model;
        assert_eq!(
            imports.opset_import.last().map(|o| o.domain.as_str()),
            Some(DOMAIN)
        );
    }

    #[test]
    fn only_on_gpus_and_for_equal_sizes_and_the_last_dimension() {
        skipping(Target::Standard, "N 4 8", -1).stays();
        skipping(Target::OrtCpu, "N 4 8", -1).stays();
        skipping(Target::OrtCuda, "8", -1).stays();
        let over_two = Trial::new(17)
            .input("x", "N 4 8")
            .input("y", "N 4 8")
            .output("z", "N 4 8")
            .constant("g", reals(&[4, 8]))
            .node("s = Add(x, y)")
            .with("z = LayerNormalization(s, g)", vec![int("axis", 1)]);
        over_two.target(Target::OrtCuda).only(RULE).stays();
    }

    #[test]
    fn a_sum_that_others_read_is_a_further_output() {
        let (_, nodes) = skipping(Target::OrtCuda, "N 4 8", -1)
            .output("s", "N 4 8")
            .run();
        assert_eq!(nodes.len(), 1, "{nodes:?}");
    }

    #[test]
    fn statistics_that_others_read_keep_the_operator() {
        let all = Trial::new(17)
            .input("x", "N 4 8")
            .input("y", "N 4 8")
            .output("z", "N 4 8")
            .output("mean", "N 4 1")
            .constant("g", reals(&[8]))
            .node("s = Add(x, y)")
            .node("z, mean = LayerNormalization(s, g)");
        all.target(Target::OrtCuda).only(RULE).stays();
    }

    #[test]
    fn gelu_is_the_runtimes_own_where_the_operator_set_has_none() {
        let gelu = |target: Target| {
            Trial::new(17)
                .input("x", "N 8")
                .output("y", "N 8")
                .constant("root", super::super::trial::real(std::f32::consts::SQRT_2))
                .constant("one", super::super::trial::real(1.0))
                .constant("half", super::super::trial::real(0.5))
                .node("d = Div(x, root)")
                .node("e = Erf(d)")
                .node("p = Add(e, one)")
                .node("m = Mul(x, p)")
                .node("y = Mul(m, half)")
                .target(target)
                .only(RULE)
        };
        gelu(Target::OrtCpu).gives(&["y = Gelu(x)"]);
        gelu(Target::Standard).stays();
    }
}
