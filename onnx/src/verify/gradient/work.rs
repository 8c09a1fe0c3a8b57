//! What a run of a training graph takes, so that trying one stays a matter of seconds.
//!
//! From sizes alone, before anything runs.

use crate::cost::cost;
use crate::file::Model;
use crate::verify::cuts::needed;
use crate::verify::samples::Shapes;

/// Most elements that are computed in a run; trying a graph takes about four runs, and an element takes about 10 ns.
const MOST_ELEMENTS: u64 = 2 << 30;
/// This many summed products take the time of one element.
const SUMMED_AS_ONE: u64 = 40;
/// Runs of more elements are tried along one direction only.
const MANY_ELEMENTS: u64 = 1 << 28;
/// Most bytes that are alive at once, in float64.
pub(super) const MOST_BYTES: u64 = 4 << 30;

/// What a run takes.
pub(super) struct RunCost {
    elements: u64,
    bytes: u64,
}

impl RunCost {
    /// The cost of the loss and the gradients; an optimizer's update is not run.
    pub(super) fn new(training: &Model, shapes: &Shapes) -> RunCost {
        let mut proto = training.proto.clone();
        if let Some(graph) = &mut proto.graph {
            let is_tried = |name: &str| name == "loss" || name.ends_with(".grad");
            graph.output.retain(|output| is_tried(&output.name));
            let needed = needed(graph);
            let mut at = 0..;
            graph
                .node
                .retain(|_| at.next().is_some_and(|n| needed.contains(&n)));
        }
        let cost = cost(&proto, &training.folder, shapes);
        let elements: u64 = cost.nodes.iter().map(|node| node.elements).sum();
        RunCost {
            elements: elements + cost.multiply_adds / SUMMED_AS_ONE,
            // Most values are stored in half as many bytes.
            bytes: 2 * cost.peak_bytes,
        }
    }

    /// A sentence, if a run takes too much.
    pub(super) fn refusal(&self) -> Option<String> {
        if self.elements > MOST_ELEMENTS {
            return Some(format!(
                "trying it would take minutes: a run is worth {} million elements, and up to {} million \
                 are tried; a smaller batch may do",
                self.elements >> 20,
                MOST_ELEMENTS >> 20
            ));
        }
        (self.bytes > MOST_BYTES).then(|| {
            format!(
                "trying it would take {} MiB of memory, and up to {} MiB are used; a smaller batch may do",
                self.bytes >> 20,
                MOST_BYTES >> 20
            )
        })
    }

    /// Whether a run takes so long that no more than needed are made.
    pub(super) fn is_large(&self) -> bool {
        self.elements > MANY_ELEMENTS
    }
}
