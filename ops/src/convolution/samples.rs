//! Samples of the four operators, all made from one list of geometries.

use super::arrays::Convolution;
use crate::op::{Call, Sample, TensorType};
use graph::{Attr, Attrs, DType, SymExpr};

pub(super) type Geometry = (&'static str, Vec<i64>, Vec<i64>, Attrs);

/// Shapes of x and w with attributes: what the samples of all four operators are made from.
pub(super) fn geometries() -> Vec<Geometry> {
    let with_groups = |groups: i64, mut attrs: Attrs| {
        attrs.insert("groups".into(), Attr::Int(groups));
        attrs
    };
    let padded = |p: i64| ints(&[("pad_low", &[p, p]), ("pad_high", &[p, p])]);
    vec![
        (
            "2-D without padding",
            vec![2, 3, 5, 4],
            vec![4, 3, 3, 2],
            Attrs::new(),
        ),
        ("3x3, padded", vec![1, 2, 4, 5], vec![3, 2, 3, 3], padded(1)),
        (
            "1x1, stride 2",
            vec![2, 3, 5, 5],
            vec![4, 3, 1, 1],
            ints(&[("stride", &[2, 2])]),
        ),
        (
            "stride, dilation, asymmetric padding",
            vec![1, 2, 7, 6],
            vec![2, 2, 3, 2],
            ints(&[
                ("stride", &[2, 3]),
                ("dilation", &[2, 1]),
                ("pad_low", &[1, 0]),
                ("pad_high", &[2, 1]),
            ]),
        ),
        (
            "groups",
            vec![1, 4, 4, 4],
            vec![6, 2, 3, 3],
            with_groups(2, padded(1)),
        ),
        (
            "depthwise",
            vec![2, 3, 4, 4],
            vec![3, 1, 3, 3],
            with_groups(3, padded(1)),
        ),
        (
            "depthwise, two outputs a channel",
            vec![1, 2, 3, 3],
            vec![4, 1, 2, 2],
            with_groups(2, Attrs::new()),
        ),
        (
            "depthwise 1x1",
            vec![2, 3, 2, 2],
            vec![3, 1, 1, 1],
            with_groups(3, Attrs::new()),
        ),
        (
            "1-D, dilated",
            vec![2, 2, 9],
            vec![3, 2, 3],
            ints(&[("dilation", &[2]), ("pad_low", &[2]), ("pad_high", &[0])]),
        ),
        (
            "3-D",
            vec![1, 2, 3, 4, 3],
            vec![2, 2, 2, 3, 1],
            ints(&[
                ("stride", &[1, 2, 1]),
                ("pad_low", &[1, 1, 0]),
                ("pad_high", &[0, 1, 0]),
            ]),
        ),
        (
            "one channel in, one out",
            vec![1, 1, 3, 4],
            vec![1, 1, 2, 2],
            Attrs::new(),
        ),
    ]
}

pub(super) fn gradient_samples(
    inputs: impl Fn(&[i64], &[i64], &[i64], &mut Attrs) -> (Vec<i64>, Vec<i64>),
) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (name, x, w, mut attrs) in geometries() {
        let library = graph::Library {
            op: "conv".into(),
            attrs: attrs.clone(),
            inputs: vec![],
            outputs: vec![],
        };
        let call = Call {
            library: &library,
            inputs: vec![],
        };
        let Ok(conv) = Convolution::new(&call, &sizes(&x), &sizes(&w)) else {
            continue;
        };
        let y: Vec<i64> = conv.y.iter().filter_map(SymExpr::as_const).collect();
        let (a, b) = inputs(&x, &w, &y, &mut attrs);
        samples.push(sample(name, &a, &b, attrs));
    }
    samples
}

pub(super) fn sizes(shape: &[i64]) -> Vec<SymExpr> {
    shape.iter().map(|n| SymExpr::constant(*n)).collect()
}

pub(super) fn ints(list: &[(&str, &[i64])]) -> Attrs {
    list.iter()
        .map(|(name, values)| (name.to_string(), Attr::Ints(values.to_vec())))
        .collect()
}

pub(super) fn sample(name: &str, a: &[i64], b: &[i64], attrs: Attrs) -> Sample {
    let tensor = |shape: &[i64]| Some(TensorType::new(DType::F32, sizes(shape)));
    Sample {
        name: name.into(),
        inputs: vec![tensor(a), tensor(b)],
        attrs,
        values: vec![],
        range: (-1.0, 1.0),
        differentiable: true,
    }
}
