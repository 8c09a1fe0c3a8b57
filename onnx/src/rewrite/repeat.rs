//! Common subexpressions: what is computed twice is computed once; what is stored twice is stored once.
//!
//! Before: `a = Exp(x); b = Exp(x)`; after: readers of `b` read `a`. Legal where operator, attributes
//! (bit by bit) and inputs are the same and the operator is a function of its inputs. Saves the second
//! computation and its bytes.

use super::Rule;
use super::patch::{Patch, may_stand_for};
use super::scope::Scope;
use crate::attributes::bodies;
use crate::infer::is_random;
use crate::proto::{AttributeProto, NodeProto};
use prost::Message;

pub const RULES: &[Rule] = &[
    Rule {
        name: "common-subexpression",
        at: repeated,
    },
    Rule {
        name: "share-initializers",
        at: shared_initializer,
    },
];

fn repeated(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    if is_random(node) || bodies(node).next().is_some() {
        return None;
    }
    // Candidates read the same first input; nodes without inputs are folded instead.
    let first = node.input.iter().find(|i| !i.is_empty())?;
    let earlier = scope.readers(first).iter().copied().take_while(|m| *m < n);
    let twin = earlier.into_iter().find(|m| same(scope.node(*m), node))?;
    let pairs = node.output.iter().zip(&scope.node(twin).output);
    let mut replace = Vec::new();
    for (old, new) in pairs {
        if !scope.is_used(old) {
            continue;
        }
        if new.is_empty() || !may_stand_for(scope, old, new) {
            return None;
        }
        replace.push((old.clone(), new.clone()));
    }
    Some(Patch {
        remove: vec![n],
        replace,
        ..Patch::default()
    })
}

fn same(a: &NodeProto, b: &NodeProto) -> bool {
    a.op_type == b.op_type
        && a.domain == b.domain
        && a.overload == b.overload
        && a.input == b.input
        && a.output.len() == b.output.len()
        && attributes(a) == attributes(b)
}

fn attributes(node: &NodeProto) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = node
        .attribute
        .iter()
        .map(|a| {
            AttributeProto {
                doc_string: String::new(),
                ..a.clone()
            }
            .encode_to_vec()
        })
        .collect();
    all.sort();
    all
}

/// The first reader of an initializer that another one equals reads that one.
fn shared_initializer(scope: &Scope, n: usize) -> Option<Patch> {
    let mut node = scope.node(n).clone();
    let mut changed = false;
    for input in &mut node.input {
        if let Some(twin) = scope.first_equal_initializer(input)
            && twin != input
        {
            *input = twin.to_string();
            changed = true;
        }
    }
    changed.then(|| Patch {
        remove: vec![n],
        insert: vec![node],
        ..Patch::default()
    })
}
