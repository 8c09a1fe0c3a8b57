//! Loop and Scan of a known number of trips.

use super::*;
use crate::proto::TensorProto;
use crate::rewrite::patch::rename_reads;
use std::collections::BTreeMap;

/// Before: `c, s = Loop(5, true, c0) { … }`; after: the body five times, each reading what the one before it gave.
/// Legal where the number of trips is a constant and the condition stays true.
pub(super) fn write_loop(cx: &mut Written, old: &NodeProto) -> Option<()> {
    let body = Attributes::new(old).body("body")?;
    let trips = cx.facts.get(old.input.first()?)?.known_ints()?;
    let [trips] = trips.as_slice() else {
        return None;
    };
    let condition = old.input.get(1).filter(|name| !name.is_empty());
    if let Some(name) = condition {
        let known = cx.facts.get(name)?.known_ints()?;
        if known != [1] {
            return None;
        }
    }
    if !stays_true(body) || !(0..=MOST_TRIPS).contains(trips) {
        return None;
    }
    let n_carried = body.input.len().checked_sub(2)?;
    let mut carried: Vec<String> = old.input.get(2..2 + n_carried)?.to_vec();
    let n_scanned = body.output.len().checked_sub(1 + n_carried)?;
    let scanned_used = old.output.iter().skip(n_carried).any(|o| !o.is_empty());
    if *trips == 0 && n_scanned > 0 && scanned_used {
        // Nothing says which sizes an empty stack has.
        return None;
    }
    let shared = cx.shared(body)?;
    let mut scanned: Vec<Vec<String>> = vec![Vec::new(); n_scanned];
    let n = old
        .output
        .first()
        .map_or("loop", String::as_str)
        .to_string();
    let truth = cx.constant(
        &format!("{n}.goes"),
        Tensor::new(&[], Values::Bool(vec![true])),
    );
    for trip in 0..*trips {
        let at = cx.int(&format!("{n}.trip"), trip);
        let given = [at, truth.clone()].into_iter().chain(carried);
        let given = body
            .input
            .iter()
            .map(|i| i.name.clone())
            .zip(given)
            .collect();
        let gave = cx.trip(body, &shared, given)?;
        carried = gave.get(1..1 + n_carried)?.to_vec();
        for (all, one) in scanned.iter_mut().zip(&gave[1 + n_carried..]) {
            all.push(one.clone());
        }
    }
    for (output, value) in old.output.iter().zip(&carried) {
        if !output.is_empty() {
            cx.push("Identity", &[value], &[output], Vec::new());
        }
    }
    for (output, values) in old.output.iter().skip(n_carried).zip(&scanned) {
        if !output.is_empty() {
            cx.stack(output, values, 0);
        }
    }
    Some(())
}

/// Whether the condition that a body gives is the one it is given, or a constant that is true.
fn stays_true(body: &GraphProto) -> bool {
    let (Some(given), Some(gives)) = (body.input.get(1), body.output.first()) else {
        return false;
    };
    let mut name = gives.name.as_str();
    for node in body.node.iter().rev() {
        if node.output.first().is_some_and(|o| o == name) {
            match node.op_type.as_str() {
                "Identity" => name = &node.input[0],
                "Constant" => {
                    let value = Attributes::new(node).tensor("value");
                    let known = value.and_then(|t| Tensor::of_proto(t).ok()?.to_i64());
                    return known == Some(vec![1]);
                }
                _ => return false,
            }
        }
    }
    let stored = body.initializer.iter().find(|t| t.name == name);
    let is_true =
        |t: &TensorProto| Tensor::of_proto(t).ok().and_then(|t| t.to_i64()) == Some(vec![1]);
    name == given.name || stored.is_some_and(is_true)
}

/// Before: `s, y = Scan(s0, x) { … }` over a dimension of 5; after: the body five times, on `Gather(x, trip)`.
pub(super) fn write_scan(cx: &mut Written, old: &NodeProto) -> Option<()> {
    let attributes = Attributes::new(old);
    let body = attributes.body("body")?;
    let n_given = usize::try_from(attributes.int("num_scan_inputs")?).ok()?;
    let n_carried = old.input.len().checked_sub(n_given)?;
    let n_scanned = body.output.len().checked_sub(n_carried)?;
    let numbers = |name: &str, n: usize| {
        let given = attributes.ints(name).map(<[i64]>::to_vec);
        given.unwrap_or_else(|| vec![0; n])
    };
    let (axes, backward) = (
        numbers("scan_input_axes", n_given),
        numbers("scan_input_directions", n_given),
    );
    let (out_axes, out_backward) = (
        numbers("scan_output_axes", n_scanned),
        numbers("scan_output_directions", n_scanned),
    );
    let mut places = Vec::new();
    let mut trips = None;
    for (x, axis) in old.input[n_carried..].iter().zip(&axes) {
        let shape = cx.facts.get(x)?.shape.clone()?;
        let axis = crate::operators::axis(*axis, shape.len())?;
        let n = shape.get(axis)?.as_const()?;
        if *trips.get_or_insert(n) != n {
            return None;
        }
        places.push(axis as i64);
    }
    let trips = trips.filter(|n| (1..=MOST_TRIPS).contains(n))?;
    let shared = cx.shared(body)?;
    let mut carried = old.input[..n_carried].to_vec();
    let mut scanned: Vec<Vec<String>> = vec![Vec::new(); n_scanned];
    let name = old
        .output
        .first()
        .map_or("scan", String::as_str)
        .to_string();
    for trip in 0..trips {
        let mut given = carried;
        for (n, x) in old.input[n_carried..].iter().enumerate() {
            let place = match backward.get(n) {
                Some(1) => trips - 1 - trip,
                _ => trip,
            };
            given.push(cx.at(&format!("{name}.given"), x, place, *places.get(n)?));
        }
        let given = body
            .input
            .iter()
            .map(|i| i.name.clone())
            .zip(given)
            .collect();
        let gave = cx.trip(body, &shared, given)?;
        carried = gave.get(..n_carried)?.to_vec();
        for (all, one) in scanned.iter_mut().zip(&gave[n_carried..]) {
            all.push(one.clone());
        }
    }
    for (output, value) in old.output.iter().zip(&carried) {
        if !output.is_empty() {
            cx.push("Identity", &[value], &[output], Vec::new());
        }
    }
    for (n, (output, mut values)) in old.output.iter().skip(n_carried).zip(scanned).enumerate() {
        if out_backward.get(n) == Some(&1) {
            values.reverse();
        }
        if !output.is_empty() {
            // A negative axis counts with the new dimension, here and in `stack`.
            cx.stack(output, &values, *out_axes.get(n)?);
        }
    }
    Some(())
}

impl Written<'_> {
    /// Moves the initializers of a body to the graph, once for all trips; returns their new names. `None` if a body
    /// holds what cannot be moved.
    fn shared(&mut self, body: &GraphProto) -> Option<BTreeMap<String, String>> {
        if !body.sparse_initializer.is_empty() {
            return None;
        }
        let mut names = BTreeMap::new();
        for tensor in &body.initializer {
            let name = self.fresh(&tensor.name);
            self.initializers.push(TensorProto {
                name: name.clone(),
                ..tensor.clone()
            });
            names.insert(tensor.name.clone(), name);
        }
        Some(names)
    }

    /// One copy of a body's nodes; gives the names of what the body gives.
    fn trip(
        &mut self,
        body: &GraphProto,
        shared: &BTreeMap<String, String>,
        given: BTreeMap<String, String>,
    ) -> Option<Vec<String>> {
        if self.nodes.len() > MOST_NODES {
            return None;
        }
        let mut names = shared.clone();
        names.extend(given);
        for old in &body.node {
            let mut new = old.clone();
            rename_reads(&mut new, &|name| names.get(name).cloned());
            // Inner bodies may use a name for something else.
            let hidden = |b: &GraphProto| b.input.iter().any(|i| names.contains_key(&i.name));
            if bodies(old).any(hidden) {
                return None;
            }
            for output in new.output.iter_mut().filter(|o| !o.is_empty()) {
                let fresh = self.fresh(output);
                names.insert(output.clone(), fresh.clone());
                *output = fresh;
            }
            new.name = new.output.first().cloned().unwrap_or_default();
            debug_assert!(reads(&new).iter().all(|name| !name.is_empty()));
            self.nodes.push(new);
        }
        let outputs = body.output.iter().map(|o| &o.name);
        Some(
            outputs
                .map(|name| names.get(name).unwrap_or(name).clone())
                .collect(),
        )
    }
}
