//! Contractions on a GPU: from a sum over a product of two operands, with constant sizes, to CUDA text.
//!
//! Owns the choice of tiles, the split of the reduction and the text of the kernels: register tiles
//! of scalar multiply-adds (`simt`), warp products of 16-bit operands with fp32 sums (`mma`) and, for
//! Hopper where it is asked for, products of warpgroups of the same (`wgmma`).
//! Convolutions and their gradients are the same kernels with gathered rows and columns: an address
//! is a part of the row plus a part of the reduction index, and so is each guarded coordinate, so
//! the row's part stays in registers over the whole reduction. Never compiles or runs anything.

mod bulk;
mod convolution;
mod form;
mod gemm;
mod kernel;
mod source;
mod stage;
mod store;
mod swizzle;
mod tile;
mod warpgroup;

use super::{Emitted, Param};
pub use convolution::{NotAConvolution, convolution};
use form::Form;
pub use gemm::{NotAGemm, gemm};
use graph::DType;
pub(super) use kernel::declaration;
use kernels::contraction::{Contraction, NoFastForm, Unsupported as Malformed};
use kernels::plan::Buffer;
use store::Sink;
use thiserror::Error;
use tile::{Path, Tile};

/// Element types of the operands; sums are fp32, or fp64 if any of them is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    /// The left factor.
    pub a: DType,
    /// The right factor.
    pub b: DType,
    /// The result.
    pub out: DType,
}

/// The memory of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// The left factor.
    pub a: Buffer,
    /// The right factor.
    pub b: Buffer,
    /// The result.
    pub out: Buffer,
}

/// Element-wise work on each finished sum, in registers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Epilogue {
    /// The function's text: `SH_FN void EPILOGUE(S value, long long at, int c0, int c1, …, PARAMS)`,
    /// where S is the type of the sums (`float`, or `double` with fp64 operands), `at` the element of
    /// `out`, counted from the start of its buffer, and `c0` … its position along each axis of
    /// `out`. It is called once for each element, those no product reaches included, and stores what
    /// it makes. Every kernel that calls it gets a copy under its own name.
    pub text: String,
    /// Its further parameters, which become parameters of the kernel, in order. Names: not `a`, `b`,
    /// `out`, `sums`.
    pub params: Vec<Param>,
    /// What is passed for them.
    pub args: Vec<Buffer>,
    /// Whether the sum itself is stored to `out` too.
    pub keeps_product: bool,
}

/// The CUDA text of a contraction and what running it needs.
#[derive(Clone, Debug, PartialEq)]
pub struct EmittedContraction {
    /// Launches in order; each sees what those before wrote. [`WORKSPACE`] is their workspace.
    pub launches: Vec<Emitted>,
    /// Bytes of workspace, for sums of parts of the reduction.
    pub workspace_bytes: u64,
    /// Multiplications and additions, two per term, borders included.
    pub flops: u64,
    /// `simt`, `mma` or `wgmma`.
    pub path: &'static str,
}

/// The workspace of a contraction's launches, until it has a number in a program.
pub const WORKSPACE: Buffer = Buffer::Workspace(0);

/// Why a contraction cannot be emitted.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Unsupported {
    /// The description contradicts itself.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The result's positions are not written once each by shifted copies of the loops.
    #[error("no GPU kernel for this contraction: {reason}; emit its map as plain loops")]
    Form {
        /// Which condition fails.
        reason: NoFastForm,
    },
    /// Warpgroups do not multiply it; other kernels may.
    #[error("no product of warpgroups: {reason}")]
    Warpgroup {
        /// Which condition fails.
        reason: &'static str,
    },
    /// An element type has no product.
    #[error(
        "operand {operand} of a contraction is {dtype:?}; only F32, F64, BF16 and F16 multiply on a GPU"
    )]
    Type {
        /// "a", "b" or "out".
        operand: &'static str,
        /// Its type.
        dtype: DType,
    },
    /// More rows, columns, … than a 32-bit number counts, or more multiplications than a 64-bit one.
    #[error("a contraction with {count} {what} is too large for one GPU kernel; split it before")]
    TooLarge {
        /// "rows", "columns", …
        what: &'static str,
        /// How many, or the largest number.
        count: i64,
    },
}

impl Unsupported {
    /// Why a contraction that is well formed has no kernel of tiles.
    pub(crate) fn no_fast_form(&self) -> Option<NoFastForm> {
        match self {
            Unsupported::Form { reason } => Some(*reason),
            Unsupported::TooLarge { .. } => Some(NoFastForm::TooLarge),
            Unsupported::Type { .. } => Some(NoFastForm::ElementType),
            // Loops over such sizes are refused by name, and warpgroups are one of several kernels.
            Unsupported::Malformed(_) | Unsupported::Warpgroup { .. } => None,
        }
    }
}

/// Fewest rows, columns and terms worth a tile: below, a thread for each result reads as many bytes.
const LEAST: i64 = 8;

/// Whether a contraction is bound by memory: with fewer than [`LEAST`] rows, columns or terms an
/// operand is used too few times for tiles to save traffic, and its map in plain loops is better.
/// Depthwise convolutions (one column for each channel) and products with a vector are such.
///
/// # Errors
/// As [`emit`].
pub fn is_thin(c: &Contraction) -> Result<bool, Unsupported> {
    kernels::contraction::check(c)?;
    let thin = |f: &Form| [&f.m, &f.n, &f.k].iter().any(|d| f.count(d) < LEAST);
    Ok(form::forms(c)?.parts.iter().all(thin))
}

/// Emits kernels whose names begin with `name`, with tiles chosen by the shape.
///
/// # Errors
/// See [`Unsupported`]; nothing is refused later than here.
pub fn emit(
    name: &str,
    c: &Contraction,
    types: Types,
    buffers: Buffers,
    epilogue: Option<&Epilogue>,
) -> Result<EmittedContraction, Unsupported> {
    emit_in_tiles(name, c, types, buffers, epilogue, None)
}

/// How many tiles [`emit`] chooses from.
pub fn n_tiles(types: Types) -> usize {
    path(types).tiles().len()
}

/// Like [`emit`], with the tile of that number, if `tile` is given; 0 is the largest. A contraction for which the shape
/// would choose another tile is slower with it, and equally correct.
///
/// # Errors
/// As [`emit`].
pub fn emit_in_tiles(
    name: &str,
    c: &Contraction,
    types: Types,
    buffers: Buffers,
    epilogue: Option<&Epilogue>,
    tile: Option<usize>,
) -> Result<EmittedContraction, Unsupported> {
    Request {
        name,
        c,
        types,
        buffers,
        epilogue,
        tile,
        path: path(types),
    }
    .emit()
}

/// How many tiles [`emit_for_warpgroups`] has: those that threads copy the operands of, from the largest on,
/// then those that the copy engine feeds.
pub fn n_warpgroup_tiles() -> usize {
    Path::Wgmma.tiles().len() + Path::Bulk.tiles().len()
}

/// Like [`emit_in_tiles`], by products of warpgroups: kernels for Hopper (sm_90a) only. Without `tile`, chooses one
/// whose operands are copied by threads.
///
/// # Errors
/// As [`emit`]; [`Unsupported::Warpgroup`] where the factors are not of one 16-bit type or one of them
/// has neither terms nor rows in whole pieces of 16 bytes; for the copy engine, also where rows, terms or
/// products do not lie at one distance each.
pub fn emit_for_warpgroups(
    name: &str,
    c: &Contraction,
    types: Types,
    buffers: Buffers,
    epilogue: Option<&Epilogue>,
    tile: Option<usize>,
) -> Result<EmittedContraction, Unsupported> {
    if path(types) != Path::Mma {
        return Err(Unsupported::Warpgroup {
            reason: "the factors are not both bf16 or both f16",
        });
    }
    let n_copied = Path::Wgmma.tiles().len();
    let (path, tile) = match tile {
        Some(n) if n >= n_copied => (Path::Bulk, Some(n - n_copied)),
        n => (Path::Wgmma, n),
    };
    Request {
        name,
        c,
        types,
        buffers,
        epilogue,
        tile,
        path,
    }
    .emit()
}

/// What is asked of [`emit`].
struct Request<'a> {
    name: &'a str,
    c: &'a Contraction,
    types: Types,
    buffers: Buffers,
    epilogue: Option<&'a Epilogue>,
    tile: Option<usize>,
    path: Path,
}

impl Request<'_> {
    fn emit(&self) -> Result<EmittedContraction, Unsupported> {
        let (c, types) = (self.c, self.types);
        kernels::contraction::check(c)?;
        for (operand, dtype) in [("a", types.a), ("b", types.b), ("out", types.out)] {
            if !multiplies(dtype) {
                return Err(Unsupported::Type { operand, dtype });
            }
        }
        let forms = form::forms(c)?;
        let mut done = EmittedContraction {
            launches: Vec::new(),
            workspace_bytes: 0,
            flops: 2 * c.dims.iter().map(|&d| d as u64).product::<u64>(),
            path: self.path.name(),
        };
        for (i, part) in forms.parts.iter().enumerate() {
            let given = self.tile.and_then(|n| Tile::nth(n, part, self.path));
            let job = Job {
                name: format!("{}_{i}", self.name),
                form: part,
                types,
                buffers: self.buffers,
                tile: given.unwrap_or_else(|| Tile::choose(part, self.path)),
                sink: Sink::new(c, part.out.base, types, self.epilogue)?,
            };
            match self.path {
                Path::Wgmma => warpgroup::emit(&job, &mut done)?,
                Path::Bulk => bulk::emit(&job, &mut done)?,
                Path::Simt | Path::Mma => kernel::emit(&job, &mut done),
            }
        }
        for (i, zeros) in forms.zeros.iter().enumerate() {
            let sink = Sink::new(c, zeros.base, types, self.epilogue)?;
            let name = format!("{}_zero{i}", self.name);
            store::emit_zeros(&name, zeros, &sink, self.buffers, &mut done);
        }
        Ok(done)
    }
}

/// Whether values of this type can be factors or results.
pub fn multiplies(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16)
}

/// Whether warp products apply: both factors of the same 16-bit type.
fn tensor_core(t: Types) -> bool {
    t.a == t.b && matches!(t.a, DType::BF16 | DType::F16) && t.out != DType::F64
}

/// What [`emit`] uses, which every architecture has.
fn path(types: Types) -> Path {
    match tensor_core(types) {
        true => Path::Mma,
        false => Path::Simt,
    }
}

/// One kernel's decisions.
struct Job<'a> {
    name: String,
    form: &'a Form,
    types: Types,
    buffers: Buffers,
    tile: Tile,
    sink: Sink<'a>,
}

impl Types {
    /// The type of the sums.
    pub fn sum(self) -> DType {
        let any_f64 = [self.a, self.b, self.out].contains(&DType::F64);
        if any_f64 { DType::F64 } else { DType::F32 }
    }
}

fn bytes(t: DType) -> i64 {
    match t {
        DType::F64 => 8,
        DType::BF16 | DType::F16 => 2,
        _ => 4,
    }
}
