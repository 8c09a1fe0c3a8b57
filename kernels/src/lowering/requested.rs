//! What a recipe says about single contractions, and what lowering reports about them.

use super::{Lowered, Lowering, PLACEHOLDER};
use crate::contraction::{
    self, BlockingChoice, Contraction, EmittedContraction, Hooks, PriorPlans, Unsupported,
};
use crate::recognize::Recognized;
use graph::{Blocking, Node, Place, Recipe, Rewrite};
use sha2::{Digest, Sha256};

/// What changes how a program is lowered.
#[derive(Clone, Debug, Default)]
pub struct LoweringOptions<'a> {
    /// How contractions of other sizes were planned.
    pub known: Option<&'a PriorPlans>,
    /// What a recipe says about blocking.
    pub recipe: Option<&'a Recipe>,
    /// Number of the best other ways to cut each contraction that are reported.
    pub n_others: usize,
    /// Cuts contractions not in the best way, but in one whose text differs from the best one's in as many numbers as
    /// possible.
    pub varies: bool,
}

/// How a contraction of the graph was cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockingDecision {
    /// The decision's place.
    pub place: Place,
    /// What the recipe says, if anything.
    pub requested: Option<Blocking>,
    /// What was chosen, and what else could have been.
    pub cuts: BlockingChoice,
}

impl Lowering<'_> {
    /// The text of a contraction, which is made once for all that are equal.
    pub(super) fn emitted(
        &mut self,
        c: &Contraction,
        hooks: &Hooks,
    ) -> Result<EmittedContraction, Unsupported> {
        let (known, requested) = (&self.target.known, &self.target.requested);
        let key = format!("{c:?} {hooks:?} {known:?} {requested:?}");
        if let Some(emitted) = self.emitted.get(&key) {
            return emitted.clone();
        }
        let emitted = contraction::emit(PLACEHOLDER, c, hooks, &self.target);
        self.emitted.insert(key, emitted.clone());
        emitted
    }

    /// Looks up what the recipe says about a contraction, for the emission that follows.
    pub(super) fn requested(&mut self, node: &Node, found: &Recognized) -> Place {
        let name = &self.graph.container(found.out).name;
        let place = Place::new(Rewrite::Blocking, node, name);
        self.target.requested.blocking = self.recipe.blocking(|| place.clone()).cloned();
        place
    }

    /// How a contraction was cut, where there was a choice.
    pub(super) fn placed(
        &self,
        place: Place,
        emitted: &EmittedContraction,
    ) -> Option<BlockingDecision> {
        let cuts = emitted.cuts.clone()?;
        Some(BlockingDecision {
            requested: self.target.requested.blocking.clone(),
            place,
            cuts,
        })
    }
}

impl Lowered {
    /// A digest of its kernels without their names: equal for kernels of equal text on as many threads, if `made_by`,
    /// the compiler and its flags, is equal too.
    pub fn structure(&self, made_by: &[&str]) -> String {
        let mut digest = Sha256::new();
        digest.update(self.threads.to_le_bytes());
        for text in made_by {
            digest.update((text.len() as u64).to_le_bytes());
            digest.update(text);
        }
        digest.update(super::head());
        for source in &self.sources {
            digest.update((source.text.len() as u64).to_le_bytes());
            digest.update(&source.text);
        }
        let bytes = digest.finalize();
        bytes[..12].iter().map(|b| format!("{b:02x}")).collect()
    }
}
