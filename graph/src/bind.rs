//! Fixing sizes: which values the symbols have, and the graph with these values in their place.
//!
//! [`infer_bindings`] reads the values off the shapes of the caller's tensors; [`Graph::bind`] and
//! [`Graph::rewrite_sizes`] replace symbols everywhere a size can stand. Nothing else changes.

use crate::expr::Expr;
use crate::graph::{Attr, Block, ContainerId, Graph, Index, Memlet, Node, NodeKind};
use crate::size::{Bindings, SymExpr, Symbol};

/// Why sizes cannot be found from the caller's shapes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BindError {
    /// Not as many tensors as inputs.
    #[error("graph `{graph}` has {expected} inputs, {found} were given")]
    InputCount {
        /// Name of the graph.
        graph: String,
        /// Inputs of the graph.
        expected: usize,
        /// Tensors given.
        found: usize,
    },
    /// Another number of dimensions.
    #[error("input `{input}` has {expected} dimensions, a tensor with {found} was given")]
    Rank {
        /// Name of the container.
        input: String,
        /// Dimensions of the container.
        expected: usize,
        /// Dimensions given.
        found: usize,
    },
    /// A dimension that does not fit.
    #[error(
        "dimension {dimension} of input `{input}` must be {size}{}, but is {found}",
        .expected.map(|n| format!(" = {n}")).unwrap_or_default()
    )]
    Dimension {
        /// Name of the container.
        input: String,
        /// Position of the dimension.
        dimension: usize,
        /// Its size in the graph.
        size: SymExpr,
        /// Value of that size as far as known from other dimensions.
        expected: Option<i64>,
        /// Size given.
        found: i64,
    },
    /// A symbol no input's shape determines.
    #[error("size `{0}` does not follow from the shapes of the inputs; give it explicitly")]
    Undetermined(Symbol),
}

/// Values of all symbols of the graph, from the shapes of its inputs in the order of
/// [`Graph::inputs`].
///
/// # Errors
/// Shapes that do not fit (naming input and dimension), or symbols that stay unknown.
pub fn infer_bindings(graph: &Graph, shapes: &[Vec<usize>]) -> Result<Bindings, BindError> {
    complete_bindings(graph, shapes, &Bindings::new())
}

/// Like [`infer_bindings`], with some values `given`.
///
/// # Errors
/// As [`infer_bindings`].
pub fn complete_bindings(
    graph: &Graph,
    shapes: &[Vec<usize>],
    given: &Bindings,
) -> Result<Bindings, BindError> {
    if shapes.len() != graph.inputs.len() {
        return Err(BindError::InputCount {
            graph: graph.name.clone(),
            expected: graph.inputs.len(),
            found: shapes.len(),
        });
    }
    let mut open = dimensions(graph, shapes)?;
    let mut bindings = given.clone();
    // A dimension such as `seq + 1` determines a symbol; `a*b` only checks, once both are known.
    loop {
        let before = open.len();
        let mut later = Vec::new();
        for d in open {
            if !d.settle(graph, &mut bindings)? {
                later.push(d);
            }
        }
        open = later;
        if open.len() == before {
            break;
        }
    }
    match graph.symbols.iter().find(|s| !bindings.contains_key(s)) {
        Some(s) => Err(BindError::Undetermined(s.clone())),
        None => Ok(bindings),
    }
}

/// One dimension of one input, with the size given for it.
struct Dimension {
    input: ContainerId,
    position: usize,
    size: SymExpr,
    found: i64,
}

fn dimensions(graph: &Graph, shapes: &[Vec<usize>]) -> Result<Vec<Dimension>, BindError> {
    let mut all = Vec::new();
    for (id, shape) in graph.inputs.iter().zip(shapes) {
        let container = graph.container(*id);
        if container.shape.len() != shape.len() {
            return Err(BindError::Rank {
                input: container.name.clone(),
                expected: container.shape.len(),
                found: shape.len(),
            });
        }
        for (position, (size, found)) in container.shape.iter().zip(shape).enumerate() {
            all.push(Dimension {
                input: *id,
                position,
                size: size.clone(),
                found: *found as i64,
            });
        }
    }
    Ok(all)
}

impl Dimension {
    /// Checks the dimension or learns a symbol from it; `false` if more must be known first.
    fn settle(&self, graph: &Graph, bindings: &mut Bindings) -> Result<bool, BindError> {
        let size = self.size.bind(bindings);
        if let Some(expected) = size.as_const() {
            if expected != self.found {
                return Err(self.mismatch(graph, Some(expected)));
            }
            return Ok(true);
        }
        let Some((linear, constant)) = size.as_affine() else {
            return Ok(false);
        };
        let [(symbol, factor)] = linear.as_slice() else {
            return Ok(false);
        };
        let rest = self.found - constant;
        if rest % factor != 0 || rest / factor < 1 {
            return Err(self.mismatch(graph, None));
        }
        bindings.insert(symbol.clone(), rest / factor);
        Ok(true)
    }

    fn mismatch(&self, graph: &Graph, expected: Option<i64>) -> BindError {
        BindError::Dimension {
            input: graph.container(self.input).name.clone(),
            dimension: self.position,
            size: self.size.clone(),
            expected: expected.filter(|_| self.size.as_const().is_none()),
            found: self.found,
        }
    }
}

impl Graph {
    /// The graph with the bound symbols replaced by their values everywhere: shapes, map sizes,
    /// subsets, index expressions, attributes, loop counts. Bound symbols leave [`Graph::symbols`].
    pub fn bind(&self, bindings: &Bindings) -> Graph {
        let mut bound = self.clone();
        bound.rewrite_sizes(&|size| size.bind(bindings));
        bound.symbols.retain(|s| !bindings.contains_key(s));
        bound
    }

    /// Replaces every size and index expression by `rewrite` of it.
    pub fn rewrite_sizes(&mut self, rewrite: &dyn Fn(&SymExpr) -> SymExpr) {
        for container in &mut self.containers {
            for size in &mut container.shape {
                *size = rewrite(size);
            }
        }
        rewrite_blocks(&mut self.body, rewrite);
    }
}

fn rewrite_blocks(blocks: &mut [Block], rewrite: &dyn Fn(&SymExpr) -> SymExpr) {
    for block in blocks {
        match block {
            Block::State(s) => s.nodes.iter_mut().for_each(|n| n.rewrite_sizes(rewrite)),
            Block::Loop(l) => {
                l.count = rewrite(&l.count);
                rewrite_blocks(&mut l.body, rewrite);
            }
            Block::Branch(b) => {
                rewrite_blocks(&mut b.then, rewrite);
                rewrite_blocks(&mut b.otherwise, rewrite);
            }
        }
    }
}

impl Node {
    /// Replaces every size and index expression in the node by `rewrite` of it.
    pub fn rewrite_sizes(&mut self, rewrite: &dyn Fn(&SymExpr) -> SymExpr) {
        match &mut self.kind {
            NodeKind::Library(library) => {
                for attr in library.attrs.values_mut() {
                    match attr {
                        Attr::Sizes(sizes) => {
                            sizes.iter_mut().for_each(|s| *s = rewrite(s));
                        }
                        Attr::Expr(e) => *e = e.rewrite_sizes(rewrite),
                        _ => {}
                    }
                }
            }
            NodeKind::Map(map) => {
                for param in &mut map.params {
                    param.size = rewrite(&param.size);
                }
                map.body.iter_mut().for_each(|n| n.rewrite_sizes(rewrite));
            }
            NodeKind::Tasklet(tasklet) => {
                for memlet in &mut tasklet.inputs {
                    memlet.rewrite_sizes(rewrite);
                }
                for (memlet, e) in &mut tasklet.outputs {
                    memlet.rewrite_sizes(rewrite);
                    *e = e.rewrite_sizes(rewrite);
                }
            }
        }
    }
}

impl Memlet {
    /// Replaces every index expression by `rewrite` of it.
    pub fn rewrite_sizes(&mut self, rewrite: &dyn Fn(&SymExpr) -> SymExpr) {
        for index in &mut self.subset {
            if let Index::At(e) = index {
                *e = rewrite(e);
            }
        }
    }
}

impl Expr {
    /// The expression with every [`Expr::Index`] replaced by `rewrite` of it.
    pub fn rewrite_sizes(&self, rewrite: &dyn Fn(&SymExpr) -> SymExpr) -> Expr {
        self.map_leaves(&|leaf| match leaf {
            Expr::Index(i) => Some(Expr::Index(rewrite(i))),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Lifetime, Stage};
    use std::sync::Arc;

    fn s(name: &str) -> SymExpr {
        SymExpr::symbol(name)
    }

    fn graph() -> Graph {
        let mut g = Graph::new("g");
        g.symbols = vec!["batch".into(), "seq".into()];
        let x = g.add_input(
            "x",
            DType::F32,
            vec![s("batch") * s("seq"), 4.into()],
            Lifetime::Input,
        );
        g.add_input(
            "mask",
            DType::F32,
            vec![s("batch"), s("seq") * 2 + 1],
            Lifetime::Input,
        );
        let y = g.add_transient("y", DType::F32, vec![s("batch") * s("seq"), 4.into()]);
        let shape = g.container(x).shape.clone();
        let mut b = crate::Builder::new(&mut g, Arc::default(), Stage::Forward);
        let scale = Expr::In(0).mul(Expr::Index(s("seq")));
        b.map_over(&shape, y, scale, |i| {
            vec![Memlet::new(x, i.iter().cloned())]
        });
        let nodes = b.nodes;
        g.last_state().nodes = nodes;
        g.add_output(y);
        g
    }

    #[test]
    fn shapes_determine_symbols_whatever_their_order() {
        let found = infer_bindings(&graph(), &[vec![6, 4], vec![2, 7]]).unwrap();
        assert_eq!(
            found,
            Bindings::from([("batch".into(), 2), ("seq".into(), 3)])
        );
    }

    #[test]
    fn a_mismatch_names_input_and_dimension() {
        let g = graph();
        let text = |shapes: &[Vec<usize>]| infer_bindings(&g, shapes).unwrap_err().to_string();
        assert_eq!(
            text(&[vec![5, 4], vec![2, 7]]),
            "dimension 0 of input `x` must be batch*seq = 6, but is 5"
        );
        assert_eq!(
            text(&[vec![6, 3], vec![2, 7]]),
            "dimension 1 of input `x` must be 4, but is 3"
        );
        assert_eq!(
            text(&[vec![6, 4], vec![2, 6]]),
            "dimension 1 of input `mask` must be 2*seq + 1, but is 6"
        );
        assert!(text(&[vec![6, 4]]).contains("2 inputs, 1 were given"));
        assert!(text(&[vec![6], vec![2, 7]]).contains("has 2 dimensions"));
    }

    #[test]
    fn an_undetermined_symbol_can_be_given() {
        let mut g = graph();
        g.symbols.push("heads".into());
        let shapes = [vec![6, 4], vec![2, 7]];
        assert_eq!(
            infer_bindings(&g, &shapes),
            Err(BindError::Undetermined("heads".into()))
        );
        let given = Bindings::from([("heads".into(), 8)]);
        assert_eq!(
            complete_bindings(&g, &shapes, &given).unwrap()[&"heads".into()],
            8
        );
    }

    #[test]
    fn binding_reaches_every_size() {
        let bound = graph().bind(&Bindings::from([("batch".into(), 2), ("seq".into(), 3)]));
        assert!(bound.symbols.is_empty());
        assert!(!format!("{bound:?}").contains("seq"), "{bound:?}");
    }
}
