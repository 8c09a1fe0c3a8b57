//! What a caller gives for verification, compared with what the model declares.
//!
//! Owns the refusal of inputs and sizes that do not fit, and the sizes that follow from given inputs,
//! so that what is said about a run is true of it.

use super::VerifyError;
use crate::evaluate::Values;
use crate::fact::Fact;
use crate::proto::GraphProto;
use crate::tensor::Tensor;
use graph::SymExpr;
use std::collections::BTreeMap;

/// The sizes that hold in every run: those that a caller gives, and those of the inputs that a caller gives. `known`
/// are the model's inputs, which are made up where nobody gives them, with the names of their sizes.
///
/// # Errors
/// [`VerifyError::Given`]: an input or a size the model does not have, another type, sizes that do not
/// fit the declared ones or each other.
pub(super) fn preset(
    graph: &GraphProto,
    known: &[(&str, &Fact)],
    inputs: &Values,
    sizes: &BTreeMap<String, i64>,
) -> Result<BTreeMap<String, i64>, VerifyError> {
    let refused = |what: String| VerifyError::Given { what };
    let sizes_of_inputs = known
        .iter()
        .flat_map(|(_, fact)| fact.shape.iter().flatten());
    let mut names: Vec<&str> = sizes_of_inputs
        .filter_map(|size| Some(size.as_symbol()?.as_str()))
        .collect();
    names.sort_unstable();
    names.dedup();
    if let Some(name) = sizes.keys().find(|name| !names.contains(&name.as_str())) {
        let which = match names.is_empty() {
            true => "all sizes of its inputs are fixed".to_string(),
            false => format!("its dynamic sizes are {}", names.join(", ")),
        };
        return Err(refused(format!("no input has a size `{name}`; {which}")));
    }
    let mut preset = sizes.clone();
    for (name, tensor) in inputs {
        if !graph.input.iter().any(|i| i.name == *name) {
            let all: Vec<&str> = graph.input.iter().map(|i| i.name.as_str()).collect();
            let all = all.join(", ");
            return Err(refused(format!(
                "there is no input `{name}`; the inputs are {all}"
            )));
        }
        if let Some((_, fact)) = known.iter().find(|(known, _)| known == name) {
            fit(name, tensor, fact, &mut preset).map_err(refused)?;
        }
    }
    Ok(preset)
}

/// A sum of sizes and numbers, such as `p+s` or `2*p+1`: what a dynamic size is to be.
///
/// # Errors
/// A sentence about what is wrong with the text.
pub fn relation(text: &str) -> Result<SymExpr, String> {
    let factor = |text: &str| match (text.trim(), text.trim().parse::<i64>()) {
        (_, Ok(n)) if n >= 0 => Ok(SymExpr::constant(n)),
        (number, Err(_)) if is_number(number) => Err(format!(
            "`{number}` is no size; a size is a whole number from 0 to {}",
            i64::MAX
        )),
        (name, Err(_)) if !name.is_empty() && !name.starts_with('-') => Ok(SymExpr::symbol(name)),
        (other, _) => Err(format!(
            "`{other}` is no size of at least 0 and no name of one"
        )),
    };
    let is_one_number = is_number(text.trim());
    let mut sum = SymExpr::constant(0);
    // The `+` of a number such as `1e+3` is no sum.
    for term in text.split(|c| c == '+' && !is_one_number) {
        let mut product = SymExpr::constant(1);
        for part in term.split('*') {
            product = product * factor(part)?;
        }
        sum = sum + product;
    }
    Ok(sum)
}

/// Whether a text is a number of any kind; `inf` and `nan` may be names.
fn is_number(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    begins && text.parse::<f64>().is_ok()
}

/// Checks relations against the model's dynamic sizes.
///
/// # Errors
/// [`VerifyError::Given`]: an unknown name, or a size that follows from one that itself follows from others.
pub(super) fn known_relations(
    relations: &BTreeMap<String, SymExpr>,
    names: &[String],
) -> Result<(), VerifyError> {
    let refused = |what: String| Err(VerifyError::Given { what });
    for (name, relation) in relations {
        let symbols = relation.symbols();
        let read = symbols.iter().map(|s| s.as_str());
        for used in std::iter::once(name.as_str()).chain(read) {
            if !names.iter().any(|known| known == used) {
                let known = names.join(", ");
                return refused(format!(
                    "no input has a size `{used}`; its dynamic sizes are {known}"
                ));
            }
        }
        if let Some(other) = symbols.iter().find(|s| relations.contains_key(s.as_str())) {
            return refused(format!(
                "`{name}` is to follow from `{}`, which follows from others itself",
                other.as_str()
            ));
        }
    }
    Ok(())
}

/// Checks a tensor against what is declared; named sizes get their value.
fn fit(
    name: &str,
    tensor: &Tensor,
    fact: &Fact,
    preset: &mut BTreeMap<String, i64>,
) -> Result<(), String> {
    if let Some(element) = fact.element.filter(|e| *e != tensor.element()) {
        return Err(format!(
            "the input `{name}` has the type {element}, but the given array has the type {}",
            tensor.element()
        ));
    }
    let Some(shape) = &fact.shape else {
        return Ok(());
    };
    let given = &tensor.shape;
    if shape.len() != given.len() {
        return Err(format!(
            "the input `{name}` has {} dimensions, and what is given has sizes {given:?}",
            shape.len()
        ));
    }
    for (d, (size, given)) in shape.iter().zip(given).enumerate() {
        let given = *given as i64;
        let wanted = match size.as_symbol() {
            Some(symbol) => *preset.entry(symbol.as_str().to_string()).or_insert(given),
            None => size.as_const().unwrap_or(given),
        };
        if wanted != given {
            return Err(format!(
                "dimension {d} of the input `{name}` ({size}) has to be {wanted}, and what is given \
                 has {given}"
            ));
        }
    }
    Ok(())
}
