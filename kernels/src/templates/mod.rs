//! Kernels of several sizes from one text.
//!
//! A program is planned and emitted for one set of sizes, and most kernels of the next set differ in
//! nothing but numbers: lengths of loops, strides, offsets. Where two kernels have the same text up to
//! numbers, the numbers that differ become values that a launch is given, and what is compiled then
//! serves every size whose text has the same shape. Nothing here knows what a number means: a text
//! with its own numbers put back in is the text that would have been compiled for it alone, so a
//! shared kernel computes what its own would. Only numbers that C lets be anything become values
//! (`scan`); a text that differs elsewhere is compiled for itself.
//!
//! The first program's kernels keep their numbers, except in functions that several of its kernels share (see
//! [`functions`]): who uses one size pays nothing. Sizes that are only foreseen show, before anything is
//! compiled for a second size, which numbers will differ.

pub(crate) mod functions;
mod scan;

use crate::compile::SourceUnit;
use crate::contraction::{PlanSignature, PriorPlans};
use scan::{Number, Scan, Type, Use};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

/// Declares what a shared kernel's functions read their numbers from.
pub(crate) const SUPPORT: &str = "\
static __thread const long *sh_values;
SH_FN double sh_double_from_bits(long u) { union { long u; double d; } v = {u}; return v.d; }
";

/// Numbers in which kernels of several layers may differ besides those that follow from sizes.
const FEW: usize = 4;

/// The texts of the kernels that were compiled for a model's earlier sizes.
#[derive(Debug, Default)]
pub struct Templates {
    /// The forms by shape.
    forms: BTreeMap<Vec<u8>, Vec<Form>>,
    /// Programs that were shared so far.
    n_programs: usize,
    /// How contractions were planned.
    choices: PriorPlans,
    /// Whether sizes that may come were looked at.
    has_foreseen: bool,
}

/// A text that is compiled, for one kernel or for several.
#[derive(Clone, Debug)]
struct Form {
    /// The numbers of the first kernel it served, as they stand in the text.
    literals: Vec<String>,
    /// For each number that is a value at run time: the position of that value.
    values: BTreeMap<usize, usize>,
    unit: Arc<SourceUnit>,
    symbols: Vec<String>,
    /// Whether a program calls it; else it was only foreseen.
    is_called: bool,
}

/// Whether a program's kernels will run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// They are compiled and called.
    Run,
    /// They show what kernels of such sizes look like.
    Foresee,
}

/// What a kernel's launches call.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) unit: Arc<SourceUnit>,
    /// The functions, in the order of the kernel's own.
    pub(crate) symbols: Vec<String>,
    /// The numbers that launches pass behind their buffers; `None` for a text with its own numbers.
    pub(crate) values: Option<Vec<i64>>,
}

/// A kernel as it would be compiled for itself.
pub(crate) struct Own<'a> {
    /// Its text with `placeholder` for its name.
    pub(crate) text: &'a str,
    pub(crate) placeholder: &'a str,
    pub(crate) name: &'a str,
    pub(crate) symbols: &'a [String],
    /// Buffers that its launches give.
    pub(crate) n_buffers: usize,
}

impl Templates {
    /// Whether no program was shared yet.
    pub fn is_empty(&self) -> bool {
        self.n_programs == 0
    }

    /// Texts that were compiled for all programs so far.
    pub fn n_texts(&self) -> usize {
        let forms = self.forms.values().flatten();
        forms.filter(|form| form.is_called).count()
    }

    /// How contractions of all programs so far were planned.
    pub fn choices(&self) -> &PriorPlans {
        &self.choices
    }

    /// Whether sizes that may come were looked at.
    pub fn has_foreseen(&self) -> bool {
        self.has_foreseen
    }

    /// Whether sizes that may come still have to be looked at; from here on they have.
    pub fn must_foresee(&mut self) -> bool {
        !std::mem::replace(&mut self.has_foreseen, true)
    }

    /// Notes how a program's contractions were planned; `is_shared` if its texts take numbers from launches.
    pub(crate) fn note(&mut self, choices: &[(String, PlanSignature)], is_shared: bool) {
        self.choices.learn(choices, is_shared);
    }

    /// Ends a program: the next may differ from it.
    pub(crate) fn close_program(&mut self) {
        self.n_programs += 1;
    }

    /// Notes that a kernel was compiled in `unit`, with its numbers.
    pub(crate) fn keep(&mut self, own: &Own, unit: &Arc<SourceUnit>) {
        let (shape, scan) = shape_of(own);
        let mut form = Form::new(own, &scan, unit);
        form.is_called = true;
        self.forms.entry(shape).or_default().push(form);
    }

    /// What a kernel of a later program calls; `unit_of` makes a file of a kernel's text.
    pub(crate) fn share(
        &mut self,
        own: &Own,
        purpose: Purpose,
        unit_of: impl Fn(&str) -> SourceUnit,
    ) -> Shared {
        let (shape, scan) = shape_of(own);
        let forms = self.forms.entry(shape).or_default();
        let literals = literals(own.text, &scan);
        let serving = forms
            .iter_mut()
            .filter_map(|form| form.values_for(&literals, &scan).map(|v| (form, v)))
            .min_by_key(|(form, values)| form.preference(values.len()));
        if let Some((form, values)) = serving {
            form.is_called |= purpose == Purpose::Run;
            return form.shared(values);
        }
        let named = |text: &str| text.replace(own.placeholder, own.name);
        let nearest = forms.iter().min_by_key(|form| form.distance(&literals));
        // Every function that launches call has to take the values from its buffers.
        let takes_values = n_entries(own, &scan) == own.symbols.len();
        let joined = nearest
            .filter(|_| takes_values)
            .and_then(|form| Some((form, form.joined(&literals, &scan)?)));
        let mut form = match joined {
            Some((nearest, values)) => {
                let lengthened = lengthened(&nearest.literals, &literals, &scan);
                let text = named(&template(own, &scan, &values, &lengthened));
                Form {
                    literals: lengthened,
                    values,
                    unit: Arc::new(unit_of(&text)),
                    symbols: own.symbols.to_vec(),
                    is_called: false,
                }
            }
            None => Form::new(own, &scan, &Arc::new(unit_of(&named(own.text)))),
        };
        form.is_called = purpose == Purpose::Run;
        let shared = form.shared(form.values_for(&literals, &scan).unwrap_or_default());
        forms.push(form);
        shared
    }
}

/// The shape that kernels with a common text have in common.
fn shape_of(own: &Own) -> (Vec<u8>, Scan) {
    let scan = Scan::new(own.text);
    let mut shape = scan.shape.clone();
    // The text holds the position of the values among the buffers.
    shape.extend_from_slice(format!("{} {}", own.n_buffers, own.symbols.len()).as_bytes());
    (shape, scan)
}

fn literals(text: &str, scan: &Scan) -> Vec<String> {
    let number = |n: &Number| text[n.at.clone()].to_string();
    scan.numbers.iter().map(number).collect()
}

fn has_room(mine: &str, theirs: &str) -> bool {
    match (mine.parse::<u64>(), theirs.parse::<u64>()) {
        (Ok(mine), Ok(theirs)) => mine >= theirs,
        _ => false,
    }
}

/// A length that serves for all lengths between the power of two below and itself.
fn room(literal: &str) -> String {
    let exact: u64 = literal.parse().unwrap_or(0);
    exact.next_power_of_two().to_string()
}

fn lengthened(nearest: &[String], literals: &[String], scan: &Scan) -> Vec<String> {
    let each = nearest.iter().zip(literals).zip(&scan.numbers);
    each.map(|((old, new), number)| match number.usage {
        // An array that is long enough for this size, too, stays as it is.
        Use::Length if has_room(old, &room(new)) => old.clone(),
        Use::Length => room(new),
        _ => old.clone(),
    })
    .collect()
}

impl Form {
    fn new(own: &Own, scan: &Scan, unit: &Arc<SourceUnit>) -> Form {
        Form {
            literals: literals(own.text, scan),
            values: BTreeMap::new(),
            unit: Arc::clone(unit),
            symbols: own.symbols.to_vec(),
            is_called: false,
        }
    }

    /// How much of this text would have to change to serve a kernel with `literals`, too. Texts that take almost all
    /// differing numbers as values already come first, then texts with few numbers that differ.
    fn distance(&self, literals: &[String]) -> (bool, usize, Reverse<usize>) {
        let differing = self.differing(literals);
        let fixed = differing.iter().filter(|i| !self.values.contains_key(i));
        let n_fixed = fixed.count();
        let is_almost = !self.values.is_empty() && n_fixed <= FEW;
        let distance = if is_almost { n_fixed } else { differing.len() };
        (!is_almost, distance, Reverse(self.values.len()))
    }

    /// The order in which texts that can serve a kernel are preferred, least first: compiled texts with few values,
    /// then the text that will serve most sizes.
    fn preference(&self, n_values: usize) -> (bool, isize) {
        let n_values = n_values.cast_signed();
        match self.is_called {
            true => (false, n_values),
            false => (true, -n_values),
        }
    }

    fn shared(&self, values: Vec<i64>) -> Shared {
        Shared {
            unit: Arc::clone(&self.unit),
            symbols: self.symbols.clone(),
            values: (!self.values.is_empty()).then_some(values),
        }
    }

    /// The values with which this text computes what a text with these numbers does.
    fn values_for(&self, literals: &[String], scan: &Scan) -> Option<Vec<i64>> {
        let mut values: Vec<Option<i64>> = vec![None; self.n_values()];
        for (i, (number, (mine, theirs))) in scan
            .numbers
            .iter()
            .zip(self.literals.iter().zip(literals))
            .enumerate()
        {
            match self.values.get(&i) {
                Some(at) => {
                    let value = bits(theirs, number.usage)?;
                    if values[*at].replace(value).is_some_and(|v| v != value) {
                        return None;
                    }
                }
                None if number.usage == Use::Length && !has_room(mine, theirs) => return None,
                None if number.usage == Use::Length => {}
                None if mine != theirs => return None,
                None => {}
            }
        }
        values.into_iter().collect()
    }

    fn n_values(&self) -> usize {
        self.values.values().max().map_or(0, |last| last + 1)
    }

    fn differing(&self, literals: &[String]) -> BTreeSet<usize> {
        let pairs = self.literals.iter().zip(literals).enumerate();
        pairs.filter(|(_, (a, b))| a != b).map(|(i, _)| i).collect()
    }

    /// Which numbers have to be values so that one text serves this form's kernels and one with these
    /// numbers; `None` if C forbids one of them. Numbers that were equal in all of them are one value.
    fn joined(&self, literals: &[String], scan: &Scan) -> Option<BTreeMap<usize, usize>> {
        let mut open: BTreeSet<usize> = self.values.keys().copied().collect();
        for i in self.differing(literals) {
            match scan.numbers[i].usage {
                Use::Value(_) => {
                    open.insert(i);
                }
                Use::Length => {}
                Use::Fixed => return None,
            }
        }
        let mut classes = BTreeMap::new();
        let mut values = BTreeMap::new();
        for i in open {
            let usage = scan.numbers[i].usage;
            let mine = match self.values.get(&i) {
                Some(class) => (Some(*class), None),
                None => (None, Some(bits(&self.literals[i], usage)?)),
            };
            let key = (mine, bits(&literals[i], usage)?);
            let next = classes.len();
            values.insert(i, *classes.entry(key).or_insert(next));
        }
        Some(values)
    }
}

/// A number as the 64 bits that a launch gives.
fn bits(literal: &str, usage: Use) -> Option<i64> {
    let Use::Value(c_type) = usage else {
        return None;
    };
    match c_type {
        Type::Int | Type::Long | Type::ULong => literal.trim_end_matches(['U', 'L']).parse().ok(),
        Type::Float => {
            let value: f32 = literal.trim_end_matches(['f', 'F']).parse().ok()?;
            Some(i64::from(value.to_bits()))
        }
        Type::Double => Some(literal.parse::<f64>().ok()?.to_bits().cast_signed()),
    }
}

/// The kernel's text with the values in the places of their numbers, and the lengths of `literals`.
fn template(
    own: &Own,
    scan: &Scan,
    values: &BTreeMap<usize, usize>,
    literals: &[String],
) -> String {
    let mut used: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for (i, value) in values {
        if let Some(body) = scan.numbers[*i].body {
            used.entry(body).or_default().insert(*value);
        }
    }
    // Edits: a position in the text, how many bytes go, and what replaces them.
    let mut edits: Vec<(usize, usize, String)> = Vec::new();
    for (body, at) in scan.bodies.iter().enumerate() {
        let mut declared = String::new();
        if is_entry(own.text, *at) {
            let _ = write!(declared, "\nsh_values = buf[{}];", own.n_buffers);
        }
        for value in used.get(&body).into_iter().flatten() {
            let _ = write!(declared, "\nconst long sh_v{value} = sh_values[{value}];");
        }
        edits.push((*at, 0, declared));
    }
    for (i, number) in scan.numbers.iter().enumerate() {
        let text = match (values.get(&i), number.usage) {
            (Some(value), Use::Value(c_type)) => match c_type {
                Type::Int => format!("((int)sh_v{value})"),
                Type::Long => format!("sh_v{value}"),
                Type::Float => format!("sh_from_bits((sh_u32)sh_v{value})"),
                Type::ULong => format!("((unsigned long)sh_v{value})"),
                Type::Double => format!("sh_double_from_bits(sh_v{value})"),
            },
            (_, Use::Length) => literals[i].clone(),
            _ => continue,
        };
        edits.push((number.at.start, number.at.len(), text));
    }
    edits.sort_by_key(|edit| edit.0);
    let mut text = String::new();
    let mut done = 0;
    for (at, len, new) in edits {
        text.push_str(&own.text[done..at]);
        text.push_str(&new);
        done = at + len;
    }
    text.push_str(&own.text[done..]);
    text
}

/// Whether the function whose body begins at `at` is one that launches call.
fn is_entry(text: &str, at: usize) -> bool {
    let head = text[..at].rsplit('\n').next().unwrap_or_default();
    let given = "(void *const *buf, void *scratch, long tid, long nt)";
    head.starts_with("void ") && head.contains(given)
}

fn n_entries(own: &Own, scan: &Scan) -> usize {
    let bodies = scan.bodies.iter();
    bodies.filter(|at| is_entry(own.text, **at)).count()
}

#[cfg(test)]
mod tests;
