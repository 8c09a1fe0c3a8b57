//! How many bytes a result may take: checked before memory is allocated.
//!
//! A file of 70 bytes can name a tensor of gigabytes, in a constant, a size or a scale. The operator's own rule of
//! inference foresees the sizes of its result. A result that is larger than the caller has room for is refused with a
//! sentence. What an operator returns is checked to have as many elements as its sizes say.

use super::{Call, Inference, Operator, Unknowns};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{STRING_BYTES, Tensor, n_elements};

/// Room for a result whatever file it belongs to.
pub const ALWAYS: usize = 256 << 20;

/// Inputs of up to this many elements may decide sizes; longer ones are only computed with.
const DECIDING: usize = 64;

/// Why an operator gives no outputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OperatorError {
    /// A result takes more bytes than there is room for.
    #[error(
        "a result of sizes {sizes:?} is too large to be computed: it may take {most_bytes} bytes"
    )]
    TooLarge {
        /// Sizes of the result.
        sizes: Vec<usize>,
        /// What it may take.
        most_bytes: usize,
    },
    /// The operator refuses its inputs; a sentence of its own.
    #[error("{0}")]
    Refused(String),
    /// The operator gives a tensor that does not have the elements that its sizes say.
    #[error(
        "internal error: a result of sizes {sizes:?} has {n_elements} elements; please report this file"
    )]
    Broken {
        /// Sizes of the result.
        sizes: Vec<usize>,
        /// The elements that it has.
        n_elements: usize,
    },
}

impl Operator {
    /// The outputs, each of at most `most_bytes`.
    ///
    /// # Errors
    /// See [`OperatorError`].
    pub fn run(&self, call: &Call, most_bytes: usize) -> Result<Vec<Tensor>, OperatorError> {
        self.foresee(call, most_bytes)?;
        let outputs = (self.evaluate)(call).map_err(OperatorError::Refused)?;
        match outputs.iter().find(|tensor| !is_whole(tensor)) {
            None => Ok(outputs),
            Some(broken) => Err(OperatorError::Broken {
                sizes: broken.shape.clone(),
                n_elements: broken.len(),
            }),
        }
    }

    /// Refuses outputs that by the rule of inference are too large.
    fn foresee(&self, call: &Call, most_bytes: usize) -> Result<(), OperatorError> {
        let inputs: Vec<Option<Fact>> = call.inputs.iter().map(|t| t.as_ref().map(fact)).collect();
        let foreseen = (self.infer)(&Inference {
            node: call.node,
            attributes: call.attributes,
            opset: call.opset,
            inputs: &inputs,
            unknowns: &Unknowns::default(),
        });
        for fact in foreseen.into_iter().flatten() {
            let Some(sizes) = fact.sizes() else { continue };
            let each = match fact.element {
                Some(element) if call.widened && element.is_float() => 8,
                element => element.and_then(Element::bytes).unwrap_or(STRING_BYTES),
            };
            let bytes = n_elements(&sizes).and_then(|n| n.checked_mul(each));
            if bytes.is_none_or(|n| n > most_bytes) {
                return Err(OperatorError::TooLarge { sizes, most_bytes });
            }
        }
        Ok(())
    }
}

fn fact(tensor: &Tensor) -> Fact {
    match tensor.len() <= DECIDING {
        true => Fact::of_tensor(tensor.clone()),
        false => {
            let shape = tensor.shape.iter().map(|n| (*n).into()).collect();
            Fact::new(Some(tensor.element()), Some(shape))
        }
    }
}

fn is_whole(tensor: &Tensor) -> bool {
    n_elements(&tensor.shape) == Some(tensor.len())
}

#[cfg(test)]
mod tests {
    use super::{OperatorError, Tensor};
    use crate::attributes::Attributes;
    use crate::operators::{Call, find};
    use crate::proto::NodeProto;
    use crate::tensor::Values;

    /// What Expand gives for one f32 and these sizes, with room for 64 bytes.
    fn expanded(sizes: &[i64]) -> Result<Vec<Tensor>, OperatorError> {
        let node = NodeProto {
            op_type: "Expand".into(),
            input: vec!["x".into(), "sizes".into()],
            output: vec!["y".into()],
            ..Default::default()
        };
        let inputs = [
            Tensor::new(&[1], Values::F32(vec![1.0])),
            Tensor::new(&[sizes.len()], Values::I64(sizes.to_vec())),
        ];
        let call = Call {
            node: &node,
            attributes: Attributes::new(&node),
            opset: 17,
            inputs: &inputs.map(Some),
            widened: false,
        };
        find(&node).expect("a known operator").run(&call, 64)
    }

    #[test]
    fn what_is_larger_than_its_room_is_refused_before_it_is_made() {
        assert_eq!(expanded(&[4, 4]).expect("room")[0].shape, [4, 4]);
        for sizes in [[1, 17], [1 << 40, 1 << 40]] {
            let refused = OperatorError::TooLarge {
                sizes: sizes.map(|n| n as usize).to_vec(),
                most_bytes: 64,
            };
            assert_eq!(expanded(&sizes), Err(refused));
        }
    }

    #[test]
    fn what_an_operator_refuses_is_another_error_than_a_lack_of_room() {
        let found = expanded(&[-2, 4]);
        assert!(matches!(found, Err(OperatorError::Refused(_))), "{found:?}");
    }
}
