//! The loops around the micro-kernel: items of work over threads, blocks, staging, packing, the last
//! launch that sums and moves partial results. Serves matrix products and convolutions alike.

use super::access::Coord;
use super::blocking::{Dim, Plan, VectorSource, Wishes, plan, shape};
use super::gather::{GatherForm, ZeroFill};
use super::microkernel::{Level, MicroKernel, merge_levels};
use super::pack::{PackLevel, Panel};
use super::text::{CText, affine, preamble};
use super::{EmittedContraction, Hooks, Launch, NoFastPath, Target, roles};

/// One gather-form part on its way to text.
struct Part<'a> {
    plan: Plan,
    /// Prefix of its static functions.
    prefix: String,
    hooks: &'a Hooks,
    /// Floats before its region of the shared scratch.
    shared_at: i64,
}

const ALIGN_FLOATS: i64 = 16;

fn align(floats: i64) -> i64 {
    (floats + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS
}

/// Emits all parts under common launches.
pub fn emit(
    name: &str,
    form: &GatherForm,
    hooks: &Hooks,
    target: &Target,
) -> Result<EmittedContraction, NoFastPath> {
    let mut parts = Vec::new();
    let mut shared = 0;
    for (i, problem) in form.parts.iter().enumerate() {
        let shape = shape(problem)?;
        let (prologue_a, prologue_b) = sides(hooks, shape.swapped);
        let wishes = Wishes {
            vw: target.vector_width,
            threads: target.threads.max(1),
            prologue_a: prologue_a.is_some(),
            prologue_b: prologue_b.is_some(),
            epilogue: hooks.epilogue.is_some(),
        };
        let plan = plan(&shape, &wishes);
        let part = Part {
            plan,
            prefix: format!("{name}_p{i}"),
            hooks,
            shared_at: shared,
        };
        shared += part.packed_floats() + part.result_floats();
        parts.push(part);
    }
    let mut t = CText::default();
    t.raw(&preamble(target.vector_width));
    for part in &parts {
        part.functions(&mut t);
    }
    let mut launches = Vec::new();
    launch(
        &mut t,
        &mut launches,
        &format!("{name}_pack"),
        &parts,
        |p| p.packs(),
        "pack",
        &[],
    );
    launch(
        &mut t,
        &mut launches,
        name,
        &parts,
        |_| true,
        "main",
        &form.zeros,
    );
    launch(
        &mut t,
        &mut launches,
        &format!("{name}_combine"),
        &parts,
        |p| p.plan.to_scratch,
        "combine",
        &[],
    );
    let thread = parts.iter().map(Part::thread_floats).max().unwrap_or(0);
    Ok(EmittedContraction {
        source: t.finish(),
        launches,
        shared_scratch_bytes: (shared * 4) as usize,
        thread_scratch_bytes: (thread * 4) as usize,
        flops: 0,
        path: parts.first().map_or("zero", Part::path),
        roles: parts
            .first()
            .map(|p| roles(&form.parts[0], p.plan.shape.swapped))
            .unwrap_or_default(),
    })
}

fn sides(hooks: &Hooks, swapped: bool) -> (Option<&str>, Option<&str>) {
    let (a, b) = (hooks.prologue_a.as_deref(), hooks.prologue_b.as_deref());
    if swapped { (b, a) } else { (a, b) }
}

fn launch(
    t: &mut CText,
    launches: &mut Vec<Launch>,
    symbol: &str,
    parts: &[Part],
    wanted: impl Fn(&Part) -> bool,
    stage: &str,
    zeros: &[ZeroFill],
) {
    let calls: Vec<&Part> = parts.iter().filter(|p| wanted(p)).collect();
    if calls.is_empty() && zeros.is_empty() {
        return;
    }
    t.line(format!(
        "void {symbol}(void *const *buf, void *scratch, long tid, long nt) {{"
    ));
    t.line("(void)scratch;");
    for p in calls {
        t.line(format!("{}_{stage}(buf, scratch, tid, nt);", p.prefix));
    }
    for z in zeros {
        zero_fill(t, z);
    }
    t.line("}");
    launches.push(Launch {
        symbol: symbol.to_string(),
    });
}

/// Writes zeros to a lattice of output positions; threads divide its largest axis.
pub fn zero_fill(t: &mut CText, z: &ZeroFill) {
    let mut axes = z.axes.clone();
    axes.sort_by_key(|a| std::cmp::Reverse(a.1));
    axes.retain(|a| a.0 > 1);
    let widest = (0..axes.len())
        .rev()
        .max_by_key(|&i| (i + 1 < axes.len(), axes[i].0));
    t.line("{");
    t.line("float *O = buf[2];");
    for (i, (size, _)) in axes.iter().enumerate() {
        if Some(i) == widest {
            t.line(format!(
                "for (long x{i} = {size}L*tid/nt; x{i} < {size}L*(tid + 1)/nt; x{i}++) {{"
            ));
        } else {
            t.line(format!("for (long x{i} = 0; x{i} < {size}L; x{i}++) {{"));
        }
    }
    let at: Vec<(String, i64)> = axes
        .iter()
        .enumerate()
        .map(|(i, a)| (format!("x{i}"), a.1))
        .collect();
    t.line(format!("O[{}] = 0.0f;", affine(&at, z.base)));
    t.close(axes.len() + 1);
}

/// `var = index / inner sizes % size` for each dim, as declarations; returns the variables.
fn decode(t: &mut CText, dims: &[Dim], index: &str, prefix: &str) -> Vec<String> {
    let mut inner: i64 = dims.iter().map(|d| d.size).product();
    let mut vars = Vec::new();
    for (j, d) in dims.iter().enumerate() {
        inner /= d.size;
        let v = format!("{prefix}{j}");
        t.line(format!(
            "const long {v} = {index}/{inner}L%{}L; (void){v};",
            d.size
        ));
        vars.push(v);
    }
    vars
}

fn strided(vars: &[String], dims: &[Dim], of: fn(&Dim) -> i64) -> Vec<(String, i64)> {
    vars.iter().cloned().zip(dims.iter().map(of)).collect()
}

impl Part<'_> {
    fn packs(&self) -> bool {
        self.plan.source == VectorSource::Shared
    }

    fn path(&self) -> &'static str {
        match (
            self.plan.shape.a.any_composite(),
            self.plan.parts > 1 || self.plan.to_scratch,
        ) {
            (true, false) => "convolution",
            (true, true) => "convolution, reduced",
            (false, false) => "gemm",
            (false, true) => "gemm, reduced",
        }
    }

    fn batches(&self) -> i64 {
        self.plan.shape.batch.iter().map(|d| d.size).product()
    }

    fn m_total(&self) -> i64 {
        self.plan.shape.m.iter().map(|d| d.size).product()
    }

    fn packed_floats(&self) -> i64 {
        if self.packs() {
            align(self.batches() * self.plan.panels() * self.plan.k_total() * self.plan.nr())
        } else {
            0
        }
    }

    /// Columns of the results in shared scratch, which lie there panel by panel.
    fn result_row(&self) -> i64 {
        self.plan.panels() * self.plan.nr()
    }

    fn result_floats(&self) -> i64 {
        let all = self.plan.parts * self.batches() * self.m_total() * self.result_row();
        if self.plan.to_scratch { align(all) } else { 0 }
    }

    fn chunk_panels(&self) -> i64 {
        (self.plan.panels() + self.plan.n_chunks - 1) / self.plan.n_chunks
    }

    fn staged_floats(&self) -> i64 {
        self.plan.staging.as_ref().map_or(0, |s| align(s.floats))
    }

    fn thread_floats(&self) -> i64 {
        let panels = self.chunk_panels() * self.plan.k_block() * self.plan.nr();
        self.staged_floats()
            + if self.plan.source == VectorSource::Thread {
                panels
            } else {
                0
            }
    }

    fn buffers(&self) -> (usize, usize) {
        if self.plan.shape.swapped {
            (1, 0)
        } else {
            (0, 1)
        }
    }

    // ---- functions ----

    fn functions(&self, t: &mut CText) {
        t.line(format!("/* {} */", self.plan.summary()));
        if self.plan.source != VectorSource::Direct {
            self.panel_function(t, self.plan.nr(), self.plan.nr(), "panel");
            if let Some(valid) = self.plan.tail() {
                self.panel_function(t, self.tail_width(valid), valid, "panel_tail");
            }
        }
        if self.packs() {
            self.pack_launch(t);
        }
        if let Some(s) = &self.plan.staging {
            let prologue = sides(self.hooks, self.plan.shape.swapped).0;
            s.emit(
                t,
                &format!("{}_stage", self.prefix),
                self.buffers().0,
                prologue,
            );
        }
        let kernels = self.micro_kernels(t);
        self.main_function(t, &kernels);
        if self.plan.to_scratch {
            self.combine_function(t);
        }
    }

    fn tail_width(&self, valid: i64) -> i64 {
        (valid + self.plan.vw - 1) / self.plan.vw * self.plan.vw
    }

    /// Reduction loops of one block: outermost first, the cut one with a run-time count.
    fn block_levels(&self) -> Vec<(&Dim, bool, i64)> {
        let k = &self.plan.shape.k[self.plan.k_cut.depth..];
        let inner = |j: usize| k[j + 1..].iter().map(|d| d.size).product();
        k.iter()
            .enumerate()
            .map(|(j, d)| (d, j == 0 && self.cut_reduction(), inner(j)))
            .collect()
    }

    fn cut_reduction(&self) -> bool {
        self.plan.k_cut.count(&self.plan.shape.k) > 1 && self.plan.k_cut.blocks > 1
    }

    fn panel_function(&self, t: &mut CText, width: i64, valid: i64, suffix: &str) {
        let levels = self.block_levels().into_iter();
        let levels = levels.map(|(d, runtime, row)| PackLevel {
            extent: d.size,
            runtime,
            b: d.b,
            row,
        });
        let panel = Panel {
            levels: levels.collect(),
            vw: self.plan.vw,
            width,
            valid,
            lane: self.plan.n_inner().b,
            buffer: self.buffers().1,
            prologue: sides(self.hooks, self.plan.shape.swapped).1,
        };
        panel.emit(t, &format!("{}_{suffix}", self.prefix));
    }

    /// Calls the panel copy that fits panel `p`.
    fn pack_call(&self, t: &mut CText, src: &str, dst: &str, kn: &str) {
        let call = |suffix: &str| format!("{}_{suffix}(buf, {src}, {dst}, {kn});", self.prefix);
        match self.plan.tail() {
            Some(_) => {
                let last = self.plan.inner_panels() - 1;
                t.line(format!(
                    "if (pi == {last}L) {} else {}",
                    call("panel_tail"),
                    call("panel")
                ));
            }
            None => t.line(call("panel")),
        }
    }

    /// Width of panel `pi`, as a C expression.
    fn width(&self) -> String {
        match self.plan.tail().map(|v| self.tail_width(v)) {
            Some(w) if w != self.plan.nr() => {
                format!(
                    "(pi == {}L ? {w}L : {}L)",
                    self.plan.inner_panels() - 1,
                    self.plan.nr()
                )
            }
            _ => format!("{}L", self.plan.nr()),
        }
    }

    /// Declares `po` variables and `pi` from panel `p`; returns the outer N variables.
    fn decode_panel(&self, t: &mut CText) -> Vec<String> {
        let inner = self.plan.inner_panels();
        t.line(format!(
            "const long po = p/{inner}L, pi = p%{inner}L; (void)po; (void)pi;"
        ));
        let n = &self.plan.shape.n;
        decode(t, &n[..n.len() - 1], "po", "po")
    }

    fn panel_source(&self, outer: &[String]) -> Vec<(String, i64)> {
        let n = &self.plan.shape.n;
        let mut src = strided(outer, n, |d| d.b);
        src.push(("pi".to_string(), self.plan.nr() * self.plan.n_inner().b));
        src
    }

    fn pack_launch(&self, t: &mut CText) {
        let s = &self.plan.shape;
        let depth = self.plan.k_cut.depth;
        let blocks = self.plan.k_cut.count(&s.k);
        let units = self.batches() * self.plan.panels() * blocks;
        t.line(format!(
            "static void {}_pack(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; float *W = (float *)buf[3] + {}L;",
            self.shared_at
        ));
        t.line(format!(
            "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
        ));
        t.line(format!(
            "const long kb = u%{blocks}L, p = u/{blocks}L%{}L, bt = u/{}L;",
            self.plan.panels(),
            blocks * self.plan.panels()
        ));
        let batch = decode(t, &s.batch, "bt", "bt");
        let outer = self.decode_panel(t);
        let starts = self.decode_reduction(t);
        let mut src = strided(&batch, &s.batch, |d| d.b);
        src.extend(self.panel_source(&outer));
        src.extend(strided(&starts, &s.k, |d| d.b));
        let dst = format!(
            "W + (bt*{}L + p)*{}L + ({})*{}",
            self.plan.panels(),
            self.plan.k_total() * self.plan.nr(),
            self.flat_start(&starts),
            self.width()
        );
        let _ = depth;
        self.pack_call(t, &affine(&src, s.b_base), &dst, "kn");
        t.close(2);
    }

    /// Declares the start of each reduction dim of block `kb`, and `kn`; returns the start variables.
    fn decode_reduction(&self, t: &mut CText) -> Vec<String> {
        self.decode_cut(
            t,
            &self.plan.shape.k,
            self.plan.k_cut.depth,
            self.plan.k_cut.blocks,
            "kb",
            "ks",
        );
        t.line(format!(
            "const long kn = ksn{}; (void)kn;",
            self.plan.k_cut.depth
        ));
        (0..self.plan.shape.k.len())
            .map(|j| format!("ks{j}"))
            .collect()
    }

    /// Declares `{prefix}{j}` (start) and `{prefix}n{j}` (count) of each dim for block `index`.
    fn decode_cut(
        &self,
        t: &mut CText,
        dims: &[Dim],
        depth: usize,
        blocks: i64,
        index: &str,
        prefix: &str,
    ) {
        t.line(format!("const long {prefix}q = {index}%{blocks}L, {prefix}o = {index}/{blocks}L; (void){prefix}o; (void){prefix}q;"));
        let outer = decode(t, &dims[..depth], &format!("{prefix}o"), prefix);
        for v in outer {
            t.line(format!(
                "const long {prefix}n{} = 1; (void){prefix}n{};",
                &v[prefix.len()..],
                &v[prefix.len()..]
            ));
        }
        for (j, d) in dims.iter().enumerate().skip(depth) {
            let size = d.size;
            let (start, count) = if j == depth {
                (
                    format!("{size}L*{prefix}q/{blocks}L"),
                    format!("{size}L*({prefix}q + 1)/{blocks}L - {prefix}{j}"),
                )
            } else {
                ("0".to_string(), format!("{size}L"))
            };
            t.line(format!(
                "const long {prefix}{j} = {start}, {prefix}n{j} = {count}; (void){prefix}n{j};"
            ));
        }
    }

    fn flat_start(&self, starts: &[String]) -> String {
        let k = &self.plan.shape.k;
        let inner = |j: usize| k[j + 1..].iter().map(|d| d.size).product::<i64>();
        let terms: Vec<(String, i64)> = starts
            .iter()
            .enumerate()
            .map(|(j, v)| (v.clone(), inner(j)))
            .collect();
        affine(&terms, 0)
    }

    // ---- micro-kernels ----

    fn a_stride(&self, d: &Dim) -> i64 {
        self.plan.staging.as_ref().map_or(d.a, |s| s.stride(d.id))
    }

    /// Output stride of each M dim, in the real output or in shared scratch.
    fn o_strides(&self) -> Vec<i64> {
        let m = &self.plan.shape.m;
        let inner = |j: usize| m[j + 1..].iter().map(|d| d.size).product::<i64>() * self.plan.nr();
        m.iter()
            .enumerate()
            .map(|(j, d)| if self.plan.to_scratch { inner(j) } else { d.o })
            .collect()
    }

    /// Names by (big tile, tail panel).
    fn micro_kernels(&self, t: &mut CText) -> Vec<((bool, bool), String)> {
        let mut names = Vec::new();
        for big in [true, false] {
            for tail in [false, true] {
                let absent =
                    (big && self.plan.tiling.n_big == 0) || (tail && self.plan.tail().is_none());
                let only_tail =
                    !tail && self.plan.inner_panels() == 1 && self.plan.tail().is_some();
                if absent || only_tail {
                    continue;
                }
                let (name, text) = self.micro_kernel(big, tail).emit();
                t.raw(&text);
                names.push(((big, tail), name));
            }
        }
        names
    }

    fn micro_kernel(&self, big: bool, tail: bool) -> MicroKernel {
        let (p, s) = (&self.plan, &self.plan.shape);
        let o = self.o_strides();
        let axis = p.tiling.axis;
        let (cols, a_col, o_col) = match s.m.get(axis + 1) {
            Some(d) => (d.size, self.a_stride(d), o[axis + 1]),
            None => (1, 0, 0),
        };
        let n_rows = p.tiling.small + i64::from(big);
        let (a_row, o_row) = (self.a_stride(&s.m[axis]), o[axis]);
        let rows = (0..n_rows)
            .flat_map(|r| (0..cols).map(move |c| (r * a_row + c * a_col, r * o_row + c * o_col)));
        let valid = p.tail().filter(|_| tail);
        let width = valid.map_or(p.nr(), |v| self.tail_width(v));
        let stored_whole = p.to_scratch || valid.is_none();
        let last_lanes = if stored_whole {
            p.vw
        } else {
            valid.map_or(p.vw, |v| v - (width - p.vw))
        };
        let levels: Vec<Level> = self
            .block_levels()
            .into_iter()
            .map(|(d, runtime, row)| Level {
                extent: if runtime { 1 } else { self.level_extent(d) },
                runtime,
                a: self.a_stride(d),
                b: if p.source == VectorSource::Direct {
                    d.b
                } else {
                    row * width
                },
            })
            .collect();
        MicroKernel {
            vw: p.vw,
            rows: rows.collect(),
            nv: width / p.vw,
            last_lanes,
            nest: merge_levels(&levels),
            ahead: self.ahead(),
        }
    }

    /// Tiles that use a panel before the next one is needed.
    fn tiles_per_panel(&self) -> i64 {
        let (p, m) = (&self.plan, &self.plan.shape.m);
        let size = |j: usize| {
            if j == p.tiling.axis {
                p.tiling.n_tiles
            } else {
                m[j].size
            }
        };
        let inner: i64 = (p.m_cut.depth + 1..=p.tiling.axis).map(size).product();
        (size(p.m_cut.depth) + p.m_cut.blocks - 1) / p.m_cut.blocks * inner
    }

    /// Floats of the next panel that a tile fetches per reduction step, so that all tiles of a panel
    /// together fetch the whole next one; panels in the thread's own scratch are near already.
    fn ahead(&self) -> i64 {
        let small = self.plan.k_total() * self.result_row() * 4 < 400_000;
        if self.plan.source != VectorSource::Shared || small {
            return 0;
        }
        let tiles = self.tiles_per_panel();
        ((self.plan.nr() + tiles - 1) / tiles).min(16)
    }

    fn level_extent(&self, d: &Dim) -> i64 {
        d.size
    }

    // ---- the main launch ----

    fn main_function(&self, t: &mut CText, kernels: &[((bool, bool), String)]) {
        let (p, s) = (&self.plan, &self.plan.shape);
        let m_blocks = p.m_cut.count(&s.m);
        let items = p.parts * self.batches() * m_blocks * p.n_chunks;
        t.line(format!(
            "static void {}_main(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line("float *sa = scratch; (void)sa;");
        t.line(format!(
            "float *sb = (float *)scratch + {}L; (void)sb;",
            self.staged_floats()
        ));
        t.line(format!(
            "const float *W = (const float *)buf[3] + {}L; (void)W;",
            self.shared_at
        ));
        let (a_buf, b_buf) = self.buffers();
        t.line(format!(
            "const float *A = buf[{a_buf}], *B = buf[{b_buf}]; (void)A; (void)B;"
        ));
        if p.to_scratch {
            t.line(format!(
                "float *O = (float *)buf[3] + {}L;",
                self.shared_at + self.packed_floats()
            ));
        } else {
            t.line(format!("float *O = (float *)buf[2] + {}L;", s.o_base));
        }
        t.line("long staged = -1, packed = -1; (void)staged; (void)packed;");
        t.line(format!(
            "for (long it = {items}L*tid/nt; it < {items}L*(tid + 1)/nt; it++) {{"
        ));
        t.line(format!(
            "const long nc = it%{}L, mb = it/{}L%{m_blocks}L;",
            p.n_chunks, p.n_chunks
        ));
        t.line(format!(
            "const long bt = it/{}L%{}L, part = it/{}L; (void)part;",
            p.n_chunks * m_blocks,
            self.batches(),
            p.n_chunks * m_blocks * self.batches()
        ));
        let batch = decode(t, &s.batch, "bt", "bt");
        self.decode_m(t);
        t.line(format!(
            "const long p0 = {0}L*nc/{1}L, p1 = {0}L*(nc + 1)/{1}L;",
            p.panels(),
            p.n_chunks
        ));
        let k_blocks = p.k_cut.count(&s.k);
        t.line(format!(
            "const long kb0 = {k_blocks}L*part/{0}L, kb1 = {k_blocks}L*(part + 1)/{0}L;",
            p.parts
        ));
        t.line("for (long kb = kb0; kb < kb1; kb++) {");
        let ks = self.decode_reduction(t);
        self.stage_call(t, &batch, m_blocks, k_blocks);
        self.pack_block(t, &batch, &ks, k_blocks);
        self.panels_and_tiles(t, &batch, &ks, kernels);
        t.line("}");
        self.epilogue_call(t, "p0", "p1");
        t.close(2);
    }

    /// Declares the M ranges `ms`, `msn` of block `mb`, and the tile range `t0..t1`.
    fn decode_m(&self, t: &mut CText) {
        let (p, m) = (&self.plan, &self.plan.shape.m);
        let (axis, depth, blocks) = (p.tiling.axis, p.m_cut.depth, p.m_cut.blocks);
        if depth < axis {
            self.decode_cut(t, m, depth, blocks, "mb", "ms");
            t.line(format!("const long t0 = 0, t1 = {}L;", p.tiling.n_tiles));
            return;
        }
        t.line(format!(
            "const long msq = mb%{blocks}L, mso = mb/{blocks}L; (void)mso;"
        ));
        for v in decode(t, &m[..depth], "mso", "ms") {
            t.line(format!(
                "const long msn{} = 1; (void)msn{};",
                &v[2..],
                &v[2..]
            ));
        }
        t.line(format!(
            "const long t0 = {0}L*msq/{blocks}L, t1 = {0}L*(msq + 1)/{blocks}L;",
            p.tiling.n_tiles
        ));
        let (from, to) = (p.tiling.start("t0"), p.tiling.start("t1"));
        t.line(format!(
            "const long ms{axis} = {from}, msn{axis} = {to} - ms{axis}; (void)msn{axis};"
        ));
        for (j, d) in m.iter().enumerate().skip(axis + 1) {
            t.line(format!(
                "const long ms{j} = 0, msn{j} = {}L; (void)ms{j}; (void)msn{j};",
                d.size
            ));
        }
    }

    /// Start and count variables of a dim that is cut.
    fn range_vars(&self, id: usize) -> (String, String) {
        if let Some(j) = self.plan.shape.m.iter().position(|d| d.id == id) {
            return (format!("ms{j}"), format!("msn{j}"));
        }
        let j = self
            .plan
            .shape
            .k
            .iter()
            .position(|d| d.id == id)
            .unwrap_or_default();
        (format!("ks{j}"), format!("ksn{j}"))
    }

    fn coord_range(&self, c: &Coord) -> String {
        let start: Vec<(String, i64)> = c
            .terms
            .iter()
            .map(|&(d, k)| (self.range_vars(d).0, k))
            .collect();
        let reach: Vec<(String, i64)> = c
            .terms
            .iter()
            .map(|&(d, k)| (format!("({} - 1)", self.range_vars(d).1), k))
            .collect();
        format!("{}, {}", affine(&start, c.offset), affine(&reach, 1))
    }

    fn stage_call(&self, t: &mut CText, batch: &[String], m_blocks: i64, k_blocks: i64) {
        let s = &self.plan.shape;
        let Some(staging) = &self.plan.staging else {
            return;
        };
        let src = affine(&strided(batch, &s.batch, |d| d.a), s.a.base);
        let ranges: Vec<String> = staging
            .coords
            .iter()
            .map(|c| self.coord_range(&c.coord))
            .collect();
        let key = format!("(bt*{m_blocks}L + mb)*{k_blocks}L + kb");
        t.line(format!("if (staged != {key}) {{"));
        t.line(format!("staged = {key};"));
        let ranges = if ranges.is_empty() {
            String::new()
        } else {
            format!(", {}", ranges.join(", "))
        };
        t.line(format!("{}_stage(buf, {src}, sa{ranges});", self.prefix));
        t.line("}");
    }

    fn pack_block(&self, t: &mut CText, batch: &[String], ks: &[String], k_blocks: i64) {
        let (p, s) = (&self.plan, &self.plan.shape);
        if p.source != VectorSource::Thread {
            return;
        }
        let key = format!("(bt*{}L + nc)*{k_blocks}L + kb", p.n_chunks);
        t.line(format!("if (packed != {key}) {{"));
        t.line(format!("packed = {key};"));
        t.line("for (long p = p0; p < p1; p++) {");
        let outer = self.decode_panel(t);
        let mut src = strided(batch, &s.batch, |d| d.b);
        src.extend(self.panel_source(&outer));
        src.extend(strided(ks, &s.k, |d| d.b));
        let dst = format!("sb + (p - p0)*{}L", p.k_block() * p.nr());
        self.pack_call(t, &affine(&src, s.b_base), &dst, "kn");
        t.close(2);
    }

    fn panels_and_tiles(
        &self,
        t: &mut CText,
        batch: &[String],
        ks: &[String],
        kernels: &[((bool, bool), String)],
    ) {
        let (p, s) = (&self.plan, &self.plan.shape);
        t.line("for (long p = p0; p < p1; p++) {");
        let outer = self.decode_panel(t);
        let b = match p.source {
            VectorSource::Direct => {
                let mut src = strided(batch, &s.batch, |d| d.b);
                src.extend(self.panel_source(&outer));
                src.extend(strided(ks, &s.k, |d| d.b));
                format!("B + {}", affine(&src, s.b_base))
            }
            VectorSource::Thread => format!("sb + (p - p0)*{}L", p.k_block() * p.nr()),
            VectorSource::Shared => format!(
                "W + (bt*{}L + p)*{}L + ({})*{}",
                p.panels(),
                p.k_total() * p.nr(),
                self.flat_start(ks),
                self.width()
            ),
        };
        t.line(format!("const float *b = {b};"));
        t.line(format!(
            "const float *next = b + {}L;",
            self.plan.k_total() * self.plan.nr()
        ));
        t.line(format!("float *o = O + {};", self.panel_out(batch, &outer)));
        let axis = p.tiling.axis;
        let first = p.m_cut.depth.min(axis);
        for j in first..axis {
            t.line(format!("for (long x{j} = 0; x{j} < msn{j}; x{j}++) {{"));
        }
        self.tile_call(t, batch, ks, first, kernels);
        t.close(axis - first + 1);
    }

    fn panel_out(&self, batch: &[String], outer: &[String]) -> String {
        let (p, s) = (&self.plan, &self.plan.shape);
        if p.to_scratch {
            let all = self.m_total() * self.result_row();
            let panel = self.m_total() * p.nr();
            return format!("(part*{}L + bt)*{all}L + p*{panel}L", self.batches());
        }
        let mut at = strided(batch, &s.batch, |d| d.o);
        at.extend(strided(outer, &s.n, |d| d.o));
        at.push(("pi".to_string(), p.nr()));
        affine(&at, 0)
    }

    fn tile_call(
        &self,
        t: &mut CText,
        batch: &[String],
        ks: &[String],
        first: usize,
        kernels: &[((bool, bool), String)],
    ) {
        let (p, s) = (&self.plan, &self.plan.shape);
        let axis = p.tiling.axis;
        t.line("for (long t = t0; t < t1; t++, next += NEXT) {".replace("NEXT", &self.next_step()));
        t.line(format!("const long y = {};", p.tiling.start("t")));
        let o = self.o_strides();
        let (mut a_at, mut o_at) = (Vec::new(), Vec::new());
        for (j, d) in s.m.iter().enumerate() {
            let here = match j {
                j if j < first => format!("ms{j}"),
                j if j < axis => format!("(ms{j} + x{j})"),
                j if j == axis => "y".to_string(),
                _ => continue,
            };
            o_at.push((here.clone(), o[j]));
            let relative = match j {
                j if j < first => None,
                j if j < axis => Some(format!("x{j}")),
                _ => Some(format!("(y - ms{j})")),
            };
            match (&p.staging, relative) {
                (Some(_), Some(r)) => a_at.push((r, self.a_stride(d))),
                (Some(_), None) => {}
                (None, _) => a_at.push((here, d.a)),
            }
        }
        let a = if p.staging.is_some() {
            format!("sa + {}", affine(&a_at, 0))
        } else {
            a_at.extend(strided(batch, &s.batch, |d| d.a));
            a_at.extend(strided(ks, &s.k, |d| d.a));
            let fixed: i64 = s.a.coords.iter().map(|c| c.offset * c.stride).sum();
            format!("A + {}", affine(&a_at, s.a.base + fixed))
        };
        let args = format!("({a}, b, o + {}, next, kn, kb > kb0);", affine(&o_at, 0));
        self.dispatch(t, kernels, &args);
        t.line("}");
    }

    /// Chooses the micro-kernel of tile `t` and panel `pi`.
    fn dispatch(&self, t: &mut CText, kernels: &[((bool, bool), String)], args: &str) {
        let last = self.plan.inner_panels() - 1;
        let mut chain: Vec<String> = Vec::new();
        for (i, ((big, tail), name)) in kernels.iter().enumerate() {
            let mut when = Vec::new();
            if self.plan.tiling.n_big > 0 {
                when.push(format!(
                    "t {} {}L",
                    if *big { "<" } else { ">=" },
                    self.plan.tiling.n_big
                ));
            }
            if self.plan.tail().is_some() {
                when.push(format!("pi {} {last}L", if *tail { "==" } else { "!=" }));
            }
            if i + 1 == kernels.len() {
                chain.push(format!("{name}{args}"));
            } else {
                chain.push(format!("if ({}) {name}{args}", when.join(" && ")));
            }
        }
        t.line(chain.join(" else "));
    }

    /// How far a tile's share of the next panel reaches, in floats.
    fn next_step(&self) -> String {
        let inner: i64 = self.plan.shape.k[self.plan.k_cut.depth + 1..]
            .iter()
            .map(|d| d.size)
            .product();
        format!("kn*{}L", inner * self.ahead())
    }

    /// Calls the epilogue on the M range of the current block and panels `p0..p1`.
    fn epilogue_call(&self, t: &mut CText, p0: &str, p1: &str) {
        let (p, m) = (&self.plan, &self.plan.shape.m);
        let Some(epilogue) = self.hooks.epilogue.as_ref().filter(|_| !p.to_scratch) else {
            return;
        };
        let inner = |j: usize| m[j + 1..].iter().map(|d| d.size).product::<i64>();
        let start: Vec<(String, i64)> =
            (0..m.len()).map(|j| (format!("ms{j}"), inner(j))).collect();
        let cut = p.m_cut.depth;
        t.line(format!("const long m0 = {};", affine(&start, 0)));
        t.line(format!("const long m1 = m0 + msn{cut}*{}L;", inner(cut)));
        let n_at = |panel: &str| {
            let (ip, size) = (p.inner_panels(), p.n_inner().size);
            format!(
                "{panel}/{ip}L*{size}L + shl_min({panel}%{ip}L*{}L, {size}L)",
                p.nr()
            )
        };
        t.line(format!(
            "{epilogue}(buf, tid, bt, m0, m1, {}, {});",
            n_at(p0),
            n_at(p1)
        ));
    }

    // ---- the combining launch ----

    /// Sums the parts and moves them to the output: blocks of columns, rows in the output's order.
    fn combine_function(&self, t: &mut CText) {
        let (p, s) = (&self.plan, &self.plan.shape);
        let columns = p.nr().min(16);
        let m_row = self.o_strides();
        let mut order: Vec<usize> = (0..s.m.len()).collect();
        order.sort_by_key(|&j| std::cmp::Reverse(s.m[j].o));
        let (outer_m, inner_m) = (order[0], &order[1..]);
        let size = p.n_inner().size;
        let col_blocks = (size + columns - 1) / columns;
        let n_outer = p.panels() / p.inner_panels();
        let units = self.batches() * n_outer * col_blocks * s.m[outer_m].size;
        t.line(format!(
            "static void {}_combine(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; const float *R = (const float *)buf[3] + {}L;",
            self.shared_at + self.packed_floats()
        ));
        t.line(format!("float *O = (float *)buf[2] + {}L;", s.o_base));
        t.line(format!(
            "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
        ));
        let rows = s.m[outer_m].size;
        t.line(format!(
            "const long y{outer_m} = u%{rows}L, cb = u/{rows}L%{col_blocks}L;"
        ));
        t.line(format!(
            "const long po = u/{}L%{n_outer}L, bt = u/{}L;",
            rows * col_blocks,
            rows * col_blocks * n_outer
        ));
        let batch = decode(t, &s.batch, "bt", "bt");
        let outer = decode(t, &s.n[..s.n.len() - 1], "po", "po");
        t.line(format!(
            "const long n0 = cb*{columns}L, n1 = shl_min(n0 + {columns}L, {size}L);"
        ));
        for &j in inner_m {
            t.line(format!(
                "for (long y{j} = 0; y{j} < {}L; y{j}++) {{",
                s.m[j].size
            ));
        }
        let mut from: Vec<(String, i64)> =
            order.iter().map(|&j| (format!("y{j}"), m_row[j])).collect();
        let panel = self.m_total() * p.nr();
        from.push((
            format!("(po*{}L + n0/{}L)", p.inner_panels(), p.nr()),
            panel,
        ));
        from.push((format!("n0%{}L", p.nr()), 1));
        from.push(("bt".to_string(), self.m_total() * self.result_row()));
        let mut to: Vec<(String, i64)> =
            order.iter().map(|&j| (format!("y{j}"), s.m[j].o)).collect();
        to.extend(strided(&batch, &s.batch, |d| d.o));
        to.extend(strided(&outer, &s.n, |d| d.o));
        to.push(("n0".to_string(), p.n_inner().o));
        t.line(format!("const float *r = R + {};", affine(&from, 0)));
        t.line(format!("float *o = O + {};", affine(&to, 0)));
        let part = self.batches() * self.m_total() * self.result_row();
        let sum: Vec<String> = (0..p.parts)
            .map(|q| format!("r[n + {}L]", q * part))
            .collect();
        t.line(format!(
            "for (long n = 0; n < n1 - n0; n++) o[n*{}L] = {};",
            p.n_inner().o,
            sum.join(" + ")
        ));
        t.close(inner_m.len());
        if let Some(e) = &self.hooks.epilogue {
            let inner: i64 = inner_m.iter().map(|&j| s.m[j].size).product();
            let n_at = format!("po*{size}L");
            t.line(format!("{e}(buf, tid, bt, y{outer_m}*{inner}L, (y{outer_m} + 1)*{inner}L, {n_at} + n0, {n_at} + n1);"));
        }
        t.close(2);
    }
}
