//! The words of the text form, with their positions. This file knows no grammar.

use std::fmt;

/// A word and where it starts; lines and columns count from 1.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    pub word: Word,
    pub line: usize,
    pub column: usize,
}

/// What a word is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Word {
    /// `[A-Za-z_][A-Za-z0-9_.]*`
    Name(String),
    /// `"text"`
    Text(String),
    /// Digits, or `0x` and hexadecimal ones.
    Int(u64),
    /// Digits with a point or an exponent.
    Float(f64),
    /// `#` and hexadecimal digits.
    Hash(String),
    /// Punctuation.
    Sign(&'static str),
    /// Something the text form does not use.
    Unknown(String),
    /// The end.
    End,
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Word::Name(n) => write!(f, "`{n}`"),
            Word::Text(t) => write!(f, "{t:?}"),
            Word::Int(i) => write!(f, "`{i}`"),
            Word::Float(x) => write!(f, "`{x:?}`"),
            Word::Hash(h) => write!(f, "`#{h}`"),
            Word::Sign(s) => write!(f, "`{s}`"),
            Word::Unknown(u) => write!(f, "`{u}`"),
            Word::End => f.write_str("the end of the text"),
        }
    }
}

/// All signs. One that begins with another comes before it.
const SIGNS: [&str; 27] = [
    "<=", ">=", "==", "!=", "->", "<", ">", "=", "!", "-", "+", "*", "/", "{", "}", "[", "]", "(",
    ")", ",", ":", "%", "$", "@", "|", ";", "?",
];

/// The words of `text`, then [`Word::End`]. `//` starts a comment.
pub(crate) fn words(text: &str) -> Vec<Token> {
    let mut lexer = Lexer {
        rest: text,
        line: 1,
        column: 1,
    };
    let mut tokens = Vec::new();
    loop {
        lexer.skip_blank();
        let (line, column) = (lexer.line, lexer.column);
        let word = lexer.word();
        let end = word == Word::End;
        tokens.push(Token { word, line, column });
        if end {
            return tokens;
        }
    }
}

struct Lexer<'t> {
    rest: &'t str,
    line: usize,
    column: usize,
}

impl<'t> Lexer<'t> {
    /// Takes the next `bytes` bytes.
    fn take(&mut self, bytes: usize) -> &'t str {
        let (taken, rest) = self.rest.split_at(bytes);
        for c in taken.chars() {
            if c == '\n' {
                self.line += 1;
                self.column = 1;
            } else {
                self.column += 1;
            }
        }
        self.rest = rest;
        taken
    }

    fn take_while(&mut self, keep: impl Fn(char) -> bool) -> &'t str {
        let end = self.rest.find(|c| !keep(c)).unwrap_or(self.rest.len());
        self.take(end)
    }

    fn skip_blank(&mut self) {
        loop {
            self.take_while(char::is_whitespace);
            if !self.rest.starts_with("//") {
                return;
            }
            self.take_while(|c| c != '\n');
        }
    }

    fn word(&mut self) -> Word {
        let Some(first) = self.rest.chars().next() else {
            return Word::End;
        };
        if first == '_' || first.is_ascii_alphabetic() {
            let name = self.take_while(|c| c == '_' || c == '.' || c.is_ascii_alphanumeric());
            return Word::Name(name.to_string());
        }
        if first.is_ascii_digit() {
            return self.number();
        }
        if first == '"' {
            return self.text();
        }
        if first == '#' {
            self.take(1);
            return Word::Hash(self.take_while(|c| c.is_ascii_hexdigit()).to_string());
        }
        match SIGNS.iter().find(|s| self.rest.starts_with(**s)) {
            Some(sign) => {
                self.take(sign.len());
                Word::Sign(sign)
            }
            None => Word::Unknown(self.take(first.len_utf8()).to_string()),
        }
    }

    fn number(&mut self) -> Word {
        if self.rest.starts_with("0x") {
            self.take(2);
            let digits = self.take_while(|c| c.is_ascii_hexdigit());
            return match u64::from_str_radix(digits, 16) {
                Ok(value) => Word::Int(value),
                Err(_) => Word::Unknown(format!("0x{digits}")),
            };
        }
        let start = self.rest;
        self.take_while(|c| c.is_ascii_digit());
        let mut whole = true;
        if self.rest.starts_with('.') {
            whole = false;
            self.take(1);
            self.take_while(|c| c.is_ascii_digit());
        }
        let exponent = self.rest.strip_prefix(['e', 'E']);
        let digits = exponent.map(|e| e.strip_prefix(['-', '+']).unwrap_or(e));
        if digits.is_some_and(|d| d.starts_with(|c: char| c.is_ascii_digit())) {
            whole = false;
            self.take(self.rest.len() - digits.map_or(0, str::len));
            self.take_while(|c| c.is_ascii_digit());
        }
        let text = &start[..start.len() - self.rest.len()];
        let unknown = || Word::Unknown(text.to_string());
        if whole {
            text.parse().map_or_else(|_| unknown(), Word::Int)
        } else {
            text.parse().map_or_else(|_| unknown(), Word::Float)
        }
    }

    fn text(&mut self) -> Word {
        let start = self.rest;
        self.take(1);
        let mut text = String::new();
        loop {
            text.push_str(self.take_while(|c| c != '"' && c != '\\'));
            if self.rest.starts_with('"') {
                self.take(1);
                return Word::Text(text);
            }
            match self.escape() {
                Some(c) => text.push(c),
                None => return Word::Unknown(start.lines().next().unwrap_or("").to_string()),
            }
        }
    }

    /// The character that an escape stands for, with Rust's escapes.
    fn escape(&mut self) -> Option<char> {
        let mut chars = self.rest.strip_prefix('\\')?.chars();
        let plain = match chars.next()? {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            '0' => '\0',
            c @ ('\\' | '"' | '\'') => c,
            'u' => {
                let body = self.rest.strip_prefix("\\u{")?;
                let end = body.find('}')?;
                let code = u32::from_str_radix(&body[..end], 16).ok()?;
                self.take("\\u{".len() + end + 1);
                return char::from_u32(code);
            }
            _ => return None,
        };
        self.take(2);
        Some(plain)
    }
}
