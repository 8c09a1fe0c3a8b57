//! Kernels that fusion put together and lowering writes as several: the record, and the reasons.
//!
//! No kernel is split in silence. The record names the containers that each part writes, so that reports can
//! tell which decisions did not come true.

use super::Lowering;
use crate::contraction::{NoFastForm, Unsupported};
use crate::lower::LowerError;
use graph::{ContainerId, Node};
use serde::Serialize;
use std::collections::BTreeSet;
use thiserror::Error;

/// Why one kernel of the graph became several.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitReason {
    /// No form of the contraction takes the work that is fused to it.
    #[error("no fast form of its contraction takes other work: {0}")]
    Contraction(NoFastForm),
    /// Blocks of final results are not ranges of the result's dimensions.
    #[error("its contraction does not finish its result in blocks of whole dimensions")]
    Blocks,
    /// What follows the contraction does not read each element of its result once.
    #[error("the work after its contraction does not go through the result element by element")]
    Elements,
    /// What comes before the contraction is not element-wise work on one of its operands.
    #[error("the work before its contraction does not compute one operand element by element")]
    Operand,
    /// The contraction reads its operands from memory only.
    #[error("its contraction computes no operand while it packs it")]
    Packing,
    /// Containers of 16-bit numbers are converted around the contraction.
    #[error("its contraction converts 16-bit numbers as a whole")]
    Halves,
    /// A chain of products whose form the chain generator does not know.
    #[error("no kernel keeps a chain of this form in registers")]
    Chain,
    /// A table of measured times, or the caller, gives the contraction to a library.
    #[error("a library computes its contraction")]
    Library,
    /// The members of a kernel of loops have too few points in common.
    #[error("its loops have too few points in common to share them among threads")]
    Points,
}

/// A kernel of the graph that became several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The containers that each part writes, in the order of the parts.
    pub parts: Vec<Vec<ContainerId>>,
    /// Why.
    pub reason: SplitReason,
}

impl Split {
    /// The record of a split into nodes.
    pub fn new<'n>(parts: impl IntoIterator<Item = &'n Node>, reason: SplitReason) -> Split {
        Split {
            parts: parts.into_iter().map(Node::writes).collect(),
            reason,
        }
    }

    /// The record of a kernel of loops whose phases became launches of their own, each of which touches some
    /// containers in memory; nothing for one phase.
    pub fn by_phases(node: &Node, touched: &[BTreeSet<ContainerId>]) -> Option<Split> {
        if touched.len() < 2 {
            return None;
        }
        let mut left = node.writes();
        let parts = touched.iter().map(|touched| {
            // Of several phases that touch a container, the first one writes it.
            let (own, later) = left.iter().partition(|id| touched.contains(id));
            left = later;
            own
        });
        Some(Split {
            parts: parts.collect(),
            reason: SplitReason::Points,
        })
    }

    /// All containers that its parts write.
    pub fn written(&self) -> impl Iterator<Item = ContainerId> {
        self.parts.iter().flatten().copied()
    }
}

/// What keeps a kernel from being written as one.
pub(super) enum Stop {
    /// It can be written as several.
    Split(SplitReason),
    /// It cannot be written.
    Error(LowerError),
}

impl From<SplitReason> for Stop {
    fn from(reason: SplitReason) -> Stop {
        Stop::Split(reason)
    }
}

impl From<LowerError> for Stop {
    fn from(error: LowerError) -> Stop {
        Stop::Error(error)
    }
}

impl From<crate::plan::PlanError> for Stop {
    fn from(error: crate::plan::PlanError) -> Stop {
        Stop::Error(error.into())
    }
}

/// Why a kernel must be split; nothing if it was written.
pub(super) fn split_reason(written: Result<(), Stop>) -> Result<Option<SplitReason>, LowerError> {
    match written {
        Ok(()) => Ok(None),
        Err(Stop::Split(reason)) => Ok(Some(reason)),
        Err(Stop::Error(error)) => Err(error),
    }
}

/// What it means that a contraction cannot be emitted with hooks.
pub(super) fn refused(node: &Node, error: Unsupported) -> Stop {
    match error {
        Unsupported::HookOnFallback { reason, .. } => SplitReason::Contraction(reason).into(),
        error => not_emitted(node, &error.to_string()).into(),
    }
}

/// The error for a contraction that no generator takes.
pub(super) fn not_emitted(node: &Node, what: &str) -> LowerError {
    LowerError::Contraction {
        origin: node.origin.to_string(),
        what: what.to_string(),
    }
}

impl Lowering<'_> {
    /// Records a split with the first kernel that came of it.
    pub(super) fn record_split(&mut self, kernel: usize, split: Split) {
        if let Some(info) = self.kernels.get_mut(kernel) {
            info.splits.push(split);
        }
    }
}
