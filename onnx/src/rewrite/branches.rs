//! Branches whose condition is known.
//!
//! - `inline-branch`: `y = If(true) {then: a = Relu(x)}` → `y = Relu(x)`.
//!
//! Legal where the condition is a constant: the other branch never runs. Names inside become new ones,
//! outputs take those of the If. Saves the other branch, and what is outside meets what was inside.

use super::Rule;
use super::patch::{Patch, node, rename_reads};
use super::scope::Scope;
use crate::attributes::Attributes;
use crate::stored::decode;
use std::collections::BTreeMap;
use std::path::Path;

pub const RULES: &[Rule] = &[Rule {
    name: "inline-branch",
    at: inline_branch,
}];

fn inline_branch(scope: &Scope, n: usize) -> Option<Patch> {
    if !scope.is(n, "If") {
        return None;
    }
    let condition = scope.fact(scope.input(n, 0)?)?.small()?.to_i64()?;
    let [taken] = condition.as_slice() else {
        return None;
    };
    let old = scope.node(n);
    let which = if *taken != 0 {
        "then_branch"
    } else {
        "else_branch"
    };
    let branch = Attributes::new(old).get(which)?.g.as_ref()?;
    let plain = branch.sparse_initializer.is_empty() && branch.output.len() == old.output.len();
    if !plain {
        return None;
    }
    let mut patch = Patch {
        remove: vec![n],
        ..Patch::default()
    };
    let mut names: BTreeMap<&str, String> = BTreeMap::new();
    for proto in &branch.initializer {
        // Data in another file is left there.
        let tensor = decode(proto, Path::new(""))
            .ok()
            .filter(|_| proto.data_location != 1)?;
        names.insert(&proto.name, patch.constant(scope, &proto.name, tensor));
    }
    for output in branch.node.iter().flat_map(|n| &n.output) {
        if !output.is_empty() {
            names.insert(output, scope.fresh(output));
        }
    }
    let mut copies = Vec::new();
    for (inner, outer) in branch.output.iter().zip(&old.output) {
        if outer.is_empty() {
            continue;
        }
        let computed = branch.node.iter().any(|n| n.output.contains(&inner.name));
        let own = names.get_mut(inner.name.as_str()).filter(|_| computed);
        match own.filter(|name| !old.output.contains(name)) {
            Some(name) => name.clone_from(outer),
            None => copies.push((inner.name.clone(), outer.clone())),
        }
    }
    let to = |name: &str| names.get(name).cloned();
    for inner in &branch.node {
        let mut inner = inner.clone();
        rename_reads(&mut inner, &to);
        for output in inner.output.iter_mut().filter(|o| !o.is_empty()) {
            *output = to(output)?;
        }
        patch.insert.push(inner);
    }
    for (from, outer) in copies {
        let from = to(&from).unwrap_or(from);
        let mut copy = node("Identity", &[&from], Vec::new());
        copy.output = vec![outer.clone()];
        copy.name = scope.fresh(&format!("{outer}_copy"));
        patch.insert.push(copy);
    }
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, line, reals, value};
    use crate::element::Element;
    use crate::proto::{AttributeProto, GraphProto, NodeProto, attribute_type};
    use crate::tensor::{Tensor, Values};

    fn branch(name: &str, nodes: Vec<NodeProto>, output: &str) -> AttributeProto {
        let graph = GraphProto {
            name: name.to_string(),
            node: nodes,
            initializer: vec![reals(&[4]).to_proto("w")],
            output: vec![value(output, Element::F32, "N 4")],
            ..Default::default()
        };
        AttributeProto {
            name: name.to_string(),
            r#type: attribute_type::GRAPH,
            g: Some(graph),
            ..Default::default()
        }
    }

    fn choice(condition: &str) -> Trial {
        let then = vec![
            line("a = Add(x, w)", Vec::new()),
            line("b = Relu(a)", Vec::new()),
        ];
        let branches = vec![
            branch("then_branch", then, "b"),
            branch("else_branch", vec![line("b = Neg(x)", Vec::new())], "x"),
        ];
        Trial::new(17)
            .input("x", "N 4")
            .input_of("open", Element::Bool, "")
            .output("z", "N 4")
            .constant("yes", Tensor::new(&[], Values::Bool(vec![true])))
            .constant("no", Tensor::new(&[], Values::Bool(vec![false])))
            .node("a = Exp(x)")
            .with(&format!("y = If({condition})"), branches)
            .node("z = Add(y, a)")
            .only(&["inline-branch"])
    }

    #[test]
    fn a_branch_that_is_always_taken_is_inlined() {
        choice("yes").gives(&[
            "a = Exp(x)",
            "a_1 = Add(x, w_1)",
            "y = Relu(a_1)",
            "z = Add(y, a)",
        ]);
    }

    #[test]
    fn a_branch_that_gives_what_is_outside_copies_it() {
        choice("no").gives(&["a = Exp(x)", "y = Identity(x)", "z = Add(y, a)"]);
    }

    #[test]
    fn an_open_condition_keeps_both_branches() {
        choice("open").stays();
    }
}
