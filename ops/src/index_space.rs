//! Index spaces: they append maps whose tasklets have optional inputs or several outputs, and visit
//! every index in a reference evaluation. This file never knows what is computed.

use graph::{Builder, ContainerId, Expr, Memlet, Reduction, SymExpr, Tasklet};

/// Parameters of a map with their sizes.
#[derive(Clone, Debug)]
pub struct IndexSpace {
    params: Vec<(String, SymExpr)>,
}

impl IndexSpace {
    /// An index space with one parameter `i0, i1, …` for each dimension of `shape`.
    pub fn over(shape: &[SymExpr]) -> Self {
        IndexSpace {
            params: shape
                .iter()
                .enumerate()
                .map(|(n, size)| (format!("i{n}"), size.clone()))
                .collect(),
        }
    }

    /// Returns the space with another parameter, which is innermost.
    pub fn and(mut self, name: &str, size: SymExpr) -> Self {
        self.params.push((name.to_string(), size));
        self
    }

    /// The parameters as indices.
    pub fn indices(&self) -> Vec<SymExpr> {
        let symbol = |(name, _): &(String, SymExpr)| SymExpr::symbol(name.as_str());
        self.params.iter().map(symbol).collect()
    }

    /// Appends a map of one tasklet with these reads and writes.
    pub fn append(&self, builder: &mut Builder, reads: Reads, writes: Vec<(Memlet, Expr)>) {
        let params: Vec<_> = self
            .params
            .iter()
            .map(|(name, size)| (name.as_str(), size.clone()))
            .collect();
        builder.map(&params, |_| Tasklet {
            inputs: reads.0,
            outputs: writes,
        });
    }
}

/// Inputs of a tasklet, with the expressions that stand for them.
#[derive(Debug, Default)]
pub struct Reads(Vec<Memlet>);

impl Reads {
    /// Reads one element; the expression stands for it.
    pub fn at(&mut self, container: ContainerId, index: &[SymExpr]) -> Expr {
        self.memlet(Memlet::new(container, index.iter().cloned()))
    }

    /// Reads through a memlet; the expression stands for its value.
    pub fn memlet(&mut self, memlet: Memlet) -> Expr {
        self.0.push(memlet);
        Expr::In(self.0.len() - 1)
    }
}

/// A plain write of one element.
pub fn write(container: ContainerId, index: &[SymExpr], value: Expr) -> (Memlet, Expr) {
    (Memlet::new(container, index.iter().cloned()), value)
}

/// A write of one element, combined with other writes to the same element.
pub fn combine(
    reduction: Reduction,
    container: ContainerId,
    index: &[SymExpr],
    value: Expr,
) -> (Memlet, Expr) {
    let (memlet, value) = write(container, index, value);
    (memlet.reduce(reduction), value)
}

/// Calls `f` for every index of a box of `sizes`, last dimension fastest; once with `[]` for no sizes.
pub fn for_each_index(sizes: &[usize], mut f: impl FnMut(&[usize])) {
    if sizes.contains(&0) {
        return;
    }
    let mut index = vec![0; sizes.len()];
    loop {
        f(&index);
        let Some(d) = (0..sizes.len()).rev().find(|d| index[*d] + 1 < sizes[*d]) else {
            return;
        };
        index[d] += 1;
        index[d + 1..].fill(0);
    }
}
