//! Indented C text.

/// Lines of C, indented by the braces that are open.
#[derive(Clone, Debug, Default)]
pub(crate) struct CText {
    text: String,
    depth: usize,
}

impl CText {
    /// One line.
    pub(crate) fn line(&mut self, line: &str) {
        self.text.push_str(&"  ".repeat(self.depth));
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Lines of another text, inside what is open.
    pub(crate) fn lines(&mut self, text: &str) {
        text.lines().for_each(|l| self.line(l));
    }

    /// `head {`, and what follows is inside.
    pub(crate) fn open(&mut self, head: &str) {
        let space = if head.is_empty() { "" } else { " " };
        self.line(&format!("{head}{space}{{"));
        self.depth += 1;
    }

    /// The closing brace.
    pub(crate) fn close(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        self.line("}");
    }

    /// All of it.
    pub(crate) fn finish(self) -> String {
        self.text
    }
}
