//! Updates on the CPU: one kernel for any number of arrays of any size.
//!
//! Before: a loop for each operand of each array, or a launch for each array. After: one launch; each thread takes an
//! equal part of all elements together and walks through the arrays that it touches. Every operand is read once and
//! written at most once. Values that are the same for all elements are computed in double precision, once for each
//! thread.
#![allow(unsafe_code)]

use super::{Spelling, Update, UpdateError, UpdateText};
use crate::compile::SourceUnit;
use crate::emit::scalar;
use crate::emit::text::{CText, comment};
use crate::prelude;
use crate::run::{Function, LoadError, Module, RunError, Threads};
use graph::DType;
use std::ffi::{c_long, c_void};
use std::sync::Arc;

const NAME: &str = "sh_update";

/// The fewest elements for which it is worth waking one more thread.
const PER_THREAD: usize = 1 << 14;

/// The C text of an update's kernel. It contains no sizes: the caller passes them to every run.
///
/// # Errors
/// See [`UpdateError`].
pub fn emit(update: &Update) -> Result<SourceUnit, UpdateError> {
    let spelling = Spelling {
        common: DType::F64,
        cast: scalar::cast,
    };
    let values = UpdateText::new(update, &spelling)?;
    let mut t = CText::default();
    t.open(&format!(
        "void {NAME}(void *const *buf, void *scratch, long tid, long nt)"
    ));
    t.lines(
        "\
(void)scratch;
void *const *arrays = (void *const *)buf[0];
const long *firsts = (const long *)buf[1];
const double *numbers = (const double *)buf[2];
const long n_arrays = *(const long *)buf[3];",
    );
    if let Some(unless) = update.unless {
        t.line(&format!("if (numbers[{unless}] != 0.0) return;"));
    }
    for n in 0..update.numbers.len() {
        t.line(&format!("const double s{n} = numbers[{n}];"));
    }
    t.lines(&values.common);
    t.lines(
        "\
const long total = firsts[n_arrays];
const long share = ((total + nt - 1) / nt + 63) / 64 * 64;
const long begin = tid * share < total ? tid * share : total;
const long end = begin + share < total ? begin + share : total;
long at = 0;
while (at < n_arrays && firsts[at + 1] <= begin) at++;",
    );
    t.open("for (; at < n_arrays && firsts[at] < end; at++)");
    t.lines(
        "\
const long from = begin > firsts[at] ? begin - firsts[at] : 0;
const long to = (end < firsts[at + 1] ? end : firsts[at + 1]) - firsts[at];",
    );
    let operands = || update.operands.iter().enumerate();
    let n_operands = update.operands.len();
    for (n, operand) in operands() {
        let ctype = scalar::c_type(operand.dtype);
        let ctype = match operand.written {
            true => ctype.to_string(),
            false => format!("const {ctype}"),
        };
        t.line(&format!(
            "{ctype} *restrict a{n} = ({ctype} *)arrays[at * {n_operands} + {n}];"
        ));
    }
    t.line("#pragma omp simd");
    t.open("for (long i = from; i < to; i++)");
    let value = scalar::value_type(update.dtype);
    for (n, operand) in operands() {
        let read = scalar::cast(&format!("a{n}[i]"), operand.dtype, update.dtype);
        t.line(&format!("const {value} v{n} = {read};"));
        if operand.written {
            t.line(&format!("{} x{n};", scalar::c_type(operand.dtype)));
        }
    }
    t.lines(&values.element);
    for (n, _) in operands().filter(|(_, o)| o.written) {
        t.line(&format!("a{n}[i] = x{n};"));
    }
    t.close();
    t.close();
    t.close();
    Ok(SourceUnit {
        name: "update".to_string(),
        source: format!(
            "{}{}\n{}{}",
            prelude::MATH,
            prelude::HALVES,
            comment(&update.name),
            t.finish()
        ),
        symbols: vec![NAME.to_string()],
    })
}

/// A compiled update.
#[derive(Debug)]
pub struct Updater {
    function: Function,
    n_operands: usize,
    n_numbers: usize,
}

impl Updater {
    /// The update in the module that was compiled from its [`emit`]ted text.
    ///
    /// # Errors
    /// The module is that of another kernel.
    pub fn new(update: &Update, module: &Arc<Module>) -> Result<Updater, LoadError> {
        Ok(Updater {
            function: module.function(NAME)?,
            n_operands: update.operands.len(),
            n_numbers: update.numbers.len(),
        })
    }

    /// Updates arrays of these sizes (elements). `operands` has the operands of each array in the update's order, array
    /// by array.
    ///
    /// # Errors
    /// Too few or too many operands or numbers; then nothing was written.
    ///
    /// # Safety
    /// Each operand of array `n` points to `sizes[n]` elements of its type, valid for reads, and for writes where it
    /// has a successor; no two of them overlap unless both are only read; nobody else touches them meanwhile.
    pub unsafe fn run(
        &self,
        operands: &[*mut u8],
        sizes: &[usize],
        numbers: &[f64],
        threads: Threads<'_>,
    ) -> Result<(), RunError> {
        expect(sizes.len() * self.n_operands, operands.len())?;
        expect(self.n_numbers, numbers.len())?;
        let mut firsts: Vec<c_long> = vec![0];
        let mut total = 0;
        for n in sizes {
            total += n;
            firsts.push(total as c_long);
        }
        if total == 0 {
            return Ok(());
        }
        let n_arrays = sizes.len() as c_long;
        let buffers = Buffers([
            operands.as_ptr().cast_mut().cast(),
            firsts.as_ptr().cast_mut().cast(),
            numbers.as_ptr().cast_mut().cast(),
            (&raw const n_arrays).cast_mut().cast(),
        ]);
        let at_most = total.div_ceil(PER_THREAD).min(threads.at_most);
        threads.pool.run(at_most, 0, &|member| {
            let buffers = &buffers;
            // SAFETY: the tables have the sizes that the text reads; the caller vouches for the arrays; each
            // thread takes elements of its own.
            unsafe {
                self.function.call(
                    buffers.0.as_ptr(),
                    member.scratch.cast(),
                    member.tid,
                    member.n_threads,
                );
            }
        })?;
        Ok(())
    }
}

fn expect(expected: usize, found: usize) -> Result<(), RunError> {
    match found == expected {
        true => Ok(()),
        false => Err(RunError::ExternalCount { expected, found }),
    }
}

/// The arguments of the kernel, shared by the threads of one run.
struct Buffers([*mut c_void; 4]);

// SAFETY: threads only read the pointers; the kernel writes no element from two threads.
unsafe impl Sync for Buffers {}
