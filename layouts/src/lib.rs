//! Global choice of data layout.
//!
//! A convolution reads its input at every tap of a window: with channels contiguous, one vector
//! load serves one tap of many channels, and element-wise neighbours and channel sums run along
//! the same direction. So activations that a convolution reads or writes are laid out
//! channels-last, and so are all containers aligned with them through maps. Containers of the caller
//! keep their layout, and `[N, H, W, C]` is in this order already. Weights that are made inside
//! the graph (converted from the caller's, or a gradient before its conversion) have their channels
//! last too: then terms of many channels are contiguous in both factors. Containers that only matrix
//! products touch are ordered so that the products see few, long dimensions ([`products`]).
//!
//! This rule ([`assign`]) takes no time. [`choose`] compares its orders with others by predicted time, for all
//! containers together: the configuration graph of "Data Movement Is All You Need" (arXiv 2007.00072), solved exactly
//! if that is possible ([`quadratic`]). Its result reaches [`assign`] as a recipe.
//!
//! Channels may be two dimensions, group and channel within the group, as a grouped convolution leaves
//! them: `[N, G, C, H, W]` is laid out as `[N, H, W, G, C]`, which is the order of all its channels.

mod configurations;
mod products;
pub mod quadratic;

pub use configurations::{LayoutChoice, Times, choose};

use graph::{
    Container, ContainerId, Graph, Index, Layout, Lifetime, Memlet, Node, Place, Recipe, Rewrite,
    SummedProduct, SymExpr, Symbol, Tasklet,
};
use std::collections::{BTreeMap, BTreeSet};

/// Containers whose layout was changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Containers now channels-last.
    pub channels_last: Vec<ContainerId>,
    /// Containers of matrix products in another order than row-major.
    pub reordered: Vec<ContainerId>,
    /// Containers in the order that the recipe asks for.
    pub requested: Vec<ContainerId>,
    /// Containers that would have another order, had the recipe not forbidden it.
    pub forbidden: Vec<ContainerId>,
    /// Containers that cannot have the order that the recipe asks for, whatever order they have.
    pub fixed: Vec<ContainerId>,
}

/// The place of decisions about a container's order: the node that writes it.
pub fn place(graph: &Graph, id: ContainerId) -> Option<Place> {
    let mut nodes = graph.single_state()?.nodes.iter();
    let writer = nodes.find(|n| n.writes().contains(&id))?;
    Some(Place::new(
        Rewrite::Layout,
        writer,
        &graph.container(id).name,
    ))
}

/// Gives activations around convolutions the channels-last layout. Changes only containers made
/// inside the graph that are not its results, and none that the recipe wants in row-major order.
pub fn assign(graph: &mut Graph, recipe: &Recipe) -> Assignment {
    let Some(state) = graph.single_state() else {
        return Assignment::default();
    };
    let mut tasklets = Vec::new();
    for node in &state.nodes {
        node.visit_tasklets(&mut |t| tasklets.push(t));
    }
    let mut marked: Marked = BTreeMap::new();
    for tasklet in &tasklets {
        for (id, n_channels) in convolution_arrays(tasklet) {
            marked.entry(id).or_insert(n_channels);
        }
    }
    loop {
        let before = marked.len();
        for tasklet in &tasklets {
            spread(tasklet, &mut marked);
        }
        if marked.len() == before {
            break;
        }
    }
    let aliased = alias_ends(&state.nodes);
    let owned: BTreeSet<ContainerId> = graph.outputs.iter().map(|o| o.container).collect();
    marked.retain(|id, _| {
        let c = graph.container(*id);
        c.lifetime == Lifetime::Transient && !owned.contains(id) && !aliased.contains(id)
    });
    let is_forbidden = |graph: &Graph, id: &ContainerId| {
        let place = || place(graph, *id);
        !recipe.is_empty() && place().is_some_and(|p| recipe.override_for(|| p) == Some(false))
    };
    let (mut forbidden, mut taken) = (Vec::new(), Vec::new());
    for (id, n_channels) in marked {
        if is_forbidden(graph, &id) {
            forbidden.push(id);
            continue;
        }
        let c = graph.container_mut(id);
        c.layout = channels_last(c.shape.len(), n_channels);
        taken.push(id);
    }
    let reordered = products::reorder(graph, &owned, &aliased);
    let (undone, reordered): (Vec<_>, Vec<_>) = reordered
        .into_iter()
        .partition(|id| is_forbidden(graph, id));
    for id in &undone {
        let c = graph.container_mut(*id);
        c.layout = Layout::row_major(c.shape.len());
    }
    forbidden.extend(undone);
    forbidden.sort();
    forbidden.dedup();
    let mut assignment = Assignment {
        channels_last: taken,
        reordered,
        forbidden,
        ..Assignment::default()
    };
    lay_out_as_asked(graph, recipe, &mut assignment, |c, id| {
        c.lifetime == Lifetime::Transient && !owned.contains(&id) && !aliased.contains(&id)
    });
    assignment
}

/// Gives containers the orders that the recipe asks for, where that is possible.
fn lay_out_as_asked(
    graph: &mut Graph,
    recipe: &Recipe,
    assignment: &mut Assignment,
    is_free: impl Fn(&Container, ContainerId) -> bool,
) {
    for (asked, order) in recipe.orders() {
        let found = graph.find(&asked.container);
        let Some(id) = found.filter(|id| place(graph, *id).as_ref() == Some(asked)) else {
            continue;
        };
        let c = graph.container(id);
        let layout = Layout::from_order(order.to_vec());
        let layout = layout.filter(|l| l.order().len() == c.shape.len() && is_free(c, id));
        let lists = [&mut assignment.channels_last, &mut assignment.reordered];
        lists
            .into_iter()
            .for_each(|list| list.retain(|own| *own != id));
        match layout {
            Some(layout) => {
                graph.container_mut(id).layout = layout;
                assignment.requested.push(id);
            }
            None => assignment.fixed.push(id),
        }
    }
}

/// Containers to lay out channels-last, with the number of their dimensions that count channels.
type Marked = BTreeMap<ContainerId, usize>;

/// Dimensions `1..=n_channels` innermost, in their order.
fn channels_last(rank: usize, n_channels: usize) -> Layout {
    let spatial = n_channels + 1..rank;
    let order = std::iter::once(0).chain(spatial).chain(1..=n_channels);
    Layout::from_order(order.collect()).unwrap_or_else(|| Layout::channels_last(rank))
}

/// How many dimensions of `m`, from the second on, count channels: those before the first one that moves with any
/// of the `spatial` dimensions of another array. At least one.
fn n_channels(m: &Memlet, spatial: &[Index]) -> usize {
    let moves = |i: &Index| spatial.iter().any(|s| related(i, s));
    let more = m.subset.iter().skip(2).take_while(|i| !moves(i)).count();
    // Nothing but channels: the array has no spatial dimensions to tell them by.
    if more + 2 >= m.subset.len() {
        1
    } else {
        1 + more
    }
}

/// Containers on either side of a reshape that stayed: they share memory, which needs row-major order.
fn alias_ends(nodes: &[Node]) -> BTreeSet<ContainerId> {
    let library = |n: &&Node| matches!(n.kind, graph::NodeKind::Library(_));
    nodes
        .iter()
        .filter(library)
        .flat_map(|n| n.reads().into_iter().chain(n.writes()))
        .collect()
}

/// The arrays to lay out of a convolution in any of its three forms: the two activations (operands or result), which
/// share batch and spatial positions and of which one has rank three to five; and weights `[K, C, taps…]`. Leaves
/// out an activation whose channels come last by its shape: it is in order already.
fn convolution_arrays(tasklet: &Tasklet) -> Vec<(ContainerId, usize)> {
    let Some(SummedProduct { a, b, out }) = tasklet.summed_product() else {
        return Vec::new();
    };
    if tasklet.inputs.len() != 2 {
        return Vec::new();
    }
    let all = [a, b, out];
    let mut found = Vec::new();
    for (x, y, weights) in [(0, 1, 2), (0, 2, 1), (1, 2, 0)] {
        let (x, y, weights) = (all[x], all[y], all[weights]);
        if !(3..=5).contains(&x.subset.len().min(y.subset.len())) {
            continue;
        }
        // Weights know nothing of the batch; the third array of an attention product does (if it is 1: in the first index).
        let is_one = matches!(&x.subset[0], Index::At(e) if e.symbols().is_empty());
        let n = if is_one { 1 } else { weights.subset.len() };
        if (weights.subset.iter().take(n)).any(|i| related(i, &x.subset[0])) {
            continue;
        }
        let sides = [
            Activation::new(x, y, weights),
            Activation::new(y, x, weights),
        ];
        let is_in_order = sides.iter().all(|s| !s.channels_first);
        if is_in_order || !is_activation_pair(&sides[0], &sides[1]) {
            continue;
        }
        for (side, other) in [(&sides[0], &sides[1]), (&sides[1], &sides[0])] {
            if side.channels_first {
                let n_channels = n_channels(side.array, other.spatial());
                found.push((side.array.container, n_channels));
            }
        }
        if weights.subset.len() == x.subset.len() && !splits_channels(weights, x, y) {
            found.push((weights.container, 1));
        }
    }
    found
}

/// Whether the first two dimensions of weights count channels of one activation together, as behind a norm of groups.
fn splits_channels(weights: &Memlet, x: &Memlet, y: &Memlet) -> bool {
    let is_in = |at: usize, m: &Memlet| m.subset.iter().any(|i| related(i, &weights.subset[at]));
    let both_in = |own: &Memlet, other: &Memlet| is_in(0, own) && is_in(1, own) && !is_in(0, other);
    both_in(x, y) || both_in(y, x)
}

/// An array of at least three dimensions that may be the activation of a convolution.
struct Activation<'a> {
    array: &'a Memlet,
    /// Whether the dimension after the batch counts channels, not positions: its parameters also index the weights,
    /// or index this array alone.
    channels_first: bool,
    /// Position where the channels begin if they are last.
    channels: usize,
}

impl<'a> Activation<'a> {
    fn new(array: &'a Memlet, other: &Memlet, weights: &Memlet) -> Self {
        let is_position = |index: &Index| {
            let Index::At(e) = index else {
                return false;
            };
            let mut symbols = e.symbols().into_iter();
            symbols.any(|s| moves_with(other, &s) && !moves_with(weights, &s))
        };
        let last = array.subset.iter().rposition(is_position);
        Activation {
            array,
            channels_first: !array.subset.get(1).is_some_and(is_position),
            channels: last.map_or(1, |at| at + 1),
        }
    }

    /// The dimensions of positions, without the batch.
    fn spatial(&self) -> &'a [Index] {
        match self.channels_first {
            true => &self.array.subset[2..],
            false => &self.array.subset[1..self.channels],
        }
    }

    /// The first dimension of channels; with channels last there may be none.
    fn channel(&self) -> Option<&'a Index> {
        let at = if self.channels_first {
            1
        } else {
            self.channels
        };
        self.array.subset.get(at)
    }
}

/// Whether any index of `m` contains the symbol.
fn moves_with(m: &Memlet, symbol: &Symbol) -> bool {
    let mentions = |i: &Index| matches!(i, Index::At(e) if e.mentions(symbol));
    m.subset.iter().any(mentions)
}

/// Whether batch and every spatial dimension are related, and there is a window or channels differ
/// (a pointwise convolution, which sums over no position). A spatial dimension may be split on one side,
/// as by a pooling whose windows read every position once.
fn is_activation_pair(x: &Activation, y: &Activation) -> bool {
    let rank = x.array.subset.len().min(y.array.subset.len());
    let windowed = |m: &Activation| m.spatial().iter().any(is_composite);
    let batch = related(&x.array.subset[0], &y.array.subset[0]);
    let channels_differ = match (x.channel(), y.channel()) {
        (Some(x), Some(y)) => !related(x, y),
        _ => true,
    };
    batch
        && is_spatially_related(x.spatial(), y.spatial())
        && (windowed(x)
            || windowed(y)
            || (channels_differ && rank >= 4 && no_position_is_alone(x.spatial(), y.spatial())))
}

/// Whether dimensions of positions correspond: one to one and in order if both sides have as many;
/// otherwise each of one side to some dimension of the other.
fn is_spatially_related(x: &[Index], y: &[Index]) -> bool {
    if x.len() == y.len() {
        return x.iter().zip(y).all(|(x, y)| related(x, y));
    }
    is_each_related(x, y) || is_each_related(y, x)
}

fn is_each_related(x: &[Index], y: &[Index]) -> bool {
    x.iter().all(|i| y.iter().any(|j| related(i, j)))
}

/// Whether every dimension of positions is related to one of the other side.
fn no_position_is_alone(x: &[Index], y: &[Index]) -> bool {
    is_each_related(x, y) && is_each_related(y, x)
}

fn is_composite(index: &Index) -> bool {
    matches!(index, Index::At(e) if e.symbols().len() > 1)
}

fn related(x: &Index, y: &Index) -> bool {
    let (Index::At(x), Index::At(y)) = (x, y) else {
        return false;
    };
    let symbols: Vec<_> = x.symbols();
    let both_fixed = symbols.is_empty() && y.symbols().is_empty();
    both_fixed || symbols.iter().any(|s| y.mentions(s))
}

/// Marks containers that have the same indices as a marked container.
fn spread(tasklet: &Tasklet, marked: &mut Marked) {
    let all = || {
        tasklet
            .inputs
            .iter()
            .chain(tasklet.outputs.iter().map(|(m, _)| m))
    };
    let Some(known) = all().find(|m| marked.contains_key(&m.container)) else {
        return;
    };
    let known_channels = marked[&known.container];
    for m in all() {
        let aligned = m.subset.len() >= 3
            && known.subset.len() >= 3
            && related(&m.subset[0], &known.subset[0])
            && related(&m.subset[1], &known.subset[1])
            && is_spatially_related(&m.subset[2..], &known.subset[2..]);
        // A window of weights relates to nothing in its first dimension, so it is never aligned.
        if aligned && !m.subset.iter().all(is_fixed) && !marked.contains_key(&m.container) {
            let spatial = &known.subset[(known_channels + 1).min(known.subset.len())..];
            marked.insert(m.container, n_channels(m, spatial));
        }
    }
}

fn is_fixed(index: &Index) -> bool {
    matches!(index, Index::At(e) if SymExpr::as_const(e).is_some())
}

#[cfg(test)]
mod tests {
    use super::{assign, place};
    use graph::Recipe;

    /// A convolution whose result is split into windows, and the pooling that reads them.
    const WINDOWS: &str = r#"graph "windows" {
  %x: f32[2, 3, 8, 8] input
  %w: f32[16, 3, 3, 3] input
  %product: f32[2, 16, 4, 2, 4, 2]
  %pooled: f32[2, 16, 4, 4]
  %y: f32[2, 16, 4, 4]
  inputs %x, %w
  state {
    map [n < 2, k < 16, p0 < 4, p1 < 2, q0 < 4, q1 < 2, c < 3, r < 3, s < 3] {
      tasklet %product[n, k, p0, p1, q0, q1] (sum) = $0 * $1 from %x[n, c, 2*p0 + p1 + r - 1, 2*q0 + q1 + s - 1 | 0.0], %w[k, c, r, s]
    }
    map [n < 2, k < 16, p0 < 4, p1 < 2, q0 < 4, q1 < 2] {
      tasklet %pooled[n, k, p0, q0] (max) = $0 from %product[n, k, p0, p1, q0, q1]
    }
    map [n < 2, k < 16, p < 4, q < 4] {
      tasklet %y[n, k, p, q] = max($0, 0.0) from %pooled[n, k, p, q]
    }
  }
  outputs %y
}
"#;

    #[test]
    fn split_positions_do_not_stop_channels_from_being_last() {
        let mut graph = graph::parse(WINDOWS).unwrap();
        let assignment = assign(&mut graph, &Recipe::default());
        let name = |id: &graph::ContainerId| graph.container(*id).name.as_str();
        let names: Vec<&str> = assignment.channels_last.iter().map(name).collect();
        assert_eq!(names, ["product", "pooled"]);
    }

    /// A grouped convolution whose result has a dimension for groups, and what follows it.
    const GROUPED: &str = r#"graph "grouped" {
  %x: f32[2, 8, 6, 6] input
  %w: f32[16, 2, 3, 3] input
  %product: f32[2, 4, 4, 6, 6]
  %positive: f32[2, 16, 6, 6]
  %y: f32[2, 16, 6, 6]
  inputs %x, %w
  state {
    map [n < 2, g < 4, k < 4, p < 6, q < 6, c < 2, r < 3, s < 3] {
      tasklet %product[n, g, k, p, q] (sum) = $0 * $1 from %x[n, 2*g + c, p + r - 1, q + s - 1 | 0.0], %w[4*g + k, c, r, s]
    }
    map [n < 2, g < 4, k < 4, p < 6, q < 6] {
      tasklet %positive[n, 4*g + k, p, q] = max($0, 0.0) from %product[n, g, k, p, q]
    }
    map [n < 2, k < 16, p < 6, q < 6] {
      tasklet %y[n, k, p, q] = $0 from %positive[n, k, p, q]
    }
  }
  outputs %y
}
"#;

    #[test]
    fn groups_and_their_channels_are_last_together() {
        let mut graph = graph::parse(GROUPED).unwrap();
        assign(&mut graph, &Recipe::default());
        let order = |name: &str| {
            let found = graph.containers.iter().find(|c| c.name == name);
            found.map(|c| c.layout.order().to_vec())
        };
        assert_eq!(order("product"), Some(vec![0, 3, 4, 1, 2]));
        assert_eq!(order("positive"), Some(vec![0, 2, 3, 1]));
    }

    /// A convolution whose weights are converted before it, and both of its gradients; the gradient of the
    /// weights is converted back.
    const CONVERTED: &str = r#"graph "converted" {
  %x: bf16[2, 8, 6, 6] input
  %w: f32[16, 8, 3, 3] input
  %dy: bf16[2, 16, 6, 6] input
  %half: bf16[16, 8, 3, 3]
  %y: bf16[2, 16, 6, 6]
  %dx: bf16[2, 8, 6, 6]
  %dhalf: bf16[16, 8, 3, 3]
  %dw: f32[16, 8, 3, 3]
  inputs %x, %w, %dy
  state {
    map [k < 16, c < 8, r < 3, s < 3] {
      tasklet %half[k, c, r, s] = bf16($0) from %w[k, c, r, s]
    }
    map [n < 2, k < 16, p < 6, q < 6, c < 8, r < 3, s < 3] {
      tasklet %y[n, k, p, q] (sum) = $0 * $1 from %x[n, c, p + r - 1, q + s - 1 | 0.0], %half[k, c, r, s]
    }
    map [n < 2, k < 16, p < 6, q < 6, c < 8, r < 3, s < 3] {
      tasklet %dx[n, c, p + r - 1, q + s - 1 | 0.0] (sum) = $0 * $1 from %dy[n, k, p, q], %half[k, c, r, s]
    }
    map [n < 2, k < 16, p < 6, q < 6, c < 8, r < 3, s < 3] {
      tasklet %dhalf[k, c, r, s] (sum) = $0 * $1 from %dy[n, k, p, q], %x[n, c, p + r - 1, q + s - 1 | 0.0]
    }
    map [k < 16, c < 8, r < 3, s < 3] {
      tasklet %dw[k, c, r, s] = f32($0) from %dhalf[k, c, r, s]
    }
  }
  outputs %y, %dx, %dw
}
"#;

    /// The sum of a biased convolution over its channels, as a layer normalization of it begins.
    const SUMMED: &str = r#"graph "summed" {
  %x: f32[2, 3, 8, 8] input
  %w: f32[16, 3, 3, 3] input
  %bias: f32[16] input
  %product: f32[2, 16, 8, 8]
  %total: f32[2, 4, 2, 8]
  %y: f32[2, 4, 2, 8, 16]
  %z: f32[2, 4, 2, 8, 16]
  inputs %x, %w, %bias
  state {
    map [n < 2, k < 16, p < 8, q < 8, c < 3, r < 3, s < 3] {
      tasklet %product[n, k, p, q] (sum) = $0 * $1 from %x[n, c, p + r - 1, q + s - 1 | 0.0], %w[k, c, r, s]
    }
    map [n < 2, p0 < 4, p1 < 2, q < 8, k < 16] {
      tasklet %total[n, p0, p1, q] (sum) = $0 + $1 from %product[n, k, 2*p0 + p1, q], %bias[k]
    }
    map [n < 2, p0 < 4, p1 < 2, q < 8, k < 16] {
      tasklet %y[n, p0, p1, q, k] = $0 - $1 from %product[n, k, 2*p0 + p1, q], %total[n, p0, p1, q]
    }
    map [n < 2, p0 < 4, p1 < 2, q < 8, k < 16] {
      tasklet %z[n, p0, p1, q, k] = max($0, 0.0) from %y[n, p0, p1, q, k]
    }
  }
  outputs %z
}
"#;

    #[test]
    fn a_sum_over_channels_is_no_convolution() {
        let mut graph = graph::parse(SUMMED).unwrap();
        let assignment = assign(&mut graph, &Recipe::default());
        let name = |id: &graph::ContainerId| graph.container(*id).name.as_str();
        let names: Vec<&str> = assignment.channels_last.iter().map(name).collect();
        // `total` and `y` have no dimension of channels in second place.
        assert_eq!(names, ["product"]);
    }

    /// A depthwise convolution between arrays with channels last, and its weight's gradient; the convolution's own
    /// result has its channels first.
    const TOKENS: &str = r#"graph "tokens" {
  %x: f32[2, 6, 6, 8] input
  %w: f32[8, 3, 3] input
  %dy: f32[2, 6, 6, 8] input
  %half: f32[2, 6, 6, 8]
  %product: f32[2, 8, 6, 6]
  %y: f32[2, 6, 6, 8]
  %dz: f32[2, 6, 6, 8]
  %dw: f32[8, 3, 3]
  inputs %x, %w, %dy
  state {
    map [n < 2, p < 6, q < 6, k < 8] {
      tasklet %half[n, p, q, k] = $0 * 0.5 from %x[n, p, q, k]
    }
    map [n < 2, k < 8, p < 6, q < 6, r < 3, s < 3] {
      tasklet %product[n, k, p, q] (sum) = $0 * $1 from %half[n, p + r - 1, q + s - 1, k | 0.0], %w[k, r, s]
    }
    map [n < 2, p < 6, q < 6, k < 8] {
      tasklet %y[n, p, q, k] = max($0, 0.0) from %product[n, k, p, q]
    }
    map [n < 2, p < 6, q < 6, k < 8] {
      tasklet %dz[n, p, q, k] = $0 * 2.0 from %dy[n, p, q, k]
    }
    map [n < 2, p < 6, q < 6, k < 8, r < 3, s < 3] {
      tasklet %dw[k, r, s] (sum) = $0 * $1 from %half[n, p + r - 1, q + s - 1, k | 0.0], %dz[n, p, q, k]
    }
  }
  outputs %y, %dw
}
"#;

    #[test]
    fn arrays_with_channels_last_by_shape_keep_their_order() {
        let mut graph = graph::parse(TOKENS).unwrap();
        let assignment = assign(&mut graph, &Recipe::default());
        let name = |id: &graph::ContainerId| graph.container(*id).name.as_str();
        let names: Vec<&str> = assignment.channels_last.iter().map(name).collect();
        // Both operands of the weight's gradient count rows of the image in their second dimension.
        assert_eq!(names, ["product"]);
    }

    #[test]
    fn weights_made_inside_have_their_channels_last() {
        let mut graph = graph::parse(CONVERTED).unwrap();
        let assignment = assign(&mut graph, &Recipe::default());
        let name = |id: &graph::ContainerId| graph.container(*id).name.as_str();
        let names: Vec<&str> = assignment.channels_last.iter().map(name).collect();
        assert_eq!(names, ["half", "dhalf"]);
    }

    #[test]
    fn a_recipe_asks_for_an_order() {
        let mut graph = graph::parse(WINDOWS).unwrap();
        let at = |graph: &graph::Graph, name: &str| {
            place(graph, graph.find(name).expect("a container")).expect("a writer")
        };
        let mut recipe = Recipe::default();
        recipe.lay_out(at(&graph, "pooled"), vec![0, 2, 1, 3]);
        // The caller owns `y`, and `product` has six dimensions.
        recipe.lay_out(at(&graph, "y"), vec![0, 2, 3, 1]);
        recipe.lay_out(at(&graph, "product"), vec![0, 2, 3, 1]);
        let assignment = assign(&mut graph, &recipe);
        let name = |id: &graph::ContainerId| graph.container(*id).name.as_str();
        let names = |ids: &[graph::ContainerId]| ids.iter().map(name).collect::<Vec<_>>();
        assert_eq!(names(&assignment.requested), ["pooled"]);
        assert_eq!(names(&assignment.channels_last), [""; 0]);
        let mut fixed = names(&assignment.fixed);
        fixed.sort_unstable();
        assert_eq!(fixed, ["product", "y"]);
        let pooled = graph.find("pooled").expect("a container");
        assert_eq!(graph.container(pooled).layout.order(), [0, 2, 1, 3]);
    }

    #[test]
    fn a_recipe_forbids_an_order() {
        let mut graph = graph::parse(WINDOWS).unwrap();
        let pooled = graph.find("pooled").expect("a container");
        let mut recipe = Recipe::default();
        recipe.tell(place(&graph, pooled).expect("a writer"), false);
        let assignment = assign(&mut graph, &recipe);
        assert_eq!(assignment.forbidden, [pooled]);
        assert!(graph.container(pooled).layout.is_row_major());
        let name = |id: &graph::ContainerId| graph.container(*id).name.as_str();
        let names: Vec<&str> = assignment.channels_last.iter().map(name).collect();
        assert_eq!(names, ["product"]);
    }
}
