//! Sums over the points of a block's share: their registers, and what becomes of them at the end.
//!
//! Owns the parts that blocks leave in a workspace, or in the container where there is one block.
//! Never adds parts up; that is a launch of its own.

use super::leaf::LeafText;
use super::rows::{RowsText, declare, function};
use super::survey::{Update, around, decoded};
use crate::element_type;
use crate::schedule::{Leaf, loops::points};
use crate::value_text;
use graph::{ContainerId, DType};
use kernels::emit::scalar;
use kernels::emit::text::CText;
use kernels::emit::values::Effect;
use std::collections::BTreeMap;

/// A sum that blocks leave in parts.
pub(super) struct PartialSum<'a> {
    pub(super) leaf: &'a Leaf,
    effect: Effect,
    pub(super) moves: bool,
}

impl<'a> RowsText<'a> {
    pub(super) fn parts(&self) -> BTreeMap<ContainerId, PartialSum<'a>> {
        let mut parts = BTreeMap::new();
        for leaf in self.leaves() {
            let around = around(self.rows);
            let values = self.survey.values(leaf, &around);
            for e in &values.effects {
                if e.conflict.is_some()
                    && self.survey.update(e, leaf, &around, &values) == Update::Part
                {
                    let text = LeafText::new(self.survey, leaf, &around, &values);
                    let part = PartialSum {
                        leaf,
                        effect: e.clone(),
                        moves: text.moves(&e.address),
                    };
                    parts.insert(e.address.container, part);
                }
            }
        }
        parts
    }

    pub(super) fn part_registers(&self, t: &mut CText) {
        for (id, part) in self.parts() {
            let (r, dtype) = self.survey.parts[&id];
            let ctype = scalar::value_type(dtype);
            let identity = scalar::literal(r.identity(dtype), dtype);
            let name = format!("g{}", id.0);
            let (true, Some(class)) = (part.moves, part.leaf.class) else {
                t.line(&format!("{ctype} {name} = {identity};"));
                continue;
            };
            let c = &self.rows.classes[class];
            t.line(&self.array_of(class, ctype, &name));
            t.line("SH_UNROLL");
            t.open(&format!("for (int step = 0; step < {}; ++step)", c.steps));
            if c.vector > 1 {
                t.line("SH_UNROLL");
                t.line(&format!(
                    "for (int elem = 0; elem < {}; ++elem) {name}[step][elem] = {identity};",
                    c.vector
                ));
            } else {
                t.line(&format!("{name}[step] = {identity};"));
            }
            t.close();
        }
    }

    /// Elements of shared memory in which groups put their sums together, for each type.
    pub(super) fn exchanges(&self) -> BTreeMap<DType, i64> {
        let mut sizes = BTreeMap::new();
        for (id, part) in self.parts() {
            if part.moves && self.rows.groups > 1 {
                let n = points(&part.leaf.spread) * self.rows.groups;
                let size = sizes.entry(self.survey.parts[&id].1).or_insert(0);
                *size = n.max(*size);
            }
        }
        sizes
    }

    pub(super) fn leave_parts(&self, t: &mut CText) {
        for (id, part) in self.parts() {
            t.open("");
            match part.moves {
                true => self.leave_row(id, &part, t),
                false => self.leave_number(id, &part, t),
            }
            t.close();
        }
    }

    /// Where an element of a sum goes: the container, or the block's part of the workspace.
    fn left(&self, id: ContainerId, part: &PartialSum, value: &str) -> String {
        let extents = &self.survey.s.extents;
        let offset = extents.c_text(&part.effect.address.offset);
        let array = self.survey.array(id);
        let (_, dtype) = self.survey.parts[&id];
        if self.rows.parts == 1 {
            let name = &self.survey.names[&id];
            let value = value_text::cast(value, dtype, array.dtype);
            return format!("{name}[{offset}] = {value};");
        }
        format!("w{}[part*{} + {offset}] = {value};", id.0, array.len)
    }

    fn leave_number(&self, id: ContainerId, part: &PartialSum, t: &mut CText) {
        let (r, dtype) = self.survey.parts[&id];
        let (f, threads, ctype) = (function(r), self.threads(), scalar::value_type(dtype));
        t.line(&format!(
            "const {ctype} a0 = sh_block_{f}<{threads}>(g{});",
            id.0
        ));
        t.line(&format!("if (SH_TID == 0) {}", self.left(id, part, "a0")));
    }

    fn leave_row(&self, id: ContainerId, part: &PartialSum, t: &mut CText) {
        let (leaf, v) = (part.leaf, part.leaf.vector);
        let (r, dtype) = self.survey.parts[&id];
        let n = points(&leaf.spread);
        let index = self.index();
        let Some(class) = leaf.class else { return };
        let steps = self.rows.classes[class].steps;
        let step = if steps == 1 { "0" } else { "step" };
        let register = format!("g{}[{step}]", id.0);
        let last = leaf.spread.last().map(|l| l.var.to_string());
        if self.rows.groups == 1 {
            let mut body = CText::default();
            match v {
                1 => body.line(&self.left(id, part, &register)),
                _ => {
                    let line = self.left(id, part, &format!("{register}[elem]"));
                    body.line("SH_UNROLL");
                    body.open(&format!("for (int elem = 0; elem < {v}; ++elem)"));
                    let last = last.unwrap_or_default();
                    body.line(&format!("const {index} {last} = base + elem;"));
                    body.line(&line);
                    body.close();
                }
            }
            return self.vectors_always(leaf, Some(steps), &body.finish(), true, t);
        }
        let (groups, threads) = (self.rows.groups, self.threads());
        let shared = exchange_name(dtype);
        t.line("SH_SYNC();");
        let at = format!("SH_TID / {} * {n} + p0", self.rows.group);
        let put = match v {
            1 => format!("{shared}[{at}] = {register};\n"),
            // Registers of truth values and of 64-bit integers have another type than their arrays.
            _ if scalar::value_type(dtype) != element_type(dtype) => format!(
                "SH_UNROLL\nfor (int elem = 0; elem < {v}; ++elem) {shared}[{at} + elem] = {register}[elem];\n"
            ),
            _ => format!("sh_store<{v}>({shared}, {at}, {register});\n"),
        };
        self.vectors_always(leaf, Some(steps), &put, true, t);
        t.line("SH_SYNC();");
        t.open(&format!(
            "for ({index} p0 = SH_TID; p0 < {n}; p0 += {threads})"
        ));
        let ctype = scalar::value_type(dtype);
        t.line(&format!("{ctype} a0 = {shared}[p0];"));
        let sum = scalar::binary(
            r.combine(),
            "a0",
            &format!("{shared}[p1 * {n} + p0]"),
            dtype,
        );
        t.line(&format!(
            "for (int p1 = 1; p1 < {groups}; ++p1) a0 = {sum};"
        ));
        let line = self.left(id, part, "a0");
        declare(index, &decoded(&leaf.spread, "p0"), &line, t);
        t.line(&line);
        t.close();
    }
}

/// The shared array in which groups add up sums of a type.
pub(super) fn exchange_name(dtype: DType) -> String {
    format!("s_{}", dtype.name())
}
