//! One rule for each ATen operator, by family. Adding one: a line in its family's table.

mod activation;
mod arithmetic;
mod attention;
mod contraction;
mod creation;
mod indexing;
mod loss;
mod movement;
mod normalization;
mod pooling;
mod recurrent;
mod reduction;
mod special;

use super::site::{Results, Site};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Lowers one call to library nodes.
pub(crate) type Rule = fn(&mut Site) -> Results;

/// A family's rules by target.
pub(crate) type Table = &'static [(&'static str, Rule)];

const FAMILIES: &[Table] = &[
    activation::RULES,
    arithmetic::RULES,
    attention::RULES,
    contraction::RULES,
    creation::RULES,
    indexing::RULES,
    loss::RULES,
    movement::RULES,
    normalization::RULES,
    pooling::RULES,
    recurrent::RULES,
    reduction::RULES,
    special::RULES,
];

/// The rule for a target.
pub(crate) fn find(target: &str) -> Option<Rule> {
    static BY_TARGET: OnceLock<BTreeMap<&'static str, Rule>> = OnceLock::new();
    BY_TARGET
        .get_or_init(|| FAMILIES.iter().flat_map(|t| t.iter().copied()).collect())
        .get(target)
        .copied()
}

/// All rules, sorted by target.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, Rule)> {
    let sorted: BTreeMap<_, _> = FAMILIES.iter().flat_map(|t| t.iter().copied()).collect();
    sorted.into_iter()
}
