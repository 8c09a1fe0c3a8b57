//! A node as its rule sees it: attributes and inputs by what they are used for, and appending operators.

use super::import::Importer;
use super::mode::Mode;
use super::proto::{AttributeProto, NodeProto, attribute_type};
use super::tensor::Stored;
use super::value::{Ints, Value};
use graph::{Attr, Attrs, ContainerId, DType, Expr, SymExpr, Tensor};
use ops::{OpBuilder, OpError, attrs};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

/// Why a node cannot be imported: a sentence.
#[derive(Clone, Debug)]
pub struct Refusal(pub String);

impl From<OpError> for Refusal {
    fn from(error: OpError) -> Self {
        Refusal(error.to_string())
    }
}

impl From<String> for Refusal {
    fn from(message: String) -> Self {
        Refusal(message)
    }
}

impl From<&str> for Refusal {
    fn from(message: &str) -> Self {
        Refusal(message.to_string())
    }
}

/// A node being imported.
pub struct NodeCx<'a, 'g> {
    importer: &'a mut Importer<'g>,
    /// The node.
    pub node: &'a NodeProto,
    /// Attributes that the rule looked at.
    seen: RefCell<BTreeSet<&'a str>>,
}

/// Attributes that change nothing here: precision hints, what the shapes of weights show too, and
/// what matters only in another mode of their operator.
const HARMLESS: [&str; 10] = [
    "kernel_shape",
    "kv_num_heads",
    "momentum",
    "q_num_heads",
    "saturate",
    "seed",
    "softmax_precision",
    "stash_type",
    "storage_order",
    "value",
];

/// The number that an attribute in single precision stands for: of all that round to it, the one
/// with the fewest digits. 1e-5 is meant, not 0.00000999999974737875163555.
fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}

/// Attributes.
impl<'a, 'g> NodeCx<'a, 'g> {
    pub(super) fn new(importer: &'a mut Importer<'g>, node: &'a NodeProto) -> Self {
        NodeCx {
            importer,
            node,
            seen: RefCell::default(),
        }
    }

    /// Version of the operator set.
    pub fn opset(&self) -> i64 {
        self.importer.opset()
    }

    /// Whether the attribute is there.
    pub fn has(&self, name: &str) -> bool {
        self.attribute(name).is_some()
    }

    fn attribute(&self, name: &str) -> Option<&'a AttributeProto> {
        let found = self.node.attribute.iter().find(|a| a.name == name)?;
        self.seen.borrow_mut().insert(found.name.as_str());
        Some(found)
    }

    /// Refuses attributes that the rule never looked at: their meaning would be lost.
    pub(super) fn all_attributes_seen(&self) -> Result<(), Refusal> {
        let seen = self.seen.borrow();
        let names = self.node.attribute.iter().map(|a| a.name.as_str());
        let lost = names.filter(|name| !seen.contains(name) && !HARMLESS.contains(name));
        let lost: Vec<_> = lost.map(|name| format!("`{name}`")).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let what = if lost.len() == 1 {
            "attribute"
        } else {
            "attributes"
        };
        Err(Refusal(format!(
            "its {what} {} not supported",
            lost.join(", ") + if lost.len() == 1 { " is" } else { " are" }
        )))
    }

    fn wrong(name: &str, what: &str) -> Refusal {
        Refusal(format!("its attribute `{name}` is not {what}"))
    }

    /// An integer attribute.
    pub fn int(&self, name: &str, default: i64) -> Result<i64, Refusal> {
        match self.attribute(name) {
            None => Ok(default),
            Some(a) if matches!(a.r#type, 0 | attribute_type::INT) => Ok(a.i.unwrap_or_default()),
            Some(_) => Err(Self::wrong(name, "an integer")),
        }
    }

    /// A real attribute.
    pub fn float(&self, name: &str, default: f64) -> Result<f64, Refusal> {
        match self.attribute(name) {
            None => Ok(default),
            Some(a) if matches!(a.r#type, 0 | attribute_type::FLOAT) => {
                Ok(decimal(a.f.unwrap_or_default()))
            }
            Some(_) => Err(Self::wrong(name, "a real number")),
        }
    }

    /// A text attribute.
    pub fn text(&self, name: &str, default: &str) -> Result<String, Refusal> {
        let Some(a) = self.attribute(name) else {
            return Ok(default.to_string());
        };
        let bytes = a.s.as_ref().ok_or_else(|| Self::wrong(name, "a text"))?;
        let text = std::str::from_utf8(bytes).map_err(|_| Self::wrong(name, "a text"))?;
        Ok(text.to_string())
    }

    /// An attribute with integers.
    pub fn ints(&self, name: &str) -> Result<Option<Vec<i64>>, Refusal> {
        match self.attribute(name) {
            None => Ok(None),
            Some(a) if matches!(a.r#type, 0 | attribute_type::INTS) => Ok(Some(a.ints.clone())),
            Some(_) => Err(Self::wrong(name, "a list of integers")),
        }
    }

    /// An attribute with real numbers.
    pub fn floats(&self, name: &str) -> Option<Vec<f64>> {
        let a = self.attribute(name)?;
        Some(a.floats.iter().copied().map(decimal).collect())
    }

    /// A tensor attribute, its elements decoded.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>, Refusal> {
        let Some(a) = self.attribute(name) else {
            return Ok(None);
        };
        let proto = a.t.as_ref().ok_or_else(|| Self::wrong(name, "a tensor"))?;
        let stored = Stored::new(proto, Path::new("."))
            .map_err(|e| Refusal(format!("its attribute `{name}`: {e}")))?;
        let tensor = stored.tensor().map_err(|e| Refusal(e.to_string()))?;
        Ok(Some(tensor))
    }
}

/// Inputs.
impl NodeCx<'_, '_> {
    /// Number of inputs, absent ones in between included.
    pub fn n_inputs(&self) -> usize {
        self.node.input.len()
    }

    /// Whether an input is there.
    pub fn given(&self, position: usize) -> bool {
        self.node
            .input
            .get(position)
            .is_some_and(|name| !name.is_empty())
    }

    /// Whether anybody may use an output.
    pub fn wants(&self, position: usize) -> bool {
        self.node
            .output
            .get(position)
            .is_some_and(|name| !name.is_empty())
    }

    fn name(&self, position: usize) -> Result<String, Refusal> {
        let name = self
            .node
            .input
            .get(position)
            .filter(|name| !name.is_empty());
        name.cloned()
            .ok_or_else(|| Refusal(format!("its input {position} is absent")))
    }

    /// What is known of an input.
    pub fn value(&self, position: usize) -> Result<Value, Refusal> {
        Ok(self.importer.value(&self.name(position)?).clone())
    }

    /// The container of an input that was used as data before.
    pub fn made(&self, position: usize) -> Result<Option<ContainerId>, Refusal> {
        Ok(self.importer.made(&self.name(position)?))
    }

    /// An input as data.
    pub fn input(&mut self, position: usize) -> Result<ContainerId, Refusal> {
        let name = self.name(position)?;
        Ok(self.importer.container(&name)?)
    }

    /// An optional input as data.
    pub fn optional(&mut self, position: usize) -> Result<Option<ContainerId>, Refusal> {
        if self.given(position) {
            self.input(position).map(Some)
        } else {
            Ok(None)
        }
    }

    /// All inputs as data.
    pub fn all_inputs(&mut self) -> Result<Vec<ContainerId>, Refusal> {
        (0..self.n_inputs())
            .map(|position| self.input(position))
            .collect()
    }

    /// An input that follows from sizes and constants.
    pub fn known(&self, position: usize) -> Result<Ints, Refusal> {
        match self.value(position)? {
            Value::Ints(ints) => Ok(ints),
            Value::Constant(tensor) => Ints::of_tensor(&tensor)
                .ok_or_else(|| Refusal(format!("its input {position} is not of integers"))),
            _ => Err(Refusal(format!(
                "its input `{}` depends on data; it must follow from shapes and constants",
                self.name(position)?
            ))),
        }
    }

    /// Like [`NodeCx::known`], `None` where the input is absent.
    pub fn optional_known(&self, position: usize) -> Result<Option<Ints>, Refusal> {
        self.given(position)
            .then(|| self.known(position))
            .transpose()
    }

    /// An input that gives sizes.
    pub fn sizes(&self, position: usize) -> Result<Vec<SymExpr>, Refusal> {
        Ok(self.known(position)?.elements)
    }

    /// Integers from an attribute (older versions) or, if it is absent, from an input (newer ones).
    pub fn ints_of(&self, attr: &str, position: usize) -> Result<Option<Vec<i64>>, Refusal> {
        if let Some(ints) = self.ints(attr)? {
            return Ok(Some(ints));
        }
        let Some(known) = self.optional_known(position)? else {
            return Ok(None);
        };
        let tensor = known
            .to_tensor()
            .ok_or_else(|| Refusal(format!("its `{attr}` depends on a dynamic size")))?;
        Ok(Some(tensor.to_i64()))
    }

    /// The values of an input that must be numbers of the file.
    pub fn numbers(&self, position: usize) -> Result<Vec<f64>, Refusal> {
        let name = self.name(position)?;
        let depends = || {
            Refusal(format!(
                "its input `{name}` depends on data; only constants are supported"
            ))
        };
        let tensor = match self.value(position)? {
            Value::Constant(tensor) => (*tensor).clone(),
            Value::Stored(stored) => stored.tensor().map_err(|e| Refusal(e.to_string()))?,
            Value::Ints(ints) => ints.to_tensor().ok_or_else(depends)?,
            _ => return Err(depends()),
        };
        Ok(tensor.to_f64())
    }

    /// The value of an optional scalar input that must be a number of the file.
    pub fn scalar(&self, position: usize) -> Result<Option<f64>, Refusal> {
        if !self.given(position) {
            return Ok(None);
        }
        match self.numbers(position)?.as_slice() {
            [one] => Ok(Some(*one)),
            _ => Err(Refusal(format!(
                "its input {position} is not a single number"
            ))),
        }
    }

    /// Shape of a container.
    pub fn shape(&self, id: ContainerId) -> Vec<SymExpr> {
        self.importer.builder.shape(id)
    }

    /// Number of dimensions of a container.
    pub fn rank(&self, id: ContainerId) -> usize {
        self.importer.builder.graph.container(id).shape.len()
    }

    /// Element type of a container.
    pub fn dtype(&self, id: ContainerId) -> DType {
        self.importer.builder.dtype(id)
    }

    /// Shape of an input, without making it data.
    pub fn input_shape(&self, position: usize) -> Result<Vec<SymExpr>, Refusal> {
        let fixed = |shape: &[usize]| shape.iter().map(|n| SymExpr::from(*n)).collect();
        Ok(match self.value(position)? {
            Value::Data(id) => self.shape(id),
            Value::Ints(ints) => fixed(&ints.shape),
            Value::Constant(tensor) => fixed(&tensor.shape),
            Value::Stored(stored) => fixed(stored.shape()),
            Value::Sequence(_) => return Err("its input is a sequence".into()),
            Value::Broken => return Err(Refusal("its input could not be imported".into())),
        })
    }

    /// `axis` counted from the front.
    pub fn axis(&self, axis: i64, rank: usize) -> Result<usize, Refusal> {
        let counted = if axis < 0 { axis + rank as i64 } else { axis };
        usize::try_from(counted)
            .ok()
            .filter(|a| *a < rank)
            .ok_or_else(|| Refusal(format!("axis {axis} is not one of its {rank} dimensions")))
    }

    /// `axes` counted from the front, sorted.
    ///
    /// # Errors
    /// One is out of range or occurs twice.
    pub fn axes(&self, axes: &[i64], rank: usize) -> Result<Vec<usize>, Refusal> {
        let counted: Result<Vec<_>, _> = axes.iter().map(|a| self.axis(*a, rank)).collect();
        let mut counted = counted?;
        counted.sort_unstable();
        if counted.windows(2).any(|w| w[0] == w[1]) {
            return Err(Refusal(format!("its axes {axes:?} name a dimension twice")));
        }
        Ok(counted)
    }
}

/// Appending.
impl NodeCx<'_, '_> {
    /// Appends an operator.
    pub fn op(
        &mut self,
        op: &str,
        inputs: &[Option<ContainerId>],
        attrs: Attrs,
    ) -> Result<Vec<ContainerId>, Refusal> {
        Ok(self.importer.builder.op(op, inputs, attrs)?)
    }

    /// Appends an operator with one output and no absent input.
    pub fn op1(
        &mut self,
        op: &str,
        inputs: &[ContainerId],
        attrs: Attrs,
    ) -> Result<ContainerId, Refusal> {
        Ok(self.importer.builder.op1(op, inputs, attrs)?)
    }

    /// Appends element-wise arithmetic.
    pub fn elementwise(&mut self, e: Expr, inputs: &[ContainerId]) -> Result<ContainerId, Refusal> {
        // A node with fewer inputs than its operator takes.
        if let Some(missing) = e.inputs().into_iter().find(|i| *i >= inputs.len()) {
            return Err(Refusal(format!("its input {missing} is missing")));
        }
        Ok(self.importer.builder.elementwise(e, inputs)?)
    }

    /// Appends a conversion, if one is needed.
    pub fn cast(&mut self, x: ContainerId, dtype: DType) -> Result<ContainerId, Refusal> {
        if self.dtype(x) == dtype {
            return Ok(x);
        }
        self.elementwise(Expr::In(0).cast(dtype), &[x])
    }

    /// Appends a reshape, if one is needed.
    pub fn reshape(&mut self, x: ContainerId, to: Vec<SymExpr>) -> Result<ContainerId, Refusal> {
        if self.shape(x) == to {
            return Ok(x);
        }
        self.op1("reshape", &[x], attrs([("shape", Attr::Sizes(to))]))
    }

    /// Appends a permutation of dimensions, if one is needed.
    pub fn permute(&mut self, x: ContainerId, order: &[usize]) -> Result<ContainerId, Refusal> {
        if order.iter().enumerate().all(|(i, d)| i == *d) {
            return Ok(x);
        }
        let order = order.iter().map(|d| *d as i64).collect();
        self.op1("permute", &[x], attrs([("order", Attr::Ints(order))]))
    }

    /// Appends a reduction.
    pub fn reduce(
        &mut self,
        x: ContainerId,
        kind: &str,
        axes: &[usize],
        keep: bool,
    ) -> Result<ContainerId, Refusal> {
        let axes = axes.iter().map(|d| *d as i64).collect();
        let list = attrs([
            ("kind", Attr::Str(kind.to_string())),
            ("axes", Attr::Ints(axes)),
            ("keep", Attr::Bool(keep)),
        ]);
        self.op1("reduce", &[x], list)
    }

    /// Appends a constant.
    pub fn constant(&mut self, value: Tensor) -> ContainerId {
        let builder = &mut self.importer.builder;
        let name = format!("{}_constant", builder.origin.node);
        builder.graph.add_constant(&name, value)
    }

    /// Appends an operator whose only attribute is an axis: `concat`, `gather`, `gather_elements`.
    pub fn along(
        &mut self,
        op: &str,
        inputs: &[ContainerId],
        axis: usize,
    ) -> Result<ContainerId, Refusal> {
        self.op1(op, inputs, attrs([("axis", Attr::Int(axis as i64))]))
    }

    /// Appends `x[…, start:stop, …]`, if that is not all of it.
    pub fn part(
        &mut self,
        x: ContainerId,
        axis: usize,
        start: SymExpr,
        stop: SymExpr,
    ) -> Result<ContainerId, Refusal> {
        if start.is_zero() && self.shape(x).get(axis) == Some(&stop) {
            return Ok(x);
        }
        let list = attrs([
            ("axis", Attr::Int(axis as i64)),
            ("start", Attr::Sizes(vec![start])),
            ("stop", Attr::Sizes(vec![stop])),
            ("step", Attr::Int(1)),
        ]);
        self.op1("slice", &[x], list)
    }

    /// Appends elements of one value before and after `x`.
    pub fn padded(
        &mut self,
        x: ContainerId,
        (low, high): (Vec<SymExpr>, Vec<SymExpr>),
        value: f64,
    ) -> Result<ContainerId, Refusal> {
        if low.iter().chain(&high).all(SymExpr::is_zero) {
            return Ok(x);
        }
        let list = attrs([
            ("low", Attr::Sizes(low)),
            ("high", Attr::Sizes(high)),
            ("mode", Attr::Str("constant".to_string())),
            ("value", Attr::Float(value)),
        ]);
        self.op1("pad", &[x], list)
    }

    /// Appends a value of that shape with every element the same.
    pub fn filled(
        &mut self,
        shape: Vec<SymExpr>,
        dtype: DType,
        value: f64,
    ) -> Result<ContainerId, Refusal> {
        let value = match dtype.is_float() {
            true => Attr::Float(value),
            false => Attr::Int(value as i64),
        };
        let list = attrs([
            ("shape", Attr::Sizes(shape)),
            ("value", value),
            ("dtype", Attr::DType(dtype)),
        ]);
        Ok(self.op("full", &[], list)?[0])
    }

    /// Appends `0, 1, …` of `i64` along dimension `axis` of `rank`, the others of size 1.
    pub fn positions(
        &mut self,
        size: &SymExpr,
        axis: usize,
        rank: usize,
    ) -> Result<ContainerId, Refusal> {
        let one = |n: SymExpr| Attr::Sizes(vec![n]);
        let list = attrs([
            ("start", one(0.into())),
            ("step", one(1.into())),
            ("size", one(size.clone())),
            ("dtype", Attr::DType(DType::I64)),
        ]);
        let positions = self.op("iota", &[], list)?[0];
        let mut shape = vec![SymExpr::constant(1); rank];
        shape[axis] = size.clone();
        self.reshape(positions, shape)
    }

    /// Adds a per-channel bias `[C]` to dimension 1 of `x`.
    pub fn add_channels(&mut self, x: ContainerId, b: ContainerId) -> Result<ContainerId, Refusal> {
        let b = self.per_channel(b, self.rank(x))?;
        self.elementwise(Expr::In(0).add(Expr::In(1)), &[x, b])
    }

    /// A vector `[C]` as `[C, 1, …]`, so that it broadcasts along dimension 1 of rank `rank`.
    pub fn per_channel(&mut self, v: ContainerId, rank: usize) -> Result<ContainerId, Refusal> {
        let mut shape = self.shape(v);
        shape.resize(rank.saturating_sub(1).max(1), SymExpr::constant(1));
        self.reshape(v, shape)
    }

    /// Appends the nodes of the graph that an attribute holds; `None` if there is no such attribute.
    pub fn body(
        &mut self,
        name: &str,
        inputs: &[ContainerId],
    ) -> Result<Option<Vec<ContainerId>>, Refusal> {
        let Some(attribute) = self.attribute(name) else {
            return Ok(None);
        };
        let body = attribute.g.as_ref();
        let body = body.ok_or_else(|| Self::wrong(name, "a graph"))?;
        Ok(Some(self.importer.inlined(body, inputs)?))
    }

    /// Marks an input as one that gradients do not change.
    pub fn not_trainable(&mut self, id: ContainerId) {
        self.importer.not_trainable(id);
    }

    /// Whether a node with this `training_mode` is in training form.
    pub fn trains(&self, training_mode: bool) -> bool {
        match self.importer.mode() {
            Mode::File => training_mode,
            Mode::Train => true,
            Mode::Eval => false,
        }
    }

    /// Notes that this node normalizes by fixed statistics.
    pub fn freeze(&mut self) {
        self.importer.freeze();
    }

    /// Makes `of(latest, batch)` the latest value of a running statistic.
    pub fn follow_statistic(
        &mut self,
        statistic: ContainerId,
        batch: ContainerId,
        of: Expr,
    ) -> Result<(), Refusal> {
        let latest = self.importer.statistic(statistic);
        let next = self.elementwise(of.cast(self.dtype(statistic)), &[latest, batch])?;
        self.importer.follow_statistic(statistic, next);
        Ok(())
    }

    /// The seed of random numbers, and a number for this node's.
    pub fn randomness(&mut self) -> (ContainerId, i64) {
        self.importer.randomness()
    }
}
