//! The operators of the ONNX standard, one file per family: each a rule from a node to library nodes.
//!
//! Adding one: a function in its family's file, and a row in that file's `RULES`.

mod activation;
mod arithmetic;
mod attention;
mod contraction;
mod convolution;
mod indexing;
mod loss;
mod normalization;
mod pooling;
mod reduction;
mod resize;
mod shape;
mod slicing;
mod source;

use super::node::{NodeCx, Refusal};
use super::value::Value;

/// Appends what a node computes and returns the values of its outputs.
pub type Rule = fn(&mut NodeCx) -> Result<Vec<Value>, Refusal>;

/// What every rule returns.
type Values = Result<Vec<Value>, Refusal>;

/// Rules by operator.
type Rules = &'static [(&'static str, Rule)];

static FAMILIES: &[Rules] = &[
    activation::RULES,
    arithmetic::RULES,
    attention::RULES,
    contraction::RULES,
    convolution::RULES,
    indexing::RULES,
    loss::RULES,
    normalization::RULES,
    pooling::RULES,
    reduction::RULES,
    resize::RULES,
    shape::RULES,
    slicing::RULES,
    source::RULES,
];

/// The rule for an operator of the standard.
pub fn find(op_type: &str) -> Option<Rule> {
    let mut rules = FAMILIES.iter().flat_map(|family| family.iter());
    rules
        .find(|(name, _)| *name == op_type)
        .map(|(_, rule)| *rule)
}

/// All operators with a rule, ordered.
pub fn names() -> Vec<&'static str> {
    let rules = FAMILIES.iter().flat_map(|family| family.iter());
    let mut names: Vec<_> = rules.map(|(name, _)| *name).collect();
    names.sort_unstable();
    names
}

/// One output.
fn single(id: graph::ContainerId) -> Values {
    Ok(vec![Value::Data(id)])
}
