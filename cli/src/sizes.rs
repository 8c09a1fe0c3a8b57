//! Values for dynamic sizes: those on the command line (`batch=8`, `total=past+new`).

use anyhow::{Result, bail};
use compiler::graph::SymExpr;
use std::collections::BTreeMap;

/// `NAME=SIZE`, the size at least 0.
///
/// # Errors
/// A sentence about what is wrong with the text.
pub fn parse(text: &str) -> Result<(String, i64), String> {
    at_least(0, text)
}

/// `NAME=SIZE`, the size at least 1: what kernels are planned for.
///
/// # Errors
/// As for [`parse`].
pub fn parse_positive(text: &str) -> Result<(String, i64), String> {
    at_least(1, text)
}

/// `NAME=SIZE`, the size a number of at least 0 or a sum of other sizes.
///
/// # Errors
/// As for [`parse`].
pub fn parse_related(text: &str) -> Result<(String, SymExpr), String> {
    let (name, size) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or("expected NAME=SIZE, such as batch=8, or NAME=SUM, such as total=past+new")?;
    Ok((name.to_string(), onnx::verify::relation(size)?))
}

/// What an option that may be repeated gives, by name.
///
/// # Errors
/// A name is given twice, of which only one could count.
pub fn each_once<T: Clone>(option: &str, given: &[(String, T)]) -> Result<BTreeMap<String, T>> {
    let mut known = BTreeMap::new();
    for (name, value) in given {
        if known.insert(name.clone(), value.clone()).is_some() {
            bail!("`{option}` gives `{name}` twice; give it once");
        }
    }
    Ok(known)
}

/// Sizes that are numbers, and those that follow from others.
pub fn apart(
    bound: BTreeMap<String, SymExpr>,
) -> (BTreeMap<String, i64>, BTreeMap<String, SymExpr>) {
    let (mut sizes, mut relations) = (BTreeMap::new(), BTreeMap::new());
    for (name, size) in bound {
        match size.as_const() {
            Some(n) => drop(sizes.insert(name, n)),
            None => drop(relations.insert(name, size)),
        }
    }
    (sizes, relations)
}

fn at_least(least: i64, text: &str) -> Result<(String, i64), String> {
    // A name may hold `=`, a number never does.
    let (name, size) = text
        .rsplit_once('=')
        .ok_or("expected NAME=SIZE, such as batch=8")?;
    match size.trim().parse() {
        Ok(size) if size >= least && !name.is_empty() => Ok((name.to_string(), size)),
        _ => Err(format!("`{size}` is not a size of at least {least}")),
    }
}

#[cfg(test)]
mod tests {
    use super::{apart, each_once, parse, parse_positive, parse_related};

    #[test]
    fn a_size_may_follow_from_others() {
        let bound = ["batch=8", "total=past+new"].map(|text| parse_related(text).expect("a size"));
        let bound = each_once("--bind", &bound).expect("each once");
        let (sizes, relations) = apart(bound);
        assert_eq!(sizes["batch"], 8);
        assert_eq!(relations["total"].symbols().len(), 2);
        for wrong in ["batch", "batch=", "batch=-1", "=3", "t=p+"] {
            assert!(parse_related(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_size_that_is_given_twice_is_an_error() {
        let given = ["batch=8", "seq=2", "batch=8"].map(|text| parse(text).expect("a size"));
        let error = each_once("--bind", &given).expect_err("twice");
        assert_eq!(
            error.to_string(),
            "`--bind` gives `batch` twice; give it once"
        );
        assert_eq!(
            each_once("--bind", &given[..2]).expect("each once").len(),
            2
        );
    }

    #[test]
    fn sizes_are_numbers_from_nothing_or_one() {
        assert_eq!(parse("batch=8"), Ok(("batch".to_string(), 8)));
        assert_eq!(parse("a=b=2"), Ok(("a=b".to_string(), 2)));
        assert_eq!(parse("batch=0"), Ok(("batch".to_string(), 0)));
        assert!(parse_positive("batch=0").is_err());
        for wrong in ["batch", "batch=", "batch=-1", "batch=x", "=3"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
