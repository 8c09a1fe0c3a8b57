//! One operator call while it is being imported: typed access to its arguments, and the builder
//! that its rule appends library nodes to.

use super::document::NodeDoc;
use super::error::RuleError;
use graph::{Attr, Attrs, Builder, ContainerId, DType, Expr, SymExpr, Symbol};
use ops::{OpBuilder, attrs};
use serde_json::Value;
use std::collections::BTreeMap;

/// What a rule gives: one container for each output of the call, `None` for those it does not make.
pub(crate) type Results = Result<Vec<Option<ContainerId>>, RuleError>;

/// The random numbers of a graph: its seed, made an input when first asked for.
#[derive(Debug, Default)]
pub(crate) struct Random {
    pub seed: Option<ContainerId>,
    /// How many places draw, by the number of the operator of PyTorch's that they are part of.
    pub n_places: BTreeMap<Option<i64>, i64>,
}

/// How many places an operator of PyTorch may have, such as a dropout after each layer of an LSTM.
const PLACES: i64 = 1 << 8;

/// A call being imported.
pub(crate) struct Site<'a, 'g> {
    pub node: &'a NodeDoc,
    pub values: &'a BTreeMap<String, ContainerId>,
    pub random: &'a mut Random,
    pub builder: Builder<'g>,
}

impl Site<'_, '_> {
    fn wrong(&self, name: &str, expected: &'static str) -> RuleError {
        RuleError::Argument {
            name: name.to_string(),
            expected,
            found: self
                .node
                .args
                .get(name)
                .map_or("nothing".into(), Value::to_string),
        }
    }

    /// The argument, unless it is absent or null.
    fn arg(&self, name: &str) -> Option<&Value> {
        self.node.args.get(name).filter(|v| !v.is_null())
    }

    fn container_of(&self, value: &Value) -> Option<ContainerId> {
        let name = value.get("ref")?.as_str()?;
        self.values.get(name).copied()
    }

    /// A tensor.
    pub fn tensor(&self, name: &str) -> Result<ContainerId, RuleError> {
        self.optional_tensor(name)?
            .ok_or_else(|| self.wrong(name, "a tensor"))
    }

    /// The first argument, whatever its name (`self` or `input`).
    pub fn subject(&self) -> Result<ContainerId, RuleError> {
        match self.arg("self") {
            Some(_) => self.tensor("self"),
            None => self.tensor("input"),
        }
    }

    /// A tensor, or `None` where it is null.
    pub fn optional_tensor(&self, name: &str) -> Result<Option<ContainerId>, RuleError> {
        self.arg(name)
            .map(|v| {
                self.container_of(v)
                    .ok_or_else(|| self.wrong(name, "a tensor"))
            })
            .transpose()
    }

    /// A list of tensors.
    pub fn tensors(&self, name: &str) -> Result<Vec<ContainerId>, RuleError> {
        let wrong = || self.wrong(name, "a list of tensors");
        let list = self.arg(name).and_then(Value::as_array).ok_or_else(wrong)?;
        list.iter()
            .map(|v| self.container_of(v).ok_or_else(wrong))
            .collect()
    }

    /// A list of tensors, some of them null.
    pub fn optional_tensors(&self, name: &str) -> Result<Vec<Option<ContainerId>>, RuleError> {
        let wrong = || self.wrong(name, "a list of tensors");
        let list = self.arg(name).and_then(Value::as_array).ok_or_else(wrong)?;
        let one = |v: &Value| match v.is_null() {
            true => Ok(None),
            false => self.container_of(v).map(Some).ok_or_else(wrong),
        };
        list.iter().map(one).collect()
    }

    /// Whether an argument is given.
    pub fn has(&self, name: &str) -> bool {
        self.arg(name).is_some()
    }

    /// Whether an argument is a tensor.
    pub fn is_tensor(&self, name: &str) -> bool {
        self.arg(name)
            .is_some_and(|v| self.container_of(v).is_some())
    }

    /// An integer.
    pub fn int(&self, name: &str) -> Result<i64, RuleError> {
        self.arg(name)
            .and_then(Value::as_i64)
            .ok_or_else(|| self.wrong(name, "an integer"))
    }

    /// An integer, or `default` where it is null.
    pub fn int_or(&self, name: &str, default: i64) -> Result<i64, RuleError> {
        if self.has(name) {
            self.int(name)
        } else {
            Ok(default)
        }
    }

    /// A truth value, false where it is null.
    pub fn flag(&self, name: &str) -> Result<bool, RuleError> {
        match self.arg(name) {
            None => Ok(false),
            Some(Value::Number(n)) => Ok(n.as_i64() != Some(0)),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(name, "a truth value")),
        }
    }

    /// A real number.
    pub fn float(&self, name: &str) -> Result<f64, RuleError> {
        self.arg(name)
            .and_then(number)
            .ok_or_else(|| self.wrong(name, "a number"))
    }

    /// A real number, or `default` where it is null.
    pub fn float_or(&self, name: &str, default: f64) -> Result<f64, RuleError> {
        if self.has(name) {
            self.float(name)
        } else {
            Ok(default)
        }
    }

    /// A factor of values of type `dtype`, 1 where it is null: of integers it is one, so that no digit is lost.
    pub fn factor(&self, name: &str, dtype: DType) -> Result<Expr, RuleError> {
        Ok(match dtype.is_float() {
            true => Expr::float(self.float_or(name, 1.0)?),
            false => Expr::int(self.int_or(name, 1)?),
        })
    }

    /// A list of real numbers; none where it is null.
    pub fn floats(&self, name: &str) -> Result<Vec<f64>, RuleError> {
        let wrong = || self.wrong(name, "a list of numbers");
        match self.arg(name) {
            Some(Value::Array(list)) => {
                (list.iter()).map(|v| number(v).ok_or_else(wrong)).collect()
            }
            Some(_) => Err(wrong()),
            None => Ok(Vec::new()),
        }
    }

    /// A text, or `default` where it is null.
    pub fn text_or(&self, name: &str, default: &str) -> Result<String, RuleError> {
        match self.arg(name) {
            None => Ok(default.to_string()),
            Some(v) => v
                .as_str()
                .map(str::to_string)
                .ok_or_else(|| self.wrong(name, "a text")),
        }
    }

    /// A list of integers; a single one is a list of one.
    pub fn ints(&self, name: &str) -> Result<Vec<i64>, RuleError> {
        let wrong = || self.wrong(name, "a list of integers");
        match self.arg(name) {
            Some(Value::Array(list)) => list.iter().map(|v| v.as_i64().ok_or_else(wrong)).collect(),
            Some(v) => Ok(vec![v.as_i64().ok_or_else(wrong)?]),
            None => Err(wrong()),
        }
    }

    /// A list of `n` integers; a single one stands for all, null or an empty list for `default`.
    pub fn ints_for(&self, name: &str, n: usize, default: &[i64]) -> Result<Vec<i64>, RuleError> {
        let list = if self.has(name) {
            self.ints(name)?
        } else {
            Vec::new()
        };
        match list.as_slice() {
            [] => Ok(default.to_vec()),
            [one] => Ok(vec![*one; n]),
            _ => Ok(list),
        }
    }

    /// A size.
    pub fn size(&self, name: &str) -> Result<SymExpr, RuleError> {
        self.arg(name)
            .and_then(|v| size_of(v.get("sym").unwrap_or(v)))
            .ok_or_else(|| self.wrong(name, "a size"))
    }

    /// A list of sizes.
    pub fn sizes(&self, name: &str) -> Result<Vec<SymExpr>, RuleError> {
        let wrong = || self.wrong(name, "a list of sizes");
        let list = self.arg(name).and_then(Value::as_array).ok_or_else(wrong)?;
        list.iter()
            .map(|v| size_of(v.get("sym").unwrap_or(v)).ok_or_else(wrong))
            .collect()
    }

    /// A number as an expression: integers stay integers, so that they do not widen a tensor's type.
    pub fn scalar(&self, name: &str) -> Result<Expr, RuleError> {
        let value = self.arg(name).ok_or_else(|| self.wrong(name, "a number"))?;
        if let Some(size) = value.get("sym").and_then(size_of) {
            return Ok(Expr::Index(size));
        }
        Ok(match value {
            Value::Bool(b) => Expr::int(i64::from(*b)),
            v => match v.as_i64() {
                Some(i) => Expr::int(i),
                None => Expr::float(number(v).ok_or_else(|| self.wrong(name, "a number"))?),
            },
        })
    }

    /// The documented type of an output.
    pub fn out_dtype(&self, position: usize) -> DType {
        let value = self.node.outputs.get(position).and_then(Option::as_ref);
        value.and_then(|v| dtype_of(&v.dtype)).unwrap_or(DType::F32)
    }

    /// The documented shape of an output.
    pub fn out_shape(&self, position: usize) -> Vec<SymExpr> {
        let value = self.node.outputs.get(position).and_then(Option::as_ref);
        value.and_then(|v| shape_of(&v.shape)).unwrap_or_default()
    }

    /// Number of dimensions.
    pub fn rank(&self, id: ContainerId) -> usize {
        self.builder.graph.container(id).shape.len()
    }

    /// An axis counted from the front.
    pub fn axis(&self, name: &str, rank: usize) -> Result<usize, RuleError> {
        self.axis_of(name, self.int(name)?, rank)
    }

    /// Axes counted from the front; null or an empty list means all.
    pub fn axes(&self, name: &str, rank: usize) -> Result<Vec<usize>, RuleError> {
        let given = if self.has(name) {
            self.ints(name)?
        } else {
            Vec::new()
        };
        if given.is_empty() {
            return Ok((0..rank).collect());
        }
        let axes: Result<Vec<_>, _> = given.iter().map(|a| self.axis_of(name, *a, rank)).collect();
        axes
    }

    fn axis_of(&self, name: &str, axis: i64, rank: usize) -> Result<usize, RuleError> {
        let from_front = if axis < 0 {
            axis + rank.max(1) as i64
        } else {
            axis
        };
        usize::try_from(from_front)
            .ok()
            .filter(|a| *a < rank.max(1))
            .ok_or_else(|| self.wrong(name, "an axis of the tensor"))
    }

    /// A refusal of a case.
    pub fn unsupported(&self, what: impl Into<String>) -> RuleError {
        RuleError::Unsupported(what.into())
    }

    /// Appends an operator with one output.
    pub fn op1(
        &mut self,
        op: &str,
        inputs: &[ContainerId],
        attrs: Attrs,
    ) -> Result<ContainerId, RuleError> {
        Ok(self.builder.op1(op, inputs, attrs)?)
    }

    /// Appends an element-wise operator whose result has type `dtype`.
    pub fn elementwise(
        &mut self,
        expr: Expr,
        inputs: &[ContainerId],
        dtype: DType,
    ) -> Result<ContainerId, RuleError> {
        let a = attrs([("expr", Attr::Expr(expr)), ("dtype", Attr::DType(dtype))]);
        self.op1("elementwise", inputs, a)
    }

    /// The value under another shape.
    pub fn reshape(
        &mut self,
        x: ContainerId,
        shape: Vec<SymExpr>,
    ) -> Result<ContainerId, RuleError> {
        if self.builder.shape(x) == shape {
            return Ok(x);
        }
        self.op1("reshape", &[x], attrs([("shape", Attr::Sizes(shape))]))
    }

    /// The value broadcast to a shape.
    pub fn expand(
        &mut self,
        x: ContainerId,
        shape: Vec<SymExpr>,
    ) -> Result<ContainerId, RuleError> {
        if self.builder.shape(x) == shape {
            return Ok(x);
        }
        self.op1("expand", &[x], attrs([("shape", Attr::Sizes(shape))]))
    }

    /// The value with another element type.
    pub fn cast(&mut self, x: ContainerId, dtype: DType) -> Result<ContainerId, RuleError> {
        if self.builder.dtype(x) == dtype {
            return Ok(x);
        }
        self.elementwise(Expr::In(0).cast(dtype), &[x], dtype)
    }

    /// A reduction over axes.
    pub fn reduce(
        &mut self,
        kind: &str,
        x: ContainerId,
        axes: &[usize],
        keep: bool,
    ) -> Result<ContainerId, RuleError> {
        if axes.is_empty() {
            return Ok(x);
        }
        let a = attrs([
            ("kind", Attr::Str(kind.into())),
            ("axes", Attr::Ints(axes.iter().map(|a| *a as i64).collect())),
            ("keep", Attr::Bool(keep)),
        ]);
        self.op1("reduce", &[x], a)
    }

    /// The value with its dimensions in another order.
    pub fn permute(&mut self, x: ContainerId, order: Vec<i64>) -> Result<ContainerId, RuleError> {
        if order.iter().enumerate().all(|(i, o)| i as i64 == *o) {
            return Ok(x);
        }
        self.op1("permute", &[x], attrs([("order", Attr::Ints(order))]))
    }

    /// The seed, and a number that tells this place of the model from others that draw.
    ///
    /// # Errors
    /// If an operator has more places than have numbers.
    pub fn random_place(&mut self) -> Result<(ContainerId, i64), RuleError> {
        let n_places = self.random.n_places.entry(self.node.draw).or_insert(0);
        if self.node.draw.is_some() && *n_places == PLACES {
            return Err(RuleError::Unsupported(format!(
                "more than {PLACES} random places"
            )));
        }
        let place = self.node.draw.unwrap_or(0) * PLACES + *n_places;
        *n_places += 1;
        let graph = &mut *self.builder.graph;
        let seed = *self.random.seed.get_or_insert_with(|| {
            let seed = graph.add_transient("seed", DType::I64, vec![]);
            graph.container_mut(seed).lifetime = graph::Lifetime::Input;
            seed
        });
        Ok((seed, place))
    }

    /// A uniform random number in [0, 1) for each element of a result of shape `shape`, the same along
    /// dimensions of size 1, as an expression. Its key is read from the seed, input `seed_input` of the operator.
    /// Keys are made as in the operator `dropout`.
    ///
    /// # Errors
    /// As [`Site::random_place`].
    pub fn uniform(
        &mut self,
        shape: &[SymExpr],
        seed_input: usize,
    ) -> Result<(Expr, ContainerId), RuleError> {
        let (seed, place) = self.random_place()?;
        let key = Expr::In(seed_input).add(Expr::int(place << 32));
        let mut at = SymExpr::constant(0);
        let wide = shape.iter().enumerate();
        for (d, size) in wide.filter(|(_, size)| size.as_const() != Some(1)) {
            at = at * size.clone() + element_index(d);
        }
        let uniform = Expr::Uniform(key.into(), Expr::Index(at).into());
        Ok((uniform, seed))
    }
}

/// The index of an element-wise operator's result along a dimension.
pub(crate) fn element_index(dim: usize) -> SymExpr {
    SymExpr::symbol(Symbol::new(format!("i{dim}")))
}

/// The element type of PyTorch's name.
pub(crate) fn dtype_of(name: &str) -> Option<DType> {
    Some(match name {
        "bool" => DType::Bool,
        "uint8" => DType::U8,
        "int8" => DType::I8,
        "int16" => DType::I16,
        "int32" => DType::I32,
        "int64" => DType::I64,
        "float16" => DType::F16,
        "bfloat16" => DType::BF16,
        "float32" => DType::F32,
        "float64" => DType::F64,
        _ => return None,
    })
}

/// A shape as the document writes it.
pub(crate) fn shape_of(list: &[Value]) -> Option<Vec<SymExpr>> {
    list.iter().map(size_of).collect()
}

fn size_of(value: &Value) -> Option<SymExpr> {
    if let Some(i) = value.as_i64() {
        return Some(SymExpr::constant(i));
    }
    if let Some(name) = value.as_str() {
        return Some(SymExpr::symbol(name));
    }
    let (op, operands) = value.as_array()?.split_first()?;
    let operands: Option<Vec<SymExpr>> = operands.iter().map(size_of).collect();
    let mut operands = operands?.into_iter();
    let first = operands.next()?;
    Some(operands.fold(first, |a, b| match op.as_str() {
        Some("add") => a + b,
        Some("mul") => a * b,
        Some("pow") => {
            let times = b.as_const().unwrap_or(1).max(0) as usize;
            SymExpr::product(std::iter::repeat_n(&a, times))
        }
        Some("floordiv") => a.floor_div(&b),
        Some("mod") => a.modulo(&b),
        Some("max") => a.max_with(&b),
        Some("min") => a.min_with(&b),
        _ => a,
    }))
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Bool(b) => Some(f64::from(u8::from(*b))),
        Value::Number(n) => n.as_f64(),
        Value::Object(o) => match o.get("float")?.as_str()? {
            "inf" => Some(f64::INFINITY),
            "-inf" => Some(f64::NEG_INFINITY),
            _ => Some(f64::NAN),
        },
        _ => None,
    }
}
