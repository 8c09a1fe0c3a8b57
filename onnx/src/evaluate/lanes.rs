//! Runs of one body in step: every lane takes a node before any takes the next.
//!
//! Owns the walk over a body's nodes and the life of its values. An initializer that is not kept is read
//! once for all lanes and dropped after its last use, so that runs of a model far larger than memory cost
//! one reading together. What a lane gives is what it gives alone.

use super::{
    EvaluateError, Precision, Program, Scope, last_uses, missing, needed, reads, unreadable,
};
use crate::evaluate::Values;
use crate::infer::Opsets;
use crate::operators::{self, Symbolic};
use crate::proto::{GraphProto, NodeProto};
use crate::stored;
use crate::tensor::Tensor;
use std::collections::BTreeMap;

/// One run: a program and what it is given.
pub struct Lane<'a, 'm> {
    /// The program; those of all lanes are of one graph.
    pub program: &'a Program<'m>,
    /// Values by name.
    pub feeds: &'a Values,
}

/// What a run gives, or why not.
pub type Outcome = Result<Vec<Tensor>, EvaluateError>;

/// The values called `wanted` of each lane, as [`Program::run`] gives them.
pub fn run_in_step(lanes: &[Lane], wanted: &[&str]) -> Vec<Outcome> {
    let Some(first) = lanes.first() else {
        return Vec::new();
    };
    // The names that are given decide which nodes run: lanes with other names are walked alone.
    let alike = |lane: &Lane| {
        std::ptr::eq(lane.program.graph, first.program.graph)
            && lane.feeds.keys().eq(first.feeds.keys())
    };
    if !lanes.iter().all(alike) {
        let alone = |lane: &Lane| lane.program.run(lane.feeds, wanted);
        return lanes.iter().map(alone).collect();
    }
    for lane in lanes {
        lane.program.make_room(lane.feeds);
    }
    let outer = Scope {
        values: BTreeMap::new(),
        outer: None,
        depth: 0,
        held: 0,
    };
    walk(
        first.program.graph,
        lanes,
        wanted,
        &outer,
        &first.program.opsets,
    )
}

/// The values called `wanted` of each lane in `body`; all lanes are given the same names.
pub(super) fn walk(
    body: &GraphProto,
    lanes: &[Lane],
    wanted: &[&str],
    outer: &Scope,
    opsets: &Opsets,
) -> Vec<Outcome> {
    let Some(first) = lanes.first() else {
        return Vec::new();
    };
    let stored: BTreeMap<&str, usize> = body
        .initializer
        .iter()
        .enumerate()
        .map(|(n, t)| (t.name.as_str(), n))
        .collect();
    let start = |lane: &Lane| lane.scope(body, outer);
    let mut scopes: Vec<Result<Scope, EvaluateError>> = lanes.iter().map(start).collect();
    let needed = needed(&body.node, first.feeds, wanted);
    let last = last_uses(&body.node, &needed);
    for (n, node) in body.node.iter().enumerate() {
        if !needed.contains(&n) {
            continue;
        }
        for name in reads(node) {
            if let Some(at) = stored.get(name) {
                give(name, body, *at, node, lanes, &mut scopes);
            }
        }
        for (lane, place) in lanes.iter().zip(&mut scopes) {
            let Ok(scope) = place else { continue };
            match lane.program.node(node, scope, opsets) {
                Ok(outputs) => {
                    let made = outputs.iter().map(Tensor::n_bytes_in_memory);
                    scope.held = made.fold(scope.held, usize::saturating_add);
                    let named = node.output.iter().cloned().zip(outputs);
                    scope.values.extend(named);
                    if let Err(error) = lane.program.has_room(node, scope) {
                        *place = Err(error);
                    }
                }
                Err(error) => *place = Err(error),
            }
        }
        for name in last.get(&n).into_iter().flatten() {
            if !wanted.contains(name) {
                for scope in scopes.iter_mut().flatten() {
                    let gone = scope.values.remove(*name);
                    let freed = gone.as_ref().map_or(0, Tensor::n_bytes_in_memory);
                    scope.held = scope.held.saturating_sub(freed);
                }
            }
        }
    }
    let end = |(lane, scope): (&Lane, Result<Scope, EvaluateError>)| {
        let scope = scope?;
        let give = |name: &&str| match (scope.get(name), stored.get(name)) {
            (Some(tensor), _) => Ok(lane.program.widened(tensor.clone())),
            (None, Some(at)) => {
                let tensor = lane.program.initializer(body, *at)?;
                Ok(lane.program.widened(tensor))
            }
            (None, None) => Err(missing(name)),
        };
        wanted.iter().map(give).collect()
    };
    lanes.iter().zip(scopes).map(end).collect()
}

impl Lane<'_, '_> {
    /// The values a body starts with: those given, and sparse initializers written out.
    fn scope<'s>(
        &self,
        body: &GraphProto,
        outer: &'s Scope<'s>,
    ) -> Result<Scope<'s>, EvaluateError> {
        let widen = |tensor: Tensor| self.program.widened(tensor);
        let given = self.feeds.iter();
        let given = given.map(|(name, tensor)| (name.clone(), widen(tensor.clone())));
        let mut values: Values = given.collect();
        for sparse in &body.sparse_initializer {
            let name = sparse.values.as_ref().map_or("", |v| v.name.as_str());
            let tensor = stored::dense(sparse, self.program.folder);
            let tensor = tensor.map_err(|what| unreadable(name, &what))?;
            values.insert(name.to_string(), widen(tensor));
        }
        Ok(Scope {
            values,
            outer: Some(outer),
            depth: outer.depth,
            held: 0,
        })
    }
}

/// Gives an initializer that `node` reads to the lanes that do not have it: read once where it is not kept,
/// and widened once for those that compute in `f64`.
fn give(
    name: &str,
    body: &GraphProto,
    at: usize,
    node: &NodeProto,
    lanes: &[Lane],
    scopes: &mut [Result<Scope, EvaluateError>],
) {
    // An operator that only moves elements may keep few of a large table: they are widened after it.
    let moves = operators::find(node).is_some_and(|o| matches!(o.symbolic, Symbolic::Moves(_)));
    let widen_now = lanes.len() > 1 && !moves;
    let mut read: Option<Result<Tensor, EvaluateError>> = None;
    let mut wide: Option<Tensor> = None;
    for (lane, place) in lanes.iter().zip(scopes) {
        let Ok(scope) = place else { continue };
        if scope.values.contains_key(name) {
            continue;
        }
        let decode = || lane.program.initializer(body, at);
        let tensor = match lane.program.kept {
            Some(_) => decode(),
            None => read.get_or_insert_with(decode).clone(),
        };
        let shared = |tensor: Tensor| match lane.program.precision {
            Precision::Float64 if widen_now => wide.get_or_insert_with(|| tensor.widened()).clone(),
            _ => tensor,
        };
        match tensor.map(shared) {
            Ok(tensor) => {
                scope.values.insert(name.to_string(), tensor);
            }
            Err(error) => *place = Err(error),
        }
    }
}
