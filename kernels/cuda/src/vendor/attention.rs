//! Attention that an operator of PyTorch's computes: the description of one, what each operator takes, and
//! the launch that stands for it in a program.
//!
//! Owns the rules of `_scaled_dot_product_flash_attention`, `_scaled_dot_product_efficient_attention` and
//! `_scaled_dot_product_cudnn_attention` (ATen's `sdp_utils`, as of PyTorch 2.11) that do not depend on
//! the device, and the text that tables know an attention by. Never calls an operator: whoever runs a
//! program brings them ([`crate::machine::Operators`]).

use crate::{Param, ParamType};
use graph::{DType, Library, Operand, View};
use std::fmt;

/// The operators of PyTorch's for attention on CUDA devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attending {
    /// FlashAttention.
    Flash,
    /// Memory-efficient attention.
    Efficient,
    /// cuDNN's.
    Cudnn,
}

impl Attending {
    /// All of them.
    pub const ALL: [Attending; 3] = [Attending::Flash, Attending::Efficient, Attending::Cudnn];

    /// The name in tables and reports.
    pub fn name(self) -> &'static str {
        match self {
            Attending::Flash => "torch_flash",
            Attending::Efficient => "torch_efficient",
            Attending::Cudnn => "torch_cudnn",
        }
    }

    /// The operator of that name.
    pub fn of(name: &str) -> Option<Attending> {
        Attending::ALL.into_iter().find(|by| by.name() == name)
    }
}

impl fmt::Display for Attending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Attending::Flash => "PyTorch's flash attention",
            Attending::Efficient => "PyTorch's memory-efficient attention",
            Attending::Cudnn => "PyTorch's attention by cuDNN",
        })
    }
}

/// What is added to or taken from the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mask {
    /// Nothing.
    Nothing,
    /// Row l sees columns up to l.
    Causal,
    /// Numbers are added, of any shape that broadcasts to `[batch, heads, rows, columns]`.
    Added,
    /// Truth values choose: 0 and −∞ are added, as PyTorch does it.
    Chosen,
}

/// Attention in the terms of PyTorch's operators: q `[batch, heads, rows, width]`, k `[batch, heads,
/// columns, width]`, v `[batch, heads, columns, values]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attention {
    /// Independent sequences.
    pub batch: i64,
    /// Heads of each.
    pub heads: i64,
    /// Queries.
    pub rows: i64,
    /// Keys.
    pub columns: i64,
    /// Elements of a query and of a key.
    pub width: i64,
    /// Elements of a value.
    pub values: i64,
    /// Element type of all operands.
    pub dtype: DType,
    /// What is done to the scores.
    pub mask: Mask,
    /// Whether probabilities are dropped.
    pub drops: bool,
}

/// The text that tables know it by.
impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "attention batch {} heads {} rows {} columns {} width {} values {}; {}",
            self.batch, self.heads, self.rows, self.columns, self.width, self.values, self.dtype
        )?;
        f.write_str(match self.mask {
            Mask::Nothing => "",
            Mask::Causal => "; causal",
            Mask::Added => "; mask added",
            Mask::Chosen => "; mask of truth values",
        })?;
        f.write_str(if self.drops { "; dropout" } else { "" })
    }
}

impl Attention {
    /// Multiplications and additions of the products: two forward; five backward, since the scores are
    /// made again.
    pub fn flops(&self, direction: Pass) -> u64 {
        let points = (self.batch * self.heads * self.rows * self.columns) as u64;
        let (width, values) = (self.width as u64, self.values as u64);
        2 * points
            * match direction {
                Pass::Forward => width + values,
                Pass::Backward => 3 * width + 2 * values,
            }
    }

    /// Why an operator cannot compute it, if it cannot.
    pub fn obstacle(&self, by: Attending) -> Option<String> {
        let is_half = matches!(self.dtype, DType::F16 | DType::BF16);
        if self.drops {
            return Some("its dropout draws other random numbers than ours".into());
        }
        match self.mask {
            Mask::Added | Mask::Chosen if by == Attending::Flash => {
                return Some("it takes no mask but the causal one".into());
            }
            // FlashAttention counts from the last row and column, others from the first.
            Mask::Causal if self.rows != self.columns => {
                return Some(format!(
                    "a causal mask of {} rows and {} columns is not given to it",
                    self.rows, self.columns
                ));
            }
            _ => {}
        }
        if self.values != self.width {
            return Some(format!(
                "values of {} elements are not as wide as keys of {}",
                self.values, self.width
            ));
        }
        let (takes_single, unit, most) = match by {
            Attending::Flash => (false, 8, 256),
            Attending::Efficient if is_half => (true, 8, 1024),
            Attending::Efficient => (true, 4, 1024),
            Attending::Cudnn => (false, 8, 128),
        };
        let fits = is_half || (takes_single && self.dtype == DType::F32);
        if !fits {
            let also = if takes_single {
                ", f16 and f32"
            } else {
                " and f16"
            };
            return Some(format!("it takes bf16{also}, not {}", self.dtype));
        }
        if self.width % unit != 0 || self.width > most {
            return Some(format!(
                "it takes heads whose width is a multiple of {unit} up to {most}, not {}",
                self.width
            ));
        }
        let is_masked = matches!(self.mask, Mask::Added | Mask::Chosen);
        if is_masked && self.columns % unit != 0 {
            return Some(format!(
                "it takes masks of a multiple of {unit} columns, not of {}",
                self.columns
            ));
        }
        None
    }
}

/// Which pass a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// q, k, v, mask to y and lse.
    Forward,
    /// dy, q, k, v, mask, y, lse to dq, dk, dv.
    Backward,
}

/// One operand of a call: a view of one of the launch's buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct CallOperand {
    /// What it is: `q`, `k`, `v`, `mask`, `y`, `lse`, `dy`, `dq`, `dk`, `dv`.
    pub role: &'static str,
    /// Type of the elements.
    pub dtype: DType,
    /// Where they lie in the buffer.
    pub view: View,
    /// Whether the call writes it.
    pub is_written: bool,
}

/// A launch that an operator of PyTorch's computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Its name in messages, unique in a program.
    pub name: String,
    /// The operator.
    pub by: Attending,
    /// Forward or backward.
    pub pass: Pass,
    /// Factor of the scores.
    pub scale: f64,
    /// Whether row l sees columns up to l only.
    pub is_causal: bool,
    /// The operands in the order of the launch's arguments; those that nobody needs are left out.
    pub operands: Vec<CallOperand>,
    /// What a launch is given, one for each operand.
    pub params: Vec<Param>,
}

const FORWARD: ([&str; 4], [&str; 2]) = (["q", "k", "v", "mask"], ["y", "lse"]);
const BACKWARD: ([&str; 7], [&str; 3]) = (
    ["dy", "q", "k", "v", "mask", "y", "lse"],
    ["dq", "dk", "dv"],
);

impl Call {
    /// The call that a library node of views asks for; `dtype_of` tells of an operand's container. The
    /// name is still to be given. `None` for a node of another kind.
    pub fn of(library: &Library, dtype_of: &dyn Fn(Operand) -> Option<DType>) -> Option<Call> {
        use graph::Attr;
        let by = Attending::of(library.computed_by()?)?;
        let (pass, inputs, outputs): (_, &[&'static str], &[&'static str]) =
            match library.op.as_str() {
                "attention_with_lse" => (Pass::Forward, &FORWARD.0, &FORWARD.1),
                "attention_gradient" => (Pass::Backward, &BACKWARD.0, &BACKWARD.1),
                _ => return None,
            };
        let present =
            |ids: &[Option<graph::ContainerId>], n: usize| matches!(ids.get(n), Some(Some(_)));
        let reads = (0..inputs.len()).filter(|n| present(&library.inputs, *n));
        let reads = reads.map(|n| (inputs[n], Operand::Input(n), false));
        let writes = (0..outputs.len()).filter(|n| present(&library.outputs, *n));
        let writes = writes.map(|n| (outputs[n], Operand::Output(n), true));
        let operand = |(role, operand, is_written): (&'static str, Operand, bool)| {
            Some(CallOperand {
                role,
                dtype: dtype_of(operand)?,
                view: library.view(operand)?,
                is_written,
            })
        };
        let operands: Option<Vec<CallOperand>> = reads.chain(writes).map(operand).collect();
        let operands = operands?;
        let query = operands.iter().find(|o| o.role == "q")?;
        let width = *query.view.sizes.last()?;
        let scale = match library.attrs.get("scale") {
            Some(Attr::Float(scale)) => *scale,
            _ => 1.0 / (width as f64).sqrt(),
        };
        let param = |o: &CallOperand| Param {
            name: o.role.to_string(),
            ty: match o.is_written {
                true => ParamType::Out(o.dtype),
                false => ParamType::In(o.dtype),
            },
        };
        Some(Call {
            name: String::new(),
            by,
            pass,
            scale,
            is_causal: library.attrs.get("causal") == Some(&Attr::Bool(true)),
            params: operands.iter().map(param).collect(),
            operands,
        })
    }

    /// The operand with this role.
    pub fn operand(&self, role: &str) -> Option<&CallOperand> {
        self.operands.iter().find(|o| o.role == role)
    }

    /// Multiplications and additions of its products.
    pub fn flops(&self) -> u64 {
        let size = |role: &str, d: usize| {
            let operand = self.operand(role);
            operand
                .and_then(|o| o.view.sizes.get(d).copied())
                .unwrap_or(1)
        };
        let attention = Attention {
            batch: size("q", 0),
            heads: size("q", 1),
            rows: size("q", 2),
            columns: size("k", 2),
            width: size("q", 3),
            values: size("v", 3),
            dtype: DType::F32,
            mask: Mask::Nothing,
            drops: false,
        };
        attention.flops(self.pass)
    }

    /// Bytes moved to put its results in their places: operators return results of their own, which are
    /// read once and written once more.
    pub fn copied_bytes(&self) -> u64 {
        let written = self.operands.iter().filter(|o| o.is_written);
        let bytes = |o: &CallOperand| o.view.elements() as u64 * o.dtype.bytes() as u64;
        2 * written.map(bytes).sum::<u64>()
    }

    /// What it computes, for messages.
    pub fn operator(&self) -> String {
        match self.pass {
            Pass::Forward => self.by.to_string(),
            Pass::Backward => format!("the gradient of {}", self.by),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bert() -> Attention {
        Attention {
            batch: 8,
            heads: 16,
            rows: 512,
            columns: 512,
            width: 64,
            values: 64,
            dtype: DType::BF16,
            mask: Mask::Nothing,
            drops: false,
        }
    }

    #[test]
    fn tables_know_it_by_its_sizes() {
        let text = "attention batch 8 heads 16 rows 512 columns 512 width 64 values 64; bf16";
        assert_eq!(bert().to_string(), text);
        let causal = Attention {
            mask: Mask::Causal,
            drops: true,
            ..bert()
        };
        assert_eq!(causal.to_string(), format!("{text}; causal; dropout"));
    }

    #[test]
    fn each_condition_alone_refuses() {
        for by in Attending::ALL {
            assert_eq!(bert().obstacle(by), None);
        }
        let wrong: [(Attention, &[Attending], &str); 9] = [
            (
                Attention {
                    drops: true,
                    ..bert()
                },
                &Attending::ALL,
                "dropout",
            ),
            (
                Attention {
                    mask: Mask::Added,
                    ..bert()
                },
                &[Attending::Flash],
                "no mask",
            ),
            (
                Attention {
                    mask: Mask::Chosen,
                    ..bert()
                },
                &[Attending::Flash],
                "no mask",
            ),
            (
                Attention {
                    mask: Mask::Added,
                    columns: 20,
                    ..bert()
                },
                &[Attending::Efficient, Attending::Cudnn],
                "not of 20",
            ),
            (
                Attention {
                    mask: Mask::Causal,
                    rows: 8,
                    ..bert()
                },
                &Attending::ALL,
                "8 rows",
            ),
            (
                Attention {
                    values: 32,
                    ..bert()
                },
                &Attending::ALL,
                "as wide",
            ),
            (
                Attention {
                    dtype: DType::F64,
                    ..bert()
                },
                &Attending::ALL,
                "not f64",
            ),
            (
                Attention {
                    width: 12,
                    values: 12,
                    ..bert()
                },
                &Attending::ALL,
                "multiple of 8",
            ),
            (
                Attention {
                    dtype: DType::F32,
                    ..bert()
                },
                &[Attending::Flash, Attending::Cudnn],
                "not f32",
            ),
        ];
        for (attention, refused, why) in wrong {
            for by in Attending::ALL {
                let found = attention.obstacle(by);
                let told = found.as_ref().is_some_and(|text| text.contains(why));
                assert_eq!(told, refused.contains(&by), "{by}: {found:?}");
            }
        }
        let wide = Attention {
            width: 192,
            values: 192,
            ..bert()
        };
        assert_eq!(wide.obstacle(Attending::Flash), None);
        assert!(
            wide.obstacle(Attending::Cudnn)
                .is_some_and(|t| t.contains("up to 128"))
        );
    }
}
