//! Text of whole kernels: the frame, and the loop over the reduction around staging and multiplying.
//!
//! The loop begins the loads of the next block before it multiplies the block in shared memory, so
//! their latency hides behind the products. Scalar products load to registers, and two barriers a
//! step keep readers and writers of shared memory apart; warp products have two blocks in shared
//! memory and need one barrier. What becomes of the sums is [`super::store`]'s.

use super::form::ceil;
use super::stage::{Block, Stage};
use super::store::{combine, epilogue_name};
use super::{EmittedContraction, Epilogue, Job, WORKSPACE, tensor_core};
use crate::{Emitted, Kernel, Param, ParamType, element_type};
use graph::DType;
use kernels::contraction::text::CText;
use kernels::plan::Buffer;

/// Threads of a multiprocessor that run warp products at a time: each has 128 registers. More blocks
/// hide what one waits for.
const WARP_THREADS: i64 = 512;

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
    let head = product_head(job, split);
    let epilogue = job.sink.epilogue.filter(|_| !split);
    let size = Size {
        grid: n_blocks(job) as u64,
        threads: tile.threads,
        min_blocks: if packed {
            WARP_THREADS / tile.threads
        } else {
            1
        },
    };
    let mut t = head.open(&job.name, &size, epilogue);
    let sum = element_type(job.types.sum());
    let staged = if packed { "unsigned" } else { sum };
    let n_buffers = if packed { 2 } else { 1 };
    for (x, stage) in [("a", &a), ("b", &b)] {
        let elements = n_buffers * stage.shared_elements();
        t.line(format!("SH_SHARED({staged}, {x}_s, {elements});"));
    }
    block_position(&mut t, job);
    a.declare(&mut t, "block_m");
    b.declare(&mut t, "block_n");
    if packed {
        mma_declare(&mut t, job, (&a, &b));
        mma_loop(&mut t, job, (&a, &b));
    } else {
        simt_declare(&mut t, (tile.part_m, tile.part_n), tile.n, sum);
        simt_loop(&mut t, job, (&a, &b));
    }
    store_sums(&mut t, job, &sums(job));
    t.close(1);
    head.close(job.name.clone(), t, size, done);
    if split {
        combine(job, done);
    }
}

/// A kernel's parameters and what they stand for.
#[derive(Default)]
pub(super) struct Head {
    params: Vec<Param>,
    args: Vec<Buffer>,
}

impl Head {
    pub(super) fn push(&mut self, name: &str, ty: ParamType, buffer: Buffer) {
        self.params.push(Param {
            name: name.to_string(),
            ty,
        });
        self.args.push(buffer);
    }

    /// Begins the text: the epilogue's function, the kernel up to its opening brace.
    pub(super) fn open(&self, name: &str, size: &Size, epilogue: Option<&Epilogue>) -> CText {
        let mut t = CText::default();
        if let Some(e) = epilogue {
            t.raw(&e.text.replace("EPILOGUE", &epilogue_name(name)));
        }
        let params: Vec<String> = self.params.iter().map(declaration).collect();
        t.line(format!(
            "SH_KERNEL({name}, {}, {})({}) {{",
            size.threads,
            size.min_blocks,
            params.join(", ")
        ));
        t
    }

    /// Adds the finished kernel and its launch.
    pub(super) fn close(
        self,
        name: String,
        text: CText,
        size: Size,
        done: &mut EmittedContraction,
    ) {
        done.launches.push(Emitted {
            kernel: Kernel {
                origin: name.clone(),
                name,
                text: text.finish(),
                params: self.params,
                threads: size.threads as u32,
                min_blocks: size.min_blocks as u32,
            },
            grid: size.grid,
            args: self.args,
        });
    }
}

/// How much of the device a launch takes.
pub(super) struct Size {
    pub(super) grid: u64,
    pub(super) threads: i64,
    /// Blocks that a multiprocessor must have registers for.
    pub(super) min_blocks: i64,
}

/// A parameter as text.
pub(crate) fn declaration(p: &Param) -> String {
    match p.ty {
        ParamType::In(t) => format!("SH_IN({}) {}", element_type(t), p.name),
        ParamType::Out(t) | ParamType::InOut(t) => {
            format!("SH_OUT({}) {}", element_type(t), p.name)
        }
        ParamType::Map(m) => format!("SH_MAP({}) {}", element_type(m.dtype), p.name),
        ParamType::Scalar(t) => format!("{} {}", element_type(t), p.name),
    }
}

/// The parameters of a product's kernel.
pub(super) fn product_head(job: &Job<'_>, split: bool) -> Head {
    let factors = [ParamType::In(job.types.a), ParamType::In(job.types.b)];
    head_with(job, split, factors)
}

/// The same, with the factors given in another way.
pub(super) fn head_with(job: &Job<'_>, split: bool, [a, b]: [ParamType; 2]) -> Head {
    let mut head = Head::default();
    head.push("a", a, job.buffers.a);
    head.push("b", b, job.buffers.b);
    if split {
        head.push("sums", ParamType::Out(job.types.sum()), WORKSPACE);
    } else {
        job.sink.head(&mut head, job.buffers.out);
    }
    head
}

pub(super) fn n_blocks(job: &Job<'_>) -> i64 {
    let (f, tile) = (job.form, &job.tile);
    ceil(f.count(&f.n), tile.n) * ceil(f.count(&f.m), tile.m) * f.count(&f.batch) * tile.parts
}

/// Which block of rows, columns, batch and terms this is. Columns go fastest, so blocks that run
/// together share rows.
fn block_position(t: &mut CText, job: &Job<'_>) {
    let (m, n) = tiles(job);
    t.line(format!("const int block_n = SH_BID % {n};"));
    t.line(format!("const int block_m = SH_BID / {n} % {m};"));
    batch_and_terms(t, job);
}

/// The same, with rows going fastest within bands of `band` blocks: blocks that run together cover
/// about as many rows as columns.
pub(super) fn banded_position(t: &mut CText, job: &Job<'_>, band: i64) {
    let (m, n) = tiles(job);
    t.line(format!(
        "const int first = SH_BID % {} / {} * {band};",
        n * m,
        n * band
    ));
    t.line(format!(
        "const int high = {m} - first < {band} ? {m} - first : {band};"
    ));
    t.line(format!(
        "const int within_band = SH_BID % {} - first*{n};",
        n * m
    ));
    t.line("const int block_m = first + within_band % high, block_n = within_band / high;");
    batch_and_terms(t, job);
}

/// Blocks along the rows and the columns.
fn tiles(job: &Job<'_>) -> (i64, i64) {
    let (f, tile) = (job.form, &job.tile);
    (ceil(f.count(&f.m), tile.m), ceil(f.count(&f.n), tile.n))
}

fn batch_and_terms(t: &mut CText, job: &Job<'_>) {
    let (f, tile) = (job.form, &job.tile);
    let (m, n) = tiles(job);
    let batch = f.count(&f.batch);
    t.line(format!("const int batch = SH_BID / {} % {batch};", n * m));
    t.line(format!("const int part = SH_BID / {};", n * m * batch));
    t.line("(void)batch;");
    let k = f.count(&f.k);
    t.line(format!("const int k_begin = part*{};", tile.k_per_part));
    t.line(format!(
        "const int k_end = k_begin + {0} < {k} ? k_begin + {0} : {k};",
        tile.k_per_part
    ));
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

fn simt_loop(t: &mut CText, job: &Job<'_>, (a, b): (&Stage<'_>, &Stage<'_>)) {
    t.line(format!("for (int k0 = k_begin;; k0 += {}) {{", job.tile.k));
    t.line("if (k0 < k_end) {");
    a.load(t, "k0", "0");
    b.load(t, "k0", "0");
    t.close(1);
    t.line("if (k0 > k_begin) {");
    simt_multiply(t, job, (a.pitch(), b.pitch()));
    t.close(1);
    t.line("if (k0 >= k_end) break;");
    t.line("if (k0 > k_begin) SH_SYNC(); /* the block before is read */");
    a.store(t, "0");
    b.store(t, "0");
    t.line("SH_SYNC(); /* this block is written */");
    t.close(1);
}

fn mma_declare(t: &mut CText, job: &Job<'_>, (a, b): (&Stage<'_>, &Stage<'_>)) {
    let (rows, columns, n) = (job.tile.part_m, job.tile.part_n, job.tile.n);
    let across = n / columns;
    t.line(format!(
        "const int warp_m = SH_WARP / {across}*{rows}, warp_n = SH_WARP % {across}*{columns};"
    ));
    t.line("const int lane_m = SH_LANE / 4, lane_k = SH_LANE % 4;");
    for (x, stage, first) in [("a", a, "warp_m"), ("b", b, "warp_n")] {
        let (block, lane) = (stage.word(first, "0"), stage.matrix_row());
        t.line(format!("const int {x}_lane = {block} + {lane};"));
    }
    let products = rows / 16 * (columns / 8);
    t.line(format!("float acc[{products}][4];"));
    clear(t, products, 4);
}

fn mma_loop(t: &mut CText, job: &Job<'_>, (a, b): (&Stage<'_>, &Stage<'_>)) {
    let next = ["a", "b"].map(|x| format!("{x}_next"));
    let both = |t: &mut CText, k0: &str, to: [&str; 2]| {
        a.load(t, k0, to[0]);
        b.load(t, k0, to[1]);
    };
    both(t, "k_begin", ["0", "0"]);
    t.line("sh_copy_commit();");
    a.store(t, "0");
    b.store(t, "0");
    t.line("sh_copy_wait<0>();");
    t.line("SH_SYNC(); /* the first block is written */");
    t.line("int block = 0;");
    let step = job.tile.k;
    t.line(format!(
        "for (int k0 = k_begin; k0 < k_end; k0 += {step}) {{"
    ));
    for (x, stage) in [("a", a), ("b", b)] {
        let size = stage.shared_elements();
        t.line(format!(
            "const int {x}_now = block*{size}, {x}_next = {size} - {x}_now;"
        ));
    }
    t.line(format!("const bool more = k0 + {step} < k_end;"));
    t.line("if (more) {");
    both(t, &format!("k0 + {step}"), [&next[0], &next[1]]);
    t.close(1);
    t.line("sh_copy_commit();");
    mma_multiply(t, job, (a, b));
    t.line("if (more) {");
    a.store(t, &next[0]);
    b.store(t, &next[1]);
    t.close(1);
    t.line("sh_copy_wait<0>();");
    t.line("SH_SYNC(); /* the next block is written, this one is read */");
    t.line("block = 1 - block;");
    t.close(1);
}

fn mma_multiply(t: &mut CText, job: &Job<'_>, (a, b): (&Stage<'_>, &Stage<'_>)) {
    let tile = &job.tile;
    let (rows, columns) = (tile.part_m / 16, tile.part_n / 8);
    let mma = if job.types.a == DType::BF16 {
        "sh_mma_bf16"
    } else {
        "sh_mma_f16"
    };
    let load = |stage: &Stage<'_>| match stage.by_terms() {
        true => "sh_ldmatrix_trans",
        false => "sh_ldmatrix",
    };
    t.line("SH_UNROLL");
    t.line(format!("for (int k = 0; k < {}; k += 16) {{", tile.k));
    t.line(format!("unsigned x[{rows}][4], y[{}][4];", columns / 2));
    t.line("SH_UNROLL");
    t.line(format!(
        "for (int i = 0; i < {rows}; i++) {}(x[i], a_s, a_now + a_lane + {});",
        load(a),
        a.word("i*16", "k")
    ));
    t.line("SH_UNROLL");
    t.line(format!(
        "for (int j = 0; j < {}; j++) {}(y[j], b_s, b_now + b_lane + {});",
        columns / 2,
        load(b),
        b.word("j*16", "k")
    ));
    t.line("SH_UNROLL");
    t.line(format!("for (int i = 0; i < {rows}; i++) {{"));
    t.line("SH_UNROLL");
    t.line(format!("for (int j = 0; j < {columns}; j++) {{"));
    t.line("const unsigned pair[2] = {y[j/2][j%2*2], y[j/2][j%2*2 + 1]};");
    t.line(format!("{mma}(acc[i*{columns} + j], x[i], pair);"));
    t.close(3);
}

/// The sums of a thread: the numbers of their rows and columns, and C texts: the position of row `i` in the block,
/// that of column `j`, and the sum of both.
pub(super) struct Sums {
    pub(super) n_rows: i64,
    pub(super) row: String,
    pub(super) n_columns: i64,
    pub(super) column: String,
    pub(super) sum: String,
}

fn sums(job: &Job<'_>) -> Sums {
    let (rows, columns) = (job.tile.part_m, job.tile.part_n);
    match tensor_core(job.types) {
        true => Sums {
            n_rows: rows / 8,
            row: "warp_m + i*8 + lane_m".to_string(),
            n_columns: columns / 4,
            column: "warp_n + j/2*8 + lane_k*2 + j%2".to_string(),
            sum: format!("acc[i/2*{} + j/2][i%2*2 + j%2]", columns / 8),
        },
        false => Sums {
            n_rows: rows,
            row: format!("thread_m + i*{}", job.tile.m / rows),
            n_columns: columns,
            column: format!("thread_n + j*{}", job.tile.n / columns),
            sum: "acc[i][j]".to_string(),
        },
    }
}

/// Rounds and stores each sum of the thread, or keeps it for the combination.
pub(super) fn store_sums(t: &mut CText, job: &Job<'_>, sums: &Sums) {
    let (f, tile, sum) = (job.form, &job.tile, &sums.sum);
    let (m, n) = (f.count(&f.m), f.count(&f.n));
    t.line("SH_UNROLL");
    t.line(format!("for (int i = 0; i < {}; i++) {{", sums.n_rows));
    t.line(format!("const int m = block_m*{} + {};", tile.m, sums.row));
    t.line(format!("if (m >= {m}) continue;"));
    t.line("SH_UNROLL");
    t.line(format!("for (int j = 0; j < {}; j++) {{", sums.n_columns));
    t.line(format!(
        "const int n = block_n*{} + {};",
        tile.n, sums.column
    ));
    // Also where no block has an end: without it the compiler begins the epilogue's loads of all columns
    // at once, and has no registers for them.
    t.line(format!("if (n >= {n}) continue;"));
    if tile.parts > 1 {
        let batch = f.count(&f.batch);
        t.line(format!(
            "sums[((long long)(part*{batch} + batch)*{m} + m)*{n} + n] = {sum};"
        ));
    } else {
        job.sink.store_sum(t, f, &job.name, sum);
    }
    t.close(2);
}
