//! Which stored tensors of a file a training step changes (its parameters), and which it leaves alone.
//!
//! A mark of PyTorch's exporter decides if there is one. Else what reads a tensor decides, then what it holds, then its
//! name. Owns this rule, which `docs/src/onnx.md` tells users; runs nothing.

mod content;
mod uses;

use crate::element::Element;
use crate::file::Model;
use crate::proto::{GraphProto, StringStringEntryProto, TensorProto};
use crate::stored;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use uses::{Role, Uses};

/// Why training leaves a stored tensor as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NotTrained {
    /// Mean or variance of batch normalization, which the forward pass updates.
    Statistic,
    /// Batch normalization updates it, and other operators read it too: equal arrays that an exporter stored as one.
    AlsoStatistic,
    /// Operators read it only as a limit, a scale, or something else that is never a parameter.
    Setting,
    /// It is multiplied with positions, and only sines and cosines read the products.
    Frequency,
    /// Its columns are sines and cosines of positions.
    Sinusoid,
    /// It holds −∞ or a number that stands for it, or it is a triangle of ones.
    Mask,
    /// The exporter marked it as a buffer or as a constant.
    Buffer,
    /// Its name is one that exporters give to constants, and no layer reads it as a weight.
    Constant,
    /// Its name is one that buffers have.
    Name,
    /// A single number without a dimension, which no exporter marked.
    Number,
    /// The loss does not depend on it.
    NoInfluence,
}

impl NotTrained {
    /// Whether it may be a parameter all the same: neither the exporter's mark nor the operators that read it decide.
    pub fn is_guess(self) -> bool {
        use NotTrained::{AlsoStatistic, Constant, Frequency, Mask, Name, Number, Sinusoid};
        matches!(
            self,
            AlsoStatistic | Frequency | Sinusoid | Mask | Constant | Name | Number
        )
    }
}

impl fmt::Display for NotTrained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotTrained::Statistic => "running statistics of batch normalization",
            NotTrained::AlsoStatistic => {
                "read as running statistics of batch normalization, and as something else too"
            }
            NotTrained::Setting => "read only as a setting, such as a limit or a scale",
            NotTrained::Frequency => "frequencies of a position embedding",
            NotTrained::Sinusoid => "a table of sines and cosines",
            NotTrained::Mask => "a mask",
            NotTrained::Buffer => "marked as a buffer by the exporter",
            NotTrained::Constant => "named as exporters name constants",
            NotTrained::Name => "named as buffers are",
            NotTrained::Number => "a single number that no exporter marked as a parameter",
            NotTrained::NoInfluence => "without influence on the loss",
        })
    }
}

/// A parameter that several nodes read: tied layers, or equal parameters that an exporter stored as one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shared {
    /// Its name.
    pub name: String,
    /// The nodes.
    pub readers: Vec<String>,
}

/// What is known of the real numbers that a file stores, as initializers or as `Constant` nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Tensors that are not parameters, and why.
    pub left_out: BTreeMap<String, NotTrained>,
    /// Tensors that the exporter marked as parameters.
    pub marked: BTreeSet<String>,
    /// Parameters that batch normalization reads as running statistics, too.
    pub also_statistics: BTreeSet<String>,
    /// Parameters that several nodes read, in the file's order.
    pub shared: Vec<Shared>,
}

/// The key under which PyTorch's exporter says what a value was in the exported program.
const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";

/// Applies the rule to every stored tensor of real numbers. Linear in the file's size, and in the elements of tensors
/// that are looked into.
pub fn parameters(model: &Model) -> Parameters {
    let mut found = Parameters::default();
    let Some(graph) = &model.proto.graph else {
        return found;
    };
    let uses = Uses::new(graph);
    let marks = marks(graph);
    for (name, tensor) in uses::stored(graph) {
        if !Element::of_number(tensor.data_type).is_some_and(Element::is_float) {
            continue;
        }
        let mark = marks.get(name).copied();
        if mark == Some("PARAMETER") {
            found.marked.insert(name.to_string());
        } else if let Some(why) = why_not(name, tensor, mark, &uses, model) {
            found.left_out.insert(name.to_string(), why);
            continue;
        }
        if uses.roles(name).contains(&Role::Statistic) {
            found.also_statistics.insert(name.to_string());
        }
        let readers = uses.readers_as_weight(name);
        if readers.len() > 1 {
            let name = name.to_string();
            found.shared.push(Shared { name, readers });
        }
    }
    found
}

fn why_not<'m>(
    name: &'m str,
    tensor: &TensorProto,
    mark: Option<&str>,
    uses: &Uses<'m>,
    model: &Model,
) -> Option<NotTrained> {
    let roles = uses.roles(name);
    let only = |role: Role| !roles.is_empty() && roles.iter().all(|r| *r == role);
    if only(Role::Statistic) {
        return Some(NotTrained::Statistic);
    }
    if matches!(mark, Some("BUFFER" | "CONSTANT_TENSOR")) {
        return Some(NotTrained::Buffer);
    }
    if !roles.is_empty() && !roles.iter().any(|r| r.may_be_parameter()) {
        return Some(NotTrained::Setting);
    }
    if uses.is_frequency(name) {
        return Some(NotTrained::Frequency);
    }
    if content::is_looked_into(tensor)
        && let Ok(tensor) = stored::decode(tensor, &model.folder)
        && let Some(values) = tensor.to_f64()
    {
        if content::is_sinusoidal(&tensor.shape, &values) {
            return Some(NotTrained::Sinusoid);
        }
        if content::is_mask(&tensor.shape, &values) {
            return Some(NotTrained::Mask);
        }
    }
    if is_buffer_name(name) {
        return Some(NotTrained::Name);
    }
    let is_weight = roles.contains(&Role::Weight);
    if !is_weight && is_made_up(name, uses::n_elements(tensor)) {
        return Some(NotTrained::Constant);
    }
    // Nothing needs to be said of `Constant` nodes without a dimension: they are never trained.
    (tensor.dims.is_empty() && !uses.is_made(name)).then_some(NotTrained::Number)
}

/// The exporter's marks by name.
fn marks(graph: &GraphProto) -> BTreeMap<&str, &str> {
    fn kind(entries: &[StringStringEntryProto]) -> Option<&str> {
        let entry = entries.iter().find(|e| e.key == KIND)?;
        // Some versions write the name of the enumeration before it.
        entry.value.rsplit('.').next()
    }
    let of_values = graph.value_info.iter().chain(&graph.input);
    let of_values = of_values.map(|v| (v.name.as_str(), kind(&v.metadata_props)));
    let of_tensors = graph.initializer.iter();
    let of_tensors = of_tensors.map(|t| (t.name.as_str(), kind(&t.metadata_props)));
    let all = of_values.chain(of_tensors);
    all.filter_map(|(name, kind)| Some((name, kind?))).collect()
}

/// Last parts of names that modules give to buffers, never to parameters.
const BUFFERS: [&str; 19] = [
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "inv_freq",
    "original_inv_freq",
    "freqs_cis",
    "cos_cached",
    "sin_cached",
    "position_ids",
    "token_type_ids",
    "relative_position_index",
    "relative_coords_table",
    "attn_mask",
    "attention_mask",
    "causal_mask",
    "masked_bias",
    "pixel_mean",
    "pixel_std",
    "alibi",
];

fn is_buffer_name(name: &str) -> bool {
    let last = name.rsplit(['.', '/']).next().unwrap_or(name);
    BUFFERS.contains(&last)
}

/// Whether a name is one that exporters make up: `onnx::Mul_12`, `/layer/Constant_output_0`, `val_3`. Old exporters
/// give parameters plain numbers as names, so that these say something of single elements only.
fn is_made_up(name: &str, n_elements: i64) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let last = name.rsplit('/').next().unwrap_or(name);
    let starts = [
        "onnx::",
        "Constant",
        "Const",
        "const_fold_opt",
        "scalar_tensor",
    ];
    let counted = name.strip_prefix('_').unwrap_or(name).strip_prefix("val_");
    starts.iter().any(|start| last.starts_with(start))
        || counted.is_some_and(is_number)
        || n_elements == 1 && is_number(name)
}

#[cfg(test)]
mod tests;
