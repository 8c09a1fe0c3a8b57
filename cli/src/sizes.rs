//! Values for dynamic sizes: those on the command line (`batch=8`, `total=past+new`).

use anyhow::{Result, bail};
use compiler::graph::SymExpr;
use std::collections::BTreeMap;

/// `NAME=SIZE`, the size a number of at least 0 or a sum of other sizes.
///
/// # Errors
/// A sentence about what is wrong with the text.
pub fn parse(text: &str) -> Result<(String, SymExpr), String> {
    // A name may hold `=`, a size never does.
    let (name, size) = text
        .rsplit_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or("expected NAME=SIZE, such as batch=8, or NAME=SUM, such as total=past+new")?;
    Ok((name.to_string(), onnx::verify::relation(size)?))
}

/// As [`parse`], but the size is at least 1: what kernels are planned for.
///
/// # Errors
/// As for [`parse`].
pub fn parse_positive(text: &str) -> Result<(String, SymExpr), String> {
    let (name, size) = parse(text)?;
    match size.as_const() {
        Some(n) if n < 1 => Err(format!("`{n}` is not a size of at least 1")),
        _ => Ok((name, size)),
    }
}

/// The values of an option that may be repeated, by name.
///
/// # Errors
/// A name is given twice.
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

/// Sizes as numbers: those that follow from others are computed.
///
/// # Errors
/// A name is given twice, or a size follows from one that is given no number.
pub fn numbers(option: &str, given: &[(String, SymExpr)]) -> Result<BTreeMap<String, i64>> {
    let (sizes, relations) = apart(each_once(option, given)?);
    let mut all = sizes.clone();
    for (name, relation) in relations {
        let symbols = relation.symbols();
        let open = symbols.iter().map(|symbol| symbol.as_str());
        let open: Vec<&str> = open.filter(|name| !sizes.contains_key(*name)).collect();
        if !open.is_empty() {
            let open: Vec<String> = open.iter().map(|n| format!("{option} {n}=…")).collect();
            bail!(
                "`{option} {name}={relation}` needs numbers here: {}",
                open.join(" ")
            );
        }
        match relation.eval_with(&|symbol| sizes.get(symbol.as_str()).copied()) {
            Ok(value) if value >= 1 => drop(all.insert(name, value)),
            _ => bail!("`{option} {name}={relation}` is not a size of at least 1"),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::{apart, each_once, numbers, parse, parse_positive};

    #[test]
    fn a_size_may_follow_from_others() {
        let bound = ["batch=8", "total=past+new"].map(|text| parse(text).expect("a size"));
        let bound = each_once("--bind", &bound).expect("each once");
        let (sizes, relations) = apart(bound);
        assert_eq!(sizes["batch"], 8);
        assert_eq!(relations["total"].symbols().len(), 2);
        for wrong in ["batch", "batch=", "batch=-1", "=3", "t=p+"] {
            assert!(parse(wrong).is_err(), "{wrong}");
            assert!(parse_positive(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_that_follow_are_computed() {
        let given = ["past=3", "total=past+new", "new=2"];
        let given = given.map(|text| parse_positive(text).expect("a size"));
        let sizes = numbers("--bind", &given).expect("numbers");
        assert_eq!((sizes.len(), sizes["total"]), (3, 5));
        let error = numbers("--bind", &given[..2]).expect_err("new is open");
        let error = error.to_string();
        assert!(
            error.ends_with("needs numbers here: --bind new=…"),
            "{error}"
        );
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
        let (name, size) = parse("a=b=2").expect("a size");
        assert_eq!((name.as_str(), size.as_const()), ("a=b", Some(2)));
        let (_, size) = parse("batch=0").expect("a size");
        assert_eq!(size.as_const(), Some(0));
        let error = parse_positive("batch=0").expect_err("nothing");
        assert_eq!(error, "`0` is not a size of at least 1");
    }
}
