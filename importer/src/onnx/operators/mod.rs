//! The operators of the ONNX standard, one file per family: each a rule from a node to library nodes.
//!
//! Adding one: a function in its family's file, and a row in that file's `RULES`.

mod activation;
mod arithmetic;
mod attention;
mod bits;
mod contraction;
mod convolution;
mod deformed;
mod features;
mod indexing;
mod loss;
mod ngrams;
mod normalization;
mod optimizers;
mod pooling;
mod quantization;
mod reduction;
mod resize;
mod runtime;
mod runtime_attention;
mod sampling;
mod sequence;
mod sequences;
mod shape;
mod signal;
mod slicing;
mod source;
mod trees;
mod unsized_results;

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
    bits::RULES,
    contraction::RULES,
    convolution::RULES,
    deformed::RULES,
    features::RULES,
    indexing::RULES,
    loss::RULES,
    ngrams::RULES,
    normalization::RULES,
    optimizers::RULES,
    pooling::RULES,
    quantization::RULES,
    reduction::RULES,
    resize::RULES,
    runtime::RULES,
    runtime_attention::RULES,
    sampling::RULES,
    sequence::RULES,
    sequences::RULES,
    shape::RULES,
    signal::RULES,
    slicing::RULES,
    source::RULES,
    trees::RULES,
    unsized_results::RULES,
];

/// The rule for an operator, with its domain if that is not the standard's first.
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
