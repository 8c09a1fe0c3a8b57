//! C text of a contraction's prologue: element-wise work that makes numbers of an operand while they are packed
//! or staged.
//!
//! Owns the condition under which a map can be one, and the function's frame. What one point computes is
//! [`super::leaf`]'s; which numbers are made when is the contraction's.
//!
//! A map is a prologue if it writes one container, each element once and without resolving conflicts. The
//! container has no memory of its own: an element is named by its offset.

use super::body::{self, Body, Nest};
use super::epilogue::only_leaf;
use super::frame::{Frame, decode};
use super::index::{self, Loop};
use super::leaf::CutLoop;
use super::schedule::{self, Scheduled};
use super::text::CText;
use super::{NAME, scalar};
use crate::lower::LowerError;
use graph::{ContainerId, Graph, Node, SymExpr};
use std::collections::BTreeSet;

/// What a prologue's function calls the place of the operand's first element.
const PLACE: &str = "sh_y";

/// A function with the signature of `contraction::Hooks::prologue_a`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prologue {
    /// C text with [`super::NAME`] for the function's name.
    pub(crate) text: String,
    /// What it reads, in the order of its buffers from `first_buffer` on.
    pub(crate) args: Vec<ContainerId>,
    number: &'static str,
}

impl Prologue {
    /// A function that calls the one named `name` and also stores the numbers that it made in a buffer.
    pub(crate) fn keeping(&self, own: &str, name: &str, buffer: usize) -> String {
        let number = self.number;
        let mut t = CText::default();
        t.open(&format!(
            "static inline void {own}(void *const *buf, {number} *restrict dst, long at, long step, long len)"
        ));
        t.line(&format!("{name}(buf, dst, at, step, len);"));
        t.line(&format!(
            "{number} *restrict kept = ({number} *)buf[{buffer}] + at;"
        ));
        t.open("if (step == 1)");
        t.line("#pragma omp simd");
        t.line("for (long i = 0; i < len; ++i) kept[i] = dst[i];");
        t.close();
        t.line("else for (long i = 0; i < len; ++i) kept[i * step] = dst[i];");
        t.close();
        t.finish()
    }
}

/// Emits the map `node` as a prologue that makes `operand`; `None` if it cannot be one.
///
/// # Errors
/// As for any map.
pub(crate) fn emit_prologue(
    graph: &Graph,
    node: &Node,
    operand: ContainerId,
    first_buffer: usize,
) -> Result<Option<Prologue>, LowerError> {
    let mut kernel = super::prepared(body::kernel_of(graph, node, true)?);
    let Some((loops, mut statements)) = only_leaf(&mut kernel) else {
        return Ok(None);
    };
    let mut writes = statements.iter().flat_map(|s| &s.writes);
    let (Some(write), None) = (writes.next(), writes.next()) else {
        return Ok(None);
    };
    let array = kernel.arrays[&operand].clone();
    let is_made = write.place.container == operand && write.place.gather.is_empty();
    let loops = in_memory_order(&write.place.offset, loops, array.len).filter(|_| is_made);
    let Some(loops) = loops else {
        return Ok(None);
    };
    let loops = schedule::joined_in_order(loops, &mut statements, &mut kernel.extents);
    let Some((columns, rows)) = loops.split_last() else {
        return Ok(None);
    };
    let scheduled = Scheduled {
        parallel: rows.to_vec(),
        strip: None,
        phases: vec![Nest {
            loops: vec![columns.clone()],
            body: Body::Leaf(statements),
        }],
        partial: BTreeSet::new(),
        arrays: kernel.arrays,
        extents: kernel.extents,
    };
    let mut frame = Frame::new(&scheduled);
    // Containers that are stored are named after all that are loaded.
    if frame.args.pop() != Some(operand) {
        return Ok(None);
    }
    frame.names.arrays.insert(operand, PLACE.to_string());
    frame.slots = (0..frame.args.len()).map(|n| first_buffer + n).collect();
    frame.cut = Some(CutLoop {
        var: columns.var.clone(),
        from: "sh_n0".to_string(),
        to: "sh_n1".to_string(),
    });
    let number = scalar::c_type(array.dtype);
    let size = columns.size;
    let mut t = CText::default();
    t.open(&format!(
        "static inline void {NAME}(void *const *buf, {number} *restrict dst, long sh_at, long sh_step, long sh_len)"
    ));
    frame.declare_buffers(&mut t);
    t.line("long sh_done = 0;");
    t.open("while (sh_done < sh_len)");
    t.line("const long sh_place = sh_at + sh_done * sh_step;");
    t.line(&format!(
        "const long sh_row = sh_place / {size}, sh_n0 = sh_place % {size}; (void)sh_row;"
    ));
    // Elements that are not neighbors are made one by one.
    t.line(&format!(
        "const long sh_n1 = sh_step == 1 ? ix_min(sh_n0 + sh_len - sh_done, {size}) : sh_n0 + 1;"
    ));
    t.line(&format!(
        "{number} *const {PLACE} = dst + (sh_done - sh_place);"
    ));
    decode(&mut t, "sh_row", rows);
    let mut leaves = frame.leaves.iter();
    for nest in &scheduled.phases {
        frame.print_nest(nest, &mut leaves, &mut t);
    }
    t.line("sh_done += sh_n1 - sh_n0;");
    t.close();
    t.close();
    Ok(Some(Prologue {
        text: t.finish(),
        args: frame.args,
        number,
    }))
}

/// The loops from the largest step in memory to the smallest, if they go through all elements, each once.
fn in_memory_order(offset: &SymExpr, loops: Vec<Loop>, len: i64) -> Option<Vec<Loop>> {
    let step = |l: &Loop| index::coefficient(offset, &l.var);
    let mut steps: Vec<(i64, Loop)> = loops
        .into_iter()
        .map(|l| Some((step(&l)?, l)))
        .collect::<Option<_>>()?;
    steps.sort_by_key(|(step, _)| *step);
    let mut reached = 1;
    let mut sum = SymExpr::default();
    for (step, l) in &steps {
        if *step != reached {
            return None;
        }
        reached *= l.size;
        sum = sum + SymExpr::from(&l.var) * *step;
    }
    let loops = steps.into_iter().rev().map(|(_, l)| l).collect();
    (reached == len && sum == *offset).then_some(loops)
}
