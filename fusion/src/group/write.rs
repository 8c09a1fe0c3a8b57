//! Writes groups of units down as kernels: one outer map each, members in sequence inside.

use super::links::Links;
use super::{Group, Member};
use crate::FuseError;
use crate::view::substitute_symbol;
use graph::{
    ContainerId, Graph, Map, Node, NodeKind, Origin, Param, Schedule, Storage, SymExpr, Symbol,
};
use std::collections::BTreeSet;

/// Writes groups down as kernels, in an order in which producers come first.
pub(super) fn emit_kernels(
    graph: &mut Graph,
    groups: &[Option<Group>],
) -> Result<Vec<Node>, FuseError> {
    let links = Links::new(groups);
    let outputs: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    let mut n_before = vec![0_usize; groups.len()];
    for later in links.after.iter().flatten() {
        n_before[*later] += 1;
    }
    let key = |at: usize| {
        let group = groups[at].as_ref()?;
        Some((group.stage, group.first(), at))
    };
    let mut waiting: BTreeSet<usize> = (0..groups.len())
        .filter(|at| groups[*at].is_some())
        .collect();
    let ready = waiting.iter().filter(|at| n_before[**at] == 0);
    let mut ready: BTreeSet<_> = ready.filter_map(|at| key(*at)).collect();
    let mut kernels = Vec::new();
    while !waiting.is_empty() {
        let Some((_, _, next)) = ready.pop_first() else {
            let left = waiting.iter().filter_map(|at| groups[*at].as_ref());
            let origins: Vec<String> = left.map(|g| g.origin().to_string()).collect();
            return Err(FuseError::Circle {
                kernels: origins.join(", "),
            });
        };
        waiting.remove(&next);
        for later in &links.after[next] {
            n_before[*later] -= 1;
            if n_before[*later] == 0 {
                ready.extend(key(*later));
            }
        }
        if let Some(group) = &groups[next] {
            let inside = |id: &ContainerId| {
                let readers = links.readers.get(id);
                !outputs.contains(id) && readers.is_some_and(|r| r.iter().all(|r| *r == next))
            };
            if group.members.len() > 1 {
                for id in group.writes.iter().filter(|id| inside(id)) {
                    graph.container_mut(*id).storage = Storage::Local;
                }
            }
            kernels.push(kernel_of(group));
        }
    }
    Ok(kernels)
}

fn kernel_of(group: &Group) -> Node {
    let first = &group.members[0].node;
    if group.members.len() == 1 && group.prologues.is_empty() {
        return first.clone();
    }
    let names: Vec<Symbol> = (0..group.outer.len())
        .map(|k| Symbol::new(format!("p{k}")))
        .collect();
    let body = group
        .prologues
        .iter()
        .chain(&group.members)
        .map(|m| inner_node(group, m, &names))
        .collect();
    let params = if group.contraction {
        Vec::new()
    } else {
        let sized = names.iter().zip(&group.outer);
        sized
            .map(|(name, size)| Param {
                name: name.clone(),
                size: SymExpr::constant(*size),
            })
            .collect()
    };
    let origin = Origin {
        node: joined_names(group),
        ..(*first.origin).clone()
    };
    Node {
        kind: NodeKind::Map(Map {
            params,
            body,
            schedule: Schedule::Kernel,
        }),
        origin: origin.into(),
        stage: group.stage,
    }
}

/// The names of a kernel's members, each once, in order.
fn joined_names(group: &Group) -> String {
    let mut names: Vec<&str> = Vec::new();
    for m in group.members.iter().chain(&group.prologues) {
        if !names.contains(&m.node.origin.node.as_str()) {
            names.push(&m.node.origin.node);
        }
    }
    names.join("+")
}

/// A member inside a kernel: its bound parameters get the outer names and are dropped, the others
/// stay as inner loops under new names. A contraction and its epilogue keep their own parameters.
fn inner_node(group: &Group, member: &Member, outer: &[Symbol]) -> Node {
    let NodeKind::Map(map) = &member.node.kind else {
        return member.node.clone();
    };
    let mut map = map.clone();
    map.schedule = Schedule::Sequential;
    if !group.contraction {
        let target = |n: usize, name: &Symbol| match member.bound.iter().position(|b| b == name) {
            Some(k) => outer[k].clone(),
            None => Symbol::new(format!("q{n}")),
        };
        let targets: Vec<Symbol> = map
            .params
            .iter()
            .enumerate()
            .map(|(n, p)| target(n, &p.name))
            .collect();
        // Temporary names avoid a conflict between a new name and an old one.
        let temporary = |n: usize| Symbol::new(format!("%{n}"));
        for (n, param) in map.params.clone().iter().enumerate() {
            substitute_symbol(&mut map, &param.name, &(&temporary(n)).into());
        }
        for (n, to) in targets.iter().enumerate() {
            substitute_symbol(&mut map, &temporary(n), &to.into());
            map.params[n].name = to.clone();
        }
        map.params.retain(|p| !outer.contains(&p.name));
        if map.params.is_empty() && map.body.len() == 1 {
            return map.body.remove(0);
        }
    }
    Node {
        kind: NodeKind::Map(map),
        ..member.node.clone()
    }
}
