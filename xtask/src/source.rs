//! Tells Rust code from comments and literals, so that checks for words ignore prose.
//!
//! A scanner of a few token kinds, not a parser: it knows strings, characters and comments.

/// `text` with every comment and every string or character literal blanked out. Line breaks stay,
/// so line numbers hold.
pub fn code_only(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut after_word = false;
    while let Some(first) = rest.chars().next() {
        let len = match literal_or_comment_len(rest, after_word) {
            Some(len) => {
                out.extend(
                    rest[..len]
                        .chars()
                        .map(|c| if c == '\n' { '\n' } else { ' ' }),
                );
                len
            }
            None => {
                out.push(first);
                first.len_utf8()
            }
        };
        after_word = is_word(first);
        rest = &rest[len..];
    }
    out
}

/// Whether `word` stands in `code` with no letter, digit or underscore beside it.
pub fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The length in bytes of the comment or literal that `rest` opens with, if it opens with one.
fn literal_or_comment_len(rest: &str, after_word: bool) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return Some(block_comment_len(rest));
    }
    if rest.starts_with('"') {
        return Some(quoted_len(rest, '"'));
    }
    if let Some(body) = rest.strip_prefix('\'') {
        // A lifetime is a quote and a word without a closing quote: `'a`.
        let mut chars = body.chars();
        let (first, second) = (chars.next()?, chars.next());
        return (first == '\\' || second == Some('\'')).then(|| quoted_len(rest, '\''));
    }
    if !after_word {
        return raw_string_len(rest);
    }
    None
}

/// Length from the opening quote to after the closing one, escapes skipped.
fn quoted_len(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// `r"…"`, `r#"…"#`, `br#"…"#`, `cr"…"`: no escapes, as many `#` behind as in front.
fn raw_string_len(rest: &str) -> Option<usize> {
    let prefix = ["r", "br", "cr"].into_iter().find(|p| {
        rest.strip_prefix(p)
            .is_some_and(|after| after.starts_with(['"', '#']))
    })?;
    let after = &rest[prefix.len()..];
    let n_hashes = after.len() - after.trim_start_matches('#').len();
    let body = after[n_hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(n_hashes));
    let opened = rest.len() - body.len();
    Some(
        body.find(&close)
            .map_or(rest.len(), |at| opened + at + close.len()),
    )
}

/// Block comments nest.
fn block_comment_len(rest: &str) -> usize {
    let (mut at, mut depth) = (0, 0usize);
    while at < rest.len() {
        let tail = &rest[at..];
        if tail.starts_with("/*") {
            (at, depth) = (at + 2, depth + 1);
        } else if tail.starts_with("*/") {
            (at, depth) = (at + 2, depth - 1);
            if depth == 0 {
                return at;
            }
        } else {
            at += tail.chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        code_only(text)
            .split_whitespace()
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn comments_and_literals_go_and_code_stays() {
        assert_eq!(words("a // unsafe\nb /* x /* y */ z */ c"), ["a", "b", "c"]);
        assert_eq!(
            words(r#"f("un\"safe", 'x', '\'', b"q") g"#),
            ["f(", ",", ",", ",", "b", ")", "g"]
        );
        assert_eq!(
            words("r#\"a \" unsafe\"# after br\"x\" end"),
            ["after", "end"]
        );
    }

    #[test]
    fn lifetimes_and_raw_names_are_code() {
        assert_eq!(
            words("fn f<'a>(x: &'a str) {}"),
            ["fn", "f<'a>(x:", "&'a", "str)", "{}"]
        );
        assert_eq!(words("r#type order"), ["r#type", "order"]);
    }

    #[test]
    fn lines_keep_their_numbers() {
        let text = "a\n/* two\nlines */\n\"x\ny\"\nb";
        assert_eq!(code_only(text).lines().count(), text.lines().count());
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("unsafe fn f()", "unsafe"));
        assert!(!has_word("deny(unsafe_code)", "unsafe"));
    }
}
