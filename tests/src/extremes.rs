//! Extreme attributes and sizes in ONNX models, as random as a seed: integers at the ends of their range, empty and
//! long lists, values of another type, versions that no operator set has.
//!
//! Never writes files and never judges what a program makes of them.

use crate::mutate::Random;
use onnx::proto::attribute_type as kind;
use onnx::proto::{AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, TensorProto};
use std::collections::BTreeMap;

/// Attributes that operators have, by operator: one of each name.
#[derive(Clone, Debug, Default)]
pub struct Attributes(BTreeMap<String, Vec<AttributeProto>>);

impl Attributes {
    /// The attributes that the nodes of these models have.
    pub fn new<'m>(models: impl Iterator<Item = &'m ModelProto>) -> Attributes {
        let mut all: BTreeMap<String, Vec<AttributeProto>> = BTreeMap::new();
        for node in models.flat_map(|m| &m.graph).flat_map(|g| &g.node) {
            let known = all.entry(node.op_type.clone()).or_default();
            for attribute in &node.attribute {
                if known.iter().all(|a| a.name != attribute.name) {
                    known.push(attribute.clone());
                }
            }
        }
        Attributes(all)
    }
}

/// Makes one to three things of a model extreme.
pub fn make_extreme(model: &mut ModelProto, known: &Attributes, random: &mut Random) {
    for _ in 0..1 + random.below(3) {
        match random.below(10) {
            0 => version(model, random),
            1 => sizes(model, random),
            2 => stored(model, random),
            _ => attribute(model, known, random),
        }
    }
}

fn version(model: &mut ModelProto, random: &mut Random) {
    let versions = [0, -1, 1, 6, 7, 12, 13, 28, 29, 1000, i64::MIN, i64::MAX];
    let version = versions[random.below(versions.len())];
    match model.opset_import.first_mut() {
        Some(import) if random.below(4) > 0 => import.version = version,
        _ => model.ir_version = Some(version),
    }
}

/// All sizes of an input, or one.
fn sizes(model: &mut ModelProto, random: &mut Random) {
    let inputs = model.graph.iter_mut().flat_map(|g| &mut g.input);
    let types = inputs.filter_map(|i| i.r#type.as_mut()?.tensor_type.as_mut()?.shape.as_mut());
    let mut shapes: Vec<_> = types.collect();
    let at = random.below(shapes.len());
    let Some(shape) = shapes.get_mut(at) else {
        return;
    };
    let (all, one) = (random.below(3) == 0, random.below(shape.dim.len()));
    for (d, dim) in shape.dim.iter_mut().enumerate() {
        if all || d == one {
            dim.value = Some(Dimension::DimValue(random.extreme()));
        }
    }
}

/// Changes the integers of an initializer; an input of integers is made an initializer first.
fn stored(model: &mut ModelProto, random: &mut Random) {
    let Some(graph) = &mut model.graph else {
        return;
    };
    let is_int = |t: &i32| matches!(t, 6 | 7);
    let inputs = graph.input.iter().enumerate().filter(|(_, input)| {
        let tensor = input.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
        tensor.is_some_and(|t| is_int(&t.elem_type))
    });
    let inputs: Vec<usize> = inputs.map(|(n, _)| n).collect();
    if let Some(at) = inputs.get(random.below(inputs.len())) {
        let name = graph.input[*at].name.clone();
        graph.input.remove(*at);
        graph.initializer.push(integers(name, random));
        return;
    }
    let ints = graph
        .initializer
        .iter_mut()
        .filter(|t| is_int(&t.data_type));
    let mut ints: Vec<&mut TensorProto> = ints.collect();
    let at = random.below(ints.len());
    if let Some(tensor) = ints.get_mut(at) {
        let name = tensor.name.clone();
        **tensor = integers(name, random);
    }
}

fn integers(name: String, random: &mut Random) -> TensorProto {
    let n = random.below(6);
    TensorProto {
        name,
        dims: if n == 1 { vec![] } else { vec![n as i64] },
        data_type: 7,
        int64_data: (0..n).map(|_| random.extreme()).collect(),
        ..TensorProto::default()
    }
}

/// An attribute that a node has, or could have.
fn attribute(model: &mut ModelProto, known: &Attributes, random: &mut Random) {
    let Some(graph) = &mut model.graph else {
        return;
    };
    let at = random.below(graph.node.len());
    let Some(node) = graph.node.get_mut(at) else {
        return;
    };
    let absent = known.0.get(&node.op_type).map_or(&[][..], Vec::as_slice);
    let absent: Vec<&AttributeProto> = absent
        .iter()
        .filter(|a| node.attribute.iter().all(|own| own.name != a.name))
        .collect();
    if !absent.is_empty() && (node.attribute.is_empty() || random.below(3) == 0) {
        let one = absent[random.below(absent.len())].clone();
        node.attribute.push(one);
        let last = node.attribute.len() - 1;
        change(&mut node.attribute[last], random);
        return;
    }
    change_one(node, random);
}

fn change_one(node: &mut NodeProto, random: &mut Random) {
    let at = random.below(node.attribute.len());
    if let Some(attribute) = node.attribute.get_mut(at) {
        change(attribute, random);
    }
}

fn change(attribute: &mut AttributeProto, random: &mut Random) {
    if let Some(body) = &mut attribute.g
        && random.below(4) > 0
    {
        return inner(body, random);
    }
    let kinds = [
        kind::FLOAT,
        kind::INT,
        kind::STRING,
        kind::TENSOR,
        kind::GRAPH,
        kind::FLOATS,
        kind::INTS,
        kind::STRINGS,
    ];
    // Another kind every fifth time.
    let new = match random.below(5) {
        0 => kinds[random.below(kinds.len())],
        _ => attribute.r#type,
    };
    let n_before = attribute.ints.len().max(attribute.floats.len());
    let n = match random.below(6) {
        0 => 0,
        1 => n_before + 1,
        2 => n_before.saturating_sub(1),
        3 => 300,
        _ => n_before,
    };
    let name = attribute.name.clone();
    *attribute = AttributeProto {
        name,
        r#type: new,
        ..AttributeProto::default()
    };
    match new {
        kind::FLOAT => attribute.f = Some(random.float()),
        kind::INT => attribute.i = Some(random.extreme()),
        kind::STRING => attribute.s = Some(text(random)),
        kind::TENSOR => attribute.t = Some(integers(String::new(), random)),
        kind::GRAPH => attribute.g = Some(GraphProto::default()),
        kind::FLOATS => attribute.floats = (0..n).map(|_| random.float()).collect(),
        kind::INTS => {
            // The same number in all places, or one number each.
            let (same, number) = (random.below(2) == 0, random.extreme());
            let mut one = || if same { number } else { random.extreme() };
            attribute.ints = (0..n).map(|_| one()).collect();
        }
        kind::STRINGS => attribute.strings = (0..n).map(|_| text(random)).collect(),
        _ => {}
    }
}

fn text(random: &mut Random) -> bytes::Bytes {
    match random.below(4) {
        0 => bytes::Bytes::new(),
        1 => bytes::Bytes::from_static(b"\xff\xfe"),
        2 => bytes::Bytes::from(vec![b'a'; 1 << 16]),
        _ => bytes::Bytes::from_static(b"ij,jk->ik"),
    }
}

/// A node of a body.
fn inner(body: &mut GraphProto, random: &mut Random) {
    let at = random.below(body.node.len());
    if let Some(node) = body.node.get_mut(at) {
        change_one(node, random);
    }
}
