//! Element-wise functions of one value, written node by node, put together as one node.
//!
//! Before: `%a = div(%x, √2)`, `%b = erf(%a)`, `%c = add(%b, 1)`, `%d = mul(%x, %c)`, `%y = mul(%d, 0.5)`.
//! After: `%y = elementwise(%x)` of the whole expression. The derivative then is one expression as well,
//! in which products have their constants and the incoming gradient in common; node by node each would be
//! a pass over memory. Only smooth functions are merged: the derivative of what comparisons choose is better written
//! with operators than as an expression. Used for training graphs as files only.

use graph::{Attr, Binary, ContainerId, Expr, Graph, Library, Lifetime, NodeKind, Unary};
use ops::elementwise::gradient_attr;
use std::collections::{BTreeMap, BTreeSet};

/// Parts of an expression at most: a longer one starts anew.
const MOST_PARTS: usize = 48;

/// A function of one value.
struct Function {
    of: ContainerId,
    expr: Expr,
    /// Whether other nodes' expressions are in it.
    is_composed: bool,
}

/// Writes each element-wise node that is a smooth function of one value through others as one node of that
/// value. Nodes that nobody reads any more stay; simplification drops them.
pub(crate) fn merge_functions(graph: &mut Graph) {
    let functions = functions(graph);
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    // A function that any other node or the caller reads stays a node. What only such functions read becomes a part of
    // them.
    let mut read: BTreeSet<ContainerId> = outputs;
    graph.visit_nodes(&mut |node| {
        if !node.writes().iter().any(|id| functions.contains_key(id)) {
            read.extend(node.reads());
        }
    });
    let Some(state) = graph.single_state_mut() else {
        return;
    };
    for node in &mut state.nodes {
        let NodeKind::Library(library) = &mut node.kind else {
            continue;
        };
        let Some(Some(out)) = library.outputs.first() else {
            continue;
        };
        if let Some(function) = functions.get(out).filter(|f| f.is_composed)
            && read.contains(out)
        {
            let expr = Attr::Expr(function.expr.clone());
            library.attrs.insert("expr".into(), expr);
            library.inputs = vec![Some(function.of)];
        }
    }
}

/// Every container that is a smooth function of another one.
fn functions(graph: &Graph) -> BTreeMap<ContainerId, Function> {
    let mut found = BTreeMap::new();
    let nodes = graph.single_state().into_iter().flat_map(|s| &s.nodes);
    for node in nodes {
        if let NodeKind::Library(library) = &node.kind
            && let [Some(out)] = library.outputs.as_slice()
            && let Some(function) = function(graph, library, *out, &found)
        {
            found.insert(*out, function);
        }
    }
    found
}

fn function(
    graph: &Graph,
    library: &Library,
    out: ContainerId,
    found: &BTreeMap<ContainerId, Function>,
) -> Option<Function> {
    let (container, Attr::Expr(expr)) = (graph.container(out), library.attrs.get("expr")?) else {
        return None;
    };
    let has_gradient = library.attrs.contains_key(&*gradient_attr(0));
    if library.op != "elementwise" || !container.dtype.is_float() || !is_smooth(expr) {
        return None;
    }
    if has_gradient {
        return None;
    }
    let (mut of, mut is_composed, mut operands) = (None, false, Vec::new());
    for input in &library.inputs {
        let input = (*input)?;
        let c = graph.container(input);
        if c.dtype != container.dtype {
            return None;
        }
        if let Lifetime::Constant(number) = &c.lifetime
            && number.len() == 1
        {
            operands.push(Expr::float(*number.to_f64().first()?));
            continue;
        }
        let known = found.get(&input);
        let (value, operand) = match known {
            Some(known) => (known.of, known.expr.clone()),
            None => (input, Expr::In(0)),
        };
        if c.shape != container.shape || *of.get_or_insert(value) != value {
            return None;
        }
        is_composed |= known.is_some();
        operands.push(operand);
    }
    let expr = expr.substitute_inputs(&|i| operands[i].clone());
    let mut n_parts = 0;
    expr.visit(&mut |_| n_parts += 1);
    Some(Function {
        of: of.filter(|_| n_parts <= MOST_PARTS)?,
        expr,
        is_composed,
    })
}

/// Whether the expression and its derivatives are made of arithmetic only.
fn is_smooth(e: &Expr) -> bool {
    use Unary::*;
    match e {
        Expr::In(_) => true,
        Expr::Const(_) => e.as_number().is_some(),
        Expr::Unary(f, a) => {
            let smooth = matches!(
                f,
                Neg | Exp | Log | Sqrt | Recip | Sin | Cos | Tanh | Erf | Sigmoid
            );
            smooth && is_smooth(a)
        }
        Expr::Binary(Binary::Add | Binary::Sub | Binary::Mul | Binary::Div, a, b) => {
            is_smooth(a) && is_smooth(b)
        }
        Expr::Binary(Binary::Pow, a, b) => b.as_number().is_some() && is_smooth(a),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::{Bindings, Builder, DType, Precision, Stage, SymExpr, Tensor, interpret};
    use ops::{Meaning, OpBuilder};
    use std::sync::Arc;

    /// A graph of `x` and `y`, whose outputs `build` gives.
    fn made(build: impl FnOnce(&mut Builder, [ContainerId; 2]) -> Vec<ContainerId>) -> Graph {
        let mut graph = Graph::new("functions");
        let shape = vec![SymExpr::constant(3)];
        let [x, y] = ["x", "y"]
            .map(|name| graph.add_input(name, DType::F64, shape.clone(), Lifetime::Input));
        let mut builder = Builder::new(&mut graph, Arc::default(), Stage::Forward);
        let outputs = build(&mut builder, [x, y]);
        let nodes = std::mem::take(&mut builder.nodes);
        graph.last_state().nodes.extend(nodes);
        for output in outputs {
            graph.add_output(output);
        }
        graph
    }

    /// Merges, checks that the values stay the same, drops dead nodes, and returns how many nodes are left.
    fn merged(mut graph: Graph) -> usize {
        let given = [vec![0.3, -1.2, 2.0], vec![1.5, -0.1, 0.7]];
        let given = given.map(|list| Tensor::from_f64(DType::F64, &[3], list));
        let values = |graph: &Graph| {
            let none = Bindings::new();
            let found = interpret(graph, &given, &none, &Meaning, Precision::Double);
            let found = found.expect("interprets");
            found.iter().flat_map(Tensor::to_f64).collect::<Vec<f64>>()
        };
        let before = values(&graph);
        merge_functions(&mut graph);
        graph::simplify_before_gradients(&mut graph, &Meaning);
        let after = values(&graph);
        assert_eq!(before.len(), after.len());
        for (before, after) in before.iter().zip(&after) {
            let apart = (before - after).abs();
            assert!(apart <= 1e-15 * before.abs().max(1.0), "{before} {after}");
        }
        graph.single_state().expect("one state").nodes.len()
    }

    fn erf(b: &mut Builder, x: ContainerId) -> ContainerId {
        let scaled = b.elementwise(Expr::In(0).div(Expr::float(2f64.sqrt())), &[x]);
        let erf = Expr::unary(Unary::Erf, Expr::In(0));
        b.elementwise(erf, &[scaled.unwrap()]).unwrap()
    }

    #[test]
    fn a_function_of_one_value_becomes_one_node() {
        let gelu = made(|b, [x, _]| {
            let erf = erf(b, x);
            let product = Expr::In(0).mul(Expr::In(1).add(Expr::float(1.0)));
            vec![b.elementwise(product, &[x, erf]).unwrap()]
        });
        assert_eq!(merged(gelu), 1);
    }

    #[test]
    fn what_others_read_too_stays_and_is_not_computed_in_parts() {
        let both = made(|b, [x, _]| {
            let erf = erf(b, x);
            let exp = b.elementwise(Expr::In(0).exp(), &[erf]).unwrap();
            vec![erf, exp]
        });
        assert_eq!(merged(both), 2);
    }

    #[test]
    fn functions_of_two_values_and_steps_stay() {
        let two = made(|b, [x, y]| {
            let exp = b.elementwise(Expr::In(0).exp(), &[x]).unwrap();
            vec![
                b.elementwise(Expr::In(0).mul(Expr::In(1)), &[exp, y])
                    .unwrap(),
            ]
        });
        assert_eq!(merged(two), 2);
        let steps = made(|b, [x, _]| {
            let exp = b.elementwise(Expr::In(0).exp(), &[x]).unwrap();
            let floor = Expr::unary(Unary::Floor, Expr::In(0));
            vec![b.elementwise(floor, &[exp]).unwrap()]
        });
        assert_eq!(merged(steps), 2);
    }

    #[test]
    fn a_long_function_starts_anew() {
        let n_steps = 2 * MOST_PARTS;
        let long = made(|b, [x, _]| {
            let step = |b: &mut Builder, of| b.elementwise(Expr::In(0).exp().neg(), &[of]).unwrap();
            vec![(0..n_steps).fold(x, |of, _| step(b, of))]
        });
        let found = merged(long);
        assert!(found > 1 && found < n_steps / 4, "{found}");
    }
}
