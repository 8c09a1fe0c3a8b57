//! Changes of a file that somebody asks for: a part of it, inferred sizes written down, texts left out, other names,
//! newer and older versions of the operators, dynamic sizes, 16-bit floats, loops written out.
//!
//! Each takes a model and gives another one. None of them is a rewrite: what a rewrite may do is to keep what a
//! file gives, and these change its interface or what it says of itself.

mod extract;
mod free;
mod halve;
mod lower;
mod raise;
mod rename;
mod request;
mod sizes;
mod strip;
mod unroll;

pub use extract::{ExtractError, extract};
pub use free::{FreeError, Freed, Names, free, parse_names};
pub use halve::{ALWAYS_KEPT, HalveError, Halved, halve};
pub use lower::lower;
pub use raise::{RAISED_TO, RaiseError, in_known_version, raise, version};
pub use rename::{RenameError, rename};
pub use request::{Changed, InHalf, Request, RequestError};
pub use sizes::{described, with_sizes};
pub use strip::strip;
pub use unroll::unrolled;

use crate::proto::GraphProto;
use std::collections::BTreeSet;

/// Every name of a value in a graph and its bodies.
fn names(graph: &GraphProto, taken: &mut BTreeSet<String>) {
    let ports = graph.input.iter().chain(&graph.output);
    taken.extend(ports.map(|port| port.name.clone()));
    let sparse = graph.sparse_initializer.iter().flat_map(|t| &t.values);
    let stored = graph.initializer.iter().chain(sparse);
    taken.extend(stored.map(|tensor| tensor.name.clone()));
    for node in &graph.node {
        taken.extend(node.output.iter().cloned());
        taken.extend(node.input.iter().cloned());
        for body in crate::attributes::bodies(node) {
            names(body, taken);
        }
    }
}
