//! Decisions that did not come true: what fusion joined and lowering wrote as several kernels.
//!
//! Owns which decisions a split undoes. Why there is a split is lowering's to say.

use crate::plan::Plan;
use crate::recipe::Unmet;
use fusion::{Applied, Decision, Outcome};
use graph::{ContainerId, Place};
use kernels::lowering::{KernelInfo, Split, SplitReason};
use serde::Serialize;

/// A decision that lowering undid: its bytes are moved after all.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Undone {
    /// The decision's identity.
    #[serde(skip)]
    pub place: Place,
    /// The rewrite, by name.
    pub rewrite: &'static str,
    /// The node, with the line it came from.
    pub origin: String,
    /// Why the kernel was split.
    pub reason: SplitReason,
    /// Bytes that it would have saved.
    pub bytes: i64,
    /// The same fact as a sentence.
    pub sentence: String,
}

/// The decisions of a plan that its kernels do not follow, in the plan's order.
pub fn undone(plan: &Plan, kernels: &[KernelInfo]) -> Vec<Undone> {
    let splits: Vec<&Split> = kernels.iter().flat_map(|k| &k.splits).collect();
    if splits.is_empty() {
        return Vec::new();
    }
    let undone = |decision: &Decision| {
        let split = splits.iter().find(|s| separates(plan, s, decision))?;
        let (rewrite, reason) = (decision.rewrite().name(), split.reason);
        Some(Undone {
            place: decision.place.clone(),
            rewrite,
            origin: decision.origin.to_string(),
            reason,
            bytes: decision.bytes,
            sentence: format!("{rewrite} at {} was undone: {reason}", decision.origin),
        })
    };
    plan.decisions.iter().filter_map(undone).collect()
}

/// Whether a split takes apart what a decision put together.
fn separates(plan: &Plan, split: &Split, decision: &Decision) -> bool {
    let part = |id: ContainerId| split.parts.iter().position(|p| p.contains(&id));
    let named = |name: &str| plan.graph.find(name).and_then(part);
    let Outcome::Applied(done) = &decision.outcome else {
        return false;
    };
    match done {
        Applied::Joined { .. } => {
            let own = named(&decision.place.container);
            let other = decision.place.other.as_deref().and_then(named);
            own.zip(other).is_some_and(|(own, other)| own != other)
        }
        Applied::Packed { operands } => operands.iter().any(|id| part(*id).is_some()),
        Applied::PackedFirst { .. } => named(&decision.place.container).is_some(),
        Applied::Chained { tiles, .. } => tiles.iter().any(|id| part(*id).is_some()),
        Applied::Inlined
        | Applied::Recomputed
        | Applied::Viewed
        | Applied::PartsInPlace { .. }
        | Applied::LaidOut { .. } => false,
    }
}

/// What a recipe asks for and lowering undid, in sentences.
pub fn unfollowed(plan: &Plan, undone: &[Undone]) -> Vec<String> {
    let asked = |u: &&Undone| plan.recipe.override_for(|| u.place.clone()) == Some(true);
    let unmet = |u: &Undone| Unmet {
        place: u.place.clone(),
        take: true,
        reason: Some(u.reason.to_string()),
    };
    let unmet = undone.iter().filter(asked).map(unmet);
    unmet.map(|u| u.sentence()).collect()
}
