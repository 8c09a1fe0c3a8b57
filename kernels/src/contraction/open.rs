//! Sizes that differ between the programs of a model, and the text that serves them all.
//!
//! A contraction that is planned for one size has a micro-kernel for each length of tile and each width of panel
//! that occurs. Where a size differs from an earlier one of the same product, its text has instead a micro-kernel
//! for each of a few lengths and widths, and chooses at run time the one that a tile needs: the numbers in such a
//! text follow from sizes, its shape does not. Rows that a micro-kernel has beyond its tile read the last row again and
//! are not stored; lanes beyond the last column are masked.
//!
//! Owns which dims are open, and the text of what is decided at run time.

use super::blocking::{Dim, Shape, Tiling, div_up};
use super::choice::PriorPlan;
use super::driver::GatherPart;
use super::microkernel::Ragged;
use super::text::{CText, Element, Vector};

/// Dims, by id, whose sizes differ between the model's input sizes.
#[derive(Clone, Debug, Default)]
pub struct OpenDims {
    ids: Vec<usize>,
    /// Whether one of the sizes has so few rows that tiles of every length occur.
    pub(super) has_short: bool,
}

/// Parts of a plan's text that work for any size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// Whether any size varies.
    pub any: bool,
    /// Tiles have any number of rows.
    pub rows: bool,
    /// The last panel has any number of columns, one to all.
    pub columns: bool,
    /// Whether a dim of the reduction may have any size.
    pub reduction: bool,
}

impl OpenDims {
    pub(super) fn new(s: &Shape, known: &[PriorPlan]) -> Self {
        let roles = [&s.batch, &s.m, &s.n, &s.k];
        let mut ids = Vec::new();
        for (role, dims) in roles.into_iter().enumerate() {
            for (at, dim) in dims.iter().enumerate() {
                if known.iter().any(|k| k.is_open(s, role, at)) {
                    ids.push(dim.id);
                }
            }
        }
        OpenDims {
            ids,
            has_short: known.iter().any(PriorPlan::has_short_tiles),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub(super) fn has(&self, dim: &Dim) -> bool {
        self.ids.contains(&dim.id)
    }

    /// Whether the innermost dim of columns is open.
    pub(super) fn has_columns(&self, s: &Shape) -> bool {
        s.n.last().is_some_and(|d| self.has(d))
    }

    /// The roles of a shape that are open, but for rows.
    pub(super) fn roles(&self, s: &Shape) -> Open {
        Open {
            any: !self.is_empty(),
            rows: false,
            columns: self.has_columns(s) && s.diagonal.is_none(),
            reduction: s.k.iter().any(|d| self.has(d)),
        }
    }
}

impl Open {
    /// Sets whether rows vary, by how they are tiled.
    pub(super) fn in_rows(self, tiling: &Tiling) -> Self {
        Open {
            rows: tiling.is_open(),
            ..self
        }
    }
}

/// A micro-kernel, and the tiles and panels that it is for.
pub(super) struct ForTile {
    pub(super) name: String,
    /// C conditions, all of which hold.
    pub(super) when: Vec<String>,
    /// Arguments that it takes behind those that all take.
    pub(super) more: String,
}

impl GatherPart<'_> {
    /// Whether micro-kernels are told how many rows and lanes to store.
    pub(super) fn is_ragged(&self) -> bool {
        self.plan.open.rows || self.plan.open.columns
    }

    /// Micro-kernels for tiles of each length and panels of each width.
    pub(super) fn ragged_kernels(&self, t: &mut CText) -> Vec<ForTile> {
        let (p, tiling) = (&self.plan, &self.plan.tiling);
        let lanes = p.vector.lanes;
        let lengths = tiling.kernel_lengths();
        let widths: Vec<(i64, Option<i64>)> = match (p.open.columns, p.tail()) {
            (true, _) => (1..=p.nv).rev().map(|nv| (nv, None)).collect(),
            (false, Some(tail)) if p.inner_panels() == 1 => {
                vec![(div_up(tail, lanes), Some(tail))]
            }
            (false, Some(tail)) => vec![(div_up(tail, lanes), Some(tail)), (p.nv, None)],
            (false, None) => vec![(p.nv, None)],
        };
        if p.open.columns {
            t.raw(&store_lanes(p.vector));
        }
        let mut kernels = Vec::new();
        for (i, length) in lengths.iter().enumerate() {
            for (j, (nv, tail)) in widths.iter().enumerate() {
                let mut kernel = self.kernel_of(*length, *nv, *tail);
                kernel.ragged = Some(Ragged {
                    rows: p.open.rows.then(|| self.missing_rows(*length)),
                    lanes: p.open.columns,
                });
                let (name, text) = kernel.emit();
                t.raw(&text);
                let mut when = Vec::new();
                if i + 1 < lengths.len() {
                    when.push(match tiling.is_open() {
                        true => format!("rows > {}L", length - tiling.unit),
                        false => format!("t < {}L", tiling.n_big),
                    });
                }
                if j + 1 < widths.len() {
                    when.push(match p.open.columns {
                        true => format!("lanes > {}L", (nv - 1) * lanes),
                        false => format!("pi == {}L", p.inner_panels() - 1),
                    });
                }
                let rows = if p.open.rows { "rows" } else { "0" };
                let stored = match p.open.columns {
                    true => format!("lanes - {}L", (nv - 1) * lanes),
                    false => "0".to_string(),
                };
                kernels.push(ForTile {
                    name,
                    when,
                    more: format!(", {rows}, {stored}"),
                });
            }
        }
        kernels
    }

    /// For a micro-kernel of tiles of `length`: the first position that a tile may lack, the rows of each position,
    /// and the step of a position in the broadcast operand.
    fn missing_rows(&self, length: i64) -> (i64, i64, i64) {
        let (p, m) = (&self.plan, &self.plan.shape.m);
        let axis = p.tiling.axis;
        let columns = m.get(axis + 1).map_or(1, |d| d.size);
        let first = length - p.tiling.unit + 1;
        (first, columns, self.a_stride(&m[axis]))
    }

    /// Declares how many rows and lanes a tile has, where it may lack some of its micro-kernel's.
    pub(super) fn declare_ragged(&self, t: &mut CText) {
        let p = &self.plan;
        if p.open.rows {
            t.line(format!("const long rows = {};", p.tiling.length("t", "y")));
        }
        if p.open.columns {
            t.line(format!("const long lanes = {};", self.lanes_of_panel()));
        }
    }

    /// Columns of panel `pi`, as a C expression.
    pub(super) fn lanes_of_panel(&self) -> String {
        let (nr, size) = (self.plan.nr(), self.plan.n_inner().size);
        format!("shl_min({size}L - pi*{nr}L, {nr}L)")
    }
}

/// Functions that load and store the first lanes of a vector.
fn store_lanes(vector: Vector) -> String {
    let (name, number) = (vector.c_type(), vector.element.c_type());
    let guard = name.to_uppercase();
    let head = "static inline __attribute__((always_inline))";
    let (load, store) = match (vector.element, vector.bytes()) {
        (Element::F32 | Element::Words, 64) => masked("ps", "float"),
        (Element::F64, 64) => masked("pd", "double"),
        _ => (String::new(), String::new()),
    };
    let bytes = vector.element.bytes();
    format!(
        "#ifndef SHORTHAUL_LANES_{guard}\n#define SHORTHAUL_LANES_{guard}\n\
         {head} {name} shl_load_{name}(const {number} *c, long n) {{\n\
         {load}{name} v = {{0}};\nmemcpy(&v, c, n*{bytes});\nreturn v;\n}}\n\
         {head} void shl_store_{name}({number} *c, {name} v, long n) {{\n\
         {store}memcpy(c, &v, n*{bytes});\n}}\n#endif\n"
    )
}

/// The same with a mask, where the processor has them.
fn masked(suffix: &str, number: &str) -> (String, String) {
    let bits = if number == "float" { "short" } else { "char" };
    let vector = format!("typedef {number} own __attribute__((vector_size(64)));");
    let mask = format!("const unsigned {bits} mask = (unsigned {bits})((1L << n) - 1L);");
    let builtin = |what: &str| format!("__builtin_ia32_{what}u{suffix}512_mask");
    (
        format!(
            "#ifdef __AVX512F__\n{vector}\n{mask}\nconst own zero = {{0}};\n\
             return {}((const void *)c, zero, mask);\n#endif\n",
            builtin("load")
        ),
        format!(
            "#ifdef __AVX512F__\n{vector}\n{mask}\n\
             {}((void *)c, (own)v, mask);\nreturn;\n#endif\n",
            builtin("store")
        ),
    )
}
