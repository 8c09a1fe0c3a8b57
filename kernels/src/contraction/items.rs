//! The main launch: items of work over threads, blocks of the reduction, staging, and the tiles
//! of a block.

use super::BUFFERS;
use super::access::Coord;
use super::blocking::VectorSource;
use super::driver::{GatherPart, decode, strided};
use super::open::ForTile;
use super::text::{CText, affine};

impl GatherPart<'_> {
    pub(super) fn main_function(&self, t: &mut CText, kernels: &[ForTile]) {
        let (p, s) = (&self.plan, &self.plan.shape);
        let m_blocks = p.m_cut.count(&s.m);
        let items = p.parts * self.batches() * m_blocks * p.n_chunks;
        let number = self.number();
        t.line(format!(
            "static void {}_main(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!("{number} *sa = scratch; (void)sa;"));
        t.line(format!(
            "{number} *sb = ({number} *)scratch + {}L; (void)sb;",
            self.staged_numbers()
        ));
        t.line(format!(
            "const {number} *W = (const {number} *)buf[3] + {}L; (void)W;",
            self.shared_at
        ));
        let (a_buf, b_buf) = self.buffers();
        t.line(format!(
            "const {number} *A = buf[{a_buf}], *B = buf[{b_buf}]; (void)A; (void)B;"
        ));
        if p.to_scratch {
            t.line(format!(
                "{number} *O = ({number} *)buf[3] + {}L;",
                self.shared_at + self.packed_numbers()
            ));
        } else if self.pitch.is_some() {
            t.line(format!(
                "void *own[{BUFFERS}]; memcpy(own, buf, sizeof own);"
            ));
        } else {
            t.line(format!("{number} *O = ({number} *)buf[2] + {}L;", s.o_base));
        }
        t.line("long staged = -1, packed = -1; (void)staged; (void)packed;");
        t.line(format!(
            "for (long it = {items}L*tid/nt; it < {items}L*(tid + 1)/nt; it++) {{"
        ));
        let (nc, inner) = (
            p.n_chunks,
            if p.batch_inside() {
                self.batches()
            } else {
                m_blocks
            },
        );
        let (fast, slow) = if p.batch_inside() {
            (("bt", self.batches()), ("mb", m_blocks))
        } else {
            (("mb", m_blocks), ("bt", self.batches()))
        };
        t.line(format!(
            "const long nc = it%{nc}L, {} = it/{nc}L%{}L;",
            fast.0, fast.1
        ));
        t.line(format!(
            "const long {} = it/{}L%{}L, part = it/{}L; (void)part;",
            slow.0,
            nc * inner,
            slow.1,
            nc * inner * slow.1
        ));
        let batch = decode(t, &s.batch, "bt", "bt");
        self.decode_m(t);
        t.line(format!(
            "const long p0 = {0}L*nc/{1}L, p1 = {0}L*(nc + 1)/{1}L;",
            p.panels(),
            p.n_chunks
        ));
        self.local_output(t);
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
    pub(super) fn decode_m(&self, t: &mut CText) {
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
    pub(super) fn range_vars(&self, id: usize) -> (String, String) {
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

    pub(super) fn coord_range(&self, c: &Coord) -> String {
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

    pub(super) fn stage_call(&self, t: &mut CText, batch: &[String], m_blocks: i64, k_blocks: i64) {
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
        // The first chunk of columns of each block belongs to one thread, which comes to it first.
        let keep = match self.hooks.keeps[self.buffers().0] {
            Some(_) => ", nc == 0",
            None => "",
        };
        t.line(format!(
            "{}_stage(buf, {src}, sa{keep}{ranges});",
            self.prefix
        ));
        t.line("}");
    }

    pub(super) fn pack_block(&self, t: &mut CText, batch: &[String], ks: &[String], k_blocks: i64) {
        let p = &self.plan;
        if p.source != VectorSource::Thread {
            return;
        }
        let key = format!("(bt*{}L + nc)*{k_blocks}L + kb", p.n_chunks);
        t.line(format!("if (packed != {key}) {{"));
        t.line(format!("packed = {key};"));
        let dst = format!("sb + (p - p0)*{}L", p.k_block() * p.nr());
        self.pack_panels(t, batch, ks, &dst);
        t.close(1);
    }

    pub(super) fn panels_and_tiles(
        &self,
        t: &mut CText,
        batch: &[String],
        ks: &[String],
        kernels: &[ForTile],
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
        let number = self.number();
        t.line(format!("const {number} *b = {b};"));
        t.line(format!(
            "const {number} *next = b + {}L;",
            self.plan.k_total() * self.plan.nr()
        ));
        t.line(format!(
            "{number} *o = O + {};",
            self.panel_out(batch, &outer)
        ));
        let axis = p.tiling.axis;
        let first = p.m_cut.depth.min(axis);
        for j in first..axis {
            t.line(format!("for (long x{j} = 0; x{j} < msn{j}; x{j}++) {{"));
        }
        self.tile_call(t, batch, ks, first, kernels);
        t.close(axis - first + 1);
    }

    pub(super) fn panel_out(&self, batch: &[String], outer: &[String]) -> String {
        let (p, s) = (&self.plan, &self.plan.shape);
        if p.to_scratch {
            let all = self.m_total() * self.result_row();
            let panel = self.m_total() * p.nr();
            return format!("(part*{}L + bt)*{all}L + p*{panel}L", self.batches());
        }
        if self.pitch.is_some() {
            return self.flat_column("p");
        }
        let mut at = strided(batch, &s.batch, |d| d.o);
        at.extend(strided(outer, &s.n, |d| d.o));
        at.push(("pi".to_string(), p.nr()));
        affine(&at, 0)
    }

    pub(super) fn tile_call(
        &self,
        t: &mut CText,
        batch: &[String],
        ks: &[String],
        first: usize,
        kernels: &[ForTile],
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
        self.declare_ragged(t);
        let args = format!("({a}, b, o + {}, next, kn, kb > kb0", affine(&o_at, 0));
        dispatch(t, kernels, &args);
        t.line("}");
    }

    /// How far a tile's share of the next panel reaches, in numbers.
    pub(super) fn next_step(&self) -> String {
        let inner: i64 = self.plan.shape.k[self.plan.k_cut.depth + 1..]
            .iter()
            .map(|d| d.size)
            .product();
        format!("kn*{}L", inner * self.ahead())
    }

    /// Declares the flat rows `m0..m1` of the current block.
    fn flat_rows(&self, t: &mut CText) {
        let (m, cut) = (&self.plan.shape.m, self.plan.m_cut.depth);
        let inner = |j: usize| m[j + 1..].iter().map(|d| d.size).product::<i64>();
        let start: Vec<(String, i64)> =
            (0..m.len()).map(|j| (format!("ms{j}"), inner(j))).collect();
        t.line(format!("const long m0 = {};", affine(&start, 0)));
        t.line(format!("const long m1 = m0 + msn{cut}*{}L;", inner(cut)));
    }

    /// The first flat column of a panel; for the panel behind the last one, their number.
    fn flat_column(&self, panel: &str) -> String {
        let p = &self.plan;
        let (ip, size) = (p.inner_panels(), p.n_inner().size);
        if size == ip * p.nr() && !p.open.columns {
            // The compiler sees that only whole vectors are asked for.
            return format!("{panel}*{}L", p.nr());
        }
        format!(
            "{panel}/{ip}L*{size}L + shl_min({panel}%{ip}L*{}L, {size}L)",
            p.nr()
        )
    }

    /// Declares `O` where a block of results stays in the thread's scratch: as if flat row 0 and column 0 lay there.
    fn local_output(&self, t: &mut CText) {
        let Some(pitch) = self.pitch else {
            return;
        };
        self.flat_rows(t);
        let number = self.number();
        t.line(format!(
            "{number} *O = ({number} *)scratch + {}L - (m0*{pitch}L + {});",
            self.operand_numbers(),
            self.flat_column("p0")
        ));
        t.line("own[2] = O;");
    }

    /// Calls the epilogue, then the sums, on the M range of the current block and panels `p0..p1`.
    pub(super) fn epilogue_call(&self, t: &mut CText, p0: &str, p1: &str) {
        if self.plan.to_scratch || !self.hooks.follow() {
            return;
        }
        if self.pitch.is_none() {
            self.flat_rows(t);
        }
        let (batch, first) = self.epilogue_batch();
        let [n0, n1] = [p0, p1].map(|panel| self.flat_column(panel));
        let block = format!("{batch}, m0, m1, {first}{n0}, {first}{n1}");
        if let Some(epilogue) = &self.hooks.epilogue {
            let buffers = if self.pitch.is_some() { "own" } else { "buf" };
            t.line(format!("{epilogue}({buffers}, tid, {block});"));
        }
        if let Some(sums) = &self.hooks.sums {
            t.line(format!("{sums}(buf, tid, mb, {block});"));
        }
    }
}

/// Chooses the micro-kernel of tile `t` and panel `pi`.
fn dispatch(t: &mut CText, kernels: &[ForTile], args: &str) {
    let mut chain: Vec<String> = Vec::new();
    for (i, kernel) in kernels.iter().enumerate() {
        let call = format!("{}{args}{});", kernel.name, kernel.more);
        if i + 1 == kernels.len() {
            chain.push(call);
        } else {
            chain.push(format!("if ({}) {call}", kernel.when.join(" && ")));
        }
    }
    t.line(chain.join(" else "));
}
