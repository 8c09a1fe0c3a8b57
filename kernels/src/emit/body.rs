//! A kernel's body in the form the emitter works on: loops, statements, places in memory.
//!
//! Owns the step from a map of the graph to [`Kernel`]: sizes become numbers, memlets become
//! element offsets, containers local to the kernel shrink to what one outer point needs. Never
//! decides an order of loops or what runs in parallel.

use super::index::{self, Extents, Loop};
use super::merge::same_point;
use crate::lower::LowerError;
use graph::{
    Container, ContainerId, DType, Expr, Graph, Index, Lifetime, Map, Memlet, Node, NodeKind,
    Reduction, Scalar, Schedule, Storage, SymExpr, Symbol, Tasklet,
};
use std::collections::{BTreeMap, BTreeSet};

/// A dimension indexed by data.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gather {
    /// Position among the statement's reads of the index value.
    pub read: usize,
    /// Elements between neighbours.
    pub stride: i64,
    /// Bound of the index.
    pub size: i64,
}

/// A condition `0 <= index < size`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Guard {
    /// The index.
    pub index: SymExpr,
    /// Its bound.
    pub size: i64,
}

/// An element of a container, as a function of the loops.
#[derive(Clone, Debug, PartialEq)]
pub struct ElementAccess {
    /// The container accessed (views are not resolved here).
    pub container: ContainerId,
    /// Offset in elements, without the gathered dimensions.
    pub offset: SymExpr,
    /// Dimensions indexed by data.
    pub gather: Vec<Gather>,
    /// What must hold for the element to exist; empty if it always does.
    pub guards: Vec<Guard>,
    /// The value read where a guard fails; for writes, whether guards may fail.
    pub fill: Option<Scalar>,
}

/// `place (conflict)= expr`.
#[derive(Clone, Debug, PartialEq)]
pub struct Write {
    /// What is written.
    pub place: ElementAccess,
    /// How it is joined with what is there; `None`: it replaces the old value.
    pub conflict: Option<Reduction>,
    /// Loops whose different values write different elements.
    pub owned: BTreeSet<Symbol>,
    /// The value, from the reads of the statement.
    pub expr: Expr,
}

/// A tasklet.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// What is read, in the order of the expressions' inputs.
    pub reads: Vec<ElementAccess>,
    /// What is written.
    pub writes: Vec<Write>,
}

/// Loops around statements, or around further nests run in sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Nest {
    /// The loops, outermost first.
    pub loops: Vec<Loop>,
    /// What they run.
    pub body: Body,
}

/// See [`Nest`].
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Statements in order.
    Leaf(Vec<Statement>),
    /// Nests, one after the other.
    Phases(Vec<Nest>),
}

/// What the emitter must know about a container.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Its element type.
    pub dtype: DType,
    /// Elements: of the whole container, or of a local one's part for one outer point.
    pub len: i64,
    /// Lives inside the kernel.
    pub local: bool,
    /// The value of a constant of one element.
    pub literal: Option<Scalar>,
    /// The container's own type, where this kernel keeps it in its workspace, in single precision,
    /// until all of it is summed.
    pub rounded_to: Option<DType>,
}

/// A kernel before scheduling.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Points of these loops are independent but for reductions into shared containers.
    pub outer: Vec<Loop>,
    /// What runs at each point, in order.
    pub phases: Vec<Nest>,
    /// The containers that it touches.
    pub arrays: BTreeMap<ContainerId, Array>,
    /// The sizes of all loops.
    pub extents: Extents,
}

/// Reads a top-level map. With `promote`, containers local to the kernel are treated as shared ones
/// (used when the phases become launches of their own).
///
/// Half-precision elements are widened where they are loaded and rounded where they are stored;
/// containers local to a kernel hold single precision.
pub fn kernel_of(graph: &Graph, node: &Node, promote: bool) -> Result<Kernel, LowerError> {
    let NodeKind::Map(map) = &node.kind else {
        return Err(LowerError::NotAMap {
            origin: node.origin.to_string(),
        });
    };
    let mut reader = Reader {
        graph,
        node,
        promote,
        rename: BTreeMap::new(),
        outer: BTreeSet::new(),
        point_dims: BTreeMap::new(),
        arrays: BTreeMap::new(),
        extents: Extents::default(),
        taken: BTreeMap::new(),
    };
    let (outer, nodes) = if map.schedule == Schedule::Kernel {
        let outer = reader.enter(map)?;
        (outer, map.body.as_slice())
    } else {
        (Vec::new(), std::slice::from_ref(node))
    };
    reader.outer = outer.iter().map(|l| l.var.clone()).collect();
    reader.find_point_dims(nodes);
    let phases = reader.nests(nodes)?;
    Ok(Kernel {
        outer,
        phases,
        arrays: reader.arrays,
        extents: reader.extents,
    })
}

struct Reader<'g> {
    graph: &'g Graph,
    node: &'g Node,
    promote: bool,
    /// Map parameters in scope by their names in the graph.
    rename: BTreeMap<Symbol, SymExpr>,
    outer: BTreeSet<Symbol>,
    /// The dimensions of local containers that are indexed by one outer parameter everywhere.
    point_dims: BTreeMap<ContainerId, Vec<Option<SymExpr>>>,
    arrays: BTreeMap<ContainerId, Array>,
    extents: Extents,
    taken: BTreeMap<String, i64>,
}

impl Reader<'_> {
    fn size(&self, e: &SymExpr) -> Result<i64, LowerError> {
        index::constant(e).ok_or_else(|| LowerError::UnboundSize {
            size: e.to_string(),
            origin: self.node.origin.to_string(),
        })
    }

    /// Brings a map's parameters into scope; those with one value become constants.
    fn enter(&mut self, map: &Map) -> Result<Vec<Loop>, LowerError> {
        let mut loops = Vec::new();
        for param in &map.params {
            let size = self.size(&param.size)?;
            if size < 1 {
                return Err(LowerError::EmptyRange {
                    param: param.name.to_string(),
                    origin: self.node.origin.to_string(),
                });
            }
            if size == 1 {
                self.rename.insert(param.name.clone(), SymExpr::default());
                continue;
            }
            let var = self.fresh(param.name.as_str(), size);
            self.extents.insert(&var, size);
            self.rename.insert(param.name.clone(), (&var).into());
            loops.push(Loop { var, size });
        }
        Ok(loops)
    }

    /// A C identifier. Maps side by side share names of equal extent, so that equal loops look equal.
    fn fresh(&mut self, name: &str, size: i64) -> Symbol {
        let base = c_identifier(name);
        let mut wanted = base.clone();
        let mut n = 1;
        while self.taken.get(&wanted).is_some_and(|s| *s != size) {
            n += 1;
            wanted = format!("{base}_{n}");
        }
        self.taken.insert(wanted.clone(), size);
        Symbol::new(wanted)
    }

    fn resolve(&self, e: &SymExpr) -> SymExpr {
        e.substitute(&|s| self.rename.get(s).cloned())
    }

    fn is_local(&self, container: &Container) -> bool {
        !self.promote && container.storage == Storage::Local
    }

    /// Finds the dimensions of local containers that vanish: those always indexed by the same outer parameter.
    fn find_point_dims(&mut self, nodes: &[Node]) {
        let mut dims: BTreeMap<ContainerId, Vec<Option<SymExpr>>> = BTreeMap::new();
        let mut visit = |m: &Memlet| {
            let container = self.graph.container(m.container);
            if !self.is_local(container) {
                return;
            }
            let here: Vec<Option<SymExpr>> = m.subset.iter().map(|i| self.outer_index(i)).collect();
            dims.entry(m.container)
                .and_modify(|known| {
                    for (k, h) in known.iter_mut().zip(&here) {
                        if k != h {
                            *k = None;
                        }
                    }
                })
                .or_insert(here);
        };
        for node in nodes {
            node.visit_tasklets(&mut |t| {
                t.inputs.iter().for_each(&mut visit);
                t.outputs.iter().for_each(|(m, _)| visit(m));
            });
        }
        self.point_dims = dims;
    }

    /// The index, if it is an outer parameter or constant zero.
    fn outer_index(&self, i: &Index) -> Option<SymExpr> {
        let Index::At(e) = i else { return None };
        let e = self.resolve(e);
        let outer = e.as_symbol().is_some_and(|s| self.outer.contains(s));
        (outer || e.is_zero()).then_some(e)
    }

    fn nests(&mut self, nodes: &[Node]) -> Result<Vec<Nest>, LowerError> {
        let mut nests: Vec<Nest> = Vec::new();
        for node in nodes {
            match &node.kind {
                NodeKind::Tasklet(t) => {
                    let statement = self.statement(t)?;
                    match nests.last_mut() {
                        // A leaf loads everything before it stores anything.
                        Some(Nest {
                            loops,
                            body: Body::Leaf(statements),
                        }) if loops.is_empty()
                            && statements
                                .iter()
                                .flat_map(|s| &s.writes)
                                .all(|w| same_point(w, &statement)) =>
                        {
                            statements.push(statement)
                        }
                        _ => nests.push(Nest {
                            loops: Vec::new(),
                            body: Body::Leaf(vec![statement]),
                        }),
                    }
                }
                NodeKind::Map(map) => nests.push(self.nest(map)?),
                NodeKind::Library(l) => {
                    return Err(LowerError::Library {
                        op: l.op.clone(),
                        origin: node.origin.to_string(),
                    });
                }
            }
        }
        Ok(nests)
    }

    fn nest(&mut self, map: &Map) -> Result<Nest, LowerError> {
        let outside = self.rename.clone();
        let mut loops = self.enter(map)?;
        let mut inner = self.nests(&map.body)?;
        self.rename = outside;
        if inner.len() == 1
            && let Some(only) = inner.pop()
        {
            loops.extend(only.loops);
            return Ok(Nest {
                loops,
                body: only.body,
            });
        }
        if loops.is_empty() && inner.is_empty() {
            return Ok(Nest {
                loops,
                body: Body::Leaf(Vec::new()),
            });
        }
        Ok(Nest {
            loops,
            body: Body::Phases(inner),
        })
    }

    fn statement(&mut self, tasklet: &Tasklet) -> Result<Statement, LowerError> {
        let mut reads = Vec::new();
        for m in &tasklet.inputs {
            reads.push(self.place(m)?);
        }
        let mut writes = Vec::new();
        for (m, expr) in &tasklet.outputs {
            let place = self.place(m)?;
            writes.push(Write {
                owned: self.owned(m),
                place,
                conflict: m.conflict,
                expr: self.resolve_expr(expr),
            });
        }
        Ok(Statement { reads, writes })
    }

    fn resolve_expr(&self, expr: &Expr) -> Expr {
        expr.map_leaves(&|leaf| match leaf {
            Expr::Index(e) => Some(match self.resolve(e) {
                e if e.as_const().is_some() => Expr::int(e.as_const().unwrap_or_default()),
                e => Expr::Index(e),
            }),
            _ => None,
        })
    }

    fn place(&mut self, memlet: &Memlet) -> Result<ElementAccess, LowerError> {
        let strides = self.array_strides(memlet)?;
        let container = self.graph.container(memlet.container);
        let (mut offset, mut gather, mut guards) = (SymExpr::default(), Vec::new(), Vec::new());
        for ((dim, index), stride) in memlet.subset.iter().enumerate().zip(strides) {
            let size = self.size(&container.shape[dim])?;
            match index {
                Index::At(e) => {
                    let e = self.resolve(e);
                    let (lo, hi) = self.extents.interval(&e);
                    if memlet.fill.is_some() && (lo < 0 || hi >= size) {
                        guards.push(Guard {
                            index: e.clone(),
                            size,
                        });
                    }
                    offset = offset + e * stride;
                }
                Index::Data(read) => gather.push(Gather {
                    read: *read,
                    stride,
                    size,
                }),
            }
        }
        Ok(ElementAccess {
            container: memlet.container,
            offset,
            gather,
            guards,
            fill: memlet.fill,
        })
    }

    /// Strides of the container as this kernel sees it; registers it.
    fn array_strides(&mut self, memlet: &Memlet) -> Result<Vec<i64>, LowerError> {
        let container = self.graph.container(memlet.container);
        let mut shape = Vec::new();
        for e in &container.shape {
            shape.push(self.size(e)?);
        }
        if shape.len() != memlet.subset.len() {
            return Err(LowerError::Rank {
                container: container.name.clone(),
                rank: shape.len(),
                indices: memlet.subset.len(),
                origin: self.node.origin.to_string(),
            });
        }
        let local = self.is_local(container);
        let mut strides = container.layout.strides(&shape);
        if local && let Some(vanish) = self.point_dims.get(&memlet.container) {
            let mut step = 1;
            for (d, gone) in vanish.iter().enumerate().rev() {
                strides[d] = if gone.is_some() { 0 } else { step };
                step *= if gone.is_some() { 1 } else { shape[d] };
            }
            shape = vec![step];
        }
        let literal = match &container.lifetime {
            Lifetime::Constant(t) if t.len() == 1 => Some(t.at(0)),
            _ => None,
        };
        let dtype = match container.dtype {
            DType::F16 | DType::BF16 if local => DType::F32,
            dtype => dtype,
        };
        self.arrays.entry(memlet.container).or_insert(Array {
            dtype,
            len: shape.iter().product(),
            local,
            literal,
            rounded_to: None,
        });
        Ok(strides)
    }

    /// Loops whose different values surely write different elements.
    fn owned(&self, memlet: &Memlet) -> BTreeSet<Symbol> {
        let mut owned = BTreeSet::new();
        for index in &memlet.subset {
            let Index::At(e) = index else { continue };
            let Some((mut terms, _)) = self.resolve(e).as_affine() else {
                continue;
            };
            // A mixed-radix number: every digit is smaller than the next one's weight.
            terms.sort_by_key(|(_, c)| c.abs());
            let mut reach = 0;
            let mut injective = true;
            for (s, c) in &terms {
                injective &= c.abs() > reach;
                reach += c.abs() * (self.extents.size(s) - 1);
            }
            if injective {
                owned.extend(terms.into_iter().map(|(s, _)| s));
            }
        }
        owned
    }
}

/// Keywords of C and of C++ (whose compilers read CUDA text), macros that GNU compilers define, and
/// names that emitted functions have.
const RESERVED: &str = "\
    auto break case char const continue default do double else enum extern float for goto if \
    inline int long register restrict return short signed sizeof static struct switch typedef \
    union unsigned void volatile while asm typeof \
    alignas alignof and and_eq bitand bitor bool catch class compl concept const_cast consteval \
    constexpr constinit co_await co_return co_yield decltype delete dynamic_cast explicit export \
    false friend mutable namespace new noexcept not not_eq nullptr operator or or_eq private \
    protected public reinterpret_cast requires static_assert static_cast template this \
    thread_local throw true try typeid typename using virtual wchar_t char8_t char16_t char32_t \
    xor xor_eq \
    linux unix i386 \
    buf scratch tid nt at value base elem lane live part point step first";

/// A C identifier that differs from all that the emitter makes itself (`t3`, `x0`, `p`).
fn c_identifier(name: &str) -> String {
    let clean: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    let generated = clean.len() > 1
        && clean.starts_with([
            't', 'x', 'a', 'l', 'g', 'p', 's', 'b', 'u', 'h', 'o', 'v', 'w', 'c', 'r',
        ])
        && clean[1..].chars().all(|c| c.is_ascii_digit());
    let digit = clean.starts_with(|c: char| c.is_ascii_digit());
    let double = ["sh_", "SH_", "ix_", "_"]
        .iter()
        .any(|p| clean.starts_with(p));
    if generated
        || digit
        || double
        || clean.len() == 1 && "ptxg".contains(&clean)
        || RESERVED.split(' ').any(|word| word == clean)
        || clean.is_empty()
    {
        return format!("i_{clean}");
    }
    clean
}
