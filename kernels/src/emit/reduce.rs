//! How writes under a conflict resolution are accumulated.
//!
//! Owns the choice between a register, memory, and a part for each thread, and the C text of each.
//! Sums are blocked: at most a few thousand terms are added in the container's precision, and then
//! the block's sum is added in double precision.

use super::index::Loop;
use super::rows::Row;
use super::scalar;
use super::text::CText;
use super::values::{Effect, Values, depth_of_address};
use graph::{DType, Reduction};

/// Most terms that the lanes of one accumulator add in single precision.
const BLOCK_TERMS: i64 = 4096;
/// Most of them that one lane adds.
const LANE_TERMS: i64 = 256;

/// Shortest innermost loop whose extreme is found by comparing integers.
const KEYED: i64 = 16;

/// What a write does at each iteration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Update {
    /// Stores the value.
    Store,
    /// Combines the value into memory.
    Memory,
    /// Combines the value into a register.
    Register,
    /// Combines the value into a row of sums.
    Row,
}

/// Where combined values go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Into {
    /// The container.
    Container,
    /// The thread's part under this name.
    Part(String),
}

/// How elements get the identity before the first value is combined into them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Start {
    /// Nothing to do: the element is stored once, or is a thread's part.
    Nothing,
    /// The written loops store it before the leaf.
    Loops,
    /// The whole container is filled beforehand.
    Whole,
}

/// The accumulation of one effect.
#[derive(Clone, Debug)]
pub(crate) struct Accumulation {
    pub(crate) update: Update,
    pub(crate) start: Start,
    reduction: Reduction,
    dtype: DType,
    /// The type of the container's elements.
    stored: DType,
    /// Register: the loop depth it is declared at.
    depth: usize,
    /// Register: stored at the end rather than combined.
    plain: bool,
    /// Register: block sums are added up in a wider type.
    wide: bool,
    /// Iterations of the vector loop after which a block ends.
    pub(crate) chunk: Option<i64>,
    /// Row: where it is kept.
    pub(crate) row: Option<Row>,
    /// Register: integers stand for the floats of an extreme.
    keyed: bool,
    name: String,
    into: Into,
}

/// What surrounds the leaf, for [`Accumulation::new`].
pub(crate) struct Surroundings<'a> {
    /// The leaf's loops.
    pub(crate) loops: &'a [Loop],
    /// Loops around the leaf that are not parallel.
    pub(crate) enclosing: &'a [Loop],
    /// Whether all elements of the container (local: of the point's part) are written.
    pub(crate) covers: bool,
    /// The thread's part, if the container is reduced over parallel points: its name when whole
    /// rows are added, and its name when single numbers are.
    pub(crate) part: Option<(String, String)>,
    /// The type of the container's elements.
    pub(crate) stored: DType,
    /// Most iterations of the vector loop.
    pub(crate) run: i64,
}

impl Accumulation {
    /// Decides for the `n`-th effect of a leaf.
    pub(crate) fn new(n: usize, e: &Effect, values: &Values, around: &Surroundings) -> Self {
        let dtype = values.get(e.value).dtype;
        let mut acc = Accumulation {
            update: Update::Store,
            start: Start::Nothing,
            reduction: e.conflict.unwrap_or(Reduction::Sum),
            dtype,
            stored: around.stored,
            depth: 0,
            plain: false,
            wide: false,
            chunk: None,
            row: None,
            keyed: false,
            name: format!("a{n}"),
            into: Into::Container,
        };
        if e.conflict.is_none() {
            return acc;
        }
        let loops = around.loops;
        acc.depth = depth_of_address(&e.address, loops, values);
        let owned = |l: &Loop| e.write.owned.contains(&l.var);
        let spread = !loops[..acc.depth].iter().all(owned) || !around.enclosing.iter().all(owned);
        let scattered = !e.address.gather.is_empty() || !e.address.guards.is_empty();
        let register = acc.depth < loops.len() && !scattered;
        acc.update = if register {
            Update::Register
        } else {
            Update::Memory
        };
        acc.plain = register && !spread && around.covers && around.part.is_none();
        if let Some((rows, numbers)) = &around.part {
            acc.into = Into::Part(if register { numbers } else { rows }.clone());
        } else if !acc.plain {
            let enclosed = around.enclosing.iter().all(owned);
            acc.start = if around.covers && !scattered && enclosed {
                Start::Loops
            } else {
                Start::Whole
            };
        }
        if register {
            let is_extreme = matches!(acc.reduction, Reduction::Max | Reduction::Min);
            acc.keyed = is_extreme && loops[loops.len() - 1].size >= KEYED;
            let terms: i64 = loops[acc.depth..].iter().map(|l| l.size).product();
            let wide = scalar::wide_type(dtype, acc.reduction) != dtype;
            // A short loop adds all its terms to one number.
            let n = loops[loops.len() - 1].size;
            let most = BLOCK_TERMS / LANE_TERMS;
            let lanes = if n > most { most } else { 1 };
            acc.wide = wide && terms > LANE_TERMS * lanes;
            acc.chunk = acc.wide.then_some(BLOCK_TERMS);
        } else if around.part.is_none() && !scattered {
            acc.row = Row::new(n, e, values, loops, around.stored, around.run);
            if acc.row.is_some() {
                acc.update = Update::Row;
            }
        }
        acc
    }

    /// Adds to an array of a block's sums, for any loops around the leaf.
    pub(crate) fn into_room(n: usize, e: &Effect, values: &Values, room: String) -> Self {
        let dtype = values.get(e.value).dtype;
        Accumulation {
            update: Update::Memory,
            start: Start::Nothing,
            reduction: Reduction::Sum,
            dtype,
            stored: dtype,
            depth: 0,
            plain: false,
            wide: false,
            chunk: None,
            row: None,
            keyed: false,
            name: format!("a{n}"),
            into: Into::Part(room),
        }
    }

    fn sum_type(&self) -> DType {
        if self.wide {
            scalar::wide_type(self.dtype, self.reduction)
        } else {
            self.dtype
        }
    }

    fn inner_name(&self) -> String {
        if self.wide {
            format!("{}_i", self.name)
        } else {
            self.name.clone()
        }
    }

    fn is_register(&self) -> bool {
        self.update == Update::Register
    }

    /// Whether the register is declared right inside the loop at `depth`.
    pub(crate) fn opens_at(&self, depth: usize) -> bool {
        self.is_register() && self.depth == depth
    }

    /// The depth of a register that is stored, not combined.
    pub(crate) fn plain_depth(&self) -> Option<usize> {
        (self.is_register() && self.plain).then_some(self.depth)
    }

    fn identity(&self, dtype: DType) -> String {
        scalar::literal(self.reduction.identity(dtype), dtype)
    }

    /// The type of the integers that stand for the floats of an extreme in a register, in the same order. Compilers
    /// find the largest integer of a vector in a few instructions, but not the largest float that may be NaN. Here the
    /// positive zero is larger than the negative one; in short loops, the first of them is taken, as in eager.
    fn key(&self) -> Option<DType> {
        match self.dtype {
            DType::F32 if self.keyed => Some(DType::I32),
            DType::F64 if self.keyed => Some(DType::I64),
            _ => None,
        }
    }

    fn key_of(&self, value: &str) -> String {
        let name = match self.reduction {
            Reduction::Min => "sh_min_key",
            _ => "sh_max_key",
        };
        format!("{name}{}({value})", scalar::prelude_suffix(self.dtype))
    }

    /// The value of the register after its loops.
    fn total(&self) -> String {
        match self.key() {
            Some(_) => format!(
                "sh_of_key{}({})",
                scalar::prelude_suffix(self.dtype),
                self.name
            ),
            None => self.name.clone(),
        }
    }

    /// `float a0 = 0.0f;`
    pub(crate) fn declaration(&self) -> String {
        let dtype = self.sum_type();
        if let Some(key) = self.key() {
            let identity = self.key_of(&self.identity(dtype));
            return format!("{} {} = {identity};", scalar::value_type(key), self.name);
        }
        format!(
            "{} {} = {};",
            scalar::value_type(dtype),
            self.name,
            self.identity(dtype)
        )
    }

    /// Opens a block of terms.
    pub(crate) fn open_inner(&self, t: &mut CText) {
        if self.is_register() && self.wide {
            t.line(&format!(
                "{} {} = {};",
                scalar::value_type(self.dtype),
                self.inner_name(),
                self.identity(self.dtype)
            ));
        }
    }

    /// Adds a block's sum.
    pub(crate) fn close_inner(&self, t: &mut CText) {
        if self.is_register() && self.wide {
            let sum = self.combined(&self.name, &self.inner_name(), self.sum_type());
            t.line(&format!("{} = {sum};", self.name));
        }
    }

    fn combined(&self, a: &str, b: &str, of: DType) -> String {
        let text = scalar::binary(self.reduction.combine(), a, b, of);
        match text.strip_prefix('(').and_then(|s| s.strip_suffix(')')) {
            Some(bare) if !bare.contains(['(', ')']) => bare.to_string(),
            _ => text,
        }
    }

    /// The reduction clause of the vector loop.
    pub(crate) fn clause(&self) -> Option<String> {
        self.is_register().then(|| {
            scalar::simd_clause(
                self.reduction,
                self.key().unwrap_or(self.dtype),
                &self.inner_name(),
            )
        })
    }

    /// The array that is written: the container's name or the thread's part.
    pub(crate) fn target(&self, container: &str) -> String {
        match &self.into {
            Into::Container => container.to_string(),
            Into::Part(name) => name.clone(),
        }
    }

    /// The effect of one iteration.
    pub(crate) fn apply(&self, place: &str, value: &str) -> String {
        match self.update {
            Update::Store => format!("{place} = {value};"),
            Update::Memory | Update::Row => {
                format!("{place} = {};", self.combined(place, value, self.dtype))
            }
            Update::Register => {
                let inner = self.inner_name();
                let sum = match self.key() {
                    Some(key) => self.combined(&inner, &self.key_of(value), key),
                    None => self.combined(&inner, value, self.dtype),
                };
                format!("{inner} = {sum};")
            }
        }
    }

    /// The text that stores or combines the register after its loops.
    pub(crate) fn flush(&self, place: &str) -> String {
        if self.plain {
            let sum = match self.stored {
                half @ (DType::F16 | DType::BF16) => {
                    scalar::cast(&self.total(), self.sum_type(), half)
                }
                _ => self.total(),
            };
            return format!("{place} = {sum};");
        }
        let dtype = match self.into {
            Into::Part(_) => scalar::wide_type(self.dtype, self.reduction),
            Into::Container => self.sum_type(),
        };
        format!("{place} = {};", self.combined(place, &self.total(), dtype))
    }

    /// Whether the container holds sums that are not final yet.
    pub(crate) fn holds_unfinished_sums(&self, e: &Effect) -> bool {
        e.conflict.is_some() && !self.plain && self.into == Into::Container
    }

    /// The text that stores the identity.
    pub(crate) fn reset(&self, place: &str) -> String {
        format!("{place} = {};", self.identity(self.dtype))
    }
}
