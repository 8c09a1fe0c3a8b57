//! From a document to a graph: inputs, one rule for each call, outputs.

use super::document::{Document, InputDoc, InputKind, NodeDoc, OutputDoc, OutputKind, VERSION};
use super::error::{ImportError, Missing, RuleError};
use super::merged_divisions::are_equal;
use super::rules;
use super::site::{Random, Site, dtype_of, shape_of};
use graph::{
    Bindings, Builder, ContainerId, DType, Expr, Graph, Lifetime, Node, Origin, Output, Stage,
    SymExpr, Symbol, Tensor,
};
use ops::OpBuilder;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An imported graph.
#[derive(Debug)]
pub struct Imported {
    /// Inputs in the document's order without constants, then the seed if there is one.
    pub graph: Graph,
    /// The input that random numbers are made from, a scalar `i64`, if any are drawn.
    pub seed: Option<ContainerId>,
    /// Values of the symbolic sizes in the example that the graph was captured from.
    pub hints: Bindings,
}

/// The targets that [`import`] has a rule for, sorted.
pub fn supported_targets() -> Vec<&'static str> {
    rules::all().map(|(target, _)| target).collect()
}

/// Imports a captured document; `constants` are the bytes of its constants.
///
/// # Errors
/// Text that is no document of this version, documents that contradict themselves, and all
/// operators without a rule at once.
pub fn import(json: &str, constants: &[&[u8]]) -> Result<Imported, ImportError> {
    let document: Document = serde_json::from_str(json)?;
    if document.version != VERSION {
        return Err(ImportError::Version {
            found: document.version,
            expected: VERSION,
        });
    }
    let mut importer = Importer {
        graph: Graph::new("model"),
        values: BTreeMap::new(),
        inputs: BTreeMap::new(),
        nodes: Vec::new(),
        random: Random::default(),
        missing: BTreeMap::new(),
    };
    importer.graph.symbols = document
        .symbols
        .iter()
        .map(|s| Symbol::new(&s.name))
        .collect();
    for input in &document.inputs {
        importer.add_input(input, constants)?;
    }
    for node in &document.nodes {
        importer.add_node(node)?;
    }
    importer.finish(&document)
}

struct Importer {
    graph: Graph,
    /// Containers by the document's value names.
    values: BTreeMap<String, ContainerId>,
    /// Inputs by value name and by `state_dict` key.
    inputs: BTreeMap<String, ContainerId>,
    nodes: Vec<Node>,
    random: Random,
    missing: BTreeMap<String, Vec<String>>,
}

impl Importer {
    fn add_input(&mut self, input: &InputDoc, constants: &[&[u8]]) -> Result<(), ImportError> {
        let contradiction = |message: String| ImportError::Node {
            origin: format!("input `{}`", input.name),
            message,
        };
        let (dtype, shape) = type_of(&input.dtype, &input.shape).map_err(contradiction)?;
        let name = identifier(input.target.as_deref().unwrap_or(&input.name));
        let id = match input.kind {
            InputKind::Constant => {
                let bytes = input.constant.and_then(|i| constants.get(i));
                let value = bytes.and_then(|b| tensor_from_bytes(dtype, &shape, b));
                let value = value.ok_or_else(|| {
                    contradiction("the constant's bytes do not fit its shape".into())
                })?;
                self.graph.add_constant(&name, value)
            }
            InputKind::User => self.graph.add_input(&name, dtype, shape, Lifetime::Input),
            InputKind::Parameter | InputKind::Buffer => {
                self.graph
                    .add_input(&name, dtype, shape, Lifetime::Parameter)
            }
        };
        self.values.insert(input.name.clone(), id);
        self.inputs.insert(input.name.clone(), id);
        if let (InputKind::Buffer, Some(target)) = (input.kind, &input.target) {
            self.inputs.insert(target.clone(), id);
        }
        Ok(())
    }

    fn add_node(&mut self, node: &NodeDoc) -> Result<(), ImportError> {
        let origin = Arc::new(Origin {
            node: node.name.clone(),
            module: node.origin.module.clone(),
            source: node.origin.source.clone(),
        });
        let failed = |message: String| ImportError::Node {
            origin: origin.to_string(),
            message: format!("{}: {message}", node.target),
        };
        let mut site = Site {
            node,
            values: &self.values,
            random: &mut self.random,
            builder: Builder::new(&mut self.graph, origin.clone(), Stage::Forward),
        };
        let lowered = match rules::find(&node.target) {
            Some(rule) => rule(&mut site),
            None => Err(RuleError::Unsupported(String::new())),
        };
        let results = match lowered {
            Ok(results) => typed(&mut site, results).map_err(failed)?,
            Err(RuleError::Unsupported(case)) => {
                self.note_missing(node, &case);
                return self.add_placeholders(node, failed);
            }
            Err(RuleError::Op(ops::OpError::Unsupported { op, what })) => {
                self.note_missing(node, &format!("`{op}` with {what}"));
                return self.add_placeholders(node, failed);
            }
            Err(error) => return Err(failed(error.to_string())),
        };
        self.nodes.append(&mut site.builder.nodes);
        self.values.extend(results);
        Ok(())
    }

    fn note_missing(&mut self, node: &NodeDoc, case: &str) {
        let target = match case {
            "" => node.target.clone(),
            case => format!("{} ({case})", node.target),
        };
        let module = match node.origin.module.as_str() {
            "" => "the model itself",
            path => path,
        };
        self.missing
            .entry(target)
            .or_default()
            .push(format!("{module} ({})", node.origin.source));
    }

    /// Stand-ins for the results of a missing operator, so that the others are found too.
    fn add_placeholders(
        &mut self,
        node: &NodeDoc,
        failed: impl Fn(String) -> ImportError,
    ) -> Result<(), ImportError> {
        for value in node.outputs.iter().flatten() {
            let (dtype, shape) = match type_of(&value.dtype, &value.shape) {
                Ok(ty) => ty,
                Err(_) if dtype_of(&value.dtype).is_none() => {
                    (DType::F32, shape_of(&value.shape).unwrap_or_default())
                }
                Err(message) => return Err(failed(message)),
            };
            let id = self
                .graph
                .add_transient(&identifier(&value.name), dtype, shape);
            self.values.insert(value.name.clone(), id);
        }
        Ok(())
    }

    fn finish(mut self, document: &Document) -> Result<Imported, ImportError> {
        if !self.missing.is_empty() {
            let missing = std::mem::take(&mut self.missing);
            return Err(ImportError::Unsupported(
                missing
                    .into_iter()
                    .map(|(target, places)| Missing { target, places })
                    .collect(),
            ));
        }
        for output in &document.outputs {
            self.add_output(output)?;
        }
        self.graph.inputs.extend(self.random.seed);
        self.graph.last_state().nodes = self.nodes;
        let hint = |s: &super::document::SymbolDoc| (Symbol::new(&s.name), s.hint);
        Ok(Imported {
            graph: self.graph,
            seed: self.random.seed,
            hints: document.symbols.iter().map(hint).collect(),
        })
    }

    fn add_output(&mut self, output: &OutputDoc) -> Result<(), ImportError> {
        let failed = |message: String| ImportError::Node {
            origin: format!("output `{}`", output.value),
            message,
        };
        let found = self.values.get(&output.value).copied();
        let mut container = found.ok_or_else(|| failed("no operator makes it".into()))?;
        let taken = self.graph.outputs.iter().any(|o| o.container == container);
        if taken || self.graph.container(container).lifetime != Lifetime::Transient {
            container = self.copy_of(container).map_err(failed)?;
        }
        let updates = match output.kind {
            OutputKind::User => None,
            OutputKind::Buffer | OutputKind::UserInput => {
                let target = output
                    .target
                    .as_deref()
                    .and_then(|t| self.inputs.get(t))
                    .copied();
                Some(
                    target
                        .ok_or_else(|| failed("it updates an input that does not exist".into()))?,
                )
            }
        };
        self.graph.outputs.push(Output { container, updates });
        Ok(())
    }

    /// A copy, for results that are inputs, constants, or another result as well.
    fn copy_of(&mut self, id: ContainerId) -> Result<ContainerId, String> {
        let origin = Arc::new(Origin {
            node: "output".into(),
            ..Origin::default()
        });
        let mut builder = Builder::new(&mut self.graph, origin, Stage::Forward);
        let copy = builder
            .elementwise(Expr::In(0), &[id])
            .map_err(|e| e.to_string())?;
        self.nodes.append(&mut builder.nodes);
        Ok(copy)
    }
}

/// The results a rule gave, brought to the documented element types and checked against the
/// documented shapes.
fn typed(
    site: &mut Site,
    results: Vec<Option<ContainerId>>,
) -> Result<Vec<(String, ContainerId)>, String> {
    let mut found = Vec::new();
    for (value, id) in site.node.outputs.iter().zip(results) {
        let (Some(value), Some(id)) = (value, id) else {
            continue;
        };
        let (dtype, shape) = type_of(&value.dtype, &value.shape)?;
        let id = site.cast(id, dtype).map_err(|e| e.to_string())?;
        let made = site.builder.shape(id);
        if !are_equal(&made, &shape) {
            return Err(format!(
                "gives shape {}, PyTorch says {}",
                display(&made),
                display(&shape)
            ));
        }
        found.push((value.name.clone(), id));
    }
    Ok(found)
}

fn display(shape: &[SymExpr]) -> String {
    let sizes: Vec<_> = shape.iter().map(SymExpr::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

fn type_of(dtype: &str, shape: &[serde_json::Value]) -> Result<(DType, Vec<SymExpr>), String> {
    let known = dtype_of(dtype).ok_or_else(|| format!("element type {dtype} is not supported"))?;
    let shape = shape_of(shape).ok_or("its shape cannot be read")?;
    Ok((known, shape))
}

/// The name with what a container's name may not contain replaced.
fn identifier(name: &str) -> String {
    let ok = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let text: String = name.chars().map(|c| if ok(c) { c } else { '_' }).collect();
    match text.chars().next() {
        Some(c) if c.is_ascii_alphabetic() || c == '_' => text,
        _ => format!("_{text}"),
    }
}

fn tensor_from_bytes(dtype: DType, shape: &[SymExpr], bytes: &[u8]) -> Option<Tensor> {
    let shape: Option<Vec<usize>> = shape
        .iter()
        .map(|s| s.as_const().and_then(|n| usize::try_from(n).ok()))
        .collect();
    let shape = shape?;
    let n: usize = shape.iter().product();
    if bytes.len() != n * dtype.bytes() {
        return None;
    }
    let floats = |read: &dyn Fn(&[u8]) -> f64| {
        let data = bytes.chunks_exact(dtype.bytes()).map(read).collect();
        Tensor::from_f64(dtype, &shape, data)
    };
    let ints = |read: &dyn Fn(&[u8]) -> i64| {
        let data = bytes.chunks_exact(dtype.bytes()).map(read).collect();
        Tensor::from_i64(dtype, &shape, data)
    };
    Some(match dtype {
        DType::Bool | DType::U8 => ints(&|b| i64::from(b[0])),
        DType::I8 => ints(&|b| i64::from(b[0] as i8)),
        DType::I16 => ints(&|b| i64::from(i16::from_le_bytes([b[0], b[1]]))),
        DType::I32 => ints(&|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        DType::I64 => {
            ints(&|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
        }
        DType::F32 => floats(&|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        DType::F64 => {
            floats(&|b| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
        }
        DType::BF16 => floats(&|b| {
            f64::from(f32::from_bits(
                u32::from(u16::from_le_bytes([b[0], b[1]])) << 16,
            ))
        }),
        DType::F16 => floats(&|b| half_to_f64(u16::from_le_bytes([b[0], b[1]]))),
    })
}

/// The value of an IEEE half-precision number.
fn half_to_f64(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits >> 10 & 0x1f);
    let fraction = f64::from(bits & 0x3ff) / 1024.0;
    match exponent {
        0 => sign * fraction * 2f64.powi(-14),
        31 if fraction == 0.0 => sign * f64::INFINITY,
        31 => f64::NAN,
        e => sign * (1.0 + fraction) * 2f64.powi(e - 15),
    }
}
