//! Convolutions of 3×3 taps with step 1 by minimal filtering, F(2×2, 3×3) (Winograd 1980; Lavin and Gray,
//! arXiv 1509.09308): 16 products for each channel where the definition has 36.
//!
//! A tile of 4×4 of the image, `d`, and the filter `g` are transformed, multiplied element by element and summed over the
//! channels, and transformed back to 2×2 results: `Y = Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A`. The sums over channels are 16 matrix
//! products (`forward`). The gradient of the filter is `Gᵀ[Σ (Bᵀ d B) ⊙ (A dY Aᵀ)]G`, a sum over all tiles (`filter`);
//! that of the image is a convolution with the filter reversed. A window that moves in three directions is filtered in the
//! last two; the taps of the first are summed over like channels. Transforms add few numbers of like size, and sums are
//! nine times shorter (four times in the filter's gradient); errors are below those of the definition where the numbers of
//! a tile have like sizes (`kernels/tests/winograd.rs`). They are relative to the largest number of a tile.
//!
//! A result may be NaN where the definition overflows, or nearly does. A tap of the filter's gradient also reads
//! the two rows and columns of the image that only its neighbours need, and takes them away again.

mod filter;
mod forward;
mod strips;
mod transforms;

use super::access::{Access, Coord, Problem};
use super::blocking::div_up;
use super::driver::Planned;
use super::driver::launch_calls;
use super::gather::GatherForm;
use super::text::{CText, Vector};
use super::{BlockingChoice, BlockingRequest, ContractionTarget, EmittedContraction, Hooks, Roles};
use graph::{Blocking, Machine};

/// Elements of a transformed tile.
const POINTS: i64 = 16;
/// Part of the peak that micro-kernels reach on operands in scratch.
const RATE: f64 = 0.92;
/// Cycles (of 64 operations) that the transform of a tile of the image takes, for 16 channels.
const IMAGE_CYCLES: f64 = 28.0;
/// The same for a tile of results, or of their gradient.
const RESULT_CYCLES: f64 = 22.0;
/// The same for a filter, or its gradient.
const FILTER_CYCLES: f64 = 180.0;
/// How many times its own cache a thread's scratch may fill.
const CACHES: f64 = 4.0;
/// It is chosen if its predicted time is at most this part of the definition's.
const GAIN: f64 = 0.9;
/// Operations in a cycle.
const OPERATIONS: f64 = 64.0;

/// One of the two directions that the window moves in.
#[derive(Clone, Debug)]
struct Direction {
    /// The dim of the results' positions, and that of the taps.
    position: usize,
    tap: usize,
    /// The coordinate in the image.
    coord: Coord,
    /// Results.
    size: i64,
}

impl Direction {
    /// The positions of the image that results read: from the first on, and before the second.
    fn bounds(&self) -> (i64, i64) {
        let (first, last) = (self.coord.offset, self.coord.offset + self.size + 2);
        match self.coord.guarded {
            true => (first.max(0), last.min(self.coord.size)),
            false => (first, last),
        }
    }

    fn tiles(&self) -> i64 {
        div_up(self.size, 2)
    }
}

/// The direction of a three-dimensional window that is not filtered: its taps are summed over, like channels.
#[derive(Clone, Debug)]
struct Depth {
    /// The dim of the results' positions, and that of the taps.
    position: usize,
    tap: usize,
    /// The coordinate in the image.
    coord: Coord,
    /// Taps.
    taps: i64,
}

/// A convolution of 3×3 or N×3×3 taps, or the gradient of its filter.
#[derive(Clone, Debug)]
struct Convolution {
    vector: Vector,
    dims: Vec<i64>,
    image: Access,
    image_buffer: usize,
    /// What moves with the positions: the results, or their gradient.
    results: Access,
    /// What moves with the taps: the filter, or its gradient.
    filter: Access,
    /// Dims of images, and of positions in the depth, outermost first.
    outer: Vec<usize>,
    depth: Option<Depth>,
    rows: Direction,
    columns: Direction,
    channel: usize,
    feature: usize,
    /// Whether positions are summed over.
    is_filter_gradient: bool,
}

/// A convolution by minimal filtering, before its text is written.
pub(super) struct WinogradPlan {
    convolution: Convolution,
    cut: Cut,
    /// Nanoseconds that it is predicted to take.
    predicted_ns: f64,
}

enum Cut {
    Results(forward::ResultsCut),
    Filter(filter::FilterCut),
}

/// How `form` is computed by minimal filtering, if it is such a convolution and takes `hooks`.
pub(super) fn plan(
    form: &GatherForm,
    hooks: &Hooks,
    vector: Vector,
    target: &ContractionTarget,
) -> Option<WinogradPlan> {
    if hooks.keeps != [None, None] || !target.requested.allows_winograd {
        return None;
    }
    let c = Convolution::recognize(only_part(form)?, vector, Convolution::has_layout)?;
    let [image, other] = c.prologues(hooks);
    if image.is_some() && c.columns.coord.stride != c.channels() {
        return None;
    }
    let (cut, predicted_ns) = if c.is_filter_gradient {
        let is_dense = c.results.stride(c.columns.position) == c.features();
        if hooks.follow() || (other.is_some() && !is_dense) {
            return None;
        }
        let (cut, ns) = filter::best(&c, other.is_some(), target)?;
        (Cut::Filter(cut), ns)
    } else {
        if other.is_some() {
            return None;
        }
        let (cut, ns) = forward::best(&c, target)?;
        (Cut::Results(cut), ns)
    };
    Some(WinogradPlan {
        convolution: c,
        cut,
        predicted_ns,
    })
}

/// The operations of the products of `form` by minimal filtering, if it is such a convolution, whatever its layout.
pub(super) fn product_flops(form: &GatherForm, element: super::Element) -> Option<u64> {
    let vector = Vector { element, lanes: 1 };
    let c = Convolution::recognize(only_part(form)?, vector, |_| true)?;
    Some(c.product_flops())
}

fn only_part(form: &GatherForm) -> Option<&Problem> {
    match form.parts.as_slice() {
        [problem] if form.zeros.is_empty() => Some(problem),
        _ => None,
    }
}

impl WinogradPlan {
    /// The choice between this and the definition, and whether this is chosen.
    pub(super) fn choice(
        &self,
        direct: &Planned<'_>,
        requested: &BlockingRequest,
    ) -> (BlockingChoice, bool) {
        let is_chosen = match &requested.blocking {
            Some(blocking) => *blocking == Blocking::Winograd,
            None => self.predicted_ns <= GAIN * direct.least_ns,
        };
        let BlockingChoice { blocking, others } = direct.choice();
        let other = match is_chosen {
            true => (blocking.clone(), direct.predicted_ns as u64),
            false => (Blocking::Winograd, self.predicted_ns as u64),
        };
        let mut others: Vec<_> = others.into_iter().chain([other]).collect();
        others.sort_by_key(|(_, ns)| *ns);
        others.truncate(requested.n_others);
        let blocking = if is_chosen {
            Blocking::Winograd
        } else {
            blocking
        };
        (BlockingChoice { blocking, others }, is_chosen)
    }

    /// Writes it.
    pub(super) fn write(
        &self,
        name: &str,
        hooks: &Hooks,
        cuts: BlockingChoice,
    ) -> EmittedContraction {
        let c = &self.convolution;
        let written = match self.cut {
            Cut::Results(cut) => forward::write(name, c, hooks, cut),
            Cut::Filter(cut) => filter::write(name, c, hooks, cut),
        };
        EmittedContraction {
            flops: c.flops(),
            predicted_ns: self.predicted_ns as u64,
            cuts: Some(cuts),
            ..written
        }
    }
}

/// Whether a thread may take `bytes` of scratch: a few times its own cache; for the smallest cut, also its part of
/// the cache behind it.
fn is_within_reach(bytes: f64, is_smallest: bool, machine: &Machine) -> bool {
    let own = CACHES * machine.l2.bytes as f64;
    let behind = if is_smallest {
        machine.l3.bytes as f64
    } else {
        0.0
    };
    bytes <= own.max(behind)
}

impl Convolution {
    /// What makes the image, and what makes the other operand.
    fn prologues<'a>(&self, hooks: &'a Hooks) -> [Option<&'a str>; 2] {
        let of = [hooks.prologue_a.as_deref(), hooks.prologue_b.as_deref()];
        [of[self.image_buffer], of[1 - self.image_buffer]]
    }

    /// Operations of the products.
    fn product_flops(&self) -> u64 {
        let tiles = (self.strips() * self.columns.tiles()) as u64;
        2 * POINTS as u64 * tiles * (self.summed() * self.features()) as u64
    }

    /// Operations of the products and of the transforms: 32 for a tile of the image, 24 for one of results and 35 for a
    /// filter, 18 and 42 for the gradients of these two.
    fn flops(&self) -> u64 {
        let tiles = (self.strips() * self.columns.tiles()) as u64;
        let (channels, features) = (self.summed() as u64, self.features() as u64);
        let [result, filter] = match self.is_filter_gradient {
            true => [18, 42],
            false => [24, 35],
        };
        let transforms = tiles * (32 * channels + result * features);
        self.product_flops() + transforms + filter * channels * features
    }

    /// The convolution, or gradient of a filter, that `fits`.
    fn recognize(
        problem: &Problem,
        vector: Vector,
        fits: impl Fn(&Convolution) -> bool,
    ) -> Option<Convolution> {
        let mut p = problem.clone();
        p.tidy();
        p.a.simplify_read(false);
        p.b.simplify_read(false);
        p.out.simplify_read(true);
        let (image, mut other, image_buffer) = match (p.a.any_composite(), p.b.any_composite()) {
            (true, false) => (p.a.clone(), p.b.clone(), 0),
            (false, true) => (p.b.clone(), p.a.clone(), 1),
            _ => return None,
        };
        other.simplify_read(true);
        if other.any_guard() || p.out.any_guard() || image.repeats_a_dim(p.dims.len()) {
            return None;
        }
        let try_as = |results: &Access, filter: &Access, is_filter_gradient: bool| {
            Self::assigned(
                &p,
                (&image, image_buffer),
                results,
                filter,
                is_filter_gradient,
                vector,
            )
        };
        let results = try_as(&p.out, &other, false).filter(&fits);
        results.or_else(|| try_as(&other, &p.out, true).filter(&fits))
    }

    fn assigned(
        p: &Problem,
        (image, image_buffer): (&Access, usize),
        results: &Access,
        filter: &Access,
        is_filter_gradient: bool,
        vector: Vector,
    ) -> Option<Convolution> {
        let mut moves = Vec::new();
        for c in image.coords.iter().filter(|c| c.terms.len() > 1) {
            moves.push((c, position_and_tap(c, results, filter)?));
        }
        moves.sort_by_key(|(_, [position, _])| std::cmp::Reverse(results.stride(position.0)));
        let (depth, &[rows, columns]) = match moves.as_slice() {
            [deep, rest @ ..] if rest.len() == 2 => (Some(*deep), <&[_; 2]>::try_from(rest).ok()?),
            rest => (None, <&[_; 2]>::try_from(rest).ok()?),
        };
        let depth = depth.map(|(coord, [position, tap])| Depth {
            position: position.0,
            tap: tap.0,
            coord: coord.clone(),
            taps: p.dims[tap.0],
        });
        let (rows, columns) = (direction(rows, &p.dims)?, direction(columns, &p.dims)?);
        let mut moved = vec![rows.position, rows.tap, columns.position, columns.tap];
        moved.extend(depth.iter().flat_map(|d| [d.position, d.tap]));
        let rest: Vec<usize> = (0..p.dims.len())
            .filter(|d| p.dims[*d] > 1 && !moved.contains(d))
            .collect();
        let only = |wanted: [bool; 3]| {
            let has = |d: &usize| [image.has(*d), results.has(*d), filter.has(*d)] == wanted;
            rest.iter().copied().filter(has).collect::<Vec<_>>()
        };
        let mut outer = only([true, true, false]);
        let (channels, features) = (only([true, false, true]), only([false, true, true]));
        let (&[channel], &[feature]) = (channels.as_slice(), features.as_slice()) else {
            return None;
        };
        let is_whole = outer.len() + 2 == rest.len()
            && (image.coords.iter()).all(|at| !at.guarded || at.terms.len() > 1);
        outer.extend(depth.iter().map(|d| d.position));
        outer.sort_by_key(|d| std::cmp::Reverse(results.stride(*d)));
        let c = Convolution {
            vector,
            dims: p.dims.clone(),
            image: image.clone(),
            image_buffer,
            results: results.clone(),
            filter: filter.clone(),
            depth,
            rows,
            columns,
            channel,
            feature,
            is_filter_gradient,
            outer,
        };
        is_whole.then_some(c)
    }

    /// Whether channels lie side by side, and positions in the order of rows and columns.
    fn has_layout(&self) -> bool {
        let row = self.results.stride(self.rows.position);
        let column = self.results.stride(self.columns.position);
        let is_ordered = self.outer.iter().all(|d| self.results.stride(*d) > row);
        let is_whole = |d: usize| self.dims[d] % self.vector.lanes == 0;
        self.image.stride(self.channel) == 1
            && self.results.stride(self.feature) == 1
            && is_whole(self.channel)
            && (is_whole(self.feature) || !self.is_filter_gradient)
            && row > column
            && column > 0
            && is_ordered
    }

    fn channels(&self) -> i64 {
        self.dims[self.channel]
    }

    fn features(&self) -> i64 {
        self.dims[self.feature]
    }

    /// Taps of the direction that is not filtered.
    fn depth_taps(&self) -> i64 {
        self.depth.as_ref().map_or(1, |d| d.taps)
    }

    /// Numbers that a product of transformed tiles sums over: the channels at each tap of the depth.
    fn summed(&self) -> i64 {
        self.depth_taps() * self.channels()
    }

    /// Numbers between the filter's taps in the depth.
    fn depth_step(&self) -> i64 {
        self.depth.as_ref().map_or(0, |d| self.filter.stride(d.tap))
    }

    /// The same convolution of `images` images.
    fn with_images(&self, images: i64) -> Convolution {
        let mut c = self.clone();
        let is_depth = |dim: usize| self.depth.as_ref().is_some_and(|d| d.position == dim);
        let of_images = self.outer.iter().filter(|dim| !is_depth(**dim));
        for (n, dim) in of_images.enumerate() {
            c.dims[*dim] = if n == 0 { images } else { 1 };
        }
        c
    }

    fn images(&self) -> i64 {
        self.outer.iter().map(|d| self.dims[*d]).product()
    }

    /// Rows of tiles, of all images.
    fn strips(&self) -> i64 {
        self.images() * self.rows.tiles()
    }

    /// Numbers of a row of the image, from its first position on.
    fn row_numbers(&self) -> i64 {
        let last = self.columns.bounds().1 - 1;
        last.max(0) * self.columns.coord.stride + self.channels()
    }

    /// Numbers between a filter's first tap and tap `i`, row by row.
    fn tap(&self, i: i64) -> i64 {
        let steps = [self.rows.tap, self.columns.tap].map(|d| self.filter.stride(d));
        i / 3 * steps[0] + i % 3 * steps[1]
    }

    /// The contraction whose functions `NAME_p0_STAGE` are in `t`; each stage is a launch.
    fn emitted(
        &self,
        mut t: CText,
        name: &str,
        stages: [(&str, &str); 2],
        (shared, own): (i64, i64),
    ) -> EmittedContraction {
        let element = self.vector.element;
        let mut launches = Vec::new();
        for (suffix, stage) in stages {
            let symbol = format!("{name}{suffix}");
            let calls = format!("{name}_p0");
            launch_calls(
                &mut t,
                &mut launches,
                &symbol,
                &[&calls],
                stage,
                (&[], element),
            );
        }
        EmittedContraction {
            source: t.finish(),
            launches,
            shared_scratch_bytes: (shared * element.bytes()) as usize,
            thread_scratch_bytes: (own * element.bytes()) as usize,
            flops: 0,
            predicted_ns: 0,
            path: match self.is_filter_gradient {
                true => "winograd, reduced",
                false => "winograd",
            },
            products: element.dtype(),
            refusal: None,
            // Where a prologue does not fit, `plan` returns nothing, and the definition takes all.
            takes_prologues: true,
            cuts: None,
            choices: Vec::new(),
            sum_slots: 0,
            finishes_in_blocks: !self.is_filter_gradient,
            pitch: None,
            roles: self.roles(),
        }
    }

    fn roles(&self) -> Roles {
        let positions = [self.rows.position, self.columns.position];
        let place = |d: usize| (d, self.dims[d], self.results.stride(d));
        let (m, places) = match self.is_filter_gradient {
            true => {
                let deep = self.depth.iter().map(|d| d.tap);
                let m = deep.chain([self.rows.tap, self.columns.tap, self.channel]);
                (m.collect(), Vec::new())
            }
            false => {
                let m: Vec<usize> = self.outer.iter().copied().chain(positions).collect();
                let written = m.iter().copied().chain([self.feature]);
                (m.clone(), written.map(place).collect())
            }
        };
        Roles {
            batch: Vec::new(),
            m,
            n: vec![self.feature],
            places,
        }
    }
}

/// A dim of an image's coordinate, and its coefficient.
type Term = (usize, i64);

/// The dims of the results' positions and of the taps of a coordinate of the image that a window moves along.
fn position_and_tap(c: &Coord, results: &Access, filter: &Access) -> Option<[Term; 2]> {
    let &[one, two] = c.terms.as_slice() else {
        return None;
    };
    let is_position = |d: Term| results.has(d.0) && !filter.has(d.0);
    let is_tap = |d: Term| filter.has(d.0) && !results.has(d.0);
    [[one, two], [two, one]]
        .into_iter()
        .find(|[position, tap]| is_position(*position) && is_tap(*tap))
}

/// How the window moves along a coordinate of the image, if it has 3 taps and step 1.
fn direction((c, [position, tap]): (&Coord, [Term; 2]), dims: &[i64]) -> Option<Direction> {
    let fits = dims[tap.0] == 3 && position.1 == 1 && tap.1 == 1;
    let d = Direction {
        position: position.0,
        tap: tap.0,
        coord: c.clone(),
        size: dims[position.0],
    };
    (fits && c.stride > 0 && (c.guarded || c.offset >= 0)).then_some(d)
}

/// The smallest multiple of `to` that is at least `x`.
fn round_up(x: i64, to: i64) -> i64 {
    div_up(x, to) * to
}
