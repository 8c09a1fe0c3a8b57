//! Why a contraction takes the scalar form, and what that costs: what lowering records and reports print.

use serde::Serialize;
use thiserror::Error;

/// Why no fast form of a contraction applies.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoFastForm {
    /// An axis of the output that no scatter form knows.
    #[error("an output axis is not of the form stride*i + dilation*r + offset")]
    OutputAxis,
    /// Steps that would make a kernel for each of very many offsets.
    #[error("an output axis takes steps of more than 64 elements")]
    ManyPhases,
    /// One dim in two axes of the output.
    #[error("a dimension occurs in two output axes")]
    RepeatedOutputDim,
    /// A dim of a composite output axis that both operands have, or none.
    #[error("a dimension of a composite output axis is not in exactly one operand")]
    SharedOutputDim,
    /// A dim of a composite output axis that is part of an operand's composite axis.
    #[error("a dimension of a composite output axis is not a plain index of its operand")]
    CompositeOutputDim,
    /// Both operands would have to be staged with borders.
    #[error("both operands have guarded axes")]
    TwoGuardedOperands,
    /// One dim in two guarded axes of an operand.
    #[error("a dimension occurs in two guarded axes")]
    RepeatedGuardedDim,
    /// An operand whose addresses fall while a dim rises.
    #[error("an operand runs backwards")]
    RunsBackwards,
    /// A batch dim in a guarded or overlapping axis.
    #[error("a batch dimension is part of a guarded axis")]
    GuardedBatch,
    /// An epilogue on a sum that threads share.
    #[error("several threads share its sum, which allows no epilogue")]
    SplitSum,
    /// A prologue on the weights of a depthwise convolution, which stay in registers.
    #[error("the weights of a depthwise convolution are not computed while they are read")]
    ComputedWeights,
    /// An epilogue on a result whose elements are not one block in memory.
    #[error("the result's elements are not one block in memory, which an epilogue needs")]
    ScatteredResult,
    /// Operands that instructions for pairs of 16-bit numbers do not fit; single precision does.
    #[error("its operands do not fit instructions for pairs of numbers")]
    NoPairs,
    /// A kernel that does other work before its contraction: no generator takes that.
    #[error("other work comes before it in its kernel")]
    NotFirst,
    /// An operand indexed by data, a remainder or a quotient.
    #[error("an operand's index is not a sum of the loops' positions")]
    Index,
    /// More than the 32-bit numbers of a GPU's kernels count.
    #[error("it has more rows, columns, terms or products than a kernel can count")]
    TooLarge,
    /// Operands or a result of types that no micro-kernel multiplies with each other.
    #[error("some of its operands and its result are in double precision, others are not")]
    ElementType,
}

/// A contraction in the scalar form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScalarForm {
    /// Why no fast form applies.
    pub reason: NoFastForm,
    /// What it costs, where the limits of the machine are known.
    #[serde(flatten)]
    pub cost: Option<ScalarCost>,
}

/// What the scalar form costs: predicted, not measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScalarCost {
    /// Microseconds that the scalar form is predicted to take.
    pub predicted_us: u64,
    /// Microseconds that a fast form of the same arithmetic would be predicted to take.
    pub fast_us: u64,
}

/// How many times as fast independent operations run as those of a sum, each of which waits for the addition
/// before it: an addition takes 4 cycles, in which a core begins 8 (Intel's and AMD's tables of latencies).
const SUMS_WAIT: u64 = 8;

impl ScalarForm {
    /// The record of `flops` operations that `target` could do with its vectors.
    pub fn new(reason: NoFastForm, flops: u64, target: &super::ContractionTarget) -> Self {
        ScalarForm {
            reason,
            cost: Some(ScalarCost::new(flops, target)),
        }
    }
}

impl ScalarCost {
    /// The cost of `flops` operations on a target: by its machine's rate of products, and by the rate of one lane whose
    /// operations wait for each other.
    pub fn new(flops: u64, target: &super::ContractionTarget) -> Self {
        let threads = target.threads.max(1) as u64;
        let fast = target.machine.product_operations_per_us.max(1) * threads;
        let lanes = target.vector_width.max(1) as u64;
        let scalar = (fast / (lanes * SUMS_WAIT)).max(1);
        ScalarCost {
            predicted_us: flops / scalar,
            fast_us: flops / fast,
        }
    }
}
