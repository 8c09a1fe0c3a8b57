//! Colours, where there is a terminal that shows them: not in pipes, and not with `NO_COLOR`.

use std::io::{self, IsTerminal};

/// Whether to colour.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    is_on: bool,
}

impl Style {
    /// The style of standard output.
    pub fn of_output() -> Style {
        Style::when(io::stdout().is_terminal())
    }

    /// The style of standard error.
    pub fn of_errors() -> Style {
        Style::when(io::stderr().is_terminal())
    }

    fn when(is_terminal: bool) -> Style {
        let set = |name: &str| std::env::var_os(name).is_some_and(|v| !v.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
        Style {
            is_on: is_terminal && !set("NO_COLOR") && !is_dumb,
        }
    }

    fn paint(self, code: &str, text: &str) -> String {
        match self.is_on {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_string(),
        }
    }

    /// A title.
    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// What is less important.
    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// What is good.
    pub fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// What needs attention.
    pub fn warn(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// What is wrong.
    pub fn bad(self, text: &str) -> String {
        self.paint("31;1", text)
    }
}
