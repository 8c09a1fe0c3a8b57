//! What an operator is: the trait, the facts a rule may ask for, and its errors.

use graph::{
    Attr, Attrs, Builder, ContainerId, DType, Expr, Graph, Library, Memlet, SymExpr, Tasklet,
    Tensor,
};

/// Element type and shape of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Logical sizes, outermost first.
    pub shape: Vec<SymExpr>,
}

impl TensorType {
    /// A type.
    pub fn new(dtype: DType, shape: Vec<SymExpr>) -> Self {
        TensorType { dtype, shape }
    }
    /// A type with constant sizes.
    pub fn fixed(dtype: DType, shape: &[i64]) -> Self {
        Self::new(dtype, crate::shape_rules::fixed(shape))
    }
    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }
}

/// Why an operator refuses.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OpError {
    /// The registry has no operator of this name.
    #[error("operator `{0}` is not known; see `ops::registry` for those that are")]
    Unknown(String),
    /// An input is missing.
    #[error("`{op}` needs input {position}, which is absent")]
    MissingInput {
        /// Operator.
        op: String,
        /// Position among the inputs.
        position: usize,
    },
    /// An attribute is missing or of the wrong kind.
    #[error("`{op}` needs attribute `{attr}` ({expected})")]
    Attr {
        /// Operator.
        op: String,
        /// Attribute.
        attr: String,
        /// What it should be.
        expected: &'static str,
    },
    /// Shapes do not fit.
    #[error("`{op}`: {message}")]
    Shape {
        /// Operator.
        op: String,
        /// What was expected and what was found.
        message: String,
    },
    /// A case the operator does not handle.
    #[error("`{op}` does not support {what}")]
    Unsupported {
        /// Operator.
        op: String,
        /// The case.
        what: String,
    },
}

/// A library node with the types of its inputs: what every rule of an operator receives.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The node.
    pub library: &'a Library,
    /// Types of its inputs, `None` where absent.
    pub inputs: Vec<Option<TensorType>>,
}

impl<'a> Call<'a> {
    /// The call a node of `graph` makes.
    pub fn of(graph: &Graph, library: &'a Library) -> Self {
        let type_of = |id: &Option<ContainerId>| {
            id.map(|id| {
                let c = graph.container(id);
                TensorType::new(c.dtype, c.shape.clone())
            })
        };
        Call {
            library,
            inputs: library.inputs.iter().map(type_of).collect(),
        }
    }

    /// Type of a required input.
    ///
    /// # Errors
    /// The input is absent.
    pub fn input(&self, position: usize) -> Result<&TensorType, OpError> {
        self.inputs
            .get(position)
            .and_then(Option::as_ref)
            .ok_or_else(|| OpError::MissingInput {
                op: self.library.op.clone(),
                position,
            })
    }

    /// Container of a required input.
    ///
    /// # Errors
    /// The input is absent.
    pub fn input_id(&self, position: usize) -> Result<ContainerId, OpError> {
        self.optional_id(position)
            .ok_or_else(|| OpError::MissingInput {
                op: self.library.op.clone(),
                position,
            })
    }

    /// Container of an optional input.
    pub fn optional_id(&self, position: usize) -> Option<ContainerId> {
        self.library.inputs.get(position).copied().flatten()
    }

    /// Container of an output somebody needs.
    pub fn output_id(&self, position: usize) -> Option<ContainerId> {
        self.library.outputs.get(position).copied().flatten()
    }

    fn attr_error(&self, attr: &str, expected: &'static str) -> OpError {
        OpError::Attr {
            op: self.library.op.clone(),
            attr: attr.to_string(),
            expected,
        }
    }

    /// A shape error of this operator.
    pub fn shape_error(&self, message: impl Into<String>) -> OpError {
        OpError::Shape {
            op: self.library.op.clone(),
            message: message.into(),
        }
    }

    /// A refusal of this operator.
    pub fn unsupported(&self, what: impl Into<String>) -> OpError {
        OpError::Unsupported {
            op: self.library.op.clone(),
            what: what.into(),
        }
    }
}

macro_rules! attr_getters {
    ($($name:ident, $or:ident, $kind:ident, $ty:ty, $what:literal;)*) => { impl Call<'_> { $(
        #[doc = concat!("Attribute `attr`, ", $what, ".\n\n# Errors\nIt is absent or of another kind.")]
        pub fn $name(&self, attr: &str) -> Result<$ty, OpError> {
            match self.library.attrs.get(attr) {
                Some(Attr::$kind(v)) => Ok(v.clone()),
                _ => Err(self.attr_error(attr, $what)),
            }
        }
        #[doc = concat!("Attribute `attr`, ", $what, ", or `default` where it is absent.\n\n# Errors\nIt is of another kind.")]
        pub fn $or(&self, attr: &str, default: $ty) -> Result<$ty, OpError> {
            match self.library.attrs.get(attr) {
                None => Ok(default),
                Some(_) => self.$name(attr),
            }
        }
    )* } };
}
attr_getters! {
    int, int_or, Int, i64, "an integer";
    float, float_or, Float, f64, "a real number";
    bool, bool_or, Bool, bool, "a truth value";
    str, str_or, Str, String, "a text";
    ints, ints_or, Ints, Vec<i64>, "a list of integers";
    sizes, sizes_or, Sizes, Vec<SymExpr>, "a list of sizes";
    dtype, dtype_or, DType, DType, "an element type";
    expr, expr_or, Expr, Expr, "a scalar expression";
}

/// How an operator is differentiated.
#[derive(Clone, Debug, PartialEq)]
pub enum Gradient {
    /// The rule appended nodes; for each input its gradient, `None` where it is zero or not wanted.
    Rule(Vec<Option<ContainerId>>),
    /// Differentiate the operator's expansion.
    Derive,
    /// No derivative exists (integer or boolean results): gradients are zero.
    Zero,
}

/// What a gradient rule receives.
#[derive(Clone, Debug)]
pub struct GradientCall<'a> {
    /// The forward node.
    pub call: Call<'a>,
    /// Gradient of the loss with respect to each output; `None` where zero.
    pub output_gradients: &'a [Option<ContainerId>],
    /// Which inputs' gradients are wanted.
    pub wanted: &'a [bool],
}

impl GradientCall<'_> {
    /// Gradient of output `position`; `None` where zero.
    pub fn dy(&self, position: usize) -> Option<ContainerId> {
        self.output_gradients.get(position).copied().flatten()
    }

    /// Whether the gradient of input `position` is wanted and can exist (the input is a float).
    pub fn wants(&self, position: usize) -> bool {
        let float = |t: &TensorType| t.dtype.is_float();
        let input = self.call.inputs.get(position).and_then(Option::as_ref);
        self.wanted.get(position).copied().unwrap_or(false) && input.is_some_and(float)
    }

    /// The forward value of output `position`.
    ///
    /// # Errors
    /// The forward node does not make it.
    pub fn output(&self, position: usize) -> Result<ContainerId, OpError> {
        self.call.output_id(position).ok_or_else(|| {
            self.call.shape_error(format!(
                "the gradient needs output {position}, which is absent"
            ))
        })
    }

    /// No input gets a gradient.
    pub fn nothing(&self) -> Gradient {
        Gradient::Rule(vec![None; self.call.inputs.len()])
    }

    /// Gives a gradient to input `position` only.
    pub fn only(&self, position: usize, gradient: ContainerId) -> Gradient {
        let mut all = vec![None; self.call.inputs.len()];
        all[position] = Some(gradient);
        Gradient::Rule(all)
    }
}

/// One case from which an operator's tests are generated.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What the case is about.
    pub name: String,
    /// Input types with constant shapes; `None` for an absent input.
    pub inputs: Vec<Option<TensorType>>,
    /// Attributes.
    pub attrs: Attrs,
    /// Inputs where they must not be random (indices, probabilities), by position.
    pub values: Vec<(usize, Tensor)>,
    /// Range of random float inputs, kept off points where the operator has no derivative.
    pub range: (f64, f64),
    /// Whether gradients are compared with finite differences.
    pub differentiable: bool,
}

impl Sample {
    /// A differentiable case: `f32` inputs of those shapes, random in [−2, 2].
    pub fn new(name: &str, inputs: &[&[i64]], attrs: Attrs) -> Self {
        let input = |shape: &&[i64]| Some(TensorType::fixed(DType::F32, shape));
        Sample {
            name: name.to_string(),
            inputs: inputs.iter().map(input).collect(),
            attrs,
            values: Vec::new(),
            range: (-2.0, 2.0),
            differentiable: true,
        }
    }

    /// Sets another range of random inputs.
    pub fn range(mut self, low: f64, high: f64) -> Self {
        self.range = (low, high);
        self
    }

    /// Gives one input a value (and its type); positions up to it that are missing become absent.
    pub fn value(mut self, position: usize, value: Tensor) -> Self {
        let shape = value.shape.iter().map(|n| SymExpr::from(*n)).collect();
        if self.inputs.len() <= position {
            self.inputs.resize(position + 1, None);
        }
        self.inputs[position] = Some(TensorType::new(value.dtype, shape));
        self.values.push((position, value));
        self
    }

    /// Gives one input another element type.
    pub fn dtype(mut self, position: usize, dtype: DType) -> Self {
        if let Some(Some(input)) = self.inputs.get_mut(position) {
            input.dtype = dtype;
        }
        self
    }

    /// Makes one input absent.
    pub fn without(mut self, position: usize) -> Self {
        if self.inputs.len() <= position {
            self.inputs.resize(position + 1, None);
        }
        self.inputs[position] = None;
        self
    }

    /// Gradients are not compared.
    pub fn not_differentiable(mut self) -> Self {
        self.differentiable = false;
        self
    }
}

/// An operator family member. One value for each name in the registry.
pub trait Op: Sync {
    /// The name library nodes use.
    fn name(&self) -> &'static str;

    /// Types of all outputs.
    ///
    /// # Errors
    /// Missing inputs or attributes, shapes that do not fit.
    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError>;

    /// Reference meaning, in double precision; independent of the expansion.
    ///
    /// # Errors
    /// As [`Op::infer`].
    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError>;

    /// Appends the operator rewritten as maps (or simpler operators) that write the node's outputs.
    ///
    /// # Errors
    /// As [`Op::infer`].
    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError>;

    /// Appends the gradient of the operator; by default it is derived from the expansion.
    ///
    /// # Errors
    /// As [`Op::infer`].
    fn gradient(&self, _call: &GradientCall, _builder: &mut Builder) -> Result<Gradient, OpError> {
        Ok(Gradient::Derive)
    }

    /// Whether an output of a node has a gradient. One that has none is there for the operator's own gradient only.
    fn has_gradient(&self, _library: &Library, _output: usize) -> bool {
        true
    }

    /// Whether two equal calls may give different results.
    fn is_random(&self) -> bool {
        false
    }

    /// Whether the result is the same bytes, or a rearrangement of them: cheap to recompute.
    fn is_movement(&self) -> bool {
        false
    }

    /// Cases for the generated tests.
    fn samples(&self) -> Vec<Sample>;
}

/// Appending operators by name, with shapes inferred.
pub trait OpBuilder {
    /// Appends `op` and returns its outputs.
    ///
    /// # Errors
    /// Unknown operator, missing inputs or attributes, shapes that do not fit.
    fn op(
        &mut self,
        op: &str,
        inputs: &[Option<ContainerId>],
        attrs: Attrs,
    ) -> Result<Vec<ContainerId>, OpError>;

    /// Appends `op` with only the outputs that are wanted; the others have no container.
    ///
    /// # Errors
    /// As [`OpBuilder::op`].
    fn op_for(
        &mut self,
        op: &str,
        inputs: &[Option<ContainerId>],
        attrs: Attrs,
        wanted: &[bool],
    ) -> Result<Vec<Option<ContainerId>>, OpError>;

    /// Appends an operator with one output and no absent input.
    ///
    /// # Errors
    /// As [`OpBuilder::op`].
    fn op1(
        &mut self,
        op: &str,
        inputs: &[ContainerId],
        attrs: Attrs,
    ) -> Result<ContainerId, OpError> {
        let inputs: Vec<_> = inputs.iter().map(|i| Some(*i)).collect();
        Ok(self.op(op, &inputs, attrs)?[0])
    }

    /// Appends `expr` applied element by element to broadcast inputs.
    ///
    /// # Errors
    /// As [`OpBuilder::op`].
    fn elementwise(&mut self, expr: Expr, inputs: &[ContainerId]) -> Result<ContainerId, OpError> {
        self.op1("elementwise", inputs, attrs([("expr", Attr::Expr(expr))]))
    }

    /// Appends a map over `shape` with parameters `i0, i1, …` whose target is not the plain indices
    /// (a part of a container, a scatter); `memlets` gives reads and the write.
    fn map_into(
        &mut self,
        shape: &[SymExpr],
        expr: Expr,
        memlets: impl FnOnce(&[SymExpr]) -> (Vec<Memlet>, Memlet),
    );
}

impl OpBuilder for Builder<'_> {
    fn op(
        &mut self,
        op: &str,
        inputs: &[Option<ContainerId>],
        attrs: Attrs,
    ) -> Result<Vec<ContainerId>, OpError> {
        let outputs = append(self, op, inputs, attrs, &|_| true)?;
        Ok(outputs.into_iter().flatten().collect())
    }

    fn map_into(
        &mut self,
        shape: &[SymExpr],
        expr: Expr,
        memlets: impl FnOnce(&[SymExpr]) -> (Vec<Memlet>, Memlet),
    ) {
        let names: Vec<String> = (0..shape.len()).map(|d| format!("i{d}")).collect();
        let named = names.iter().map(String::as_str).zip(shape.iter().cloned());
        self.map(&named.collect::<Vec<_>>(), |i| {
            let (inputs, target) = memlets(i);
            Tasklet {
                inputs,
                outputs: vec![(target, expr)],
            }
        });
    }

    fn op_for(
        &mut self,
        op: &str,
        inputs: &[Option<ContainerId>],
        attrs: Attrs,
        wanted: &[bool],
    ) -> Result<Vec<Option<ContainerId>>, OpError> {
        append(self, op, inputs, attrs, &|n| wanted.get(n) == Some(&true))
    }
}

fn append(
    builder: &mut Builder,
    op: &str,
    inputs: &[Option<ContainerId>],
    attrs: Attrs,
    wanted: &dyn Fn(usize) -> bool,
) -> Result<Vec<Option<ContainerId>>, OpError> {
    let rule = crate::registry::find(op)?;
    let mut library = Library {
        op: op.to_string(),
        attrs,
        inputs: inputs.to_vec(),
        outputs: Vec::new(),
    };
    let types = rule.infer(&Call::of(builder.graph, &library))?;
    let base = if builder.origin.node.is_empty() {
        op
    } else {
        &builder.origin.node
    }
    .to_string();
    let output = |(n, t): (usize, &TensorType)| {
        wanted(n).then(|| builder.transient(&base, t.dtype, &t.shape))
    };
    library.outputs = types.iter().enumerate().map(output).collect();
    let outputs = library.outputs.clone();
    builder.library(library);
    Ok(outputs)
}

/// Attributes from a list: `attrs([("axis", Attr::Int(1))])`.
pub fn attrs<const N: usize>(list: [(&str, Attr); N]) -> Attrs {
    list.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
}
