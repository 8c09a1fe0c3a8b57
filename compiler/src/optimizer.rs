//! Optimizers' steps over all parameters at once, in kernels that update in place, for the CPU and for CUDA.
//!
//! Owns the update rules, as `torch.optim` defines them, and the way to a program that runs. Every number is
//! read at each step (on a device from its memory), so that schedules of rates and momenta need no other kernel:
//! the rate, the number of the step, the factor of all gradients (which undoes the scale of a loss, or clips), whether
//! to skip the step because a gradient was not finite, and the rule's constants.

use crate::CompileError;
use crate::cuda::{CudaTarget, machine};
use cuda_kernels::machine::Machine;
use cuda_kernels::pooled::{self, Pooled};
use graph::{DType, Expr, Unary};
use kernels::compile::{CompileOptions, compile};
use kernels::progress::Progress;
use kernels::update::cpu::{self, Updater};
use kernels::update::{Operand, Update};

/// An update rule; its constants are numbers that kernels read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// `torch.optim.SGD`: `g ← g + decay·p`, `b ← momentum·b + g`, `p ← p − rate·b`, with Nesterov's
    /// momentum `p − rate·(g + momentum·b)`; without momentum `p − rate·g`, and no state.
    Sgd {
        /// Whether earlier gradients count too.
        momentum: bool,
        /// Whether a part of the parameter is added to its gradient.
        decay: bool,
        /// Sutskever et al., ICML 2013.
        nesterov: bool,
    },
    /// `torch.optim.Adam` (Kingma and Ba, arXiv 1412.6980); with `decoupled` `torch.optim.AdamW`
    /// (Loshchilov and Hutter, arXiv 1711.05101).
    Adam {
        /// Whether parameters decay.
        decay: bool,
        /// Whether the decay is taken off the parameter instead of added to its gradient.
        decoupled: bool,
    },
}

/// What every update reads first, in order.
pub const NUMBERS: [&str; 4] = ["rate", "step", "factor", "skip"];

impl Rule {
    /// Names of the state of a parameter, as in PyTorch's state.
    pub fn state(&self) -> &'static [&'static str] {
        match self {
            Rule::Sgd {
                momentum: false, ..
            } => &[],
            Rule::Sgd { .. } => &["momentum_buffer"],
            Rule::Adam { .. } => &["exp_avg", "exp_avg_sq"],
        }
    }

    /// Names of the constants, which are read after [`NUMBERS`]. For a number near 1, its difference from 1 and its
    /// logarithm are constants too: computed in single precision they would lose digits.
    pub fn constants(&self) -> &'static [&'static str] {
        match self {
            Rule::Sgd { .. } => &["decay", "momentum"],
            Rule::Adam { .. } => &[
                "decay",
                "eps",
                "beta1",
                "1 - beta1",
                "ln beta1",
                "beta2",
                "1 - beta2",
                "ln beta2",
            ],
        }
    }

    /// The update of parameters and gradients of a type, with state of that type, as PyTorch keeps it.
    /// `maximize`: along the gradient instead of against it.
    pub fn update(&self, dtype: DType, maximize: bool) -> Update {
        let state = self.state();
        let [p, g, a, b] = [0, 1, 2, 3].map(Expr::In);
        let number = |n: usize| Expr::In(2 + state.len() + n);
        let (rate, step, factor) = (number(0), number(1), number(2));
        let constant = |n: usize| number(NUMBERS.len() + n);
        let g = g.mul(if maximize { factor.neg() } else { factor });
        let with_decay = |g: Expr, decay: bool| match decay {
            false => g,
            true => g.add(constant(0).mul(Expr::In(0))),
        };
        let rules = match *self {
            Rule::Sgd {
                momentum,
                decay,
                nesterov,
            } => {
                let g = with_decay(g, decay);
                let next = constant(1).mul(a).add(g.clone());
                let along = g.clone().add(constant(1).mul(next.clone()));
                match (momentum, nesterov) {
                    (false, _) => vec![(0, p.sub(rate.mul(g)))],
                    (true, false) => vec![(0, p.sub(rate.mul(next.clone()))), (2, next)],
                    (true, true) => vec![(0, p.sub(rate.mul(along))), (2, next)],
                }
            }
            Rule::Adam { decay, decoupled } => {
                let (p, g) = match decoupled && decay {
                    true => {
                        let kept = Expr::float(1.0).sub(constant(0).mul(rate.clone()));
                        (p.mul(kept), g)
                    }
                    false => (p, with_decay(g, decay)),
                };
                let mean = constant(2).mul(a).add(constant(3).mul(g.clone()));
                let squared = g.clone().mul(g);
                let square = constant(5).mul(b).add(constant(6).mul(squared));
                // 1 − βᵗ, exact also where βᵗ is almost 1.
                let corrected = |logarithm: usize| {
                    let power = constant(logarithm).mul(step.clone());
                    Expr::unary(Unary::Expm1, power).neg()
                };
                // These two are the same for all elements, so each element is divided only once.
                let per_root = Expr::unary(Unary::Recip, corrected(7).sqrt());
                let scale = square.clone().sqrt().mul(per_root).add(constant(1));
                let rate = rate.div(corrected(4));
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
        let numbers = NUMBERS.iter().chain(self.constants());
        Update {
            name: format!("the optimizer's step ({})", self.name()),
            operands,
            numbers: numbers.map(|name| name.to_string()).collect(),
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

/// A step for parameters in the CPU's memory, ready to run on arrays of any number and size.
///
/// # Errors
/// No C compiler, no folder for what it makes.
pub fn compile_for_cpu(
    update: &Update,
    progress: &mut dyn Progress,
) -> Result<Updater, CompileError> {
    let options = CompileOptions::from_environment(progress)?;
    let modules = compile(&[cpu::emit(update)?], &options, progress)?;
    Ok(Updater::new(update, &modules[0])?)
}

/// A step for parameters of given sizes on a CUDA device, ready to run.
pub struct OptimizerStep {
    /// Kernels and the pass that launches them. Its buffers are each parameter with its gradient and its state, then
    /// [`NUMBERS`].
    pub pooled: Pooled,
    /// Runs it.
    pub machine: Machine,
}

impl OptimizerStep {
    /// Compiles a step for parameters of one type. `aligned`: every array starts at a multiple of 16 bytes.
    ///
    /// # Errors
    /// No NVRTC, no device, or no code for the device.
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
