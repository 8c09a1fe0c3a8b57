//! Text of what becomes of finished sums: rounding, storing, the epilogue; the combination of parts,
//! and zeros where no product reaches.
//!
//! Parts are added in their order: results are the same from run to run. Never touches the products.

use super::form::{self, Form, ceil, signed};
use super::kernel::{Head, Size};
use super::{Buffers, EmittedContraction, Epilogue, Job, Types, Unsupported, WORKSPACE, bytes};
use crate::{ParamType, element_type};
use graph::DType;
use kernels::contraction::gather::ZeroFill;
use kernels::contraction::text::CText;
use kernels::contraction::{Contraction, NoFastForm};
use kernels::plan::Buffer;

/// Threads of the combining and the zeroing kernel.
const ELEMENT_THREADS: i64 = 256;

/// Where finished sums of one part of the result go.
#[derive(Clone, Debug)]
pub(super) struct Sink<'a> {
    pub(super) types: Types,
    pub(super) epilogue: Option<&'a Epilogue>,
    /// Stride of each axis of the result, and the position along it where the part begins.
    axes: Vec<(i64, i64)>,
}

impl<'a> Sink<'a> {
    /// The sink of the part of the result whose first element is `base`.
    pub(super) fn new(
        c: &Contraction,
        base: i64,
        types: Types,
        epilogue: Option<&'a Epilogue>,
    ) -> Result<Self, Unsupported> {
        let mut axes = Vec::new();
        let mut rest = base;
        for axis in &c.out.axes {
            let dense = axis.size > 1 && axis.stride > 0;
            let first = if dense {
                base / axis.stride % axis.size
            } else {
                0
            };
            rest -= first * axis.stride;
            axes.push((axis.stride, first));
        }
        if rest != 0 && epilogue.is_some() {
            return Err(Unsupported::Form {
                reason: NoFastForm::ScatteredResult,
            });
        }
        Ok(Sink {
            types,
            epilogue,
            axes,
        })
    }

    fn stores_product(&self) -> bool {
        self.epilogue.is_none_or(|e| e.keeps_product)
    }

    /// The result's parameter and the epilogue's, where they are used.
    pub(super) fn head(&self, head: &mut Head, out: Buffer) {
        if self.stores_product() {
            head.push("out", ParamType::Out(self.types.out), out);
        }
        if let Some(e) = self.epilogue {
            for (param, buffer) in e.params.iter().zip(&e.args) {
                head.push(&param.name, param.ty, *buffer);
            }
        }
    }

    /// Stores `value` to element `at`, whose position along each axis is `coordinates`.
    fn store(&self, t: &mut CText, kernel: &str, value: &str, at: &str, coordinates: &[String]) {
        t.line(format!("const long long at = {at};"));
        if self.stores_product() {
            let rounded = match self.types.out {
                DType::F64 => value.to_string(),
                DType::F32 => format!("(float){value}"),
                half => format!("sh_from_float<{}>((float){value})", element_type(half)),
            };
            t.line(format!("out[at] = {rounded};"));
        }
        if let Some(e) = self.epilogue {
            let along: String = coordinates.iter().map(|c| format!(", {c}")).collect();
            let more: String = e.params.iter().map(|p| format!(", {}", p.name)).collect();
            t.line(format!(
                "{}({value}, at{along}{more});",
                epilogue_name(kernel)
            ));
        }
    }

    /// Stores the sum of `batch`, `m`, `n`.
    pub(super) fn store_sum(&self, t: &mut CText, f: &Form, kernel: &str, value: &str) {
        let along = |dims: [&[usize]; 3], coeff: &dyn Fn(usize) -> i64, start: i64, wide| {
            let names = ["batch", "m", "n"].into_iter().zip(dims);
            let parts = names.map(|(index, dims)| f.linear(index, dims, coeff, wide));
            let parts: Vec<String> = parts.filter(|p| p != "0").collect();
            match (start, parts.is_empty()) {
                (0, false) => parts.join(" + "),
                (_, true) => signed(start),
                _ => format!("{} + {}", signed(start), parts.join(" + ")),
            }
        };
        let dims: [&[usize]; 3] = [&f.batch, &f.m, &f.n];
        let coordinates = f
            .out
            .coords
            .iter()
            .zip(&self.axes)
            .map(|(c, (stride, first))| {
                let step = if *stride == 0 { 1 } else { c.stride / stride };
                let coeff = |d| step * c.coeff(d);
                along(dims, &coeff, first + step * c.offset, false)
            });
        let coordinates: Vec<String> = coordinates.collect();
        let at = along(
            dims,
            &|d| f.out.stride(d),
            form::constant(&f.out),
            f.is_wide(),
        );
        self.store(t, kernel, value, &at, &coordinates);
    }
}

/// The name of a kernel's copy of the epilogue.
pub(super) fn epilogue_name(kernel: &str) -> String {
    format!("{kernel}_epilogue")
}

/// Adds the parts in their order, a thread for each element.
pub(super) fn combine(job: &Job<'_>, done: &mut EmittedContraction) {
    let f = job.form;
    let (m, n, batch) = (f.count(&f.m), f.count(&f.n), f.count(&f.batch));
    let elements = m * n * batch;
    let name = format!("{}_combine", job.name);
    let sum = job.types.sum();
    let mut head = Head::default();
    head.push("sums", ParamType::In(sum), WORKSPACE);
    job.sink.head(&mut head, job.buffers.out);
    let mut t = head.open(&name, &element_size(elements), job.sink.epilogue);
    element_index(&mut t, elements);
    t.line(format!("{} sum = 0;", element_type(sum)));
    t.line(format!(
        "for (int part = 0; part < {}; part++) sum += sums[(long long)part*{elements} + e];",
        job.tile.parts
    ));
    t.line(format!(
        "const int n = (int)(e % {n}), m = (int)(e / {n} % {m});"
    ));
    t.line(format!("const int batch = (int)(e / {});", m * n));
    t.line("(void)n, (void)m, (void)batch;");
    job.sink.store_sum(&mut t, f, &name, "sum");
    t.close(1);
    head.close(name, t, element_size(elements), done);
    let bytes = elements * job.tile.parts * bytes(sum);
    done.workspace_bytes = done.workspace_bytes.max(bytes as u64);
}

fn element_index(t: &mut CText, elements: i64) {
    t.line(format!(
        "const long long e = (long long)SH_BID*{ELEMENT_THREADS} + SH_TID;"
    ));
    t.line(format!("if (e >= {elements}) return;"));
}

fn element_size(elements: i64) -> Size {
    Size {
        grid: ceil(elements, ELEMENT_THREADS) as u64,
        threads: ELEMENT_THREADS,
        min_blocks: 1,
    }
}

/// Writes what becomes of zero where no product reaches.
pub(super) fn emit_zeros(
    name: &str,
    zeros: &ZeroFill,
    sink: &Sink<'_>,
    buffers: Buffers,
    done: &mut EmittedContraction,
) {
    let elements: i64 = zeros.axes.iter().map(|a| a.0).product();
    let mut head = Head::default();
    sink.head(&mut head, buffers.out);
    let mut t = head.open(name, &element_size(elements), sink.epilogue);
    element_index(&mut t, elements);
    let mut below = 1;
    let mut at = zeros.base.to_string();
    let mut coordinates = Vec::new();
    for ((size, stride), (axis, first)) in zeros.axes.iter().zip(&sink.axes).rev() {
        let digit = format!("e / {below} % {size}");
        at += &format!(" + {digit}*{}", signed(*stride));
        let step = if *axis == 0 { 1 } else { stride / axis };
        coordinates.push(format!("(int)({first} + {digit}*{step})"));
        below *= size;
    }
    coordinates.reverse();
    let zero = format!("({})0", element_type(sink.types.sum()));
    sink.store(&mut t, name, &zero, &at, &coordinates);
    t.close(1);
    head.close(name.to_string(), t, element_size(elements), done);
}
