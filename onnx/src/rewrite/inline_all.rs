//! Every call of a local function replaced by the function's nodes, for readers that know no functions.
//!
//! Before: `y = local.Dense(x, w)`, Dense = {MatMul, Add}; after: `m = MatMul(x, w); y = Add(m, b)`. Unlike the rule in
//! `inline.rs` this never asks what pays. Refuses, before it changes anything, if there would be too
//! many nodes or too deep bodies, or if an operator means something else in the function's version of the operators
//! than in the model's.

use super::inline::expanded;
use super::scope::Names;
use crate::attributes::{bodies, bodies_mut, is_standard};
use crate::check::schemas::versions;
use crate::evaluate::label;
use crate::functions::{Extent, Index, MOST_NODES};
use crate::infer::Opsets;
use crate::proto::{FunctionProto, ModelProto, NodeProto};

/// How many bodies may be inside of each other afterwards.
const MOST_BODIES_INSIDE: usize = 64;

/// Why calls are not replaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InlineError {
    /// There would be too many nodes.
    #[error(
        "the functions of the file would become {} nodes where they are called, but at most {MOST_NODES} are \
         read; a call of `{function}` alone becomes {}",
        counted(*n_nodes),
        counted(*n_of_function)
    )]
    Large {
        /// The function that becomes the most nodes.
        function: String,
        /// Nodes that all calls become, calls inside of functions included.
        n_nodes: u64,
        /// Nodes that a call of it becomes.
        n_of_function: u64,
    },
    /// Bodies would be too deep inside of each other.
    #[error(
        "with its functions replaced by their nodes the file would have {n_deep} bodies inside of each other, but \
         at most {MOST_BODIES_INSIDE} are read; one is in `{function}`"
    )]
    Deep {
        /// The function that has the deepest body.
        function: String,
        /// How deep.
        n_deep: usize,
    },
    /// An operator changed between the two versions.
    #[error(
        "`{function}` is written with version {own} of the operators and the file with version {version}, and \
         {node} does not mean the same in both; export the model with one version"
    )]
    Versions {
        /// The function.
        function: String,
        /// Its version.
        own: i64,
        /// The model's version.
        version: i64,
        /// The node.
        node: String,
    },
    /// Functions call each other without end.
    #[error("`{function}` is in a cycle of functions that call each other, or calls one of them")]
    Circle {
        /// One of them.
        function: String,
    },
}

impl InlineError {
    /// The function that stands in the way.
    pub fn function(&self) -> &str {
        match self {
            InlineError::Large { function, .. }
            | InlineError::Deep { function, .. }
            | InlineError::Versions { function, .. }
            | InlineError::Circle { function } => function,
        }
    }
}

fn counted(n: u64) -> String {
    match n {
        u64::MAX => format!("more than {}", u64::MAX - 1),
        n => n.to_string(),
    }
}

/// Replaces every call by the nodes of its function, in functions and bodies too. Nodes and values keep names of
/// their own. Time and memory are linear in the nodes there are afterwards.
///
/// # Errors
/// [`InlineError`], before anything is replaced.
pub fn inline_all(model: &ModelProto) -> Result<ModelProto, InlineError> {
    let Some(graph) = &model.graph else {
        return Ok(model.clone());
    };
    let functions = Index::new(&model.functions);
    refuse_large(&graph.node, &functions)?;
    let reached = functions.reached(&graph.node);
    let opsets = Opsets::new(&model.opset_import);
    for (function, _) in model.functions.iter().zip(reached).filter(|(_, r)| *r) {
        refuse_other_meaning(function, &opsets, &functions)?;
    }
    let names = Names::default();
    names.take(graph);
    let mut inlined = model.clone();
    inlined.functions.clear();
    if let Some(graph) = &mut inlined.graph {
        let nodes = std::mem::take(&mut graph.node);
        graph.node = flat(nodes, &functions, &names);
    }
    Ok(inlined)
}

/// The nodes with no calls left. The call stack grows only with bodies, whose depth [`refuse_large`] bounds.
fn flat(nodes: Vec<NodeProto>, functions: &Index, names: &Names) -> Vec<NodeProto> {
    let mut all = Vec::with_capacity(nodes.len());
    let mut open = vec![nodes.into_iter()];
    while let Some(nodes) = open.last_mut() {
        let Some(mut node) = nodes.next() else {
            open.pop();
            continue;
        };
        for body in bodies_mut(&mut node) {
            let inner = std::mem::take(&mut body.node);
            body.node = flat(inner, functions, names);
        }
        match functions.called(&node) {
            None => all.push(node),
            Some(function) => {
                let stays = |node: &NodeProto| functions.position(node).is_none();
                open.push(expanded(function, &node, names, &stays).into_iter());
            }
        }
    }
    all
}

/// Domain and name of a function.
fn name_of(function: &FunctionProto) -> String {
    match function.domain.as_str() {
        "" => function.name.clone(),
        domain => format!("{domain}.{}", function.name),
    }
}

/// Counts what calls become before any is replaced.
fn refuse_large(nodes: &[NodeProto], functions: &Index) -> Result<(), InlineError> {
    let mut called = Vec::new();
    calls(nodes, functions, &mut called);
    let extents = called.iter().map(|(function, position)| {
        let extent = functions.extent_of(*position);
        let function = name_of(function);
        match extent {
            Some(extent) => Ok((function, extent)),
            None => Err(InlineError::Circle { function }),
        }
    });
    let extents: Vec<(String, Extent)> = extents.collect::<Result<_, _>>()?;
    let sum = |sum: u64, (_, extent): &(String, Extent)| sum.saturating_add(extent.n_nodes);
    let n_nodes = extents.iter().fold(0, sum);
    if let Some((function, extent)) = extents.iter().max_by_key(|(_, e)| e.n_nodes)
        && n_nodes > MOST_NODES
    {
        return Err(InlineError::Large {
            function: function.clone(),
            n_nodes,
            n_of_function: extent.n_nodes,
        });
    }
    let n_deep = functions.extent(nodes).map_or(0, |e| e.n_bodies_inside);
    match extents.into_iter().max_by_key(|(_, e)| e.n_bodies_inside) {
        Some((function, _)) if n_deep > MOST_BODIES_INSIDE => {
            Err(InlineError::Deep { function, n_deep })
        }
        _ => Ok(()),
    }
}

/// The functions that nodes call themselves, with their positions.
fn calls<'m>(
    nodes: &[NodeProto],
    functions: &Index<'m>,
    into: &mut Vec<(&'m FunctionProto, usize)>,
) {
    for node in nodes {
        into.extend(functions.called(node).zip(functions.position(node)));
        for body in bodies(node) {
            calls(&body.node, functions, into);
        }
    }
}

/// Refuses a function with an operator that changed between its version of the operators and the model's.
fn refuse_other_meaning(
    function: &FunctionProto,
    opsets: &Opsets,
    functions: &Index,
) -> Result<(), InlineError> {
    let own = Opsets::new(&function.opset_import);
    match changed(&function.node, &own, opsets, functions) {
        None => Ok(()),
        Some(node) => Err(InlineError::Versions {
            function: name_of(function),
            own: own.version(&node.domain),
            version: opsets.version(&node.domain),
            node: label(node),
        }),
    }
}

/// The first node whose operator changed between two versions.
fn changed<'n>(
    nodes: &'n [NodeProto],
    a: &Opsets,
    b: &Opsets,
    functions: &Index,
) -> Option<&'n NodeProto> {
    nodes.iter().find_map(|node| {
        let domain = if is_standard(node) { "" } else { &node.domain };
        let since = |version: i64| {
            let known = versions(domain, &node.op_type).iter();
            known
                .map(|schema| schema.since)
                .rev()
                .find(|n| *n <= version)
        };
        let differs = since(a.version(domain)) != since(b.version(domain));
        if differs && functions.position(node).is_none() {
            return Some(node);
        }
        bodies(node).find_map(|body| changed(&body.node, a, b, functions))
    })
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, function, line, nested, shown, value};
    use super::*;
    use crate::element::Element;
    use crate::proto::{AttributeProto, GraphProto, attribute_type};
    use crate::verify::{self, Checker};
    use std::collections::BTreeSet;

    /// Inlines, and checks that no name is used twice and that the results are the same.
    fn inlined(trial: &Trial) -> GraphProto {
        let model = trial.model();
        let inlined = inline_all(&model.proto).expect("it is inlined");
        assert!(inlined.functions.is_empty());
        let checker = Checker::new(&model, &verify::Options::default()).expect("it runs");
        let evidence = checker.check(&inlined).expect("the same");
        assert_eq!(evidence.cuts, Vec::<String>::new());
        let graph = inlined.graph.expect("a graph");
        let mut taken = BTreeSet::new();
        let is_new = |name: &String| name.is_empty() || taken.insert(name.clone());
        assert!(graph.node.iter().map(|n| &n.name).all(is_new));
        let mut taken = BTreeSet::new();
        let mut outputs = graph.node.iter().flat_map(|n| &n.output);
        assert!(outputs.all(|name| taken.insert(name)));
        graph
    }

    fn named(name: &str, text: &str) -> NodeProto {
        NodeProto {
            name: name.to_string(),
            ..line(text, Vec::new())
        }
    }

    #[test]
    fn a_long_function_is_inlined_wherever_it_is_called() {
        let mut nodes = vec![named("first", "v0 = Neg(p)")];
        nodes.extend((1..12).map(|n| line(&format!("v{n} = Sin(v{})", n - 1), Vec::new())));
        nodes.push(line("r = Add(v11, p)", Vec::new()));
        let trial = Trial::new(17).input("x", "n 4").output("y", "n 4");
        let trial = trial.function(function("Long", nodes));
        let graph = inlined(&trial.node("a = local.Long(x)").node("y = local.Long(a)"));
        assert_eq!(graph.node.len(), 26);
        assert_eq!(graph.node[13].name, "first_1");
        assert_eq!(shown(&graph)[25], "y = Add(v11_1, a)");
    }

    #[test]
    fn functions_in_functions_and_in_bodies_are_inlined() {
        let branch = |name: &str, nodes: &[&str]| AttributeProto {
            name: name.to_string(),
            r#type: attribute_type::GRAPH,
            g: Some(GraphProto {
                name: name.to_string(),
                node: nodes.iter().map(|n| line(n, Vec::new())).collect(),
                output: vec![value("u", Element::F32, "N 4")],
                ..Default::default()
            }),
            ..Default::default()
        };
        let branches = vec![
            branch("then_branch", &["t = local.Inner(p)", "u = local.Inner(t)"]),
            branch("else_branch", &["u = Neg(p)"]),
        ];
        let mut outer = function(
            "Outer",
            vec![
                named("inner", "s = local.Inner(p)"),
                named("inner", "t = local.Inner(s)"),
                line("i = If(c)", branches),
                line("r = Add(i, t)", Vec::new()),
            ],
        );
        outer.input.push("c".to_string());
        let inner = vec![
            line("t = Sin(p)", Vec::new()),
            line("r = Exp(t)", Vec::new()),
        ];
        // The functions and the caller use the same names for values.
        let trial = Trial::new(17)
            .input("x", "N 4")
            .input_of("c", Element::Bool, "")
            .output("y", "N 4")
            .function(function("Inner", inner))
            .function(outer)
            .node("t = Neg(x)")
            .node("y = local.Outer(t, c)");
        let graph = inlined(&trial);
        let ops: Vec<&str> = graph.node.iter().map(|n| n.op_type.as_str()).collect();
        assert_eq!(ops, ["Neg", "Sin", "Exp", "Sin", "Exp", "If", "Add"]);
        let then = graph.node[5].attribute[0].g.as_ref().expect("a branch");
        let ops: Vec<&str> = then.node.iter().map(|n| n.op_type.as_str()).collect();
        assert_eq!(ops, ["Sin", "Exp", "Sin", "Exp"]);
        let names: Vec<&str> = graph.node[1..5].iter().map(|n| n.name.as_str()).collect();
        assert_eq!(names, ["inner", "inner_1", "inner_2", "inner_3"]);
    }

    #[test]
    fn what_would_become_too_long_is_refused_before_it_is_made() {
        let error = inline_all(&nested(30, 2).model().proto).expect_err("too long");
        assert_eq!(error.function(), "local.F0");
        let said = error.to_string();
        assert!(said.contains("would become 1610612734 nodes"), "{said}");
        assert!(said.contains("at most 131072 are read"), "{said}");
        // More nodes than a `u64` counts.
        let error = inline_all(&nested(100, 2).model().proto).expect_err("too long");
        assert!(
            error
                .to_string()
                .contains("become more than 18446744073709551614 nodes")
        );
        assert!(inline_all(&nested(15, 2).model().proto).is_ok());
    }

    #[test]
    fn calls_may_be_deep() {
        let graph = inline_all(&nested(5000, 1).model().proto).expect("it is inlined");
        let graph = graph.graph.expect("a graph");
        assert_eq!(shown(&graph), ["y = Relu(x)"]);
    }

    #[test]
    fn names_that_are_met_often_cost_no_more_each() {
        // Looking for a free number from 1 on would take 2^29 looks.
        let names = Names::default();
        let made: Vec<String> = (0..1 << 15).map(|_| names.fresh("a")).collect();
        assert_eq!(made[(1 << 15) - 1], format!("a_{}", (1 << 15) - 1));
    }

    #[test]
    fn operators_that_changed_between_the_versions_are_refused() {
        let with = |op: &str| {
            let mut older = function("Older", vec![line(&format!("r = {op}(p)"), Vec::new())]);
            older.opset_import[0].version = 12;
            let trial = Trial::new(17).input("x", "n 4").output("y", "n 4");
            let trial = trial.function(older).node("y = local.Older(x)");
            inline_all(&trial.model().proto)
        };
        // Sin is that of version 7 in both, Softmax is another one from version 13 on.
        assert!(with("Sin").is_ok());
        let error = with("Softmax").expect_err("another meaning");
        let expected = "`local.Older` is written with version 12 of the operators and the file with version 17, \
                        and Softmax → `r` does not mean the same in both; export the model with one version";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn functions_in_a_circle_are_refused() {
        let trial = Trial::new(17).input("x", "4").output("y", "4");
        let trial = trial.function(function("A", vec![line("r = local.B(p)", Vec::new())]));
        let trial = trial.function(function("B", vec![line("r = local.A(p)", Vec::new())]));
        let error = inline_all(&trial.node("y = local.A(x)").model().proto);
        let expected = InlineError::Circle {
            function: "local.A".to_string(),
        };
        assert_eq!(error.expect_err("a circle"), expected);
    }

    #[test]
    fn bodies_that_would_be_too_deep_are_refused() {
        // Each function calls the next from a body.
        let mut trial = Trial::new(17).input("x", "4").output("y", "4");
        trial = trial.input_of("c", Element::Bool, "");
        for n in 0..=MOST_BODIES_INSIDE {
            let text = match n == MOST_BODIES_INSIDE {
                true => "u = Relu(p)".to_string(),
                false => format!("u = local.F{}(p, c)", n + 1),
            };
            let branch = |name: &str| AttributeProto {
                name: name.to_string(),
                r#type: attribute_type::GRAPH,
                g: Some(GraphProto {
                    node: vec![line(&text, Vec::new())],
                    output: vec![value("u", Element::F32, "4")],
                    ..Default::default()
                }),
                ..Default::default()
            };
            let nodes = vec![line("r = If(c)", vec![branch("then_branch")])];
            let mut deep = function(&format!("F{n}"), nodes);
            deep.input.push("c".to_string());
            trial = trial.function(deep);
        }
        let error = inline_all(&trial.node("y = local.F0(x, c)").model().proto);
        let expected = InlineError::Deep {
            function: "local.F0".to_string(),
            n_deep: MOST_BODIES_INSIDE + 1,
        };
        assert_eq!(error.expect_err("too deep"), expected);
    }
}
