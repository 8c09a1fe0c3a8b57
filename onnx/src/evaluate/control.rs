//! Control flow: If, Loop and Scan. Bodies see the values around them.

use super::{EvaluateError, Program, Scope, label, missing};
use crate::attributes::Attributes;
use crate::element::Element;
use crate::infer::Opsets;
use crate::operators::{axis, joined, slice_at};
use crate::proto::{Dimension, GraphProto, NodeProto, ValueInfoProto};
use crate::tensor::{Tensor, Values};
use std::collections::BTreeMap;

/// A loop that runs longer is refused: it may never end.
pub(super) const MAX_TRIPS: i64 = 1 << 20;

/// Whether a node is control flow that is run here.
pub fn is_control(node: &NodeProto) -> bool {
    crate::attributes::is_standard(node) && matches!(node.op_type.as_str(), "If" | "Loop" | "Scan")
}

/// A control flow node with what it sees.
struct Flow<'a> {
    node: &'a NodeProto,
    scope: &'a Scope<'a>,
    opsets: &'a Opsets,
}

impl<'a> Flow<'a> {
    fn refuse(&self, what: impl Into<String>) -> EvaluateError {
        EvaluateError::Node {
            node: label(self.node),
            what: what.into(),
        }
    }

    fn body(&self, name: &str) -> Result<&'a GraphProto, EvaluateError> {
        let body = Attributes::new(self.node).body(name);
        body.ok_or_else(|| self.refuse(format!("its `{name}` is missing")))
    }

    /// The input at that position, if it is given.
    fn input(&self, at: usize) -> Result<Option<&'a Tensor>, EvaluateError> {
        match self.node.input.get(at).filter(|name| !name.is_empty()) {
            None => Ok(None),
            Some(name) => self.scope.get(name).map(Some).ok_or_else(|| missing(name)),
        }
    }

    /// The one integer or truth value of a tensor.
    fn one(&self, x: &Tensor) -> Result<i64, EvaluateError> {
        match x.to_i64().as_deref() {
            Some([value]) => Ok(*value),
            _ => Err(self.refuse("its condition or trip count is not one value")),
        }
    }
}

impl Program<'_> {
    /// The outputs of a node with bodies; `None` if it is no control flow.
    pub(super) fn control(
        &self,
        node: &NodeProto,
        scope: &Scope,
        opsets: &Opsets,
    ) -> Result<Option<Vec<Tensor>>, EvaluateError> {
        if !is_control(node) {
            return Ok(None);
        }
        let flow = Flow {
            node,
            scope,
            opsets,
        };
        match node.op_type.as_str() {
            "If" => self.branch(&flow),
            "Loop" => self.repeat(&flow),
            _ => self.scan(&flow),
        }
        .map(Some)
    }

    fn branch(&self, flow: &Flow) -> Result<Vec<Tensor>, EvaluateError> {
        let condition = flow.input(0)?;
        let condition = condition.ok_or_else(|| flow.refuse("it has no condition"))?;
        let taken = flow.one(condition)? != 0;
        let body = flow.body(if taken { "then_branch" } else { "else_branch" })?;
        let outputs = self.pass(flow, body, Vec::new())?;
        if let (Some(first), Ok(mut ran)) = (flow.node.output.first(), self.branches.lock()) {
            ran.insert((first.clone(), taken));
        }
        Ok(outputs)
    }

    /// The outputs of a body for these inputs.
    fn pass(
        &self,
        flow: &Flow,
        body: &GraphProto,
        inputs: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, EvaluateError> {
        let names = body.input.iter().map(|i| i.name.clone());
        let feeds: BTreeMap<String, Tensor> = names.zip(inputs).collect();
        let wanted: Vec<&str> = body.output.iter().map(|o| o.name.as_str()).collect();
        self.body(body, &feeds, &wanted, flow.scope, flow.opsets)
    }

    fn repeat(&self, flow: &Flow) -> Result<Vec<Tensor>, EvaluateError> {
        let body = flow.body("body")?;
        let trips = flow.input(0)?.map(|x| flow.one(x)).transpose()?;
        let mut goes_on = match flow.input(1)? {
            Some(x) => flow.one(x)? != 0,
            None => true,
        };
        let n = flow.node.input.len().saturating_sub(2);
        if body.input.len() != n + 2 || body.output.len() < n + 1 {
            return Err(flow.refuse("its body does not take and give what it carries"));
        }
        let mut carried = Vec::new();
        for at in 2..n + 2 {
            let value = flow.input(at)?;
            carried.push(
                value
                    .ok_or_else(|| flow.refuse("a carried value is absent"))?
                    .clone(),
            );
        }
        let mut parts: Vec<Vec<Tensor>> = vec![Vec::new(); body.output.len() - n - 1];
        let mut n_stacked = 0;
        let mut trip = 0;
        while goes_on && trips.is_none_or(|n| trip < n) {
            let most = self.most_trips;
            if trip >= most {
                return Err(flow.refuse(format!("it runs more than {most} times")));
            }
            let truth = Tensor::new(&[], Values::Bool(vec![true]));
            let mut inputs = vec![Tensor::int(trip), truth];
            inputs.append(&mut carried);
            let mut outputs = self.pass(flow, body, inputs)?;
            for (part, output) in parts.iter_mut().zip(outputs.split_off(n + 1)) {
                n_stacked = output.n_bytes_in_memory().saturating_add(n_stacked);
                part.push(output);
            }
            if n_stacked > self.most_bytes() {
                return Err(flow.refuse(format!("what it stacks takes {n_stacked} bytes so far")));
            }
            goes_on = flow.one(&outputs[0])? != 0;
            carried = outputs.split_off(1);
            trip += 1;
        }
        for (parts, info) in parts.iter().zip(&body.output[n + 1..]) {
            carried.push(self.stacked(flow, parts, 0, info)?);
        }
        Ok(carried)
    }

    fn scan(&self, flow: &Flow) -> Result<Vec<Tensor>, EvaluateError> {
        if flow.opsets.version("") < 9 {
            return Err(flow.refuse("Scan before version 9 is not known"));
        }
        let body = flow.body("body")?;
        let attributes = Attributes::new(flow.node);
        let setting = |name: &str, at: usize| {
            let list = attributes.ints(name);
            list.and_then(|l| l.get(at).copied()).unwrap_or(0)
        };
        let m = attributes
            .int("num_scan_inputs")
            .and_then(|m| usize::try_from(m).ok());
        let n = m.and_then(|m| flow.node.input.len().checked_sub(m));
        let fits = |n: &usize| body.input.len() == flow.node.input.len() && body.output.len() >= *n;
        let n = n.filter(fits);
        let n = n.ok_or_else(|| flow.refuse("its body does not take and give what it scans"))?;
        let mut inputs = Vec::new();
        for at in 0..flow.node.input.len() {
            let value = flow.input(at)?;
            inputs.push(value.ok_or_else(|| flow.refuse("an input is absent"))?);
        }
        let mut carried: Vec<Tensor> = inputs[..n].iter().map(|x| (*x).clone()).collect();
        let mut scanned = Vec::new();
        for (at, x) in inputs[n..].iter().enumerate() {
            let along = axis(setting("scan_input_axes", at), x.shape.len());
            let along = along.filter(|d| *d < x.shape.len());
            scanned.push((
                *x,
                along.ok_or_else(|| flow.refuse("it scans no dimension"))?,
            ));
        }
        let length = scanned.first().map_or(0, |(x, d)| x.shape[*d]);
        if scanned.iter().any(|(x, d)| x.shape[*d] != length) {
            return Err(flow.refuse("what it scans differs in length"));
        }
        let mut parts: Vec<Vec<Tensor>> = vec![Vec::new(); body.output.len() - n];
        for trip in 0..length {
            let mut inputs = std::mem::take(&mut carried);
            for (at, (x, d)) in scanned.iter().enumerate() {
                let backwards = setting("scan_input_directions", at) != 0;
                inputs.push(slice_at(
                    x,
                    *d,
                    if backwards { length - 1 - trip } else { trip },
                ));
            }
            carried = self.pass(flow, body, inputs)?;
            for (part, output) in parts.iter_mut().zip(carried.split_off(n)) {
                part.push(output);
            }
        }
        for (at, (parts, info)) in parts.iter_mut().zip(&body.output[n..]).enumerate() {
            if setting("scan_output_directions", at) != 0 {
                parts.reverse();
            }
            let along = setting("scan_output_axes", at);
            carried.push(self.stacked(flow, parts, along, info)?);
        }
        Ok(carried)
    }

    /// Values stacked along a new axis; if there are none, their declared type gives the sizes.
    fn stacked(
        &self,
        flow: &Flow,
        parts: &[Tensor],
        at: i64,
        info: &ValueInfoProto,
    ) -> Result<Tensor, EvaluateError> {
        let none;
        let first = match parts.first() {
            Some(first) => first,
            None => {
                none = example(info).ok_or_else(|| {
                    flow.refuse("it never runs, and its body does not declare what it gives")
                })?;
                &none
            }
        };
        let rank = first.shape.len() + 1;
        let at = axis(at, rank).ok_or_else(|| flow.refuse("it stacks along no dimension"))?;
        if parts.is_empty() {
            let mut shape = first.shape.clone();
            shape.insert(at, 0);
            let values = first.values.pick(std::iter::empty());
            return Ok(self.widened(Tensor::new(&shape, values)));
        }
        let widened = |x: &Tensor| {
            let mut shape = x.shape.clone();
            shape.insert(at.min(shape.len()), 1);
            x.reshaped(&shape)
        };
        let widened: Vec<Tensor> = parts.iter().map(widened).collect();
        let all: Vec<&Tensor> = widened.iter().collect();
        joined(&all, at).map_err(|what| flow.refuse(what))
    }
}

/// A tensor of a declared type; sizes that are not declared are 0.
fn example(info: &ValueInfoProto) -> Option<Tensor> {
    let tensor = info.r#type.as_ref()?.tensor_type.as_ref()?;
    let size = |dim: &crate::proto::DimensionProto| match dim.value {
        Some(Dimension::DimValue(n)) => n,
        _ => 0,
    };
    let dims: Vec<i64> = tensor.shape.as_ref()?.dim.iter().map(size).collect();
    let (shape, _) = crate::tensor::sizes(&dims).ok()?;
    let element = Element::of_number(tensor.elem_type)?;
    // No element of it is ever looked at.
    let values = crate::tensor::of_raw(element, &[]);
    Some(Tensor {
        shape,
        values: values.into(),
    })
}
