//! Contractions: from a sum over a product of two operands, with constant sizes, to specialized C text.
//!
//! Owns the recognition of matrix products, convolutions (forward, data gradient, weight gradient) and
//! depthwise convolutions from their index expressions, the blocking decisions, and the emitted C.
//! Never compiles, loads or runs anything, and never looks at operator names.
//!
//! The one building block is the batch-reduce micro-kernel of Georganas et al. (arXiv 1906.06440):
//! a register tile of the output whose accumulators live over a whole nest of reduction loops.

pub mod access;
mod blocking;
mod choice;
mod combine;
pub(crate) mod convert;
mod cost;
mod depthwise;
mod digits;
mod driver;
pub mod gather;
mod generic;
mod groups;
mod items;
mod microkernel;
mod open;
mod pack;
mod pairs;
mod panels;
mod refusal;
mod stage;
pub mod text;
mod tiles;
mod winograd;
mod words;

pub use choice::{PlanSignature, PriorPlan, PriorPlans};
pub use digits::normal_form;
pub use refusal::{NoFastForm, ScalarCost, ScalarForm};
pub use text::Element;

use crate::features::Pairs;
use graph::{Blocking, DType, Machine};
use text::Vector;
use thiserror::Error;

/// `out[..] = sum over the dims that are absent from out of a[..] * b[..]`.
#[derive(Clone, Debug)]
pub struct Contraction {
    /// The type that products are summed in, which is that of all three buffers where no hook converts.
    pub element: Element,
    /// Sizes of the loop dimensions; an [`Axis`] names them by position.
    pub dims: Vec<i64>,
    /// The left factor.
    pub a: Operand,
    /// The right factor.
    pub b: Operand,
    /// The result. Positions of its axes that no index reaches are set to zero.
    pub out: Operand,
}

/// A buffer and how the dims index it.
#[derive(Clone, Debug)]
pub struct Operand {
    /// The axes of the container; order has no meaning, the strides say where elements lie.
    pub axes: Vec<Axis>,
    /// Offset of the first element, in elements.
    pub base: i64,
}

/// One axis of a container: position = `offset + sum coeff * dim`.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Number of positions.
    pub size: i64,
    /// Distance of two neighbouring positions, in elements.
    pub stride: i64,
    /// Dims with their coefficients.
    pub terms: Vec<(usize, i64)>,
    /// Constant part of the position.
    pub offset: i64,
    /// Positions outside `0..size` read as zero, and writes to them are dropped.
    pub guarded: bool,
}

/// Names of C functions, emitted elsewhere before the contraction, that are called around it.
#[derive(Clone, Debug, Default)]
pub struct Hooks {
    /// `static inline void P(void *const *buf, T *dst, long offset, long stride, long len)`: writes numbers
    /// of the contraction's type, `dst[i]`, i < len, from the elements `offset + i*stride` (counted from `buf[0]`) of operand `a`.
    pub prologue_a: Option<String>,
    /// The same for operand `b`, with offsets counted from `buf[1]`.
    pub prologue_b: Option<String>,
    /// For operands that are staged in blocks, each element in one block: the function to call in place of the prologue
    /// if the element must also be kept. It is called once for each element.
    pub keeps: [Option<String>; 2],
    /// 16-bit types of `a` and `b`, where their prologues do nothing but widen.
    pub widens: [Option<DType>; 2],
    /// `static inline void E(void *const *buf, long tid, long batch, long m0, long m1, long n0, long n1)`:
    /// called once each block of outputs is final and still in cache. `batch`, `m` and `n` are flat
    /// indices, in the order of the output's strides, over the dims that out shares with both
    /// operands, with one operand, and with the other; [`EmittedContraction::roles`] tells which.
    pub epilogue: Option<String>,
    /// Whether nothing but the epilogue reads the results, so that they need no place in memory.
    pub consumes: bool,
    /// `static inline void S(void *const *buf, long tid, long slot, long batch, long m0, long m1, long n0, long n1)`:
    /// called after the epilogue on the same block, with the number of its range of `m`: the ranges cover
    /// `m` once, in order, and are the same for any number of threads at run time.
    pub sums: Option<String>,
}

impl Hooks {
    /// Whether anything is called on blocks of the result.
    pub(crate) fn follow(&self) -> bool {
        self.epilogue.is_some() || self.sums.is_some()
    }
}

/// What the text is specialized for.
#[derive(Clone, Debug)]
pub struct ContractionTarget {
    /// f32 lanes of a vector: 16 (AVX-512), 8 (AVX2) or 4.
    pub vector_width: i64,
    /// Largest number of threads a launch will run on; the actual number is a run-time argument.
    pub threads: i64,
    /// The limits by which plans are compared.
    pub machine: Machine,
    /// Plans of other sizes of the same model, whose text may serve again.
    pub known: Vec<PriorPlan>,
    /// What the caller asks of the choice of blocking, and of the report about it.
    pub requested: BlockingRequest,
}

/// What a caller says about one contraction's blocking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockingRequest {
    /// How to cut it, where that is possible.
    pub blocking: Option<Blocking>,
    /// How many of the best other ways to report.
    pub n_others: usize,
    /// Whether to take, instead of the best way, one whose text differs in as many numbers as possible and in nothing
    /// else.
    pub varies: bool,
    /// Whether convolutions of 3×3 taps may be computed by minimal filtering.
    pub allows_winograd: bool,
}

/// How a contraction was cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockingChoice {
    /// What was chosen.
    pub blocking: Blocking,
    /// Other ways with the nanoseconds they are predicted to take, the best first.
    pub others: Vec<(Blocking, u64)>,
}

/// One launch: a C function `void SYMBOL(void *const *buf, void *scratch, long tid, long nt)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The C symbol.
    pub symbol: String,
}

/// Which dims of the description play which part; each list in the order of the output's strides.
#[derive(Clone, Debug, Default)]
pub struct Roles {
    /// Dims of both operands and the output.
    pub batch: Vec<usize>,
    /// Dims of the broadcast operand and the output.
    pub m: Vec<usize>,
    /// Dims of the vector operand and the output.
    pub n: Vec<usize>,
    /// Each dim with its size and its stride in the output, as the loops go through it: a data gradient's loops
    /// count positions of the output, which are sums of dims in the description. Empty where the output is
    /// written in phases.
    pub places: Vec<(usize, i64, i64)>,
}

/// The C text of a contraction and what running it needs.
///
/// Buffers: `buf[0]` = a, `buf[1]` = b, `buf[2]` = out, `buf[3]` = shared scratch (64-byte aligned);
/// those after are the hooks'. The launches run in order, each on all threads, with a barrier between.
#[derive(Clone, Debug)]
pub struct EmittedContraction {
    /// C source; relies on `<string.h>`, which it includes.
    pub source: String,
    /// Launches in order.
    pub launches: Vec<Launch>,
    /// Bytes of `buf[3]`.
    pub shared_scratch_bytes: usize,
    /// Bytes of `scratch`, per thread.
    pub thread_scratch_bytes: usize,
    /// Multiplications and additions that it does: two per term (borders included), fewer by minimal filtering.
    pub flops: u64,
    /// Nanoseconds that its launches are predicted to take on the target's threads.
    pub predicted_ns: u64,
    /// Which implementation was chosen.
    pub path: &'static str,
    /// The type of the numbers that it multiplies: `bf16` if pairs of them are, `f32` if they are widened before.
    pub products: DType,
    /// Why it is the scalar one, if it is.
    pub refusal: Option<NoFastForm>,
    /// Whether it takes prologues on both operands.
    pub takes_prologues: bool,
    /// How it was cut, where there was a choice.
    pub cuts: Option<BlockingChoice>,
    /// What its text depends on besides sizes.
    pub choices: Vec<PlanSignature>,
    /// Ranges of `m` that [`Hooks::sums`] is called for; 0 without it.
    pub sum_slots: i64,
    /// Whether each block of results goes to the epilogue in the order of the output's strides.
    pub finishes_in_blocks: bool,
    /// Where results are in no buffer: floats between the rows of the block that the epilogue finds in `buf[2]`, at
    /// `m * pitch + n` for the flat indices it is given. [`BUFFERS`] in the source stands for how many buffers there are.
    pub pitch: Option<i64>,
    /// Dims by role, for writing an epilogue.
    pub roles: Roles,
}

impl EmittedContraction {
    /// Which generator wrote it, and the type of the numbers that it multiplies: what the kernel's record says.
    pub(crate) fn generator(&self) -> (&'static str, Option<DType>) {
        (self.path, Some(self.products))
    }
}

/// See [`EmittedContraction::pitch`].
pub(crate) const BUFFERS: &str = "SH_BUFFER_COUNT";

/// Why a contraction cannot be emitted.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Unsupported {
    /// A dim is zero or negative.
    #[error("contraction dimension {dim} has size {size}; sizes must be at least 1")]
    EmptyDim {
        /// Position in `Contraction::dims`.
        dim: usize,
        /// Its size.
        size: i64,
    },
    /// An axis names a dim that is not there.
    #[error("axis {axis} of operand {operand} names dimension {dim}, but there are only {n_dims}")]
    UnknownDim {
        /// "a", "b" or "out".
        operand: &'static str,
        /// Position of the axis.
        axis: usize,
        /// The dim it names.
        dim: usize,
        /// Number of dims.
        n_dims: usize,
    },
    /// Hooks were asked for where only the plain loops apply.
    #[error("the plain-loop fallback of a contraction takes no {hook}: {reason}")]
    HookOnFallback {
        /// Which hook.
        hook: &'static str,
        /// Why no faster implementation applies.
        reason: NoFastForm,
    },
    /// The vector width has no micro-kernel.
    #[error("vector width {0} is not one of 4, 8, 16")]
    VectorWidth(i64),
}

/// Emits the C text of `c` under the symbol prefix `name`.
///
/// # Errors
/// If there is no micro-kernel for the vector width, or a hook is given for a form without a fast kernel. Without
/// hooks such a form becomes scalar loops.
pub fn emit(
    name: &str,
    c: &Contraction,
    hooks: &Hooks,
    target: &ContractionTarget,
) -> Result<EmittedContraction, Unsupported> {
    if ![4, 8, 16].contains(&target.vector_width) {
        return Err(Unsupported::VectorWidth(target.vector_width));
    }
    check(c)?;
    let reason = match specialized(name, c, hooks, target, None) {
        Ok(done) => return Ok(done),
        Err(reason) => reason,
    };
    let wanted = [
        ("prologue on operand a", hooks.prologue_a.is_some()),
        ("prologue on operand b", hooks.prologue_b.is_some()),
        ("epilogue", hooks.epilogue.is_some()),
        ("sums of columns", hooks.sums.is_some()),
    ];
    if let Some((hook, _)) = wanted.into_iter().find(|w| w.1) {
        return Err(Unsupported::HookOnFallback { hook, reason });
    }
    Ok(generic::emit(name, c, reason, target))
}

/// Whether a fast form of `c` computes its operands by the prologues of `hooks`.
pub(crate) fn takes_prologues(c: &Contraction, hooks: &Hooks, target: &ContractionTarget) -> bool {
    let vector = Vector::new(c.element, target.vector_width);
    let Some(form) = check(c)
        .ok()
        .and_then(|()| gather::gather_form(access::Problem::new(c)).ok())
    else {
        return false;
    };
    match depthwise::recognize(&form, hooks, vector, target) {
        Ok(Some(_)) => hooks.keeps == [None, None],
        Ok(None) => {
            let is_one = form.parts.len() == 1 && form.zeros.is_empty();
            let fits = |p| blocking::shape(p).is_ok_and(|s| s.keeps(hooks, is_one));
            form.parts.iter().all(fits)
        }
        Err(_) => false,
    }
}

/// Like [`emit`] for two operands in bf16 without prologues, by instructions for pairs of numbers. The text needs the
/// prelude before it.
///
/// # Errors
/// Why they do not fit.
pub(crate) fn emit_pairs(
    name: &str,
    c: &Contraction,
    hooks: &Hooks,
    target: &ContractionTarget,
    pairs: Pairs,
) -> Result<EmittedContraction, NoFastForm> {
    specialized(name, c, hooks, target, Some(pairs))
}

/// Like [`emit`] for two operands in bf16 without prologues, of which two steps of the reduction are multiplied at a
/// time, by AVX512-BF16. The text needs the prelude before it.
///
/// # Errors
/// Why no two steps can be read together, or no fast form applies.
pub(crate) fn emit_words(
    name: &str,
    c: &Contraction,
    hooks: &Hooks,
    target: &ContractionTarget,
) -> Result<EmittedContraction, NoFastForm> {
    let words = match target.vector_width {
        16 => words::in_words(name, c),
        _ => None,
    };
    let words = words.ok_or(NoFastForm::NoPairs)?;
    let [prologue_a, prologue_b] = words.prologues;
    let hooks = Hooks {
        prologue_a,
        prologue_b,
        ..hooks.clone()
    };
    let mut done = specialized(name, &words.contraction, &hooks, target, None)?;
    done.flops = flops(c);
    done.source = words.text + &done.source;
    Ok(done)
}

fn specialized(
    name: &str,
    c: &Contraction,
    hooks: &Hooks,
    target: &ContractionTarget,
    pairs: Option<Pairs>,
) -> Result<EmittedContraction, NoFastForm> {
    let form = gather::gather_form(access::Problem::new(c))?;
    let mut phased = form.parts.len() > 1 || !form.zeros.is_empty();
    let inner = if phased {
        Hooks {
            epilogue: None,
            consumes: false,
            sums: None,
            ..hooks.clone()
        }
    } else {
        hooks.clone()
    };
    let by_definition = |done| EmittedContraction {
        flops: flops(c),
        ..done
    };
    let mut done = if let Some(pairs) = pairs {
        let emitted = pairs::emit(name, &form, &inner, target, pairs)?;
        phased |= emitted.late_epilogue;
        by_definition(emitted.contraction)
    } else {
        let vector = Vector::new(c.element, target.vector_width);
        let by_channel = match c.element {
            Element::Words => None,
            _ => depthwise::emit(name, &form, &inner, vector, target)?,
        };
        match by_channel {
            Some(done) => by_definition(done),
            None => {
                let direct = driver::plan(name, &form, &inner, vector, target)?;
                let filtered = match c.element {
                    Element::Words => None,
                    _ => winograd::plan(&form, &inner, vector, target),
                };
                match filtered {
                    Some(filtered) => match filtered.choice(&direct, &target.requested) {
                        (cuts, true) => filtered.write(name, &inner, cuts),
                        (cuts, false) => EmittedContraction {
                            cuts: Some(cuts),
                            ..by_definition(direct.write())
                        },
                    },
                    None => by_definition(direct.write()),
                }
            }
        }
    };
    if pairs.is_some() {
        let rate = target.machine.product_rate(done.products) * target.threads.max(1) as u64;
        done.predicted_ns = done.flops.saturating_mul(1000) / rate;
    }
    done.finishes_in_blocks &= !phased;
    if phased {
        done.roles.places.clear();
    }
    if phased && hooks.follow() {
        epilogue_launch(&mut done, name, c, hooks, target);
    }
    Ok(done)
}

/// An output written in phases is complete only at the end: the epilogue gets a launch of its own.
fn epilogue_launch(
    e: &mut EmittedContraction,
    name: &str,
    c: &Contraction,
    hooks: &Hooks,
    target: &ContractionTarget,
) {
    const BLOCK_FLOATS: i64 = 1 << 16;
    let size = |dims: &[usize]| dims.iter().map(|&d| c.dims[d]).product::<i64>();
    let (batch, n) = (size(&e.roles.batch), size(&e.roles.n));
    let m = c.out.axes.iter().map(|ax| ax.size).product::<i64>() / (batch * n);
    let blocks = (m * n / BLOCK_FLOATS + 1).max(2 * target.threads).min(m);
    let symbol = format!("{name}_epilogue");
    let mut t = text::CText::default();
    t.line(format!(
        "void {symbol}(void *const *buf, void *scratch, long tid, long nt) {{"
    ));
    t.line("(void)scratch;");
    let units = batch * blocks;
    t.line(format!(
        "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
    ));
    t.line(format!("const long q = u%{blocks}L;"));
    let block = format!("u/{blocks}L, {m}L*q/{blocks}L, {m}L*(q + 1)/{blocks}L, 0, {n}L");
    if let Some(epilogue) = &hooks.epilogue {
        t.line(format!("{epilogue}(buf, tid, {block});"));
    }
    if let Some(sums) = &hooks.sums {
        t.line(format!("{sums}(buf, tid, q, {block});"));
        e.sum_slots = blocks;
    }
    t.close(2);
    e.source.push_str(&t.finish());
    e.launches.push(Launch { symbol });
}

/// Dims by role, in the order of the output's strides; the vector operand is `a` if `swapped`.
fn roles(p: &access::Problem, swapped: bool) -> Roles {
    let vector = if swapped { &p.a } else { &p.b };
    let broadcast = if swapped { &p.b } else { &p.a };
    let mut dims: Vec<usize> = (0..p.dims.len())
        .filter(|&d| p.dims[d] > 1 && p.out.has(d))
        .collect();
    dims.sort_by_key(|&d| std::cmp::Reverse(p.out.stride(d)));
    let place = |&d: &usize| (d, p.dims[d], p.out.stride(d));
    let mut r = Roles {
        places: dims.iter().map(place).collect(),
        ..Roles::default()
    };
    for d in dims {
        match (broadcast.has(d), vector.has(d)) {
            (true, true) => r.batch.push(d),
            (false, true) => r.n.push(d),
            _ => r.m.push(d),
        }
    }
    r
}

fn flops(c: &Contraction) -> u64 {
    2 * c.dims.iter().map(|&d| d as u64).product::<u64>()
}

/// The operations of a contraction with as few products as any of its forms needs.
pub fn least_flops(c: &Contraction) -> u64 {
    let by_definition = flops(c);
    let form = check(c)
        .ok()
        .and_then(|()| gather::gather_form(access::Problem::new(c)).ok());
    let filtered = form.and_then(|form| winograd::product_flops(&form, c.element));
    filtered.map_or(by_definition, |n| n.min(by_definition))
}

/// Whether the dims of a contraction exist and have points.
///
/// # Errors
/// The dim that does not.
pub fn check(c: &Contraction) -> Result<(), Unsupported> {
    if let Some((dim, &size)) = c.dims.iter().enumerate().find(|(_, s)| **s < 1) {
        return Err(Unsupported::EmptyDim { dim, size });
    }
    for (operand, op) in [("a", &c.a), ("b", &c.b), ("out", &c.out)] {
        for (axis, ax) in op.axes.iter().enumerate() {
            if let Some(&(dim, _)) = ax.terms.iter().find(|t| t.0 >= c.dims.len()) {
                return Err(Unsupported::UnknownDim {
                    operand,
                    axis,
                    dim,
                    n_dims: c.dims.len(),
                });
            }
        }
    }
    Ok(())
}
