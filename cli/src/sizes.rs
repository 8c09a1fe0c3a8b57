//! Values for dynamic sizes on the command line: `batch=8`.

use compiler::graph::Symbol;
use compiler::importer::onnx::{File, Options};
use std::path::Path;

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

/// Refuses a size that a file, which with `options` could be imported, does not have. Some files can only be
/// imported with their sizes: of those it is not known which they have without.
///
/// # Errors
/// A sentence that names it.
pub fn refuse_unknown_of(file: &File, open: &Options, options: &Options) -> anyhow::Result<()> {
    if options.sizes.is_empty() {
        return Ok(());
    }
    match file.import(open) {
        Ok(model) => refuse_unknown(file.path(), &model.sizes, options.sizes.keys()),
        Err(_) => Ok(()),
    }
}

/// Refuses a size that the model, whose dynamic sizes are `known`, does not have.
///
/// # Errors
/// A sentence that names it.
pub fn refuse_unknown<'g>(
    path: &Path,
    known: &[(String, Symbol)],
    mut given: impl Iterator<Item = &'g String>,
) -> anyhow::Result<()> {
    let is_known = |given: &str| {
        let mut known = known.iter();
        known.any(|(name, symbol)| name == given || symbol.as_str() == given)
    };
    let Some(unknown) = given.find(|name| !is_known(name)) else {
        return Ok(());
    };
    let names: Vec<_> = known.iter().map(|(name, _)| name.as_str()).collect();
    let has = match names.is_empty() {
        true => "none".to_string(),
        false => names.join(", "),
    };
    anyhow::bail!(
        "{} has no dynamic size `{unknown}`; it has {has}",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::{parse, parse_positive};

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
