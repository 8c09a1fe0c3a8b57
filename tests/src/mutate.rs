//! Damage to ONNX models, as random as a seed: structural changes that still make a message.
//!
//! Never writes files and never judges what a program makes of them.

use onnx::proto::{
    AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto,
};

/// Numbers that follow from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

/// Integers that arithmetic on sizes goes wrong with.
const EXTREMES: [i64; 22] = [
    0,
    -1,
    1,
    2,
    3,
    7,
    -2,
    16,
    255,
    4097,
    1 << 16,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    1 << 33,
    1 << 40,
    1 << 53,
    1 << 62,
    i64::MAX,
    i64::MIN,
    i64::MIN + 1,
];

const FLOATS: [f32; 12] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-30,
    1e30,
    f32::MAX,
    f32::MIN_POSITIVE,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

impl Random {
    /// The random numbers of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, or 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.draw() % n.max(1) as u64) as usize
    }

    fn one<'a, T>(&mut self, of: &'a mut [T]) -> Option<&'a mut T> {
        let at = self.below(of.len());
        of.get_mut(at)
    }

    /// An integer that arithmetic on sizes goes wrong with.
    pub fn extreme(&mut self) -> i64 {
        EXTREMES[self.below(EXTREMES.len())]
    }

    /// A number at an end of its range, or not a number.
    pub fn float(&mut self) -> f32 {
        FLOATS[self.below(FLOATS.len())]
    }
}

/// Changes one to three things in a model; `operators` are names to choose from.
pub fn mutate(model: &mut ModelProto, operators: &[String], random: &mut Random) {
    for _ in 0..1 + random.below(3) {
        match random.below(12) {
            0 => {
                let version = random.below(30) as i64 - 1;
                if let Some(import) = random.one(&mut model.opset_import) {
                    import.version = version;
                }
            }
            1 => model.ir_version = Some(random.below(16) as i64),
            2 if !model.functions.is_empty() => {
                if let Some(function) = random.one(&mut model.functions) {
                    let names: Vec<String> = function.input.clone();
                    node_list(&mut function.node, &names, operators, random);
                }
            }
            _ => {
                if let Some(graph) = &mut model.graph {
                    body(graph, operators, random);
                }
            }
        }
    }
}

fn body(graph: &mut GraphProto, operators: &[String], random: &mut Random) {
    let outputs = graph.node.iter().flat_map(|n| &n.output);
    let inputs = graph.input.iter().map(|i| &i.name);
    let stored = graph.initializer.iter().map(|t| &t.name);
    let names: Vec<String> = outputs.chain(inputs).chain(stored).cloned().collect();
    match random.below(10) {
        0 | 1 => {
            if let Some(port) = random.one(&mut graph.input) {
                value(port, random);
            }
        }
        2 => {
            let all = if random.below(2) == 0 {
                &mut graph.output
            } else {
                &mut graph.value_info
            };
            if let Some(port) = random.one(all) {
                value(port, random);
            }
        }
        3 | 4 if !graph.initializer.is_empty() => {
            if let Some(tensor) = random.one(&mut graph.initializer) {
                stored_tensor(tensor, random);
            }
        }
        5 => entries(graph, &names, random),
        _ => node_list(&mut graph.node, &names, operators, random),
    }
}

/// Adds, doubles or removes what a graph lists.
fn entries(graph: &mut GraphProto, names: &[String], random: &mut Random) {
    let pick = |random: &mut Random| names.get(random.below(names.len())).cloned();
    match random.below(6) {
        0 if !graph.initializer.is_empty() => {
            let at = random.below(graph.initializer.len());
            graph.initializer.remove(at);
        }
        1 => {
            let copy = random.one(&mut graph.initializer).cloned();
            graph.initializer.extend(copy);
        }
        2 => {
            let copy = random.one(&mut graph.input).cloned();
            graph.input.extend(copy);
        }
        3 if !graph.input.is_empty() => {
            // An input becomes an initializer.
            let at = random.below(graph.input.len());
            let name = graph.input.remove(at).name;
            graph.initializer.push(TensorProto {
                name,
                dims: vec![random.extreme().clamp(0, 9)],
                data_type: 7,
                int64_data: (0..9).map(|_| random.extreme()).collect(),
                ..TensorProto::default()
            });
        }
        4 => {
            if let Some(name) = pick(random) {
                graph.output.push(ValueInfoProto {
                    name,
                    ..ValueInfoProto::default()
                });
            }
        }
        _ => {
            let to = pick(random).unwrap_or_default();
            if let Some(output) = random.one(&mut graph.output) {
                output.name = to;
            }
        }
    }
}

fn value(port: &mut ValueInfoProto, random: &mut Random) {
    let Some(tensor) = port.r#type.as_mut().and_then(|t| t.tensor_type.as_mut()) else {
        port.r#type = None;
        return;
    };
    match (random.below(8), &mut tensor.shape) {
        (0, _) => tensor.elem_type = random.below(28) as i32 - 1,
        (1, shape) => *shape = None,
        (2, Some(shape)) if !shape.dim.is_empty() => {
            let at = random.below(shape.dim.len());
            shape.dim.remove(at);
        }
        (3, Some(shape)) => {
            let copy = random.one(&mut shape.dim).cloned().unwrap_or_default();
            shape.dim.push(copy);
        }
        (kind, Some(shape)) => {
            let number = random.extreme();
            let at = random.below(shape.dim.len());
            if let Some(dim) = shape.dim.get_mut(at) {
                dim.value = match kind {
                    4 => Some(Dimension::DimParam("n".to_string())),
                    5 => None,
                    _ => Some(Dimension::DimValue(number)),
                };
            }
        }
        (_, None) => port.r#type = None,
    }
}

fn stored_tensor(tensor: &mut TensorProto, random: &mut Random) {
    match random.below(8) {
        0 => {
            let number = random.extreme();
            if let Some(n) = random.one(&mut tensor.dims) {
                *n = number;
            }
        }
        1 => tensor.data_type = random.below(28) as i32 - 1,
        2 => tensor.dims.push(random.extreme().clamp(-1, 3)),
        3 => {
            let at = random.below(tensor.dims.len());
            if at < tensor.dims.len() {
                tensor.dims.remove(at);
            }
        }
        4 => {
            if let Some(raw) = &mut tensor.raw_data {
                raw.truncate(raw.len() / 2);
            }
        }
        5 => tensor.data_location = 1,
        _ => numbers(tensor, random),
    }
}

/// Other numbers of the same type in as many places.
fn numbers(tensor: &mut TensorProto, random: &mut Random) {
    for n in &mut tensor.int64_data {
        *n = random.extreme();
    }
    for x in &mut tensor.float_data {
        *x = random.float();
    }
    for n in &mut tensor.int32_data {
        *n = random.extreme() as i32;
    }
    let Some(raw) = &tensor.raw_data else { return };
    let mut bytes = raw.to_vec();
    let width = match tensor.data_type {
        1 | 6 => 4,
        _ => 8,
    };
    for chunk in bytes.chunks_exact_mut(width).take(64) {
        match tensor.data_type {
            1 => chunk.copy_from_slice(&random.float().to_le_bytes()),
            6 => chunk.copy_from_slice(&(random.extreme() as i32).to_le_bytes()),
            7 => chunk.copy_from_slice(&random.extreme().to_le_bytes()),
            _ => chunk.fill(random.draw() as u8),
        }
    }
    tensor.raw_data = Some(bytes.into());
}

fn node_list(
    nodes: &mut Vec<NodeProto>,
    names: &[String],
    operators: &[String],
    random: &mut Random,
) {
    let at = random.below(nodes.len());
    match random.below(12) {
        0 if nodes.len() > 1 => {
            nodes.remove(at);
        }
        1 if !nodes.is_empty() => {
            let mut copy = nodes[at].clone();
            for output in &mut copy.output {
                output.push_str("_copy");
            }
            nodes.push(copy);
        }
        2 => nodes.reverse(),
        _ => {
            if let Some(node) = nodes.get_mut(at) {
                one_node(node, names, operators, random);
            }
        }
    }
}

fn one_node(node: &mut NodeProto, names: &[String], operators: &[String], random: &mut Random) {
    let name = names.get(random.below(names.len())).cloned();
    let name = name.unwrap_or_default();
    match random.below(14) {
        0 => {
            if let Some(input) = random.one(&mut node.input) {
                input.clear();
            }
        }
        1 => node.input.push(name),
        2 => {
            if let Some(input) = random.one(&mut node.input) {
                *input = name;
            }
        }
        3 => _ = node.input.pop(),
        4 => node.input.reverse(),
        5 => {
            if let Some(operator) = operators.get(random.below(operators.len())) {
                node.op_type.clone_from(operator);
            }
        }
        6 => node.output.push(format!("{name}_more")),
        7 if node.output.len() > 1 => _ = node.output.pop(),
        8 => node.domain = ["", "ai.onnx", "com.microsoft", "x"][random.below(4)].to_string(),
        9 if !node.attribute.is_empty() => {
            let at = random.below(node.attribute.len());
            node.attribute.remove(at);
        }
        _ => {
            if let Some(attribute) = random.one(&mut node.attribute) {
                one_attribute(attribute, operators, random);
            }
        }
    }
}

fn one_attribute(attribute: &mut AttributeProto, operators: &[String], random: &mut Random) {
    if let Some(inner) = &mut attribute.g {
        return body(inner, operators, random);
    }
    if let Some(tensor) = &mut attribute.t {
        return stored_tensor(tensor, random);
    }
    if let Some(n) = &mut attribute.i {
        *n = random.extreme();
    }
    if let Some(x) = &mut attribute.f {
        *x = random.float();
    }
    if attribute.s.is_some() {
        let texts: [&'static [u8]; 6] =
            [b"", b"SAME_UPPER", b"VALID", b"linear", b"\xff", b"cubic"];
        attribute.s = Some(bytes::Bytes::from_static(texts[random.below(texts.len())]));
    }
    match random.below(4) {
        0 => _ = attribute.ints.pop(),
        1 => attribute.ints.extend(attribute.ints.first().copied()),
        _ => {
            let number = random.extreme();
            if let Some(n) = random.one(&mut attribute.ints) {
                *n = number;
            }
        }
    }
    let number = random.float();
    if let Some(x) = random.one(&mut attribute.floats) {
        *x = number;
    }
    if random.below(12) == 0 {
        attribute.r#type = random.below(15) as i32;
    }
}
