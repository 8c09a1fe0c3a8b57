//! Text of a chain's kernel: its frame, tiles, the sweeps' loads and products, the stores.
//!
//! A warp owns 16 rows. Their lines are the left factors of products into tiles and stay in registers;
//! what is read at columns comes to shared memory, two blocks of columns deep, one barrier for each
//! block. What becomes of single numbers of tiles is [`super::element`]'s.

use super::EmittedChain;
use super::element::{Elements, Names, is_small};
use super::form::{Form, Lines, VECTOR};
use super::hidden::Hidden;
use super::running;
use super::sweep::Sweeps;
use super::tile::{Tile, ceil, padded};
use crate::contraction::declaration;
use crate::value_text::literal;
use crate::{Emitted, Kernel, Param, ParamType, element_type};
use graph::{ContainerId, DType, SymExpr};
use kernels::emit::scalar;
use kernels::emit::text::CText;
use kernels::plan::Buffer;
use std::collections::BTreeSet;
use std::ops::Range;

/// Threads of a block, and its rows: 16 for each warp.
const THREADS: i64 = 128;
const ROWS: i64 = THREADS / 32 * 16;

/// Registers in which a random number is made.
const RANDOM_REGISTERS: i64 = 16;

/// What the text is made from.
pub(super) struct Job<'f> {
    pub(super) form: &'f Form,
    pub(super) sweeps: Sweeps,
    pub(super) tile: Tile,
    pub(super) names: Names,
    params: Vec<Param>,
    args: Vec<Buffer>,
}

/// The chain's kernel; `None` if it has no form that is known here.
pub(super) fn emit(name: &str, form: &Form) -> Option<EmittedChain> {
    let sweeps = running::joined(form, Sweeps::new(form)?);
    let tile = Tile::new(form)?;
    let mut job = Job {
        form,
        sweeps,
        tile,
        names: Names::new(),
        params: Vec::new(),
        args: Vec::new(),
    };
    job.name_containers()?;
    let batch: i64 = form.batch.iter().map(|l| l.size).product();
    let n_rows = ceil(form.row.size, ROWS);
    let grid = (batch * n_rows * tile.parts) as u64;
    let kernel = Kernel {
        origin: name.to_string(),
        name: name.to_string(),
        text: job.text(name),
        params: job.params.clone(),
        threads: THREADS as u32,
        min_blocks: job.min_blocks(),
    };
    Some(EmittedChain {
        flops: job.flops(),
        launch: Emitted {
            kernel,
            grid,
            args: job.args,
        },
    })
}

impl Job<'_> {
    /// Columns of a result that a block sums up.
    pub(super) fn part(&self, width: i64) -> i64 {
        self.tile.part(width)
    }

    fn elements(&self, sweep: usize) -> Elements<'_> {
        Elements::new(self.form, &self.sweeps, sweep)
    }

    /// Parameters in the order of the containers; `None` where one is both read and written.
    fn name_containers(&mut self) -> Option<()> {
        let form = self.form;
        let mut read: BTreeSet<ContainerId> = BTreeSet::new();
        read.extend(form.tile_products.iter().map(|p| p.rows.container));
        read.extend(form.panels.iter().map(|p| p.container));
        for n in 0..self.sweeps.sweeps.len() {
            let loaded = self.elements(n).loaded();
            read.extend(loaded);
        }
        let mut written: BTreeSet<ContainerId> = BTreeSet::new();
        written.extend(form.out_products.iter().map(|p| p.out.container));
        written.extend(&form.stored);
        let kept = self.sweeps.scalars.iter().map(|s| s.container);
        written.extend(kept.filter(|id| !form.arrays[id].local));
        if read.intersection(&written).next().is_some() {
            return None;
        }
        if read.iter().any(|id| form.arrays[id].local) {
            return None;
        }
        for id in read.union(&written) {
            let name = format!("x{}", self.params.len());
            let dtype = form.arrays[id].dtype;
            let ty = match written.contains(id) {
                true => ParamType::Out(dtype),
                false => ParamType::In(dtype),
            };
            self.names.insert(*id, name.clone());
            self.params.push(Param { name, ty });
            self.args.push(Buffer::Container(*id));
        }
        Some(())
    }

    /// Blocks that fit a multiprocessor by the registers that a thread surely needs.
    fn min_blocks(&self) -> u32 {
        let form = self.form;
        let rows: i64 = form
            .tile_products
            .iter()
            .map(|p| padded(p.rows.width) / 4)
            .sum();
        let sums = form.tile_products.len() as i64 * self.tile.cols / 2;
        let factors = form.out_products.len() as i64 * self.tile.cols / 4;
        let out = form.out_products.iter().map(|p| self.part(p.out.width) / 2);
        let all = rows + sums + factors + out.sum::<i64>();
        let draws = (0..self.sweeps.sweeps.len()).any(|n| self.elements(n).draws());
        let random = if draws { RANDOM_REGISTERS } else { 0 };
        if all + random <= 104 { 3 } else { 2 }
    }

    fn flops(&self) -> u64 {
        let form = self.form;
        let outer: i64 = form.outer().map(|l| l.size).product();
        let again = self.tile.parts as u64;
        let of_pass = |together: Range<usize>| {
            let points = (outer * self.points(together.clone())) as u64;
            let sweeps = &self.sweeps.sweeps[together];
            let into = sweeps.iter().flat_map(|s| &s.products);
            let into: u64 = into.map(|n| form.tile_products[*n].rows.width as u64).sum();
            let is_last = sweeps.iter().any(|s| s.is_last);
            let out = form.out_products.iter().filter(|_| is_last);
            let out: u64 = out.map(|p| p.out.width as u64).sum();
            points * (again * into + out)
        };
        2 * self.passes().into_iter().map(of_pass).sum::<u64>()
    }

    /// Points of rows and columns that a pass goes over, for each point of the loops around them.
    fn points(&self, together: Range<usize>) -> i64 {
        let (form, hidden) = (self.form, self.hidden(together));
        let blocks = (0..ceil(form.row.size, ROWS)).map(|n| n * ROWS);
        let points = blocks.map(|first| {
            let columns = hidden.columns(form, first..first + ROWS, self.tile.cols);
            (columns.end - columns.start) * ROWS.min(form.row.size - first)
        });
        points.sum()
    }

    /// Sweeps that go over the columns together.
    fn passes(&self) -> Vec<Range<usize>> {
        let all = 0..self.sweeps.sweeps.len();
        let mut passes: Vec<Range<usize>> = Vec::new();
        for n in all {
            match passes.last_mut().filter(|_| self.is_joined(n)) {
                Some(pass) => pass.end = n + 1,
                None => passes.push(n..n + 1),
            }
        }
        passes
    }

    /// The points that sweeps which go together can leave out.
    fn hidden(&self, together: Range<usize>) -> Hidden {
        let all = together.map(|n| Hidden::new(&self.elements(n)));
        all.reduce(Hidden::and).unwrap_or_default()
    }

    fn text(&self, name: &str) -> String {
        let mut t = CText::default();
        let params: Vec<String> = self.params.iter().map(declaration).collect();
        t.open(&format!(
            "SH_KERNEL({name}, {THREADS}, {})({})",
            self.min_blocks(),
            params.join(", ")
        ));
        for (n, panel) in self.form.panels.iter().enumerate() {
            let words = 2 * self.tile.cols * self.tile.pitch(panel);
            t.line(&format!("SH_SHARED(unsigned, panel{n}, {words});"));
        }
        self.position(&mut t);
        self.rows(&mut t);
        for n in 0..self.sweeps.scalars.len() {
            t.line(&format!("float scalar{n}[2];"));
        }
        for (q, p) in self.form.out_products.iter().enumerate() {
            let n = self.part(p.out.width) / 8;
            t.line(&format!("float out{q}[{n}][4];"));
            clear(&mut t, &format!("out{q}"), n);
        }
        t.line("int now = 0; /* the buffer of the block that is next */");
        for together in self.passes() {
            self.sweep(&mut t, together);
        }
        self.store_scalars(&mut t);
        for q in 0..self.form.out_products.len() {
            self.store(&mut t, q);
        }
        t.close();
        t.finish()
    }

    /// Which rows of which product this thread has.
    fn position(&self, t: &mut CText) {
        let form = self.form;
        let n_rows = ceil(form.row.size, ROWS);
        let index = self.index_type();
        t.line("const int lane_row = SH_LANE / 4, lane_col = SH_LANE % 4*2;");
        t.line("(void)lane_row, (void)lane_col;");
        t.line(&format!(
            "const int part = SH_BID / {n_rows} % {}; (void)part;",
            self.tile.parts
        ));
        let mut below = n_rows * self.tile.parts;
        for l in form.batch.iter().rev() {
            t.line(&format!(
                "const {index} {0} = SH_BID / {below} % {1}; (void){0};",
                l.var, l.size
            ));
            below *= l.size;
        }
        // The blocks that take longest begin first.
        let mut passes = self.passes().into_iter();
        let block = match passes.any(|together| self.hidden(together).grows()) {
            true => format!("({} - SH_BID % {n_rows})", n_rows - 1),
            false => format!("SH_BID % {n_rows}"),
        };
        t.line(&format!(
            "const int block_row = {block}*{ROWS}, first_row = block_row + SH_WARP*16 + lane_row;"
        ));
        t.line(&format!("{index} row_at[2];"));
        t.line("SH_UNROLL");
        let size = form.row.size;
        t.line(&format!(
            "for (int h = 0; h < 2; h++) row_at[h] = first_row + h*8 < {size} ? first_row + h*8 : 0;"
        ));
        t.line("(void)row_at;");
    }

    /// The lines of the thread's rows, as left factors.
    fn rows(&self, t: &mut CText) {
        let size = self.form.row.size;
        for (p, product) in self.form.tile_products.iter().enumerate() {
            let lines = &product.rows;
            let n = padded(lines.width) / 16;
            t.line(&format!("unsigned rows{p}[{n}][4];"));
            t.line("SH_UNROLL");
            t.open(&format!("for (int k = 0; k < {n}; k++)"));
            t.line("SH_UNROLL");
            t.open("for (int r = 0; r < 4; r++)");
            t.line("const int at = k*16 + r/2*8 + lane_col;");
            t.line(&format!("rows{p}[k][r] = 0;"));
            t.open(&format!(
                "if (first_row + r%2*8 < {size} && at < {})",
                lines.width
            ));
            let ctype = element_type(self.form.dtype);
            let from = self.line(lines, "row_at[r%2]");
            let name = &self.names[&lines.container];
            t.line(&format!(
                "const sh_vec<{ctype}, 2> v = sh_load<2>({name}, {from} + at);"
            ));
            t.line(&format!("rows{p}[k][r] = sh_pack(v[0], v[1]);"));
            t.close();
            t.close();
            t.close();
        }
    }

    /// The element where the line at row or column `at` begins.
    pub(super) fn line(&self, lines: &Lines, at: &str) -> String {
        let batch = self.form.outer().zip(&lines.batch);
        let mut terms: Vec<String> = batch
            .filter(|(_, k)| **k != 0)
            .map(|(l, k)| format!("{}*{k}", l.var))
            .collect();
        if lines.base != 0 {
            terms.push(lines.base.to_string());
        }
        let wide = if self.index_type() == "long" {
            "(long)"
        } else {
            ""
        };
        terms.push(format!("{wide}({at})*{}", lines.line));
        terms.join(" + ")
    }

    /// The type that holds every place of lines and every index of element-wise work.
    pub(super) fn index_type(&self) -> &'static str {
        let form = self.form;
        let rows = form.tile_products.iter().map(|p| (&p.rows, form.row.size));
        let cols = form.panels.iter().map(|p| (p, form.col.size));
        let out = form.out_products.iter().map(|p| (&p.out, form.row.size));
        let reach = |(l, size): (&Lines, i64)| {
            let batch = form.outer().zip(&l.batch);
            let batch = batch.map(|(b, k)| k * (b.size - 1));
            let within = l.line * size + l.inner * l.width;
            SymExpr::constant(l.base + within + batch.sum::<i64>())
        };
        let mut lines = rows.chain(cols).chain(out).map(reach);
        let small = lines.all(|e| is_small(&form.extents, &e));
        let elements = (0..self.sweeps.sweeps.len()).map(|n| self.elements(n).index_type());
        if small && elements.into_iter().all(|ty| ty == "int") {
            "int"
        } else {
            "long"
        }
    }

    /// One pass over the columns, of sweeps that go along with each other.
    fn sweep(&self, t: &mut CText, together: Range<usize>) {
        let cols = self.tile.cols;
        let sweeps = &self.sweeps.sweeps;
        let panels = self.panels(together.clone());
        t.open("");
        let hidden = self.hidden(together.clone());
        let (begin, end) = hidden.declare(t, self.form, ROWS, cols);
        for l in &self.form.groups {
            let (index, var) = (self.index_type(), &l.var);
            t.open(&format!(
                "for ({index} {var} = 0; {var} < {}; {var}++)",
                l.size
            ));
        }
        self.elements(together.start).before(t, &self.names);
        for (s, scalar) in together.clone().flat_map(|n| self.sweeps.reduced(n)) {
            let identity = literal(scalar.reduction.identity(DType::F32), DType::F32);
            t.line(&format!("scalar{s}[0] = scalar{s}[1] = {identity};"));
        }
        if together.len() > 1 {
            t.line("float shift[2] = {0.0f, 0.0f};");
        }
        // `now` is not the buffer of the block before, which may be the last sweep's, and all readers of `now` have
        // met at a barrier since.
        self.load(t, &panels, &begin, "now");
        t.line("sh_copy_commit();");
        t.open(&format!(
            "for (int first = {begin}; first < {end}; first += {cols})"
        ));
        t.line("sh_copy_wait<0>();");
        t.line("SH_SYNC(); /* this block is written, the one before is read */");
        t.open(&format!("if (first + {cols} < {end})"));
        self.load(t, &panels, &format!("first + {cols}"), "1 - now");
        t.close();
        t.line("sh_copy_commit();");
        for p in &sweeps[together.start].products {
            self.product(t, *p);
        }
        for n in together.clone() {
            if let Some(running) = self.elements(n).running() {
                let max = running.max;
                t.line(&format!(
                    "const float largest[2] = {{scalar{max}[0], scalar{max}[1]}};"
                ));
            }
        }
        for n in together.clone() {
            self.block(t, n);
        }
        t.line("now = 1 - now;");
        t.close();
        for n in together {
            let elements = self.elements(n);
            if elements.running().is_some() || !self.is_joined(n + 1) {
                self.combine(t, n);
            }
            if let Some(running) = elements.running() {
                running.finish(t, &elements, &self.names, &self.sums(n));
            }
        }
        self.form.groups.iter().for_each(|_| t.close());
        t.close();
    }

    fn is_joined(&self, n: usize) -> bool {
        let sweep = self.sweeps.sweeps.get(n);
        sweep.is_some_and(|s| s.is_joined)
    }

    /// Products out of tiles that a sweep sums up, with how many matrices of eight columns they have.
    fn sums(&self, n: usize) -> Vec<(usize, i64)> {
        let out = self.form.out_products.iter().enumerate();
        let all = out.filter(|_| self.sweeps.sweeps[n].is_last);
        all.map(|(q, p)| (q, self.part(p.out.width) / 8)).collect()
    }

    /// A sweep's work on one block of columns whose products are in registers.
    fn block(&self, t: &mut CText, n: usize) {
        let cols = self.tile.cols;
        let sweep = &self.sweeps.sweeps[n];
        let elements = self.elements(n);
        t.open("");
        if let Some(running) = elements.running() {
            elements.before(t, &self.names);
            running.correct(t, &self.sums(n));
        }
        if sweep.is_last {
            for q in 0..self.form.out_products.len() {
                t.line(&format!("unsigned factor{q}[{}][4];", cols / 16));
            }
        }
        elements.at_each(t, &self.names, cols);
        if self.is_joined(n + 1) {
            self.combine(t, n);
        }
        if sweep.is_last {
            for (q, p) in elements.plain_factors() {
                self.plain_factor(t, q, p);
            }
            for q in 0..self.form.out_products.len() {
                self.out_product(t, q);
            }
        }
        t.close();
    }

    /// Combines the numbers of rows of the four lanes that share a row.
    fn combine(&self, t: &mut CText, n: usize) {
        for (s, scalar) in self.sweeps.reduced(n) {
            let to = format!("scalar{s}[h]");
            let combine = scalar.reduction.combine();
            let made = scalar::binary(combine, &to, "other", DType::F32);
            t.line("SH_UNROLL");
            t.open("for (int h = 0; h < 2; h++)");
            t.line("SH_UNROLL");
            t.open("for (int mask = 1; mask < 4; mask *= 2)");
            t.line(&format!("const float other = sh_shuffle_xor({to}, mask);"));
            t.line(&format!("{to} = {made};"));
            t.close();
            t.close();
        }
    }

    /// What a sweep reads at columns.
    fn panels(&self, together: Range<usize>) -> BTreeSet<usize> {
        let products = &self.form.tile_products;
        let mut panels = BTreeSet::new();
        for sweep in &self.sweeps.sweeps[together] {
            panels.extend(sweep.products.iter().map(|p| products[*p].panel));
            if sweep.is_last {
                panels.extend(self.form.out_products.iter().map(|p| p.panel));
            }
        }
        panels
    }

    /// Begins the copies of the columns from `first` on to the buffer `to`.
    fn load(&self, t: &mut CText, panels: &BTreeSet<usize>, first: &str, to: &str) {
        let (cols, size) = (self.tile.cols, self.form.col.size);
        for n in panels {
            let lines = &self.form.panels[*n];
            let held = self.tile.held(lines);
            let (pitch, across) = (self.tile.pitch(lines), held / VECTOR);
            let items = cols * across;
            t.line("SH_UNROLL");
            t.open(&format!(
                "for (int i = 0; i < {}; i++)",
                ceil(items, THREADS)
            ));
            t.line(&format!("const int item = i*{THREADS} + SH_TID;"));
            t.line(&format!(
                "const int line = item / {across}, at = item % {across}*{VECTOR};"
            ));
            t.line(&format!("const int place = {first} + line;"));
            let mut within = format!("place < {size}");
            if held != lines.width {
                within += &format!(" && at < {}", lines.width);
            }
            let from = self.line(lines, "place");
            let name = &self.names[&lines.container];
            let guard = match items % THREADS {
                0 => String::new(),
                _ => format!("if (item < {items}) "),
            };
            t.line(&format!(
                "{guard}sh_copy_async<{VECTOR}>({name}, {from} + at, {within}, panel{n}, ({to})*{} + \
                 line*{pitch} + at/2);",
                cols * pitch
            ));
            t.close();
        }
    }

    /// One product into tiles, of 16 rows and the block's columns.
    fn product(&self, t: &mut CText, p: usize) {
        let product = &self.form.tile_products[p];
        let panel = &self.form.panels[product.panel];
        let (cols, pitch) = (self.tile.cols, self.tile.pitch(panel));
        t.line(&format!("float sums{p}[{}][4];", cols / 8));
        clear(t, &format!("sums{p}"), cols / 8);
        t.line("SH_UNROLL");
        t.open(&format!(
            "for (int k = 0; k < {}; k++)",
            padded(panel.width) / 16
        ));
        t.line("SH_UNROLL");
        t.open(&format!("for (int j = 0; j < {}; j++)", cols / 16));
        let lane = format!("(SH_LANE % 8 + SH_LANE / 16*8)*{pitch} + SH_LANE / 8 % 2*4");
        t.line("unsigned y[4];");
        t.line(&format!(
            "sh_ldmatrix(y, panel{}, now*{} + {lane} + j*{} + k*8);",
            product.panel,
            cols * pitch,
            16 * pitch
        ));
        self.multiply(t, &format!("sums{p}"), &format!("rows{p}[k]"));
        t.close();
        t.close();
    }

    /// Two warp products of one left factor and the four matrices in `y`.
    fn multiply(&self, t: &mut CText, sums: &str, factor: &str) {
        let mma = match self.form.dtype {
            DType::BF16 => "sh_mma_bf16",
            _ => "sh_mma_f16",
        };
        t.line("SH_UNROLL");
        t.open("for (int h = 0; h < 2; h++)");
        t.line("const unsigned pair[2] = {y[h*2], y[h*2 + 1]};");
        t.line(&format!("{mma}({sums}[j*2 + h], {factor}, pair);"));
        t.close();
    }

    fn plain_factor(&self, t: &mut CText, q: usize, p: usize) {
        let ctype = element_type(self.form.dtype);
        t.line("SH_UNROLL");
        t.open(&format!("for (int j = 0; j < {}; j++)", self.tile.cols / 8));
        let half = |at: usize| format!("sh_from_float<{ctype}>(sums{p}[j][{at}])");
        for h in 0..2 {
            t.line(&format!(
                "factor{q}[j/2][j%2*2 + {h}] = sh_pack({}, {});",
                half(2 * h),
                half(2 * h + 1)
            ));
        }
        t.close();
    }

    /// One product out of tiles, of 16 rows and the block's part of the result's columns.
    fn out_product(&self, t: &mut CText, q: usize) {
        let product = &self.form.out_products[q];
        let panel = &self.form.panels[product.panel];
        let (cols, pitch) = (self.tile.cols, self.tile.pitch(panel));
        let part = self.part(panel.width);
        t.line("SH_UNROLL");
        t.open(&format!("for (int k = 0; k < {}; k++)", cols / 16));
        t.line("SH_UNROLL");
        t.open(&format!("for (int j = 0; j < {}; j++)", part / 16));
        let lane = format!("(SH_LANE % 8 + SH_LANE / 8 % 2*8)*{pitch} + SH_LANE / 16*4");
        t.line("unsigned y[4];");
        t.line(&format!(
            "sh_ldmatrix_trans(y, panel{}, now*{} + {lane} + k*{} + part*{} + j*8);",
            product.panel,
            cols * pitch,
            16 * pitch,
            part / 2
        ));
        self.multiply(t, &format!("out{q}"), &format!("factor{q}[k]"));
        t.close();
        t.close();
    }
}

fn clear(t: &mut CText, name: &str, n: i64) {
    t.line("SH_UNROLL");
    t.open(&format!("for (int i = 0; i < {n}; i++)"));
    t.line("SH_UNROLL");
    t.line(&format!("for (int e = 0; e < 4; e++) {name}[i][e] = 0.0f;"));
    t.close();
}
