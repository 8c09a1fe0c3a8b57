//! Whether element types and sizes fit: what a node reads must fit its operator, what it gives must fit what the
//! file says.
//!
//! Owns the walk over the graph, the bodies in it and the functions. Reports only what is wrong in every run: two
//! types, two numbers of dimensions or two numeric sizes that differ. Names of sizes are never compared. The outputs
//! of a node whose operands do not fit count as unknown, so that each mistake is reported once.

use super::schemas::{Many, Schema, Type, port};
use super::{OPSETS, Problems, nodes, sizes};
use crate::attributes::{Attributes, bodies, is_standard};
use crate::element::Element;
use crate::evaluate::label;
use crate::fact::{Fact, MAX_ELEMENTS};
use crate::infer::{Facts, Functions, Opsets, Walk, declared_fact};
use crate::operators::Unknowns;
use crate::proto::{FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use crate::stored::Stored;
use crate::tensor;
use graph::SymExpr;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Lists what does not fit. If anything else is wrong with the file, only what each node shows by itself is listed.
pub fn problems(model: &ModelProto, list: &mut Problems) {
    let unknowns = Unknowns::default();
    let is_sound = list.is_sound();
    let functions = Functions::new(&model.functions);
    let visit = |imports: &[_], body: &GraphProto, place: &str, list: &mut Problems| {
        let opsets = &Opsets::new(imports);
        let walk = Walk {
            opsets,
            functions: functions.clone(),
            unknowns: &unknowns,
            inputs_are_constant: model.ir_version.unwrap_or(0) < 4,
        };
        let looks_at_values = is_sound && OPSETS.contains(&opsets.version(""));
        let typing = Typing {
            walk,
            looks_at_values,
        };
        let facts = typing
            .walk
            .before(body, &constants(body), &Facts::default());
        typing.body(body, facts, place, list);
    };
    if let Some(graph) = &model.graph {
        visit(&model.opset_import, graph, "", list);
    }
    for function in &model.functions {
        let place = format!("function `{}`, ", function.name);
        visit(&function.opset_import, &body_of(function), &place, list);
    }
}

fn body_of(function: &FunctionProto) -> GraphProto {
    GraphProto {
        node: function.node.clone(),
        ..Default::default()
    }
}

struct Typing<'a> {
    walk: Walk<'a>,
    /// Whether types and sizes of values are checked.
    looks_at_values: bool,
}

/// What a file says of its values, by their names.
type Infos<'a> = BTreeMap<&'a str, Vec<&'a ValueInfoProto>>;

impl Typing<'_> {
    /// Checks a body, with what is known before its first node. Returns what is known after the last one.
    fn body(&self, body: &GraphProto, facts: Facts, place: &str, list: &mut Problems) -> Facts {
        if !self.looks_at_values {
            for node in &body.node {
                self.form(node, place, list);
                self.inside(node, &facts, place, list);
            }
            return facts;
        }
        let mut infos = Infos::new();
        for info in body.value_info.iter().chain(&body.output) {
            infos.entry(&info.name).or_default().push(info);
        }
        // Outputs that no node gives are known from the beginning.
        for output in &body.output {
            let known = facts.get(&output.name).cloned();
            let at = || format!("{place}output `{}`", output.name);
            match known.and_then(|fact| contradiction(&fact, output)) {
                Some((Matter::Type, message)) => list.error(at(), message),
                Some((Matter::Sizes, message)) => list.note(at(), message),
                None => {}
            }
        }
        self.walk.nodes(body, facts, &mut |node, facts, outputs| {
            self.node(node, facts, outputs, place, list);
            for (name, fact) in node.output.iter().zip(outputs) {
                let infos = infos.get(name.as_str()).into_iter().flatten();
                // Sizes in the file are only a hint, to runtimes too, and often out of date.
                let (mut hints, mut wrong) = (Vec::new(), Vec::new());
                for (matter, message) in infos.filter_map(|i| contradiction(fact, i)) {
                    match matter {
                        Matter::Sizes => hints.push(message),
                        Matter::Type => wrong.push(message),
                    }
                }
                let at = || format!("{place}{}", label(node));
                if let Some(message) = wrong.first() {
                    list.error(at(), format!("its output `{name}`: {message}"));
                } else if let Some(message) = hints.first() {
                    list.note(at(), format!("its output `{name}`: {message}"));
                }
            }
        })
    }

    /// Checks a node, where `facts` are known before it and `outputs` are what it gives.
    fn node(
        &self,
        node: &NodeProto,
        facts: &Facts,
        outputs: &mut [Fact],
        place: &str,
        list: &mut Problems,
    ) {
        self.inside(node, facts, place, list);
        let found = match self.form(node, place, list) {
            Form::Wrong => None,
            Form::Right(schema) => Some(schema),
            Form::Free => return,
        };
        let message = found.and_then(|schema| {
            let wrong = sizes::problem(node, self.walk.opsets.version(&node.domain), facts);
            types(node, schema, facts, outputs).or(wrong)
        });
        if let Some(message) = &message {
            list.error(format!("{place}{}", label(node)), message.clone());
        }
        if found.is_none() || message.is_some() || refers(node) {
            outputs.fill_with(Fact::default);
        }
    }

    /// Lists what is wrong with a node whatever its operands are.
    fn form(&self, node: &NodeProto, place: &str, list: &mut Problems) -> Form {
        if self.walk.functions.called(node).is_some() {
            return Form::Free;
        }
        let found = match nodes::schema(node, self.walk.opsets) {
            Ok(None) => return Form::Free,
            Ok(Some(schema)) => match nodes::differences(node, schema) {
                none if none.is_empty() => return Form::Right(schema),
                found => found,
            },
            Err(message) => vec![message],
        };
        for message in found {
            list.error(format!("{place}{}", label(node)), message);
        }
        Form::Wrong
    }

    /// The bodies inside a node. Of the values that a loop carries into one no size is known, for it may
    /// be another at every pass; and nothing is known in a branch that is never taken.
    fn inside(&self, node: &NodeProto, facts: &Facts, place: &str, list: &mut Problems) {
        if bodies(node).next().is_none() {
            return;
        }
        let at = format!("{place}{}", label(node));
        let never = never_taken(node, facts);
        let mut given: Vec<Option<Element>> = Vec::new();
        for body in bodies(node) {
            let is_never = never.is_some_and(|never| std::ptr::eq(never, body));
            let nothing = Facts::default();
            let outer = if is_never { &nothing } else { facts };
            let mut inner = self.walk.before(body, &constants(body), outer);
            for info in &body.input {
                let fact = declared_fact(info, self.walk.unknowns);
                inner.set(&info.name, Fact::new(fact.element, None));
            }
            let inner = self.body(body, inner, &format!("{at}, "), list);
            let of = |info: &ValueInfoProto| inner.get(&info.name).and_then(|fact| fact.element);
            let outputs: Vec<Option<Element>> = body.output.iter().map(of).collect();
            for (n, (a, b)) in given.iter().zip(&outputs).enumerate() {
                if let (Some(a), Some(b), "If") = (a, b, node.op_type.as_str())
                    && a != b
                {
                    let message =
                        format!("its output {n} is {a} after one branch and {b} after the other");
                    list.error(at.clone(), message);
                }
            }
            given = outputs;
            let message = self
                .taken(node, body, facts)
                .filter(|_| self.looks_at_values);
            if let Some(message) = message {
                list.error(at.clone(), message);
            }
        }
    }

    /// What is wrong with the types of the values that a loop's body takes.
    fn taken(&self, node: &NodeProto, body: &GraphProto, facts: &Facts) -> Option<String> {
        let skip = match node.op_type.as_str() {
            "Loop" => 2,
            "Scan" if self.walk.opsets.version("") >= 9 => 0,
            _ => return None,
        };
        let pairs = node.input.iter().zip(&body.input).skip(skip);
        let wrong = |(name, info): (&String, &ValueInfoProto)| {
            let given = facts.get(name)?.element?;
            let taken = declared_fact(info, self.walk.unknowns).element?;
            let said = || format!("its input `{name}` is {given}, but its body takes {taken}");
            (given != taken).then(said)
        };
        pairs.filter_map(wrong).next()
    }
}

/// How a node compares with what the standard says of its operator.
#[derive(Clone, Copy)]
enum Form {
    /// The standard says nothing of it.
    Free,
    Right(&'static Schema),
    Wrong,
}

/// The branch of an If that its constant condition leaves out.
fn never_taken<'n>(node: &'n NodeProto, facts: &Facts) -> Option<&'n GraphProto> {
    if node.op_type != "If" || !is_standard(node) {
        return None;
    }
    let condition = facts.get(node.input.first()?)?.known_ints()?;
    let name = match condition.as_slice() {
        [0] => "then_branch",
        [_] => "else_branch",
        _ => return None,
    };
    Attributes::new(node).body(name)
}

/// Whether a node, or one in its bodies, takes an attribute from the call of its function.
fn refers(node: &NodeProto) -> bool {
    let given = |node: &NodeProto| node.attribute.iter().any(|a| !a.ref_attr_name.is_empty());
    given(node) || bodies(node).flat_map(|b| &b.node).any(refers)
}

/// Initializers, as far as sizes can follow from them: large ones and those in other files come without their
/// elements.
fn constants(body: &GraphProto) -> BTreeMap<String, Arc<Stored>> {
    let folder: Arc<Path> = Arc::from(Path::new("."));
    let plain = |t: &TensorProto| TensorProto {
        dims: t.dims.clone(),
        data_type: t.data_type,
        ..Default::default()
    };
    let constant = |t: &TensorProto| {
        let is_small = tensor::sizes(&t.dims).is_ok_and(|(_, n)| n <= MAX_ELEMENTS);
        let kept = match is_small && t.data_location == 0 {
            true => t.clone(),
            false => plain(t),
        };
        (t.name.clone(), Arc::new(Stored::new(kept, &folder)))
    };
    body.initializer.iter().map(constant).collect()
}

/// What is wrong with the element types of a node's values. Gives its outputs the types that follow.
fn types(node: &NodeProto, schema: &Schema, facts: &Facts, outputs: &mut [Fact]) -> Option<String> {
    let mut bound: BTreeMap<&str, (Element, &str)> = BTreeMap::new();
    for (at, name) in node.input.iter().enumerate() {
        let Some(element) = facts.get(name).and_then(|fact| fact.element) else {
            continue;
        };
        let port = port(&schema.inputs, at)?;
        if let Some(allowed) = refused(schema, &port.element, element) {
            return Some(format!(
                "its input `{name}` is {element}, and is to be {allowed}"
            ));
        }
        let (Type::Variable(variable), false) = (&port.element, matches!(port.many, Many::Free(_)))
        else {
            continue;
        };
        let (other, first) = *bound.entry(variable).or_insert((element, name));
        if other != element {
            return Some(format!(
                "its inputs `{first}` and `{name}` are to be of one type, and are {other} and {element}"
            ));
        }
    }
    for ((at, name), fact) in node.output.iter().enumerate().zip(outputs) {
        let port = port(&schema.outputs, at)?;
        let follows = match &port.element {
            Type::Variable(variable) => bound.get(variable).map(|(element, _)| *element),
            Type::One(element) => Some(*element),
            Type::Any => None,
        };
        if !matches!(port.many, Many::Free(_)) {
            fact.element = follows.or(fact.element);
        }
        let element = fact.element;
        let refused = element.and_then(|e| Some((e, refused(schema, &port.element, e)?)));
        if let Some((element, allowed)) = refused {
            return Some(format!(
                "its output `{name}` is {element}, and is to be {allowed}"
            ));
        }
    }
    None
}

/// If that element type is not allowed: the ones that are, as text.
fn refused(schema: &Schema, kind: &Type, element: Element) -> Option<String> {
    let allowed = schema.allowed(kind)?;
    let names = || allowed.iter().map(ToString::to_string).collect::<Vec<_>>();
    (!allowed.contains(&element)).then(|| match allowed.as_slice() {
        [] => "of a type that is not computed with here".to_string(),
        _ => names().join(" or "),
    })
}

/// What a declaration is wrong about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matter {
    /// The type of elements, or whether it is a tensor.
    Type,
    /// The number of dimensions or a size.
    Sizes,
}

/// A statement of the file about a value that holds in no run.
pub fn contradiction(fact: &Fact, info: &ValueInfoProto) -> Option<(Matter, String)> {
    let said = info.r#type.as_ref()?;
    let Some(tensor) = &said.tensor_type else {
        let is_other =
            said.sequence_type.is_some() || said.map_type.is_some() || said.optional_type.is_some();
        let is_tensor = is_other && fact.element.is_some();
        let what = "the file says that it is no tensor, and it is one";
        return is_tensor.then(|| (Matter::Type, what.to_string()));
    };
    let element = fact
        .element
        .filter(|e| tensor.elem_type != 0 && e.number() != tensor.elem_type);
    if let Some(element) = element {
        let said = match Element::of_number(tensor.elem_type) {
            Some(said) => said.to_string(),
            None => format!("of type number {}", tensor.elem_type),
        };
        let what = format!("the file declares {said}, but it is {element}");
        return Some((Matter::Type, what));
    }
    let said = declared_fact(info, &Unknowns::default()).shape?;
    let known = fact.shape.as_ref()?;
    let pairs = || said.iter().zip(known);
    let is_other = said.len() != known.len() || pairs().any(|(a, b)| sizes::differ(a, b));
    is_other.then(|| {
        let (said, known) = (text_of(&said), text_of(known));
        let what = format!("the file declares the shape {said}, but it is {known}");
        (Matter::Sizes, what)
    })
}

/// Sizes for a message.
pub fn text_of(shape: &[SymExpr]) -> String {
    let size = |n: &SymExpr| {
        let text = n.to_string();
        match text.strip_prefix("?:") {
            Some(name) => name.to_string(),
            None if text.contains('?') => "?".to_string(),
            None => text,
        }
    };
    let sizes: Vec<String> = shape.iter().map(size).collect();
    format!("[{}]", sizes.join(", "))
}
