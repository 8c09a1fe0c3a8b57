//! Values for dynamic sizes on the command line: `batch=8`.

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
