//! The texts of kernels of one nest: flat ones, tiles, scatters.
//!
//! Owns their frames; what a thread does at a point is [`super::leaf`]'s.

use super::leaf::LeafText;
use super::rows::declare;
use super::survey::{Survey, Update, decoded};
use crate::element_type;
use crate::schedule::{BASE, Leaf, Scatter, Tiles, is_turned, loops::points};
use graph::DType;
use kernels::emit::index::Loop;
use kernels::emit::scalar;
use kernels::emit::text::CText;
use kernels::emit::values::{Op, ValueId};

/// Most threads of a block.
const THREADS: i64 = 256;

/// Whole warps, at most 256 threads.
pub(super) fn threads_for(n: i64) -> i64 {
    ((n + 31) / 32 * 32).clamp(32, THREADS)
}

/// The body and its blocks and threads.
pub(super) struct Body {
    pub(super) text: String,
    pub(super) grid: i64,
    pub(super) threads: i64,
}

/// A vector of points for each thread.
pub(super) fn flat(survey: &Survey, leaf: &Leaf) -> Body {
    let values = survey.values(leaf, &[]);
    let mut inside = CText::default();
    LeafText::new(survey, leaf, &[], &values).point(&mut inside);
    let n = points(&leaf.spread);
    let n_vectors = n / leaf.vector;
    let threads = threads_for(n_vectors);
    let grid = (n_vectors + threads - 1) / threads;
    let mut t = CText::default();
    let index = survey.s.index;
    let block = match index {
        "long" => "(long)SH_BID",
        _ => "SH_BID",
    };
    let flat = match leaf.vector {
        1 => format!("{block} * {threads} + SH_TID"),
        v => format!("({block} * {threads} + SH_TID) * {v}"),
    };
    t.line(&format!("const {index} p0 = {flat};"));
    let guarded = grid * threads != n_vectors;
    if guarded {
        t.open(&format!("if (p0 < {n})"));
    }
    let inside = inside.finish();
    declare(
        index,
        &variables(&leaf.spread, leaf.vector, "p0"),
        &inside,
        &mut t,
    );
    t.lines(&inside);
    if guarded {
        t.close();
    }
    Body {
        text: t.finish(),
        grid,
        threads,
    }
}

/// The loops' variables from a flat index; the last is that of a vector's first element.
fn variables(loops: &[Loop], vector: i64, flat: &str) -> Vec<(String, String)> {
    let mut variables = decoded(loops, flat);
    if vector > 1
        && let Some(last) = variables.last_mut()
    {
        last.0 = BASE.to_string();
    }
    variables
}

/// Squares through shared memory: loaded along one dimension, used along the other.
pub(super) fn tiles(survey: &Survey, tiles: &Tiles) -> Body {
    let side = tiles.side;
    let mut spread = tiles.blocks.clone();
    spread.extend([tiles.rows.clone(), tiles.columns.clone()]);
    let leaf = Leaf {
        spread,
        inner: Vec::new(),
        statements: tiles.statements.clone(),
        vector: 1,
        class: None,
    };
    let values = survey.values(&leaf, &[]);
    let mut text = LeafText::new(survey, &leaf, &[], &values);
    let (mut t, mut load, mut point) = (CText::default(), CText::default(), CText::default());
    for (n, v) in values.values.iter().enumerate() {
        let Op::Load(a) = &v.op else { continue };
        if !a.gather.is_empty() || !a.guards.is_empty() || !is_turned(&a.offset, tiles) {
            continue;
        }
        let ctype = element_type(survey.array(a.container).dtype);
        // A row is one longer than the side: neither direction meets a bank twice.
        t.line(&format!(
            "SH_SHARED({ctype}, s_{n}, {});",
            side * (side + 1)
        ));
        let square = format!("s_{n}[p2 * {} + p1]", side + 1);
        load.line(&format!("{square} = {};", survey.text(&values).element(a)));
        text.replaced.insert(n, square);
    }
    text.point(&mut point);
    let squares = |l: &Loop| (l.size + side - 1) / side;
    let per_block = squares(&tiles.rows) * squares(&tiles.columns);
    let (load, point) = (load.finish(), point.finish());
    let outer = decoded(&tiles.blocks, &format!("(SH_BID / {per_block})"));
    declare(survey.s.index, &outer, &format!("{load}{point}"), &mut t);
    let pass = SquarePass {
        tiles,
        index: survey.s.index,
        n_columns: squares(&tiles.columns),
        n_rows: squares(&tiles.rows),
    };
    pass.print("p1", "p2", &load, &mut t);
    t.line("SH_SYNC();");
    pass.print("p2", "p1", &point, &mut t);
    Body {
        text: t.finish(),
        grid: points(&tiles.blocks) * per_block,
        threads: THREADS,
    }
}

/// A walk of a block over its square.
struct SquarePass<'a> {
    tiles: &'a Tiles,
    index: &'a str,
    n_rows: i64,
    n_columns: i64,
}

impl SquarePass<'_> {
    /// Neighbouring threads are neighbours along `fast`: `p1` counts rows, `p2` columns.
    fn print(&self, fast: &str, slow: &str, body: &str, t: &mut CText) {
        let (side, index) = (self.tiles.side, self.index);
        let (rows, columns) = (&self.tiles.rows, &self.tiles.columns);
        t.open(&format!(
            "for (int p0 = SH_TID; p0 < {}; p0 += {THREADS})",
            side * side
        ));
        t.line(&format!(
            "const int {fast} = p0 % {side}, {slow} = p0 / {side};"
        ));
        let from_row = match self.n_rows {
            1 => "p1".to_string(),
            n => format!("SH_BID / {} % {n} * {side} + p1", self.n_columns),
        };
        let from_column = match self.n_columns {
            1 => "p2".to_string(),
            n => format!("SH_BID % {n} * {side} + p2"),
        };
        t.line(&format!("const {index} {} = {from_row};", rows.var));
        t.line(&format!("const {index} {} = {from_column};", columns.var));
        let bound = |l: &&Loop| l.size % side != 0;
        let partial = [rows, columns].into_iter().filter(bound);
        let bounds: Vec<String> = partial.map(|l| format!("{} < {}", l.var, l.size)).collect();
        if !bounds.is_empty() {
            t.open(&format!("if ({})", bounds.join(" && ")));
        }
        t.lines(body);
        if !bounds.is_empty() {
            t.close();
        }
        t.close();
    }
}

/// Adds rows to destinations that data name: a warp walks all sources, 32 at a time, and adds up those of
/// its destinations, in order; the sum stays in registers while the destination stays the same.
pub(super) fn scatter(survey: &Survey, c: &Scatter) -> Option<Body> {
    let leaf = Leaf {
        spread: c.row.clone(),
        inner: Vec::new(),
        statements: c.statements.clone(),
        vector: c.vector,
        class: None,
    };
    let values = survey.values(&leaf, &c.sources);
    let effect = values.effects.first()?;
    let (to, _, n_destinations) = *effect.address.gather.first()?;
    let only = |of: ValueId| {
        let mut text = LeafText::new(survey, &leaf, &c.sources, &values);
        text.only = Some(values.needed(of));
        text
    };
    let (mut found, mut added) = (CText::default(), CText::default());
    let finding = only(to);
    (0..=c.sources.len()).for_each(|depth| finding.fixed(depth, &mut found));
    found.line(&format!("to = t{};", to.0));
    let mut adding = only(effect.value);
    adding.updates = vec![Update::Thread { plain: false }];
    adding.body(&mut added);
    let n_vectors = points(&c.row) / c.vector;
    let threads = threads_for(n_vectors);
    let text = ScatterText {
        c,
        index: survey.s.index,
        threads,
        chunks: (n_vectors + threads - 1) / threads,
        dtype: values.get(effect.value).dtype,
        bound: effect.address.fill.map(|_| n_destinations),
        found: found.finish(),
        added: added.finish(),
        flushed: adding.flush_text(0),
    };
    let mut t = CText::default();
    text.row(&mut t);
    adding.declare_sum(0, effect, &mut t);
    text.walk(&mut t);
    Some(Body {
        text: t.finish(),
        grid: c.n_classes * text.chunks,
        threads,
    })
}

/// The pieces of a scatter's text.
struct ScatterText<'a> {
    c: &'a Scatter,
    index: &'a str,
    threads: i64,
    /// Blocks for a row.
    chunks: i64,
    dtype: DType,
    /// Destinations from here on are dropped.
    bound: Option<i64>,
    /// Finds a source's destination.
    found: String,
    /// Adds a source.
    added: String,
    /// Adds the sum to its destination.
    flushed: String,
}

impl ScatterText<'_> {
    /// The warp's destinations and the thread's place in the row.
    fn row(&self, t: &mut CText) {
        let index = self.index;
        let (part, chunk) = match self.chunks {
            1 => ("SH_BID".to_string(), "SH_TID".to_string()),
            n => (
                format!("SH_BID / {n}"),
                format!("(SH_BID % {n} * {} + SH_TID)", self.threads),
            ),
        };
        let p0 = match self.c.vector {
            1 => chunk,
            v => format!("{chunk} * {v}"),
        };
        t.line(&format!("const {index} part = {part};"));
        t.line(&format!("const {index} p0 = {p0};"));
        let both = format!("{}{}", self.flushed, self.added);
        declare(
            index,
            &variables(&self.c.row, self.c.vector, "p0"),
            &both,
            t,
        );
    }

    fn source(&self, body: &str, t: &mut CText) {
        declare(self.index, &decoded(&self.c.sources, "p1"), body, t);
        t.lines(body);
    }

    fn flush(&self, t: &mut CText) {
        t.open(&format!("if (at >= 0 && p0 < {})", points(&self.c.row)));
        t.lines(&self.flushed);
        t.close();
    }

    fn walk(&self, t: &mut CText) {
        let (index, c) = (self.index, self.c);
        let n_sources = points(&c.sources);
        t.line("long at = -1;");
        t.open(&format!(
            "for ({index} first = 0; first < {n_sources}; first += 32)"
        ));
        t.line("long to = -1;");
        t.open(&format!("if (first + SH_LANE < {n_sources})"));
        t.line(&format!("const {index} p1 = first + SH_LANE;"));
        self.source(&self.found, t);
        t.close();
        let within = self
            .bound
            .map_or(String::new(), |n| format!(" && to < {n}"));
        let own = format!("to >= 0{within} && to % {} == part", c.n_classes);
        t.line(&format!("unsigned found = sh_ballot({own});"));
        t.open("while (found)");
        t.line("const int p2 = sh_lowest(found);");
        t.line("found &= found - 1;");
        t.line("const long next = sh_shuffle(to, p2);");
        t.open("if (next != at)");
        self.flush(t);
        t.line("at = next;");
        let identity = scalar::literal(c.reduction.identity(self.dtype), self.dtype);
        match c.vector {
            1 => t.line(&format!("a0 = {identity};")),
            v => t.line(&format!(
                "for (int elem = 0; elem < {v}; ++elem) a0[elem] = {identity};"
            )),
        }
        t.close();
        t.open(&format!("if (p0 < {})", points(&c.row)));
        t.line(&format!("const {index} p1 = first + p2;"));
        self.source(&self.added, t);
        t.close();
        t.close();
        t.close();
        self.flush(t);
    }
}
