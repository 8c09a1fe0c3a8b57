//! Contractions that warpgroups multiply: every order of the factors' elements in every tile, batches, split
//! reductions, epilogues, convolutions, and sizes that networks have.

#![allow(dead_code)]

use crate::contraction_cases::{Conv, matmul};
use crate::contraction_runs::{BF16, Wanted, epilogue};
use cuda_kernels::contraction::{Types, n_warpgroup_tiles};
use graph::DType;
use kernels::contraction::Contraction;

pub const F16: Types = Types {
    a: DType::F16,
    b: DType::F16,
    out: DType::F16,
};

/// The four orders of the factors' elements.
const ORDERS: [[&str; 2]; 4] = [["mk", "nk"], ["mk", "kn"], ["km", "nk"], ["km", "kn"]];

/// Sizes of at least two blocks of each tile in each direction, whole pieces only where memory must have
/// them, and more steps than shared memory has places.
fn sizes(tile: usize, [a, b]: [&str; 2]) -> [i64; 4] {
    let [m, n] = [[136, 264], [136, 136], [72, 72], [136, 264], [136, 136]][tile];
    let steps = 64 * [5, 4, 5, 5, 4][tile];
    let more = |is_contiguous| if is_contiguous { 8 } else { 3 };
    [
        1,
        m + more(a == "km"),
        n + more(b == "kn"),
        steps + more(a == "mk" || b == "nk"),
    ]
}

pub fn products() -> Vec<Wanted> {
    let mut all = Vec::new();
    for tile in 0..n_warpgroup_tiles() {
        for (i, order) in ORDERS.into_iter().enumerate() {
            let types = [BF16, F16][(tile + i) % 2];
            let c = matmul(sizes(tile, order), order[0], order[1], "mn");
            all.push((
                format!("{order:?} in tile {tile}"),
                c,
                types,
                None,
                Some(tile),
            ));
        }
    }
    all
}

/// What else a contraction can be.
pub fn others() -> Vec<Wanted> {
    let half = Types {
        out: DType::BF16,
        ..BF16
    };
    let batched = matmul([3, 70, 72, 40], "bmk", "bkn", "bmn");
    let heads = matmul([2, 64, 72, 64], "mbk", "nbk", "bmn");
    let transposed = matmul([1, 75, 130, 72], "mk", "nk", "nm");
    let long = matmul([1, 48, 40, 1500], "km", "kn", "mn");
    let bands = matmul([1, 64 * 17 + 5, 136, 8], "mk", "nk", "mn");
    let small = matmul([1, 5, 8, 8], "mk", "kn", "mn");
    let dense = Conv::square(2, 8, 16, 7, 3, 1);
    let pointwise = Conv::square(2, 16, 24, 5, 1, 1);
    let of = |label: &str, c: &Contraction, types, epilogue, tile| {
        (label.to_string(), c.clone(), types, epilogue, tile)
    };
    vec![
        of("batched", &batched, half, Some(epilogue(3, false)), None),
        of("heads", &heads, F16, None, None),
        of(
            "transposed",
            &transposed,
            BF16,
            Some(epilogue(2, true)),
            Some(1),
        ),
        of("long", &long, BF16, Some(epilogue(2, false)), None),
        of("bands", &bands, BF16, None, Some(2)),
        of("small", &small, BF16, None, None),
        of(
            "small in the largest",
            &matmul([1, 5, 8, 8], "mk", "kn", "mn"),
            BF16,
            None,
            Some(0),
        ),
        of(
            "weight gradient",
            &dense.weight_gradient(),
            BF16,
            None,
            None,
        ),
        of(
            "pointwise",
            &pointwise.forward(),
            half,
            Some(epilogue(5, false)),
            None,
        ),
        of(
            "pointwise data gradient",
            &pointwise.data_gradient(),
            half,
            None,
            None,
        ),
        of(
            "batched in boxes",
            &batched,
            half,
            Some(epilogue(3, false)),
            Some(4),
        ),
        of("heads in boxes", &heads, F16, None, Some(4)),
        of(
            "transposed in boxes",
            &transposed,
            BF16,
            Some(epilogue(2, true)),
            Some(3),
        ),
        of(
            "long in boxes",
            &long,
            BF16,
            Some(epilogue(2, false)),
            Some(4),
        ),
        of("small in boxes", &small, BF16, None, Some(3)),
        of(
            "pointwise in boxes",
            &pointwise.forward(),
            half,
            Some(epilogue(5, false)),
            Some(4),
        ),
    ]
}

/// Every tile in every order, of sizes that networks have.
pub fn large() -> Vec<Wanted> {
    let half = Types {
        out: DType::BF16,
        ..BF16
    };
    let mut all = Vec::new();
    for tile in 0..n_warpgroup_tiles() {
        for [a, b] in ORDERS {
            let c = matmul([1, 4096, 4096, 1024], a, b, "mn");
            all.push((
                format!("{a},{b} in tile {tile}"),
                c,
                half,
                Some(epilogue(2, true)),
                Some(tile),
            ));
        }
    }
    all
}
