//! Products and convolutions of bf16 operands by instructions that multiply pairs of numbers and sum in
//! single precision: both operands are packed into tiles of 16 by 32 numbers, and blocks of 32 rows by
//! 32 columns of the result are computed at a time (`prelude/pairs.h`).
//!
//! Owns which operands can be packed so, the blocking, and the launches; `pack` writes the packing, `store`
//! what happens to sums. The reduction is one flat index over its dims. Sums are made in a thread's own
//! memory, a group of panels at a time; where an epilogue reads them there, they never reach `buf[2]`.

mod pack;
mod store;

use super::access::Coord;
use super::blocking::{Dim, Shape, shape};
use super::driver::{decode, launch_calls, strided};
use super::gather::GatherForm;
use super::text::{CText, Element, Vector, affine, preamble};
use super::{ContractionTarget, EmittedContraction, Hooks, Launch, NoFastForm, roles};
use crate::features::Pairs;
use crate::prelude;
use graph::DType;

/// Lines (rows or columns) of a block, and steps of the reduction in a chunk.
const BLOCK: i64 = 32;
/// Numbers in a packed chunk of a block.
const CHUNK: i64 = BLOCK * BLOCK;
/// Chunks that are packed at a time of a reduction that is too long to be packed whole.
const K_CHUNKS: i64 = 64;
/// Bytes of packed rows that stay in the second-level cache.
const ROW_BYTES: i64 = 1 << 20;
const MOST_ROWS: i64 = 256;
/// Most multiplications with padding for each one that counts.
const MOST_PADDING: i64 = 3;
/// Panels whose sums an epilogue is given together, where the whole reduction is packed.
const GROUP: i64 = 4;
/// Floats between a row's sums and the next row's, so that rows lie in different cache sets.
const ROW_GAP: i64 = 16;
/// Most cache lines of the next panel that are brought near for each block of the present one.
const MOST_LINES: i64 = 8;
/// Bytes of sums that wait for further pieces of the reduction.
const SUM_BYTES: i64 = 1 << 20;
/// What an item costs besides its rows (the other operand comes from the last cache once more), in rows.
const ITEM_ROWS: i64 = 48;

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Steps of the reduction are neighbours.
    Reduction,
    /// Lines are neighbours.
    Lines,
    /// Neither; taken number by number.
    Scattered,
}

/// One gather-form part with all decisions.
struct PairsPart<'a> {
    s: Shape,
    prefix: String,
    hooks: &'a Hooks,
    a: Order,
    b: Order,
    /// Whether flat rows are in the order of the output's strides.
    in_order: bool,
    /// Rows of a block of work, a multiple of [`BLOCK`].
    rows: i64,
    /// Chunks of the reduction that are packed at a time.
    k_chunks: i64,
    n_chunks: i64,
    /// Panels whose sums are held at a time.
    group: i64,
    /// Whether the epilogue takes sums from where they are made.
    local: bool,
    /// Whether it takes them by columns, because the rows' elements are neighbours in the output.
    across: bool,
    /// Pieces of the reduction that are summed by a last launch.
    parts: i64,
    /// Bytes before its region of the shared scratch.
    shared_at: i64,
}

/// A contraction, and whether its epilogue has to wait for a launch of its own.
pub(super) struct Emitted {
    pub(super) contraction: EmittedContraction,
    pub(super) late_epilogue: bool,
}

/// Emits all parts under common launches.
pub(super) fn emit(
    name: &str,
    form: &GatherForm,
    hooks: &Hooks,
    target: &ContractionTarget,
    pairs: Pairs,
) -> Result<Emitted, NoFastForm> {
    let mut parts = Vec::new();
    let mut shared = 0;
    for (i, problem) in form.parts.iter().enumerate() {
        let mut part = PairsPart::new(shape(problem)?, hooks, target.threads.max(1))?;
        part.prefix = format!("{name}_p{i}");
        part.shared_at = shared;
        shared += part.packed_bytes() + part.result_bytes();
        parts.push(part);
    }
    let first = parts.first().ok_or(NoFastForm::NoPairs)?;
    let late_epilogue = !first.in_order;
    let path = match first.s.a.any_composite() {
        true => "convolution, pairs",
        false => "gemm, pairs",
    };
    let finishes_in_blocks = parts.iter().all(|p| p.in_order);
    let pitch = first.local.then(|| first.given_pitch());
    let mut roles = roles(&form.parts[0], first.s.swapped);
    if first.across {
        std::mem::swap(&mut roles.m, &mut roles.n);
    }
    let mut t = CText::default();
    t.raw(&preamble(Vector::new(Element::F32, target.vector_width)));
    t.raw(&preparation(pairs));
    for part in &parts {
        part.functions(&mut t);
    }
    let launches = launches(&mut t, name, &parts, form);
    let thread = parts.iter().map(PairsPart::thread_bytes).max().unwrap_or(0);
    Ok(Emitted {
        contraction: EmittedContraction {
            refusal: None,
            source: t.finish(),
            launches,
            shared_scratch_bytes: shared as usize,
            thread_scratch_bytes: thread as usize,
            flops: 0,
            predicted_ns: 0,
            path,
            products: DType::BF16,
            takes_prologues: false,
            cuts: None,
            choices: Vec::new(),
            sum_slots: 0,
            finishes_in_blocks,
            pitch,
            roles,
        },
        late_epilogue,
    })
}

/// Packing, the blocks, and where a reduction is divided the sum of its parts.
fn launches(t: &mut CText, name: &str, parts: &[PairsPart], form: &GatherForm) -> Vec<Launch> {
    let names = |wanted: &dyn Fn(&PairsPart) -> bool| -> Vec<&str> {
        let parts = parts.iter().filter(|p| wanted(p));
        parts.map(|p| p.prefix.as_str()).collect()
    };
    let mut launches = Vec::new();
    let stages = [
        (format!("{name}_pack"), names(&|_| true), "pack"),
        (name.to_string(), names(&|_| true), "main"),
        (
            format!("{name}_combine"),
            names(&|p| p.parts > 1),
            "combine",
        ),
    ];
    for (symbol, calls, stage) in stages {
        let zeros: &[_] = if stage == "main" { &form.zeros } else { &[] };
        let zeros = (zeros, Element::F32);
        launch_calls(t, &mut launches, &symbol, &calls, stage, zeros);
    }
    launches
}

/// What the functions of a file share.
fn preparation(pairs: Pairs) -> String {
    let chosen = match pairs {
        Pairs::Tiles => "#define SH_PAIRS_TILES\n",
        Pairs::Dots | Pairs::Plain => "",
    };
    format!(
        "#ifndef SHORTHAUL_PAIRS\n#define SHORTHAUL_PAIRS\n{chosen}{}#endif\n",
        prelude::PAIRS
    )
}

fn div_up(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

fn product(dims: &[Dim]) -> i64 {
    dims.iter().map(|d| d.size).product()
}

/// Whether stepping the dim walks operand `a` one number at a time, whatever guards say.
fn is_run(d: &Dim, stride: i64, guards: &[Coord]) -> bool {
    stride == 1 && guards.iter().all(|c| c.coeff(d.id) == 0)
}

fn last(dims: &[Dim]) -> &Dim {
    &dims[dims.len() - 1]
}

impl<'a> PairsPart<'a> {
    fn new(mut s: Shape, hooks: &'a Hooks, threads: i64) -> Result<Self, NoFastForm> {
        let guards: Vec<Coord> = s.a.coords.iter().filter(|c| c.guarded).cloned().collect();
        let by_chunks = s.k.len() == 1 || last(&s.k).size % BLOCK == 0;
        let outside = |d: &Dim| std::cmp::Reverse(d.o);
        let inner = s.m.clone();
        s.m.sort_by_key(outside);
        let lines = |m: &[Dim]| {
            is_run(last(m), last(m).a, &guards) && (m.len() == 1 || last(m).size % 16 == 0)
        };
        let mut in_order = true;
        let a = if by_chunks && is_run(last(&s.k), last(&s.k).a, &guards) {
            Order::Reduction
        } else if lines(&s.m) {
            Order::Lines
        } else if lines(&inner) {
            s.m = inner;
            in_order = false;
            Order::Lines
        } else {
            return Err(NoFastForm::NoPairs);
        };
        let b = match (last(&s.n).b, last(&s.k).b) {
            (1, _) => Order::Lines,
            (_, 1) if by_chunks => Order::Reduction,
            _ => Order::Scattered,
        };
        let local = hooks.epilogue.is_some() && hooks.consumes && in_order;
        let across = local && last(&s.m).o < last(&s.n).o;
        let mut part = PairsPart {
            s,
            prefix: String::new(),
            hooks,
            a,
            b,
            in_order,
            rows: BLOCK,
            k_chunks: 1,
            n_chunks: 1,
            group: 1,
            local,
            across,
            parts: 1,
            shared_at: 0,
        };
        let (m, n, k) = (part.m_total(), part.n_total(), product(&part.s.k));
        let padded = div_up(m, BLOCK) * part.panels() * part.chunks() * BLOCK * CHUNK;
        if padded > MOST_PADDING * m * n * k {
            return Err(NoFastForm::NoPairs);
        }
        part.block(threads);
        // Blocks of such panels overlap: while sums wait for a next piece, zeros times infinity would reach them.
        let overlap = part.s.n.len() > 1 && last(&part.s.n).size % BLOCK != 0;
        if overlap && !part.packs_all() {
            return Err(NoFastForm::NoPairs);
        }
        Ok(part)
    }

    /// Chooses blocks so that packed rows stay near and threads have equal work.
    fn block(&mut self, threads: i64) {
        let chunks = self.chunks();
        let near = |chunks: i64| ROW_BYTES / (chunks * BLOCK * 2) / BLOCK * BLOCK;
        let all = div_up(self.m_total(), BLOCK) * BLOCK;
        let whole = near(chunks) >= all.min(2 * BLOCK);
        self.k_chunks = if whole { chunks } else { chunks.min(K_CHUNKS) };
        let most = near(self.k_chunks).clamp(BLOCK, MOST_ROWS).min(all);
        let cost = |rows: i64| {
            let items = self.batches() * div_up(self.m_total(), rows);
            div_up(items, threads) * (rows + ITEM_ROWS)
        };
        let sizes = (1..=most / BLOCK).rev().map(|n| n * BLOCK);
        self.rows = sizes.min_by_key(|rows| cost(*rows)).unwrap_or(BLOCK);
        let items = |p: &Self| p.batches() * p.m_blocks() * p.n_chunks * p.parts;
        self.n_chunks = div_up(threads, items(self)).min(self.panels());
        if !whole {
            let held = SUM_BYTES / (self.rows * BLOCK * 4);
            self.n_chunks = self.n_chunks.max(div_up(self.panels(), held));
        }
        let wanted = div_up(threads, items(self));
        self.parts = wanted.min(div_up(chunks, K_CHUNKS / 4));
        let each = div_up(self.panels(), self.n_chunks);
        self.group = if whole { each.min(GROUP) } else { each };
    }

    /// Whether a part of the reduction is packed at once.
    fn packs_all(&self) -> bool {
        div_up(self.chunks(), self.parts) <= self.k_chunks
    }

    fn batches(&self) -> i64 {
        product(&self.s.batch)
    }

    fn m_total(&self) -> i64 {
        product(&self.s.m)
    }

    fn n_total(&self) -> i64 {
        product(&self.s.n)
    }

    fn m_blocks(&self) -> i64 {
        div_up(self.m_total(), self.rows)
    }

    /// Chunks of the whole reduction.
    fn chunks(&self) -> i64 {
        div_up(product(&self.s.k), BLOCK)
    }

    fn inner_panels(&self) -> i64 {
        div_up(last(&self.s.n).size, BLOCK)
    }

    fn panels(&self) -> i64 {
        product(&self.s.n[..self.s.n.len() - 1]) * self.inner_panels()
    }

    fn packed_bytes(&self) -> i64 {
        self.batches() * self.panels() * self.chunks() * CHUNK * 2
    }

    fn result_bytes(&self) -> i64 {
        let all = self.parts * self.batches() * self.m_total() * self.n_total() * 4;
        if self.parts > 1 {
            div_up(all, 64) * 64
        } else {
            0
        }
    }

    /// Packed rows, sums, then for each row its place in the operand, in the output, and its guards.
    fn thread_bytes(&self) -> i64 {
        let places = self.rows * 8 * (2 + self.guards().len() as i64);
        self.packed_row_bytes() + self.sum_bytes() + places
    }

    fn packed_row_bytes(&self) -> i64 {
        self.rows * self.k_chunks * BLOCK * 2
    }

    fn guards(&self) -> Vec<&Coord> {
        self.s.a.coords.iter().filter(|c| c.guarded).collect()
    }

    /// Positions in `buf` of the operands.
    fn buffers(&self) -> (usize, usize) {
        if self.s.swapped { (1, 0) } else { (0, 1) }
    }

    fn functions(&self, t: &mut CText) {
        t.line(format!(
            "/* {:?} and {:?} in pairs: {} rows, {} chunks at a time, n in {}; {} parts */",
            self.a, self.b, self.rows, self.k_chunks, self.n_chunks, self.parts
        ));
        self.pack_functions(t);
        self.pack_launch(t);
        self.main_function(t);
        if self.parts > 1 {
            self.combine_function(t);
        }
    }

    /// Opens the main function: its scratch, and its operands.
    fn open_main(&self, t: &mut CText) {
        t.line(format!(
            "static void {}_main(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "sh_u16 *sa = scratch; float *sums = (float *)((char *)scratch + {0}L); long *at = (long *)((char *)sums + {1}L);",
            self.packed_row_bytes(),
            self.sum_bytes()
        ));
        t.line(format!(
            "long *to = at + {0}L, *range = to + {0}L; (void)range; (void)to;",
            self.rows
        ));
        t.line(format!(
            "const sh_u16 *W = (const sh_u16 *)((const char *)buf[3] + {}L);",
            self.shared_at
        ));
        t.line(format!("const sh_u16 *A = buf[{}];", self.buffers().0));
        self.own_buffers(t);
        t.line("long packed = -1;");
        t.line("sh_pairs_begin();");
    }

    fn main_function(&self, t: &mut CText) {
        let g = self.guards().len();
        self.open_main(t);
        let (m_blocks, chunks) = (self.m_blocks(), self.chunks());
        let items = self.parts * self.batches() * m_blocks * self.n_chunks;
        t.line(format!(
            "for (long it = {items}L*tid/nt; it < {items}L*(tid + 1)/nt; it++) {{"
        ));
        t.line(format!(
            "const long nc = it%{0}L, mb = it/{0}L%{m_blocks}L, bt = it/{1}L%{2}L, part = it/{3}L; (void)part;",
            self.n_chunks,
            self.n_chunks * m_blocks,
            self.batches(),
            self.n_chunks * m_blocks * self.batches()
        ));
        let batch = decode(t, &self.s.batch, "bt", "bt");
        t.line(format!(
            "const long m0 = mb*{0}L, m1 = shl_min(m0 + {0}L, {1}L);",
            self.rows,
            self.m_total()
        ));
        t.line(format!(
            "const long p0 = {0}L*nc/{1}L, p1 = {0}L*(nc + 1)/{1}L;",
            self.panels(),
            self.n_chunks
        ));
        self.row_places(t, g);
        self.output(t, &batch);
        t.line(format!(
            "const long kc0 = {chunks}L*part/{0}L, kc1 = {chunks}L*(part + 1)/{0}L;",
            self.parts
        ));
        if self.packs_all() {
            t.line("const long kc = kc0, nk = kc1 - kc0;");
            self.pack_rows(t, &batch);
            t.line(format!(
                "for (long g0 = p0; g0 < p1; g0 += {0}L) {{",
                self.group
            ));
            t.line(format!(
                "const long g1 = shl_min(g0 + {}L, p1);",
                self.group
            ));
            self.blocks(t);
            self.consume(t);
            t.line("}");
        } else {
            t.line("const long g0 = p0, g1 = p1;");
            t.line(format!(
                "for (long kc = kc0; kc < kc1; kc += {}L) {{",
                self.k_chunks
            ));
            t.line(format!(
                "const long nk = shl_min(kc1 - kc, {}L);",
                self.k_chunks
            ));
            self.pack_rows(t, &batch);
            self.blocks(t);
            t.line("}");
            self.consume(t);
        }
        self.epilogue_on_output(t);
        t.line("}");
        t.line("sh_pairs_end();");
        t.line("}");
    }

    /// Packs the item's rows of this piece of the reduction, unless they lie there already.
    fn pack_rows(&self, t: &mut CText, batch: &[String]) {
        let s = &self.s;
        let fixed: i64 = s.a.coords.iter().map(|c| c.offset * c.stride).sum();
        let from = affine(&strided(batch, &s.batch, |d| d.a), s.a.base + fixed);
        t.line(format!(
            "const long key = (bt*{}L + mb)*{}L + kc;",
            self.m_blocks(),
            self.chunks()
        ));
        t.line(format!(
            "if (packed != key) {}_rows(A + {from}, at, range, m1 - m0, kc, kc + nk, sa);",
            self.prefix
        ));
        t.line("packed = key;");
    }

    /// Fills `at`, `to` and `range`: where each row of the block lies, and its part of every guard.
    fn row_places(&self, t: &mut CText, n_guards: usize) {
        t.line("for (long l = m0; l < m1; l++) {");
        let digits = decode(t, &self.s.m, "l", "y");
        t.line(format!(
            "at[l - m0] = {};",
            affine(&strided(&digits, &self.s.m, |d| d.a), 0)
        ));
        let to = match self.parts {
            1 => affine(&strided(&digits, &self.s.m, |d| d.o), 0),
            _ => format!("l*{}L", self.n_total()),
        };
        t.line(format!("to[l - m0] = {to};"));
        for (j, c) in self.guards().into_iter().enumerate() {
            let terms: Vec<(String, i64)> = digits
                .iter()
                .zip(&self.s.m)
                .map(|(v, d)| (v.clone(), c.coeff(d.id)))
                .collect();
            t.line(format!(
                "range[(l - m0)*{n_guards}L + {j}] = {};",
                affine(&terms, c.offset)
            ));
        }
        t.line("}");
    }

    /// All blocks of 32 by 32 of the packed rows and the panels `g0..g1`.
    fn blocks(&self, t: &mut CText) {
        t.line("for (long p = g0; p < g1; p++) {");
        t.line(format!(
            "const sh_u16 *b = W + ((bt*{0}L + p)*{1}L + kc)*{CHUNK}L;",
            self.panels(),
            self.chunks()
        ));
        t.line(format!(
            "float *c = sums + ({} - ({}));",
            self.flat_column("p"),
            self.flat_column("g0")
        ));
        // Panels that stay in the core's own cache are near already.
        let far = self.panels() * self.chunks() * CHUNK * 2 > ROW_BYTES;
        let lines = if far {
            (BLOCK * BLOCK / self.rows).min(MOST_LINES)
        } else {
            0
        };
        t.line("for (long r = 0; r < m1 - m0; r += 32)");
        t.line(format!(
            "sh_pairs_block(sa + r*nk*32, b, c + r*{0}L, {0}L, nk, kc > kc0, b + {1}L + r*nk*{lines}L, {lines}L);",
            self.pitch(),
            self.chunks() * CHUNK
        ));
        t.line("}");
    }

    /// The first column of a panel, as the epilogue counts; for the panel after the last one, their number.
    fn flat_column(&self, panel: &str) -> String {
        let (inner, size) = (self.inner_panels(), last(&self.s.n).size);
        if self.s.n.len() == 1 {
            return format!("shl_min({panel}*32, {size}L)");
        }
        format!("{panel}/{inner}L*{size}L + shl_min({panel}%{inner}L*32, {size}L)")
    }

    /// Declares `pi`, `lanes`, and `column`: where the panel begins in the output.
    fn decode_panel(&self, t: &mut CText) {
        let (n, inner) = (&self.s.n, self.inner_panels());
        let outer_dims = &n[..n.len() - 1];
        t.line(format!(
            "const long po = p/{inner}L, pi = p%{inner}L; (void)po;"
        ));
        t.line(format!(
            "const long lanes = shl_min({}L - pi*32, 32);",
            last(n).size
        ));
        let outer = decode(t, outer_dims, "po", "po");
        let mut at = strided(&outer, outer_dims, |d| d.o);
        at.push(("pi".to_string(), 32 * last(n).o));
        let column = match self.parts {
            1 => affine(&at, 0),
            _ => format!("po*{}L + pi*32", last(n).size),
        };
        t.line(format!("const long column = {column}; (void)column;"));
    }
}
