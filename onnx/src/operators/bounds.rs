//! How many bytes a result may take: asked before memory is.
//!
//! A file of 70 bytes can name a tensor of gigabytes, in a constant, a size or a scale. What an operator gives is
//! foreseen by its own rule of inference; what is larger than the caller has room for is refused with a
//! sentence. What comes out has the elements that its sizes say.

use super::{Call, Inference, Operator, Unknowns};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::Tensor;

/// Room for a result whatever file it belongs to.
pub const ALWAYS: usize = 256 << 20;

/// Inputs of up to so many elements decide sizes; longer ones are only computed with.
const DECIDING: usize = 64;

/// Bytes of an element of text: what a short one takes.
const TEXT_BYTES: usize = 32;

impl Operator {
    /// The outputs, each of at most `most_bytes`.
    ///
    /// # Errors
    /// A sentence about what does not fit.
    pub fn run(&self, call: &Call, most_bytes: usize) -> Result<Vec<Tensor>, String> {
        self.foresee(call, most_bytes)?;
        let outputs = (self.evaluate)(call)?;
        match outputs.iter().find(|tensor| !is_whole(tensor)) {
            None => Ok(outputs),
            Some(broken) => Err(format!(
                "internal error: a result of sizes {:?} has {} elements; please report this file",
                broken.shape,
                broken.len()
            )),
        }
    }

    fn foresee(&self, call: &Call, most_bytes: usize) -> Result<(), String> {
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
                element => element.and_then(Element::bytes).unwrap_or(TEXT_BYTES),
            };
            let bytes = sizes.iter().try_fold(each, |p, n| p.checked_mul(*n));
            if bytes.is_none_or(|n| n > most_bytes) {
                return Err(format!(
                    "a result of sizes {sizes:?} is too large to be computed: it may take {most_bytes} bytes"
                ));
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
    let n = tensor
        .shape
        .iter()
        .try_fold(1usize, |p, n| p.checked_mul(*n));
    n == Some(tensor.len())
}
