//! Which kernels of loops compute a contraction without its fast form, and why.
//!
//! Owns the check that no contraction becomes loops in silence: lowering records the reason, and reports warn.

use super::members::members;
use crate::contraction::NoFastForm;
use crate::recognize::{recognize, refusal};
use graph::{Graph, Node};

/// Why a contraction among the members of a kernel of loops has no fast form, if there is one.
pub(super) fn reason(graph: &Graph, kernel: &Node) -> Option<NoFastForm> {
    let of_member = |member: &Node| match recognize(graph, member) {
        Some(_) => Some(NoFastForm::NotFirst),
        None => refusal(graph, member),
    };
    members(kernel).iter().find_map(of_member)
}
