//! Local functions: calls replaced by the function's nodes where that pays, unused functions removed,
//! bodies of the others rewritten.
//!
//! Before: `y = local.Dense(x, w)`, Dense = {MatMul, Add}; after: `m = MatMul(x, w); y = Add(m, b)`.
//!
//! Legal where the function means the same operator sets as the model; names inside become new ones.
//! Pays for a function that is called once, and for short ones: their constants fold and their nodes
//! meet those around. Runtimes inline all of them anyway.

use super::patch::{node, rename_reads};
use super::scope::Names;
use super::{Application, Options};
use crate::attributes::{bodies, bodies_mut, is_standard};
use crate::evaluate::label;
use crate::functions::{Index, specialized};
use crate::infer::Opsets;
use crate::proto::{FunctionProto, GraphProto, ModelProto, NodeProto};
use std::collections::BTreeMap;

/// The rule's name.
pub const NAME: &str = "inline-function";
/// A function of at most this many nodes, without constants and copies, is inlined wherever it is called.
const SHORT: usize = 4;
/// Most nodes that are looked at to find out whether a function is short.
const LOOKED_AT: usize = 256;

/// Replaces calls in the graph and its bodies.
pub fn inline_calls(
    model: &mut ModelProto,
    names: &Names,
    options: &Options,
    applied: &mut Vec<Application>,
) {
    let Some(mut graph) = model.graph.take() else {
        return;
    };
    let functions = Index::new(&model.functions);
    let mut inliner = Inliner {
        opsets: Opsets::new(&model.opset_import),
        n_calls: n_calls(&graph, &model.functions, &functions),
        functions,
        names,
        options,
        applied,
    };
    inliner.body(&mut graph, "", 0);
    model.graph = Some(graph);
}

/// Removes functions that nothing calls.
pub fn remove_unused(model: &mut ModelProto) {
    let Some(graph) = &model.graph else { return };
    let mut used = Index::new(&model.functions)
        .reached(&graph.node)
        .into_iter();
    model.functions.retain(|_| used.next().unwrap_or(true));
}

/// How often each function is called, from the graph and from functions, by its position.
fn n_calls(graph: &GraphProto, functions: &[FunctionProto], index: &Index) -> Vec<usize> {
    fn count(nodes: &[NodeProto], index: &Index, calls: &mut [usize]) {
        for node in nodes {
            if let Some(n) = index.position(node) {
                calls[n] += 1;
            }
            bodies(node).for_each(|body| count(&body.node, index, calls));
        }
    }
    let mut calls = vec![0; functions.len()];
    count(&graph.node, index, &mut calls);
    for function in functions {
        count(&function.node, index, &mut calls);
    }
    calls
}

struct Inliner<'a> {
    opsets: Opsets,
    functions: Index<'a>,
    /// How often each function is called, by its position.
    n_calls: Vec<usize>,
    names: &'a Names,
    options: &'a Options,
    applied: &'a mut Vec<Application>,
}

impl<'a> Inliner<'a> {
    fn body(&mut self, body: &mut GraphProto, path: &str, depth: usize) {
        let nodes = std::mem::take(&mut body.node);
        body.node = self.nodes(nodes, path, depth);
    }

    fn nodes(&mut self, nodes: Vec<NodeProto>, path: &str, depth: usize) -> Vec<NodeProto> {
        let mut all = Vec::with_capacity(nodes.len());
        for mut node in nodes {
            let first = node.output.first().map_or("", String::as_str);
            let site = format!("{path}{first}");
            for inner in bodies_mut(&mut node) {
                self.body(inner, &format!("{site}/"), depth);
            }
            match self.function_for(&node, &site, depth) {
                None => all.push(node),
                Some(function) => {
                    self.applied.push(Application {
                        rule: NAME,
                        origin: label(&node),
                        site,
                    });
                    let inlined = expanded(function, &node, self.names, &|_| true);
                    all.extend(self.nodes(inlined, path, depth + 1));
                }
            }
        }
        all
    }

    /// The function to inline for a call.
    fn function_for(
        &self,
        call: &NodeProto,
        site: &str,
        depth: usize,
    ) -> Option<&'a FunctionProto> {
        let position = self.functions.position(call)?;
        let function = self.functions.called(call)?;
        let options = self.options;
        let is_refused = options.without.contains(NAME)
            || options
                .limit
                .is_some_and(|limit| self.applied.len() >= limit)
            || options
                .refused
                .contains(&(NAME.to_string(), site.to_string()));
        let same_sets = function.opset_import.iter().all(|set| {
            let calls_standard = function.node.iter().any(|n| n.domain == set.domain);
            !calls_standard || self.opsets.version(&set.domain) == set.version
        });
        let once = self.n_calls[position] == 1;
        // A function with bodies is never short: they are large.
        let flat = function.node.iter().all(|n| bodies(n).next().is_none());
        let pays = once || (flat && self.n_nodes(function, &mut { LOOKED_AT })? <= SHORT);
        // A function that is not followed is not run, so nothing could be proven of its nodes.
        let is_followed = self.functions.is_followed(position, depth);
        (is_followed && !is_refused && same_sets && pays).then_some(function)
    }

    /// Nodes of a function with the functions it calls, without constants and copies; `None` if more than `left`
    /// would have to be looked at, as where functions call each other in a circle.
    fn n_nodes(&self, function: &FunctionProto, left: &mut usize) -> Option<usize> {
        let mut n = 0;
        for node in &function.node {
            *left = left.checked_sub(1)?;
            let free = matches!(node.op_type.as_str(), "Constant" | "Identity");
            n += match self.functions.called(node) {
                Some(inner) => self.n_nodes(inner, left)?,
                None => usize::from(!(free && is_standard(node))),
            };
        }
        Some(n)
    }
}

/// The nodes of a function for one call, under new names. Nodes that will not stay get no new names of their own.
pub(super) fn expanded(
    function: &FunctionProto,
    call: &NodeProto,
    names: &Names,
    stays: &dyn Fn(&NodeProto) -> bool,
) -> Vec<NodeProto> {
    let mut to: BTreeMap<&str, String> = BTreeMap::new();
    let inputs = function.input.iter().zip(&call.input);
    to.extend(inputs.map(|(inner, outer)| (inner.as_str(), outer.clone())));
    let mut copies = Vec::new();
    for (inner, outer) in function.output.iter().zip(&call.output) {
        if outer.is_empty() {
            continue;
        }
        let is_free = !to.contains_key(inner.as_str()) && !function.input.contains(inner);
        if is_free {
            to.insert(inner, outer.clone());
        } else {
            copies.push((inner.as_str(), outer));
        }
    }
    for output in function.node.iter().flat_map(|n| &n.output) {
        if !output.is_empty() && !to.contains_key(output.as_str()) {
            to.insert(output, names.fresh(output));
        }
    }
    let renamed = |name: &str| to.get(name).cloned();
    let mut nodes = specialized(function, call);
    for node in &mut nodes {
        // First, since names of the caller come in next, and names inside the bodies could hide them.
        bodies_mut(node).for_each(|body| rename_inside(body, names));
        rename_reads(node, &renamed);
        for output in &mut node.output {
            if let Some(name) = renamed(output) {
                *output = name;
            }
        }
        if node.name.is_empty() {
            node.name.clone_from(&call.name);
        }
        if !node.name.is_empty() && stays(node) {
            node.name = names.fresh(&node.name);
        }
    }
    for (inner, outer) in copies {
        let from = renamed(inner).unwrap_or_default();
        let mut copy = node("Identity", &[&from], Vec::new());
        copy.output = vec![outer.clone()];
        nodes.push(copy);
    }
    nodes
}

/// Gives what a body defines new names.
fn rename_inside(body: &mut GraphProto, names: &Names) {
    let inputs = body.input.iter().map(|i| i.name.as_str());
    let stored = body.initializer.iter().map(|t| t.name.as_str());
    let outputs = body.node.iter().flat_map(|n| &n.output).map(String::as_str);
    let own = inputs
        .chain(stored)
        .chain(outputs)
        .filter(|n| !n.is_empty());
    let to: BTreeMap<String, String> = own.map(|n| (n.to_string(), names.fresh(n))).collect();
    let renamed = |name: &str| to.get(name).cloned();
    let rename = |name: &mut String| {
        if let Some(new) = renamed(name) {
            *name = new;
        }
    };
    body.input.iter_mut().for_each(|i| rename(&mut i.name));
    body.output.iter_mut().for_each(|o| rename(&mut o.name));
    body.value_info.iter_mut().for_each(|i| rename(&mut i.name));
    body.initializer
        .iter_mut()
        .for_each(|t| rename(&mut t.name));
    for node in &mut body.node {
        bodies_mut(node).for_each(|inner| rename_inside(inner, names));
        rename_reads(node, &renamed);
        node.output.iter_mut().for_each(rename);
    }
}

#[cfg(test)]
mod tests {
    use super::super::patch::float;
    use super::super::trial::{Trial, line, reals, value};
    use super::*;
    use crate::element::Element;
    use crate::proto::{AttributeProto, OperatorSetIdProto};

    fn function(name: &str, inputs: &[&str], nodes: Vec<NodeProto>, opset: i64) -> FunctionProto {
        FunctionProto {
            name: name.to_string(),
            domain: "local".to_string(),
            input: inputs.iter().map(ToString::to_string).collect(),
            output: vec!["r".to_string()],
            attribute: vec!["slope".to_string()],
            opset_import: vec![OperatorSetIdProto {
                domain: String::new(),
                version: opset,
            }],
            node: nodes,
            ..Default::default()
        }
    }

    fn leaky() -> Vec<NodeProto> {
        let alpha = AttributeProto {
            name: "alpha".to_string(),
            ref_attr_name: "slope".to_string(),
            r#type: crate::proto::attribute_type::FLOAT,
            ..Default::default()
        };
        vec![
            line("h = Add(a, b)", Vec::new()),
            line("r = LeakyRelu(h)", vec![alpha]),
        ]
    }

    fn called_twice(opset: i64, nodes: Vec<NodeProto>) -> Trial {
        Trial::new(17)
            .input("x", "N 4")
            .output("z", "N 4")
            .constant("w", reals(&[4]))
            .function(function("Shifted", &["a", "b"], nodes, opset))
            .with("h = local.Shifted(x, w)", vec![float("slope", 0.5)])
            .with("z = local.Shifted(h, x)", vec![float("slope", 0.25)])
            .only(&[NAME])
    }

    #[test]
    fn a_short_function_is_inlined_with_its_attributes() {
        called_twice(17, leaky()).gives(&[
            "h_1 = Add(x, w)",
            "h = LeakyRelu(h_1) {alpha=0.5}",
            "h_2 = Add(h, x)",
            "z = LeakyRelu(h_2) {alpha=0.25}",
        ]);
        assert!(
            called_twice(17, leaky())
                .rewritten()
                .model
                .functions
                .is_empty()
        );
    }

    #[test]
    fn a_function_of_another_operator_set_stays() {
        called_twice(16, leaky()).stays();
    }

    #[test]
    fn a_long_function_called_twice_stays() {
        let mut nodes = leaky();
        for n in 0..4 {
            nodes.insert(n + 1, line(&format!("h{n} = Exp(h)"), Vec::new()));
        }
        called_twice(17, nodes).stays();
    }

    #[test]
    fn a_function_that_gives_what_it_is_given_is_a_copy() {
        let mut copy = function("Copy", &["r"], Vec::new(), 17);
        copy.node = vec![line("unused = Relu(r)", Vec::new())];
        let trial = Trial::new(17)
            .input("x", "N 4")
            .output("z", "N 4")
            .function(copy);
        let trial = trial
            .node("y = local.Copy(x)")
            .node("z = Neg(y)")
            .only(&[NAME]);
        trial.gives(&["y = Identity(x)", "z = Neg(y)"]);
    }

    #[test]
    fn what_a_body_defines_gets_a_name_of_its_own() {
        let branch = |name: &str, nodes: &[&str], output: &str| AttributeProto {
            name: name.to_string(),
            r#type: crate::proto::attribute_type::GRAPH,
            g: Some(GraphProto {
                name: name.to_string(),
                node: nodes.iter().map(|n| line(n, Vec::new())).collect(),
                output: vec![value(output, Element::F32, "N 4")],
                ..Default::default()
            }),
            ..Default::default()
        };
        let branches = vec![
            branch("then_branch", &["t = Neg(a)", "u = Add(t, a)"], "u"),
            branch("else_branch", &["w = Relu(a)"], "w"),
        ];
        let choice = vec![line("r = If(b)", branches)];
        // The caller's `t` is what the body's `t` is made of.
        let trial = Trial::new(17)
            .input("x", "N 4")
            .input_of("c", Element::Bool, "")
            .output("z", "N 4")
            .function(function("Choice", &["a", "b"], choice, 17))
            .node("t = Exp(x)")
            .node("y = local.Choice(t, c)")
            .node("z = Abs(y)")
            .only(&[NAME]);
        let graph = trial.rewritten().model.graph.expect("a graph");
        let inner = graph.node[1].attribute[0].g.as_ref().expect("a branch");
        let lines: Vec<(&str, &[String])> = inner
            .node
            .iter()
            .map(|n| (n.output[0].as_str(), n.input.as_slice()))
            .collect();
        assert_eq!(lines[0], ("t_1", &["t".to_string()][..]));
        assert_eq!(lines[1].1, ["t_1", "t"]);
        trial.gives(&["t = Exp(x)", "y = If(c)", "z = Abs(y)"]);
    }
}
