//! Optimizers' steps over all parameters at once, in CUDA kernels that update in place.
//!
//! Owns the update rules, as `torch.optim` defines them, and the way to a program that runs. What is read
//! from the device's memory at each step: the rate, the number of the step, by how much gradients are
//! multiplied (what undoes a scaled loss, and what clips), and whether the step is to be left out since a
//! gradient was not finite.

use crate::CompileError;
use crate::cuda::{CudaTarget, machine};
use graph::{DType, Expr, Unary};
use kernels::cuda::machine::Machine;
use kernels::cuda::pooled::{self, Operand, Pooled, Update};
use kernels::progress::Progress;

/// An update rule with its constants; the rate is no constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// `torch.optim.SGD`: `g ← g + decay·p`, `b ← momentum·b + g`, `p ← p − rate·b`, with Nesterov's
    /// momentum `p − rate·(g + momentum·b)`; without momentum `p − rate·g`, and no state.
    Sgd {
        /// Of the gradients so far.
        momentum: f64,
        /// Of the parameter, added to its gradient.
        decay: f64,
        /// Sutskever et al., ICML 2013.
        nesterov: bool,
    },
    /// `torch.optim.Adam` (Kingma and Ba, arXiv 1412.6980); with `decoupled` `torch.optim.AdamW`
    /// (Loshchilov and Hutter, arXiv 1711.05101).
    Adam {
        /// What the running means keep of the gradient and of its square.
        betas: (f64, f64),
        /// Added to the root of the mean square.
        eps: f64,
        /// Of the parameter.
        decay: f64,
        /// Whether the decay is taken off the parameter instead of added to its gradient.
        decoupled: bool,
    },
}

/// What every update reads besides, in order: single numbers of type f32 on the device.
pub const NUMBERS: [&str; 4] = ["rate", "step", "factor", "skip"];

impl Rule {
    /// Names of the state of a parameter, as in PyTorch's state.
    pub fn state(&self) -> &'static [&'static str] {
        match self {
            Rule::Sgd { momentum, .. } if *momentum == 0.0 => &[],
            Rule::Sgd { .. } => &["momentum_buffer"],
            Rule::Adam { .. } => &["exp_avg", "exp_avg_sq"],
        }
    }

    /// The update of parameters and gradients of a type, with state of that type, as PyTorch keeps it.
    /// `maximize`: along the gradient instead of against it.
    pub fn update(&self, dtype: DType, maximize: bool) -> Update {
        let state = self.state();
        let [p, g, a, b] = [0, 1, 2, 3].map(Expr::In);
        let number = |n: usize| Expr::In(2 + state.len() + n);
        let (rate, step, factor) = (number(0), number(1), number(2));
        let times = |x: f64, e: Expr| Expr::float(x).mul(e);
        let g = g.mul(if maximize { factor.neg() } else { factor });
        let with_decay = |g: Expr, decay: f64| match decay {
            0.0 => g,
            _ => g.add(times(decay, Expr::In(0))),
        };
        let rules = match *self {
            Rule::Sgd {
                momentum,
                decay,
                nesterov,
            } => {
                let g = with_decay(g, decay);
                match (momentum, nesterov) {
                    (0.0, _) => vec![(0, p.sub(rate.mul(g)))],
                    (_, false) => {
                        let next = times(momentum, a).add(g);
                        vec![(0, p.sub(rate.mul(next.clone()))), (2, next)]
                    }
                    (_, true) => {
                        let next = times(momentum, a).add(g.clone());
                        let along = g.add(times(momentum, next.clone()));
                        vec![(0, p.sub(rate.mul(along))), (2, next)]
                    }
                }
            }
            Rule::Adam {
                betas: (first, second),
                eps,
                decay,
                decoupled,
            } => {
                let (p, g) = match decoupled {
                    true => (p.mul(Expr::float(1.0).sub(times(decay, rate.clone()))), g),
                    false => (p, with_decay(g, decay)),
                };
                let mean = times(first, a).add(times(1.0 - first, g.clone()));
                let square = times(second, b).add(times(1.0 - second, g.clone().mul(g)));
                // 1 − βᵗ, exact also where βᵗ is almost 1.
                let corrected =
                    |beta: f64| Expr::unary(Unary::Expm1, times(beta.ln(), step.clone())).neg();
                let root = corrected(second).sqrt();
                let scale = square.clone().sqrt().div(root).add(Expr::float(eps));
                let rate = rate.div(corrected(first));
                let next = p.sub(rate.mul(mean.clone().div(scale)));
                vec![(0, next), (2, mean), (3, square)]
            }
        };
        let operand = |name: &str, written: bool| Operand {
            name: name.to_string(),
            dtype,
            written,
        };
        let mut operands = vec![operand("parameter", true), operand("gradient", false)];
        operands.extend(state.iter().map(|name| operand(name, true)));
        Update {
            name: format!("the optimizer's step ({})", self.name()),
            operands,
            numbers: NUMBERS.map(String::from).into(),
            unless: Some(3),
            rules,
            dtype: match dtype {
                DType::F64 => DType::F64,
                _ => DType::F32,
            },
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Rule::Sgd { .. } => "SGD",
            Rule::Adam { decoupled, .. } => match decoupled {
                true => "AdamW",
                false => "Adam",
            },
        }
    }
}

/// A step for parameters of given sizes, ready to run.
pub struct OptimizerStep {
    /// Kernels and the pass that launches them: of each parameter itself, its gradient and its state, then
    /// [`NUMBERS`].
    pub pooled: Pooled,
    /// Runs it.
    pub machine: Machine,
}

impl OptimizerStep {
    /// Compiles a step for parameters of one type. `aligned`: every array starts at a multiple of 16 bytes.
    ///
    /// # Errors
    /// No NVRTC, no device or one that there is no code for.
    pub fn build(
        update: &Update,
        sizes: &[usize],
        aligned: bool,
        target: &CudaTarget<'_>,
        progress: &mut dyn Progress,
    ) -> Result<OptimizerStep, CompileError> {
        let pooled = pooled::emit(update, sizes, aligned)?;
        let machine = machine(&pooled.kernels, &pooled.pass.launches, target, progress)?;
        Ok(OptimizerStep { pooled, machine })
    }
}
