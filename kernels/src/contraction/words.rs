//! Products of bf16 operands by instructions that multiply two steps of the reduction at a time
//! (AVX512-BF16, `vdpbf16ps`): the contraction is rewritten as one over *words*, 32 bits that hold the numbers of
//! two neighbouring steps, and planned and written like one in single precision.
//!
//! Owns the choice of the dim whose steps are paired, and how each operand's words are read: in place, where the
//! two numbers are neighbours in memory and words do not overlap; else by a prologue that joins them on the way to
//! packed or staged memory. The sums are those of the definition, two terms at a time.

use super::access::{Access, Problem};
use super::text::Element;
use super::{Axis, Contraction, Operand};

/// A contraction over words.
pub(super) struct Words {
    pub(super) contraction: Contraction,
    /// The functions that read words of `a` and `b`, where they are not read in place.
    pub(super) prologues: [Option<String>; 2],
    /// Their text.
    pub(super) text: String,
}

/// Rewrites `c`, if it has a dim whose steps can be paired: one of the reduction, of even size, that no border cuts.
pub(super) fn in_words(name: &str, c: &Contraction) -> Option<Words> {
    let mut p = Problem::new(c);
    p.tidy();
    let dim = paired_dim(c, &p)?;
    let mut text = String::new();
    let mut operand = |buffer: usize, operand: &Operand, access: &Access| {
        if let Some(words) = in_place(operand, access, dim, &c.dims) {
            return (words, None);
        }
        let function = format!("{name}_words{buffer}");
        text += &joining(&function, buffer, access.stride(dim));
        (by_steps_of_two(operand, dim), Some(function))
    };
    let (a, prologue_a) = operand(0, &c.a, &p.a);
    let (b, prologue_b) = operand(1, &c.b, &p.b);
    let mut dims = c.dims.clone();
    dims[dim] /= 2;
    Some(Words {
        contraction: Contraction {
            element: Element::Words,
            dims,
            a,
            b,
            out: c.out.clone(),
        },
        prologues: [prologue_a, prologue_b],
        text,
    })
}

/// The dim to pair: the one that most operands read in place, then the one with the shortest steps, so that dims
/// outside of it still join.
fn paired_dim(c: &Contraction, p: &Problem) -> Option<usize> {
    let is_free = |x: &Access, dim: usize| {
        let mut axes = x.coords.iter().filter(|axis| axis.coeff(dim) != 0);
        x.stride(dim) != 0 && axes.all(|axis| !axis.guarded)
    };
    let in_reduction = |dim: &usize| {
        let even = c.dims[*dim] % 2 == 0;
        even && !p.out.has(*dim) && is_free(&p.a, *dim) && is_free(&p.b, *dim)
    };
    (0..c.dims.len()).filter(in_reduction).min_by_key(|dim| {
        let operands = [(&c.a, &p.a), (&c.b, &p.b)];
        let read = operands.map(|(x, access)| in_place(x, access, *dim, &c.dims).is_none());
        let steps = p.a.stride(*dim).abs().max(p.b.stride(*dim).abs());
        (read.into_iter().filter(|joined| *joined).count(), steps)
    })
}

/// The operand in words as they lie in memory: where the dim's steps are neighbours, and everything else keeps words
/// apart.
fn in_place(x: &Operand, access: &Access, dim: usize, dims: &[i64]) -> Option<Operand> {
    if x.base % 2 != 0 || access.stride(dim) != 1 {
        return None;
    }
    let mut axes = Vec::new();
    for axis in &x.axes {
        let own: i64 = axis.terms.iter().filter(|t| t.0 == dim).map(|t| t.1).sum();
        let is_fixed = axis.terms.iter().all(|t| dims[t.0] == 1) && axis.offset == 0;
        if is_fixed && !axis.guarded {
            continue;
        }
        if own == 0 {
            if axis.stride % 2 != 0 {
                return None;
            }
            axes.push(Axis {
                stride: axis.stride / 2,
                ..axis.clone()
            });
            continue;
        }
        let others = axis.terms.iter().filter(|t| t.0 != dim);
        let apart = others.clone().all(|t| t.1 % 2 == 0) && axis.offset % 2 == 0;
        if own != 1 || axis.stride != 1 || axis.guarded || axis.size % 2 != 0 || !apart {
            return None;
        }
        let halved = others.map(|t| (t.0, t.1 / 2));
        axes.push(Axis {
            size: axis.size / 2,
            terms: std::iter::once((dim, 1)).chain(halved).collect(),
            offset: axis.offset / 2,
            ..axis.clone()
        });
    }
    Some(Operand {
        axes,
        base: x.base / 2,
    })
}

/// The operand where each step of the dim is two of the former ones. Positions still count numbers.
fn by_steps_of_two(x: &Operand, dim: usize) -> Operand {
    let mut twice = x.clone();
    for axis in &mut twice.axes {
        for term in axis.terms.iter_mut().filter(|t| t.0 == dim) {
            term.1 *= 2;
        }
    }
    twice
}

/// A prologue, see [`super::Hooks`], whose numbers are words: the number at a place and the one `partner` places on.
fn joining(name: &str, buffer: usize, partner: i64) -> String {
    let word = |at: &str| format!("low[{at}] | (sh_u32)high[{at}] << 16");
    format!(
        "static inline void {name}(void *const *buf, float *restrict dst, long offset, long stride, long len) {{\n\
         \x20 typedef sh_u32 word __attribute__((may_alias));\n\
         \x20 const sh_u16 *low = (const sh_u16 *)buf[{buffer}] + offset, *high = low + {partner}L;\n\
         \x20 word *restrict d = (word *)dst;\n\
         \x20 if (stride == 1) {{\n#pragma omp simd\n    for (long i = 0; i < len; i++) d[i] = {};\n\
         \x20 }} else for (long i = 0; i < len; i++) d[i] = {};\n}}\n",
        word("i"),
        word("i*stride"),
    )
}

#[cfg(test)]
mod tests {
    use super::in_words;
    use crate::contraction::{Axis, Contraction, Element, Operand};

    fn axis(size: i64, stride: i64, terms: &[(usize, i64)], guarded: bool) -> Axis {
        Axis {
            size,
            stride,
            terms: terms.to_vec(),
            offset: 0,
            guarded,
        }
    }

    fn operand(axes: &[Axis]) -> Operand {
        Operand {
            axes: axes.to_vec(),
            base: 0,
        }
    }

    /// `out[i, j] = sum over k of a[i, k] * b[k, j]`, with `k` terms of which a border may cut some of `a`.
    fn product(k: i64, guarded: bool) -> Contraction {
        Contraction {
            element: Element::F32,
            dims: vec![4, 6, k],
            a: operand(&[axis(4, k, &[(0, 1)], false), axis(k, 1, &[(2, 1)], guarded)]),
            b: operand(&[axis(k, 6, &[(2, 1)], false), axis(6, 1, &[(1, 1)], false)]),
            out: operand(&[axis(4, 6, &[(0, 1)], false), axis(6, 1, &[(1, 1)], false)]),
        }
    }

    #[test]
    fn neighbours_are_read_in_place_and_others_joined() {
        let words = in_words("f", &product(10, false)).unwrap();
        assert_eq!(words.contraction.dims, [4, 6, 5]);
        assert_eq!(words.prologues, [None, Some("f_words1".to_string())]);
        assert!(words.text.contains("high = low + 6L"), "{}", words.text);
        let strides = |x: &Operand| x.axes.iter().map(|x| x.stride).collect::<Vec<_>>();
        assert_eq!(strides(&words.contraction.a), [5, 1]);
        assert_eq!(words.contraction.b.axes[0].terms, [(2, 2)]);
    }

    #[test]
    fn odd_sizes_and_borders_are_not_paired() {
        assert!(in_words("f", &product(9, false)).is_none());
        let mut cut = product(10, true);
        cut.a.axes[1].offset = -1;
        assert!(in_words("f", &cut).is_none());
        // A border that nothing reaches cuts nothing.
        assert!(in_words("f", &product(10, true)).is_some());
    }
}
