//! `shorthaul info`: what is in a model, also in one that cannot be imported.

use crate::units::{bytes, count, table};
use anyhow::Result;
use compiler::graph::Graph;
use compiler::importer::onnx::{Declared, File, Model, OnnxError, Options};
use serde_json::json;
use std::fmt::Write;
use std::path::Path;

/// The text or JSON to print.
///
/// # Errors
/// The file cannot be read.
pub fn run(path: &Path, options: &Options, as_json: bool) -> Result<String> {
    let file = File::read(path)?;
    let facts = Facts::of(&file, options);
    Ok(if as_json { facts.json() } else { facts.text() })
}

/// What is said about a model.
struct Facts<'f> {
    file: &'f File,
    /// The imported model, or the sentence that says why there is none.
    model: Result<Model, OnnxError>,
    inputs: Vec<Declared>,
    outputs: Vec<Declared>,
    operators: Vec<(String, usize)>,
}

impl<'f> Facts<'f> {
    fn of(file: &'f File, options: &Options) -> Self {
        let model = file.import(options);
        let ports = model.as_ref().ok().map(|m| {
            let typed = |ports: &[compiler::importer::onnx::Port]| {
                ports.iter().map(|p| port(&m.graph, p)).collect()
            };
            (typed(&m.inputs), typed(&m.outputs))
        });
        let (inputs, outputs) = ports.unwrap_or_else(|| (file.inputs(), file.outputs()));
        Facts {
            file,
            model,
            inputs,
            outputs,
            operators: file.operators(),
        }
    }

    fn text(&self) -> String {
        let file = self.file;
        let mut text = format!(
            "{}: {}, ONNX operators version {}",
            file.path().display(),
            bytes(file.n_bytes() as i64),
            file.opset()
        );
        if !file.producer().is_empty() {
            let _ = write!(text, ", written by {}", file.producer());
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
            let stored = file.initializers();
            let elements = count(stored.n_elements as f64);
            let _ = writeln!(text, "initializers: {} with {elements} elements", stored.n);
        }
        let n: usize = self.operators.iter().map(|(_, n)| n).sum();
        let _ = writeln!(
            text,
            "operators: {n} nodes of {} kinds",
            self.operators.len()
        );
        let row = |(name, n): &(String, usize)| vec![name.clone(), n.to_string(), String::new()];
        text.push_str(&table(&self.operators.iter().map(row).collect::<Vec<_>>()));
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
        let operators: serde_json::Map<_, _> = self
            .operators
            .iter()
            .map(|(name, n)| (name.clone(), json!(n)))
            .collect();
        let mut value = json!({
            "path": self.file.path().display().to_string(),
            "bytes": self.file.n_bytes(),
            "opset": self.file.opset(),
            "producer": self.file.producer(),
            "inputs": ports(&self.inputs),
            "outputs": ports(&self.outputs),
            "operators": operators,
        });
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
fn port(graph: &Graph, port: &compiler::importer::onnx::Port) -> Declared {
    let container = graph.container(port.container);
    Declared {
        name: port.name.clone(),
        dtype: container.dtype.to_string(),
        shape: Some(container.shape.iter().map(ToString::to_string).collect()),
    }
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
