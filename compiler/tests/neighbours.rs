//! Every operator's samples between neighbours that fusion composes with them: before each input and
//! after each result stands a permutation, a reshape, a slice, a pad, a lookup or a product with a
//! number, so that index expressions meet every map. The planned step, forward and training, must
//! compute what the operators mean.

mod planned;

use graph::{Attr, Attrs, Builder, ContainerId, DType, Expr, Graph, Library, Lifetime, Tensor};
use ops::check::{Case, append, builder};
use ops::meaning::{evaluate, type_of};
use ops::shape_rules::fixed;
use ops::{OpBuilder, OpError, attrs};
use planned::both_agree;

type Checked<T> = Result<T, Box<dyn std::error::Error>>;

/// What stands beside an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neighbour {
    Nothing,
    Permute,
    Reshape,
    Slice,
    Pad,
    Lookup,
    Scale,
}

use Neighbour::{Lookup, Nothing, Pad, Permute, Reshape, Scale, Slice};

/// Each neighbour on both sides, and each before every third other.
const PAIRS: [(Neighbour, Neighbour); 18] = [
    (Permute, Permute),
    (Reshape, Reshape),
    (Slice, Slice),
    (Pad, Pad),
    (Lookup, Lookup),
    (Scale, Scale),
    (Permute, Pad),
    (Permute, Nothing),
    (Nothing, Permute),
    (Reshape, Lookup),
    (Slice, Permute),
    (Slice, Scale),
    (Pad, Reshape),
    (Pad, Slice),
    (Lookup, Pad),
    (Lookup, Reshape),
    (Scale, Slice),
    (Nothing, Lookup),
];

fn op(name: &str, attrs: Attrs, n_inputs: usize) -> Library {
    Library {
        op: name.into(),
        attrs,
        inputs: vec![None; n_inputs],
        outputs: Vec::new(),
    }
}

fn reversed(rank: usize) -> Attrs {
    let order = (0..rank as i64).rev().collect();
    attrs([("order", Attr::Ints(order))])
}

fn sizes(tensor: &Tensor) -> Vec<i64> {
    tensor.shape.iter().map(|n| *n as i64).collect()
}

/// `x[…, start..stop]` along the last dimension.
fn cut(start: i64, stop: i64) -> Attrs {
    let one = |n| Attr::Sizes(fixed(&[n]));
    attrs([
        ("axis", Attr::Int(-1)),
        ("start", one(start)),
        ("stop", one(stop)),
        ("step", Attr::Int(1)),
    ])
}

/// Elements added before and after the last dimension.
fn added(rank: usize, (low, high): (i64, i64), mode: &str, value: f64) -> Attrs {
    let last = |n| {
        let mut amounts = vec![0; rank];
        amounts[rank - 1] = n;
        Attr::Sizes(fixed(&amounts))
    };
    attrs([
        ("low", last(low)),
        ("high", last(high)),
        ("mode", Attr::Str(mode.into())),
        ("value", Attr::Float(value)),
    ])
}

/// How a neighbour before an operator makes `wanted`: its operator, and what that is given.
fn before(neighbour: Neighbour, wanted: &Tensor) -> Checked<Option<(Library, Vec<Tensor>)>> {
    let rank = wanted.shape.len();
    let float = wanted.dtype.is_float();
    let last = wanted.shape.last().copied().unwrap_or(0) as i64;
    if rank == 0 || wanted.is_empty() {
        return Ok(None);
    }
    let inverse = |name: &str, a: Attrs| -> Checked<Tensor> {
        Ok(evaluate(&op(name, a, 1), &[Some(wanted)])?.remove(0))
    };
    Ok(Some(match neighbour {
        Nothing => return Ok(None),
        Permute => {
            let given = inverse("permute", reversed(rank))?;
            (op("permute", reversed(rank), 1), vec![given])
        }
        Reshape => {
            let flat = attrs([("shape", Attr::Sizes(fixed(&[wanted.len() as i64])))]);
            let back = attrs([("shape", Attr::Sizes(fixed(&sizes(wanted))))]);
            (op("reshape", back, 1), vec![inverse("reshape", flat)?])
        }
        Slice => {
            let given = inverse("pad", added(rank, (2, 1), "replicate", 0.0))?;
            (op("slice", cut(2, 2 + last), 1), vec![given])
        }
        // The padding is the first element of the sample, so it is in the operator's range.
        Pad if float && last > 1 => {
            let value = wanted.at(0).as_f64();
            let given = inverse("slice", cut(1, last))?;
            (
                op("pad", added(rank, (1, 0), "constant", value), 1),
                vec![given],
            )
        }
        Lookup => {
            let axes = attrs([("axes", Attr::Ints(vec![0]))]);
            let first = wanted.shape[0];
            let index = (0..first as i64).rev().collect();
            let index = Tensor::from_i64(DType::I64, &[first], index);
            let along = attrs([("axis", Attr::Int(0))]);
            (op("gather", along, 2), vec![inverse("flip", axes)?, index])
        }
        Scale if float => {
            let times = |n: f64| attrs([("expr", Attr::Expr(Expr::In(0).mul(Expr::float(n))))]);
            (
                op("elementwise", times(2.0), 1),
                vec![inverse("elementwise", times(0.5))?],
            )
        }
        Pad | Scale => return Ok(None),
    }))
}

/// The result behind a neighbour.
fn after(
    neighbour: Neighbour,
    of: ContainerId,
    index: Option<ContainerId>,
    builder: &mut Builder,
) -> Result<ContainerId, OpError> {
    let shape = builder.shape(of);
    let rank = shape.len();
    let float = builder.dtype(of).is_float();
    let constant: Vec<i64> = shape.iter().map(|s| s.as_const().unwrap_or(0)).collect();
    let elements: i64 = constant.iter().product();
    if rank == 0 || elements == 0 {
        return Ok(of);
    }
    match (neighbour, index) {
        (Permute, _) => builder.op1("permute", &[of], reversed(rank)),
        (Reshape, _) => {
            let flat = attrs([("shape", Attr::Sizes(fixed(&[elements])))]);
            builder.op1("reshape", &[of], flat)
        }
        (Slice, _) if constant[rank - 1] > 1 => {
            builder.op1("slice", &[of], cut(1, constant[rank - 1]))
        }
        (Pad, _) if float => {
            let around = added(rank, (1, 2), "constant", 0.5);
            builder.op1("pad", &[of], around)
        }
        (Lookup, Some(index)) => {
            builder.op1("gather", &[of, index], attrs([("axis", Attr::Int(0))]))
        }
        (Scale, _) if float => builder.elementwise(Expr::In(0).mul(Expr::float(0.5)), &[of]),
        _ => Ok(of),
    }
}

fn add_input(graph: &mut Graph, given: &mut Vec<Tensor>, value: Tensor) -> ContainerId {
    let ty = type_of(&value);
    given.push(value);
    graph.add_input("given", ty.dtype, ty.shape, Lifetime::Input)
}

/// A graph of the case between neighbours, and values for its inputs.
fn between(case: &Case, pair: (Neighbour, Neighbour)) -> Checked<(Graph, Vec<Tensor>)> {
    let mut graph = Graph::new("between");
    let mut library = case.add_to(&mut graph)?;
    // The case's own inputs give way to what neighbours make.
    for id in std::mem::take(&mut graph.inputs) {
        graph.container_mut(id).lifetime = Lifetime::Transient;
    }
    let mut given = Vec::new();
    for (position, value) in case.inputs.iter().enumerate() {
        let Some(value) = value else { continue };
        let made = match before(pair.0, value)? {
            None => add_input(&mut graph, &mut given, value.clone()),
            Some((neighbour, values)) => {
                let mut ids = Vec::new();
                for value in values {
                    ids.push(add_input(&mut graph, &mut given, value));
                }
                let mut nodes = builder(&mut graph);
                let made = nodes.op1(&neighbour.op, &ids, neighbour.attrs)?;
                append(nodes);
                made
            }
        };
        library.inputs[position] = Some(made);
    }
    let outputs = case.differentiated_outputs(&library);
    let index = (pair.1 == Lookup).then(|| {
        let twice = Tensor::from_i64(DType::I64, &[2], vec![0, 0]);
        add_input(&mut graph, &mut given, twice)
    });
    let mut nodes = builder(&mut graph);
    nodes.library(library);
    let results: Result<Vec<_>, _> = outputs
        .into_iter()
        .map(|of| after(pair.1, of, index, &mut nodes))
        .collect();
    append(nodes);
    results?.into_iter().for_each(|id| graph.add_output(id));
    Ok((graph, given))
}

#[test]
fn operators_keep_their_meaning_between_neighbours() {
    let mut failed = Vec::new();
    let mut n_checked = 0;
    for case in Case::all().expect("samples are sound") {
        for pair in PAIRS {
            let checked = between(&case, pair).and_then(|(graph, given)| {
                n_checked += 1;
                both_agree(&graph, &given).map_err(|e| format!("{e}\n{graph}").into())
            });
            if let Err(e) = checked {
                failed.push(format!("{} between {pair:?}: {e}", case.name()));
            }
        }
    }
    assert!(n_checked > 1000, "only {n_checked} graphs");
    assert!(
        failed.is_empty(),
        "{} of {n_checked} failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
}
