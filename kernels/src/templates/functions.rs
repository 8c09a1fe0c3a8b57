//! Functions of a program's kernels that differ only in constants share one text.
//!
//! Most kernels of a network are alike: the sums after each convolution, for example, differ in strides and in
//! counts. A C compiler takes as long for each of them as for the first. Here such functions become one function, which
//! takes the numbers that differ as arguments, so that it computes the same as each of them.
//!
//! Functions are shared before their callers, because calls of a shared function are then equal texts up to numbers.
//! Micro-kernels stay as they are, since their numbers decide how registers are used.

use super::scan::{Number, Scan, Type, Use};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::ops::Range;

/// Shorter functions are not shared: compiling one costs less than calling it.
const MIN_BYTES: usize = 200;
/// A loop of at most this many rounds is worth a text of its own.
const SHORT_LOOP: i64 = 256;
/// Most numbers that a shared function takes.
const MAX_VALUES: usize = 24;

/// A part of a kernel's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Its own.
    Own(String),
    /// A function that other kernels call as well, as a position in [`Functions::shared`].
    Shared(usize),
}

/// The texts of a program's kernels, with what they share taken out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Functions {
    /// The text of each shared function. It uses definitions above it in the text of each of its kernels.
    pub(crate) shared: Vec<String>,
    /// Each kernel's text, in pieces.
    pub(crate) kernels: Vec<Vec<Piece>>,
}

/// A function of a kernel.
struct Function {
    kernel: usize,
    name: String,
    /// Where it stands in the kernel's text.
    at: Range<usize>,
    /// Its text; calls of shared functions are written anew.
    text: String,
    /// Length of the longest chain of calls from it to other functions of the kernel; 0 if it calls none.
    level: usize,
    shared: Option<SharedCall>,
}

/// How a kernel calls a shared function.
struct SharedCall {
    /// Position in [`Functions::shared`].
    function: usize,
    name: String,
    /// The numbers that it takes after its other arguments, each with a comma before it.
    arguments: String,
}

impl Functions {
    /// Shares functions of kernels; `placeholder` stands for the name of each.
    pub(crate) fn new(kernels: &[&str], placeholder: &str) -> Functions {
        let mut functions = Vec::new();
        for (kernel, text) in kernels.iter().enumerate() {
            functions_of(kernel, text, placeholder, &mut functions);
        }
        let mut shared = Vec::new();
        let levels: BTreeSet<usize> = functions.iter().map(|f| f.level).collect();
        for level in levels {
            let mut alike: BTreeMap<Vec<u8>, Vec<usize>> = BTreeMap::new();
            for (i, function) in functions.iter().enumerate() {
                if function.level == level
                    && let Some(key) = function.key(placeholder)
                {
                    alike.entry(key).or_default().push(i);
                }
            }
            // In the order of the kernels, whatever the keys.
            let mut alike: Vec<Vec<usize>> = alike.into_values().collect();
            alike.retain(|members| members.len() > 1);
            alike.sort_unstable();
            for members in alike {
                share(&mut functions, &members, placeholder, &mut shared);
            }
        }
        let pieces = |(kernel, text): (usize, &&str)| {
            let own = functions.iter().filter(|f| f.kernel == kernel);
            pieces(text, own)
        };
        Functions {
            kernels: kernels.iter().enumerate().map(pieces).collect(),
            shared,
        }
    }
}

/// The functions of a kernel that are named after it, in order.
fn functions_of(kernel: usize, text: &str, placeholder: &str, functions: &mut Vec<Function>) {
    let scan = Scan::new(text);
    let first = functions.len();
    for (body, end) in scan.bodies.iter().zip(&scan.ends) {
        let start = text[..*body].rfind('\n').map_or(0, |line| line + 1);
        let Some(name) = identifiers(&text[start..*body]).find(|n| n.1.starts_with(placeholder))
        else {
            continue;
        };
        let name = name.1.to_string();
        let called = |f: &&Function| identifiers(&text[*body..*end]).any(|n| n.1 == f.name);
        let level = functions[first..]
            .iter()
            .filter(called)
            .map(|f| f.level + 1);
        functions.push(Function {
            kernel,
            level: level.max().unwrap_or(0),
            name,
            at: start..*end,
            text: text[start..*end].to_string(),
            shared: None,
        });
    }
}

/// Identifiers of a text, with their positions.
fn identifiers(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + text[at..].find(is_part)?;
        let len = text[start..].find(|c| !is_part(c));
        at = len.map_or(text.len(), |len| start + len);
        Some((start, &text[start..at]))
    })
}

impl Function {
    fn is_entry(&self) -> bool {
        self.text.starts_with("void ")
    }

    /// The text with another name.
    fn renamed(&self, name: &str) -> String {
        let mut renamed = self.text.clone();
        let named: Vec<usize> = identifiers(&self.text)
            .filter(|n| n.1 == self.name)
            .map(|n| n.0)
            .collect();
        for at in named.into_iter().rev() {
            renamed.replace_range(at..at + self.name.len(), name);
        }
        renamed
    }

    /// Equal for functions that may share a text; `None` for one that shares none.
    fn key(&self, placeholder: &str) -> Option<Vec<u8>> {
        let text = self.renamed("");
        // The functions of its kernel that it calls would have to be shared as well.
        if text.starts_with("static inline")
            || text.len() < MIN_BYTES
            || text.contains(placeholder)
            || text.contains("(void) {")
        {
            return None;
        }
        let scan = Scan::new(&text);
        let mut key = scan.shape.clone();
        for hashed in &scan.hashed {
            key.extend_from_slice(hashed.as_bytes());
            key.push(b' ');
        }
        for number in &scan.numbers {
            if !self.is_open(number, &text[number.at.clone()]) {
                key.extend_from_slice(text[number.at.clone()].as_bytes());
                key.push(b' ');
            }
        }
        Some(key)
    }

    /// Whether a number may differ. In a function that calls no other, loops and divisions are the innermost ones.
    /// Short loops, and divisions, take much longer with a number that the compiler does not know.
    fn is_open(&self, number: &Number, literal: &str) -> bool {
        let is_inner = self.level == 0;
        match number.usage {
            Use::Value(_) if is_inner && number.is_divisor => false,
            Use::Value(_) if is_inner && number.is_bound => {
                let bound = literal.trim_end_matches('L').parse::<i64>();
                bound.is_ok_and(|bound| bound > SHORT_LOOP)
            }
            Use::Value(_) | Use::Length => true,
            Use::Fixed => false,
        }
    }
}

/// Gives functions that are alike one text, and has their callers call it.
fn share(
    functions: &mut [Function],
    members: &[usize],
    placeholder: &str,
    shared: &mut Vec<String>,
) {
    let first = &functions[members[0]];
    let role = first.name[placeholder.len()..].trim_start_matches('_');
    let role = if role.is_empty() { "kernel" } else { role };
    let name = format!("shc_{role}_{}", shared.len());
    let scans: Vec<(String, Scan)> = members
        .iter()
        .map(|i| functions[*i].renamed(&name))
        .map(|text| {
            let scan = Scan::new(&text);
            (text, scan)
        })
        .collect();
    let (text, scan) = &scans[0];
    // Numbers that are equal in each of the functions are one parameter.
    let mut values: BTreeMap<(Vec<&str>, &str), usize> = BTreeMap::new();
    let mut columns: Vec<Vec<&str>> = Vec::new();
    let mut parameters = String::new();
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    for (i, number) in scan.numbers.iter().enumerate() {
        let literals: Vec<&str> = scans
            .iter()
            .map(|(text, scan)| &text[scan.numbers[i].at.clone()])
            .collect();
        if literals.iter().all(|literal| *literal == literals[0]) {
            continue;
        }
        let c_type = match number.usage {
            Use::Value(c_type) => c_name(c_type),
            _ => {
                let longest = literals.iter().filter_map(|l| l.parse::<u64>().ok()).max();
                edits.push((number.at.clone(), longest.unwrap_or(0).to_string()));
                continue;
            }
        };
        let next = values.len();
        let value = *values.entry((literals.clone(), c_type)).or_insert(next);
        if value == next {
            let _ = write!(parameters, ", const {c_type} sh_v{value}");
            columns.push(literals);
        }
        edits.push((number.at.clone(), format!("sh_v{value}")));
    }
    if values.len() > MAX_VALUES {
        return;
    }
    let arguments: Vec<String> = (0..members.len())
        .map(|member| {
            let literals = columns.iter().map(|column| format!(", {}", column[member]));
            literals.collect()
        })
        .collect();
    let Some(text) = shared_text(text, scan, &edits, &parameters) else {
        return;
    };
    let id = shared.len();
    shared.push(text);
    for (member, arguments) in members.iter().zip(arguments) {
        let function = &functions[*member];
        let (kernel, own) = (function.kernel, function.name.clone());
        for caller in functions.iter_mut().filter(|f| f.kernel == kernel) {
            if caller.name != own {
                caller.text = calling(&caller.text, &own, &name, &arguments);
            }
        }
        functions[*member].shared = Some(SharedCall {
            function: id,
            name: name.clone(),
            arguments,
        });
    }
}

fn c_name(c_type: Type) -> &'static str {
    match c_type {
        Type::Int => "int",
        Type::Long => "long",
        Type::ULong => "unsigned long",
        Type::Float => "float",
        Type::Double => "double",
    }
}

/// The text of a shared function, with its parameters.
fn shared_text(
    text: &str,
    scan: &Scan,
    edits: &[(Range<usize>, String)],
    parameters: &str,
) -> Option<String> {
    let body = *scan.bodies.first()?;
    let end = text[..body].rfind(')')?;
    let mut shared = String::from("static __attribute__((noinline)) ");
    let head = text[..end]
        .trim_start_matches("static ")
        .trim_start_matches("__attribute__((noinline)) ")
        .trim_start_matches("inline ");
    let _ = write!(shared, "{head}{parameters}");
    let mut done = end;
    for (at, new) in edits {
        shared.push_str(&text[done..at.start]);
        shared.push_str(new);
        done = at.end;
    }
    shared.push_str(&text[done..]);
    shared.push('\n');
    Some(shared)
}

/// A text with calls of `own` replaced by calls of `name`, with more arguments.
fn calling(text: &str, own: &str, name: &str, arguments: &str) -> String {
    let calls: Vec<usize> = identifiers(text)
        .filter(|n| n.1 == own)
        .map(|n| n.0)
        .collect();
    let mut text = text.to_string();
    for at in calls.into_iter().rev() {
        let mut depth = 0;
        let end = text[at..].char_indices().find(|(_, c)| {
            depth += i32::from(*c == '(');
            depth -= i32::from(*c == ')');
            *c == ')' && depth == 0
        });
        if let Some((end, _)) = end {
            text.insert_str(at + end, arguments);
            text.replace_range(at..at + own.len(), name);
        }
    }
    text
}

/// A kernel's text, with shared functions in the places of its own.
fn pieces<'a>(text: &str, functions: impl Iterator<Item = &'a Function>) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut own = String::new();
    let mut done = 0;
    for function in functions {
        own.push_str(&text[done..function.at.start]);
        done = function.at.end;
        let Some(call) = &function.shared else {
            own.push_str(&function.text);
            continue;
        };
        pieces.push(Piece::Own(std::mem::take(&mut own)));
        pieces.push(Piece::Shared(call.function));
        if function.is_entry() {
            let SharedCall {
                name, arguments, ..
            } = call;
            let head = function.text.split('\n').next().unwrap_or_default();
            let _ = write!(own, "{head} {name}(buf, scratch, tid, nt{arguments}); }}");
        }
    }
    own.push_str(&text[done..]);
    pieces.push(Piece::Own(own));
    pieces.retain(|piece| *piece != Piece::Own(String::new()));
    pieces
}

#[cfg(test)]
mod tests;
