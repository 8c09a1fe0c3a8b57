//! Attention without stored scores, forward and backward, as C.
//!
//! Before: a kernel for the scores, one for their softmax, one for the product with the values, and the probabilities
//! `[…, L, M]` are kept for the backward pass. After: a thread takes some rows of a head and a block of keys at a
//! time; the scores of a strip of rows stay in the core's cache. The maximum and the sum of a row are carried from
//! block to block (online softmax, arXiv 1805.02867), and the backward pass computes the scores again from the
//! logarithm of the sums and the residual of its rounding (FlashAttention, arXiv 2205.14135). Queries are scaled before
//! their products, so the scores of both passes have the same bits. Saves memory traffic: scores would be written and
//! read a few times in each pass, and kept between the passes. With `causal`, blocks that no row sees are left out,
//! which halves the products. So are the first or last keys of a block that a mask hides from all rows of a strip,
//! unless numbers are not finite.
//! Dropout's uniform numbers are made for a row of a block at a time, the same ones in both passes.
//!
//! Operands of 16 bits are widened when a block of them is loaded; everything in between is in single precision.
//!
//! Formulas: `ops::attention_lse`. No two threads add to the same element and the order of all sums is fixed, so
//! results do not depend on the number of threads. Never decides which nodes stay whole.

use crate::contraction::text::vector_functions;
use crate::emit::scalar::c_type;
use graph::philox::Dropout;
use graph::{DType, View};
use std::fmt::Write;

/// Keys in a block.
const BLOCK: i64 = 512;
/// Rows that one unit of work takes in the forward pass. A block begins only where a unit does, so with `causal` each
/// row of a unit sees a key of each block that it meets.
const CHUNK: i64 = 512;
/// Rows whose scores with a block are in the cache at one time.
const STRIP: i64 = 64;
/// Terms that are summed before they are added to the sum of all: rounding errors grow with the terms of a sum.
const TERMS: i64 = 128;

/// What surrounds the text of one node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Attention {
    /// The operands and results, in the order of [`Pass::operands`], as parts of their containers; without the mask,
    /// if there is none.
    pub(crate) views: Vec<View>,
    /// Element type of the operands and results, without the mask, lse and rest.
    pub(crate) element: DType,
    /// Element type of the mask, if there is one: numbers to add, or bool for whether a row sees a key.
    pub(crate) mask: Option<DType>,
    /// Dropout of the probabilities; its seed is then an operand.
    pub(crate) dropout: Option<Dropout>,
    /// Whether the residual of the rounded logarithm is an operand. The forward pass always writes it.
    pub(crate) has_rest: bool,
    /// Which pass.
    pub(crate) pass: Pass,
    /// Factor of the scores.
    pub(crate) scale: f64,
    /// Value that replaces scores hidden by a mask of bool. `None`: −∞ is added to them.
    pub(crate) fill: Option<f64>,
    /// Whether a row that sees nothing gives zeros instead of NaN.
    pub(crate) safe: bool,
    /// Whether row `l` sees keys up to `l` only.
    pub(crate) causal: bool,
    /// Bytes of a vector.
    pub(crate) vector_bytes: i64,
}

/// The forward or the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// `attention_with_lse`.
    Forward,
    /// `attention_gradient`.
    Backward,
}

impl Pass {
    /// Names of the buffers in the text: inputs of the node, then its results.
    pub(crate) fn operands(self) -> &'static [&'static str] {
        match self {
            Pass::Forward => &["Q", "K", "V", "MASK", "SEED", "Y", "LSE", "REST"],
            Pass::Backward => &[
                "DY", "Q", "K", "V", "MASK", "Y", "LSE", "SEED", "REST", "DQ", "DK", "DV",
            ],
        }
    }

    /// How many of the operands are results.
    pub(crate) const RESULTS: usize = 3;
}

impl Attention {
    /// The operands that there are, in the order of a launch.
    fn operands(&self) -> Vec<&'static str> {
        let all = self.pass.operands().iter().copied();
        let is_there = |name: &&str| match *name {
            "MASK" => self.mask.is_some(),
            "SEED" => self.dropout.is_some(),
            "REST" => self.has_rest,
            _ => true,
        };
        all.filter(is_there).collect()
    }

    fn position(&self, name: &str) -> usize {
        let n = self.operands().iter().position(|own| *own == name);
        n.unwrap_or(0)
    }

    fn view(&self, name: &str) -> &View {
        &self.views[self.position(name)]
    }

    /// Sizes before rows and width: batch and heads.
    fn leading(&self) -> &[i64] {
        let sizes = &self.view("Q").sizes;
        &sizes[..sizes.len() - 2]
    }

    /// Heads of all batches.
    fn heads(&self) -> i64 {
        self.leading().iter().product()
    }

    /// Rows, columns, width of queries and keys, width of values.
    fn sizes(&self) -> [i64; 4] {
        let last = |name: &str| {
            let sizes = &self.view(name).sizes;
            (sizes[sizes.len() - 2], sizes[sizes.len() - 1])
        };
        let ((rows, depth), (columns, width)) = (last("Q"), last("V"));
        [rows, columns, depth, width]
    }

    fn lanes(&self) -> i64 {
        self.vector_bytes / 4
    }

    fn padded(&self, n: i64) -> i64 {
        (n + self.lanes() - 1) / self.lanes() * self.lanes()
    }

    /// Scores that are computed: with `causal`, about half.
    fn scores(&self) -> i64 {
        let [rows, columns, ..] = self.sizes();
        let seen = match self.causal {
            true => (0..rows).map(|l| (l + 1).min(columns)).sum(),
            false => rows * columns,
        };
        self.heads() * seen
    }

    /// Multiplications and additions of the products.
    pub(crate) fn product_operations(&self) -> u64 {
        let [.., depth, width] = self.sizes();
        let each = match self.pass {
            Pass::Forward => depth + width,
            // Depth: the scores again, the gradients of queries and keys. Width: those of values and of probabilities.
            Pass::Backward => 3 * depth + 2 * width,
        };
        (2 * self.scores() * each) as u64
    }

    /// Scalar operations between the products.
    pub(crate) fn softmax_operations(&self) -> u64 {
        let each = 4 + 4 * u64::from(self.dropout.is_some());
        each * self.scores() as u64
    }

    /// Elements of the scores that are computed.
    pub(crate) fn points(&self) -> u64 {
        self.scores() as u64
    }

    /// Bytes that each thread needs.
    pub(crate) fn scratch_bytes(&self) -> usize {
        let [rows, _, depth, width] = self.sizes();
        let (wide, tall) = (self.padded(depth), self.padded(width));
        let floats = match self.pass {
            Pass::Forward => {
                (depth + tall) * BLOCK + STRIP * (BLOCK + wide) + CHUNK * tall + 2 * CHUNK
            }
            Pass::Backward => {
                let block = (2 * wide + depth + width + tall) * BLOCK;
                block + STRIP * (wide + tall) + 2 * STRIP * BLOCK + rows + rows * wide
            }
        };
        // A product reads and writes whole vectors; random numbers are made by the vector.
        let uniform = i64::from(self.dropout.is_some()) * (BLOCK + 8);
        (4 * (floats + uniform) + 2 * self.vector_bytes) as usize
    }

    /// The place of a head in a buffer.
    fn place(&self, name: &str) -> String {
        let view = self.view(name);
        let mut text = view.offset.to_string();
        // A mask may have fewer dimensions, and one element where the scores have several.
        let n = match name {
            "LSE" | "REST" => view.sizes.len() - 1,
            _ => view.sizes.len().saturating_sub(2),
        };
        let own = view.sizes[..n].iter().zip(&view.strides).rev();
        let mut behind = 1;
        for (size, (own, stride)) in self.leading().iter().rev().zip(own) {
            if *own > 1 {
                let _ = write!(text, " + head / {behind} % {size} * {stride}");
            }
            behind *= size;
        }
        text
    }

    /// Distance of two rows and of two columns of the mask; 0 where all have the same.
    fn mask_strides(&self) -> [i64; 2] {
        let view = self.view("MASK");
        [2, 1].map(|d| match view.sizes.len().checked_sub(d) {
            Some(d) if view.sizes[d] > 1 => view.strides[d],
            _ => 0,
        })
    }

    /// C lines: where the mask of a head begins, where that of row `first` + i begins, and which columns of a block any
    /// row of a strip sees.
    fn mask_words(&self, first: &str) -> [String; 3] {
        let Some(dtype) = self.mask else {
            return Default::default();
        };
        let ([row, column], n) = (self.mask_strides(), self.position("MASK"));
        let (real, place) = (c_type(dtype), self.place("MASK"));
        let hides = self.fill.is_none_or(|fill| fill == f64::NEG_INFINITY);
        let rows = if row == 0 { "1" } else { "rows" };
        let seen = format!(
            "if (odd == 0.0f) NAME_seen(mask + ({first}) * {row} + j0 * {column}, {rows}, &low, &high);"
        );
        [
            format!("    const {real} *restrict const mask = (const {real} *)buf[{n}] + {place};"),
            format!(
                "          const {real} *restrict const mask_row = mask + ({first} + i) * {row} + j0 * {column};"
            ),
            if hides { seen } else { String::new() },
        ]
    }

    /// C expressions for the masked score of key j in row `name`, and for its gradient, which is 0 where the mask
    /// replaces the score.
    fn masked(&self, name: &str, gradient: String) -> [String; 2] {
        let score = format!("{name}[j]");
        let Some(dtype) = self.mask else {
            return [score, gradient];
        };
        let value = widened(dtype, &format!("mask_row[j * {}]", self.mask_strides()[1]));
        match (dtype, self.fill) {
            (DType::Bool, None) => [
                format!("({score} + ({value} ? 0.0f : -__builtin_inff()))"),
                gradient,
            ],
            (DType::Bool, Some(fill)) => [
                format!("({value} ? {score} : {})", float(fill as f32)),
                format!("({value} ? {gradient} : 0.0f)"),
            ],
            _ => [format!("({score} + {value})"), gradient],
        }
    }

    /// C lines that read the seed and draw the uniform numbers of row `first` + i.
    fn seed_words(&self, first: &str) -> [String; 2] {
        let Some(Dropout { offset, .. }) = self.dropout else {
            return Default::default();
        };
        let ([rows, columns, ..], n) = (self.sizes(), self.position("SEED"));
        let row = format!("(head * {rows} + {first} + i) * {columns} + j0 + low");
        let place = self.view("SEED").offset;
        [
            format!("  const unsigned long key = ((const long *)buf[{n}])[{place}] + {offset}L;"),
            format!(
                "          const float *restrict const uniform =
            sh_philox_fill(numbers, key, {row}, c > low ? c - low : 0) - low;"
            ),
        ]
    }

    /// Element j of a row of scores after dropout.
    fn dropped(&self, row: &str) -> String {
        let of = |Dropout {
                      threshold, scale, ..
                  }| {
            format!("(uniform[j] >= {threshold:e}f ? {row}[j] * {scale:e}f : 0.0f)")
        };
        self.dropout.map_or(format!("{row}[j]"), of)
    }

    /// The text of the kernel.
    pub(crate) fn text(&self, name: &str) -> String {
        let ([rows, columns, depth, width], heads) = (self.sizes(), self.heads());
        let chunks = (rows + CHUNK - 1) / CHUNK;
        let (tile_rows, tile_vectors) = match self.lanes() {
            16 => (8, 3),
            _ => (6, 2),
        };
        let number = |n: i64| n.to_string();
        let first = match self.pass {
            Pass::Forward => "first + i0",
            Pass::Backward => "i0",
        };
        let [mask, row_of_mask, seen] = self.mask_words(first);
        let gradient = format!("p[j] * ({} - mean)", self.dropped("own"));
        let [score, _] = self.masked("own", String::new());
        let [score_again, gradient] = self.masked("p", gradient);
        let (rest, rest_of_row) = match self.has_rest {
            true => {
                let (n, place) = (self.position("REST"), self.place("REST"));
                let line = format!(
                    "    const float *restrict const rest = (const float *)buf[{n}] + {place};"
                );
                (line, "rest[i0 + i]")
            }
            false => (String::new(), "0.0f"),
        };
        let nothing = match self.safe {
            true => "0.0f",
            false => "__builtin_nanf(\"\")",
        };
        let [seed, uniform] = self.seed_words(first);
        let mut words = vec![
            (
                "FUNCTIONS".to_string(),
                vector_functions("NAME_v", "float", self.vector_bytes),
            ),
            ("VECTOR_BYTES".into(), number(self.vector_bytes)),
            ("LANES".into(), number(self.lanes())),
            ("TILE_ROWS".into(), number(tile_rows)),
            ("TILE_VECTORS".into(), number(tile_vectors)),
            ("BLOCK".into(), number(BLOCK)),
            ("CHUNK".into(), number(CHUNK)),
            ("STRIP".into(), number(STRIP)),
            ("TERMS".into(), number(TERMS)),
            ("ROWS".into(), number(rows)),
            ("COLUMNS".into(), number(columns)),
            ("DEPTH".into(), number(depth)),
            ("WIDTH".into(), number(width)),
            ("WIDE".into(), number(self.padded(depth))),
            ("TALL".into(), number(self.padded(width))),
            ("HEADS".into(), number(heads)),
            ("CHUNKS".into(), number(chunks)),
            ("UNITS".into(), number(heads * chunks)),
            ("CAUSAL".into(), number(i64::from(self.causal))),
            ("SCALE".into(), float(self.scale as f32)),
            ("REAL".into(), c_type(self.element).into()),
            ("FROM".into(), conversion("from", self.element)),
            ("TO".into(), conversion("to", self.element)),
            ("SCORE".into(), score),
            ("SCORE_AGAIN".into(), score_again),
            ("GRADIENT".into(), gradient),
            ("NOTHING".into(), nothing.into()),
            ("SAFE".into(), number(i64::from(self.safe))),
            ("MASK_HERE".into(), mask),
            ("MASK_LINE".into(), row_of_mask),
            ("SEEN_LINE".into(), seen),
            ("HAS_MASK".into(), number(i64::from(self.mask.is_some()))),
            ("SEED_LINE".into(), seed),
            ("UNIFORM_LINE".into(), uniform),
            ("REST_LINE".into(), rest),
            ("REST_OF_ROW".into(), rest_of_row.into()),
            ("OWN_DROPPED".into(), self.dropped("own")),
            ("P_DROPPED".into(), self.dropped("p")),
        ];
        for operand in self.operands() {
            words.push((
                format!("{operand}_BUFFER"),
                number(self.position(operand) as i64),
            ));
            if !["MASK", "SEED"].contains(&operand) {
                words.push((format!("{operand}_AT"), self.place(operand)));
            }
            let view = self.view(operand);
            if let Some(row) = view.strides.len().checked_sub(2) {
                words.push((format!("{operand}_ROW"), number(view.strides[row])));
            }
        }
        let pass = match self.pass {
            Pass::Forward => include_str!("forward.h"),
            Pass::Backward => include_str!("backward.h"),
        };
        let seen = self
            .mask
            .map_or(String::new(), |mask| seen_text(mask, self.mask_strides()));
        let text = [include_str!("blocks.h"), &seen, pass].concat();
        filled(&text, &words).replace("NAME", name)
    }
}

/// The C function that converts a number of 16 bits from or to single precision; nothing for other types.
fn conversion(way: &str, dtype: DType) -> String {
    match dtype {
        DType::F16 | DType::BF16 => format!("sh_{way}_{}", dtype.name()),
        _ => String::new(),
    }
}

/// A number of a mask as C computes with it.
fn widened(dtype: DType, text: &str) -> String {
    match conversion("from", dtype) {
        convert if convert.is_empty() => text.to_string(),
        convert => format!("{convert}({text})"),
    }
}

/// A number in C.
fn float(x: f32) -> String {
    match x {
        f32::NEG_INFINITY => "-__builtin_inff()".into(),
        f32::INFINITY => "__builtin_inff()".into(),
        _ => format!("{x:e}f"),
    }
}

/// A function that narrows a range of columns to those that some row sees; it begins at a whole vector.
fn seen_text(mask: DType, [row, column]: [i64; 2]) -> String {
    let value = widened(mask, &format!("mask[i * {row} + j * {column}]"));
    let sees = match mask {
        DType::Bool => format!("{value} != 0"),
        _ => format!("{value} != -__builtin_inff()"),
    };
    format!(
        "static void NAME_seen(const {real} *restrict mask, long rows, long *low, long *high) {{
  unsigned char seen[BLOCK];
  const long n = *high;
  for (long j = 0; j < n; ++j) seen[j] = 0;
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < n; ++j) seen[j] |= {sees};
  long first = 0, end = n;
  while (first < n && !seen[first]) ++first;
  while (end > first && !seen[end - 1]) --end;
  *low = first / LANES * LANES;
  *high = end;
}}
",
        real = c_type(mask),
    )
}

/// The text with words replaced.
fn filled(text: &str, words: &[(String, String)]) -> String {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(is_letter) {
        out.push_str(&rest[..at]);
        let end = rest[at..].find(|c| !is_letter(c));
        let (word, behind) = rest[at..].split_at(end.unwrap_or(rest.len() - at));
        let known = words.iter().find(|(own, _)| own == word);
        out.push_str(known.map_or(word, |(_, value)| value));
        rest = behind;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(pass: Pass, causal: bool) -> Attention {
        let dense = |sizes: &[i64]| View::dense(sizes, &(0..sizes.len()).collect::<Vec<_>>());
        let wide = dense(&[2, 3, 700, 40]);
        let views = match pass {
            Pass::Forward => vec![&wide; 4],
            Pass::Backward => vec![&wide; 5],
        };
        let mut views: Vec<View> = views.into_iter().cloned().collect();
        views.extend([dense(&[2, 3, 700]), dense(&[2, 3, 700])]);
        if pass == Pass::Backward {
            views.extend([wide.clone(), wide.clone(), wide]);
        }
        Attention {
            views,
            element: DType::F32,
            mask: None,
            dropout: None,
            has_rest: true,
            pass,
            scale: 0.5,
            fill: None,
            safe: true,
            causal,
            vector_bytes: 64,
        }
    }

    #[test]
    fn every_word_of_the_text_is_filled() {
        for pass in [Pass::Forward, Pass::Backward] {
            let text = form(pass, true).text("k");
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let is_open = |w: &&str| {
                w.len() > 3
                    && !w.starts_with("__")
                    && w.chars().all(|c| c.is_ascii_uppercase() || c == '_')
            };
            let open: Vec<&str> = words.filter(is_open).collect();
            assert!(open.is_empty(), "{open:?}");
            assert!(text.contains("void k(void *const *buf"));
        }
    }

    #[test]
    fn operands_of_16_bits_are_widened() {
        let half = Attention {
            element: DType::BF16,
            ..form(Pass::Backward, false)
        };
        let text = half.text("k");
        assert!(text.contains("const unsigned short *restrict const dy"));
        assert!(text.contains("sh_from_bf16(dy["));
        assert!(text.contains("= sh_to_bf16(from["));
        assert!(text.contains("const float *restrict const lse"));
    }

    #[test]
    fn half_of_the_scores_are_left_out_with_causal() {
        let (all, half) = (form(Pass::Forward, false), form(Pass::Forward, true));
        assert_eq!(all.points(), 6 * 700 * 700);
        assert_eq!(half.points(), 6 * 700 * 701 / 2);
        assert_eq!(all.product_operations(), 2 * all.points() * 80);
        let backward = form(Pass::Backward, false);
        assert_eq!(
            2 * backward.product_operations(),
            5 * all.product_operations()
        );
    }

    #[test]
    fn heads_are_found_by_their_strides() {
        let mut form = form(Pass::Forward, false);
        form.views[0].strides = vec![84_000, 40, 120, 1];
        form.views[0].offset = 7;
        assert_eq!(
            form.place("Q"),
            "7 + head / 1 % 3 * 40 + head / 3 % 2 * 84000"
        );
    }

    #[test]
    fn a_mask_is_repeated_where_it_has_one_element() {
        let mut form = form(Pass::Forward, false);
        form.views
            .insert(3, View::dense(&[2, 1, 1, 700], &[0, 1, 2, 3]));
        form.mask = Some(DType::Bool);
        let text = form.text("k");
        assert!(text.contains("buf[3] + 0 + head / 3 % 2 * 700;"), "{text}");
        assert!(text.contains("mask + (first + i0 + i) * 0 + j0 * 1;"));
    }
}
