//! How often runs of integers occur in rows: TfIdfVectorizer. Each run of a length is compared with every window of
//! that length; texts are not supported.

use super::contraction::contract;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{ContainerId, DType, Expr, SymExpr, Tensor};

pub static RULES: Rules = &[("TfIdfVectorizer", vectorizer)];

/// Most pairs of a window and a run that are compared, for each row.
const MOST_PAIRS: i64 = 1 << 22;
/// Most distances between the elements of a window.
const MOST_SKIPS: i64 = 1 << 6;
/// Most elements of a run.
const MOST_LENGTH: i64 = 1 << 5;

/// Runs of one length.
struct Runs {
    length: i64,
    /// One after the other.
    elements: Vec<i64>,
    /// The column of the result that counts each.
    columns: Vec<i64>,
    /// What each counts for.
    weights: Vec<f64>,
}

impl Runs {
    fn n(&self) -> usize {
        self.columns.len()
    }

    /// `[rows, runs]`: how often each run occurs in `x` `[rows, size]` with its elements `step` places apart; `None` if
    /// rows are too short for that.
    fn counted(
        &self,
        cx: &mut NodeCx,
        (x, size): (ContainerId, i64),
        step: i64,
    ) -> Result<Option<ContainerId>, Refusal> {
        let n_windows = size - (self.length - 1) * step;
        if n_windows < 1 {
            return Ok(None);
        }
        let pairs = n_windows.checked_mul(self.n() as i64);
        if pairs.is_none_or(|n| n > MOST_PAIRS) {
            return Err("it compares too many runs".into());
        }
        let rows = cx.shape(x)[0].clone();
        let (mut inputs, mut is_equal) = (Vec::new(), None::<Expr>);
        for k in 0..self.length {
            let element = cx.part(x, 1, (k * step).into(), (k * step + n_windows).into())?;
            let column = vec![rows.clone(), n_windows.into(), 1.into()];
            let of_run = self
                .elements
                .iter()
                .skip(k as usize)
                .step_by(self.length as usize);
            let wanted = Tensor::from_i64(DType::I64, &[self.n()], of_run.copied().collect());
            let own = Expr::In(inputs.len()).eq_(Expr::In(inputs.len() + 1));
            inputs.extend([cx.reshape(element, column)?, cx.constant(wanted)]);
            is_equal = Some(match is_equal {
                None => own,
                Some(others) => others.and(own),
            });
        }
        let is_equal = is_equal.ok_or("its runs are empty")?;
        let found = cx.elementwise(is_equal.cast(DType::F32), &inputs)?;
        cx.reduce(found, "sum", &[1], false).map(Some)
    }
}

/// The runs of the lengths that count.
fn runs(cx: &NodeCx, is_weighted: bool) -> Result<Vec<Runs>, Refusal> {
    if cx.has("pool_strings") {
        return Err("runs of texts are not supported".into());
    }
    let missing = |name: &str| Refusal(format!("its attribute `{name}` is missing"));
    let list = |name: &str| cx.ints(name)?.ok_or_else(|| missing(name));
    let (pool, starts) = (list("pool_int64s")?, list("ngram_counts")?);
    let columns = list("ngram_indexes")?;
    let weights = cx.floats("weights");
    let weights = weights.filter(|weights| is_weighted && !weights.is_empty());
    let weights = weights.unwrap_or_else(|| vec![1.0; columns.len()]);
    let lengths = cx.int("min_gram_length", 1)?..=cx.int("max_gram_length", 1)?;
    let mut all = Vec::new();
    let mut first = 0;
    for (length, start) in (1..).zip(&starts) {
        let end = starts.get(length as usize).copied();
        let end = end.unwrap_or(pool.len() as i64);
        let bounds = usize::try_from(*start).ok().zip(usize::try_from(end).ok());
        let elements = bounds.and_then(|(start, end)| pool.get(start..end));
        let elements = elements.filter(|e| e.len() as i64 % length == 0);
        let elements = elements.ok_or("its runs do not fit their numbers")?;
        let n = elements.len() / length as usize;
        let own = columns
            .get(first..first + n)
            .zip(weights.get(first..first + n));
        let (own, weights) = own.ok_or("its runs do not fit their columns and weights")?;
        first += n;
        if n > 0 && lengths.contains(&length) {
            if length > MOST_LENGTH {
                return Err(Refusal(format!(
                    "runs of {length} elements are not supported"
                )));
            }
            all.push(Runs {
                length,
                elements: elements.to_vec(),
                columns: own.to_vec(),
                weights: weights.to_vec(),
            });
        }
    }
    Ok(all)
}

/// How often the runs of each column occur, or whether they do, times weights: `[columns]`, or `[rows, columns]`.
fn vectorizer(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let shape = cx.shape(x);
    let skips = cx.int("max_skip_count", 0)?;
    if !(0..MOST_SKIPS).contains(&skips) {
        return Err(Refusal(format!(
            "{skips} skipped elements are not supported"
        )));
    }
    let size = shape
        .last()
        .and_then(SymExpr::as_const)
        .ok_or("the length of its rows is dynamic, or its input has no dimension")?;
    let rows = match shape.as_slice() {
        [_] => SymExpr::constant(1),
        [rows, _] => rows.clone(),
        _ => return Err("its input must have 1 or 2 dimensions".into()),
    };
    let columns = cx.ints("ngram_indexes")?.unwrap_or_default();
    let width = columns
        .iter()
        .max()
        .and_then(|n| usize::try_from(n.checked_add(1)?).ok());
    let is_usual = columns.iter().all(|n| (0..MOST_PAIRS).contains(n));
    let width = width.filter(|_| is_usual).ok_or_else(|| {
        let most = MOST_PAIRS - 1;
        Refusal(format!(
            "its attribute `ngram_indexes` must hold columns, from 0 to {most}"
        ))
    })?;
    let x = cx.cast(x, DType::I64)?;
    let x = cx.reshape(x, vec![rows.clone(), size.into()])?;
    let mode = cx.text("mode", "")?;
    let (is_weighted, counts_once) = match mode.as_str() {
        "TF" => (false, false),
        "TFIDF" => (true, false),
        "IDF" => (true, true),
        other => return Err(Refusal(format!("its attribute `mode` is `{other}`"))),
    };
    let runs = runs(cx, is_weighted)?;
    let mut total: Option<ContainerId> = None;
    for runs in &runs {
        let mut counts: Option<ContainerId> = None;
        // Single elements have no distance.
        let steps = if runs.length == 1 { 1 } else { skips + 1 };
        for step in 1..=steps {
            let Some(own) = runs.counted(cx, (x, size), step)? else {
                break;
            };
            counts = Some(sum(cx, counts, own)?);
        }
        let Some(counts) = counts else { continue };
        let n_places = runs.n().checked_mul(width);
        let n_places = n_places.filter(|n| *n as u64 <= MOST_PAIRS as u64);
        let n_places = n_places.ok_or("it counts too many runs")?;
        let mut places = vec![0.0; n_places];
        for (row, (column, weight)) in runs.columns.iter().zip(&runs.weights).enumerate() {
            // With `counts_once`, weights are applied after it is known whether a column's runs occur.
            places[row * width + *column as usize] = if counts_once { 1.0 } else { *weight };
        }
        let places = Tensor::from_f64(DType::F32, &[runs.n(), width], places);
        let places = cx.constant(places);
        let placed = contract(cx, "rg,gc->rc".to_string(), &[counts, places])?;
        total = Some(sum(cx, total, placed)?);
    }
    if let (Some(found), true) = (total, counts_once) {
        let weights = weights_of_columns(&runs, width)?;
        let weights = cx.constant(Tensor::from_f64(DType::F32, &[width], weights));
        let is_there = Expr::In(0).gt(Expr::float(0.0));
        let weighted = Expr::select(is_there, Expr::In(1), Expr::float(0.0));
        total = Some(cx.elementwise(weighted.cast(DType::F32), &[found, weights])?);
    }
    let counts = match total {
        Some(total) => total,
        None => cx.filled(vec![rows.clone(), width.into()], DType::F32, 0.0)?,
    };
    let mut to = vec![width.into()];
    if shape.len() == 2 {
        to.insert(0, rows);
    }
    single(cx.reshape(counts, to)?)
}

/// The weight of each column, which all of its runs have.
fn weights_of_columns(runs: &[Runs], width: usize) -> Result<Vec<f64>, Refusal> {
    let mut weights: Vec<Option<f64>> = vec![None; width];
    for (column, weight) in runs.iter().flat_map(|r| r.columns.iter().zip(&r.weights)) {
        let known = &mut weights[*column as usize];
        if known.is_some_and(|known| known != *weight) {
            return Err(Refusal(format!(
                "two runs of its column {column} have different weights, of which only one can count"
            )));
        }
        *known = Some(*weight);
    }
    Ok(weights.into_iter().map(Option::unwrap_or_default).collect())
}

fn sum(
    cx: &mut NodeCx,
    one: Option<ContainerId>,
    other: ContainerId,
) -> Result<ContainerId, Refusal> {
    match one {
        None => Ok(other),
        Some(one) => cx.elementwise(Expr::In(0).add(Expr::In(1)), &[one, other]),
    }
}
