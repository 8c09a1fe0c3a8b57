//! What the standard says of each operator: how many values it takes and gives, of which types, and
//! with which attributes.
//!
//! Owns the table `schemas.txt`, which `onnx/schemas.py` writes and describes. Never looks at a node.

use crate::element::Element;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::LazyLock;

/// An operator in the version of its domain that added or last changed it.
#[derive(Debug, Default)]
pub struct Schema {
    /// The version that added or last changed the operator.
    pub since: i64,
    /// Whether it is no longer to be used.
    pub is_deprecated: bool,
    /// Whether it may have attributes of any name.
    pub is_open: bool,
    /// Its inputs.
    pub inputs: Vec<Port>,
    /// Its outputs.
    pub outputs: Vec<Port>,
    /// Its attributes by name.
    pub attributes: BTreeMap<&'static str, Attribute>,
    /// Which set of element types each type variable may stand for.
    variables: BTreeMap<&'static str, usize>,
}

/// An input or output.
#[derive(Debug)]
pub struct Port {
    /// Its name in the standard.
    pub name: &'static str,
    /// Its element type.
    pub element: Type,
    /// The number of values for which it stands.
    pub many: Many,
}

/// An element type.
#[derive(Debug, PartialEq, Eq)]
pub enum Type {
    /// It is no tensor, or may be none.
    Any,
    /// Always this one.
    One(Element),
    /// The type variable of that name.
    Variable(&'static str),
}

/// The number of values for which an input or output stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Many {
    /// One.
    One,
    /// One, or none.
    Optional,
    /// This many or more, all of one type.
    Same(usize),
    /// This many or more, each of a type of its own.
    Free(usize),
}

/// An attribute.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// The type, as `AttributeProto.AttributeType` names it in small letters.
    pub kind: &'static str,
    /// Whether it has to be given.
    pub is_required: bool,
}

#[derive(Default)]
struct Table {
    /// Sets of element types, without those that are not computed with here.
    sets: Vec<BTreeSet<Element>>,
    /// Versions by domain and name, the oldest first.
    domains: BTreeMap<&'static str, BTreeMap<&'static str, Vec<Schema>>>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| parsed(include_str!("schemas.txt")));

/// The newest version of a domain that the table knows; the standard's domain is the empty string.
pub fn newest(domain: &str) -> Option<i64> {
    match domain {
        "" => Some(28),
        "ai.onnx.ml" => Some(5),
        _ => None,
    }
}

/// The versions of an operator, the oldest first; none if the domain has no such operator.
pub fn versions(domain: &str, name: &str) -> &'static [Schema] {
    let all = TABLE.domains.get(domain).and_then(|names| names.get(name));
    all.map_or(&[], Vec::as_slice)
}

impl Schema {
    /// The element types that values of that type may have; `None` if that is not said.
    pub fn allowed(&self, element: &Type) -> Option<Vec<Element>> {
        match element {
            Type::Any => None,
            Type::One(one) => Some(vec![*one]),
            Type::Variable(name) => {
                let set = TABLE.sets.get(*self.variables.get(name)?)?;
                Some(set.iter().copied().collect())
            }
        }
    }
}

/// How many values may be given for these ports; the end is `usize::MAX` if there is no limit.
pub fn counts(ports: &[Port]) -> RangeInclusive<usize> {
    let (mut least, mut most) = (0, ports.len());
    for (at, port) in ports.iter().enumerate() {
        match port.many {
            Many::One => least = at + 1,
            Many::Optional => {}
            Many::Same(n) | Many::Free(n) => {
                most = usize::MAX;
                if n > 0 {
                    least = at + n;
                }
            }
        }
    }
    least..=most
}

/// The port that the value at that position belongs to.
pub fn port(ports: &[Port], at: usize) -> Option<&Port> {
    let rest = || {
        let last = ports.last();
        last.filter(|p| matches!(p.many, Many::Same(_) | Many::Free(_)))
    };
    ports.get(at).or_else(rest)
}

/// The table. Lines that do not have the form `onnx/schemas.py` describes add nothing; a test checks that there are
/// none.
fn parsed(text: &'static str) -> Table {
    let mut table = Table::default();
    let (mut domain, mut name) = ("", "");
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let key = words.next().unwrap_or_default();
        if key == "types" {
            let names = words.skip(1);
            table
                .sets
                .push(names.filter_map(Element::of_name).collect());
            continue;
        }
        if key == "operator" {
            let mut word = || words.next().unwrap_or_default();
            (domain, name) = (word().trim_start_matches('-'), word());
            let since = word().parse().unwrap_or(0);
            let mark = word();
            let schema = Schema {
                since,
                is_deprecated: mark == "deprecated",
                is_open: mark == "open",
                ..Schema::default()
            };
            let names = table.domains.entry(domain).or_default();
            names.entry(name).or_default().push(schema);
            continue;
        }
        let names = table.domains.get_mut(domain);
        let Some(schema) = names.and_then(|names| names.get_mut(name)?.last_mut()) else {
            continue;
        };
        let pairs = words.filter_map(|word| word.rsplit_once(':'));
        match key {
            "in" => schema.inputs = pairs.map(port_of).collect(),
            "out" => schema.outputs = pairs.map(port_of).collect(),
            "has" => schema.attributes = pairs.map(attribute_of).collect(),
            _ => {
                let named = pairs.filter_map(|(name, n)| Some((name, n.parse().ok()?)));
                schema.variables = named.collect();
            }
        }
    }
    table
}

fn port_of((name, word): (&'static str, &'static str)) -> Port {
    let end = word.find(['?', '*', '~']).unwrap_or(word.len());
    let (element, mark) = word.split_at(end);
    let least = |n: &str| n.parse().unwrap_or(0);
    let many = match (mark.get(..1), mark.get(1..)) {
        (Some("*"), Some(n)) => Many::Same(least(n)),
        (Some("~"), Some(n)) => Many::Free(least(n)),
        (Some(_), _) => Many::Optional,
        (None, _) => Many::One,
    };
    let element = match Element::of_name(element) {
        Some(one) => Type::One(one),
        None if element == "-" => Type::Any,
        None => Type::Variable(element),
    };
    Port {
        name,
        element,
        many,
    }
}

fn attribute_of((name, word): (&'static str, &'static str)) -> (&'static str, Attribute) {
    let kind = word.strip_suffix('!');
    let attribute = Attribute {
        kind: kind.unwrap_or(word),
        is_required: kind.is_some(),
    };
    (name, attribute)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_understood() {
        let text = include_str!("schemas.txt");
        let n = text.lines().filter(|l| l.starts_with("operator ")).count();
        let domains = TABLE.domains.iter();
        let all = domains.flat_map(|(domain, names)| names.values().map(move |all| (*domain, all)));
        let mut n_read = 0;
        for (key, all) in all {
            n_read += all.len();
            assert!(all.is_sorted_by_key(|s| s.since), "{key:?}");
            for schema in all {
                assert!(newest(key).is_some_and(|n| schema.since <= n), "{key:?}");
                for port in schema.inputs.iter().chain(&schema.outputs) {
                    if let Type::Variable(name) = port.element {
                        assert!(schema.variables[name] < TABLE.sets.len(), "{key:?} {name}");
                    }
                }
            }
        }
        assert_eq!(n_read, n);
    }

    #[test]
    fn ports_and_attributes_are_what_the_standard_says() {
        let concat = &versions("", "Concat")[3];
        assert_eq!((concat.since, counts(&concat.inputs)), (13, 1..=usize::MAX));
        assert!(concat.attributes["axis"].is_required);
        let clip = versions("", "Clip").last().expect("a version");
        assert_eq!(counts(&clip.inputs), 1..=3);
        let choice = versions("", "Where").last().expect("a version");
        let first = &choice.inputs[0].element;
        assert_eq!(choice.allowed(first), Some(vec![Element::Bool]));
        assert!(versions("", "Nothing").is_empty());
    }
}
