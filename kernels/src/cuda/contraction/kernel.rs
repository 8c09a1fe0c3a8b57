//! Text of whole kernels: the loop over the reduction around staging and multiplying, the epilogue,
//! the combination of parts, and zeros where no product reaches.
//!
//! The loop loads the next block into registers before it multiplies the block in shared memory, so
//! the loads' latency hides behind the products; two barriers a step keep readers and writers of
//! shared memory apart. Parts are added in their order: results are the same from run to run.

use super::form::{self, Form, ceil, signed};
use super::stage::{Block, Stage};
use super::{Arg, EmittedContraction, Epilogue, Job, Launch, Types, bytes, tensor_core};
use crate::contraction::gather::ZeroFill;
use crate::contraction::text::CText;
use crate::cuda::{Kernel, Param, ParamType, element_type};
use graph::DType;

/// Threads of the combining and the zeroing kernel.
const ELEMENT_THREADS: i64 = 256;

/// Emits the product and, if its reduction is split, the combination.
pub(super) fn emit(job: &Job<'_>, done: &mut EmittedContraction) {
    let (f, tile) = (job.form, &job.tile);
    let split = tile.parts > 1;
    let packed = tensor_core(job.types);
    let block = |n_rows| Block {
        n_rows,
        n_terms: tile.k,
        threads: tile.threads,
        packed,
    };
    let a = Stage::new(f, "a", job.types.a, &block(tile.m));
    let b = Stage::new(f, "b", job.types.b, &block(tile.n));
    let epilogue = job.epilogue.filter(|_| !split);
    let head = product_head(job, epilogue, split);
    let mut t = head.open(&job.name, tile.threads, epilogue);
    let sum = element_type(job.types.sum());
    let staged = if packed { "unsigned" } else { sum };
    for s in [("a", &a), ("b", &b)] {
        t.line(format!(
            "SH_SHARED({staged}, {}_s, {});",
            s.0,
            s.1.shared_elements()
        ));
    }
    let blocks = block_position(&mut t, job);
    a.declare(&mut t, "block_m");
    b.declare(&mut t, "block_n");
    let parts = (tile.part_m, tile.part_n);
    if packed {
        mma_declare(&mut t, parts, tile.n);
    } else {
        simt_declare(&mut t, parts, tile.n, sum);
    }
    t.line(format!("for (int k0 = k_begin;; k0 += {}) {{", tile.k));
    t.line("if (k0 < k_end) {");
    a.load(&mut t);
    b.load(&mut t);
    t.close(1);
    t.line("if (k0 > k_begin) {");
    if packed {
        mma_multiply(&mut t, job, (a.pitch(), b.pitch()));
    } else {
        simt_multiply(&mut t, job, (a.pitch(), b.pitch()));
    }
    t.close(1);
    t.line("if (k0 >= k_end) break;");
    t.line("if (k0 > k_begin) SH_SYNC(); /* the block before is read */");
    a.store(&mut t);
    b.store(&mut t);
    t.line("SH_SYNC(); /* this block is written */");
    t.close(1);
    store_sums(&mut t, job, epilogue);
    t.close(1);
    let element = if packed { 4 } else { bytes(job.types.sum()) };
    let size = Size {
        grid: blocks as u32,
        threads: tile.threads as u32,
        shared_bytes: ((a.shared_elements() + b.shared_elements()) * element) as u32,
    };
    head.close(job.name.clone(), t, size, done);
    if split {
        combine(job, done);
    }
}

/// A kernel's parameters and what they stand for.
#[derive(Default)]
struct Head {
    params: Vec<Param>,
    args: Vec<Arg>,
}

impl Head {
    fn of(params: &[(&str, ParamType, Arg)], epilogue: Option<&Epilogue>) -> Self {
        let mut head = Head::default();
        for &(name, ty, arg) in params {
            head.params.push(Param {
                name: name.to_string(),
                ty,
            });
            head.args.push(arg);
        }
        for (i, p) in epilogue.iter().flat_map(|e| &e.params).enumerate() {
            head.params.push(p.clone());
            head.args.push(Arg::Epilogue(i));
        }
        head
    }

    /// Begins the text: the epilogue's function, the kernel up to its opening brace.
    fn open(&self, name: &str, threads: i64, epilogue: Option<&Epilogue>) -> CText {
        let mut t = CText::default();
        if let Some(e) = epilogue {
            t.raw(&e.text.replace("EPILOGUE", &epilogue_name(name)));
        }
        let params: Vec<String> = self.params.iter().map(declaration).collect();
        t.line(format!(
            "SH_KERNEL({name}, {threads}, 1)({}) {{",
            params.join(", ")
        ));
        t
    }

    /// Adds the finished kernel and its launch.
    fn close(self, name: String, text: CText, size: Size, done: &mut EmittedContraction) {
        done.launches.push(Launch {
            kernel: done.kernels.len(),
            args: self.args,
            grid: size.grid,
            shared_bytes: size.shared_bytes,
        });
        done.kernels.push(Kernel {
            origin: name.clone(),
            name,
            text: text.finish(),
            params: self.params,
            threads: size.threads,
            min_blocks: 1,
        });
    }
}

/// How much of the device a launch takes.
struct Size {
    grid: u32,
    threads: u32,
    shared_bytes: u32,
}

fn epilogue_name(kernel: &str) -> String {
    format!("{kernel}_epilogue")
}

fn declaration(p: &Param) -> String {
    match p.ty {
        ParamType::In(t) => format!("SH_IN({}) {}", element_type(t), p.name),
        ParamType::Out(t) => format!("SH_OUT({}) {}", element_type(t), p.name),
        ParamType::Scalar(t) => format!("{} {}", element_type(t), p.name),
    }
}

/// The parameters of a product's kernel.
fn product_head(job: &Job<'_>, epilogue: Option<&Epilogue>, split: bool) -> Head {
    let result = if split {
        ("sums", ParamType::Out(job.types.sum()), Arg::Workspace)
    } else {
        ("out", ParamType::Out(job.types.out), Arg::Out)
    };
    let factors = [
        ("a", ParamType::In(job.types.a), Arg::A),
        ("b", ParamType::In(job.types.b), Arg::B),
        result,
    ];
    Head::of(&factors, epilogue)
}

/// Which block of rows, columns, batch and terms this is; returns the number of blocks. Columns go
/// fastest, so blocks that run together share rows.
fn block_position(t: &mut CText, job: &Job<'_>) -> i64 {
    let (f, tile) = (job.form, &job.tile);
    let n = ceil(f.count(&f.n), tile.n);
    let m = ceil(f.count(&f.m), tile.m);
    let batch = f.count(&f.batch);
    t.line(format!("const int block_n = SH_BID % {n};"));
    t.line(format!("const int block_m = SH_BID / {n} % {m};"));
    t.line(format!("const int batch = SH_BID / {} % {batch};", n * m));
    t.line(format!("const int part = SH_BID / {};", n * m * batch));
    t.line("(void)batch;");
    let k = f.count(&f.k);
    t.line(format!("const int k_begin = part*{};", tile.k_per_part));
    t.line(format!(
        "const int k_end = k_begin + {0} < {k} ? k_begin + {0} : {k};",
        tile.k_per_part
    ));
    n * m * batch * tile.parts
}

fn simt_declare(t: &mut CText, (rows, columns): (i64, i64), n: i64, sum: &str) {
    let across = n / columns;
    t.line(format!(
        "const int thread_m = SH_TID / {across}, thread_n = SH_TID % {across};"
    ));
    t.line(format!("{sum} acc[{rows}][{columns}];"));
    clear(t, rows, columns);
}

fn clear(t: &mut CText, rows: i64, columns: i64) {
    t.line("SH_UNROLL");
    t.line(format!("for (int i = 0; i < {rows}; i++) {{"));
    t.line("SH_UNROLL");
    t.line(format!(
        "for (int j = 0; j < {columns}; j++) acc[i][j] = 0;"
    ));
    t.close(1);
}

fn simt_multiply(t: &mut CText, job: &Job<'_>, (pitch_a, pitch_b): (i64, i64)) {
    let (tile, sum) = (&job.tile, element_type(job.types.sum()));
    let (rows, columns) = (tile.part_m, tile.part_n);
    let (step_m, step_n) = (tile.m / rows, tile.n / columns);
    t.line("SH_UNROLL");
    t.line(format!("for (int k = 0; k < {}; k++) {{", tile.k));
    t.line(format!("{sum} x[{rows}], y[{columns}];"));
    t.line("SH_UNROLL");
    t.line(format!(
        "for (int i = 0; i < {rows}; i++) x[i] = a_s[k*{pitch_a} + thread_m + i*{step_m}];"
    ));
    t.line("SH_UNROLL");
    t.line(format!(
        "for (int j = 0; j < {columns}; j++) y[j] = b_s[k*{pitch_b} + thread_n + j*{step_n}];"
    ));
    t.line("SH_UNROLL");
    t.line(format!("for (int i = 0; i < {rows}; i++) {{"));
    t.line("SH_UNROLL");
    t.line(format!(
        "for (int j = 0; j < {columns}; j++) acc[i][j] += x[i]*y[j];"
    ));
    t.close(2);
}

fn mma_declare(t: &mut CText, (rows, columns): (i64, i64), n: i64) {
    let across = n / columns;
    t.line(format!(
        "const int warp_m = SH_WARP / {across}*{rows}, warp_n = SH_WARP % {across}*{columns};"
    ));
    t.line("const int lane_m = SH_LANE / 4, lane_k = SH_LANE % 4;");
    let products = rows / 16 * (columns / 8);
    t.line(format!("float acc[{products}][4];"));
    clear(t, products, 4);
}

fn mma_multiply(t: &mut CText, job: &Job<'_>, (pitch_a, pitch_b): (i64, i64)) {
    let tile = &job.tile;
    let (rows, columns) = (tile.part_m / 16, tile.part_n / 8);
    let mma = if job.types.a == DType::BF16 {
        "sh_mma_bf16"
    } else {
        "sh_mma_f16"
    };
    t.line("SH_UNROLL");
    t.line(format!("for (int k = 0; k < {}; k += 8) {{", tile.k / 2));
    t.line(format!("unsigned x[{rows}][4], y[{columns}][2];"));
    t.line("SH_UNROLL");
    t.line(format!("for (int i = 0; i < {rows}; i++) {{"));
    t.line("SH_UNROLL");
    t.line("for (int e = 0; e < 4; e++) {");
    t.line(format!(
        "x[i][e] = a_s[(warp_m + i*16 + lane_m + e % 2*8)*{pitch_a} + k + lane_k + e / 2*4];"
    ));
    t.close(2);
    t.line("SH_UNROLL");
    t.line(format!("for (int j = 0; j < {columns}; j++) {{"));
    t.line("SH_UNROLL");
    t.line("for (int e = 0; e < 2; e++) {");
    t.line(format!(
        "y[j][e] = b_s[(warp_n + j*8 + lane_m)*{pitch_b} + k + lane_k + e*4];"
    ));
    t.close(2);
    t.line("SH_UNROLL");
    t.line(format!("for (int i = 0; i < {rows}; i++) {{"));
    t.line("SH_UNROLL");
    t.line(format!(
        "for (int j = 0; j < {columns}; j++) {mma}(acc[i*{columns} + j], x[i], y[j]);"
    ));
    t.close(2);
}

/// Rounds and stores each sum of the thread, or keeps it for the combination.
fn store_sums(t: &mut CText, job: &Job<'_>, epilogue: Option<&Epilogue>) {
    let (f, tile, packed) = (job.form, &job.tile, tensor_core(job.types));
    let (rows, columns) = (tile.part_m, tile.part_n);
    let (n_i, row, n_j, column, sum) = if packed {
        let across = columns / 8;
        (
            rows / 8,
            "warp_m + i*8 + lane_m".to_string(),
            columns / 4,
            "warp_n + j/2*8 + lane_k*2 + j%2".to_string(),
            format!("acc[i/2*{across} + j/2][i%2*2 + j%2]"),
        )
    } else {
        (
            rows,
            format!("thread_m + i*{}", tile.m / rows),
            columns,
            format!("thread_n + j*{}", tile.n / columns),
            "acc[i][j]".to_string(),
        )
    };
    let (m, n) = (f.count(&f.m), f.count(&f.n));
    t.line("SH_UNROLL");
    t.line(format!("for (int i = 0; i < {n_i}; i++) {{"));
    t.line(format!("const int m = block_m*{} + {row};", tile.m));
    t.line(format!("if (m >= {m}) continue;"));
    t.line("SH_UNROLL");
    t.line(format!("for (int j = 0; j < {n_j}; j++) {{"));
    t.line(format!("const int n = block_n*{} + {column};", tile.n));
    t.line(format!("if (n >= {n}) continue;"));
    if tile.parts > 1 {
        let batch = f.count(&f.batch);
        t.line(format!(
            "sums[((long long)(part*{batch} + batch)*{m} + m)*{n} + n] = {sum};"
        ));
    } else {
        store(t, &job.name, &out_address(f), &sum, job.types, epilogue);
    }
    t.close(2);
}

/// The element of `out` for `batch`, `m`, `n`.
fn out_address(f: &Form) -> String {
    let wide = f.is_wide();
    let along = |index, dims| f.linear(index, dims, |d| f.out.stride(d), wide);
    let start = signed(form::constant(&f.out));
    let (b, m, n) = (along("batch", &f.batch), along("m", &f.m), along("n", &f.n));
    format!("{start} + {b} + {m} + {n}")
}

/// Rounds and stores `value` through the epilogue, whose name is the function and its copy's.
fn store(
    t: &mut CText,
    kernel: &str,
    at: &str,
    value: &str,
    types: Types,
    epilogue: Option<&Epilogue>,
) {
    t.line(format!("const long long at = {at};"));
    let value = match epilogue {
        Some(e) => {
            let more: String = e.params.iter().map(|p| format!(", {}", p.name)).collect();
            format!("{}({value}, at{more})", epilogue_name(kernel))
        }
        None => value.to_string(),
    };
    let value = match types.out {
        DType::F64 => value,
        DType::F32 => format!("(float){value}"),
        half => format!("sh_from_float<{}>((float){value})", element_type(half)),
    };
    t.line(format!("out[at] = {value};"));
}

/// Adds the parts in their order, a thread for each element.
fn combine(job: &Job<'_>, done: &mut EmittedContraction) {
    let f = job.form;
    let (m, n, batch) = (f.count(&f.m), f.count(&f.n), f.count(&f.batch));
    let elements = m * n * batch;
    let name = format!("{}_combine", job.name);
    let params = [
        ("sums", ParamType::In(job.types.sum()), Arg::Workspace),
        ("out", ParamType::Out(job.types.out), Arg::Out),
    ];
    let head = Head::of(&params, job.epilogue);
    let mut t = head.open(&name, ELEMENT_THREADS, job.epilogue);
    element_index(&mut t, elements);
    t.line(format!("{} sum = 0;", element_type(job.types.sum())));
    t.line(format!(
        "for (int part = 0; part < {}; part++) sum += sums[(long long)part*{elements} + e];",
        job.tile.parts
    ));
    t.line(format!(
        "const int n = (int)(e % {n}), m = (int)(e / {n} % {m});"
    ));
    t.line(format!("const int batch = (int)(e / {});", m * n));
    t.line("(void)n, (void)m, (void)batch;");
    store(
        &mut t,
        &name,
        &out_address(f),
        "sum",
        job.types,
        job.epilogue,
    );
    t.close(1);
    head.close(name, t, element_size(elements), done);
    let bytes = elements * job.tile.parts * bytes(job.types.sum());
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
        grid: ceil(elements, ELEMENT_THREADS) as u32,
        threads: ELEMENT_THREADS as u32,
        shared_bytes: 0,
    }
}

/// Writes what the epilogue makes of zero where no product reaches.
pub(super) fn emit_zeros(
    name: &str,
    zeros: &ZeroFill,
    types: Types,
    epilogue: Option<&Epilogue>,
    done: &mut EmittedContraction,
) {
    let elements: i64 = zeros.axes.iter().map(|a| a.0).product();
    let params = [("out", ParamType::Out(types.out), Arg::Out)];
    let head = Head::of(&params, epilogue);
    let mut t = head.open(name, ELEMENT_THREADS, epilogue);
    element_index(&mut t, elements);
    let mut below = 1;
    let mut at = zeros.base.to_string();
    for (size, stride) in zeros.axes.iter().rev() {
        at += &format!(" + e / {below} % {size}*{}", signed(*stride));
        below *= size;
    }
    let zero = format!("({})0", element_type(types.sum()));
    store(&mut t, name, &at, &zero, types, epilogue);
    t.close(1);
    head.close(name.to_string(), t, element_size(elements), done);
}
