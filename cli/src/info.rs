//! `shorthaul info`: what is in an ONNX file, whatever its operators.

use crate::progress::Progress;
use crate::units::{bytes, count, table};
use anyhow::Result;
use compiler::graph::{Bindings, SymExpr, Symbol};
use compiler::importer::onnx::{Declared, File, Model, OnnxError, Options};
use compiler::training_input::import_to_train;
use onnx::cost::{Cost, cost};
use onnx::diff::histogram;
use onnx::operators::Unknowns;
use onnx::proto::ValueInfoProto;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// The text or JSON to print.
///
/// # Errors
/// The file cannot be read, or has no size of a name that is given.
pub fn run(
    path: &Path,
    options: &Options,
    as_json: bool,
    mut progress: Progress,
) -> Result<String> {
    progress.stage("reading");
    let bytes = onnx::file::read_whole(path)?;
    let file = onnx::file::Model::of_bytes(path, bytes.clone())?;
    let facts = Facts::of(&file, File::decode(path, bytes), options);
    if let Err(OnnxError::Model { problems, .. }) = &facts.model
        && let Some(unknown) = problems.iter().find(|p| p.place.starts_with("size `"))
    {
        anyhow::bail!("{}: {}: {}", path.display(), unknown.place, unknown.message);
    }
    Ok(if as_json { facts.json() } else { facts.text() })
}

/// The facts that the command prints about a model.
struct Facts<'f> {
    file: &'f onnx::file::Model,
    /// The imported model, or the sentence that says why there is none.
    model: Result<Model, OnnxError>,
    inputs: Vec<Declared>,
    outputs: Vec<Declared>,
    operators: BTreeMap<String, usize>,
    /// The cost at the declared and given sizes; `None` if a size is symbolic and not given.
    cost: Option<Cost>,
}

impl<'f> Facts<'f> {
    /// `decoded` is the same file as the importer has it.
    fn of(
        file: &'f onnx::file::Model,
        decoded: Result<File, OnnxError>,
        options: &Options,
    ) -> Self {
        let model = decoded.and_then(|decoded| import_to_train(decoded, file, options));
        let ports = model.as_ref().ok().map(|m| {
            let typed = |ports: &[compiler::importer::onnx::Port]| -> Vec<Declared> {
                ports.iter().map(|p| port(m, p)).collect()
            };
            (typed(&m.inputs), typed(&m.outputs))
        });
        let declared = || {
            let graph = file.proto.graph.clone().unwrap_or_default();
            let stored = |i: &&ValueInfoProto| graph.initializer.iter().any(|t| t.name == i.name);
            let inputs = graph.input.iter().filter(|i| !stored(i));
            (
                inputs.map(|i| declared(i, options)).collect(),
                graph.output.iter().map(|o| declared(o, options)).collect(),
            )
        };
        let (inputs, outputs) = ports.unwrap_or_else(declared);
        let cost = counted(file, &inputs);
        Facts {
            file,
            model,
            inputs,
            outputs,
            operators: histogram(&file.proto),
            cost,
        }
    }

    /// The standard's operator-set version, then those of other domains.
    fn versions(&self) -> (i64, Vec<String>) {
        let is_standard = |domain: &str| matches!(domain, "" | "ai.onnx");
        let imports = &self.file.proto.opset_import;
        let standard = imports.iter().find(|o| is_standard(&o.domain));
        let others = imports.iter().filter(|o| !is_standard(&o.domain));
        let other = |o: &onnx::proto::OperatorSetIdProto| format!("{} {}", o.domain, o.version);
        (
            standard.map_or(1, |o| o.version),
            others.map(other).collect(),
        )
    }

    fn producer(&self) -> String {
        let proto = &self.file.proto;
        let producer = format!("{} {}", proto.producer_name, proto.producer_version);
        producer.trim().to_string()
    }

    /// Number and elements of the initializers.
    fn stored(&self) -> (usize, u64) {
        let tensors = self.file.proto.graph.iter().flat_map(|g| &g.initializer);
        let elements = |dims: &[i64]| {
            let sizes = dims.iter().map(|n| (*n).max(0) as u64);
            sizes.fold(1u64, u64::saturating_mul)
        };
        tensors.fold((0, 0), |(n, sum), t| {
            (n + 1, elements(&t.dims).saturating_add(sum))
        })
    }

    fn text(&self) -> String {
        let file = self.file;
        let (opset, others) = self.versions();
        let mut text = format!(
            "{}: {}, ONNX operators version {opset}",
            file.path.display(),
            bytes(file.n_bytes as i64),
        );
        for other in others {
            let _ = write!(text, ", {other}");
        }
        if !self.producer().is_empty() {
            let _ = write!(text, ", written by {}", self.producer());
        }
        text.push('\n');
        for (title, ports) in [("inputs", &self.inputs), ("outputs", &self.outputs)] {
            let _ = writeln!(text, "{title}");
            text.push_str(&table(&ports.iter().map(port_row).collect::<Vec<_>>()));
        }
        if let Ok(model) = &self.model {
            text.push_str(&sizes(model));
            text.push_str(&parameters(model));
        } else {
            let (n, elements) = self.stored();
            let elements = count(elements as f64);
            let _ = writeln!(text, "initializers: {n} with {elements} elements");
        }
        let n: usize = self.operators.values().sum();
        let functions = match file.proto.functions.len() {
            0 => String::new(),
            n => format!(", with those of {n} functions"),
        };
        let _ = writeln!(
            text,
            "operators: {n} nodes of {} kinds{functions}",
            self.operators.len()
        );
        let row = |(name, n): (&String, &usize)| vec![name.clone(), n.to_string(), String::new()];
        text.push_str(&table(&self.operators.iter().map(row).collect::<Vec<_>>()));
        if let Some(cost) = &self.cost {
            text.push_str(&costs(cost));
        }
        match &self.model {
            Ok(model) => {
                let nodes = model.graph.single_state().map_or(0, |s| s.nodes.len());
                let _ = writeln!(text, "imported: {nodes} library nodes");
            }
            Err(error) => {
                let _ = writeln!(text, "not imported: {error}");
            }
        }
        text
    }

    fn json(&self) -> String {
        let ports = |list: &[Declared]| -> Vec<_> {
            let one = |d: &Declared| json!({"name": d.name, "dtype": d.dtype, "shape": d.shape});
            list.iter().map(one).collect()
        };
        let mut value = json!({
            "path": self.file.path.display().to_string(),
            "bytes": self.file.n_bytes,
            "opset": self.versions().0,
            "domains": self.versions().1,
            "ir_version": self.file.proto.ir_version,
            "producer": self.producer(),
            "functions": self.file.proto.functions.len(),
            "initializers": self.stored().0,
            "inputs": ports(&self.inputs),
            "outputs": ports(&self.outputs),
            "operators": self.operators,
        });
        if let Some(cost) = &self.cost {
            value["cost"] = json!({
                "multiply_adds": cost.multiply_adds,
                "bytes_moved": cost.bytes_moved,
                "bytes_least": cost.bytes_least,
                "peak_bytes": cost.peak_bytes,
                "nodes_without_sizes": cost.n_unknown,
            });
        }
        match &self.model {
            Ok(model) => {
                let names: Vec<_> = model.sizes.iter().map(|(name, _)| name).collect();
                let parameter = |p: &compiler::importer::onnx::Parameter| {
                    json!({
                        "name": p.name,
                        "dtype": p.stored.dtype().to_string(),
                        "shape": p.stored.shape(),
                        "trainable": p.trainable,
                    })
                };
                value["sizes"] = json!(names);
                value["parameters"] = model.parameters.iter().map(parameter).collect();
                value["library_nodes"] = json!(model.graph.single_state().map(|s| s.nodes.len()));
            }
            Err(OnnxError::Model {
                unsupported,
                problems,
                ..
            }) => {
                let entry = |u: &compiler::importer::onnx::UnsupportedOperator| json!({"operator": u.operator, "nodes": u.nodes});
                value["unsupported"] = unsupported.iter().map(entry).collect();
                let problem = |p: &compiler::importer::onnx::Problem| json!({"place": p.place, "message": p.message});
                value["problems"] = problems.iter().map(problem).collect();
            }
            Err(error) => value["problems"] = json!([{"message": error.to_string()}]),
        }
        format!("{value:#}\n")
    }
}

/// A port of the imported graph, with sizes as the graph has them.
fn port(model: &Model, port: &compiler::importer::onnx::Port) -> Declared {
    let container = model.graph.container(port.container);
    // Sizes by the names that `--bind` takes.
    let named = |symbol: &Symbol| {
        let mut sizes = model.sizes.iter();
        let (name, _) = sizes.find(|(_, own)| own == symbol)?;
        Some(SymExpr::symbol(Symbol::new(name)))
    };
    let sizes = container.shape.iter().map(|n| n.substitute(&named));
    Declared {
        name: port.name.clone(),
        dtype: container.dtype.to_string(),
        shape: Some(sizes.map(|n| n.to_string()).collect()),
    }
}

/// What the file says of an input or output, with the given values of dynamic sizes.
fn declared(info: &ValueInfoProto, options: &Options) -> Declared {
    let fact = onnx::infer::declared(info, &Unknowns::default());
    let sizes = options.sizes.iter();
    let bound: Bindings = sizes.map(|(name, n)| (Symbol::new(name), *n)).collect();
    let size = |n: &SymExpr| match n.eval(&bound) {
        Ok(n) => n.to_string(),
        Err(_) if onnx::infer::is_unknown(n) => "?".to_string(),
        Err(_) => n.to_string(),
    };
    Declared {
        name: info.name.clone(),
        dtype: fact.element.map_or("?".to_string(), short),
        shape: fact.shape.map(|shape| shape.iter().map(size).collect()),
    }
}

/// `f32`, as our graphs call it.
fn short(element: onnx::element::Element) -> String {
    format!("{element:?}").to_lowercase()
}

/// The cost, if every input has numbers for sizes.
fn counted(file: &onnx::file::Model, inputs: &[Declared]) -> Option<Cost> {
    let shape = |d: &Declared| -> Option<Vec<usize>> {
        let sizes = d.shape.as_ref()?.iter().map(|n| n.parse().ok());
        sizes.collect()
    };
    let shapes: Option<BTreeMap<String, Vec<usize>>> = inputs
        .iter()
        .map(|d| Some((d.name.clone(), shape(d)?)))
        .collect();
    Some(cost(&file.proto, &file.folder, &shapes?))
}

fn costs(cost: &Cost) -> String {
    let size = |n: u64| bytes(n as i64);
    let mut text = format!(
        "cost: {} multiply-adds, {} moved without fusion (least possible: {}), peak memory of activations {}",
        count(cost.multiply_adds as f64),
        size(cost.bytes_moved),
        size(cost.bytes_least),
        size(cost.peak_bytes)
    );
    if cost.n_unknown > 0 {
        let _ = write!(
            text,
            ", without {} nodes whose sizes are not known",
            cost.n_unknown
        );
    }
    text.push('\n');
    text
}

fn port_row(port: &Declared) -> Vec<String> {
    let shape = match &port.shape {
        Some(shape) => format!("[{}]", shape.join(", ")),
        None => "of unknown rank".to_string(),
    };
    vec![port.name.clone(), port.dtype.clone(), shape]
}

fn sizes(model: &Model) -> String {
    let names: Vec<_> = model.sizes.iter().map(|(name, _)| name.as_str()).collect();
    match names.as_slice() {
        [] => String::new(),
        names => format!("dynamic sizes: {}\n", names.join(", ")),
    }
}

fn parameters(model: &Model) -> String {
    let elements = |trainable: bool| -> usize {
        let some = model
            .parameters
            .iter()
            .filter(|p| p.trainable || !trainable);
        some.map(|p| p.stored.n_elements()).sum()
    };
    let size =
        |p: &compiler::importer::onnx::Parameter| p.stored.n_elements() * p.stored.dtype().bytes();
    let total: usize = model.parameters.iter().map(size).sum();
    format!(
        "parameters: {} with {} elements ({}), {} of them trainable\n",
        model.parameters.len(),
        count(elements(false) as f64),
        bytes(total as i64),
        count(elements(true) as f64)
    )
}
