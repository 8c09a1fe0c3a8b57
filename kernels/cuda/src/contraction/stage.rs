//! Text that brings a block of one operand to shared memory: global memory to registers, in 16-byte
//! loads where its elements lie so, and registers to shared memory after the barrier. Under `mma`, 16
//! bytes are copied without a register between.
//!
//! An item is what a thread loads at a time: one element, two neighbours in the reduction (which
//! share a 32-bit word under `mma`), or 16 bytes along the rows or along the reduction. Items are
//! dealt to threads so that one coordinate is the same for all items of a thread.
//!
//! In shared memory a scalar operand lies term by term; one of warp products row by row, its terms in
//! words of two, or, where memory holds its rows side by side, term by term in words of two rows.

use super::bytes;
use super::form::{Form, ceil};
use super::source::Source;
use crate::element_type;
use graph::DType;
use kernels::contraction::text::CText;

/// How one operand is staged.
pub(super) struct Stage<'a> {
    source: Source<'a>,
    /// Rows of a block, terms of a step, threads.
    n_rows: i64,
    n_terms: i64,
    threads: i64,
    /// Words of two terms, for warp products.
    packed: bool,
    /// Elements of one load, and whether they lie along the reduction.
    width: i64,
    along_k: bool,
    /// Terms and rows of an item.
    item_k: i64,
    item_rows: i64,
    /// Neighbouring threads take neighbouring terms (else rows).
    k_fast: bool,
}

/// The block and the threads an operand is staged for.
pub(super) struct Block {
    pub n_rows: i64,
    pub n_terms: i64,
    pub threads: i64,
    pub packed: bool,
}

impl<'a> Stage<'a> {
    pub fn new(form: &'a Form, letter: &'static str, dtype: DType, block: &Block) -> Self {
        let source = Source::new(form, letter, dtype);
        let width = 16 / bytes(dtype);
        let along_k = block.n_terms % width == 0 && source.along_terms(width);
        let along_rows = !along_k && source.along_rows(width);
        let neighbours = form.k.last();
        let pair = if block.packed { 2 } else { 1 };
        Stage {
            n_rows: block.n_rows,
            n_terms: block.n_terms,
            threads: block.threads,
            packed: block.packed,
            width: if along_k || along_rows { width } else { 1 },
            along_k,
            item_k: match (along_k, along_rows) {
                (true, _) => width,
                (_, true) => 1,
                _ => pair,
            },
            item_rows: if along_rows { width } else { 1 },
            k_fast: along_k
                || (!along_rows && neighbours.is_some_and(|&d| source.access.stride(d).abs() == 1)),
            source,
        }
    }

    fn items(&self) -> i64 {
        (self.n_rows / self.item_rows) * (self.n_terms / self.item_k)
    }

    fn items_per_thread(&self) -> i64 {
        ceil(self.items(), self.threads)
    }

    /// Items side by side in the fast direction.
    fn across(&self) -> i64 {
        if self.k_fast {
            self.n_terms / self.item_k
        } else {
            self.n_rows / self.item_rows
        }
    }

    /// First row and first term of item `i` of this thread, within the block.
    fn place(&self, i: &str) -> (String, String) {
        let (across, step) = (self.across(), self.threads / self.across());
        let fast = format!("SH_TID % {across}");
        let slow = format!("(SH_TID / {across} + {i}*{step})");
        let (row, k) = if self.k_fast {
            (slow, fast)
        } else {
            (fast, slow)
        };
        (
            format!("({row})*{}", self.item_rows),
            format!("({k})*{}", self.item_k),
        )
    }

    /// Row states of a thread: one, or one for each item.
    fn n_states(&self) -> i64 {
        if self.k_fast {
            self.items_per_thread()
        } else {
            1
        }
    }

    /// Whether shared memory holds the operand term by term.
    pub fn by_terms(&self) -> bool {
        !self.packed || self.item_rows > 1
    }

    /// Whether 16 bytes go to shared memory without a register between.
    fn is_copied(&self) -> bool {
        self.packed && self.width > 1
    }

    /// 32-bit words (`packed`) or elements between rows or terms of shared memory: odd, or four more
    /// than a multiple of eight, so that a warp's accesses fall into different banks.
    pub fn pitch(&self) -> i64 {
        match (self.packed, self.by_terms()) {
            (true, true) => self.n_rows / 2 + 4,
            (true, false) => self.n_terms / 2 + 4,
            (false, _) => self.n_rows + 1,
        }
    }

    /// Words or elements of one block in shared memory.
    pub fn shared_elements(&self) -> i64 {
        let lines = if self.by_terms() {
            self.n_terms
        } else {
            self.n_rows
        };
        self.pitch() * lines
    }

    /// What stays in registers over the reduction: `block` is the block's position along the rows.
    pub fn declare(&self, t: &mut CText, block: &str) {
        if !self.is_copied() {
            t.line(format!(
                "{} {}_v[{}][{}];",
                element_type(self.source.dtype),
                self.source.letter,
                self.items_per_thread(),
                self.item_rows * self.item_k
            ));
        }
        let (row, _) = self.place("i");
        let row = format!("{block}*{} + {row}", self.n_rows);
        self.source.declare(t, self.n_states(), &row);
    }

    /// Begins the loads of the block whose terms begin at `k0`; terms from `k_end` on are zero. What is
    /// copied goes to shared memory from `to` on.
    pub fn load(&self, t: &mut CText, k0: &str, to: &str) {
        let state = if self.k_fast { "i" } else { "0" };
        let (row, k) = self.place("i");
        let x = self.source.letter;
        t.line("SH_UNROLL");
        t.line(format!(
            "for (int i = 0; i < {}; i++) {{",
            self.items_per_thread()
        ));
        if self.is_copied() {
            self.position(t, &format!("{k0} + {k}"), state);
            let pitch = self.pitch();
            let place = if self.by_terms() {
                format!("({k})*{pitch} + ({row})/2")
            } else {
                format!("({row})*{pitch} + ({k})/2")
            };
            let width = self.width;
            let copy = format!("sh_copy_async<{width}>({x}, at, within, {x}_s, {to} + {place});");
            t.line(match self.items() < self.threads {
                true => format!("if (SH_TID < {}) {copy}", self.items()),
                false => copy,
            });
            t.close(1);
            return;
        }
        let decodes = if self.along_k { 1 } else { self.item_k };
        let width = self.width;
        t.line("SH_UNROLL");
        t.line(format!("for (int h = 0; h < {decodes}; h++) {{"));
        self.position(t, &format!("{k0} + {k} + h"), state);
        t.line("if (within) {");
        if width > 1 {
            let ty = element_type(self.source.dtype);
            t.line(format!(
                "const sh_vec<{ty}, {width}> v = sh_load<{width}>({x}, at);"
            ));
            t.line("SH_UNROLL");
            t.line(format!(
                "for (int e = 0; e < {width}; e++) {x}_v[i][h*{width} + e] = v[e];"
            ));
        } else {
            t.line(format!("{x}_v[i][h] = {x}[at];"));
        }
        t.line("} else {");
        t.line("SH_UNROLL");
        t.line(format!(
            "for (int e = 0; e < {width}; e++) {x}_v[i][h*{width} + e] = {}{{}};",
            element_type(self.source.dtype)
        ));
        t.close(3);
    }

    fn position(&self, t: &mut CText, k: &str, state: &str) {
        self.source.position(t, k, state, &self.some_threads());
    }

    /// A condition that holds for as many threads as there are items; empty if all threads have one.
    fn some_threads(&self) -> String {
        if self.items() < self.threads {
            format!("SH_TID < {} && ", self.items())
        } else {
            String::new()
        }
    }

    /// Stores what was loaded to registers to the array `LETTER_s` from `to` on.
    pub fn store(&self, t: &mut CText, to: &str) {
        if self.is_copied() {
            return;
        }
        let x = self.source.letter;
        let (row, k) = self.place("i");
        if self.items() < self.threads {
            t.line(format!("if (SH_TID < {}) {{", self.items()));
        } else {
            t.line("{");
        }
        t.line("SH_UNROLL");
        t.line(format!(
            "for (int i = 0; i < {}; i++) {{",
            self.items_per_thread()
        ));
        t.line(format!("const int row = {row}, k = {k};"));
        let pitch = self.pitch();
        if self.packed {
            t.line(format!(
                "{x}_s[{to} + row*{pitch} + k/2] = sh_pack({x}_v[i][0], {x}_v[i][1]);"
            ));
            t.close(2);
            return;
        }
        t.line("SH_UNROLL");
        let n = self.item_rows * self.item_k;
        t.line(format!("for (int e = 0; e < {n}; e++) {{"));
        let place = if self.along_k {
            format!("(k + e)*{pitch} + row")
        } else {
            format!("k*{pitch} + row + e")
        };
        let value = self.widened(&format!("{x}_v[i][e]"));
        t.line(format!("{x}_s[{to} + {place}] = {value};"));
        t.close(3);
    }

    /// The word of shared memory where this lane's row of four 8x8 matrices begins, relative to the
    /// block and the first of 16 rows and 16 terms. Matrices count by rows first for the left
    /// factor, as its registers do, and by terms first for the right one.
    pub fn matrix_row(&self) -> String {
        let (inner, outer) = ("SH_LANE / 8 % 2", "SH_LANE / 16");
        let (row, term) = if self.source.letter == "a" {
            (inner, outer)
        } else {
            (outer, inner)
        };
        let pitch = self.pitch();
        if self.by_terms() {
            format!("(SH_LANE % 8 + {term}*8)*{pitch} + {row}*4")
        } else {
            format!("(SH_LANE % 8 + {row}*8)*{pitch} + {term}*4")
        }
    }

    /// The word of row `row` and term `term` of a block, both multiples of 8.
    pub fn word(&self, row: &str, term: &str) -> String {
        let pitch = self.pitch();
        if self.by_terms() {
            format!("({term})*{pitch} + ({row})/2")
        } else {
            format!("({row})*{pitch} + ({term})/2")
        }
    }

    fn widened(&self, v: &str) -> String {
        match self.source.dtype {
            DType::BF16 | DType::F16 => format!("sh_to_float({v})"),
            _ => v.to_string(),
        }
    }
}
