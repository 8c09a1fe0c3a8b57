//! Matrix products and convolutions: the parts of a contraction, the memory they share, and the launches
//! that run them. The launches' bodies are in `panels` (packing), `items` (the main one) and `combine`.

use super::access::Problem;
use super::blocking::{ContractionPlan, Dim, VectorSource, Wishes, block_size, div_up, shape};
use super::choice::{Chosen, choose};
use super::cost;
use super::gather::{GatherForm, ZeroFill};
use super::groups::together;
use super::open::OpenDims;
use super::text::{CText, Element, Vector, affine, preamble};
use super::{
    BlockingChoice, ContractionTarget, EmittedContraction, Hooks, Launch, NoFastForm,
    PlanSignature, Roles, roles,
};
use graph::Blocking;

/// One gather-form part on its way to text.
pub(super) struct GatherPart<'a> {
    pub(super) plan: ContractionPlan,
    /// Prefix of its static functions.
    pub(super) prefix: String,
    pub(super) hooks: &'a Hooks,
    /// Numbers before its region of the shared scratch.
    pub(super) shared_at: i64,
    /// Numbers between the rows of a block of results, if only the epilogue reads them: they then stay in the thread's
    /// scratch.
    pub(super) pitch: Option<i64>,
}

/// Most bytes of a block of results in a thread's scratch.
const BLOCK_BYTES: i64 = 1 << 20;
/// Numbers between two rows of such a block beside those of the rows, so that rows lie in different cache sets.
const ROW_GAP: i64 = 16;

const ALIGNED_NUMBERS: i64 = 16;

fn align(numbers: i64) -> i64 {
    (numbers + ALIGNED_NUMBERS - 1) / ALIGNED_NUMBERS * ALIGNED_NUMBERS
}

/// A contraction by its definition, cut, before its text is written.
pub(super) struct Planned<'a> {
    name: &'a str,
    form: &'a GatherForm,
    hooks: &'a Hooks,
    vector: Vector,
    parts: Vec<GatherPart<'a>>,
    cuts: Vec<[i64; 8]>,
    /// Other ways to cut the first part.
    first_others: Vec<([i64; 8], f64)>,
    choices: Vec<PlanSignature>,
    /// Numbers of the shared scratch.
    shared: i64,
    /// Nanoseconds that it is predicted to take.
    pub(super) predicted_ns: f64,
    /// Nanoseconds of the cheapest plans, which a request or a text of other sizes may set aside.
    pub(super) least_ns: f64,
}

/// Chooses how to cut each part.
pub(super) fn plan<'a>(
    name: &'a str,
    form: &'a GatherForm,
    hooks: &'a Hooks,
    vector: Vector,
    target: &ContractionTarget,
) -> Result<Planned<'a>, NoFastForm> {
    let mut planned = Planned {
        name,
        form,
        hooks,
        vector,
        parts: Vec::new(),
        cuts: Vec::new(),
        first_others: Vec::new(),
        choices: Vec::new(),
        shared: 0,
        predicted_ns: 0.0,
        least_ns: 0.0,
    };
    let requested = target.requested.blocking.as_ref();
    let requested = requested.filter(|blocking| blocking.parts().len() == form.parts.len());
    for (i, problem) in form.parts.iter().enumerate() {
        let shape = shape(problem)?;
        let (prologue_a, prologue_b) = sides(hooks, shape.swapped);
        let known = target.known.iter().filter(|k| k.is_of_part(i));
        let known: Vec<_> = known.cloned().collect();
        let open = OpenDims::new(&shape, &known);
        let shape = match open.has_columns(&shape) {
            true => shape,
            false => together(
                shape,
                &problem.dims,
                vector.lanes,
                prologue_b.is_some(),
                hooks.follow(),
            ),
        };
        let wishes = Wishes {
            vector,
            threads: target.threads.max(1),
            prologue_a: prologue_a.is_some(),
            prologue_b: prologue_b.is_some(),
            epilogue: hooks.follow(),
            sums: hooks.sums.is_some(),
            machine: target.machine,
            known,
            open,
            varies: target.requested.varies,
            requested: requested.and_then(|blocking| blocking.parts().get(i).copied()),
            n_others: target.requested.n_others,
        };
        let Chosen {
            plan,
            cut,
            others,
            choice,
            least_ns,
        } = choose(&shape, &wishes);
        planned.choices.push(choice.of_part(i));
        planned.predicted_ns += cost::ns(cost::cost(&plan, &wishes), &wishes);
        planned.least_ns += least_ns;
        planned.cuts.push(cut);
        if i == 0 {
            planned.first_others = others;
        }
        let mut part = GatherPart {
            plan,
            prefix: format!("{name}_p{i}"),
            hooks,
            shared_at: planned.shared,
            pitch: None,
        };
        part.pitch = part.local_pitch();
        planned.shared += part.packed_numbers() + part.result_numbers();
        planned.parts.push(part);
    }
    Ok(planned)
}

impl Planned<'_> {
    /// How it is cut, and the best other ways. If there are several parts, other ways change only the first.
    pub(super) fn choice(&self) -> BlockingChoice {
        let others = self.first_others.iter();
        BlockingChoice {
            others: others
                .map(|(cut, ns)| (with_first(&self.cuts, *cut), *ns as u64))
                .collect(),
            blocking: Blocking::Cuts(self.cuts.clone()),
        }
    }

    /// Writes all parts under common launches.
    pub(super) fn write(&self) -> EmittedContraction {
        let (parts, element) = (self.parts.as_slice(), self.vector.element);
        let mut t = CText::default();
        t.raw(&preamble(self.vector));
        for part in parts {
            part.functions(&mut t);
        }
        let mut launches = Vec::new();
        let mut launch = |suffix: &str, stage: &str, wanted: fn(&GatherPart) -> bool| {
            let called = parts.iter().filter(|p| wanted(p));
            let calls: Vec<&str> = called.map(|p| p.prefix.as_str()).collect();
            let zeros: &[ZeroFill] = match stage {
                "main" => &self.form.zeros,
                _ => &[],
            };
            let symbol = format!("{}{suffix}", self.name);
            launch_calls(
                &mut t,
                &mut launches,
                &symbol,
                &calls,
                stage,
                (zeros, element),
            );
        };
        launch("_pack", "pack", |p| p.packs());
        launch("", "main", |_| true);
        launch("_combine", "combine", |p| p.plan.to_scratch);
        let thread = parts.iter().map(GatherPart::thread_numbers).max();
        EmittedContraction {
            source: t.finish(),
            launches,
            shared_scratch_bytes: (self.shared * element.bytes()) as usize,
            thread_scratch_bytes: (thread.unwrap_or(0) * element.bytes()) as usize,
            flops: 0,
            predicted_ns: self.predicted_ns as u64,
            refusal: None,
            path: parts.first().map_or("zero", GatherPart::path),
            products: element.dtype(),
            takes_prologues: true,
            cuts: Some(self.choice()),
            choices: self.choices.clone(),
            sum_slots: match parts {
                [p] if self.hooks.sums.is_some() && !p.plan.to_scratch => {
                    p.plan.m_cut.count(&p.plan.shape.m)
                }
                _ => 0,
            },
            pitch: parts.first().and_then(|p| p.pitch),
            finishes_in_blocks: parts.iter().all(|p| !p.plan.to_scratch),
            roles: parts
                .first()
                .map(|p| p.roles(&self.form.parts[0]))
                .unwrap_or_default(),
        }
    }
}

fn with_first(cuts: &[[i64; 8]], first: [i64; 8]) -> Blocking {
    let rest = cuts.iter().skip(1).copied();
    Blocking::Cuts(std::iter::once(first).chain(rest).collect())
}

pub(super) fn sides(hooks: &Hooks, swapped: bool) -> (Option<&str>, Option<&str>) {
    let (a, b) = (hooks.prologue_a.as_deref(), hooks.prologue_b.as_deref());
    if swapped { (b, a) } else { (a, b) }
}

/// A launch that calls the functions `PREFIX_stage` in order and writes zeros.
pub(super) fn launch_calls(
    t: &mut CText,
    launches: &mut Vec<Launch>,
    symbol: &str,
    calls: &[&str],
    stage: &str,
    zeros: (&[ZeroFill], Element),
) {
    let (zeros, element) = zeros;
    if calls.is_empty() && zeros.is_empty() {
        return;
    }
    t.line(format!(
        "void {symbol}(void *const *buf, void *scratch, long tid, long nt) {{"
    ));
    t.line("(void)scratch;");
    for prefix in calls {
        t.line(format!("{prefix}_{stage}(buf, scratch, tid, nt);"));
    }
    for z in zeros {
        zero_fill(t, z, element);
    }
    t.line("}");
    launches.push(Launch {
        symbol: symbol.to_string(),
    });
}

/// Writes zeros to a lattice of output positions; threads divide its largest axis.
pub fn zero_fill(t: &mut CText, z: &ZeroFill, element: Element) {
    let mut axes = z.axes.clone();
    axes.sort_by_key(|a| std::cmp::Reverse(a.1));
    axes.retain(|a| a.0 > 1);
    let widest = (0..axes.len())
        .rev()
        .max_by_key(|&i| (i + 1 < axes.len(), axes[i].0));
    t.line("{");
    t.line(format!("{} *O = buf[2];", element.c_type()));
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
pub(super) fn decode(t: &mut CText, dims: &[Dim], index: &str, prefix: &str) -> Vec<String> {
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

pub(super) fn strided(vars: &[String], dims: &[Dim], of: fn(&Dim) -> i64) -> Vec<(String, i64)> {
    vars.iter().cloned().zip(dims.iter().map(of)).collect()
}

impl GatherPart<'_> {
    pub(super) fn packs(&self) -> bool {
        self.plan.source == VectorSource::Shared
    }

    pub(super) fn path(&self) -> &'static str {
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

    /// Dims by role; groups that lie side by side in a panel are columns.
    fn roles(&self, problem: &Problem) -> Roles {
        let shape = &self.plan.shape;
        let mut roles = roles(problem, shape.swapped);
        if let Some(d) = &shape.diagonal {
            roles.batch.retain(|&id| id != d.id);
            roles.n.insert(0, d.id);
        }
        roles
    }

    /// The epilogue's batch index and its first column, for batch index `bt`.
    pub(super) fn epilogue_batch(&self) -> (String, String) {
        match &self.plan.shape.diagonal {
            Some(d) => (
                format!("bt/{}L", d.panels),
                format!("bt%{}L*{}L + ", d.panels, d.together * d.columns),
            ),
            None => ("bt".to_string(), String::new()),
        }
    }

    /// The C type of its numbers.
    pub(super) fn number(&self) -> &'static str {
        self.plan.vector.element.c_type()
    }

    /// How many bytes `numbers` numbers take.
    pub(super) fn bytes(&self, numbers: i64) -> i64 {
        numbers * self.plan.vector.element.bytes()
    }

    pub(super) fn batches(&self) -> i64 {
        self.plan.shape.batch.iter().map(|d| d.size).product()
    }

    pub(super) fn m_total(&self) -> i64 {
        self.plan.shape.m.iter().map(|d| d.size).product()
    }

    pub(super) fn packed_numbers(&self) -> i64 {
        if self.packs() {
            align(self.batches() * self.plan.panels() * self.plan.k_total() * self.plan.nr())
        } else {
            0
        }
    }

    /// Columns of the results in shared scratch, which lie there panel by panel.
    pub(super) fn result_row(&self) -> i64 {
        self.plan.panels() * self.plan.nr()
    }

    pub(super) fn result_numbers(&self) -> i64 {
        let all = self.plan.parts * self.batches() * self.m_total() * self.result_row();
        if self.plan.to_scratch { align(all) } else { 0 }
    }

    pub(super) fn chunk_panels(&self) -> i64 {
        (self.plan.panels() + self.plan.n_chunks - 1) / self.plan.n_chunks
    }

    pub(super) fn staged_numbers(&self) -> i64 {
        self.plan.staging.as_ref().map_or(0, |s| align(s.numbers))
    }

    /// Numbers of the thread's scratch before a block of results.
    pub(super) fn operand_numbers(&self) -> i64 {
        let panels = self.chunk_panels() * self.plan.k_block() * self.plan.nr();
        let packed = match self.plan.source {
            VectorSource::Thread => align(panels),
            _ => 0,
        };
        self.staged_numbers() + packed
    }

    pub(super) fn thread_numbers(&self) -> i64 {
        let results = self.pitch.map_or(0, |pitch| self.block_rows() * pitch);
        self.operand_numbers() + results
    }

    /// Most rows in a block of results.
    fn block_rows(&self) -> i64 {
        let m = self.plan.shape.m.iter();
        m.map(|d| block_size(&self.plan, d.id)).product()
    }

    /// [`GatherPart::pitch`] of the plan.
    fn local_pitch(&self) -> Option<i64> {
        let (p, hooks) = (&self.plan, self.hooks);
        let consumed = hooks.consumes && hooks.epilogue.is_some() && hooks.sums.is_none();
        let in_blocks = !p.to_scratch && p.parts == 1 && p.shape.diagonal.is_none();
        let pitch = self.chunk_panels() * p.nr() + ROW_GAP;
        let fits = self.bytes(self.block_rows() * pitch) <= BLOCK_BYTES;
        (consumed && in_blocks && fits).then_some(pitch)
    }

    pub(super) fn buffers(&self) -> (usize, usize) {
        if self.plan.shape.swapped {
            (1, 0)
        } else {
            (0, 1)
        }
    }

    pub(super) fn functions(&self, t: &mut CText) {
        t.line(format!("/* {} */", self.plan.summary()));
        if self.plan.source != VectorSource::Direct {
            self.panel_function(t, self.plan.nr(), Some(self.plan.nr()), "panel");
            if let Some(valid) = self.plan.tail() {
                self.panel_function(t, self.tail_width(valid), Some(valid), "panel_tail");
            } else if self.plan.open.columns {
                self.panel_function(t, self.plan.nr(), None, "panel_tail");
            }
        }
        if self.packs() {
            self.pack_launch(t);
        }
        if let Some(s) = &self.plan.staging {
            let prologue = sides(self.hooks, self.plan.shape.swapped).0;
            let side = self.buffers().0;
            let keep = self.hooks.keeps[side].as_deref();
            let name = format!("{}_stage", self.prefix);
            s.emit(t, &name, side, prologue.map(|f| (f, keep)));
        }
        let kernels = self.micro_kernels(t);
        self.main_function(t, &kernels);
        if self.plan.to_scratch {
            self.combine_function(t);
        }
    }

    pub(super) fn tail_width(&self, valid: i64) -> i64 {
        div_up(valid, self.plan.vector.lanes) * self.plan.vector.lanes
    }

    /// Reduction loops of one block: outermost first, the cut one with a run-time count.
    pub(super) fn block_levels(&self) -> Vec<(&Dim, bool, i64)> {
        let k = &self.plan.shape.k[self.plan.k_cut.depth..];
        let inner = |j: usize| k[j + 1..].iter().map(|d| d.size).product();
        k.iter()
            .enumerate()
            .map(|(j, d)| (d, j == 0 && self.cut_reduction(), inner(j)))
            .collect()
    }

    pub(super) fn cut_reduction(&self) -> bool {
        self.plan.k_cut.count(&self.plan.shape.k) > 1 && self.plan.k_cut.blocks > 1
    }
}
