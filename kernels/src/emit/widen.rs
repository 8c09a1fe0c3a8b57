//! Sums into containers of half precision that are not made in one register: the kernel keeps the whole
//! container in its workspace, in single precision, and a last launch rounds each element once.
//!
//! before:  `y[i] (sum)= x[i, j]`, each of many stores rounded to bf16
//! after:   `h[i] (sum)= x[i, j]` in single precision; `y[i] = bf16(h[i])`
//!
//! Owns that launch and the place of such containers. Which containers these are is the frame's to say.

use super::body::Array;
use super::schedule::Scheduled;
use super::text::CText;
use super::{Arg, EmittedFunction, NAME, scalar};
use graph::{ContainerId, DType};
use std::collections::{BTreeMap, BTreeSet};

/// The same kernel with `containers` in its workspace.
pub(crate) fn in_single_precision(s: &Scheduled, containers: &BTreeSet<ContainerId>) -> Scheduled {
    let mut widened = s.clone();
    for (id, array) in &mut widened.arrays {
        if containers.contains(id) {
            array.rounded_to = Some(array.dtype);
            array.dtype = DType::F32;
        }
    }
    widened
}

/// Declares the `n`-th of them, `offset` bytes into the workspace at position `workspace` of `buf`.
pub(crate) fn declaration(n: usize, workspace: usize, offset: i64) -> String {
    format!("float *h{n} = (float *)((char *)buf[{workspace}] + {offset});")
}

/// A launch that rounds the sums into their containers.
pub(crate) fn round_function(
    arrays: &BTreeMap<ContainerId, Array>,
    widened: &[(ContainerId, i64)],
) -> Option<EmittedFunction> {
    if widened.is_empty() {
        return None;
    }
    let mut t = CText::default();
    t.open(&format!(
        "void {NAME}_round(void *const *buf, void *scratch, long tid, long nt)"
    ));
    for (n, (id, offset)) in widened.iter().enumerate() {
        let array = &arrays[id];
        let Some(dtype) = array.rounded_to else {
            continue;
        };
        t.line(&format!("{} *x{n} = buf[{n}];", scalar::c_type(dtype)));
        t.line(&declaration(n, widened.len(), *offset));
        let rounded = scalar::cast(&format!("h{n}[i]"), array.dtype, dtype);
        t.line("#pragma omp simd");
        t.line(&format!(
            "for (long i = {0} * tid / nt; i < {0} * (tid + 1) / nt; ++i) x{n}[i] = {rounded};",
            array.len
        ));
    }
    t.close();
    let containers = widened.iter().map(|(id, _)| Arg::Container(*id));
    Some(EmittedFunction {
        suffix: "_round",
        text: t.finish(),
        args: containers.chain([Arg::Workspace]).collect(),
    })
}
