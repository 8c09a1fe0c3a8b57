//! Bodies that hold no initializers: local functions that stay, and bodies inside files before version 4.
//!
//! Their constants are nodes. Owns which functions are rewritten, and the way between Constant nodes and the
//! initializers that rules work with. A function's body means the same for every call, so nothing that is
//! known of one caller's values is used.

use super::patch::node;
use super::scope::{Constants, Surroundings};
use crate::attributes::{Attributes, bodies, is_standard};
use crate::functions::Index;
use crate::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto,
    attribute_type,
};
use crate::stored::Stored;
use crate::verify::is_known;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Constant nodes become initializers, but for what the body gives.
pub fn lift(body: &mut GraphProto, constants: &mut Constants, folder: &Arc<Path>) {
    let outputs: BTreeSet<String> = body.output.iter().map(|o| o.name.clone()).collect();
    body.node.retain(|node| {
        let is_constant = node.op_type == "Constant" && is_standard(node);
        let (Some(name), true) = (node.output.first(), is_constant) else {
            return true;
        };
        let Some(value) = Attributes::new(node).tensor("value") else {
            return true;
        };
        if outputs.contains(name) || node.attribute.len() != 1 {
            return true;
        }
        let mut value = value.clone();
        value.name.clone_from(name);
        constants.insert(name.clone(), Arc::new(Stored::new(value, folder)));
        false
    });
}

/// Initializers that were not there at first become Constant nodes before all others.
pub fn lower(body: &mut GraphProto, at_first: &BTreeSet<String>) {
    let (kept, made) = std::mem::take(&mut body.initializer)
        .into_iter()
        .partition(|t| at_first.contains(&t.name));
    body.initializer = kept;
    let made: Vec<crate::proto::TensorProto> = made;
    let constants = made.into_iter().map(|tensor| {
        let name = tensor.name.clone();
        let value = AttributeProto {
            name: "value".to_string(),
            r#type: attribute_type::TENSOR,
            t: Some(tensor),
            ..Default::default()
        };
        NodeProto {
            name: name.clone(),
            output: vec![name],
            ..node("Constant", &[], vec![value])
        }
    });
    let nodes: Vec<NodeProto> = constants.collect();
    body.node.splice(0..0, nodes);
}

/// The body of a function as a graph, if it may be rewritten: all of it has a meaning here, and no attribute comes from
/// the caller. Whether every call gives every input is checked with [`partly_called`].
pub fn body(function: &FunctionProto, around: &Surroundings) -> Option<GraphProto> {
    let known = function
        .node
        .iter()
        .all(|n| is_known(&around.functions, n) && !refers(n));
    if !known {
        return None;
    }
    let value = |name: &String| ValueInfoProto {
        name: name.clone(),
        ..Default::default()
    };
    Some(GraphProto {
        name: function.name.clone(),
        node: function.node.clone(),
        input: function.input.iter().map(value).collect(),
        output: function.output.iter().map(value).collect(),
        value_info: function.value_info.clone(),
        ..Default::default()
    })
}

/// Whether a node, or one in its bodies, takes an attribute from the caller.
fn refers(node: &NodeProto) -> bool {
    let own = node.attribute.iter().any(|a| !a.ref_attr_name.is_empty());
    own || bodies(node).flat_map(|b| &b.node).any(refers)
}

/// Positions of the functions that have a call, anywhere in the model, that leaves an input out.
pub fn partly_called(model: &ModelProto) -> BTreeSet<usize> {
    fn add(
        nodes: &[NodeProto],
        functions: &[FunctionProto],
        index: &Index,
        found: &mut BTreeSet<usize>,
    ) {
        for node in nodes {
            let partly = |n: &usize| {
                let is_short = node.input.len() != functions[*n].input.len();
                is_short || node.input.iter().any(String::is_empty)
            };
            found.extend(index.position(node).filter(partly));
            for body in bodies(node) {
                add(&body.node, functions, index, found);
            }
        }
    }
    let index = Index::new(&model.functions);
    let mut found = BTreeSet::new();
    let nodes = model.graph.iter().map(|g| &g.node);
    for nodes in nodes.chain(model.functions.iter().map(|f| &f.node)) {
        add(nodes, &model.functions, &index, &mut found);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, line, real, value};
    use crate::element::Element;
    use crate::proto::{
        AttributeProto, FunctionProto, GraphProto, OperatorSetIdProto, attribute_type,
    };

    /// A function of six nodes, so that it stays a function if it is called twice.
    fn function(first: &str, attribute: Vec<AttributeProto>) -> FunctionProto {
        let mut nodes = vec![line(first, attribute)];
        for text in [
            "b = Abs(a)",
            "c = Abs(b)",
            "d = Tanh(c)",
            "e = Sin(d)",
            "f = Cos(e)",
        ] {
            nodes.push(line(text, Vec::new()));
        }
        nodes.push(line("r = Add(f, p)", Vec::new()));
        FunctionProto {
            name: "Long".to_string(),
            domain: "local".to_string(),
            input: vec!["p".to_string()],
            output: vec!["r".to_string()],
            attribute: vec!["how".to_string()],
            node: nodes,
            opset_import: vec![OperatorSetIdProto {
                domain: String::new(),
                version: 17,
            }],
            ..Default::default()
        }
    }

    fn called_twice(function: FunctionProto) -> Trial {
        Trial::new(17)
            .input("x", "n 4")
            .output("y", "n 4")
            .node("a = local.Long(x)")
            .node("y = local.Long(a)")
            .function(function)
    }

    fn n_inside(trial: &Trial) -> usize {
        trial.run();
        let functions = trial.rewritten().model.functions;
        functions.first().map_or(0, |f| f.node.len())
    }

    #[test]
    fn functions_that_stay_are_rewritten() {
        // Abs twice is once, and what is before it may be negative.
        assert_eq!(
            n_inside(&called_twice(function("a = Neg(p)", Vec::new()))),
            5
        );
    }

    #[test]
    fn a_constant_in_a_function_is_a_node() {
        let mut with = function("a = Neg(p)", Vec::new());
        let half = real(0.5).to_proto("");
        let value = AttributeProto {
            name: "value".to_string(),
            r#type: attribute_type::TENSOR,
            t: Some(half),
            ..Default::default()
        };
        with.node.insert(0, line("half = Constant()", vec![value]));
        with.node
            .insert(1, line("quarter = Mul(half, half)", Vec::new()));
        with.node.pop();
        with.node.push(line("r = Add(f, quarter)", Vec::new()));
        let trial = called_twice(with);
        trial.run();
        let functions = trial.rewritten().model.functions;
        let first = &functions[0].node[0];
        assert_eq!(
            (first.op_type.as_str(), first.output[0].as_str()),
            ("Constant", "quarter")
        );
        assert_eq!(functions[0].node.len(), 6);
    }

    #[test]
    fn bodies_in_files_before_version_4_hold_no_initializers() {
        let half = AttributeProto {
            name: "value".to_string(),
            r#type: attribute_type::TENSOR,
            t: Some(real(0.5).to_proto("")),
            ..Default::default()
        };
        let branch = |name: &str, last: &str| AttributeProto {
            name: name.to_string(),
            r#type: attribute_type::GRAPH,
            g: Some(GraphProto {
                name: name.to_string(),
                node: vec![
                    line("half = Constant()", vec![half.clone()]),
                    line("quarter = Mul(half, half)", Vec::new()),
                    line(last, Vec::new()),
                ],
                output: vec![value("b", Element::F32, "N 4")],
                ..Default::default()
            }),
            ..Default::default()
        };
        let branches = vec![
            branch("then_branch", "b = Mul(x, quarter)"),
            branch("else_branch", "b = Add(x, quarter)"),
        ];
        let done = |version: i64| {
            let trial = Trial::new(11)
                .version(version)
                .input("x", "N 4")
                .input_of("open", Element::Bool, "")
                .output("y", "N 4")
                .with("y = If(open)", branches.clone());
            let graph = trial.rewritten().model.graph.expect("a graph");
            let inner = graph.node[0].attribute[0].g.clone().expect("a branch");
            (inner.node.len(), inner.initializer.len())
        };
        assert_eq!(done(3), (2, 0));
        assert_eq!(done(4), (1, 1));
    }

    #[test]
    fn functions_whose_attributes_are_the_callers_stay() {
        let how = AttributeProto {
            name: "alpha".to_string(),
            r#type: attribute_type::FLOAT,
            ref_attr_name: "how".to_string(),
            ..Default::default()
        };
        let inside = n_inside(&called_twice(function("a = Elu(p)", vec![how])));
        assert_eq!(inside, 7);
    }
}
