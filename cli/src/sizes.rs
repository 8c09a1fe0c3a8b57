//! Values for dynamic sizes on the command line: `batch=8`.

/// `NAME=SIZE`, the size at least 1.
///
/// # Errors
/// A sentence about what is wrong with the text.
pub fn parse(text: &str) -> Result<(String, i64), String> {
    // A name may hold `=`, a number never does.
    let (name, size) = text
        .rsplit_once('=')
        .ok_or("expected NAME=SIZE, such as batch=8")?;
    match size.trim().parse() {
        Ok(size) if size >= 1 && !name.is_empty() => Ok((name.to_string(), size)),
        _ => Err(format!("`{size}` is not a size of at least 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn sizes_are_numbers_from_one() {
        assert_eq!(parse("batch=8"), Ok(("batch".to_string(), 8)));
        assert_eq!(parse("a=b=2"), Ok(("a=b".to_string(), 2)));
        for wrong in ["batch", "batch=", "batch=0", "batch=-1", "batch=x", "=3"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
