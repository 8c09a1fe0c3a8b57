//! Contractions as convolutions in cuDNN's terms: what a description means, executed on the host, is
//! what the graph means; and what is no convolution is refused with the reason.

mod described_cases;

use cuda_kernels::contraction::{convolution, gemm};
use cuda_kernels::vendor::{Convolution, Direction, convolve};
use described_cases::{found, graph};
use graph::Graph;

fn described(graph: &Graph) -> Convolution {
    let (found, types) = found(graph);
    convolution(&found.contraction, types).unwrap_or_else(|e| panic!("{e}"))
}

fn refusal(graph: &Graph) -> String {
    let (found, types) = found(graph);
    let refused = convolution(&found.contraction, types);
    refused.expect_err("no convolution").to_string()
}

/// Holds the executed description against the interpreter, and returns it.
fn check(graph: &Graph) -> Convolution {
    let convolution = described(graph);
    described_cases::check(graph, convolution.is_swapped, |operands, store| {
        convolve(&convolution, operands, store)
    });
    convolution
}

/// Sizes, indices and fill of a convolution, from which all three directions are written.
struct Window {
    /// Sizes of images, filters and responses.
    x: [i64; 4],
    w: [i64; 4],
    y: [i64; 4],
    /// Index space of the map.
    space: &'static str,
    /// Where each array is accessed.
    at: [&'static str; 3],
}

const PLAIN: Window = Window {
    x: [2, 5, 6, 7],
    w: [9, 5, 3, 3],
    y: [2, 9, 6, 7],
    space: "n < 2, k < 9, p < 6, q < 7, c < 5, r < 3, s < 3",
    at: [
        "n, c, p + r - 1, q + s - 1 | 0.0",
        "k, c, r, s",
        "n, k, p, q",
    ],
};
/// Strides and dilations differ, and so do the zeros on both sides.
const UNEVEN: Window = Window {
    x: [2, 5, 8, 9],
    w: [4, 5, 3, 2],
    y: [2, 4, 4, 7],
    space: "n < 2, k < 4, p < 4, q < 7, c < 5, r < 3, s < 2",
    at: [
        "n, c, 2*p + r - 1, q + 3*s | 0.0",
        "k, c, r, s",
        "n, k, p, q",
    ],
};
const GROUPED: Window = Window {
    x: [2, 6, 5, 5],
    w: [9, 2, 3, 3],
    y: [2, 9, 5, 5],
    space: "n < 2, g < 3, k < 3, p < 5, q < 5, c < 2, r < 3, s < 3",
    at: [
        "n, 2*g + c, p + r - 1, q + s - 1 | 0.0",
        "3*g + k, c, r, s",
        "n, 3*g + k, p, q",
    ],
};
const POINTS: Window = Window {
    x: [2, 6, 6, 6],
    w: [9, 6, 1, 1],
    y: [2, 9, 3, 3],
    space: "n < 2, k < 9, p < 3, q < 3, c < 6",
    at: ["n, c, 2*p, 2*q", "k, c, 0, 0", "n, k, p, q"],
};
/// A column of taps, padded on one side only.
const COLUMN: Window = Window {
    x: [1, 5, 6, 4],
    w: [3, 5, 3, 1],
    y: [1, 3, 6, 4],
    space: "n < 1, k < 3, p < 6, q < 4, c < 5, r < 3",
    at: ["0, c, p + r - 2, q | 0.0", "k, c, r, 0", "0, k, p, q"],
};

const LAST: &str = "<0,2,3,1>";

impl Window {
    fn graph(&self, direction: Direction, dtype: &str, layout: &str) -> Graph {
        let array = |sizes: [i64; 4]| {
            let sizes = sizes.map(|n| n.to_string()).join(", ");
            format!("{dtype}[{sizes}] {layout}")
        };
        let [x, w, y] = [self.x, self.w, self.y].map(array);
        let [at_x, at_w, at_y] = self.at;
        // The graph's names are x, w and y in the order read, read, written.
        let ((one, at_one), (two, at_two), (made, at_made)) = match direction {
            Direction::Forward => ((x, at_x), (w, at_w), (y, at_y)),
            Direction::Data => ((w, at_w), (y, at_y), (x, at_x)),
            Direction::Filter => ((y, at_y), (x, at_x), (w, at_w)),
        };
        let map = format!(
            "[{}] {{ tasklet %y[{at_made}] (sum) = $0 * $1 from %x[{at_one}], %w[{at_two}] }}",
            self.space
        );
        graph(&one, &two, &made, &map)
    }
}

const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::Data, Direction::Filter];

#[test]
fn a_convolution_and_its_gradients_are_described() {
    for window in [&PLAIN, &UNEVEN, &GROUPED, &POINTS, &COLUMN] {
        for direction in DIRECTIONS {
            for (dtype, layout) in [
                ("f32", LAST),
                ("bf16", LAST),
                ("f16", ""),
                ("f32", "<1,3,0,2>"),
            ] {
                let found = check(&window.graph(direction, dtype, layout));
                assert_eq!(found.direction, direction, "{found}");
                assert_eq!(found.x.sizes, window.x, "{found}");
                assert_eq!(found.w.sizes, window.w, "{found}");
                assert_eq!(found.y.sizes, window.y, "{found}");
                let points: i64 = window.y.iter().product();
                let taps: i64 = window.w[1..].iter().product();
                assert_eq!(found.flops(), 2 * (points * taps) as u64);
            }
        }
    }
}

#[test]
fn texts_tell_convolutions_apart() {
    let text = |window: &Window, direction, dtype, layout| {
        described(&window.graph(direction, dtype, layout)).to_string()
    };
    assert_eq!(
        text(&PLAIN, Direction::Forward, "bf16", LAST),
        "convolution forward; x bf16 2x5x6x7 channels last; w bf16 9x5x3x3 channels last; \
         y bf16 2x9x6x7 channels last; pads 1x1 1x1 strides 1x1 dilations 1x1"
    );
    assert_eq!(
        text(&UNEVEN, Direction::Data, "f32", ""),
        "convolution data gradient; x f32 2x5x8x9 channels first; w f32 4x5x3x2 channels first; \
         y f32 2x4x4x7 channels first; pads 1x0 0x1 strides 2x1 dilations 1x3"
    );
    assert_eq!(
        text(&GROUPED, Direction::Filter, "f32", "<1,3,0,2>"),
        "convolution filter gradient; x f32 2x6x5x5 strides 5x50x1x10; w f32 9x2x3x3 strides 3x81x1x27; \
         y f32 2x9x5x5 strides 5x50x1x10; pads 1x1 1x1 strides 1x1 dilations 1x1 groups 3"
    );
}

/// Groups as a dimension of their own, as fusion leaves them.
#[test]
fn groups_may_be_a_dimension() {
    let map = "[n < 2, g < 3, k < 3, p < 5, q < 5, c < 2, r < 3, s < 3] { \
        tasklet %y[n, g, k, p, q] (sum) = $0 * $1 from \
        %x[n, g, c, p + r - 1, q + s - 1 | 0.0], %w[g, k, c, r, s] }";
    let arrays = |order: &str| {
        let x = format!("f32[2, 3, 2, 5, 5] {order}");
        let y = format!("f32[2, 3, 3, 5, 5] {order}");
        graph(&x, "f32[3, 3, 2, 3, 3]", &y, map)
    };
    let split = check(&arrays("<0,3,4,1,2>"));
    let whole = described(&GROUPED.graph(Direction::Forward, "f32", LAST));
    assert_eq!((split.x, split.y), (whole.x, whole.y));
    assert_eq!((split.w.sizes, split.groups), (whole.w.sizes, 3));
    // Groups that do not lie behind one another are no channels.
    assert!(refusal(&arrays("<0,1,3,4,2>")).contains("two spatial directions"));
}

/// Pointwise convolutions with strides would be a product of a few columns for each row of each image; as a
/// convolution they are one.
#[test]
fn points_in_steps_are_one_convolution() {
    let (found, types) = found(&POINTS.graph(Direction::Forward, "f32", LAST));
    let gemm = gemm(&found.contraction, types).unwrap();
    assert_eq!((gemm.batch, gemm.n), (6, 3));
}

#[test]
fn what_is_no_convolution_is_refused_with_the_reason() {
    let with = |space, at| Window { space, at, ..PLAIN };
    let [x, w, y] = PLAIN.at;
    for (window, said) in [
        (
            with(PLAIN.space, ["n, c, p - r + 1, q + s - 1 | 0.0", w, y]),
            "runs backwards",
        ),
        (
            Window {
                x: [2, 5, 9, 9],
                ..with(PLAIN.space, ["n, c, p + r + 1, q + s", w, y])
            },
            "a part of its images",
        ),
        (
            Window {
                x: [2, 5, 12, 9],
                ..with(PLAIN.space, ["n, c, p + r, q + s", w, y])
            },
            "a part of its images",
        ),
        (
            Window {
                x: [2, 9, 6, 7],
                ..with(PLAIN.space, ["n, c + 4, p + r - 1, q + s - 1 | 0.0", w, y])
            },
            "not those of images",
        ),
        (
            Window {
                w: [9, 5, 3, 5],
                ..with(PLAIN.space, [x, "k, c, r, 2*s", y])
            },
            "not those of images",
        ),
        (
            Window {
                x: [2, 5, 6, 6],
                y: [2, 9, 6, 6],
                ..with(
                    "n < 2, k < 9, p < 6, c < 5, r < 3, s < 3",
                    ["n, c, p + r - 1, p + s - 1 | 0.0", w, "n, k, p, p"],
                )
            },
            "not those of images",
        ),
    ] {
        let told = refusal(&window.graph(Direction::Forward, "f32", LAST));
        assert!(told.contains(said), "{:?}: {told}", window.at);
    }
    let double = refusal(&PLAIN.graph(Direction::Forward, "f64", LAST));
    assert_eq!(
        double,
        "cuDNN has no convolution of f64 and f64 to f64 with sums in f32"
    );
    let one = graph(
        "f32[2, 5, 8]",
        "f32[9, 5, 3]",
        "f32[2, 9, 6]",
        "[n < 2, k < 9, p < 6, c < 5, r < 3] { tasklet %y[n, k, p] (sum) = $0 * $1 from %x[n, c, p + r], %w[k, c, r] }",
    );
    assert!(refusal(&one).contains("two spatial directions"));
}
