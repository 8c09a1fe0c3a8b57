//! What a training graph is asked to be: its loss, its optimizer, what is trained.
//!
//! Owns the names of these choices. What they mean in a graph, `training_graph` decides.

use std::str::FromStr;

/// What is minimized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Mean cross-entropy of an output `[N, C, …]` of the model with an input `labels`, i64 `[N, …]`.
    CrossEntropy,
    /// Mean squared difference of an output of the model and an input `target` of its shape.
    MeanSquaredError,
    /// An output of the model, of one element.
    Output(String),
}

impl FromStr for Loss {
    type Err = std::convert::Infallible;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Ok(match s {
            "cross-entropy" => Loss::CrossEntropy,
            "mse" => Loss::MeanSquaredError,
            output => Loss::Output(output.to_string()),
        })
    }
}

/// How parameters are updated; the learning rate is an input `lr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimizer {
    /// `p − lr·g`
    Sgd,
    /// `m ← 0.9·m + g`, `p − lr·m`, as `torch.optim.SGD(momentum=0.9)`.
    Momentum,
    /// Kingma and Ba, arXiv 1412.6980, with their constants.
    Adam,
    /// Loshchilov and Hutter, arXiv 1711.05101: Adam after `p ← p·(1 − 0.01·lr)`.
    AdamW,
}

impl FromStr for Optimizer {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "sgd" => Ok(Optimizer::Sgd),
            "momentum" => Ok(Optimizer::Momentum),
            "adam" => Ok(Optimizer::Adam),
            "adamw" => Ok(Optimizer::AdamW),
            other => Err(format!("`{other}` is none of sgd, momentum, adam, adamw")),
        }
    }
}

/// Where the optimizer's state begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OptimizerState {
    /// The caller gives it to every step, the first one too: zeros, and 1 as the number of the step.
    #[default]
    Outside,
    /// The file holds it as it is before the first step, as defaults of these inputs.
    Inside,
}

impl FromStr for OptimizerState {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "outside" => Ok(OptimizerState::Outside),
            "inside" => Ok(OptimizerState::Inside),
            other => Err(format!("`{other}` is none of outside, inside")),
        }
    }
}

/// What to write.
#[derive(Clone, Debug)]
pub struct TrainingOptions {
    /// What is minimized.
    pub loss: Loss,
    /// The output that cross-entropy and the squared difference are of; `None`: the only one of real numbers.
    pub output: Option<String>,
    /// How parameters are updated; `None`: gradients only.
    pub optimizer: Option<Optimizer>,
    /// Where the optimizer's state begins; without an optimizer it means nothing.
    pub optimizer_state: OptimizerState,
    /// What is differentiated: names of initializers or inputs; `None`: every trainable initializer.
    pub wrt: Option<Vec<String>>,
    /// Whether `NAME.grad` are outputs; with an optimizer they need not be, and cost passes over memory.
    pub gradients: bool,
    /// How much of each label cross-entropy spreads over all classes, in `[0, 1]`; 0: nothing.
    pub label_smoothing: f64,
}
