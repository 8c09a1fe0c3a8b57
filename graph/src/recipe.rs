//! The identities of decisions (a rewrite at a place), and recipes, which tell rewrites what to do there.
//!
//! Owns the identity of a decision. It contains no sizes, and the same model gives the same identities in
//! every run, because containers have unique names and one node writes each. Never says what a rewrite does:
//! the rooms that decide know that.

use crate::graph::{Node, Stage};
use std::collections::BTreeMap;
use std::fmt;

/// A rewrite about which there are decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rewrite {
    /// A container is computed where it is read, instead of stored.
    Inline,
    /// A container of the forward pass is computed again in the backward pass, instead of kept.
    Recompute,
    /// Two kernels become one.
    Fuse,
    /// Element-wise work becomes the end of a product's kernel.
    Epilogue,
    /// The kernels of products do the element-wise work whose result they read.
    Prologue,
    /// Products whose results are used element by element become part of the kernels that use them.
    Chain,
    /// An operator of PyTorch reads its operand in place instead of a copy.
    Call,
    /// The parts of a concatenation are written to their places in it, instead of copied.
    Join,
    /// A container gets another order of dimensions in memory than row-major.
    Layout,
    /// A contraction is cut into other blocks than its cost model would choose.
    Blocking,
}

impl Rewrite {
    /// All of them, in order.
    pub const ALL: [Rewrite; 10] = [
        Rewrite::Inline,
        Rewrite::Recompute,
        Rewrite::Fuse,
        Rewrite::Epilogue,
        Rewrite::Prologue,
        Rewrite::Chain,
        Rewrite::Call,
        Rewrite::Join,
        Rewrite::Layout,
        Rewrite::Blocking,
    ];

    /// The name in reports and recipes.
    pub fn name(self) -> &'static str {
        match self {
            Rewrite::Inline => "inline",
            Rewrite::Recompute => "recompute",
            Rewrite::Fuse => "fuse",
            Rewrite::Epilogue => "epilogue",
            Rewrite::Prologue => "prologue",
            Rewrite::Chain => "chain",
            Rewrite::Call => "call",
            Rewrite::Join => "join",
            Rewrite::Layout => "layout",
            Rewrite::Blocking => "blocking",
        }
    }

    /// The rewrite of that name.
    pub fn from_name(name: &str) -> Option<Rewrite> {
        Rewrite::ALL.into_iter().find(|r| r.name() == name)
    }
}

impl fmt::Display for Rewrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Stage {
    /// All of them, in order.
    pub const ALL: [Stage; 3] = [Stage::Forward, Stage::Backward, Stage::Optimizer];

    /// The name in reports and recipes.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Forward => "forward",
            Stage::Backward => "backward",
            Stage::Optimizer => "optimizer",
        }
    }

    /// The stage of that name.
    pub fn from_name(name: &str) -> Option<Stage> {
        Stage::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// Where a decision is taken: its identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// What was decided about.
    pub rewrite: Rewrite,
    /// The pass of the node that writes the container.
    pub stage: Stage,
    /// The node that writes the container, by the name in its origin.
    pub node: String,
    /// The module of that node.
    pub module: String,
    /// The container.
    pub container: String,
    /// If two kernels become one, a container that the first of them writes.
    pub other: Option<String>,
}

impl Place {
    /// The place of a decision about a container that `node` writes.
    pub fn new(rewrite: Rewrite, node: &Node, container: &str) -> Place {
        Place {
            rewrite,
            stage: node.stage,
            node: node.origin.node.clone(),
            module: node.origin.module.clone(),
            container: container.to_string(),
            other: None,
        }
    }

    /// The place of a decision about the kernel that writes a container and the one that writes `other`.
    pub fn with_other(self, other: &str) -> Place {
        Place {
            other: Some(other.to_string()),
            ..self
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.rewrite, self.container)?;
        if let Some(other) = &self.other {
            write!(f, " and `{other}`")?;
        }
        write!(f, " at {}", self.node)?;
        if !self.module.is_empty() {
            write!(f, " in {}", self.module)?;
        }
        write!(f, " ({})", self.stage.name())
    }
}

/// Changes to the compiler's decisions: `true` asks for a rewrite even if it does not pay, `false` forbids it. A
/// rewrite that is not legal stays refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    overrides: BTreeMap<Place, bool>,
    blockings: BTreeMap<Place, Blocking>,
    orders: BTreeMap<Place, Vec<usize>>,
}

impl Recipe {
    /// Tells what to do at a place.
    pub fn tell(&mut self, place: Place, apply: bool) {
        self.orders.remove(&place);
        self.overrides.insert(place, apply);
    }

    /// The recipe's change at a place, if there is one. `place` is called only if the recipe is not empty.
    pub fn override_for(&self, place: impl FnOnce() -> Place) -> Option<bool> {
        match self.overrides.is_empty() {
            true => None,
            false => self.overrides.get(&place()).copied(),
        }
    }

    /// Asks for a blocking of a contraction.
    pub fn cut(&mut self, place: Place, blocking: Blocking) {
        self.blockings.insert(place, blocking);
    }

    /// The blocking that the recipe asks for, if it does.
    pub fn blocking(&self, place: impl FnOnce() -> Place) -> Option<&Blocking> {
        match self.blockings.is_empty() {
            true => None,
            false => self.blockings.get(&place()),
        }
    }

    /// Drops the blockings at places for which `keep` is false.
    pub fn retain_blockings(&mut self, keep: impl Fn(&Place) -> bool) {
        self.blockings.retain(|place, _| keep(place));
    }

    /// All blockings, in order.
    pub fn blockings(&self) -> impl Iterator<Item = (&Place, &Blocking)> {
        self.blockings.iter()
    }

    /// Asks for an order of a container's dimensions in memory, slowest first.
    pub fn lay_out(&mut self, place: Place, order: Vec<usize>) {
        self.overrides.insert(place.clone(), true);
        self.orders.insert(place, order);
    }

    /// All orders that it asks for.
    pub fn orders(&self) -> impl Iterator<Item = (&Place, &[usize])> {
        self.orders
            .iter()
            .map(|(place, order)| (place, order.as_slice()))
    }

    /// Drops the changes at places for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(&Place) -> bool) {
        self.overrides.retain(|place, _| keep(place));
        self.orders.retain(|place, _| keep(place));
        self.blockings.retain(|place, _| keep(place));
    }

    /// All rewrites that it asks for or forbids, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&Place, bool)> {
        self.overrides.iter().map(|(place, apply)| (place, *apply))
    }

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.overrides.is_empty() && self.blockings.is_empty()
    }
}

/// How a contraction is computed. The same text in a file means the same kernel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Blocking {
    /// The definition, cut into blocks. Each part has numbers of its own. The generator of the kernel makes and checks
    /// them.
    Cuts(Vec<[i64; 8]>),
    /// A 3×3 convolution as a Winograd convolution.
    Winograd,
}

impl Blocking {
    /// The numbers of each part; none if it is not cut by numbers.
    pub fn parts(&self) -> &[[i64; 8]] {
        match self {
            Blocking::Cuts(parts) => parts,
            Blocking::Winograd => &[],
        }
    }

    /// Reads what [`Blocking`] prints.
    pub fn parse(text: &str) -> Option<Blocking> {
        if text == WINOGRAD {
            return Some(Blocking::Winograd);
        }
        let part = |part: &str| {
            let numbers: Option<Vec<i64>> = part.split('.').map(|n| n.parse().ok()).collect();
            <[i64; 8]>::try_from(numbers?).ok()
        };
        Some(Blocking::Cuts(
            text.split(' ').map(part).collect::<Option<_>>()?,
        ))
    }
}

const WINOGRAD: &str = "winograd";

/// Numbers with points between them, parts with spaces: `0.0.4.0.2.1.1.0`; or `winograd`.
impl fmt::Display for Blocking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Blocking::Winograd {
            return f.write_str(WINOGRAD);
        }
        let part = |part: &[i64; 8]| part.map(|n| n.to_string()).join(".");
        let parts: Vec<String> = self.parts().iter().map(part).collect();
        f.write_str(&parts.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::{Blocking, Place, Recipe, Rewrite, Stage};
    use crate::graph::{Node, NodeKind, Origin, Tasklet};

    #[test]
    fn names_stand_for_what_they_name() {
        for rewrite in Rewrite::ALL {
            assert_eq!(Rewrite::from_name(rewrite.name()), Some(rewrite));
        }
        for stage in Stage::ALL {
            assert_eq!(Stage::from_name(stage.name()), Some(stage));
        }
        assert_eq!(Rewrite::from_name("fold"), None);
    }

    #[test]
    fn a_blocking_is_what_it_prints() {
        let one = Blocking::Cuts(vec![[0, 1, 4, 0, 2, 3, 1, 2], [0, 0, 1, 0, 1, 1, 1, 0]]);
        assert_eq!(one.to_string(), "0.1.4.0.2.3.1.2 0.0.1.0.1.1.1.0");
        assert_eq!(Blocking::parse(&one.to_string()), Some(one));
        let other = Blocking::Winograd;
        assert_eq!(Blocking::parse(&other.to_string()), Some(other));
        for wrong in ["", "1.2.3", "0.1.4.0.2.3.1.x", "0.1.4.0.2.3.1.2,"] {
            assert_eq!(Blocking::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_recipe_tells_what_it_was_told_and_nothing_else() {
        let node = |source: &str| Node {
            kind: NodeKind::Tasklet(Tasklet {
                inputs: Vec::new(),
                outputs: Vec::new(),
            }),
            origin: Origin {
                node: "relu".into(),
                module: "block.0".into(),
                source: source.into(),
            }
            .into(),
            stage: Stage::Forward,
        };
        let place = |rewrite| Place::new(rewrite, &node("model.py:3"), "y").with_other("x");
        let mut recipe = Recipe::default();
        assert_eq!(recipe.override_for(|| panic!("nothing to ask for")), None);
        recipe.tell(place(Rewrite::Fuse), false);
        assert_eq!(recipe.override_for(|| place(Rewrite::Fuse)), Some(false));
        assert_eq!(recipe.override_for(|| place(Rewrite::Epilogue)), None);
        // The line of the source is no part of a place.
        let moved = Place::new(Rewrite::Fuse, &node("model.py:9"), "y").with_other("x");
        assert_eq!(recipe.override_for(|| moved), Some(false));
        let told = place(Rewrite::Fuse).to_string();
        assert_eq!(told, "fuse `y` and `x` at relu in block.0 (forward)");
        // An order is asked for until something else is told.
        recipe.lay_out(place(Rewrite::Layout), vec![1, 0]);
        assert_eq!(recipe.override_for(|| place(Rewrite::Layout)), Some(true));
        let orders: Vec<&[usize]> = recipe.orders().map(|(_, order)| order).collect();
        assert_eq!(orders, [[1, 0]]);
        recipe.tell(place(Rewrite::Layout), false);
        assert_eq!(recipe.orders().count(), 0);
    }
}
