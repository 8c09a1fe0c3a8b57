//! Library nodes that stay whole, and where their operands lie.
//!
//! Another library's operator computes such a node, or a loop with an order. Fusion does not expand it.
//! Attribute `by` names who computes it.
//! From fusion on, an operand is a part of a container: the attributes `<operand>_sizes`,
//! `<operand>_strides` (elements) and `<operand>_offset` (elements) say which, the container's own
//! order being row-major. So what reads a permuted slice of a container needs no copy of it. This file
//! never knows an operator.

use crate::graph::{Attr, Library};
use crate::tensor::Tensor;
use std::fmt;

/// Name of the attribute that says who computes a node.
const BY: &str = "by";

/// One operand of a library node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operand {
    /// An input, by its position.
    Input(usize),
    /// An output, by its position.
    Output(usize),
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operand::Input(n) => write!(f, "input{n}"),
            Operand::Output(n) => write!(f, "output{n}"),
        }
    }
}

/// Elements of a container in an order of their own: `[i, j, …]` at `offset + i·strides[0] + j·strides[1] + …`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct View {
    /// Position of the first element, in elements.
    pub offset: i64,
    /// Elements in each dimension.
    pub sizes: Vec<i64>,
    /// Elements between neighbours in each dimension.
    pub strides: Vec<i64>,
}

impl View {
    /// The whole of a container with dimensions of these sizes that lie in memory in this order, outermost first.
    pub fn dense(sizes: &[i64], order: &[usize]) -> View {
        let mut strides = vec![0; sizes.len()];
        let mut stride = 1;
        for d in order.iter().rev() {
            strides[*d] = stride;
            stride *= sizes[*d];
        }
        View {
            offset: 0,
            sizes: sizes.to_vec(),
            strides,
        }
    }

    /// Number of elements.
    pub fn elements(&self) -> i64 {
        self.sizes.iter().product()
    }

    /// The position of every element in its container, in row-major order of the view.
    pub fn places(&self) -> Vec<usize> {
        let place = |mut flat: i64| {
            let mut at = self.offset;
            for (size, stride) in self.sizes.iter().zip(&self.strides).rev() {
                at += flat % size * stride;
                flat /= size;
            }
            at as usize
        };
        (0..self.elements()).map(place).collect()
    }

    /// The tensor that the view is of a container.
    pub fn of(&self, container: &Tensor) -> Tensor {
        let shape: Vec<usize> = self.sizes.iter().map(|n| *n as usize).collect();
        let mut tensor = Tensor::zeros(container.dtype, &shape);
        for (n, place) in self.places().into_iter().enumerate() {
            tensor.set(n, container.at(place));
        }
        tensor
    }

    /// The container that a view covers entirely, from the tensor that the view is of it. Its dimensions
    /// are the view's, those with longer strides first.
    pub fn container(&self, tensor: &Tensor) -> Tensor {
        let mut order: Vec<usize> = (0..self.sizes.len()).collect();
        order.sort_by_key(|d| std::cmp::Reverse(self.strides[*d]));
        let shape: Vec<usize> = order.iter().map(|d| self.sizes[*d] as usize).collect();
        let mut container = Tensor::zeros(tensor.dtype, &shape);
        for (n, place) in self.places().into_iter().enumerate() {
            container.set(place, tensor.at(n));
        }
        container
    }
}

impl Library {
    /// The name of what computes the node, if it is not expanded to maps.
    pub fn computed_by(&self) -> Option<&str> {
        match self.attrs.get(BY) {
            Some(Attr::Str(by)) => Some(by),
            _ => None,
        }
    }

    /// Says who computes the node.
    pub fn compute_by(&mut self, by: &str) {
        self.attrs.insert(BY.into(), Attr::Str(by.into()));
    }

    /// Which part of its container an operand is, if it is known.
    pub fn view(&self, operand: Operand) -> Option<View> {
        let ints = |what: &str| match self.attrs.get(&format!("{operand}_{what}")) {
            Some(Attr::Ints(list)) => Some(list.clone()),
            _ => None,
        };
        let offset = match self.attrs.get(&format!("{operand}_offset")) {
            Some(Attr::Int(offset)) => *offset,
            _ => return None,
        };
        let (sizes, strides) = (ints("sizes")?, ints("strides")?);
        (sizes.len() == strides.len()).then_some(View {
            offset,
            sizes,
            strides,
        })
    }

    /// Says which part of its container an operand is.
    pub fn set_view(&mut self, operand: Operand, view: &View) {
        let mut put = |what: &str, attr| self.attrs.insert(format!("{operand}_{what}"), attr);
        put("offset", Attr::Int(view.offset));
        put("sizes", Attr::Ints(view.sizes.clone()));
        put("strides", Attr::Ints(view.strides.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn a_view_takes_elements_in_its_own_order() {
        let all = Tensor::from_f64(DType::F32, &[12], (0..12).map(f64::from).collect());
        let view = View {
            offset: 1,
            sizes: vec![2, 3],
            strides: vec![2, 4],
        };
        let taken = view.of(&all);
        assert_eq!(taken.shape, [2, 3]);
        assert_eq!(taken.to_f64(), [1.0, 5.0, 9.0, 3.0, 7.0, 11.0]);
    }

    #[test]
    fn a_dense_view_gives_its_container_back() {
        let view = View::dense(&[2, 3, 4], &[1, 0, 2]);
        assert_eq!(view.strides, [4, 8, 1]);
        let container = Tensor::from_f64(DType::F32, &[3, 2, 4], (0..24).map(f64::from).collect());
        assert_eq!(view.container(&view.of(&container)), container);
    }

    #[test]
    fn attributes_keep_a_view() {
        let mut library = Library {
            op: "op".into(),
            attrs: crate::Attrs::new(),
            inputs: vec![],
            outputs: vec![],
        };
        let view = View::dense(&[2, 3], &[0, 1]);
        library.set_view(Operand::Output(1), &view);
        assert_eq!(library.view(Operand::Output(1)), Some(view));
        assert_eq!(library.view(Operand::Input(1)), None);
        assert_eq!(library.computed_by(), None);
        library.compute_by("somebody");
        assert_eq!(library.computed_by(), Some("somebody"));
    }
}
