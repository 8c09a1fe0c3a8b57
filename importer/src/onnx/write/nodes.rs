//! The list of nodes being written: names, constants, attributes.

use super::super::proto::{AttributeProto, NodeProto, TensorProto, attribute_type};
use super::Names;
use bytes::Bytes;
use graph::{ContainerId, DType, Graph, Lifetime, Scalar, SymExpr, Tensor};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};

/// Why a rule cannot write a call.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) String);

impl From<ops::OpError> for Refusal {
    fn from(error: ops::OpError) -> Self {
        Refusal(error.to_string())
    }
}

/// An attribute by name.
pub(super) type Attribute = AttributeProto;

/// The nodes so far, and the names of values.
pub(super) struct Nodes<'g> {
    pub(super) graph: &'g Graph,
    pub(super) list: Vec<NodeProto>,
    pub(super) constants: Vec<TensorProto>,
    /// Masks of dropout by the id of the operator: the same mask in both passes.
    pub(super) masks: BTreeMap<i64, String>,
    /// Uniform random numbers by their seeds: the name of their shape, and their own.
    pub(super) drawn: BTreeMap<String, (String, String)>,
    /// Scalars computed from shapes, by their expression.
    pub(super) sizes: BTreeMap<String, String>,
    /// Shapes of values, as far as they are known.
    pub(super) shapes: BTreeMap<String, Vec<SymExpr>>,
    /// How often each container is read; a result is read once more.
    readers: BTreeMap<ContainerId, usize>,
    values: BTreeMap<ContainerId, String>,
    /// The node that makes each value.
    made: BTreeMap<String, usize>,
    known: BTreeMap<(i32, Vec<i64>, Vec<u8>), String>,
    /// Outputs of nodes by operator, inputs and attributes, so that nothing is computed twice.
    computed: BTreeMap<(String, Vec<String>, Vec<u8>), Vec<String>>,
    taken: BTreeSet<String>,
    origin: String,
    /// How many nodes there were, including those that were left out again: no two may have the same name.
    n_given: usize,
}

impl<'g> Nodes<'g> {
    pub(super) fn new(graph: &'g Graph, names: &Names) -> Self {
        let mut nodes = Nodes {
            graph,
            list: Vec::new(),
            constants: Vec::new(),
            masks: BTreeMap::new(),
            drawn: BTreeMap::new(),
            sizes: BTreeMap::new(),
            shapes: BTreeMap::new(),
            readers: readers(graph),
            values: BTreeMap::new(),
            made: BTreeMap::new(),
            known: BTreeMap::new(),
            computed: BTreeMap::new(),
            taken: names.outputs.iter().cloned().collect(),
            origin: String::new(),
            n_given: 0,
        };
        for id in &graph.inputs {
            let own = &graph.container(*id).name;
            let name = names.inputs.get(id).unwrap_or(own).clone();
            nodes.taken.insert(name.clone());
            let shape = graph.container(*id).shape.clone();
            nodes.shapes.insert(name.clone(), shape);
            nodes.values.insert(*id, name);
        }
        nodes
    }

    /// Sets the origin of the nodes from here on: a node of this name.
    pub(super) fn begin(&mut self, origin: &str) {
        self.origin = origin.to_string();
    }

    /// Sets the origin of the nodes from here on: the same node as that of this one.
    pub(super) fn begin_beside(&mut self, node: &NodeProto) {
        let origin = node.name.rsplit_once('#').map(|(origin, _)| origin);
        self.begin(origin.unwrap_or_default());
    }

    /// The name of a container's value.
    pub(super) fn value(&self, id: ContainerId) -> String {
        let own = || self.graph.container(id).name.clone();
        self.values.get(&id).cloned().unwrap_or_else(own)
    }

    /// The name of an operand: constants become initializers when they are first used.
    pub(super) fn operand(&mut self, id: ContainerId) -> String {
        if let Some(name) = self.values.get(&id) {
            return name.clone();
        }
        let c = self.graph.container(id);
        let name = match &c.lifetime {
            Lifetime::Constant(tensor) => self.constant(tensor),
            _ => self.fresh(&c.name),
        };
        self.values.insert(id, name.clone());
        name
    }

    /// Lets a value stand for the container from here on.
    pub(super) fn assign(&mut self, id: ContainerId, value: String) {
        let shape = &self.graph.container(id).shape;
        match self.shapes.get(&value) {
            Some(known) if known != shape => {
                debug_assert!(false, "`{value}` has two shapes");
                self.shapes.remove(&value);
            }
            _ => {
                self.shapes.insert(value.clone(), shape.clone());
            }
        }
        self.values.insert(id, value);
    }

    /// A name that is not used yet.
    pub(super) fn fresh(&mut self, wanted: &str) -> String {
        let mut name = wanted.to_string();
        let mut n = 1;
        while !self.taken.insert(name.clone()) {
            n += 1;
            name = format!("{wanted}_{n}");
        }
        name
    }

    /// Appends a node with these outputs.
    pub(super) fn give(
        &mut self,
        op: &str,
        inputs: &[&str],
        outputs: &[&str],
        attribute: Vec<Attribute>,
    ) {
        let own = |list: &[&str]| list.iter().map(ToString::to_string).collect();
        for output in outputs {
            self.made.insert(output.to_string(), self.list.len());
        }
        self.list.push(NodeProto {
            input: own(inputs),
            output: own(outputs),
            name: format!("{}#{}", self.origin, self.n_given),
            op_type: op.to_string(),
            attribute,
            ..Default::default()
        });
        self.n_given += 1;
    }

    /// Appends a node with one output, and returns the output's name.
    pub(super) fn node(&mut self, op: &str, inputs: &[&str], attribute: Vec<Attribute>) -> String {
        self.nodes(op, inputs, 1, attribute).remove(0)
    }

    /// Appends a node with several outputs. If there is an equal node already, its outputs are used again, unless the
    /// node draws random numbers.
    pub(super) fn nodes(
        &mut self,
        op: &str,
        inputs: &[&str],
        n_outputs: usize,
        attribute: Vec<Attribute>,
    ) -> Vec<String> {
        let own = inputs.iter().map(ToString::to_string).collect();
        let key = (op.to_string(), own, encoded(attribute.clone()));
        let is_random = matches!(op, "Dropout" | "RandomUniformLike");
        if let Some(known) = self.computed.get(&key).filter(|_| !is_random)
            && known.len() >= n_outputs
        {
            return known[..n_outputs].to_vec();
        }
        let wanted = format!("{}.{}", self.origin, op.to_lowercase());
        let names: Vec<String> = (0..n_outputs).map(|_| self.fresh(&wanted)).collect();
        let outputs: Vec<&str> = names.iter().map(String::as_str).collect();
        self.give(op, inputs, &outputs, attribute);
        self.computed.insert(key, names.clone());
        names
    }

    /// Appends a node that was written before; a later equal one uses its outputs.
    pub(super) fn take_up(&mut self, node: NodeProto) {
        for output in &node.output {
            self.made.insert(output.clone(), self.list.len());
        }
        let key = (
            node.op_type.clone(),
            node.input.clone(),
            encoded(node.attribute.clone()),
        );
        self.computed.insert(key, node.output.clone());
        self.list.push(node);
    }

    /// Takes the list in order to write it again, and forgets its nodes, so that none is reused before that.
    pub(super) fn take_list(&mut self) -> Vec<NodeProto> {
        let list = std::mem::take(&mut self.list);
        self.replace_list(Vec::new());
        list
    }

    /// Replaces the list; no node of the old one is reused.
    pub(super) fn replace_list(&mut self, list: Vec<NodeProto>) {
        self.list = list;
        self.computed.clear();
        self.sizes.clear();
        self.find_makers();
    }

    /// Records which node makes a value, after it was renamed.
    pub(super) fn made_at(&mut self, value: &str, at: usize) {
        self.made.insert(value.to_string(), at);
    }

    /// The position of the node that makes a value.
    pub(super) fn position(&self, value: &str) -> Option<usize> {
        self.made.get(value).copied()
    }

    /// The node that makes a value.
    pub(super) fn maker(&self, value: &str) -> Option<&NodeProto> {
        self.made.get(value).map(|at| &self.list[*at])
    }

    /// Whether the value is finite as long as the operands of products, sums and bounded functions are.
    pub(super) fn is_tame(&self, value: &str) -> bool {
        let (mut open, mut seen) = (vec![value], BTreeSet::new());
        while let Some(value) = open.pop() {
            let Some(node) = self.maker(value).filter(|_| seen.insert(value)) else {
                continue;
            };
            match node.op_type.as_str() {
                "Conv" | "ConvTranspose" | "Gemm" | "MatMul" | "Relu" | "Clip" | "Tanh"
                | "Sigmoid" | "Erf" | "Softmax" | "LayerNormalization" | "Cast" | "Gather" => {}
                "Add" | "Sub" | "Mul" | "Neg" | "ReduceSum" | "ReduceMean" | "Reshape"
                | "Slice" | "Transpose" | "Pad" | "Concat" | "Expand" | "BatchNormalization"
                | "MaxPool" | "AveragePool" | "ScatterElements" | "ScatterND" | "Unsqueeze"
                | "Squeeze" => {
                    open.extend(node.input.iter().map(String::as_str));
                }
                // Divided by a constant. In the next arm: a root or reciprocal of a sum with a constant.
                "Div" if self.maker(&node.input[1]).is_none() => {
                    open.push(&node.input[0]);
                }
                "Reciprocal" | "Sqrt" if self.is_shifted(node) => {}
                _ => return false,
            }
            if seen.len() > 64 {
                return false;
            }
        }
        true
    }

    fn is_shifted(&self, node: &NodeProto) -> bool {
        match (node.op_type.as_str(), self.maker(&node.input[0])) {
            ("Add", _) => self.maker(&node.input[1]).is_none(),
            (_, Some(inner)) if matches!(inner.op_type.as_str(), "Sqrt" | "Add") => {
                self.is_shifted(inner)
            }
            _ => false,
        }
    }

    /// Makes the bias of a product or convolution an operand of it instead of a sum after it, if nothing
    /// else reads the product. `of_product` and `bias` are containers; the bias is along the last
    /// dimension of a product or along the channels.
    pub(super) fn take_bias(
        &mut self,
        of_product: ContainerId,
        bias: ContainerId,
    ) -> Option<String> {
        let value = self.values.get(&of_product)?.clone();
        let readers = self.readers.get(&of_product).copied().unwrap_or(0);
        let names = self.values.values().filter(|name| **name == value).count();
        let uses = |value: &String| {
            self.list
                .iter()
                .flat_map(|n| &n.input)
                .filter(|i| *i == value)
                .count()
        };
        if readers != 1 || names != 1 || uses(&value) != 0 {
            return None;
        }
        let mut at = *self.made.get(&value)?;
        if self.list[at].op_type == "Reshape" && uses(&self.list[at].input[0]) == 1 {
            at = *self.made.get(&self.list[at].input[0])?;
        }
        let shape = &self.graph.container(of_product).shape;
        let along = &self.graph.container(bias).shape;
        let one = SymExpr::constant(1);
        let node = &self.list[at];
        let fits = match (node.op_type.as_str(), node.input.len()) {
            ("Gemm", 2) => {
                along.len() == 1
                    && shape.last() == along.first()
                    && self.shapes.get(&node.output[0]).and_then(|s| s.last()) == along.first()
            }
            ("Conv" | "ConvTranspose", 2) => {
                shape.len() == along.len() + 1
                    && along[0] == shape[1]
                    && along[1..].iter().all(|size| *size == one)
                    && node.output[0] == value
            }
            _ => false,
        };
        let mut name = self.operand(bias);
        if let Some(maker) = self.maker(&name).filter(|m| m.op_type == "Reshape" && fits) {
            name = maker.input[0].clone();
        }
        let rank = self.shape_of(&name)?.len();
        if !fits || self.made.contains_key(&name) || rank != 1 {
            return None;
        }
        let outputs = self.list[at].output.clone();
        self.computed.retain(|_, known| *known != outputs);
        self.list[at].input.push(name);
        Some(value)
    }

    /// The shape of a value, if that is known.
    pub(super) fn shape_of(&self, name: &str) -> Option<Vec<SymExpr>> {
        match self.initializer(name) {
            Some(stored) => Some(stored.dims.iter().copied().map(SymExpr::constant).collect()),
            None => self.shapes.get(name).cloned(),
        }
    }

    /// A constant in the file.
    pub(super) fn initializer(&self, name: &str) -> Option<&TensorProto> {
        self.constants.iter().find(|c| c.name == name)
    }

    /// A stored integer or list of them.
    pub(super) fn stored_ints(&self, name: &str) -> Option<Vec<i64>> {
        let stored = self.initializer(name)?;
        let bytes = stored.raw_data.as_deref()?.chunks_exact(8);
        let number = |n: &[u8]| n.try_into().ok().map(i64::from_le_bytes);
        (stored.data_type == type_number(DType::I64)).then(|| bytes.map(number).collect())?
    }

    /// Gives the results their names by renaming the nodes' outputs; a result that no node makes is copied. Leaves
    /// out what no result needs.
    pub(super) fn finish(&mut self, results: &[(String, &str)]) {
        let values: Vec<&str> = results.iter().map(|(value, _)| value.as_str()).collect();
        self.drop_unread(&values);
        self.keep_rows(&values);
        self.turn_operands();
        self.join_rows();
        self.drop_unread(&values);
        self.scale_products(&values);
        let read = self.list.iter().flat_map(|node| &node.input);
        let read: BTreeSet<&str> = read.map(String::as_str).chain(values).collect();
        self.constants.retain(|c| read.contains(c.name.as_str()));
        let made: BTreeSet<String> = self.list.iter().flat_map(|n| n.output.clone()).collect();
        let mut renamed: BTreeMap<String, String> = BTreeMap::new();
        let mut copies = Vec::new();
        for (value, name) in results {
            if made.contains(value) && !renamed.contains_key(value) {
                renamed.insert(value.clone(), name.to_string());
            } else {
                copies.push((value.clone(), *name));
            }
        }
        for node in &mut self.list {
            for value in node.input.iter_mut().chain(&mut node.output) {
                if let Some(name) = renamed.get(value) {
                    value.clone_from(name);
                }
            }
        }
        for (value, name) in copies {
            let value = renamed.get(&value).cloned().unwrap_or(value);
            self.give("Identity", &[&value], &[name], Vec::new());
        }
    }

    /// Finds again which node makes each value, after nodes were moved.
    pub(super) fn find_makers(&mut self) {
        self.made.clear();
        for (at, node) in self.list.iter().enumerate() {
            let outputs = node.output.iter().cloned();
            self.made.extend(outputs.map(|output| (output, at)));
        }
    }

    /// Leaves out nodes that neither a node nor a result reads.
    pub(super) fn drop_unread(&mut self, results: &[&str]) {
        let mut read: BTreeSet<String> = results.iter().map(ToString::to_string).collect();
        let mut kept = Vec::new();
        for node in std::mem::take(&mut self.list).into_iter().rev() {
            if node.output.iter().any(|o| read.contains(o)) {
                read.extend(node.input.iter().cloned());
                kept.push(node);
            }
        }
        kept.reverse();
        self.list = kept;
        self.find_makers();
    }

    /// A tensor of the file; equal ones are stored once.
    pub(super) fn constant(&mut self, tensor: &Tensor) -> String {
        let proto = stored(tensor);
        let data = proto.raw_data.as_deref().unwrap_or_default().to_vec();
        let key = (proto.data_type, proto.dims.clone(), data);
        if let Some(name) = self.known.get(&key) {
            return name.clone();
        }
        let name = self.fresh("constant");
        self.known.insert(key, name.clone());
        self.constants.push(TensorProto {
            name: name.clone(),
            ..proto
        });
        name
    }

    /// A number as a tensor without dimensions.
    pub(super) fn number(&mut self, value: Scalar, dtype: DType) -> String {
        let mut tensor = Tensor::zeros(dtype, &[]);
        tensor.set(0, value);
        self.constant(&tensor)
    }

    /// A list of integers as an operand.
    pub(super) fn ints(&mut self, values: &[i64]) -> String {
        self.constant(&Tensor::from_i64(
            DType::I64,
            &[values.len()],
            values.to_vec(),
        ))
    }
}

/// Attributes as a key to find them by.
fn encoded(attribute: Vec<Attribute>) -> Vec<u8> {
    let list = NodeProto {
        attribute,
        ..NodeProto::default()
    };
    list.encode_to_vec()
}

fn readers(graph: &Graph) -> BTreeMap<ContainerId, usize> {
    let mut readers: BTreeMap<ContainerId, usize> = BTreeMap::new();
    graph.visit_nodes(&mut |node| {
        for id in node.reads() {
            *readers.entry(id).or_default() += 1;
        }
    });
    for output in &graph.outputs {
        *readers.entry(output.container).or_default() += 1;
    }
    readers
}

/// Attribute of one integer.
pub(super) fn int(name: &str, value: i64) -> Attribute {
    AttributeProto {
        name: name.to_string(),
        i: Some(value),
        r#type: attribute_type::INT,
        ..AttributeProto::default()
    }
}

/// Attribute of one real number.
pub(super) fn float(name: &str, value: f64) -> Attribute {
    AttributeProto {
        name: name.to_string(),
        f: Some(value as f32),
        r#type: attribute_type::FLOAT,
        ..AttributeProto::default()
    }
}

/// Attribute of a list of integers.
pub(super) fn int_list(name: &str, values: &[i64]) -> Attribute {
    AttributeProto {
        name: name.to_string(),
        ints: values.to_vec(),
        r#type: attribute_type::INTS,
        ..AttributeProto::default()
    }
}

/// Attribute of a text.
pub(super) fn text(name: &str, value: &str) -> Attribute {
    AttributeProto {
        name: name.to_string(),
        s: Some(Bytes::copy_from_slice(value.as_bytes())),
        r#type: attribute_type::STRING,
        ..AttributeProto::default()
    }
}

/// The number of an element type in the format.
pub(super) fn type_number(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => 1,
        DType::U8 => 2,
        DType::I8 => 3,
        DType::I16 => 5,
        DType::I32 => 6,
        DType::I64 => 7,
        DType::Bool => 9,
        DType::F16 => 10,
        DType::F64 => 11,
        DType::BF16 => 16,
    }
}

/// A tensor in the file's form, without a name.
pub(super) fn stored(tensor: &Tensor) -> TensorProto {
    let floats = || tensor.to_f64().into_iter();
    let ints = || tensor.to_i64().into_iter();
    let raw: Vec<u8> = match tensor.dtype {
        DType::F32 => floats().flat_map(|x| (x as f32).to_le_bytes()).collect(),
        DType::F64 => floats().flat_map(f64::to_le_bytes).collect(),
        DType::F16 => floats()
            .flat_map(|x| half::f16::from_f64(x).to_le_bytes())
            .collect(),
        DType::BF16 => floats()
            .flat_map(|x| half::bf16::from_f64(x).to_le_bytes())
            .collect(),
        DType::I64 => ints().flat_map(i64::to_le_bytes).collect(),
        DType::I32 => ints().flat_map(|i| (i as i32).to_le_bytes()).collect(),
        DType::I16 => ints().flat_map(|i| (i as i16).to_le_bytes()).collect(),
        DType::I8 | DType::U8 | DType::Bool => ints().map(|i| i as u8).collect(),
    };
    TensorProto {
        dims: tensor.shape.iter().map(|n| *n as i64).collect(),
        data_type: type_number(tensor.dtype),
        raw_data: Some(Bytes::from(raw)),
        ..TensorProto::default()
    }
}
