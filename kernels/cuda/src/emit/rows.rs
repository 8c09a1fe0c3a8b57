//! The text of a row kernel.
//!
//! Owns the frame around the points: loops over a block's share, registers that live across phases,
//! barriers, and the parts of sums that a block leaves behind.

use super::leaf::LeafText;
use super::survey::{Survey, around, decoded, occurs};
use crate::schedule::{Home, Kept, Leaf, Phase, Rows, loops::points};
use crate::{element_type, value_text};
use graph::{ContainerId, Reduction};
use kernels::emit::index::Loop;
use kernels::emit::scalar;
use kernels::emit::text::CText;
use kernels::emit::values::{Op, Values};
use std::collections::BTreeSet;

/// Steps that are unrolled although no registers need it.
const FREE_STEPS: i64 = 8;

/// See the module.
pub(super) struct RowsText<'a> {
    pub(super) survey: &'a Survey<'a>,
    pub(super) rows: &'a Rows,
}

/// Memory touched since the last barrier, as far as other threads may meet it.
#[derive(Default)]
struct Touched {
    read: BTreeSet<ContainerId>,
    written: BTreeSet<ContainerId>,
}

impl<'a> RowsText<'a> {
    pub(super) fn threads(&self) -> i64 {
        self.rows.group * self.rows.groups
    }

    pub(super) fn index(&self) -> &'static str {
        self.survey.s.index
    }

    fn turns(&self) -> i64 {
        let at_once = self.rows.parts * self.rows.groups;
        (points(&self.rows.points) + at_once - 1) / at_once
    }

    /// Whether groups may have no point of their own.
    fn some_idle(&self) -> bool {
        points(&self.rows.points) % self.rows.groups != 0
    }

    /// The kernel's body.
    pub(super) fn body(&self) -> String {
        let mut point = CText::default();
        self.point(&mut point);
        let point = point.finish();
        let mut inside = CText::default();
        self.kept_by_all(&mut inside);
        self.part_registers(&mut inside);
        self.over_points(&point, &mut inside);
        self.leave_parts(&mut inside);
        let inside = inside.finish();
        let mut t = CText::default();
        let index = self.index();
        let rows = self.rows;
        let block = match (rows.blocks.is_empty(), rows.parts) {
            (true, _) => None,
            (false, 1) => Some("SH_BID".to_string()),
            (false, parts) => Some(format!("SH_BID / {parts}")),
        };
        if occurs("part", &inside) {
            let part = match (rows.blocks.is_empty(), rows.parts) {
                (_, 1) => "0".to_string(),
                (true, _) => "SH_BID".to_string(),
                (false, parts) => format!("SH_BID % {parts}"),
            };
            t.line(&format!("const {index} part = {part};"));
        }
        if occurs("lane", &inside) {
            let lane = match rows.groups {
                1 => "SH_TID".to_string(),
                _ => format!("SH_TID % {}", rows.group),
            };
            t.line(&format!("const {index} lane = {lane};"));
        }
        if let Some(block) = block {
            declare(
                index,
                &decoded(&rows.blocks, &format!("({block})")),
                &inside,
                &mut t,
            );
        }
        t.lines(&inside);
        t.finish()
    }

    /// The loop over a block's share of the points.
    fn over_points(&self, body: &str, t: &mut CText) {
        let (index, rows) = (self.index(), self.rows);
        let n = points(&rows.points);
        if rows.points.is_empty() {
            return t.lines(body);
        }
        let from = match rows.groups {
            1 => "part".to_string(),
            r => format!("part * {r}"),
        };
        let several = self.turns() > 1;
        if several {
            let by = rows.parts * rows.groups;
            t.open(&format!(
                "for ({index} first = {from}; first < {n}; first += {by})"
            ));
        } else {
            t.line(&format!("const {index} first = {from};"));
        }
        let own = match rows.groups {
            1 => "first".to_string(),
            _ => format!("first + SH_TID / {}", rows.group),
        };
        if self.some_idle() {
            t.line(&format!("const int live = {own} < {n};"));
            t.line(&format!("const {index} point = live ? {own} : {};", n - 1));
        } else {
            t.line(&format!("const {index} point = {own};"));
        }
        declare(index, &decoded(&rows.points, "point"), body, t);
        t.lines(body);
        if several {
            t.close();
        }
    }

    /// What a group does at one point.
    fn point(&self, t: &mut CText) {
        for (n, kept) in self.rows.kept.iter().enumerate() {
            if kept.class.is_none() && !kept.hoisted {
                self.kept_number(n, kept, t);
            }
        }
        for (id, home) in &self.rows.homes {
            let ctype = value_text::value_type(self.survey.array(*id).dtype);
            match home {
                Home::Shared => {}
                Home::Uniform => t.line(&format!("{ctype} h{};", id.0)),
                Home::Registers(class) => {
                    t.line(&self.array_of(*class, ctype, &format!("h{}", id.0)));
                }
            }
        }
        let serial = &self.rows.serial;
        for l in serial {
            t.open(&self.for_loop(l));
        }
        let mut touched = Touched::default();
        let again = self.turns() > 1 || !serial.is_empty();
        if again && self.has_hazards() {
            t.line(self.barrier());
        }
        self.fill_locals(&mut touched, t);
        self.phases(&self.rows.phases, &around(self.rows), &mut touched, t);
        serial.iter().for_each(|_| t.close());
    }

    /// Whether threads meet what others wrote in memory.
    fn has_hazards(&self) -> bool {
        let read = &self.survey.loaded;
        let mut written = self.survey.written.iter();
        written.any(|id| read.contains(id) && self.in_memory(*id))
    }

    fn in_memory(&self, id: ContainerId) -> bool {
        matches!(self.survey.home(id), None | Some(Home::Shared))
    }

    fn barrier(&self) -> &'static str {
        match self.rows.group {
            ..=32 if self.rows.groups > 1 => "SH_WARP_SYNC();",
            _ => "SH_SYNC();",
        }
    }

    fn for_loop(&self, l: &Loop) -> String {
        let index = self.index();
        format!("for ({index} {0} = 0; {0} < {1}; ++{0})", l.var, l.size)
    }

    /// `sh_vec<float, 4> h3[2];`
    pub(super) fn array_of(&self, class: usize, ctype: &str, name: &str) -> String {
        let c = &self.rows.classes[class];
        match c.vector {
            1 => format!("{ctype} {name}[{}];", c.steps),
            v => format!("sh_vec<{ctype}, {v}> {name}[{}];", c.steps),
        }
    }

    fn fill_locals(&self, touched: &mut Touched, t: &mut CText) {
        for (id, reduction) in &self.survey.fills {
            let array = self.survey.array(*id);
            if !array.local || !self.in_memory(*id) {
                continue;
            }
            let identity = scalar::literal(reduction.identity(array.dtype), array.dtype);
            t.line(&format!(
                "for ({} p0 = SH_TID; p0 < {}; p0 += {}) {}[p0] = {identity};",
                self.index(),
                array.len,
                self.threads(),
                self.survey.names[id]
            ));
            touched.written.insert(*id);
        }
    }

    fn phases(&self, phases: &[Phase], around: &[Loop], touched: &mut Touched, t: &mut CText) {
        for phase in phases {
            match phase {
                Phase::Leaf(leaf) => self.leaf(leaf, around, touched, t),
                Phase::Repeat(loops, inner) => {
                    let mut around = around.to_vec();
                    around.extend(loops.iter().cloned());
                    loops.iter().for_each(|l| t.open(&self.for_loop(l)));
                    // The repetition before may have read and written any of it.
                    let all = || self.survey.names.keys().copied().collect();
                    *touched = Touched {
                        read: all(),
                        written: all(),
                    };
                    self.phases(inner, &around, touched, t);
                    loops.iter().for_each(|_| t.close());
                }
            }
        }
    }

    /// A barrier if the leaf meets what others did since the last one.
    fn synchronize(&self, values: &Values, touched: &mut Touched, t: &mut CText) {
        let shared = |id: &ContainerId| {
            self.survey.written.contains(id)
                && self.survey.loaded.contains(id)
                && self.in_memory(*id)
        };
        let loads = values.values.iter().filter_map(|v| match &v.op {
            Op::Load(a) => Some(a.container),
            _ => None,
        });
        let read: BTreeSet<_> = loads.filter(shared).collect();
        let effects = values.effects.iter().map(|e| e.address.container);
        let written: BTreeSet<_> = effects.filter(shared).collect();
        let meets = |a: &BTreeSet<_>, b: &BTreeSet<_>| a.intersection(b).next().is_some();
        if meets(&read, &touched.written)
            || meets(&written, &touched.written)
            || meets(&written, &touched.read)
        {
            t.line(self.barrier());
            *touched = Touched::default();
        }
        touched.read.extend(read);
        touched.written.extend(written);
    }

    fn leaf(&self, leaf: &Leaf, around: &[Loop], touched: &mut Touched, t: &mut CText) {
        let values = self.survey.values(leaf, around);
        self.synchronize(&values, touched, t);
        for (n, kept) in self.rows.kept.iter().enumerate() {
            if kept.class.is_some() && !kept.hoisted && self.is_first_use(kept, leaf) {
                self.kept_vectors(n, kept, t);
            }
        }
        let mut text = LeafText::new(self.survey, leaf, around, &values);
        let leader = match (self.rows.group, self.some_idle()) {
            (1, false) => "",
            (1, true) => "if (live) ",
            (_, false) => "if (lane == 0) ",
            (_, true) => "if (lane == 0 && live) ",
        };
        text.once = leader.to_string();
        t.open("");
        if leaf.spread.is_empty() {
            let mut body = CText::default();
            text.point(&mut body);
            t.lines(&body.finish());
            return t.close();
        }
        let sums = text.sums();
        for (at, (r, d, all)) in sums.iter().enumerate() {
            let identity = scalar::literal(r.identity(*d), *d);
            let each = vec![identity; all.len()].join(", ");
            let ctype = scalar::value_type(*d);
            t.line(&format!("{ctype} b{at}[{}] = {{{each}}};", all.len()));
        }
        self.each_vector(leaf, &mut text, t);
        if self.rows.group > 1 {
            for (at, (r, ..)) in sums.iter().enumerate() {
                let (f, group, threads) = (function(*r), self.rows.group, self.threads());
                t.line(&format!("sh_group_{f}<{group}, {threads}>(b{at});"));
            }
        }
        text.flush_groups(t);
        t.close();
    }

    /// The loop over a thread's vectors of a leaf.
    fn each_vector(&self, leaf: &Leaf, text: &mut LeafText, t: &mut CText) {
        let steps = self.steps(leaf);
        text.step = if steps == Some(1) { "0" } else { "step" }.to_string();
        let mut body = CText::default();
        text.point(&mut body);
        self.vectors(leaf, steps, &body.finish(), t);
    }

    /// Steps that are unrolled.
    fn steps(&self, leaf: &Leaf) -> Option<i64> {
        let class = leaf.class?;
        let steps = self.rows.classes[class].steps;
        let strided = self.rows.points.is_empty() && self.rows.parts > 1;
        let kept = self.rows.kept.iter().any(|k| k.class == Some(class));
        let homes = self.rows.homes.values();
        let at_home = homes.into_iter().any(|h| *h == Home::Registers(class));
        let parts = self.parts();
        let summed = parts
            .values()
            .any(|p| p.leaf.class == Some(class) && p.moves);
        let needed = kept || at_home || summed;
        (!strided && (needed || steps <= FREE_STEPS)).then_some(steps)
    }

    /// Runs `body` for each vector of a leaf that is the thread's.
    fn vectors(&self, leaf: &Leaf, steps: Option<i64>, body: &str, t: &mut CText) {
        let (index, rows, v) = (self.index(), self.rows, leaf.vector);
        let n = points(&leaf.spread);
        let g = rows.group;
        let times = |text: &str, by: i64| match by {
            1 => text.to_string(),
            by => format!("{text} * {by}"),
        };
        let mut variables = decoded(&leaf.spread, "p0");
        if v > 1
            && let Some(last) = variables.last_mut()
        {
            last.0 = crate::schedule::BASE.to_string();
        }
        let live = self.some_idle();
        let Some(steps) = steps else {
            let strided = rows.points.is_empty() && rows.parts > 1;
            let (from, by) = match strided {
                true => (
                    times(&format!("(part * {g} + lane)"), v),
                    rows.parts * g * v,
                ),
                false => (times("lane", v), g * v),
            };
            let from = if live {
                format!("live ? {from} : {n}")
            } else {
                from
            };
            t.open(&format!("for ({index} p0 = {from}; p0 < {n}; p0 += {by})"));
            declare(index, &variables, body, t);
            t.lines(body);
            return t.close();
        };
        if steps > 1 {
            t.line("SH_UNROLL");
            t.open(&format!("for (int step = 0; step < {steps}; ++step)"));
            t.line(&format!(
                "const {index} p0 = {};",
                times(&format!("(step * {g} + lane)"), v)
            ));
        } else {
            t.line(&format!("const {index} p0 = {};", times("lane", v)));
        }
        let bound = (steps * g * v != n).then(|| format!("p0 < {n}"));
        let live = live.then(|| "live".to_string());
        let guard: Vec<String> = bound.into_iter().chain(live).collect();
        if !guard.is_empty() {
            t.open(&format!("if ({})", guard.join(" && ")));
        }
        declare(index, &variables, body, t);
        t.lines(body);
        if !guard.is_empty() {
            t.close();
        }
        if steps > 1 {
            t.close();
        }
    }

    /// Leaves of the kernel that are not repeated, in order.
    pub(super) fn leaves(&self) -> impl Iterator<Item = &'a Leaf> {
        self.rows.phases.iter().filter_map(|p| match p {
            Phase::Leaf(leaf) => Some(leaf),
            Phase::Repeat(..) => None,
        })
    }

    fn is_first_use(&self, kept: &Kept, leaf: &Leaf) -> bool {
        let first = self.leaves().find(|l| self.position(kept, l).is_some());
        first.is_some_and(|l| std::ptr::eq(l, leaf))
    }

    /// The position of the kept load among the leaf's values.
    fn position(&self, kept: &Kept, leaf: &Leaf) -> Option<usize> {
        if kept.class.is_some() && kept.class != leaf.class {
            return None;
        }
        let values = self.survey.values(leaf, &around(self.rows));
        let load = |v: &kernels::emit::values::Value| v.op == Op::Load(kept.address.clone());
        values.values.iter().position(load)
    }

    /// The leaf where a kept load is first met, its values and the load's place there.
    fn met(&self, kept: &Kept) -> Option<(&'a Leaf, Values, usize)> {
        let leaf = self.leaves().find(|l| self.position(kept, l).is_some())?;
        let values = self.survey.values(leaf, &around(self.rows));
        let n = self.position(kept, leaf)?;
        Some((leaf, values, n))
    }

    fn kept_number(&self, n: usize, kept: &Kept, t: &mut CText) {
        let Some((_, values, at)) = self.met(kept) else {
            return;
        };
        let ctype = value_text::value_type(values.values[at].dtype);
        let load = self.survey.text(&values).computation(at);
        t.line(&format!("const {ctype} u{n} = {load};"));
    }

    /// Loads all of a thread's vectors before any is used.
    fn kept_vectors(&self, n: usize, kept: &Kept, t: &mut CText) {
        let (Some((leaf, values, at)), Some(class)) = (self.met(kept), kept.class) else {
            return;
        };
        let mut text = LeafText::new(self.survey, leaf, &around(self.rows), &values);
        let steps = self.rows.classes[class].steps;
        text.step = if steps == 1 { "0" } else { "step" }.to_string();
        let dtype = self.survey.array(kept.address.container).dtype;
        t.line(&self.array_of(class, element_type(dtype), &format!("l{n}")));
        let load = match leaf.vector {
            1 => text.text().computation(at),
            _ => text.load_vector(&kept.address),
        };
        let body = format!("l{n}[{}] = {load};\n", text.step);
        t.open("");
        self.vectors_always(leaf, Some(steps), &body, kept.hoisted, t);
        t.close();
    }

    /// Like [`Self::vectors`]. With `always`, the text tests no group for being alive: before the points, every group
    /// is.
    pub(super) fn vectors_always(
        &self,
        leaf: &Leaf,
        steps: Option<i64>,
        body: &str,
        always: bool,
        t: &mut CText,
    ) {
        let mut inside = CText::default();
        self.vectors(leaf, steps, body, &mut inside);
        let text = inside.finish();
        match always {
            true => t.lines(&text.replace(" && live)", ")").replace("if (live)", "")),
            false => t.lines(&text),
        }
    }

    fn kept_by_all(&self, t: &mut CText) {
        for (n, kept) in self.rows.kept.iter().enumerate() {
            match kept.class {
                _ if !kept.hoisted => {}
                None => self.kept_number(n, kept, t),
                Some(_) => self.kept_vectors(n, kept, t),
            }
        }
    }
}

/// The name of a reduction among the prelude's functions.
pub(super) fn function(r: Reduction) -> &'static str {
    match r {
        Reduction::Sum => "sum",
        Reduction::Prod => "prod",
        Reduction::Max => "max",
        Reduction::Min => "min",
    }
}

/// Declares the variables that `body` uses.
pub(super) fn declare(index: &str, variables: &[(String, String)], body: &str, t: &mut CText) {
    for (name, value) in variables {
        if occurs(name, body) {
            t.line(&format!("const {index} {name} = {value};"));
        }
    }
}
