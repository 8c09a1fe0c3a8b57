//! Sizes and kinds of numbers to try a model with, as values that can be compared and described.
//!
//! Owns how an attempt is described; which ones are made is for `samples.rs`.

use super::samples::Planted;
use graph::{Bindings, Symbol};
use std::collections::BTreeMap;

/// How integers are made up if they look nothing up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Integers {
    /// 0 and 1: masks.
    Masks,
    /// Numbers of both signs.
    Signed,
    /// 0, also where something is looked up.
    Zeros,
    /// 1 where nothing is looked up: masks that leave everything in.
    Ones,
}

/// Sizes to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub(super) sizes: BTreeMap<String, i64>,
    pub(super) integers: Integers,
    /// Whether floats are all above zero, as logarithms and roots need.
    pub(super) positive: bool,
    /// Whether inputs that decide sizes are made to fit the declared sizes.
    pub(super) fitted: bool,
}

impl Attempt {
    /// Whether floats are all above zero.
    pub fn is_positive(&self) -> bool {
        self.positive
    }

    /// Returns the attempt with masks that leave everything in.
    pub fn unmasked(&self) -> Attempt {
        Attempt {
            integers: Integers::Ones,
            ..self.clone()
        }
    }

    pub(super) fn bindings(&self) -> Bindings {
        let sizes = self.sizes.iter();
        sizes.map(|(name, n)| (Symbol::new(name), *n)).collect()
    }

    /// A text for people: seed, sizes, what is planted.
    pub fn describe(&self, seed: usize, planted: Planted) -> String {
        let sizes: Vec<String> = self
            .sizes
            .iter()
            .map(|(name, n)| format!("{name}={n}"))
            .collect();
        let mut text = format!("seed {seed}");
        if !sizes.is_empty() {
            text = format!("{text}, {}", sizes.join(" "));
        }
        if self.integers == Integers::Ones {
            text.push_str(", masks all 1");
        }
        text.push_str(planted.described());
        text
    }
}
