//! The text of one point of a leaf: a thread's vector of neighbours, its loads, values and effects.
//!
//! Owns where each value is computed: what all elements of the vector share before the loop over
//! them, vectors in memory as whole vectors, the rest for each element. Never decides which threads
//! come here.

use super::survey::{Survey, Update, occurs, varies};
use crate::schedule::{BASE, Home, Leaf, loops::is_vector};
use crate::value_text::{self, ValueText};
use crate::{element_type, schedule::moved_by};
use graph::{ContainerId, DType, Reduction, SymExpr};
use kernels::emit::index::{mentions, replace};
use kernels::emit::scalar;
use kernels::emit::text::CText;
use kernels::emit::values::{Address, Effect, Op, ValueId, Values};
use std::collections::{BTreeMap, BTreeSet};

/// See the module.
pub(super) struct LeafText<'a> {
    pub(super) survey: &'a Survey<'a>,
    pub(super) leaf: &'a Leaf,
    /// Loops outside of [`Leaf::inner`].
    pub(super) n_out: usize,
    pub(super) values: &'a Values,
    pub(super) updates: Vec<Update>,
    /// Which of a thread's vectors this is: the index of register arrays.
    pub(super) step: String,
    /// What stands before a store that only one thread makes; empty where all do.
    pub(super) once: String,
    /// Loads that are found elsewhere, by value.
    pub(super) replaced: BTreeMap<usize, String>,
    /// The values to compute; all if `None`.
    pub(super) only: Option<BTreeSet<usize>>,
    varies: Vec<bool>,
}

/// A group's sums in one array: what adds them up, their type, the effects.
pub(super) type Sums = Vec<(Reduction, DType, Vec<usize>)>;

impl<'a> LeafText<'a> {
    pub(super) fn new(
        survey: &'a Survey<'a>,
        leaf: &'a Leaf,
        around: &[kernels::emit::index::Loop],
        values: &'a Values,
    ) -> Self {
        let updates = values.effects.iter();
        LeafText {
            survey,
            leaf,
            n_out: around.len() + leaf.spread.len(),
            values,
            updates: updates
                .map(|e| survey.update(e, leaf, around, values))
                .collect(),
            step: "0".to_string(),
            once: String::new(),
            replaced: BTreeMap::new(),
            only: None,
            varies: varies(leaf, values),
        }
    }

    /// The sums of the group by function and type.
    pub(super) fn sums(&self) -> Sums {
        let mut sums: Sums = Vec::new();
        for (n, (e, u)) in self.effects() {
            if !matches!(u, Update::Group { .. }) {
                continue;
            }
            let (r, d) = (reduction(e), self.dtype(e.value));
            match sums.iter_mut().find(|(sr, sd, _)| (*sr, *sd) == (r, d)) {
                Some((_, _, all)) => all.push(n),
                None => sums.push((r, d, vec![n])),
            }
        }
        sums
    }

    fn effects(&self) -> impl Iterator<Item = (usize, (&Effect, Update))> {
        let updates = self.updates.iter().copied();
        self.values.effects.iter().zip(updates).enumerate()
    }

    fn vector(&self) -> i64 {
        self.leaf.vector
    }

    /// The whole point, without the variables of its loops.
    pub(super) fn point(&self, t: &mut CText) {
        for (n, (e, u)) in self.effects() {
            if matches!(u, Update::Thread { .. }) {
                self.declare_sum(n, e, t);
            }
        }
        self.body(t);
        self.flush_threads(t);
    }

    /// Values and effects; sums in registers stay there.
    pub(super) fn body(&self, t: &mut CText) {
        (0..=self.n_out).for_each(|depth| self.fixed(depth, t));
        self.vectors(self.n_out, t);
        let n_inner = self.leaf.inner.len();
        if n_inner > 0 {
            self.arrays(self.n_out, t);
        }
        for (n, l) in self.leaf.inner.iter().enumerate() {
            let index = self.survey.s.index;
            t.open(&format!(
                "for ({index} {0} = 0; {0} < {1}; ++{0})",
                l.var, l.size
            ));
            let depth = self.n_out + n + 1;
            self.fixed(depth, t);
            self.vectors(depth, t);
            if n + 1 < n_inner {
                self.arrays(depth, t);
            }
        }
        self.innermost(self.n_out + n_inner, t);
        self.leaf.inner.iter().for_each(|_| t.close());
    }

    /// The effects of one iteration, for each element.
    fn innermost(&self, depth: usize, t: &mut CText) {
        let mut stores = Vec::new();
        for (n, (e, u)) in self.effects() {
            if u == Update::Store && self.reaches_memory(e) && self.is_vector(&e.address) {
                t.line(&self.out_vector(n, e));
                stores.push(n);
            }
        }
        let mut body = CText::default();
        self.varying(depth, &mut body);
        for (n, (e, u)) in self.effects() {
            self.apply(n, e, u, stores.contains(&n), &mut body);
        }
        self.for_elements(&body.finish(), t);
        for n in stores {
            t.line(&self.stored(n, &self.values.effects[n].address));
        }
    }

    /// `for (elem …) { const int j = base + elem; … }`
    fn for_elements(&self, body: &str, t: &mut CText) {
        if body.is_empty() {
            return;
        }
        let Some(last) = self.leaf.spread.last().filter(|_| self.vector() > 1) else {
            t.lines(body);
            return;
        };
        t.line("SH_UNROLL");
        t.open(&format!(
            "for (int elem = 0; elem < {}; ++elem)",
            self.vector()
        ));
        if occurs(last.var.as_str(), body) {
            let index = self.survey.s.index;
            t.line(&format!("const {index} {} = {BASE} + elem;", last.var));
        }
        t.lines(body);
        t.close();
    }

    fn out_vector(&self, n: usize, e: &Effect) -> String {
        let dtype = self.survey.array(e.address.container).dtype;
        let ctype = element_type(dtype);
        format!("sh_vec<{ctype}, {}> o{n};", self.vector())
    }

    fn stored(&self, n: usize, a: &Address) -> String {
        let conditions = self.text().conditions(a);
        let name = &self.survey.names[&a.container];
        let store = format!(
            "sh_store<{}>({name}, {}, o{n});",
            self.vector(),
            self.offset(a)
        );
        match conditions.is_empty() {
            true => store,
            false => format!("if ({}) {store}", conditions.join(" & ")),
        }
    }

    /// The offset of a vector's first element.
    fn offset(&self, a: &Address) -> String {
        let mut at = a.clone();
        if let Some(last) = self.leaf.spread.last() {
            at.offset = replace(&a.offset, &last.var, &SymExpr::symbol(BASE));
        }
        let element = self.text().element(&at);
        let name = &self.survey.names[&a.container];
        element[name.len() + 1..element.len() - 1].to_string()
    }

    /// Values that all elements share.
    pub(super) fn fixed(&self, depth: usize, t: &mut CText) {
        for n in self.at(depth) {
            if !self.varies[n] {
                let ctype = value_text::value_type(self.values.values[n].dtype);
                t.line(&format!("const {ctype} t{n} = {};", self.computation(n)));
            }
        }
    }

    fn at(&self, depth: usize) -> impl Iterator<Item = usize> {
        let constant = |n: &usize| matches!(self.values.values[*n].op, Op::Const(_));
        let wanted = |n: &usize| self.only.as_ref().is_none_or(|only| only.contains(n));
        (0..self.values.values.len())
            .filter(move |n| self.values.depth[*n] == depth && !constant(n) && wanted(n))
    }

    /// Vectors that lie in memory as they are.
    fn vectors(&self, depth: usize, t: &mut CText) {
        for n in self.at(depth) {
            if let Some(a) = self.vector_load(n) {
                let ctype = element_type(self.survey.array(a.container).dtype);
                let v = self.vector();
                t.line(&format!(
                    "const sh_vec<{ctype}, {v}> v{n} = {};",
                    self.load_vector(a)
                ));
            }
        }
    }

    /// The text of a vector's load; the fill where the elements do not exist.
    pub(super) fn load_vector(&self, a: &Address) -> String {
        let v = self.vector();
        let dtype = self.survey.array(a.container).dtype;
        let name = &self.survey.names[&a.container];
        let load = format!("sh_load<{v}>({name}, {})", self.offset(a));
        let conditions = self.text().conditions(a);
        match a.fill {
            Some(fill) if !conditions.is_empty() => format!(
                "{} ? {load} : sh_splat<{}, {v}>({})",
                conditions.join(" & "),
                element_type(dtype),
                value_text::literal(fill, dtype)
            ),
            _ => load,
        }
    }

    fn vector_load(&self, n: usize) -> Option<&Address> {
        match &self.values.values[n].op {
            Op::Load(a) if self.varies[n] && self.register(a).is_none() && self.is_vector(a) => {
                Some(a)
            }
            _ => None,
        }
    }

    pub(super) fn is_vector(&self, a: &Address) -> bool {
        let Some(last) = self.leaf.spread.last().filter(|_| self.vector() > 1) else {
            return false;
        };
        let fixed = |(index, stride, _): &(ValueId, i64, i64)| {
            !self.varies[index.0] && stride % self.vector() == 0
        };
        is_vector(&a.offset, &last.var, self.vector())
            && a.gather.iter().all(fixed)
            && a.guards.iter().all(|g| !mentions(&g.index, &last.var))
    }

    /// Values of each element that loops inside will need.
    fn arrays(&self, depth: usize, t: &mut CText) {
        let own: Vec<usize> = self
            .at(depth)
            .filter(|n| self.varies[*n] && self.vector_load(*n).is_none())
            .collect();
        if self.vector() == 1 || own.is_empty() {
            return self.varying(depth, t);
        }
        for n in &own {
            let ctype = value_text::value_type(self.values.values[*n].dtype);
            t.line(&format!("{ctype} v{n}[{}];", self.vector()));
        }
        let mut body = CText::default();
        self.varying(depth, &mut body);
        for n in &own {
            body.line(&format!("v{n}[elem] = t{n};"));
        }
        self.for_elements(&body.finish(), t);
    }

    /// Values of one element: those made at this depth, and what they use of earlier ones.
    fn varying(&self, depth: usize, t: &mut CText) {
        let mut body = CText::default();
        for n in self.at(depth).filter(|n| self.varies[*n]) {
            if self.vector_load(n).is_none() {
                let ctype = value_text::value_type(self.values.values[n].dtype);
                body.line(&format!("const {ctype} t{n} = {};", self.computation(n)));
            }
        }
        let body = body.finish();
        let innermost = depth == self.n_out + self.leaf.inner.len();
        for (n, varies) in self.varies.iter().enumerate() {
            let early = self.values.depth[n] < depth || self.vector_load(n).is_some();
            let made = early && *varies && self.vector() > 1 && self.values.depth[n] <= depth;
            let name = format!("t{n}");
            let used = occurs(&name, &body)
                || innermost && self.values.effects.iter().any(|e| self.uses(e, n));
            if made && used {
                let ctype = value_text::value_type(self.values.values[n].dtype);
                t.line(&format!("const {ctype} {name} = v{n}[elem];"));
            }
        }
        t.lines(&body);
    }

    fn uses(&self, e: &Effect, n: usize) -> bool {
        e.value.0 == n || e.address.gather.iter().any(|(v, ..)| v.0 == n)
    }

    pub(super) fn declare_sum(&self, n: usize, e: &Effect, t: &mut CText) {
        let dtype = self.dtype(e.value);
        let ctype = scalar::value_type(dtype);
        let identity = scalar::literal(reduction(e).identity(dtype), dtype);
        match self.sum_varies(e) {
            false => t.line(&format!("{ctype} a{n} = {identity};")),
            true => {
                t.line(&format!("{ctype} a{n}[{}];", self.vector()));
                t.line("SH_UNROLL");
                t.line(&format!(
                    "for (int elem = 0; elem < {}; ++elem) a{n}[elem] = {identity};",
                    self.vector()
                ));
            }
        }
    }

    fn sum_varies(&self, e: &Effect) -> bool {
        let last = self.leaf.spread.last().filter(|_| self.vector() > 1);
        last.is_some_and(|l| mentions(&e.address.offset, &l.var))
    }

    fn sum_name(&self, n: usize, e: &Effect) -> String {
        match self.sum_varies(e) {
            true => format!("a{n}[elem]"),
            false => format!("a{n}"),
        }
    }

    /// The register of an effect kept over all points.
    pub(super) fn part_name(&self, e: &Effect) -> String {
        let name = format!("g{}", e.address.container.0);
        match self.moves(&e.address) {
            true => self.indexed(&name),
            false => name,
        }
    }

    /// Whether a place moves with the leaf's spread loops.
    pub(super) fn moves(&self, a: &Address) -> bool {
        moved_by(&a.offset, &self.leaf.spread)
    }

    fn indexed(&self, name: &str) -> String {
        match self.vector() {
            1 => format!("{name}[{}]", self.step),
            _ => format!("{name}[{}][elem]", self.step),
        }
    }

    /// The register that holds what the load would give.
    fn register(&self, a: &Address) -> Option<String> {
        let rows = self.survey.rows()?;
        let kept = rows.kept.iter().position(|k| k.address == *a);
        if let Some(n) = kept.filter(|n| {
            let class = rows.kept[*n].class;
            class.is_none() || class == self.leaf.class
        }) {
            return Some(match rows.kept[n].class {
                None => format!("u{n}"),
                Some(_) => self.indexed(&format!("l{n}")),
            });
        }
        self.home_register(a.container)
    }

    fn home_register(&self, id: ContainerId) -> Option<String> {
        match self.survey.home(id)? {
            Home::Shared => None,
            Home::Uniform => Some(format!("h{}", id.0)),
            Home::Registers(_) => Some(self.indexed(&format!("h{}", id.0))),
        }
    }

    fn reaches_memory(&self, e: &Effect) -> bool {
        let id = e.address.container;
        let local = self.survey.array(id).local;
        // A local container has memory only in shared memory; other values are handed on in registers.
        !local || self.survey.home(id) == Some(Home::Shared)
    }

    fn apply(&self, n: usize, e: &Effect, update: Update, vector: bool, t: &mut CText) {
        let value = self.text().operand(e.value);
        let kept = |register: &str| self.combined(e, register, &value);
        match update {
            Update::Store => {
                if let Some(register) = self.home_register(e.address.container) {
                    let held = self.held(e, &value);
                    t.line(&format!("{register} = {held};"));
                }
                if vector {
                    t.line(&format!("o{n}[elem] = {value};"));
                } else if self.reaches_memory(e) {
                    let place = self.text().element(&e.address);
                    self.guarded(e, &format!("{place} = {value};"), t);
                }
            }
            Update::Memory => {
                let place = self.text().element(&e.address);
                let sum = self.combined(e, &place, &value);
                self.guarded(e, &format!("{place} = {sum};"), t);
            }
            Update::Thread { .. } => {
                let register = self.sum_name(n, e);
                t.line(&format!("{register} = {};", kept(&register)));
            }
            Update::Group { .. } => {
                let register = self.group_register(n);
                t.line(&format!("{register} = {};", kept(&register)));
            }
            Update::Part => {
                let register = self.part_name(e);
                let once = if self.leaf.spread.is_empty() {
                    &self.once
                } else {
                    ""
                };
                t.line(&format!("{once}{register} = {};", kept(&register)));
            }
        }
    }

    /// A value as the register of a home holds it: as a load from the container would give it.
    fn held(&self, e: &Effect, value: &str) -> String {
        let array = self.survey.array(e.address.container);
        value_text::cast(value, self.dtype(e.value), array.dtype)
    }

    /// `b0[1]`: the position of an effect among the group's sums.
    pub(super) fn group_register(&self, n: usize) -> String {
        for (at, (_, _, all)) in self.sums().iter().enumerate() {
            if let Some(k) = all.iter().position(|m| *m == n) {
                return format!("b{at}[{k}]");
            }
        }
        String::new()
    }

    fn guarded(&self, e: &Effect, line: &str, t: &mut CText) {
        let conditions = self.text().conditions(&e.address);
        let once = if self.leaf.spread.is_empty() {
            &self.once
        } else {
            ""
        };
        match conditions.is_empty() {
            true => t.line(&format!("{once}{line}")),
            false => t.line(&format!("{once}if ({}) {line}", conditions.join(" & "))),
        }
    }

    /// Stores what threads have summed up.
    fn flush_threads(&self, t: &mut CText) {
        let mut stores = Vec::new();
        let mut body = CText::default();
        for (n, (e, u)) in self.effects() {
            let Update::Thread { plain } = u else {
                continue;
            };
            let register = self.sum_name(n, e);
            if let Some(home) = self.home_register(e.address.container) {
                body.line(&format!("{home} = {};", self.held(e, &register)));
            }
            if !self.reaches_memory(e) {
                continue;
            }
            if plain && self.is_vector(&e.address) {
                t.line(&self.out_vector(n, e));
                body.line(&format!("o{n}[elem] = {};", self.held(e, &register)));
                stores.push(n);
            } else {
                self.guarded(e, &self.flushed(e, &register, plain), &mut body);
            }
        }
        self.for_elements(&body.finish(), t);
        for n in stores {
            t.line(&self.stored(n, &self.values.effects[n].address));
        }
    }

    /// Adds a scatter's sum to the row `at` of its destination.
    pub(super) fn flush_text(&self, n: usize) -> String {
        let e = &self.values.effects[n];
        let mut t = CText::default();
        let name = &self.survey.names[&e.address.container];
        let stride = e.address.gather.first().map_or(0, |g| g.1);
        let mut row = e.address.clone();
        row.gather.clear();
        let v = self.vector();
        if v == 1 {
            let offset = self.survey.s.extents.c_text(&row.offset);
            let place = format!("{name}[{offset} + at*{stride}]");
            t.line(&format!(
                "{place} = {};",
                self.combined(e, &place, &format!("a{n}"))
            ));
            return t.finish();
        }
        let offset = format!("{} + at*{stride}", self.offset(&row));
        let ctype = element_type(self.survey.array(e.address.container).dtype);
        t.line(&format!(
            "sh_vec<{ctype}, {v}> o{n} = sh_load<{v}>({name}, {offset});"
        ));
        let sum = self.combined(e, &format!("o{n}[elem]"), &format!("a{n}[elem]"));
        t.line("SH_UNROLL");
        t.line(&format!(
            "for (int elem = 0; elem < {v}; ++elem) o{n}[elem] = {sum};"
        ));
        t.line(&format!("sh_store<{v}>({name}, {offset}, o{n});"));
        t.finish()
    }

    /// Stores or combines a sum.
    fn flushed(&self, e: &Effect, register: &str, plain: bool) -> String {
        let place = self.text().element(&e.address);
        match plain {
            true => format!("{place} = {};", self.held(e, register)),
            false => format!("{place} = {};", self.combined(e, &place, register)),
        }
    }

    /// Stores what the group has summed up.
    pub(super) fn flush_groups(&self, t: &mut CText) {
        for (n, (e, u)) in self.effects() {
            let Update::Group { plain } = u else { continue };
            let register = self.group_register(n);
            if let Some(home) = self.home_register(e.address.container) {
                t.line(&format!("{home} = {};", self.held(e, &register)));
            }
            if self.reaches_memory(e) {
                t.line(&format!(
                    "{}{}",
                    self.once,
                    self.flushed(e, &register, plain)
                ));
            }
        }
    }

    fn combined(&self, e: &Effect, a: &str, b: &str) -> String {
        scalar::binary(reduction(e).combine(), a, b, self.dtype(e.value))
    }

    fn dtype(&self, id: ValueId) -> DType {
        self.values.get(id).dtype
    }

    pub(super) fn text(&self) -> ValueText<'_> {
        self.survey.text(self.values)
    }

    fn computation(&self, n: usize) -> String {
        if let Some(found) = self.replaced.get(&n) {
            return found.clone();
        }
        match &self.values.values[n].op {
            Op::Load(a) => match self.register(a) {
                Some(register) => register,
                None => self.text().computation(n),
            },
            _ => self.text().computation(n),
        }
    }
}

/// The resolution of an effect's conflict.
pub(super) fn reduction(e: &Effect) -> Reduction {
    e.conflict.unwrap_or(Reduction::Sum)
}
