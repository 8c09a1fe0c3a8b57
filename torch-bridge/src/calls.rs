//! Operators of PyTorch's that a CUDA program calls between its launches, as Python sees them.
//!
//! Owns what Python is told of each call before it is made, and the way back into the interpreter while
//! a pass runs. Never computes: `shorthaul._attention` does.

use crate::built::Built;
use compiler::cuda_kernels::LaunchOp;
use compiler::cuda_kernels::machine::Operators;
use compiler::cuda_kernels::vendor::{CallOperand, CallPass};
use compiler::graph::Stage;
use compiler::kernels::run::BufferRef;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use std::sync::Mutex;

/// Kind (as a table has it), whether it is a gradient, whether it is causal, scale, operands.
pub type CallRow = (&'static str, bool, bool, f64, Vec<OperandRow>);

/// Role, block (`slot`: one of the caller's buffers; `scratch`, `saved` or `constant`), number of the slot or bytes
/// from the block's start, dtype (PyTorch's name), elements from there to the first one, sizes, strides.
pub type OperandRow = (
    &'static str,
    &'static str,
    usize,
    &'static str,
    i64,
    Vec<i64>,
    Vec<i64>,
);

/// Product, rest, kind, reason, origin.
pub type AttentionRow = (Option<String>, Option<String>, &'static str, String, String);

/// The calls of a pass.
pub fn rows(built: &Built, backward: bool) -> Vec<CallRow> {
    let Built::Cuda(executable) = built else {
        return Vec::new();
    };
    let program = &executable.program;
    let mut rows = Vec::new();
    for launch in &program.launches {
        let LaunchOp::Call(n) = launch.work else {
            continue;
        };
        if (launch.stage != Stage::Forward) != backward {
            continue;
        }
        let call = &program.calls[n];
        let places = launch.args.iter().filter_map(|b| program.memory.place(*b));
        let operands = call.operands.iter().zip(places);
        rows.push((
            call.by.name(),
            call.pass == CallPass::Backward,
            call.is_causal,
            call.scale,
            operands.map(|(operand, at)| row(operand, at)).collect(),
        ));
    }
    rows
}

fn row(operand: &CallOperand, at: BufferRef) -> OperandRow {
    let (block, place) = match at {
        BufferRef::External(slot) => ("slot", slot),
        BufferRef::Arena(offset) => ("scratch", offset),
        BufferRef::Saved(offset) => ("saved", offset),
        BufferRef::Constant(n) => ("constant", n),
    };
    let view = &operand.view;
    (
        operand.role,
        block,
        place,
        crate::program::dtype_name(operand.dtype),
        view.offset,
        view.sizes.clone(),
        view.strides.clone(),
    )
}

/// What computes each attention of a program.
pub fn attentions(built: &Built) -> Vec<AttentionRow> {
    let Built::Cuda(executable) = built else {
        return Vec::new();
    };
    let all = executable.attentions.iter();
    all.map(|a| {
        let key = a.choice.key.clone();
        let (product, rest) = key.map(|key| (key.product, key.rest)).unzip();
        let (kind, _) = a.choice.candidate.parts();
        (
            product,
            rest,
            kind,
            a.choice.reason.clone(),
            a.origin.clone(),
        )
    })
    .collect()
}

/// The choices for attention as sentences of a report.
pub fn sentences(built: &Built) -> Vec<String> {
    let Built::Cuda(executable) = built else {
        return Vec::new();
    };
    let all = executable.attentions.iter();
    all.map(|a| format!("attention at {}: {}", a.origin, a.choice))
        .collect()
}

/// A Python callable that makes calls by their number; keeps what it raised.
pub struct PyOperators {
    /// Absent for programs without calls.
    operators: Option<Py<PyAny>>,
    raised: Mutex<Option<PyErr>>,
}

impl PyOperators {
    /// Holds these operators; nothing was raised so far.
    pub fn new(operators: Option<Py<PyAny>>) -> PyOperators {
        PyOperators {
            operators,
            raised: Mutex::default(),
        }
    }

    /// The result of a pass. An operator's exception becomes the cause of the pass's error. It is raised itself if it
    /// is no failure of the operator, such as an interruption, or if callers treat it apart: memory that ran out.
    pub fn outcome<T>(self, py: Python<'_>, result: PyResult<T>) -> PyResult<T> {
        let raised = match self.raised.into_inner() {
            Ok(raised) => raised,
            Err(poisoned) => poisoned.into_inner(),
        };
        let (Err(error), Some(raised)) = (&result, raised) else {
            return result;
        };
        let kind = raised.get_type(py).name();
        let is_memory = kind.is_ok_and(|name| name == "OutOfMemoryError");
        if is_memory || !raised.is_instance_of::<PyException>(py) {
            return Err(raised);
        }
        error.set_cause(py, Some(raised));
        result
    }
}

impl Operators for PyOperators {
    fn call(&self, n: usize) -> Result<(), String> {
        let Some(operators) = &self.operators else {
            return Err("nothing was given to call it with".into());
        };
        Python::attach(|py| {
            let Err(error) = operators.call1(py, (n,)) else {
                return Ok(());
            };
            let what = error.to_string();
            if let Ok(mut raised) = self.raised.lock() {
                *raised = Some(error);
            }
            Err(what)
        })
    }
}
