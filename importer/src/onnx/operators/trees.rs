//! Ensembles of decision trees as products of matrices. All conditions are computed. Some conditions on the way to a
//! leaf must hold, others must not. For each leaf, a product counts those that must hold and do, minus those that must
//! not hold but do. The leaf is reached if the result is the number of conditions that must hold (Nakandala et al., "A
//! Tensor Compiler for Unified Machine Learning Prediction Serving", arXiv 2010.04804, the strategy GEMM). Gradients
//! are zero almost everywhere.

mod numbered;

use super::contraction::contract;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, Binary, ContainerId, DType, Expr, SymExpr, Tensor};
use ops::attrs;
use std::collections::{BTreeMap, BTreeSet};

pub static RULES: Rules = &[
    ("ai.onnx.ml.TreeEnsemble", ensemble),
    ("ai.onnx.ml.TreeEnsembleClassifier", numbered::classifier),
    ("ai.onnx.ml.TreeEnsembleRegressor", numbered::regressor),
];

/// Most pairs of a condition and a leaf.
const MOST_ELEMENTS: usize = 1 << 22;
/// Most conditions on the way to a leaf.
const MOST_DEPTH: usize = 1 << 10;
/// Most members of a set that a condition asks for.
const MOST_MEMBERS: usize = 1 << 6;

/// The test that a condition applies to a feature.
#[derive(Clone, Debug, PartialEq)]
enum Asks {
    Compares(Binary, f64),
    IsOneOf(Vec<f64>),
}

/// A node with two branches.
struct Condition {
    feature: i64,
    asks: Asks,
    /// Whether it holds for features that are NaN.
    holds_if_missing: bool,
    /// The ways where it holds and where not.
    ways: [Way; 2],
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Condition(usize),
    Leaf(usize),
}

/// Trees of one node.
#[derive(Default)]
struct Trees {
    conditions: Vec<Condition>,
    /// Targets with weights, for each leaf.
    leaves: Vec<Vec<(usize, f64)>>,
    roots: Vec<Way>,
}

/// How the numbers of all trees are combined.
#[derive(Clone, Copy, PartialEq)]
enum Aggregate {
    Average,
    Sum,
    Min,
    Max,
}

/// The conditions on the way to each leaf, and whether each must hold.
type Ways = BTreeMap<usize, Vec<(usize, bool)>>;

impl Trees {
    fn ways(&self) -> Result<Ways, Refusal> {
        let mut ways = Ways::new();
        if self.conditions.len().saturating_mul(self.leaves.len()) > MOST_ELEMENTS {
            return Err("its trees have too many leaves".into());
        }
        for root in &self.roots {
            let mut open = vec![(*root, Vec::new())];
            while let Some((at, way)) = open.pop() {
                match at {
                    Way::Leaf(leaf) if leaf < self.leaves.len() => {
                        // Every leaf has one way, so this ends even if nodes form a cycle.
                        if ways.insert(leaf, way).is_some() {
                            return Err("two ways of its trees lead to one leaf".into());
                        }
                    }
                    Way::Condition(n) if n < self.conditions.len() && way.len() < MOST_DEPTH => {
                        for (next, holds) in self.conditions[n].ways.iter().zip([true, false]) {
                            open.push((*next, [way.clone(), vec![(n, holds)]].concat()));
                        }
                    }
                    _ => return Err("its trees lead to nodes that are not there".into()),
                }
            }
        }
        Ok(ways)
    }

    /// `[rows, targets]`: the results of the trees for rows of features.
    fn applied(
        &self,
        cx: &mut NodeCx,
        x: ContainerId,
        (targets, aggregate): (usize, Aggregate),
    ) -> Result<ContainerId, Refusal> {
        let ways = self.ways()?;
        let [rows, n_features] = cx
            .shape(x)
            .try_into()
            .map_err(|_| "its input must have 2 dimensions")?;
        let n_features: Option<i64> = SymExpr::as_const(&n_features);
        let n_features = n_features.ok_or("its number of features is dynamic")?;
        let mut features = self.conditions.iter().map(|c| c.feature);
        if let Some(feature) = features.find(|at| !(0..n_features).contains(at)) {
            return Err(Refusal(format!(
                "its trees read feature {feature}, but its input has {n_features} features"
            )));
        }
        let (n_conditions, n_leaves) = (self.conditions.len(), ways.len());
        if targets.saturating_mul(n_leaves) > MOST_ELEMENTS {
            return Err("its trees have too many leaves".into());
        }
        let dtype = cx.dtype(x);
        let reached = match n_conditions {
            0 => cx.filled(vec![rows, n_leaves.into()], dtype, 1.0)?,
            _ => {
                let hold = self.hold(cx, x)?;
                self.reached(cx, hold, &ways)?
            }
        };
        let mut weights = vec![0.0; n_leaves * targets];
        let mut is_given = weights.clone();
        for (row, leaf) in ways.keys().enumerate() {
            for (target, weight) in &self.leaves[*leaf] {
                let at = row * targets + target;
                weights[at] += weight;
                is_given[at] = 1.0;
            }
        }
        let shape = [n_leaves, targets];
        let weights = cx.constant(Tensor::from_f64(dtype, &shape, weights));
        if matches!(aggregate, Aggregate::Sum | Aggregate::Average) {
            let y = contract(cx, "rl,lt->rt".to_string(), &[reached, weights])?;
            let share = match aggregate {
                Aggregate::Average => 1.0 / self.roots.len().max(1) as f64,
                _ => 1.0,
            };
            return match share == 1.0 {
                true => Ok(y),
                false => cx.elementwise(Expr::In(0).mul(Expr::float(share)), &[y]),
            };
        }
        let largest = match dtype {
            DType::F64 => f64::MAX,
            _ => f64::from(f32::MAX),
        };
        let (kind, neutral) = match aggregate {
            Aggregate::Min => ("min", largest),
            _ => ("max", -largest),
        };
        let is_given = cx.constant(Tensor::from_f64(dtype, &shape, is_given));
        let mut column = cx.shape(reached);
        column.push(1.into());
        let reached = cx.reshape(reached, column)?;
        let counts = Expr::In(0).mul(Expr::In(2)).gt(Expr::float(0.5));
        let each = Expr::select(counts, Expr::In(1), Expr::float(neutral)).cast(dtype);
        let each = cx.elementwise(each, &[reached, weights, is_given])?;
        let found = cx.reduce(each, kind, &[1], false)?;
        // A target that no leaf gives is zero.
        let is_absent = Expr::In(0).eq_(Expr::float(neutral));
        let found_or_zero = Expr::select(is_absent, Expr::float(0.0), Expr::In(0));
        cx.elementwise(found_or_zero.cast(dtype), &[found])
    }

    /// `[rows, conditions]`: 1 where a condition holds, else 0.
    fn hold(&self, cx: &mut NodeCx, x: ContainerId) -> Result<ContainerId, Refusal> {
        let n = self.conditions.len();
        let dtype = cx.dtype(x);
        let features = self.conditions.iter().map(|c| c.feature).collect();
        let features = cx.constant(Tensor::from_i64(DType::I64, &[n], features));
        let features = cx.along("gather", &[x, features], 1)?;
        let mut inputs = vec![features];
        let mut row = |cx: &mut NodeCx, of: &dyn Fn(&Condition) -> f64| {
            let values = self.conditions.iter().map(of).collect();
            inputs.push(cx.constant(Tensor::from_f64(dtype, &[n], values)));
            Expr::In(inputs.len() - 1)
        };
        let is_one = |flag: Expr| flag.gt(Expr::float(0.5));
        let kinds = MODES.map(|(_, kind)| kind);
        let compares =
            |c: &Condition, kind: Binary| matches!(c.asks, Asks::Compares(own, _) if own == kind);
        let limit = row(cx, &|c| match c.asks {
            Asks::Compares(_, limit) => limit,
            Asks::IsOneOf(_) => 0.0,
        });
        let mut holds: Option<Expr> = None;
        for kind in kinds {
            let n_of_kind = self.conditions.iter().filter(|c| compares(c, kind)).count();
            if n_of_kind == 0 {
                continue;
            }
            let mut own = Expr::binary(kind, Expr::In(0), limit.clone());
            if n_of_kind < n {
                let is_of_kind = row(cx, &|c| f64::from(u8::from(compares(c, kind))));
                own = own.and(is_one(is_of_kind));
            }
            holds = Some(holds.map_or(own.clone(), |others| others.or(own)));
        }
        let members = |c: &Condition, at: usize| match &c.asks {
            Asks::IsOneOf(members) => members.get(at).copied().unwrap_or(f64::NAN),
            Asks::Compares(..) => f64::NAN,
        };
        let most = self.conditions.iter().map(|c| match &c.asks {
            Asks::IsOneOf(members) => members.len(),
            Asks::Compares(..) => 0,
        });
        for at in 0..most.max().unwrap_or(0) {
            let member = row(cx, &|c| members(c, at));
            let own = Expr::In(0).eq_(member);
            holds = Some(holds.map_or(own.clone(), |others| others.or(own)));
        }
        let mut holds = holds.ok_or("its conditions ask for members of empty sets")?;
        if self.conditions.iter().any(|c| c.holds_if_missing) {
            let holds_if_missing = row(cx, &|c| f64::from(u8::from(c.holds_if_missing)));
            holds = holds.or(Expr::In(0).is_nan().and(is_one(holds_if_missing)));
        }
        cx.elementwise(holds.cast(dtype), &inputs)
    }

    /// `[rows, leaves]`: 1 where a leaf is reached, else 0.
    fn reached(
        &self,
        cx: &mut NodeCx,
        hold: ContainerId,
        ways: &Ways,
    ) -> Result<ContainerId, Refusal> {
        let (n, n_leaves, dtype) = (self.conditions.len(), ways.len(), cx.dtype(hold));
        let mut signs = vec![0.0; n * n_leaves];
        let mut asked = vec![0.0; n_leaves];
        for (column, way) in ways.values().enumerate() {
            for (condition, holds) in way {
                signs[condition * n_leaves + column] = if *holds { 1.0 } else { -1.0 };
                asked[column] += f64::from(u8::from(*holds));
            }
        }
        let signs = cx.constant(Tensor::from_f64(dtype, &[n, n_leaves], signs));
        let asked = cx.constant(Tensor::from_f64(dtype, &[n_leaves], asked));
        let found = contract(cx, "rc,cl->rl".to_string(), &[hold, signs])?;
        let is_reached = Expr::In(0).eq_(Expr::In(1)).cast(dtype);
        cx.elementwise(is_reached, &[found, asked])
    }
}

/// Features as floats.
fn features(cx: &mut NodeCx) -> Result<ContainerId, Refusal> {
    let x = cx.input(0)?;
    match cx.dtype(x) {
        DType::F32 | DType::F64 => Ok(x),
        _ => cx.cast(x, DType::F32),
    }
}

fn is_truth(values: Option<&Vec<i64>>, n: usize) -> bool {
    values
        .and_then(|values| values.get(n))
        .is_some_and(|n| *n != 0)
}

/// Since version 5 of the domain: leaves of one target each, conditions and leaves numbered apart.
fn ensemble(cx: &mut NodeCx) -> Values {
    let missing = |name: &str| Refusal(format!("its attribute `{name}` is missing"));
    let list = |cx: &NodeCx, name: &str| cx.ints(name)?.ok_or_else(|| missing(name));
    let numbers = |cx: &NodeCx, name: &str| -> Result<Vec<f64>, Refusal> {
        Ok(cx.tensor(name)?.ok_or_else(|| missing(name))?.to_f64())
    };
    cx.tensor("nodes_hitrates")?;
    if cx.int("post_transform", 0)? != 0 {
        return Err("its attribute `post_transform` is not supported".into());
    }
    let aggregate = match cx.int("aggregate_function", 1)? {
        0 => Aggregate::Average,
        1 => Aggregate::Sum,
        2 => Aggregate::Min,
        3 => Aggregate::Max,
        other => {
            return Err(Refusal(format!(
                "its attribute `aggregate_function` is {other}"
            )));
        }
    };
    let (modes, splits) = (numbers(cx, "nodes_modes")?, numbers(cx, "nodes_splits")?);
    let of_nodes = [
        "nodes_featureids",
        "nodes_truenodeids",
        "nodes_trueleafs",
        "nodes_falsenodeids",
        "nodes_falseleafs",
    ];
    let mut of_nodes = of_nodes.into_iter().map(|name| list(cx, name));
    let mut next = || of_nodes.next().unwrap_or_else(|| Err(missing("nodes")));
    let (feature, if_true, true_leaf, if_false, false_leaf) =
        (next()?, next()?, next()?, next()?, next()?);
    let tracks = cx.ints("nodes_missing_value_tracks_true")?;
    let n = modes.len();
    let lengths = [&feature, &if_true, &true_leaf, &if_false, &false_leaf].map(Vec::len);
    if splits.len() != n || lengths != [n; 5] {
        return Err("its nodes differ in number".into());
    }
    let members = cx
        .tensor("membership_values")?
        .map(|t| t.to_f64())
        .unwrap_or_default();
    let mut members = members.split(|member| member.is_nan());
    let way = |at: i64, is_leaf: i64| {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        if is_leaf != 0 {
            Way::Leaf(at)
        } else {
            Way::Condition(at)
        }
    };
    let mut trees = Trees::default();
    for at in 0..n {
        trees.conditions.push(Condition {
            feature: feature[at],
            asks: match modes[at] as i64 {
                6 => {
                    let set = members.next().filter(|set| set.len() <= MOST_MEMBERS);
                    Asks::IsOneOf(set.ok_or("a set is missing, or very large")?.to_vec())
                }
                mode => Asks::Compares(comparison(mode)?, splits[at]),
            },
            holds_if_missing: is_truth(tracks.as_ref(), at),
            ways: [
                way(if_true[at], true_leaf[at]),
                way(if_false[at], false_leaf[at]),
            ],
        });
    }
    let targets = n_targets(cx, 0)?;
    let (ids, weights) = (list(cx, "leaf_targetids")?, numbers(cx, "leaf_weights")?);
    if ids.len() != weights.len() {
        return Err(Refusal(format!(
            "its leaves have {} targets, but {} weights",
            ids.len(),
            weights.len()
        )));
    }
    for (target, weight) in ids.iter().zip(weights) {
        trees.leaves.push(vec![(within(*target, targets)?, weight)]);
    }
    for root in list(cx, "tree_roots")? {
        // A tree of one leaf is written as a node whose ways are both that leaf.
        let root = way(root, 0);
        trees.roots.push(match root {
            Way::Condition(at)
                if at < n && trees.conditions[at].ways[0] == trees.conditions[at].ways[1] =>
            {
                trees.conditions[at].ways[0]
            }
            _ => root,
        });
    }
    let given = cx.input(0)?;
    let x = features(cx)?;
    let y = trees.applied(cx, x, (targets, aggregate))?;
    // The result has the type of the features.
    single(cx.cast(y, cx.dtype(given))?)
}

/// How many numbers a row of the result has.
fn n_targets(cx: &NodeCx, default: i64) -> Result<usize, Refusal> {
    let n = cx.int("n_targets", default)?;
    let known = usize::try_from(n).ok();
    let known = known.filter(|n| (1..=MOST_ELEMENTS).contains(n));
    known.ok_or_else(|| {
        Refusal(format!(
            "its attribute `n_targets` is {n}, not a number from 1 to {MOST_ELEMENTS}"
        ))
    })
}

fn within(target: i64, targets: usize) -> Result<usize, Refusal> {
    let at = usize::try_from(target).ok().filter(|at| *at < targets);
    at.ok_or_else(|| Refusal(format!("target {target} is not one of {targets}")))
}

/// Comparisons by their number in newer versions, with their names in older ones.
const MODES: [(&str, Binary); 6] = [
    ("BRANCH_LEQ", Binary::Le),
    ("BRANCH_LT", Binary::Lt),
    ("BRANCH_GTE", Binary::Ge),
    ("BRANCH_GT", Binary::Gt),
    ("BRANCH_EQ", Binary::Eq),
    ("BRANCH_NEQ", Binary::Ne),
];

fn comparison(mode: i64) -> Result<Binary, Refusal> {
    let known = usize::try_from(mode).ok().and_then(|n| MODES.get(n));
    let kind = known.map(|(_, kind)| *kind);
    kind.ok_or_else(|| Refusal(format!("nodes of mode {mode} are not supported")))
}
