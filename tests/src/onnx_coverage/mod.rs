//! The standard's own cases through everything that Shorthaul makes of an operator: evaluated as a file, rewritten,
//! imported, interpreted as a graph, compiled to C, differentiated.
//!
//! Owns how one case is run and judged; the table is in `page.rs`. A case is a folder with `model.onnx`, `input_N.pb`
//! and `output_N.pb` (`onnx/tests/dump_node_cases.py`). Making a graph needs everything that an operator's sizes depend
//! on, so a case that is not imported otherwise gets its inputs that decide sizes as constants.

mod expected;
mod page;
mod run;

pub use page::page;

use compiler::Step;
use compiler::internal_error::caught_deep;
use expected::{Draw, Output, compare};
use graph::{Bindings, DType, Precision, Tensor};
use importer::onnx::{File, Model, Options};
use onnx::evaluate::Program;
use onnx::optimize;
use onnx::proto::{ModelProto, TensorProto};
use prost::Message;
use std::path::Path;

/// How far a case came: `Ok`, or the sentence that says why not.
pub type Verdict = Result<(), String>;

/// What was found of a case.
#[derive(Clone, Debug)]
pub struct Found {
    /// The case's name.
    pub case: String,
    /// Its operator; `None` if it has several.
    pub operator: Option<String>,
    /// Version of the standard's operators.
    pub opset: i64,
    /// Whether every input and output has an element type that our graphs have.
    pub has_our_types: bool,
    /// Outputs of the file's evaluation are the expected ones.
    pub evaluated: Verdict,
    /// The file is optimized and verified.
    pub rewritten: Verdict,
    /// The rules that changed it.
    pub rules: Vec<String>,
    /// A graph is made of it.
    pub imported: Verdict,
    /// The imported graph, interpreted, gives the expected outputs.
    pub interpreted: Verdict,
    /// The C made of it does; absent if nobody asked.
    pub compiled: Option<Verdict>,
    /// A backward pass is made, of a case with inputs of floats.
    pub differentiated: Option<Verdict>,
}

/// Which inputs become constants, by position and value.
type Selection<'a> = &'a dyn Fn(usize, &TensorProto) -> bool;

/// A case, read.
pub struct Case {
    /// The model.
    pub model: ModelProto,
    /// Its inputs, in order.
    pub inputs: Vec<TensorProto>,
    /// Its expected outputs, in order.
    pub outputs: Vec<TensorProto>,
}

impl Case {
    fn read(folder: &Path) -> Result<Case, String> {
        let read = |name: &str| std::fs::read(folder.join(name)).map_err(|e| e.to_string());
        let model = ModelProto::decode(&*read("model.onnx")?).map_err(|e| e.to_string())?;
        let tensors = |kind: &str| -> Result<Vec<TensorProto>, String> {
            let mut found = Vec::new();
            while let Ok(bytes) = read(&format!("{kind}_{}.pb", found.len())) {
                found.push(TensorProto::decode(&*bytes).map_err(|e| e.to_string())?);
            }
            Ok(found)
        };
        Ok(Case {
            model,
            inputs: tensors("input")?,
            outputs: tensors("output")?,
        })
    }

    /// Whether outputs are the expected ones.
    fn expects(&self, outputs: &[Output]) -> Verdict {
        for ((found, shape), expected) in outputs.iter().zip(&self.outputs) {
            compare((found, shape), expected)?;
        }
        Ok(())
    }

    /// The same with those inputs as initializers.
    fn with_constants(&self, is_constant: Selection<'_>) -> Case {
        let mut model = self.model.clone();
        let mut inputs = Vec::new();
        let Some(graph) = &mut model.graph else {
            return self.read_again();
        };
        let names: Vec<String> = graph.input.iter().map(|i| i.name.clone()).collect();
        for (n, (name, tensor)) in names.iter().zip(&self.inputs).enumerate() {
            match is_constant(n, tensor) {
                false => inputs.push(tensor.clone()),
                true => {
                    graph.input.retain(|i| i.name != *name);
                    graph.initializer.push(TensorProto {
                        name: name.clone(),
                        ..tensor.clone()
                    });
                }
            }
        }
        Case {
            model,
            inputs,
            outputs: self.outputs.clone(),
        }
    }

    fn read_again(&self) -> Case {
        Case {
            model: self.model.clone(),
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
        }
    }

    /// The same with the sizes of its inputs fixed.
    fn with_sizes(&self) -> Option<Case> {
        let graph = self.model.graph.as_ref()?;
        let sizes = |t: &TensorProto| t.dims.iter().copied().map(Some).collect();
        let shapes = graph.input.iter().zip(&self.inputs);
        let shapes = shapes
            .map(|(port, t)| (port.name.clone(), sizes(t)))
            .collect();
        Some(Case {
            model: onnx::set_shape::set_shapes(&self.model, &shapes).ok()?,
            ..self.read_again()
        })
    }

    /// The graph.
    ///
    /// # Errors
    /// It is refused.
    pub fn imported(&self) -> Result<Model, String> {
        let bytes = bytes::Bytes::from(self.model.encode_to_vec());
        let file = File::decode("case.onnx", bytes).map_err(|e| e.to_string())?;
        file.import(&Options::default()).map_err(|e| e.to_string())
    }

    /// The graph, of the case as it is or with inputs as constants, and that case.
    fn graph(&self) -> Result<(Model, Case), String> {
        let first = match self.imported() {
            Ok(model) => return Ok((model, self.read_again())),
            Err(error) => error,
        };
        let is_whole = |t: &TensorProto| !matches!(t.data_type, 1 | 10 | 11 | 16);
        let integers = |n: usize, t: &TensorProto| n > 0 && is_whole(t);
        let others = |n: usize, _: &TensorProto| n > 0;
        let every_integer = |_: usize, t: &TensorProto| is_whole(t);
        let every_number = |_: usize, t: &TensorProto| t.dims.is_empty();
        let kinds: [Selection<'_>; 4] = [&integers, &others, &every_integer, &every_number];
        // An exporter may leave sizes symbolic that depend only on the inputs' sizes: fixed inputs make them known.
        for case in [Some(self.read_again()), self.with_sizes()]
            .into_iter()
            .flatten()
        {
            for kind in kinds {
                let case = case.with_constants(kind);
                if let Ok(model) = case.imported() {
                    return Ok((model, case));
                }
            }
        }
        Err(first)
    }
}

/// Runs a case through everything; C only where `compiles`. `None` if the folder holds no case.
pub fn look_at(folder: &Path, compiles: bool) -> Option<Found> {
    let case = Case::read(folder).ok()?;
    let graph = case.model.graph.as_ref()?;
    let operator = match graph.node.as_slice() {
        [node] => Some(onnx::evaluate::qualified(node)),
        _ => None,
    };
    let sets = case.model.opset_import.iter();
    let opset = sets.filter(|s| s.domain.is_empty()).map(|s| s.version);
    let opset = opset.max().unwrap_or(1);
    let tensors = case.inputs.iter().chain(&case.outputs);
    let has_our_types = tensors.clone().all(|t| dtype(t).is_some());
    let imported = guarded(|| case.graph());
    let rewritten = guarded(|| rewritten(&case));
    let mut found = Found {
        case: folder.file_name()?.to_string_lossy().into_owned(),
        operator,
        opset,
        has_our_types,
        evaluated: guarded(|| evaluated(&case)),
        rules: rewritten.clone().unwrap_or_default(),
        rewritten: rewritten.map(drop),
        imported: imported.as_ref().map(|_| ()).map_err(String::clone),
        interpreted: Err("not imported".to_string()),
        compiled: compiles.then(|| Err("not imported".to_string())),
        differentiated: None,
    };
    if let Ok((model, given)) = imported {
        let draw = draws(&model, &given).then(|| Draw::new(&case));
        let draw = draw.transpose();
        let judged = |outputs: &[Output]| match &draw {
            Ok(Some(draw)) => draw.allows(outputs, &given.outputs),
            Ok(None) => given.expects(outputs),
            Err(what) => Err(what.clone()),
        };
        found.interpreted = guarded(|| judged(&interpreted(&model, &given)?));
        found.compiled = compiles.then(|| guarded(|| judged(&run::compiled(&model, &given)?)));
        found.differentiated = differentiated(&model);
    }
    Some(found)
}

/// A panic is a sentence too.
fn guarded<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    caught_deep(work).unwrap_or_else(|error| Err(format!("PANIC: {error}")))
}

/// The type that graphs have for a tensor's elements.
fn dtype(tensor: &TensorProto) -> Option<DType> {
    importer::onnx::dtype_of(tensor.data_type).ok()
}

/// Whether the C of the case, its inputs as they are, gives the expected outputs.
///
/// # Errors
/// It is refused, or they differ.
pub fn compiled(case: &Case) -> Verdict {
    guarded(|| case.expects(&run::compiled(&case.imported()?, case)?))
}

/// Whether the evaluated file gives the expected outputs.
///
/// # Errors
/// It cannot be evaluated, or they differ.
pub fn evaluated(case: &Case) -> Verdict {
    let folder = Path::new(".");
    let program = Program::new(&case.model, folder, onnx::evaluate::Precision::AsStored);
    let program = program.ok_or("no graph")?;
    let graph = case.model.graph.as_ref().ok_or("no graph")?;
    let mut feeds = onnx::evaluate::Values::new();
    for (input, tensor) in graph.input.iter().zip(&case.inputs) {
        let tensor = onnx::tensor::Tensor::of_proto(tensor)?;
        feeds.insert(input.name.clone(), tensor);
    }
    let outputs = program.outputs(&feeds).map_err(|e| e.to_string())?;
    for (found, expected) in outputs.iter().zip(&case.outputs) {
        match found.to_f64() {
            Some(values) if dtype(expected).is_some() => {
                compare((&values, &found.shape), expected)?;
            }
            // Text, complex and packed numbers are compared in `onnx/tests/node_cases.rs`.
            _ => {}
        }
    }
    Ok(())
}

/// The rules that fire, if the file is optimized and verified.
fn rewritten(case: &Case) -> Result<Vec<String>, String> {
    let bytes = bytes::Bytes::from(case.model.encode_to_vec());
    let model = onnx::file::Model::of_bytes(Path::new("case.onnx"), bytes);
    let model = model.map_err(|e| e.to_string())?;
    let options = optimize::Options {
        rewriting: onnx::rewrite::Options::default(),
        verifying: Some(onnx::verify::Options::default()),
    };
    let done = optimize::optimize(&model, &options, &mut |_| ());
    let fired = done.map_err(|e| e.to_string())?.summary.fired;
    Ok(fired.into_iter().map(|fired| fired.rule).collect())
}

/// The input that graphs have for the seed of random numbers, and a seed.
const SEED: (&str, i64) = ("seed", 7);

/// Whether a graph draws at random, which the case does not have an input for.
fn draws(model: &Model, case: &Case) -> bool {
    let in_file = |name: &str| {
        let mut ports = case.model.graph.iter().flat_map(|g| &g.input);
        ports.any(|port| port.name == name)
    };
    let mut ports = model.inputs.iter();
    ports.any(|port| port.name == SEED.0 && !in_file(SEED.0))
}

/// What a graph is given: the case's inputs, then its parameters.
fn given(model: &Model, case: &Case) -> Result<Vec<Tensor>, String> {
    let graph = case.model.graph.as_ref().ok_or("no graph")?;
    let mut tensors = Vec::new();
    let draws = draws(model, case);
    for port in &model.inputs {
        if draws && port.name == SEED.0 {
            tensors.push(Tensor::from_i64(DType::I64, &[], vec![SEED.1]));
            continue;
        }
        let at = graph.input.iter().position(|i| i.name == port.name);
        let tensor = at.and_then(|at| case.inputs.get(at));
        let tensor = tensor.ok_or_else(|| format!("no input `{}`", port.name))?;
        let bytes = bytes::Bytes::from(tensor.encode_to_vec());
        tensors.push(importer::onnx::decode_tensor(bytes)?);
    }
    for parameter in &model.parameters {
        tensors.push(parameter.stored.tensor().map_err(|e| e.to_string())?);
    }
    Ok(tensors)
}

fn interpreted(model: &Model, case: &Case) -> Result<Vec<Output>, String> {
    let tensors = given(model, case)?;
    // What a float is rounded to depends on every rounding before it.
    let is_whole = |t: &TensorProto| dtype(t).is_some_and(DType::is_int);
    let precision = match case.outputs.iter().any(is_whole) {
        true => Precision::Declared,
        false => Precision::Double,
    };
    let found = graph::interpret(
        &model.graph,
        &tensors,
        &Bindings::new(),
        &ops::Meaning,
        precision,
    );
    let found = found.map_err(|e| e.to_string())?;
    Ok(found.into_iter().map(|t| (t.to_f64(), t.shape)).collect())
}

fn differentiated(model: &Model) -> Option<Verdict> {
    let graph = &model.graph;
    let is_float = |at: &usize| graph.container(graph.inputs[*at]).dtype.is_float();
    let wrt: Vec<usize> = (0..graph.inputs.len()).filter(is_float).collect();
    let mut outputs = graph.outputs.iter();
    let has_floats = outputs.any(|o| graph.container(o.container).dtype.is_float());
    (!wrt.is_empty() && has_floats).then(|| {
        guarded(|| {
            let step = Step::training(graph, &wrt);
            step.map(drop).map_err(|e| e.to_string())
        })
    })
}
