//! Attention that a model writes as two products with a softmax between them.
//!
//! Before: `einsum(q, k)`, factors and a mask, `softmax` over the keys, perhaps `dropout`, `einsum` with the values.
//! After: one `attention`. Legal if no other node reads the intermediate values and every operator has a counterpart in
//! `attention`: constant factors, and at most one mask, which is added or replaces hidden scores. The formulas are the
//! same, also for rows in which every key is hidden (`fill`, `safe`); all factors become one, which is applied to the
//! queries, so results may differ by rounding. Saves nothing by itself: [`crate::attention_loops`] decides which
//! attention is replaced and avoids storing its scores.

use crate::attention_loops::Candidate;
use graph::{Attr, Binary, Builder, ContainerId, DType, Expr, Graph, Library, Lifetime, Node};
use graph::{NodeKind, Origin, SymExpr, Unary};
use ops::{OpBuilder, OpError, attrs};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Most operators between the first product and the softmax.
const LONGEST: usize = 8;

/// An attention of a model.
struct Found {
    /// Positions of its nodes.
    nodes: Vec<usize>,
    origin: Arc<Origin>,
    first: Product,
    second: Product,
    mask: Option<Mask>,
    scale: f64,
    softmax: Library,
    dropout: Option<Library>,
    y: ContainerId,
}

/// A product of two operands for each head.
struct Product {
    /// Rows: queries, or probabilities.
    left: ContainerId,
    /// Keys or values.
    right: ContainerId,
    /// Order of the operands' dimensions that makes them `[…, row, summed]` and `[…, column, width]`.
    orders: [Vec<usize>; 2],
    /// Order of the result's dimensions that makes it `[…, row, column]`.
    result_order: Vec<usize>,
}

/// The mask of the scores.
struct Mask {
    container: ContainerId,
    /// Value of a hidden score, and whether `true` means hidden. `None`: the mask is added.
    fill: Option<(f64, bool)>,
}

/// Scores as a function of the first product's result.
struct Scores {
    nodes: Vec<usize>,
    product: usize,
    scale: f64,
    mask: Option<Mask>,
    /// Whether a number was added to all of them, which does not change their softmax.
    is_shifted: bool,
}

/// Who writes and who reads each container of a graph without control flow.
struct Uses<'g> {
    graph: &'g Graph,
    nodes: &'g [Node],
    writers: BTreeMap<ContainerId, usize>,
    readers: BTreeMap<ContainerId, Vec<usize>>,
}

impl<'g> Uses<'g> {
    fn new(graph: &'g Graph, nodes: &'g [Node]) -> Uses<'g> {
        let (mut writers, mut readers) = (BTreeMap::new(), BTreeMap::<_, Vec<usize>>::new());
        for (n, node) in nodes.iter().enumerate() {
            writers.extend(node.writes().into_iter().map(|id| (id, n)));
            for id in node.reads() {
                readers.entry(id).or_default().push(n);
            }
        }
        Uses {
            graph,
            nodes,
            writers,
            readers,
        }
    }

    fn library(&self, n: usize) -> Option<&'g Library> {
        match &self.nodes[n].kind {
            NodeKind::Library(library) => Some(library),
            _ => None,
        }
    }

    /// The only reader of a container that nobody outside sees.
    fn reader(&self, id: ContainerId) -> Option<usize> {
        let is_seen = self.graph.outputs.iter().any(|out| out.container == id);
        let is_inside = self.graph.container(id).lifetime == Lifetime::Transient && !is_seen;
        match self.readers.get(&id).map(Vec::as_slice) {
            Some([only]) if is_inside => Some(*only),
            _ => None,
        }
    }

    /// The operator that makes a container which only one node reads.
    fn maker(&self, id: ContainerId) -> Option<(usize, &'g Library)> {
        self.reader(id)?;
        let n = *self.writers.get(&id)?;
        Some((n, self.library(n)?))
    }

    fn shape(&self, id: ContainerId) -> &'g [SymExpr] {
        &self.graph.container(id).shape
    }
}

/// Makes one node of each attention that is `wanted`.
///
/// # Errors
/// An operator refuses its operands, which would be a mistake of this module.
pub(crate) fn recognize(
    graph: &mut Graph,
    wanted: impl Fn(&Graph, &Candidate) -> bool,
) -> Result<(), OpError> {
    let Some(state) = graph.single_state() else {
        return Ok(());
    };
    let uses = Uses::new(graph, &state.nodes);
    let mut found: Vec<Found> = (0..state.nodes.len())
        .filter_map(|n| around(&uses, n))
        .collect();
    // A product may be the second one of an attention and the first one of the next.
    let mut taken = BTreeSet::new();
    found.retain(|own| {
        let is_free = own.nodes.iter().all(|n| !taken.contains(n));
        let is_kept = is_free && wanted(graph, &own.candidate(graph));
        if is_kept {
            taken.extend(own.nodes.iter().copied());
        }
        is_kept
    });
    let mut nodes = Vec::new();
    for (n, node) in state.nodes.clone().into_iter().enumerate() {
        match found.iter().find(|own| own.nodes.contains(&n)) {
            None => nodes.push(node),
            // Here all operands are known.
            Some(own) if own.nodes.iter().max() == Some(&n) => {
                let mut builder = Builder::new(graph, own.origin.clone(), node.stage);
                own.append(&mut builder)?;
                nodes.append(&mut builder.nodes);
            }
            Some(_) => {}
        }
    }
    graph.last_state().nodes = nodes;
    Ok(())
}

fn around(uses: &Uses, n: usize) -> Option<Found> {
    let softmax = uses.library(n).filter(|l| l.op == "softmax")?;
    let (x, p) = (softmax.inputs[0]?, softmax.outputs[0]?);
    let rank = uses.shape(x).len();
    let is_last = match softmax.attrs.get("axis") {
        Some(Attr::Int(axis)) => *axis == -1 || usize::try_from(*axis) == Ok(rank - 1),
        _ => true,
    };
    if !is_last {
        return None;
    }
    let scores = scores(uses, x, LONGEST)?;
    let mut nodes = [scores.nodes, vec![n]].concat();
    let (mut weights, mut next) = (p, uses.reader(p)?);
    let dropout = uses.library(next).filter(|l| l.op == "dropout");
    if let Some(dropout) = dropout {
        if dropout.outputs.get(1).copied().flatten().is_some() || dropout.inputs[0] != Some(p) {
            return None;
        }
        weights = dropout.outputs[0]?;
        nodes.push(next);
        next = uses.reader(weights)?;
    }
    let first = product(uses, uses.library(scores.product)?, None)?;
    let second = product(uses, uses.library(next)?, Some(weights))?;
    // The scores of the first product are, as they lie, the second one's rows and sums.
    let identity: Vec<usize> = (0..rank).collect();
    if first.result_order != identity || second.orders[0] != identity {
        return None;
    }
    nodes.push(next);
    Some(Found {
        nodes,
        origin: uses.nodes[n].origin.clone(),
        first,
        second,
        mask: scores.mask,
        scale: scores.scale,
        softmax: softmax.clone(),
        dropout: dropout.cloned(),
        y: uses.library(next)?.outputs[0]?,
    })
}

/// The scores in `x`, followed back to a product through at most `steps` operators.
fn scores(uses: &Uses, x: ContainerId, steps: usize) -> Option<Scores> {
    let (n, library) = uses.maker(x)?;
    if library.op == "einsum" {
        return Some(Scores {
            nodes: vec![n],
            product: n,
            scale: 1.0,
            mask: None,
            is_shifted: false,
        });
    }
    let Some(Attr::Expr(expr)) = library.attrs.get("expr") else {
        return None;
    };
    // A gradient that a model defines is kept.
    let is_plain = library
        .attrs
        .keys()
        .all(|name| name == "expr" || name == "dtype");
    if library.op != "elementwise" || !is_plain || steps == 0 {
        return None;
    }
    let expr = with_numbers(uses.graph, library, expr);
    (0..library.inputs.len()).find_map(|own| {
        let before = library.inputs[own]?;
        let dtype = |id: ContainerId| uses.graph.container(id).dtype;
        if uses.shape(before) != uses.shape(x) || dtype(before) != dtype(x) {
            return None;
        }
        let mut scores = scores(uses, before, steps - 1)?;
        apply(uses, library, &expr, own, &mut scores)?;
        scores.nodes.push(n);
        Some(scores)
    })
}

/// Replaces constant float operands of one element by numbers: ONNX files store factors and fill values so.
fn with_numbers(graph: &Graph, library: &Library, expr: &Expr) -> Expr {
    expr.map_leaves(&|leaf| {
        let Expr::In(n) = leaf else { return None };
        let container = graph.container(library.inputs.get(*n).copied().flatten()?);
        match &container.lifetime {
            Lifetime::Constant(value) if container.dtype.is_float() && value.len() == 1 => {
                value.to_f64().first().copied().map(Expr::float)
            }
            _ => None,
        }
    })
}

/// Records in `scores` the factor and the mask that `expr` applies to operand `own`. Returns `None` if it does anything
/// else.
fn apply(
    uses: &Uses,
    library: &Library,
    expr: &Expr,
    own: usize,
    scores: &mut Scores,
) -> Option<()> {
    let has_scores = |e: &Expr| e.inputs().contains(&own);
    // The scores may be read twice by one node.
    let operand = |e: &Expr| match e {
        Expr::In(n) => library.inputs.get(*n).copied().flatten(),
        _ => None,
    };
    let operand = |e: &Expr| operand(e).filter(|id| Some(*id) != library.inputs[own]);
    match expr {
        Expr::In(n) if *n == own => Some(()),
        Expr::Binary(f @ (Binary::Mul | Binary::Div), a, b) => {
            let (inner, factor) = match (a.as_number(), b.as_number()) {
                (None, Some(c)) => (a, if *f == Binary::Mul { c } else { 1.0 / c }),
                (Some(c), None) if *f == Binary::Mul => (b, c),
                _ => return None,
            };
            apply(uses, library, inner, own, scores)?;
            let scale = scores.scale * factor;
            // A factor after the mask would multiply the mask too.
            let fits = scores.mask.is_none() && (scale as f32).is_normal();
            fits.then(|| scores.scale = scale)
        }
        Expr::Binary(Binary::Add, a, b) if a.as_number().or(b.as_number()).is_some() => {
            let (inner, number) = match a.as_number() {
                Some(number) => (b, number),
                None => (a, b.as_number()?),
            };
            apply(uses, library, inner, own, scores)?;
            scores.is_shifted = true;
            number.is_finite().then_some(())
        }
        Expr::Binary(Binary::Add, a, b) => {
            let (inner, mask) = match has_scores(a) {
                true => (a, operand(b)?),
                false => (b, operand(a)?),
            };
            apply(uses, library, inner, own, scores)?;
            let dtype = |id: ContainerId| uses.graph.container(id).dtype;
            let is_float =
                dtype(mask).is_float() && library.inputs[own].map(dtype) == Some(dtype(mask));
            let mask = Mask {
                container: mask,
                fill: None,
            };
            (scores.mask.is_none() && is_float).then(|| scores.mask = Some(mask))
        }
        Expr::Select(condition, a, b) => {
            let mask = operand(condition)?;
            let (inner, fill, hides) = match (a.as_number(), b.as_number()) {
                (Some(fill), None) => (b, fill, true),
                (None, Some(fill)) => (a, fill, false),
                _ => return None,
            };
            apply(uses, library, inner, own, scores)?;
            let is_bool = uses.graph.container(mask).dtype == DType::Bool;
            let mask = Mask {
                container: mask,
                fill: Some((fill, hides)),
            };
            // A finite number that replaces scores does not grow with the others.
            let fits = fill.is_infinite() || (fill.is_finite() && !scores.is_shifted);
            (scores.mask.is_none() && is_bool && fits).then(|| scores.mask = Some(mask))
        }
        _ => None,
    }
}

/// What the letters of an einsum mean in a batched matrix product.
struct Roles {
    batch: Vec<char>,
    row: char,
    column: char,
    summed: char,
}

impl Roles {
    /// The roles of the letters of the operand with the rows, of the other operand, and of the result.
    fn of(rows: &[char], columns: &[char], out: &[char]) -> Option<Roles> {
        let rank = rows.len();
        let is_each_once = |all: &[char]| {
            (1..all.len()).all(|n| all[n].is_alphabetic() && !all[..n].contains(&all[n]))
        };
        let all = [rows, columns, out];
        if rank < 3 || !all.iter().all(|own| own.len() == rank && is_each_once(own)) {
            return None;
        }
        let only = |of: &[char], but: &[char]| -> Option<char> {
            let mut own = of.iter().copied().filter(|c| !but.contains(c));
            own.next().filter(|_| own.next().is_none())
        };
        let (row, column) = (only(rows, columns)?, only(columns, rows)?);
        let is_batch = |c: &char| rows.contains(c) && columns.contains(c);
        let roles = Roles {
            batch: out.iter().copied().filter(is_batch).collect(),
            row,
            column,
            summed: only(rows, out)?,
        };
        let fits = roles.batch.len() + 2 == rank && out.contains(&row) && out.contains(&column);
        fits.then_some(roles)
    }
}

/// Reads an einsum as a batched matrix product. `left`, if given, is the operand with the rows.
fn product(uses: &Uses, library: &Library, left: Option<ContainerId>) -> Option<Product> {
    let Some(Attr::Str(equation)) = library.attrs.get("equation") else {
        return None;
    };
    let (inputs, result) = equation.split_once("->")?;
    let (a, b) = inputs.split_once(',')?;
    let operands = [library.inputs[0]?, library.inputs[1]?];
    let turned = match left {
        Some(left) => operands[0] != left,
        // The operand with the rows: the result's last dimension but one.
        None => !a.contains(result.chars().rev().nth(1)?),
    };
    let (letters, operands) = match turned {
        true => ([b, a], [operands[1], operands[0]]),
        false => ([a, b], operands),
    };
    if operands[0] == operands[1] && left.is_some() {
        return None;
    }
    let [rows, columns] = letters.map(|letters| letters.chars().collect::<Vec<char>>());
    let out: Vec<char> = result.chars().collect();
    let rank = rows.len();
    let Roles {
        batch,
        row,
        column,
        summed,
    } = Roles::of(&rows, &columns, &out)?;
    let order = |of: &[char], last: [char; 2]| -> Option<Vec<usize>> {
        let all = batch.iter().chain(&last);
        all.map(|c| of.iter().position(|own| own == c)).collect()
    };
    // Keys are [column, summed]; values are [summed, width].
    let of_right = match left {
        None => [column, summed],
        Some(_) => [summed, column],
    };
    let orders = [order(&rows, [row, summed])?, order(&columns, of_right)?];
    let size = |n: usize, d: usize| &uses.shape(operands[n])[orders[n][d]];
    // An einsum repeats an operand along a dimension in which it has one element; attention does not.
    let summed_of_right = match left {
        None => rank - 1,
        Some(_) => rank - 2,
    };
    let fits = (0..batch.len()).all(|d| size(0, d) == size(1, d));
    if !fits || size(0, rank - 1) != size(1, summed_of_right) {
        return None;
    }
    Some(Product {
        left: operands[0],
        right: operands[1],
        result_order: order(&out, [row, column])?,
        orders,
    })
}

impl Found {
    /// What decides how it is computed.
    fn candidate(&self, graph: &Graph) -> Candidate {
        let size = |id: ContainerId, order: &[usize], from_last: usize| {
            graph.container(id).shape[order[order.len() - from_last]].clone()
        };
        Candidate {
            operands: [self.first.left, self.first.right, self.second.right],
            heads: self.first.orders[0]
                .iter()
                .rev()
                .skip(2)
                .map(|d| graph.container(self.first.left).shape[*d].clone())
                .collect(),
            rows: size(self.first.left, &self.first.orders[0], 2),
            columns: size(self.second.right, &self.second.orders[1], 2),
            mask: self.mask.as_ref().map(|mask| mask.container),
            is_causal: false,
            drops: self.dropout.is_some(),
        }
    }

    /// Puts `attention` in the place of the nodes, all of which are still where they were found.
    fn append(&self, builder: &mut Builder) -> Result<(), OpError> {
        let permuted = |builder: &mut Builder, id: ContainerId, order: &[usize]| {
            if order.iter().copied().eq(0..order.len()) {
                return Ok(id);
            }
            let order = Attr::Ints(order.iter().map(|d| *d as i64).collect());
            builder.op1("permute", &[id], attrs([("order", order)]))
        };
        let q = permuted(builder, self.first.left, &self.first.orders[0])?;
        let k = permuted(builder, self.first.right, &self.first.orders[1])?;
        let v = permuted(builder, self.second.right, &self.second.orders[1])?;
        let mut list = attrs([("scale", Attr::Float(self.scale))]);
        let is_safe = self.softmax.attrs.get("safe") == Some(&Attr::Bool(true));
        list.insert("safe".into(), Attr::Bool(is_safe));
        let mask = match &self.mask {
            None => None,
            Some(mask) => Some(match mask.fill {
                None => mask.container,
                Some((fill, hides)) => {
                    list.insert("fill".into(), Attr::Float(fill));
                    match hides {
                        true => {
                            let sees = Expr::unary(Unary::Not, Expr::In(0));
                            let dtype = Attr::DType(DType::Bool);
                            let list = attrs([("expr", Attr::Expr(sees)), ("dtype", dtype)]);
                            builder.op1("elementwise", &[mask.container], list)?
                        }
                        false => mask.container,
                    }
                }
            }),
        };
        let mut inputs = vec![Some(q), Some(k), Some(v), mask];
        if let Some(dropout) = &self.dropout {
            inputs.push(dropout.inputs[1]);
            for (own, name) in [("dropout", "p"), ("id", "id")] {
                let value = dropout.attrs.get(name).cloned();
                list.extend(value.map(|value| (own.to_string(), value)));
            }
        }
        let order = &self.second.result_order;
        if order.iter().copied().eq(0..order.len()) {
            builder.library(Library {
                op: "attention".into(),
                attrs: list,
                inputs,
                outputs: vec![Some(self.y)],
            });
            return Ok(());
        }
        let made = builder.op("attention", &inputs, list)?[0];
        let mut back = vec![0; order.len()];
        for (at, d) in order.iter().enumerate() {
            back[*d] = at as i64;
        }
        builder.library(Library {
            op: "permute".into(),
            attrs: attrs([("order", Attr::Ints(back))]),
            inputs: vec![Some(made)],
            outputs: vec![Some(self.y)],
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
