//! The threads' parts of containers that are reduced over parallel points: their memory, their sums by
//! blocks of points, and the launch that combines them.

use super::{Frame, aligned};
use crate::emit::merge::visit_statements;
use crate::emit::text::CText;
use crate::emit::values::arithmetic;
use crate::emit::{Arg, EmittedFunction, NAME, index, scalar};
use graph::{ContainerId, DType, Reduction};
use std::collections::BTreeSet;

/// Parallel points after which a thread's single-precision row sums go into double precision.
const BLOCK_POINTS: i64 = 32;

/// A thread's part of a container that is reduced over parallel points.
#[derive(Clone, Debug)]
pub(super) struct ThreadPartial {
    pub(super) container: ContainerId,
    reduction: Reduction,
    /// Byte offset within the thread's part of the workspace.
    offset: i64,
    /// Byte offset in scratch of the block's sums; `None` if values go to the part at once.
    pub(super) block: Option<i64>,
}

impl Frame<'_> {
    /// Gives each container that is reduced over parallel points a part for each thread.
    pub(super) fn make_parts(&mut self) {
        let points: BTreeSet<_> = self.s.parallel.iter().map(|l| l.var.clone()).collect();
        for nest in &self.s.phases {
            let mut found = Vec::new();
            visit_statements(nest, &mut |s| {
                for w in &s.writes {
                    if let Some(reduction) = w.conflict
                        && self.s.partial.contains(&w.place.container)
                    {
                        let moves = points.iter().any(|v| index::mentions(&w.place.offset, v))
                            || self
                                .s
                                .strip
                                .as_ref()
                                .is_some_and(|c| index::mentions(&w.place.offset, &c.var));
                        found.push((w.place.container, reduction, moves));
                    }
                }
            });
            for (container, reduction, moves) in found {
                self.make_part(container, reduction, moves);
            }
        }
    }

    fn make_part(&mut self, container: ContainerId, reduction: Reduction, moves: bool) {
        if self.parts.iter().any(|p| p.container == container) {
            return;
        }
        let array = self.array(container);
        let summed = arithmetic(array.dtype);
        let wide = scalar::wide_type(summed, reduction);
        // Where each point touches only some of the elements, adding up blocks costs more than it saves.
        let blocked = wide != summed && !moves && array.len > 1;
        let block = blocked.then_some(self.scratch);
        if blocked {
            self.scratch += aligned(array.len * summed.bytes() as i64);
        }
        self.parts.push(ThreadPartial {
            container,
            reduction,
            offset: self.workspace,
            block,
        });
        self.workspace += aligned(array.len * wide.bytes() as i64);
    }

    /// The names under which rows of values and single values are combined into the part.
    pub(super) fn part_names(&self, id: ContainerId) -> Option<(String, String)> {
        let part = self.parts.iter().find(|p| p.container == id)?;
        let n = &self.names.arrays.get(&id)?[1..];
        let wide = format!("w{n}");
        Some(match part.block {
            Some(_) => (format!("s{n}"), wide),
            None => (wide.clone(), wide),
        })
    }

    /// Declares the parts and fills them with identities.
    pub(super) fn declare_parts(&self, t: &mut CText) {
        for part in &self.parts {
            let (block, wide) = self.part_names(part.container).unwrap_or_default();
            let array = self.array(part.container);
            let summed = arithmetic(array.dtype);
            let dtype = scalar::wide_type(summed, part.reduction);
            let ctype = scalar::c_type(dtype);
            t.line(&format!(
                "{ctype} *{wide} = ({ctype} *)((char *)buf[{}] + tid * {} + {});",
                self.args.len(),
                self.workspace,
                self.shared + part.offset
            ));
            if let Some(offset) = part.block {
                let ctype = scalar::c_type(summed);
                t.line(&format!(
                    "{ctype} *{block} = ({ctype} *)((char *)scratch + {offset});"
                ));
            }
            let identity = scalar::literal(part.reduction.identity(dtype), dtype);
            t.line(&format!(
                "for (long i = 0; i < {}; ++i) {wide}[i] = {identity};",
                array.len
            ));
        }
    }

    /// Opens the loops over blocks of points and over the points of a block.
    pub(super) fn open_blocks(&self, t: &mut CText) {
        t.open(&format!(
            "for (long p_b = p_lo; p_b < p_hi; p_b += {BLOCK_POINTS})"
        ));
        t.line(&format!(
            "const long p_e = ix_min(p_b + {BLOCK_POINTS}, p_hi);"
        ));
        for part in self.parts.iter().filter(|p| p.block.is_some()) {
            let (block, _) = self.part_names(part.container).unwrap_or_default();
            let array = self.array(part.container);
            let summed = arithmetic(array.dtype);
            let identity = scalar::literal(part.reduction.identity(summed), summed);
            t.line("#pragma omp simd");
            t.line(&format!(
                "for (long i = 0; i < {}; ++i) {block}[i] = {identity};",
                array.len
            ));
        }
        t.open("for (long p = p_b; p < p_e; ++p)");
    }

    /// Adds the block's sums to the parts, and closes the loop over blocks.
    pub(super) fn close_blocks(&self, t: &mut CText) {
        for part in self.parts.iter().filter(|p| p.block.is_some()) {
            let (block, wide) = self.part_names(part.container).unwrap_or_default();
            let array = self.array(part.container);
            let dtype = scalar::wide_type(arithmetic(array.dtype), part.reduction);
            let sum = scalar::binary(
                part.reduction.combine(),
                &format!("{wide}[i]"),
                &format!("{block}[i]"),
                dtype,
            );
            t.line("#pragma omp simd");
            t.line(&format!(
                "for (long i = 0; i < {}; ++i) {wide}[i] = {sum};",
                array.len
            ));
        }
        t.close();
    }

    /// A launch that combines the threads' parts.
    pub(super) fn combine_function(&self) -> Option<EmittedFunction> {
        if self.parts.is_empty() {
            return None;
        }
        let mut t = CText::default();
        t.open(&format!(
            "void {NAME}_combine(void *const *buf, void *scratch, long tid, long nt)"
        ));
        let n_args = self.parts.len();
        for (n, part) in self.parts.iter().enumerate() {
            let array = self.array(part.container);
            let dtype = scalar::wide_type(arithmetic(array.dtype), part.reduction);
            let (ctype, wide) = (scalar::c_type(array.dtype), scalar::c_type(dtype));
            t.line(&format!("{ctype} *x{n} = buf[{n}];"));
            t.line(&format!(
                "const char *w{n} = (const char *)buf[{n_args}] + {};",
                self.shared + part.offset
            ));
            t.open(&format!(
                "for (long i = {0} * tid / nt; i < {0} * (tid + 1) / nt; ++i)",
                array.len
            ));
            let identity = scalar::literal(part.reduction.identity(dtype), dtype);
            t.line(&format!("{wide} sum = {identity};"));
            let next = format!("((const {wide} *)(w{n} + k * {}))[i]", self.workspace);
            let sum = scalar::binary(part.reduction.combine(), "sum", &next, dtype);
            t.line(&format!("for (long k = 0; k < nt; ++k) sum = {sum};"));
            t.line(&match array.dtype {
                half @ (DType::F16 | DType::BF16) => {
                    format!("x{n}[i] = {};", scalar::cast("sum", dtype, half))
                }
                _ => format!("x{n}[i] = ({ctype})sum;"),
            });
            t.close();
        }
        t.close();
        let mut args: Vec<Arg> = self
            .parts
            .iter()
            .map(|p| Arg::Container(p.container))
            .collect();
        args.push(Arg::Workspace);
        Some(EmittedFunction {
            suffix: "_combine",
            text: t.finish(),
            args,
        })
    }
}
