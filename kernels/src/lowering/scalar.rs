//! Which kernels of loops compute a contraction without its fast form, and why.
//!
//! Owns the check that no contraction becomes loops in silence: lowering records the reason, and reports warn.

use crate::contraction::NoFastForm;
use crate::recognize::{recognize, refusal};
use graph::{Graph, Node, NodeKind, Schedule};

/// Why a contraction among the members of a kernel of loops has no fast form, if there is one.
pub(super) fn reason(graph: &Graph, kernel: &Node) -> Option<NoFastForm> {
    let members = match &kernel.kind {
        NodeKind::Map(map) if map.schedule == Schedule::Kernel && map.params.is_empty() => {
            map.body.as_slice()
        }
        _ => std::slice::from_ref(kernel),
    };
    let of_member = |member: &Node| match recognize(graph, member) {
        Some(_) => Some(NoFastForm::NotFirst),
        None => refusal(graph, member),
    };
    members.iter().find_map(of_member)
}
