//! Text that brings a block of one operand to shared memory as warpgroup products read it: in lines of 128
//! bytes whose 16-byte pieces are exchanged by the line's number, copied without a register between.
//!
//! A line is 64 terms of one row where memory holds an operand's terms side by side, else one term of 64
//! rows, and then the lines of the next 64 rows follow. Either way a block has as many lines as rows, and 8
//! neighbouring threads copy one line, so both memories are touched in whole lines of 128 bytes. Pieces of
//! 8 neighbouring lines lie in different banks: that is what the exchange is for.

use super::form::{self, Form};
use super::source::Source;
use super::tile::Tile;
use crate::TensorMap;
use graph::DType;
use kernels::contraction::text::CText;

/// Elements of a 16-byte piece, rows or terms of a line, 32-bit words of a line.
const PIECE: i64 = 8;
const LINE: i64 = 64;
const LINE_WORDS: i64 = 32;
/// Terms of one product.
const PRODUCT_TERMS: i64 = 16;

/// How one operand is staged.
pub(super) struct Swizzled<'a> {
    source: Source<'a>,
    n_rows: i64,
    threads: i64,
    /// A line is a term.
    by_terms: bool,
}

impl<'a> Swizzled<'a> {
    /// `None` if memory holds neither 8 terms nor 8 rows side by side.
    pub fn new(form: &'a Form, letter: &'static str, dtype: DType, tile: &Tile) -> Option<Self> {
        let source = Source::new(form, letter, dtype);
        let along_terms = source.along_terms(PIECE);
        (along_terms || source.along_rows(PIECE)).then_some(Swizzled {
            n_rows: if letter == "a" { tile.m } else { tile.n },
            threads: tile.threads,
            by_terms: !along_terms,
            source,
        })
    }

    /// 32-bit words of a block in shared memory.
    pub fn words(&self) -> i64 {
        self.n_rows * LINE_WORDS
    }

    /// Lines that the threads copy at a time, and how often they do.
    fn across(&self) -> i64 {
        self.threads / PIECE
    }

    fn passes(&self) -> i64 {
        self.n_rows / self.across()
    }

    /// What stays in registers over the reduction: `block` is the block's position along the rows.
    /// Declares nothing that [`declare_shared`] does.
    pub fn declare(&self, t: &mut CText, block: &str) {
        let (n, row) = match self.by_terms {
            true => (self.n_rows / LINE, format!("piece*{PIECE} + i*{LINE}")),
            false => (self.passes(), format!("line + i*{}", self.across())),
        };
        let row = format!("{block}*{} + {row}", self.n_rows);
        self.source.declare(t, n, &row);
    }

    /// Begins the copies of the block whose terms begin at `k0` to the words from `to` on; terms from
    /// `k_end` on and rows beyond the last are zero.
    pub fn load(&self, t: &mut CText, k0: &str, to: &str) {
        let (x, across) = (self.source.letter, self.across());
        t.line("SH_UNROLL");
        t.line(format!("for (int i = 0; i < {}; i++) {{", self.passes()));
        let (k, state) = match self.by_terms {
            true => (
                format!("{k0} + line + i*{across}%{LINE}"),
                format!("i*{across}/{LINE}"),
            ),
            false => (format!("{k0} + piece*{PIECE}"), "i".to_string()),
        };
        self.source.position(t, &k, &state, "");
        let place = format!("{to} + place + i*{}", across * LINE_WORDS);
        t.line(format!(
            "sh_copy_async<{PIECE}>({x}, at, within, {x}_s, {place});"
        ));
        t.close(1);
    }

    /// The operand as the copy engine is told of it.
    ///
    /// # Errors
    /// Why it cannot be.
    pub fn map(&self) -> Result<TensorMap, &'static str> {
        let f = self.source.form;
        let [rows, terms, batch] = [self.source.rows, &f.k, &f.batch].map(|dims| {
            let distance = self.distance(dims).filter(|d| (0..1 << 30).contains(d));
            (f.count(dims) as u32, distance)
        });
        if self.source.access.any_guard() {
            return Err("it reads beyond the border of an operand");
        }
        let (fast, slow, lines) = match self.by_terms {
            true => (rows, terms, LINE as u32),
            false => (terms, rows, self.n_rows as u32),
        };
        let (Some(1), Some(line), Some(plane)) = (fast.1, slow.1, batch.1) else {
            return Err("rows, terms or products of an operand lie at more than one distance");
        };
        // An operand that all products share is one matrix. A distance must be legal even if it is not used.
        let planes = if plane == 0 { 1 } else { batch.0 };
        let whole = (i64::from(fast.0) + PIECE - 1) / PIECE * PIECE;
        let (line, plane) = match (slow.0, planes) {
            (1, 1) => (whole, whole),
            (1, _) => (plane, plane),
            (n, 1) => (line, line * i64::from(n)),
            _ => (line, plane),
        };
        let directions = [(slow.0, line, lines), (planes, plane, 1)];
        let [first, second] = match self.planes_first() {
            true => [directions[1], directions[0]],
            false => directions,
        };
        let map = TensorMap {
            dtype: self.source.dtype,
            offset: form::constant(self.source.access),
            sizes: [fast.0, first.0, second.0],
            strides: [first.1, second.1].map(|n| n as u64),
            lines: [first.2, second.2],
        };
        map.check().map(|()| map)
    }

    /// Whether the matrices of a batch lie closer than the lines of one, as those of attention's heads do.
    fn planes_first(&self) -> bool {
        let f = self.source.form;
        let slow: &[usize] = if self.by_terms {
            &f.k
        } else {
            self.source.rows
        };
        let are_many = f.count(&f.batch) > 1 && f.count(slow) > 1;
        match (self.distance(&f.batch), self.distance(slow)) {
            (Some(plane), Some(line)) => are_many && plane > 0 && plane < line,
            _ => false,
        }
    }

    /// The distance of neighbours, if it is the same across all of some dims.
    fn distance(&self, dims: &[usize]) -> Option<i64> {
        let stride = |d: usize| self.source.access.stride(d);
        let sizes = &self.source.form.sizes;
        let regular = dims
            .windows(2)
            .all(|d| stride(d[0]) == stride(d[1]) * sizes[d[1]]);
        regular.then(|| dims.last().map_or(0, |d| stride(*d)))
    }

    /// Asks the copy engine for the block whose terms begin at `k0`, to place `s`; barrier `s` of `full` is
    /// told. `block` is the block's position along the rows.
    pub fn copy_boxes(&self, t: &mut CText, block: &str) {
        let (x, rows, words) = (self.source.letter, self.n_rows, self.words());
        let plane = match self.distance(&self.source.form.batch) {
            Some(0) | None => "0",
            Some(_) => "batch",
        };
        let boxes = if self.by_terms { rows / LINE } else { 1 };
        for i in 0..boxes {
            let row = format!("{block}*{rows} + {}", i * LINE);
            let (fast, slow) = match self.by_terms {
                true => (row.as_str(), "k0"),
                false => ("k0", row.as_str()),
            };
            let place = match self.planes_first() {
                true => format!("{fast}, {plane}, {slow}"),
                false => format!("{fast}, {slow}, {plane}"),
            };
            let to = format!("s*{words} + {}", i * LINE * LINE_WORDS);
            t.line(format!("sh_box_copy({x}, {place}, {x}_s, {to}, full, s);"));
        }
    }

    /// Bytes of a block.
    pub fn bytes(&self) -> i64 {
        self.words() * 4
    }

    /// The descriptor of 16 terms from `k` (a multiple of 16 below 64) on, of the rows from `row` (a
    /// multiple of 64) on, in the block at word `from`.
    pub fn matrix(&self, from: &str, row: &str, k: &str) -> String {
        const EIGHT_LINES: i64 = 8 * LINE_WORDS * 4;
        let (leading, term) = match self.by_terms {
            // The next 64 rows lie behind all terms of these.
            true => (LINE * LINE_WORDS * 4, format!("{k}*{LINE_WORDS}")),
            // Within the lines, where the distance of neighbouring pieces is not asked for.
            false => (PIECE * 2, format!("{k}/2")),
        };
        let x = self.source.letter;
        let word = format!("{from} + ({row})*{LINE_WORDS} + {term}");
        format!("sh_matrix<1, {leading}, {EIGHT_LINES}>({x}_s, {word})")
    }

    /// 1 if its lines are terms.
    pub fn by_terms(&self) -> i32 {
        i32::from(self.by_terms)
    }
}

/// Declares the place of a thread in a line, its first line, and the word where its copies go.
pub(super) fn declare_shared(t: &mut CText) {
    t.line(format!(
        "const int piece = SH_TID % {PIECE}, line = SH_TID / {PIECE};"
    ));
    t.line(format!(
        "const int place = line*{LINE_WORDS} + (piece ^ line % {PIECE})*4;"
    ));
}

/// Products that a block of terms takes.
pub(super) const PRODUCTS: i64 = LINE / PRODUCT_TERMS;
