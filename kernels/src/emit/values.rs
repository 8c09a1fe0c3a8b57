//! The values a leaf nest computes, each once.
//!
//! Owns the hash-consed table of loads and operations behind the statements of one leaf, with the
//! loop depth at which each value changes: a value is printed at its depth, so whatever does not
//! depend on an inner loop is computed outside it. Never prints.

use super::body::{Array, ElementAccess, Guard, Statement, Write};
use super::index::{Loop, mentions};
use graph::{Binary, ContainerId, DType, Expr, Reduction, Scalar, SymExpr, Unary};
use std::collections::{BTreeMap, BTreeSet};

/// Position in [`Values`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ValueId(pub usize);

/// Where a load or store goes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Address {
    /// The container.
    pub container: ContainerId,
    /// Offset in elements, without the gathered dimensions.
    pub offset: SymExpr,
    /// Index values with stride and bound.
    pub gather: Vec<(ValueId, i64, i64)>,
    /// What must hold for the element to exist.
    pub guards: Vec<Guard>,
    /// Loads: the value where a guard fails. With a fill, gathered indices are guarded too.
    pub fill: Option<Scalar>,
}

/// How a value is made.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Op {
    /// A constant.
    Const(Scalar),
    /// An element of a container.
    Load(Address),
    /// A position of the loops, as a number.
    Index(SymExpr),
    /// A function of one value.
    Unary(Unary, ValueId),
    /// A function of two values, which both have this type.
    Binary(Binary, DType, ValueId, ValueId),
    /// The second value where the first holds, the third elsewhere.
    Select(ValueId, ValueId, ValueId),
    /// A value converted to the type of this one.
    Cast(ValueId),
    /// A random number in [0, 1) from a seed and an index.
    Uniform(ValueId, ValueId),
}

impl Op {
    /// The values it is made of.
    pub fn operands(&self) -> Vec<ValueId> {
        match self {
            Op::Const(_) | Op::Index(_) => Vec::new(),
            Op::Load(a) => a.gather.iter().map(|(v, ..)| *v).collect(),
            Op::Unary(_, a) | Op::Cast(a) => vec![*a],
            Op::Binary(_, _, a, b) | Op::Uniform(a, b) => vec![*a, *b],
            Op::Select(a, b, c) => vec![*a, *b, *c],
        }
    }
}

/// One value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Value {
    /// How it is made.
    pub op: Op,
    /// Its type.
    pub dtype: DType,
}

/// What a leaf does with a value at every iteration.
#[derive(Clone, Debug)]
pub struct Effect {
    /// Where it goes.
    pub address: Address,
    /// The value.
    pub value: ValueId,
    /// How it is joined with what is there.
    pub conflict: Option<Reduction>,
    /// The write of the statement that it comes from.
    pub write: Write,
}

/// The values and effects of one leaf.
#[derive(Clone, Debug, Default)]
pub struct Values {
    /// The values; each comes after those that it is made of.
    pub values: Vec<Value>,
    /// Depth by value: 0 outside the leaf's loops, `k` inside the `k`-th.
    pub depth: Vec<usize>,
    /// The effects, in order.
    pub effects: Vec<Effect>,
    /// Containers that are loaded from memory.
    pub loaded: BTreeSet<ContainerId>,
    known: BTreeMap<Value, ValueId>,
    /// Values stored in this iteration, to be used instead of loading them again.
    stored: BTreeMap<(ContainerId, SymExpr), ValueId>,
}

impl Values {
    /// Reads the statements of a leaf under `loops`, outermost first.
    pub fn new(
        loops: &[Loop],
        statements: &[Statement],
        arrays: &BTreeMap<ContainerId, Array>,
    ) -> Self {
        let mut table = Values::default();
        for s in statements {
            let builder = StatementValues {
                table: &mut table,
                loops,
                arrays,
            };
            builder.add(s);
        }
        table
    }

    /// The value.
    pub fn get(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// The value and all that it is made of.
    pub fn needed(&self, id: ValueId) -> BTreeSet<usize> {
        let mut needed = BTreeSet::new();
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            if needed.insert(id.0) {
                open.extend(self.get(id).op.operands());
            }
        }
        needed
    }

    /// The depth at which the value changes.
    pub fn depth_of(&self, id: ValueId) -> usize {
        self.depth[id.0]
    }

    fn intern(&mut self, op: Op, dtype: DType, depth: usize) -> ValueId {
        let value = Value { op, dtype };
        if let Some(id) = self.known.get(&value) {
            return *id;
        }
        let id = ValueId(self.values.len());
        self.known.insert(value.clone(), id);
        self.values.push(value);
        self.depth.push(depth);
        id
    }
}

/// Depth of an expression over loops: the position of the innermost one it mentions.
pub fn depth_of_index(e: &SymExpr, loops: &[Loop]) -> usize {
    let deepest = loops.iter().rposition(|l| mentions(e, &l.var));
    deepest.map_or(0, |at| at + 1)
}

/// Depth of an address: of its offset, its gathered indices and its guards.
pub fn depth_of_address(a: &Address, loops: &[Loop], values: &Values) -> usize {
    let guards = a.guards.iter().map(|g| depth_of_index(&g.index, loops));
    let gather = a.gather.iter().map(|(v, ..)| values.depth_of(*v));
    guards
        .chain(gather)
        .fold(depth_of_index(&a.offset, loops), usize::max)
}

/// The type that values of a container's type are computed in: half precision is for memory only.
pub fn arithmetic(dtype: DType) -> DType {
    dtype.arithmetic()
}

struct StatementValues<'a> {
    table: &'a mut Values,
    loops: &'a [Loop],
    arrays: &'a BTreeMap<ContainerId, Array>,
}

impl StatementValues<'_> {
    fn add(mut self, s: &Statement) {
        let mut read_types = Vec::new();
        for p in &s.reads {
            read_types.push(self.arrays[&p.container].dtype);
        }
        // An index value may be any read, also a later one: load on demand.
        let mut reads: Vec<Option<ValueId>> = vec![None; s.reads.len()];
        let mut effects = Vec::new();
        for w in &s.writes {
            for i in w.expr.inputs() {
                self.read(s, i, &mut reads);
            }
            let dtype = match w.conflict {
                // Sums of half-precision elements are rounded once, when they are stored.
                Some(_) => arithmetic(self.arrays[&w.place.container].dtype),
                None => self.arrays[&w.place.container].dtype,
            };
            let value = self.typed(&w.expr, dtype, &reads, &read_types);
            let address = self.address(s, &w.place, &mut reads);
            effects.push(Effect {
                address,
                value,
                conflict: w.conflict,
                write: w.clone(),
            });
        }
        for e in effects {
            if e.conflict.is_none() && e.address.gather.is_empty() && e.address.guards.is_empty() {
                let key = (e.address.container, e.address.offset.clone());
                self.table.stored.insert(key, e.value);
            }
            self.table.effects.push(e);
        }
    }

    fn read(&mut self, s: &Statement, i: usize, reads: &mut [Option<ValueId>]) -> ValueId {
        if let Some(Some(id)) = reads.get(i) {
            return *id;
        }
        let place = &s.reads[i];
        let id = self.load(s, place, reads);
        reads[i] = Some(id);
        id
    }

    fn load(
        &mut self,
        s: &Statement,
        place: &ElementAccess,
        reads: &mut [Option<ValueId>],
    ) -> ValueId {
        let array = &self.arrays[&place.container];
        if let Some(literal) = array.literal {
            return self.constant(literal.cast(array.dtype), arithmetic(array.dtype));
        }
        let address = self.address(s, place, reads);
        if address.gather.is_empty() && address.guards.is_empty() {
            let key = (address.container, address.offset.clone());
            if let Some(id) = self.table.stored.get(&key) {
                return *id;
            }
        }
        let depth = depth_of_address(&address, self.loops, self.table);
        self.table.loaded.insert(place.container);
        let dtype = array.dtype;
        self.table.intern(Op::Load(address), dtype, depth)
    }

    fn address(
        &mut self,
        s: &Statement,
        place: &ElementAccess,
        reads: &mut [Option<ValueId>],
    ) -> Address {
        let gather = place
            .gather
            .iter()
            .map(|g| {
                let index = self.read(s, g.read, reads);
                (self.cast(index, DType::I64), g.stride, g.size)
            })
            .collect();
        Address {
            container: place.container,
            offset: place.offset.clone(),
            gather,
            guards: place.guards.clone(),
            fill: place.fill,
        }
    }

    fn constant(&mut self, s: Scalar, dtype: DType) -> ValueId {
        self.table.intern(Op::Const(s.cast_on_x86(dtype)), dtype, 0)
    }

    fn cast(&mut self, id: ValueId, dtype: DType) -> ValueId {
        let from = self.table.get(id);
        if from.dtype == dtype {
            return id;
        }
        if let Op::Const(s) = from.op
            && arithmetic(dtype) == dtype
        {
            return self.constant(s, dtype);
        }
        let depth = self.table.depth_of(id);
        self.table.intern(Op::Cast(id), dtype, depth)
    }

    fn operation(&mut self, op: Op, dtype: DType, operands: &[ValueId]) -> ValueId {
        let depth = operands
            .iter()
            .map(|o| self.table.depth_of(*o))
            .max()
            .unwrap_or(0);
        self.table.intern(op, dtype, depth)
    }

    /// The expression's value as `dtype`. Constants become literals of the type they meet.
    fn typed(
        &mut self,
        e: &Expr,
        dtype: DType,
        reads: &[Option<ValueId>],
        types: &[DType],
    ) -> ValueId {
        let natural = arithmetic(e.natural_dtype(dtype, types));
        let id = match e {
            Expr::Const(s) => self.constant(*s, arithmetic(dtype)),
            Expr::In(i) => match reads.get(*i).copied().flatten() {
                Some(id) => id,
                // The expression names an input the tasklet lacks; the verifier refuses such graphs.
                None => self.constant(Scalar::Float(f64::NAN), natural),
            },
            Expr::Index(i) => {
                let depth = depth_of_index(i, self.loops);
                self.table.intern(Op::Index(i.clone()), DType::I64, depth)
            }
            Expr::Cast(to, a) => self.typed(a, *to, reads, types),
            Expr::Uniform(k, n) => {
                let k = self.typed(k, DType::I64, reads, types);
                let n = self.typed(n, DType::I64, reads, types);
                self.operation(Op::Uniform(k, n), DType::F32, &[k, n])
            }
            Expr::Unary(f, a) => {
                let of = match f {
                    Unary::Not => DType::Bool,
                    Unary::IsNan => arithmetic(a.natural_dtype(DType::F32, types)),
                    _ => natural,
                };
                let a = self.typed(a, of, reads, types);
                self.operation(Op::Unary(*f, a), natural, &[a])
            }
            Expr::Binary(f, a, b) => {
                let of = arithmetic(Expr::operand_dtype(*f, (a, b), natural, types));
                let a = self.typed(a, of, reads, types);
                let b = self.typed(b, of, reads, types);
                self.operation(Op::Binary(*f, of, a, b), natural, &[a, b])
            }
            Expr::Select(c, a, b) => {
                // A choice between integers is made in the type that is wanted: lanes stay narrow.
                let natural = if natural.is_int() && dtype.is_int() {
                    dtype
                } else {
                    natural
                };
                let c = self.typed(c, DType::Bool, reads, types);
                let a = self.typed(a, natural, reads, types);
                let b = self.typed(b, natural, reads, types);
                self.operation(Op::Select(c, a, b), natural, &[c, a, b])
            }
        };
        self.cast(id, dtype)
    }
}
