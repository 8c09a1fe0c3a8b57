//! Whether outputs are the expected ones.
//!
//! Owns the tolerances, and what stands in place of an expected number where the standard leaves it open: the cases
//! expect one draw of NumPy's generator from operators that draw at random.

use super::{Case, Verdict, dtype};
use graph::DType;
use onnx::proto::TensorProto;

/// An output: elements and sizes.
pub(super) type Output = (Vec<f64>, Vec<usize>);

/// Relative and absolute difference allowed: outputs of the cases are computed in their own type, in another order.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-4,
        DType::F64 => 1e-6,
        DType::F16 => 4e-3,
        DType::BF16 => 2e-2,
        _ => 0.0,
    }
}

/// Whether numbers are the expected ones.
pub(super) fn compare((found, shape): (&[f64], &[usize]), expected: &TensorProto) -> Verdict {
    let bytes = bytes::Bytes::from(prost::Message::encode_to_vec(expected));
    let expected = importer::onnx::decode_tensor(bytes)?;
    if shape != expected.shape {
        return Err(format!("sizes {shape:?} instead of {:?}", expected.shape));
    }
    let (tolerance, expected) = (tolerance(expected.dtype), expected.to_f64());
    if found.len() != expected.len() {
        let (found, expected) = (found.len(), expected.len());
        return Err(format!("{found} elements instead of {expected}"));
    }
    for (n, (a, b)) in found.iter().zip(expected).enumerate() {
        let same = *a == b || (a.is_nan() && b.is_nan());
        // Not so for NaN.
        let close = (a - b).abs() <= tolerance * (b.abs() + 0.02);
        if !same && !close {
            return Err(format!("element {n} is {a} instead of {b}"));
        }
    }
    Ok(())
}

/// What a graph that draws at random may give: each element is 0 or one other number, with a known probability.
pub(super) struct Draw {
    /// The other number of each element: 1 of Bernoulli, `x / (1 - ratio)` of Dropout.
    drawn: Vec<f64>,
    /// How probable it is.
    probability: Vec<f64>,
}

/// Standard deviations by which the number of drawn elements may differ from its mean.
const MOST_DEVIATIONS: f64 = 4.0;

impl Draw {
    /// The draw of a case with one operator that draws random numbers.
    ///
    /// # Errors
    /// Its inputs cannot be read.
    pub(super) fn new(case: &Case) -> Result<Draw, String> {
        let input = |n: usize| -> Result<Option<Vec<f64>>, String> {
            let Some(tensor) = case.inputs.get(n) else {
                return Ok(None);
            };
            let bytes = bytes::Bytes::from(prost::Message::encode_to_vec(tensor));
            Ok(Some(importer::onnx::decode_tensor(bytes)?.to_f64()))
        };
        let x = input(0)?.ok_or("nothing to draw for")?;
        let nodes = || case.model.graph.iter().flat_map(|g| &g.node);
        if nodes().any(|node| node.op_type == "Dropout") {
            let ratio = input(1)?.and_then(|r| r.first().copied()).unwrap_or(0.5);
            let kept = 1.0 - ratio;
            return Ok(Draw {
                drawn: x.iter().map(|x| x / kept).collect(),
                probability: vec![kept; x.len()],
            });
        }
        let draws = |op: &str| op == "Bernoulli" || op == "RandomUniformLike";
        match nodes().any(|node| draws(&node.op_type)) {
            true => Ok(Draw {
                drawn: vec![1.0; x.len()],
                probability: x,
            }),
            false => Err("an operator that draws in a way that is not known here".to_string()),
        }
    }

    /// Whether the outputs may have been drawn: the numbers, then, where it is an output, which of them are.
    pub(super) fn allows(&self, outputs: &[Output], expected: &[TensorProto]) -> Verdict {
        for ((found, shape), expected) in outputs.iter().zip(expected) {
            let sizes: Vec<usize> = expected.dims.iter().map(|n| *n as usize).collect();
            if *shape != sizes {
                return Err(format!("sizes {shape:?} instead of {sizes:?}"));
            }
            if found.len() != self.drawn.len() {
                return Err(format!("{} elements are drawn", found.len()));
            }
        }
        let (numbers, expected) = match (outputs.first(), expected.first()) {
            (Some((numbers, _)), Some(expected)) => (numbers, expected),
            _ => return Err("no output".to_string()),
        };
        let dtype = dtype(expected).ok_or("an element type that graphs do not have")?;
        for (n, (found, drawn)) in numbers.iter().zip(&self.drawn).enumerate() {
            let is_drawn = (found - drawn).abs() <= tolerance(dtype) * drawn.abs();
            if *found != 0.0 && !is_drawn {
                return Err(format!("element {n} is {found}, neither 0 nor {drawn}"));
            }
            let is_marked = outputs.get(1).map(|(mask, _)| mask[n] != 0.0);
            if is_marked.is_some_and(|marked| marked != (*found != 0.0)) {
                return Err(format!("the mask of element {n} says otherwise"));
            }
        }
        let n_drawn = numbers.iter().filter(|x| **x != 0.0).count() as f64;
        let mean: f64 = self.probability.iter().sum();
        let variance: f64 = self.probability.iter().map(|p| p * (1.0 - p)).sum();
        match (n_drawn - mean).abs() <= MOST_DEVIATIONS * variance.sqrt() {
            true => Ok(()),
            false => Err(format!("{n_drawn} elements are drawn instead of {mean:.1}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use onnx::proto::{GraphProto, ModelProto, NodeProto};

    /// `x` of `n` ones, and outputs of that size.
    fn case(op: &str, x: f32, n: usize) -> Case {
        let tensor = TensorProto {
            dims: vec![n as i64],
            data_type: 1,
            float_data: vec![x; n],
            ..Default::default()
        };
        let node = NodeProto {
            op_type: op.to_string(),
            ..Default::default()
        };
        Case {
            model: ModelProto {
                graph: Some(GraphProto {
                    node: vec![node],
                    ..Default::default()
                }),
                ..Default::default()
            },
            inputs: vec![tensor.clone()],
            outputs: vec![tensor.clone(), tensor],
        }
    }

    fn allowed(case: &Case, outputs: &[Vec<f64>]) -> Verdict {
        let draw = Draw::new(case).expect("it draws");
        let outputs = outputs.iter().map(|y| (y.clone(), vec![y.len()]));
        draw.allows(&outputs.collect::<Vec<_>>(), &case.outputs)
    }

    #[test]
    fn a_draw_is_held_against_its_numbers_its_mask_and_its_share() {
        let dropout = case("Dropout", 3.0, 4);
        let y = vec![6.0, 0.0, 6.0, 0.0];
        let mask = vec![1.0, 0.0, 1.0, 0.0];
        assert_eq!(allowed(&dropout, &[y.clone(), mask.clone()]), Ok(()));
        assert!(allowed(&dropout, &[vec![3.0, 0.0, 6.0, 0.0]]).is_err());
        assert!(allowed(&dropout, &[y.clone(), vec![1.0; 4]]).is_err());
        assert!(allowed(&dropout, &[y[..3].to_vec()]).is_err());
        let bernoulli = case("Bernoulli", 0.5, 100);
        let half: Vec<f64> = (0..100).map(|n| f64::from(n % 2)).collect();
        assert_eq!(allowed(&bernoulli, &[half]), Ok(()));
        assert!(allowed(&bernoulli, &[vec![1.0; 100]]).is_err());
        assert!(allowed(&case("Bernoulli", 1.0, 4), &[vec![1.0, 1.0, 0.0, 1.0]]).is_err());
        assert!(Draw::new(&case("Relu", 1.0, 4)).is_err());
    }

    #[test]
    fn numbers_are_compared_to_four_digits_and_kinds_exactly() {
        let expected = case("Relu", 0.1511, 1).outputs.remove(0);
        let found = |x: f64| compare((&[x], &[1]), &expected);
        assert_eq!(found(0.15111), Ok(()));
        assert!(found(0.151056).is_err() && found(f64::NAN).is_err());
        assert!(compare((&[0.1511], &[]), &expected).is_err());
        let expected = case("Relu", f32::NAN, 1).outputs.remove(0);
        assert_eq!(compare((&[f64::NAN], &[1]), &expected), Ok(()));
        assert!(compare((&[0.0], &[1]), &expected).is_err());
    }
}
