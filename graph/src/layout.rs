//! Layout (order of dimensions in memory) and storage (where a container lives).

use std::fmt;

/// The order of a container's dimensions in memory: `order[0]` is the outermost logical dimension.
///
/// A row-major `[N, C, H, W]` container has order `[0, 1, 2, 3]`; channels-last has `[0, 2, 3, 1]`.
/// Elements are dense.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Layout {
    order: Vec<usize>,
}

impl Layout {
    /// Logical order, last dimension fastest.
    pub fn row_major(rank: usize) -> Self {
        Layout {
            order: (0..rank).collect(),
        }
    }

    /// Dimension 1 fastest: `[N, H, W, C]` for a logical `[N, C, H, W]`.
    pub fn channels_last(rank: usize) -> Self {
        let mut order: Vec<usize> = (0..rank).collect();
        if rank > 2 {
            order.remove(1);
            order.push(1);
        }
        Layout { order }
    }

    /// A layout from its order; `None` unless it is a permutation.
    pub fn from_order(order: Vec<usize>) -> Option<Self> {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        sorted
            .iter()
            .enumerate()
            .all(|(i, d)| i == *d)
            .then_some(Layout { order })
    }

    /// Logical dimensions, outermost in memory first.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Whether logical order is memory order.
    pub fn is_row_major(&self) -> bool {
        self.order.iter().enumerate().all(|(i, d)| i == *d)
    }

    /// Elements between neighbours along each logical dimension.
    pub fn strides(&self, shape: &[i64]) -> Vec<i64> {
        let mut strides = vec![1; shape.len()];
        let mut step = 1;
        for d in self.order.iter().rev() {
            strides[*d] = step;
            step *= shape[*d];
        }
        strides
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<")?;
        for (i, d) in self.order.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { "," } else { "" })?;
        }
        f.write_str(">")
    }
}

/// Where a container lives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Storage {
    /// Memory shared by all kernels.
    #[default]
    Global,
    /// Inside one kernel: registers or a thread's own scratch; gone when the kernel's outer point is done.
    Local,
}
