//! The derivative of a map: the same points, with reads and writes exchanged.
//!
//! For `out[f(p)] (+)= e(x[g(p)], …)` the gradient of `x` is the map over the same parameters
//! `dx[g(p)] += dout[f(p)] · ∂e/∂x`. A guarded read becomes a guarded write: padding gets no
//! gradient. The sum needs no conflict resolution when `g` is a bijection onto `x`.

use crate::error::AutodiffError;
use graph::{
    ContainerId, Expr, Graph, Index, Map, Memlet, Node, NodeKind, Param, Reduction, Schedule,
    Stage, Tasklet,
};
use std::collections::{BTreeMap, BTreeSet};

/// Nodes that compute the gradients, and for each differentiated container its contribution.
type Derived = (Vec<Node>, Vec<(ContainerId, ContainerId)>);

/// The gradient of a map with one tasklet.
///
/// # Errors
/// The map is nested, or has a conflict resolution other than a sum.
pub fn differentiate_map(
    graph: &mut Graph,
    node: &Node,
    map: &Map,
    active: &BTreeSet<ContainerId>,
    gradient_of: &dyn Fn(ContainerId) -> Option<ContainerId>,
) -> Result<Derived, AutodiffError> {
    let refuse = |what: &str| AutodiffError::Map {
        origin: node.origin.to_string(),
        what: what.to_string(),
    };
    let [body] = map.body.as_slice() else {
        return Err(refuse(
            "a map with several nodes; differentiate before fusing",
        ));
    };
    let NodeKind::Tasklet(tasklet) = &body.kind else {
        return Err(refuse("nested maps; differentiate before fusing"));
    };
    let mut targets: BTreeMap<ContainerId, Vec<Tasklet>> = BTreeMap::new();
    for (write, expr) in &tasklet.outputs {
        let Some(incoming) = gradient_of(write.container) else {
            continue;
        };
        if !matches!(write.conflict, None | Some(Reduction::Sum)) {
            return Err(refuse(
                "a reduction other than a sum has no derived gradient",
            ));
        }
        for (i, read) in tasklet.inputs.iter().enumerate() {
            if active.contains(&read.container)
                && let Some(t) = transposed(tasklet, (write, incoming), (i, read), expr)
            {
                targets.entry(read.container).or_default().push(t);
            }
        }
    }
    let mut nodes = Vec::new();
    let mut parts = Vec::new();
    for (of, tasklets) in targets {
        for mut tasklet in tasklets {
            let c = graph.container(of).clone();
            let part = graph.add_transient(&format!("grad_{}", c.name), c.dtype, c.shape);
            let write = &mut tasklet.outputs[0].0;
            write.container = part;
            if is_bijection(graph, &map.params, write) {
                write.conflict = None;
            }
            parts.push((of, part));
            nodes.push(map_of(node, map, tasklet));
        }
    }
    Ok((nodes, parts))
}

/// `dx[g(p)] += dout[f(p)] · ∂e/∂x`, or nothing where the derivative is zero.
fn transposed(
    forward: &Tasklet,
    (write, incoming): (&Memlet, ContainerId),
    (position, read): (usize, &Memlet),
    expr: &Expr,
) -> Option<Tasklet> {
    let derivative = expr.derivative(position);
    if derivative.as_number() == Some(0.0) {
        return None;
    }
    let mut inputs = forward.inputs.clone();
    inputs.push(Memlet {
        container: incoming,
        subset: write.subset.clone(),
        fill: write.fill,
        conflict: None,
    });
    let gradient = Expr::In(inputs.len() - 1).mul(derivative).simplify();
    let target = Memlet {
        conflict: Some(Reduction::Sum),
        ..read.clone()
    };
    Some(keep_used(Tasklet {
        inputs,
        outputs: vec![(target, gradient)],
    }))
}

/// Drops inputs that neither the expressions nor data indices use.
fn keep_used(mut tasklet: Tasklet) -> Tasklet {
    let mut used: BTreeSet<usize> = BTreeSet::new();
    let data = |m: &Memlet| -> Vec<usize> {
        let at = |i: &Index| match i {
            Index::Data(d) => Some(*d),
            Index::At(_) => None,
        };
        m.subset.iter().filter_map(at).collect()
    };
    for (memlet, expr) in &tasklet.outputs {
        used.extend(expr.inputs());
        used.extend(data(memlet));
    }
    let indirect: Vec<usize> = used
        .iter()
        .flat_map(|i| data(&tasklet.inputs[*i]))
        .collect();
    used.extend(indirect);
    let order: Vec<usize> = used.into_iter().collect();
    let renamed = |i: usize| order.iter().position(|o| *o == i).unwrap_or(i);
    let rename = |m: &mut Memlet| {
        for index in &mut m.subset {
            if let Index::Data(d) = index {
                *d = renamed(*d);
            }
        }
    };
    tasklet.inputs = order.iter().map(|i| tasklet.inputs[*i].clone()).collect();
    tasklet.inputs.iter_mut().for_each(rename);
    for (memlet, expr) in &mut tasklet.outputs {
        rename(memlet);
        *expr = expr.map_leaves(&|leaf| match leaf {
            Expr::In(i) => Some(Expr::In(renamed(*i))),
            _ => None,
        });
    }
    tasklet
}

/// Whether the write hits every element of its container exactly once.
fn is_bijection(graph: &Graph, params: &[Param], write: &Memlet) -> bool {
    let shape = &graph.container(write.container).shape;
    let mut free: Vec<&Param> = params
        .iter()
        .filter(|p| p.size.as_const() != Some(1))
        .collect();
    let covers = write.subset.iter().zip(shape).all(|(index, size)| {
        let Index::At(at) = index else { return false };
        if size.as_const() == Some(1) && at.is_zero() {
            return true;
        }
        let Some(i) = free.iter().position(|p| at.as_symbol() == Some(&p.name)) else {
            return size.as_const() == Some(1);
        };
        free.remove(i).size == *size
    });
    covers && free.is_empty()
}

fn map_of(forward: &Node, map: &Map, tasklet: Tasklet) -> Node {
    let node = |kind| Node {
        kind,
        origin: forward.origin.clone(),
        stage: Stage::Backward,
    };
    node(NodeKind::Map(Map {
        params: map.params.clone(),
        body: vec![node(NodeKind::Tasklet(tasklet))],
        schedule: Schedule::Default,
    }))
}
