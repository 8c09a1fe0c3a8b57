//! What is known of the outputs of branches and loops.
//!
//! A value that a loop carries has the sizes that one pass through the body keeps, whatever the other sizes are.
//! Sizes that a body names itself are unknown outside of it.

use super::{Facts, Walk, declared};
use crate::attributes::Attributes;
use crate::element::Element;
use crate::fact::{Fact, MAX_ELEMENTS};
use crate::operators::{axis, is_at_least, number_of_unknown};
use crate::proto::{GraphProto, NodeProto, TensorProto};
use crate::stored::Stored;
use graph::{SymExpr, Symbol};
use std::path::Path;
use std::sync::Arc;

impl Walk<'_> {
    /// What is known of the outputs of If, Loop or Scan.
    pub(super) fn control(&self, node: &NodeProto, facts: &Facts) -> Option<Vec<Fact>> {
        match node.op_type.as_str() {
            "If" => self.branches(node, facts),
            "Loop" => self.repeated(node, facts),
            _ => self.scanned(node, facts),
        }
    }

    /// The values of a body whose inputs are known as `given`.
    fn inner(&self, body: &GraphProto, given: &[Fact], outer: &Facts) -> Facts {
        let mut facts = Facts::inside(outer);
        for (info, fact) in body.input.iter().zip(given) {
            let mut fact = fact.clone();
            fact.element = fact.element.or(declared(info, self.unknowns).element);
            facts.set(&info.name, fact);
        }
        for proto in &body.initializer {
            facts.set(&proto.name, initial(proto));
        }
        for node in &body.node {
            for (name, fact) in node.output.iter().zip(self.node(node, &facts)) {
                facts.set(name, fact);
            }
        }
        facts
    }

    fn outputs(&self, body: &GraphProto, given: &[Fact], outer: &Facts) -> Vec<Fact> {
        let facts = self.inner(body, given, outer);
        let output = |info: &crate::proto::ValueInfoProto| {
            let mut fact = facts.get(&info.name).cloned().unwrap_or_default();
            fact.element = fact.element.or(declared(info, self.unknowns).element);
            fact
        };
        body.output.iter().map(output).collect()
    }

    /// What both branches agree on; if one is always taken, what is known of its outputs.
    fn branches(&self, node: &NodeProto, facts: &Facts) -> Option<Vec<Fact>> {
        let attributes = Attributes::new(node);
        let branch = |name| Some(self.outputs(attributes.body(name)?, &[], facts));
        let condition = facts.get(node.input.first()?).and_then(Fact::known_ints);
        match condition.as_deref() {
            Some([0]) => return branch("else_branch"),
            Some([_]) => return branch("then_branch"),
            _ => {}
        }
        let (a, b) = (branch("then_branch")?, branch("else_branch")?);
        let pairs = a.iter().zip(&b);
        Some(pairs.map(|(a, b)| self.agreed(a, b)).collect())
    }

    /// What holds for both values.
    fn agreed(&self, a: &Fact, b: &Fact) -> Fact {
        let shape = match (&a.shape, &b.shape) {
            (Some(a), Some(b)) if a.len() == b.len() => {
                let size = |(a, b): (&SymExpr, &SymExpr)| match a == b {
                    true => a.clone(),
                    false => self.unknowns.size(),
                };
                Some(a.iter().zip(b).map(size).collect())
            }
            _ => None,
        };
        Fact::new(a.element.filter(|e| b.element == Some(*e)), shape)
    }

    /// The values a loop carries, given `before` at its start, and what a `pass` through its body then
    /// gives, where `skip` outputs come before them.
    fn carried(
        &self,
        before: &[Fact],
        pass: &dyn Fn(&[Fact]) -> Vec<Fact>,
        skip: usize,
    ) -> Option<(Vec<Fact>, Vec<Fact>)> {
        let own = self.unknowns.count();
        let plain = |f: &Fact| Fact::new(f.element, f.shape.clone());
        let mut carried: Vec<Fact> = before.iter().map(plain).collect();
        // Each round can only lose knowledge. Most loops change a size in the first round or never.
        for _ in 0..3 {
            let outputs = pass(&carried);
            let after = outputs.get(skip..skip + carried.len())?;
            let pairs = || carried.iter().zip(after);
            if pairs().all(|(a, b)| includes(a, b, own)) {
                return Some((carried, outputs));
            }
            carried = pairs().map(|(a, b)| self.agreed(a, b)).collect();
        }
        let nothing = vec![Fact::default(); carried.len()];
        let outputs = pass(&nothing);
        (outputs.len() >= skip + nothing.len()).then_some((nothing, outputs))
    }

    fn repeated(&self, node: &NodeProto, facts: &Facts) -> Option<Vec<Fact>> {
        let body = Attributes::new(node).body("body")?;
        let given = |at: usize| node.input.get(at).filter(|name| !name.is_empty());
        let fact = |at: usize| given(at).and_then(|name| facts.get(name)).cloned();
        let n = node.input.len().checked_sub(2)?;
        let before: Vec<Fact> = (2..n + 2).map(|at| fact(at).unwrap_or_default()).collect();
        let scalar = |element| Fact::new(Some(element), Some(Vec::new()));
        let own = self.unknowns.count();
        let pass = |carried: &[Fact]| {
            let mut inputs = vec![scalar(Element::I64), scalar(Element::Bool)];
            inputs.extend_from_slice(carried);
            self.outputs(body, &inputs, facts)
        };
        let (carried, outputs) = self.carried(&before, &pass, 1)?;
        let goes_on = |fact: Option<Fact>| fact.and_then(|f| f.known_ints()) == Some(vec![1]);
        let never_stops =
            goes_on(outputs.first().cloned()) && (given(1).is_none() || goes_on(fact(1)));
        let times = fact(0)
            .and_then(|f| f.ints())
            .and_then(|n| n.first().cloned());
        let times = times.filter(|n| {
            never_stops && is_at_least(n, 0) && n.as_const().is_none_or(|n| n < i64::from(i32::MAX))
        });
        let times = times.unwrap_or_else(|| self.unknowns.size());
        let stacked = outputs[n + 1..]
            .iter()
            .map(|f| self.stacked(f, &times, 0, own));
        let last = carried.iter().map(|f| self.outside(f, own));
        Some(last.chain(stacked).collect())
    }

    fn scanned(&self, node: &NodeProto, facts: &Facts) -> Option<Vec<Fact>> {
        if self.opsets.version("") < 9 {
            return None;
        }
        let attributes = Attributes::new(node);
        let body = attributes.body("body")?;
        let m = usize::try_from(attributes.int("num_scan_inputs")?).ok()?;
        let n = node.input.len().checked_sub(m)?;
        let fact = |name: &String| facts.get(name).cloned().unwrap_or_default();
        let inputs: Vec<Fact> = node.input.iter().map(fact).collect();
        let axes = |name: &str, at: usize| {
            let axes = attributes.ints(name);
            axes.and_then(|a| a.get(at).copied()).unwrap_or(0)
        };
        let mut slices = Vec::new();
        let mut times = None;
        for (at, input) in inputs[n..].iter().enumerate() {
            let mut slice = Fact::new(input.element, None);
            if let Some(shape) = &input.shape {
                let mut shape = shape.clone();
                let d = axis(axes("scan_input_axes", at), shape.len());
                let length = shape.remove(d.filter(|d| *d < shape.len())?);
                times = times.or(Some(length));
                slice.shape = Some(shape);
            }
            slices.push(slice);
        }
        let own = self.unknowns.count();
        let pass = |carried: &[Fact]| self.outputs(body, &[carried, &slices].concat(), facts);
        let (carried, outputs) = self.carried(&inputs[..n], &pass, 0)?;
        let times = times.unwrap_or_else(|| self.unknowns.size());
        let stacked = outputs[n..].iter().enumerate();
        let stacked =
            stacked.map(|(at, f)| self.stacked(f, &times, axes("scan_output_axes", at), own));
        let last = carried.iter().map(|f| self.outside(f, own));
        Some(last.chain(stacked).collect())
    }

    /// A value of a body as seen from around it: sizes the body made up, from number `own` on, are
    /// unknown.
    fn outside(&self, fact: &Fact, own: usize) -> Fact {
        let made_up = |s: &Symbol| is_after(s, own);
        let size = |n: &SymExpr| match n.symbols().iter().any(made_up) {
            true => self.unknowns.size(),
            false => n.clone(),
        };
        let shape = fact.shape.as_ref();
        Fact::new(fact.element, shape.map(|s| s.iter().map(size).collect()))
    }

    /// A value of a body, stacked `times` times along a new axis.
    fn stacked(&self, fact: &Fact, times: &SymExpr, at: i64, own: usize) -> Fact {
        let mut fact = self.outside(fact, own);
        if let Some(shape) = &mut fact.shape {
            match axis(at, shape.len() + 1) {
                Some(at) => shape.insert(at, times.clone()),
                None => fact.shape = None,
            }
        }
        fact
    }
}

/// Whether a symbol is an unknown size that was made after the first `own` of them.
fn is_after(symbol: &Symbol, own: usize) -> bool {
    number_of_unknown(symbol).is_some_and(|n| n > own)
}

/// Whether what is known of `a` holds for `b` too. Unknown sizes that were made after the first `own` of them fit any
/// size.
fn includes(a: &Fact, b: &Fact, own: usize) -> bool {
    let size =
        |(a, b): (&SymExpr, &SymExpr)| a == b || a.as_symbol().is_some_and(|s| is_after(s, own));
    let shape = match (&a.shape, &b.shape) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(size),
    };
    shape && (a.element.is_none() || a.element == b.element)
}

/// What is known of an initializer of a body; the elements of large ones are not looked at.
fn initial(proto: &TensorProto) -> Fact {
    let stored = Stored::new(proto.clone(), &Arc::from(Path::new(".")));
    if proto.data_location == 0 && stored.len() <= MAX_ELEMENTS {
        return Fact::of_stored(&Arc::new(stored));
    }
    let shape = stored.shape();
    let shape = shape.map(|s| s.into_iter().map(SymExpr::from).collect());
    Fact::new(stored.element(), shape)
}
