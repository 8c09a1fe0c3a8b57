//! Reading a file: bytes to messages, with damage located and the operator set's version checked.
//!
//! This file never looks at operators.

use super::error::{NEWEST_OPSET, OLDEST_OPSET, OnnxError};
use super::names::unnamed_size;
use super::proto::{
    Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, StringStringEntryProto,
    TensorProto, ValueInfoProto,
};
use super::sparse;
use super::tensor::dtype_of;
use bytes::Bytes;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A decoded ONNX file.
#[derive(Clone, Debug)]
pub struct File {
    path: PathBuf,
    /// The folder in which external data is looked for.
    folder: PathBuf,
    n_bytes: usize,
    opset: i64,
    producer: String,
    about: About,
    /// Everything but the graph.
    around: ModelProto,
    pub(super) graph: GraphProto,
    /// Initializers without a dimension that are parameters all the same.
    scalar_parameters: BTreeSet<String>,
}

/// What a file says of itself, for files that are made of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct About {
    /// Documentation of the model.
    pub model_doc: String,
    /// Documentation of its graph.
    pub graph_doc: String,
    /// Metadata of the model.
    pub metadata: Vec<StringStringEntryProto>,
}

impl About {
    fn new(model: &ModelProto) -> About {
        let graph = model.graph.as_ref();
        About {
            model_doc: model.doc_string.clone(),
            graph_doc: graph.map(|g| g.doc_string.clone()).unwrap_or_default(),
            metadata: model.metadata_props.clone(),
        }
    }
}

impl File {
    /// Reads and decodes a file.
    ///
    /// # Errors
    /// It cannot be read, is not an ONNX file, is damaged, or uses another version of the operators.
    pub fn read(path: impl AsRef<Path>) -> Result<File, OnnxError> {
        let path = path.as_ref();
        File::of(path.to_path_buf(), onnx::file::read_whole(path)?)
    }

    /// Decodes the bytes of a file; `path` is for messages and to find external data beside it.
    ///
    /// # Errors
    /// As [`File::read`].
    pub fn decode(path: impl AsRef<Path>, bytes: Bytes) -> Result<File, OnnxError> {
        let path = path.as_ref().to_path_buf();
        File::of(path, bytes)
    }

    fn of(path: PathBuf, bytes: Bytes) -> Result<File, OnnxError> {
        let n_bytes = bytes.len();
        let model = onnx::file::decode(&path, bytes)?;
        // As ONNX Runtime does; a cycle is found when the nodes are imported.
        let mut model = onnx::check::sorted(model.clone()).unwrap_or(model);
        let folder = onnx::file::settle(&path, &mut model);
        let about = About::new(&model);
        let mut graph = model.graph.take().unwrap_or_default();
        graph.input.iter_mut().for_each(open_negative_sizes);
        sparse::write_out(&mut graph, &folder);
        let opset = standard_version(&model);
        if !(OLDEST_OPSET..=NEWEST_OPSET).contains(&opset) {
            return Err(OnnxError::OpsetVersion { path, found: opset });
        }
        let producer = format!("{} {}", model.producer_name, model.producer_version);
        Ok(File {
            path,
            folder,
            about,
            n_bytes,
            opset,
            producer: producer.trim().to_string(),
            around: model,
            graph,
            scalar_parameters: BTreeSet::new(),
        })
    }

    /// Where it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes, without external data.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Version of the standard's operator set.
    pub fn opset(&self) -> i64 {
        self.opset
    }

    /// Program that wrote it, with version; may be empty.
    pub fn producer(&self) -> &str {
        &self.producer
    }

    /// Inputs as the file declares them, without initializers.
    pub fn inputs(&self) -> Vec<Declared> {
        let stored = |name: &str| self.graph.initializer.iter().any(|t| t.name == name);
        let given = self.graph.input.iter().filter(|info| !stored(&info.name));
        given.map(declared).collect()
    }

    /// Sizes of its inputs that are not numbers, in order, each once.
    pub fn dynamic_sizes(&self) -> Vec<DynamicSize> {
        let stored = |name: &str| self.graph.initializer.iter().any(|t| t.name == name);
        let mut found: Vec<DynamicSize> = Vec::new();
        for input in self.graph.input.iter().filter(|i| !stored(&i.name)) {
            let tensor = input.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            let dims = tensor.and_then(|t| t.shape.as_ref()).into_iter();
            for (dimension, dim) in dims.flat_map(|shape| &shape.dim).enumerate() {
                let (name, is_named) = match (&dim.value, dim.name()) {
                    (Some(Dimension::DimValue(_)), _) => continue,
                    (_, Some(name)) => (name.to_string(), true),
                    _ => (unnamed_size(&input.name, dimension), false),
                };
                if found.iter().all(|size| size.name != name) {
                    found.push(DynamicSize {
                        name,
                        is_named,
                        input: input.name.clone(),
                        dimension,
                    });
                }
            }
        }
        found
    }

    /// Outputs as the file declares them.
    pub fn outputs(&self) -> Vec<Declared> {
        self.graph.output.iter().map(declared).collect()
    }

    /// All initializers of the file together, used or not.
    pub fn initializers(&self) -> Initializers {
        let elements = |dims: &[i64]| {
            dims.iter()
                .fold(1u64, |p, n| p.saturating_mul((*n).max(0) as u64))
        };
        let all = self.graph.initializer.iter();
        Initializers {
            n: all.len(),
            n_elements: all.fold(0, |sum, t| sum.saturating_add(elements(&t.dims))),
        }
    }

    /// Whether the model defines that operator as a function of its own.
    pub(super) fn defines(&self, domain: &str, name: &str) -> bool {
        let mut functions = self.around.functions.iter();
        functions.any(|f| f.domain == domain && f.name == name)
    }

    /// The folder in which external data is looked for.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Everything in the file.
    pub(super) fn model(&self) -> ModelProto {
        ModelProto {
            graph: Some(self.graph.clone()),
            ..self.around.clone()
        }
    }

    /// The same file with another model in it.
    pub(super) fn with(&self, mut model: ModelProto) -> File {
        File {
            graph: model.graph.take().unwrap_or_default(),
            opset: standard_version(&model),
            around: model,
            ..self.clone()
        }
    }

    /// What it says of itself.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// The file with these initializers, which have no dimension, as parameters; the others without a dimension are
    /// constants of its graph. Other names have no effect.
    pub fn with_scalar_parameters(mut self, names: impl IntoIterator<Item = String>) -> File {
        self.scalar_parameters.extend(names);
        self
    }

    /// Whether an initializer without a dimension is a parameter.
    pub(super) fn is_scalar_parameter(&self, name: &str) -> bool {
        self.scalar_parameters.contains(name)
    }

    /// The file with `Constant` nodes of real numbers as initializers, as far as they are `wanted` by the name and the
    /// shape of their output; and the names of these, in order.
    pub fn with_constants_stored(
        mut self,
        wanted: impl Fn(&str, &[i64]) -> bool,
    ) -> (File, Vec<String>) {
        let mut names = Vec::new();
        let nodes = std::mem::take(&mut self.graph.node);
        for mut node in nodes {
            let is_wanted = |tensor: &TensorProto| {
                let is_float = dtype_of(tensor.data_type).is_ok_and(|dtype| dtype.is_float());
                is_float && node.output.iter().any(|name| wanted(name, &tensor.dims))
            };
            let tensor = node.attribute.iter().find_map(|a| a.t.as_ref());
            match tensor.is_some_and(is_wanted) && gives_one_tensor(&node) {
                true => {
                    let tensor = node.attribute.pop().and_then(|a| a.t);
                    let name = node.output.pop().unwrap_or_default();
                    names.push(name.clone());
                    let named = |tensor| TensorProto { name, ..tensor };
                    self.graph.initializer.extend(tensor.map(named));
                }
                false => self.graph.node.push(node),
            }
        }
        (self, names)
    }
}

/// Whether a node is a `Constant` with one tensor.
fn gives_one_tensor(node: &NodeProto) -> bool {
    let is_standard = matches!(node.domain.as_str(), "" | "ai.onnx");
    is_standard && node.op_type == "Constant" && node.attribute.len() == 1 && node.output.len() == 1
}

/// A negative size says, as exporters mean it and runtimes read it, that the size is not known.
fn open_negative_sizes(input: &mut ValueInfoProto) {
    let tensor = input.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
    let shape = tensor.and_then(|t| t.shape.as_mut());
    for dim in shape.into_iter().flat_map(|s| &mut s.dim) {
        if matches!(dim.value, Some(Dimension::DimValue(n)) if n < 0) {
            dim.value = None;
        }
    }
}

/// Version of the standard's operators.
fn standard_version(model: &ModelProto) -> i64 {
    let standard = |domain: &str| domain.is_empty() || domain == "ai.onnx";
    let mut sets = model.opset_import.iter();
    let found = sets.find(|entry| standard(&entry.domain));
    found.map_or(1, |entry| entry.version)
}

/// What the file says of an input or output, before anything is imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its name.
    pub name: String,
    /// Its element type; `?` if the file does not say or Shorthaul does not have it.
    pub dtype: String,
    /// Its sizes: numbers, names, or `?`; `None` if not even their number is known.
    pub shape: Option<Vec<String>>,
}

/// A size of an input that is not a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DynamicSize {
    /// The name by which it is given a value.
    pub name: String,
    /// Whether the file has that name.
    pub is_named: bool,
    /// The first input that has it.
    pub input: String,
    /// The dimension there.
    pub dimension: usize,
}

/// Initializers of a file together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Initializers {
    /// How many.
    pub n: usize,
    /// The sum of their elements.
    pub n_elements: u64,
}

fn declared(info: &ValueInfoProto) -> Declared {
    let tensor = info.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
    let dtype = tensor.and_then(|t| dtype_of(t.elem_type).ok());
    let size = |dim: &DimensionProto| match &dim.value {
        Some(Dimension::DimValue(n)) => n.to_string(),
        Some(Dimension::DimParam(name)) if !name.is_empty() => name.clone(),
        _ => "?".to_string(),
    };
    let shape = tensor.and_then(|t| t.shape.as_ref());
    Declared {
        name: info.name.clone(),
        dtype: dtype.map_or_else(|| "?".to_string(), |d| d.to_string()),
        shape: shape.map(|s| s.dim.iter().map(size).collect()),
    }
}
