//! Concatenations of whole containers, read off the maps that copy their parts.
//!
//! Owns the one definition by which layouts and fusion recognize them. The stacked gradients of queries, keys and
//! values are such a concatenation. Never decides what becomes of them.

use crate::{ContainerId, Expr, Graph, Index, Map, Memlet, Node, NodeKind, Tasklet};

/// `whole[.., start + i, ..] = part[.., i, ..]` for parts that follow one another along an axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// What all parts together are.
    pub whole: ContainerId,
    /// The dimension of `whole` along which they follow one another.
    pub axis: usize,
    /// The parts in their order, each once.
    pub parts: Vec<Part>,
}

/// A part of a concatenation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The container that is copied.
    pub container: ContainerId,
    /// The part's dimension for each dimension of `whole`; `None` if the part has no such dimension, or one of size 1.
    pub dims: Vec<Option<usize>>,
    /// How many positions along the axis it takes.
    pub extent: i64,
}

impl Joined {
    /// The concatenation that a node is, if it is nothing else. Sizes must be numbers.
    pub fn of(graph: &Graph, node: &Node) -> Option<Joined> {
        let NodeKind::Map(group) = &node.kind else {
            return None;
        };
        if !group.params.is_empty() || group.body.len() < 2 {
            return None;
        }
        let mut copies: Vec<Copy> = group
            .body
            .iter()
            .map(|child| Copy::of(graph, child))
            .collect::<Option<_>>()?;
        let whole = copies[0].to.container;
        let shape = sizes(graph, whole)?;
        let axis = copies.iter().find_map(|c| c.axis(&shape))?;
        copies.sort_by_key(|c| c.start(axis));
        let (mut parts, mut next) = (Vec::new(), 0);
        for copy in &copies {
            let part = copy.part(graph, &shape, axis)?;
            let is_next = copy.to.container == whole && copy.start(axis) == Some(next);
            let is_known = |p: &Part| p.container == part.container;
            if !is_next || parts.iter().any(is_known) {
                return None;
            }
            next += part.extent;
            parts.push(part);
        }
        (next == shape[axis]).then_some(Joined { whole, axis, parts })
    }
}

fn sizes(graph: &Graph, id: ContainerId) -> Option<Vec<i64>> {
    let shape = &graph.container(id).shape;
    shape.iter().map(crate::SymExpr::as_const).collect()
}

/// A map that copies elements.
struct Copy<'a> {
    map: &'a Map,
    from: &'a Memlet,
    to: &'a Memlet,
}

impl<'a> Copy<'a> {
    fn of(graph: &Graph, node: &'a Node) -> Option<Self> {
        let NodeKind::Map(map) = &node.kind else {
            return None;
        };
        let [
            Node {
                kind: NodeKind::Tasklet(Tasklet { inputs, outputs }),
                ..
            },
        ] = map.body.as_slice()
        else {
            return None;
        };
        let ([from], [(to, Expr::In(0))]) = (inputs.as_slice(), outputs.as_slice()) else {
            return None;
        };
        let plain = from.fill.is_none() && to.fill.is_none() && to.conflict.is_none();
        let dtype = |m: &Memlet| graph.container(m.container).dtype;
        let copy = Copy { map, from, to };
        (plain && dtype(from) == dtype(to)).then_some(copy)
    }

    /// The position of the parameter with which an index of the written container moves, and the index's first value.
    fn place(&self, dim: usize) -> Option<(Option<usize>, i64)> {
        let Index::At(at) = self.to.subset.get(dim)? else {
            return None;
        };
        let (terms, start) = at.as_affine()?;
        match terms.as_slice() {
            [] => Some((None, start)),
            [(symbol, 1)] => {
                let mut params = self.map.params.iter();
                Some((Some(params.position(|p| p.name == *symbol)?), start))
            }
            _ => None,
        }
    }

    /// How many positions of a dimension of the written container the copy covers.
    fn extent(&self, dim: usize) -> Option<i64> {
        match self.place(dim)? {
            (None, _) => Some(1),
            (Some(param), _) => self.map.params[param].size.as_const(),
        }
    }

    /// The first dimension of which the copy does not cover all positions.
    fn axis(&self, shape: &[i64]) -> Option<usize> {
        (0..shape.len()).find(|d| self.extent(*d) != Some(shape[*d]))
    }

    fn start(&self, axis: usize) -> Option<i64> {
        self.place(axis).map(|(_, start)| start)
    }

    /// The part of a concatenation along `axis` that is copied, if the copy reads all of it and covers all positions of
    /// the other dimensions.
    fn part(&self, graph: &Graph, shape: &[i64], axis: usize) -> Option<Part> {
        let own = sizes(graph, self.from.container)?;
        let mut dims = vec![None; shape.len()];
        let mut n_elements = 1;
        for (d, size) in shape.iter().enumerate() {
            let extent = self.extent(d)?;
            let (param, start) = self.place(d)?;
            if d != axis && (extent != *size || start != 0) {
                return None;
            }
            n_elements *= extent;
            let Some(param) = param.filter(|_| extent > 1) else {
                continue;
            };
            let name = &self.map.params[param].name;
            let reads = |i: &Index| matches!(i, Index::At(e) if e.as_symbol() == Some(name));
            let own_dim = self.from.subset.iter().position(reads)?;
            if own[own_dim] != extent || dims.contains(&Some(own_dim)) {
                return None;
            }
            dims[d] = Some(own_dim);
        }
        // Each element of the part is copied once: there are no further parameters and no other elements.
        let points: Option<i64> = self.map.params.iter().map(|p| p.size.as_const()).product();
        let covers = points == Some(n_elements) && own.iter().product::<i64>() == n_elements;
        covers.then(|| Part {
            container: self.from.container,
            dims,
            extent: self.extent(axis).unwrap_or(1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Joined;
    use crate::parse;

    fn joined(containers: &str, copies: &str) -> Option<Joined> {
        let text = format!(
            "graph \"g\" {{\n{containers}\ninputs %a, %b\nstate {{\nmap [] {{\n{copies}\n}}\n}}\n\
             outputs %y\n}}\n"
        );
        let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let node = graph.single_state()?.nodes.first()?;
        Joined::of(&graph, node)
    }

    #[test]
    fn a_stack_of_permuted_parts_is_one() {
        let found = joined(
            "%a: f32[4, 3] input\n%b: f32[4, 3] input\n%y: f32[2, 3, 4]",
            "map [i < 3, j < 4] { tasklet %y[0, i, j] = $0 from %a[j, i] }
             map [i < 3, j < 4] { tasklet %y[1, i, j] = $0 from %b[j, i] }",
        );
        let found = found.expect("a stack");
        assert_eq!((found.axis, found.parts.len()), (0, 2));
        assert_eq!(found.parts[0].dims, [None, Some(1), Some(0)]);
        assert_eq!(found.parts[1].extent, 1);
    }

    #[test]
    fn parts_of_different_sizes_follow_one_another() {
        let containers = "%a: f32[3, 2] input\n%b: f32[3, 1] input\n%y: f32[3, 3]";
        let parts = |start: i64| {
            format!(
                "map [i < 3] {{ tasklet %y[i, {start}] = $0 from %b[i, 0] }}
                 map [i < 3, j < 2] {{ tasklet %y[i, j] = $0 from %a[i, j] }}"
            )
        };
        let found = joined(containers, &parts(2)).expect("a concatenation");
        let extents: Vec<i64> = found.parts.iter().map(|p| p.extent).collect();
        assert_eq!((found.axis, extents), (1, vec![2, 1]));
        // One part lies over another, and the last positions belong to none.
        assert_eq!(joined(containers, &parts(1)), None);
    }

    #[test]
    fn what_is_computed_cut_or_doubled_is_none() {
        let containers = "%a: f32[4] input\n%b: f32[4] input\n%y: f32[2, 4]";
        let both = |first: &str, second: &str| joined(containers, &format!("{first}\n{second}"));
        let copy = |row: i64, from: &str| {
            format!("map [i < 4] {{ tasklet %y[{row}, i] = $0 from %{from}[i] }}")
        };
        assert!(both(&copy(0, "a"), &copy(1, "b")).is_some());
        assert_eq!(both(&copy(0, "a"), &copy(1, "a")), None);
        let scaled = "map [i < 4] { tasklet %y[1, i] = $0 * 2.0 from %b[i] }";
        assert_eq!(both(&copy(0, "a"), scaled), None);
        let reversed = "map [i < 4] { tasklet %y[1, i] = $0 from %b[3 - i] }";
        assert_eq!(both(&copy(0, "a"), reversed), None);
        let summed = "map [i < 4] { tasklet %y[1, i] (sum) = $0 from %b[i] }";
        assert_eq!(both(&copy(0, "a"), summed), None);
    }
}
