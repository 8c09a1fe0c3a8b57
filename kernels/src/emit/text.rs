//! Indented C text, and the only way in which a user's name reaches it.

/// A C comment, which only people read, with text of any origin, such as a module's name.
/// Nothing in it ends the comment: no line break, no backslash that joins two lines, no `?` of a trigraph,
/// no character that turns the direction of reading.
pub fn comment(text: &str) -> String {
    let kept = |c: char| {
        let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        !(c.is_control() || turns || matches!(c, '\\' | '?'))
    };
    let safe: String = text
        .chars()
        .map(|c| if kept(c) { c } else { '_' })
        .collect();
    format!("/* {} */\n", safe.replace("*/", "* /").replace("/*", "/ *"))
}

/// Lines of C, indented by the braces that are open.
#[derive(Clone, Debug, Default)]
pub struct CText {
    text: String,
    depth: usize,
}

impl CText {
    /// Writes one line.
    pub fn line(&mut self, line: &str) {
        self.text.push_str(&"  ".repeat(self.depth));
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Lines of another text, inside what is open.
    pub fn lines(&mut self, text: &str) {
        text.lines().for_each(|l| self.line(l));
    }

    /// `head {`, and what follows is inside.
    pub fn open(&mut self, head: &str) {
        let space = if head.is_empty() { "" } else { " " };
        self.line(&format!("{head}{space}{{"));
        self.depth += 1;
    }

    /// The closing brace.
    pub fn close(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        self.line("}");
    }

    /// The whole text.
    pub fn finish(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::comment;

    #[test]
    fn nothing_in_a_name_ends_its_comment() {
        let plain = "Relu `encoder.layer.0/act` → [n, 4]";
        assert_eq!(comment(plain), format!("/* {plain} */\n"));
        for name in [
            "x*\\\n/ __attribute__((constructor)) void f(void){} /*",
            "x*\\\r\n/ int y; /*",
            "a*/ int y; /* b",
            "a*/*/ b",
            "*??/\n/ int y;",
            "/*/ int y; /*",
        ] {
            let text = comment(name);
            let inside = text
                .strip_prefix("/* ")
                .and_then(|t| t.strip_suffix(" */\n"));
            let inside = inside.expect("a comment");
            for ends in ["*/", "/*", "\\", "\n", "\r", "?"] {
                assert!(!inside.contains(ends), "{ends:?} in {text:?}");
            }
        }
    }
}
