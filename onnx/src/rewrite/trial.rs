//! Small models for the tests of rules: built line by line, rewritten, verified, shown as text.

use super::{Options, Rewritten, Target, rewrite, rule_names, undefined};
use crate::element::Element;
use crate::file::Model;
use crate::proto::{
    AttributeProto, Dimension, DimensionProto, FunctionProto, GraphProto, ModelProto, NodeProto,
    OperatorSetIdProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use crate::stored::Stored;
use crate::tensor::{Tensor, Values};
use crate::verify::{self, Checker};
use prost::Message;
use std::path::Path;

/// A model of one graph.
pub struct Trial {
    model: ModelProto,
    rules: Option<Vec<&'static str>>,
    target: Target,
}

/// A value of that type and those sizes, separated by spaces: numbers or symbols.
pub fn value(name: &str, element: Element, sizes: &str) -> ValueInfoProto {
    typed(&(name, element.number(), sizes))
}

/// A value of a name, the number of an element type (0: not given) and sizes (`?`: not given).
pub fn typed((name, element, sizes): &(&str, i32, &str)) -> ValueInfoProto {
    let size = |word: &str| DimensionProto {
        value: Some(match word.parse() {
            Ok(n) => Dimension::DimValue(n),
            Err(_) => Dimension::DimParam(word.to_string()),
        }),
        ..Default::default()
    };
    let shape = (*sizes != "?").then(|| TensorShapeProto {
        dim: sizes.split_ascii_whitespace().map(size).collect(),
    });
    let tensor_type = Some(TensorTypeProto {
        elem_type: *element,
        shape,
    });
    ValueInfoProto {
        name: name.to_string(),
        r#type: (*element != 0).then(|| TypeProto {
            tensor_type,
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A node of the standard with one output and no attributes.
pub fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: op.to_string(),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: vec![output.to_string()],
        ..Default::default()
    }
}

/// A model of that graph, with a version of the standard's operators.
pub fn model_of(graph: GraphProto, opset: i64) -> ModelProto {
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![set("", opset)],
        graph: Some(graph),
        ..Default::default()
    }
}

/// A node from `y, z = Op(a, b)`.
pub fn line(text: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    let names = |list: &str| -> Vec<String> {
        let list = list.trim();
        if list.is_empty() {
            return Vec::new();
        }
        list.split(',').map(|n| n.trim().to_string()).collect()
    };
    let (outputs, call) = text.split_once('=').expect("outputs = Op(inputs)");
    let (op, inputs) = call.split_once('(').expect("Op(inputs)");
    let (domain, op_type) = op.trim().rsplit_once('.').unwrap_or(("", op.trim()));
    NodeProto {
        op_type: op_type.to_string(),
        domain: domain.to_string(),
        input: names(inputs.trim_end_matches(')')),
        output: names(outputs),
        attribute,
        ..Default::default()
    }
}

/// A local function `r = name(p)` of these nodes.
pub fn function(name: &str, nodes: Vec<NodeProto>) -> FunctionProto {
    FunctionProto {
        name: name.to_string(),
        domain: "local".to_string(),
        input: vec!["p".to_string()],
        output: vec!["r".to_string()],
        node: nodes,
        opset_import: vec![set("", 17), set("local", 1)],
        ..Default::default()
    }
}

fn set(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto {
        domain: domain.to_string(),
        version,
    }
}

/// `y = F0(x)`, where each of the functions calls the next one `n_calls` times, and the last is a Relu.
pub fn nested(n_functions: usize, n_calls: usize) -> Trial {
    let trial = Trial::new(17).input("x", "4").output("y", "4");
    let mut trial = trial.node("y = local.F0(x)");
    for n in 0..n_functions {
        let next = |from: String, to: String| {
            let text = format!("{to} = local.F{}({from})", n + 1);
            line(&text, Vec::new())
        };
        let value = |k: usize| match k {
            0 => "p".to_string(),
            k if k == n_calls => "r".to_string(),
            k => format!("v{k}"),
        };
        let nodes = match n + 1 == n_functions {
            true => vec![line("r = Relu(p)", Vec::new())],
            false => (0..n_calls).map(|k| next(value(k), value(k + 1))).collect(),
        };
        trial = trial.function(function(&format!("F{n}"), nodes));
    }
    trial
}

/// Real numbers that are neither round nor equal.
pub fn reals(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let values = (0..n).map(|n| ((n * 37 % 101) as f32 - 50.0) / 64.0);
    Tensor::new(shape, Values::F32(values.collect()))
}

/// One real number.
pub fn real(value: f32) -> Tensor {
    Tensor::new(&[], Values::F32(vec![value]))
}

impl Trial {
    /// An empty graph of that operator-set version.
    pub fn new(opset: i64) -> Trial {
        Trial {
            model: model_of(GraphProto::default(), opset),
            rules: None,
            target: Target::Standard,
        }
    }

    fn graph(&mut self) -> &mut GraphProto {
        self.model.graph.get_or_insert_default()
    }

    /// Uses that version of the file format.
    pub fn version(mut self, version: i64) -> Trial {
        self.model.ir_version = Some(version);
        self
    }

    /// Uses only these rules.
    pub fn only(mut self, rules: &[&'static str]) -> Trial {
        self.rules = Some(rules.to_vec());
        self
    }

    /// Rewrites for that target.
    pub fn target(mut self, target: Target) -> Trial {
        self.target = target;
        self
    }

    /// An input of reals.
    pub fn input(self, name: &str, sizes: &str) -> Trial {
        self.input_of(name, Element::F32, sizes)
    }

    /// An input.
    pub fn input_of(mut self, name: &str, element: Element, sizes: &str) -> Trial {
        self.graph().input.push(value(name, element, sizes));
        self
    }

    /// What the file says of an integer value inside.
    pub fn declares(mut self, name: &str, sizes: &str) -> Trial {
        self.graph()
            .value_info
            .push(value(name, Element::I64, sizes));
        self
    }

    /// An output of reals.
    pub fn output(self, name: &str, sizes: &str) -> Trial {
        self.output_of(name, Element::F32, sizes)
    }

    /// An output.
    pub fn output_of(mut self, name: &str, element: Element, sizes: &str) -> Trial {
        self.graph().output.push(value(name, element, sizes));
        self
    }

    /// An initializer.
    pub fn constant(mut self, name: &str, tensor: Tensor) -> Trial {
        self.graph().initializer.push(tensor.to_proto(name));
        self
    }

    /// An initializer of integers, one-dimensional.
    pub fn ints(self, name: &str, values: &[i64]) -> Trial {
        self.constant(name, Tensor::ints(values))
    }

    /// A node without attributes from `y = Op(a, b)`.
    pub fn node(self, text: &str) -> Trial {
        self.with(text, Vec::new())
    }

    /// A node with attributes.
    pub fn with(mut self, text: &str, attribute: Vec<AttributeProto>) -> Trial {
        self.graph().node.push(line(text, attribute));
        self
    }

    /// A local function and the version of the standard that it imports.
    pub fn function(mut self, function: FunctionProto) -> Trial {
        let known = &mut self.model.opset_import;
        if known.iter().all(|o| o.domain != function.domain) {
            known.push(OperatorSetIdProto {
                domain: function.domain.clone(),
                version: 1,
            });
        }
        self.model.functions.push(function);
        self
    }

    /// Rewrites, verifies, and gives names of what fired and the nodes as text.
    pub fn run(&self) -> (Vec<&'static str>, Vec<String>) {
        let done = self.rewritten();
        let fired = done.applied.iter().map(|a| a.rule).collect();
        let graph = done.model.graph.as_ref().expect("a graph");
        (fired, shown(graph))
    }

    /// The nodes after rewriting, where the model itself cannot be run on random inputs.
    pub fn unverified(&self) -> Vec<String> {
        let folder = std::sync::Arc::from(Path::new("."));
        let done = rewrite(&self.model, &folder, &self.options());
        shown(done.model.graph.as_ref().expect("a graph"))
    }

    fn options(&self) -> Options {
        let mut options = Options {
            target: self.target,
            ..Options::default()
        };
        if let Some(rules) = &self.rules {
            let others = rule_names().into_iter().filter(|r| !rules.contains(r));
            options.without = others.map(str::to_string).collect();
        }
        options
    }

    /// The model.
    pub fn model(&self) -> Model {
        let bytes = self.model.encode_to_vec().into();
        Model::of_bytes(Path::new("trial.onnx"), bytes).expect("a model")
    }

    /// Rewrites and verifies.
    pub fn rewritten(&self) -> Rewritten {
        let model = self.model();
        let done = rewrite(&model.proto, &model.folder, &self.options());
        let graph = done.model.graph.as_ref().expect("a graph");
        assert_eq!(undefined(graph), Vec::<String>::new());
        let checker = Checker::new(&model, &verify::Options::default()).expect("it runs");
        let evidence = checker.check(&done.model);
        let nodes = shown(graph);
        let evidence = evidence.unwrap_or_else(|error| panic!("{error}\n{nodes:#?}"));
        assert_eq!(
            evidence.cuts,
            Vec::<String>::new(),
            "operators without meaning"
        );
        done
    }

    /// Rewrites, verifies, and compares with the nodes expected.
    pub fn gives(&self, expected: &[&str]) {
        let (fired, nodes) = self.run();
        assert_eq!(nodes, expected, "after {fired:?}");
    }

    /// Checks that nothing fires.
    pub fn stays(&self) {
        let (fired, nodes) = self.run();
        assert!(fired.is_empty(), "{fired:?} gave {nodes:#?}");
    }
}

/// Nodes as text; integers of constants and attributes in place.
pub fn shown(graph: &GraphProto) -> Vec<String> {
    let folder = std::sync::Arc::from(Path::new("."));
    let input = |name: &String| {
        let proto = graph.initializer.iter().find(|t| t.name == *name);
        let stored = proto.map(|t| Stored::new(t.clone(), &folder));
        match stored
            .filter(|s| s.len() <= 8)
            .and_then(|s| s.tensor().ok())
        {
            Some(t) if t.element().is_int() => format!("{:?}", t.to_i64().unwrap_or_default()),
            _ => name.clone(),
        }
    };
    let node = |node: &NodeProto| {
        let inputs: Vec<String> = node.input.iter().map(input).collect();
        let attributes: Vec<String> = node.attribute.iter().filter_map(attribute).collect();
        let attributes = match attributes.is_empty() {
            true => String::new(),
            false => format!(" {{{}}}", attributes.join(", ")),
        };
        let (outputs, inputs) = (node.output.join(", "), inputs.join(", "));
        format!("{outputs} = {}({inputs}){attributes}", node.op_type)
    };
    graph.node.iter().map(node).collect()
}

fn attribute(a: &AttributeProto) -> Option<String> {
    let value = match (a.i, a.f) {
        (Some(i), _) => i.to_string(),
        (_, Some(f)) => f.to_string(),
        _ if !a.ints.is_empty() => format!("{:?}", a.ints),
        _ => format!("{:?}", a.s.as_ref()?),
    };
    Some(format!("{}={value}", a.name))
}
