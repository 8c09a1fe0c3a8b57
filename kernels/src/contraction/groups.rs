//! Several groups of a batch dim side by side in one panel, where a group alone would fill a few lanes.
//!
//! Before: `out[g][m, n] = sum over k of a[g][m, k] * b[g][k, n]` with `n` of 4 columns: 4 of 16 lanes work.
//! After: 4 groups together, `out[h][m, (g, n)] = sum over (g', k) of a[h][m, (g', k)] * d[h][(g', k), (g, n)]`,
//! where `d` is `b` for `g' = g` and zero elsewhere, so all lanes work, on zeros too. If the broadcast
//! operand's rows belong to the group (a weight gradient), all pairs of groups are computed into scratch
//! and only those with `g' = g` are moved out. The multiply-adds of the lanes stay as many; panels,
//! staged runs and stores become as many times longer as groups are together.
//!
//! Owns the condition and the text that differs: the packing of `d` and the moving of a diagonal.

use super::blocking::{Dim, Shape};
use super::driver::GatherPart;
use super::text::{CText, affine};

/// Which dim of the broadcast operand counts through the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupDim {
    /// The dim at this position of `Shape::k`.
    Reduction(usize),
    /// The dim at this position of `Shape::m`.
    Rows(usize),
}

impl GroupDim {
    pub fn is_rows(self) -> bool {
        matches!(self, GroupDim::Rows(_))
    }
}

/// Groups that share a panel.
#[derive(Clone, Debug)]
pub struct Diagonal {
    /// Groups in a panel.
    pub together: i64,
    /// Panels of groups: the size that the batch dim, the last of `Shape::batch`, is left with.
    pub panels: i64,
    /// The batch dim that was cut.
    pub id: usize,
    pub place: GroupDim,
    /// Positions of that dim in a group, and their steps.
    pub inside: i64,
    inside_b: i64,
    /// Columns of a group.
    pub columns: i64,
    /// Steps of a group and of a column.
    group_b: i64,
    column_b: i64,
    group_o: i64,
    column_o: i64,
}

/// Whether stepping `outer` equals running through `inner`.
fn runs_on(outer: i64, inner: i64, size: i64) -> bool {
    outer == inner * size
}

/// Brings groups together where that fills lanes; else returns the shape as it is. `sizes` are the dims
/// before roles joined them; the prologue is the vector operand's.
pub fn together(s: Shape, sizes: &[i64], vw: i64, prologue: bool, epilogue: bool) -> Shape {
    let diagonal = diagonal(&s, vw).filter(|d| match d.place {
        GroupDim::Reduction(_) => !prologue,
        GroupDim::Rows(_) => !epilogue,
    });
    match diagonal {
        Some(d) if sizes.get(d.id) == Some(&(d.panels * d.together)) => joined(s, d),
        _ => s,
    }
}

fn diagonal(s: &Shape, vw: i64) -> Option<Diagonal> {
    let (g, [n]) = (s.batch.last()?, s.n.as_slice()) else {
        return None;
    };
    let most = vw / n.size;
    let together = (2..=most).rev().find(|q| g.size % q == 0)?;
    // Only a dim of the broadcast operand that lies inside the groups is theirs.
    let inside = |d: &Dim| d.size > 1 && d.a > 0 && runs_on(g.a, d.a, d.size) && plain(s, d.id);
    let place = if let Some(at) = s.k.iter().position(inside) {
        // A column of zeros that is multiplied must not be one that is stored twice.
        (runs_on(g.o, n.o, n.size) && n.o == 1).then_some(GroupDim::Reduction(at))?
    } else {
        let at = s.m.iter().position(inside)?;
        runs_on(g.b, n.b, n.size).then_some(GroupDim::Rows(at))?
    };
    let dim = match place {
        GroupDim::Reduction(at) => &s.k[at],
        GroupDim::Rows(at) => &s.m[at],
    };
    Some(Diagonal {
        together,
        panels: g.size / together,
        id: g.id,
        place,
        inside: dim.size,
        inside_b: dim.b,
        columns: n.size,
        group_b: g.b,
        column_b: n.b,
        group_o: g.o,
        column_o: n.o,
    })
}

fn plain(s: &Shape, id: usize) -> bool {
    s.a.coords.iter().all(|c| c.coeff(id) == 0 || c.is_plain())
}

fn joined(mut s: Shape, d: Diagonal) -> Shape {
    let q = d.together;
    if let Some(g) = s.batch.last_mut() {
        (g.size, g.a, g.b, g.o) = (d.panels, g.a * q, g.b * q, g.o * q);
    }
    s.n[0].size *= q;
    match d.place {
        GroupDim::Reduction(at) => {
            s.k[at].size *= q;
            // Packing finds the source; a panel begins where its first group does.
            s.k[at].b = 0;
            s.n[0].b = 0;
        }
        GroupDim::Rows(at) => s.m[at].size *= q,
    }
    s.diagonal = Some(d);
    s
}

impl GatherPart<'_> {
    /// Packs the panel of groups: `static void NAME(buf, src, dst, kn)`.
    pub(super) fn diagonal_panel(&self, t: &mut CText, d: &Diagonal, at: usize, name: &str) {
        let number = self.number();
        t.line(format!(
            "static __attribute__((noinline)) void {name}(void *const *buf, long src, {number} *restrict dst, long kn) {{"
        ));
        t.line(format!(
            "const {number} *restrict B = buf[{}]; (void)kn;",
            self.buffers().1
        ));
        let width = self.width_of_groups(d);
        let levels = self.block_levels();
        let own = self.plan.shape.k[at].id;
        let (mut to, mut from) = (Vec::new(), vec![("src".to_string(), 1)]);
        let mut own_row = 1;
        let mut n_loops = 0;
        for (i, (dim, runtime, row)) in levels.iter().enumerate() {
            if dim.id == own {
                own_row = *row;
                continue;
            }
            let count = if *runtime {
                "kn".to_string()
            } else {
                format!("{}L", dim.size)
            };
            t.line(format!("for (long k{i} = 0; k{i} < {count}; k{i}++) {{"));
            to.push((format!("k{i}"), row * width));
            from.push((format!("k{i}"), dim.b));
            n_loops += 1;
        }
        t.line(format!("for (long g = 0; g < {}L; g++) {{", d.together));
        t.line(format!("for (long c = 0; c < {}L; c++) {{", d.inside));
        to.push(("g".to_string(), d.inside * own_row * width));
        to.push(("c".to_string(), own_row * width));
        from.push(("g".to_string(), d.group_b));
        from.push(("c".to_string(), d.inside_b));
        t.line(format!("{number} *row = dst + {};", affine(&to, 0)));
        t.line(format!("const {number} *s = B + {};", affine(&from, 0)));
        t.line(format!(
            "for (long j = 0; j < {width}L; j++) row[j] = 0.0f;"
        ));
        t.line(format!(
            "for (long j = 0; j < {0}L; j++) row[g*{0}L + j] = s[j*{1}L];",
            d.columns, d.column_b
        ));
        t.close(n_loops + 3);
    }

    fn width_of_groups(&self, d: &Diagonal) -> i64 {
        self.tail_width(d.together * d.columns)
    }
}

impl Diagonal {
    /// Rows of scratch from one group's rows to the next one's, in the units of `step`.
    pub(super) fn source_step(&self, step: i64) -> i64 {
        self.inside * step
    }

    /// Output element of column `n`, a C expression, of a panel of groups.
    pub(super) fn column(&self, n: &str) -> String {
        format!(
            "{n}/{0}L*{1}L + {n}%{0}L*{2}L",
            self.columns, self.group_o, self.column_o
        )
    }
}
