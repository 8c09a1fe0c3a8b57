//! 16-bit numbers in emitted kernels: conversions, and products with and without instructions for pairs.

use super::*;

/// Numbers of single precision next to and halfway between those of `dtype`.
fn numbers_around(dtype: DType) -> Vec<f32> {
    let mut found = vec![
        f32::MAX,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        65519.0,
        65520.0,
    ];
    for pattern in 0..u16::MAX {
        let (a, b) = (
            halves::value(dtype, pattern),
            halves::value(dtype, pattern + 1),
        );
        let middle = ((a + b) / 2.0) as f32;
        found.extend([a as f32, middle, middle.next_up(), middle.next_down()]);
    }
    found
}

/// Every number of 16 bits is widened exactly, and everything around it rounded to nearest even, in memory
/// and inside an expression; on the way to integers nothing is rounded.
#[test]
fn conversions_of_halves_are_exact() {
    for dtype in [DType::BF16, DType::F16] {
        let numbers = numbers_around(dtype);
        let (n, h) = (numbers.len(), dtype.name());
        let text = format!(
            "graph \"conversions\" {{
               %x: f32[{n}] input
               %half: {h}[{n}]
               %rounded: f32[{n}]
               %same: f64[{n}]
               %whole: i32[{n}]
               %is: bool[{n}]
               inputs %x
               state {{
                 map [i < {n}] {{ tasklet %half[i] = $0 from %x[i] }}
                 map [i < {n}] {{ tasklet %rounded[i] = f32({h}($0)) from %x[i] }}
                 map [i < {n}] {{ tasklet %same[i] = $0 from %half[i] }}
                 map [i < {n}] {{ tasklet %whole[i] = i32(min(max(f32($0), -1e6), 1e6)) from %half[i] }}
                 map [i < {n}] {{ tasklet %is[i] = bool($0) from %half[i] }}
               }}
               outputs %half, %rounded, %same, %whole, %is
             }}"
        );
        let graph = graph::parse(&text).unwrap_or_else(|e| panic!("{e}"));
        let given = numbers.iter().map(|x| f64::from(*x)).collect();
        let given = [Tensor::from_f64(DType::F32, &[n], given)];
        for options in every_isa() {
            let lowered = lower(&graph, &options.target, 2).unwrap_or_else(|e| panic!("{e}"));
            let got = run(&graph, &lowered, &options, 2, &given);
            for (i, x) in numbers.iter().enumerate() {
                let want = halves::value(dtype, halves::bits(dtype, f64::from(*x)));
                let at = |t: usize| got[t].at(i).as_f64();
                let what = format!("{x:e} in {h} for {:?}", options.target.isa);
                for (t, found) in [at(0), at(1), at(2)].into_iter().enumerate() {
                    let equal = found.to_bits() == want.to_bits();
                    assert!(
                        equal || found.is_nan() && want.is_nan(),
                        "{what}, {t}: {found}"
                    );
                }
                if !want.is_nan() {
                    assert_eq!(at(3), want.clamp(-1e6, 1e6).trunc(), "{what}");
                }
                assert_eq!(at(4) != 0.0, want != 0.0, "{what}");
            }
        }
    }
}

/// Contractions of bf16 numbers: name, containers, map.
const PAIRED: [(&str, &str, &str); 19] = [
    (
        "rows by columns, terms left over",
        "%a: bf16[70, 45] input %b: bf16[45, 50] input %y: f32[70, 50]",
        "map [i < 70, j < 50, k < 45] { tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %b[k, j] }",
    ),
    (
        "rows by rows",
        "%a: bf16[60, 100] input %b: bf16[65, 100] input %y: bf16[60, 65]",
        "map [i < 60, j < 65, k < 100] { tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %b[j, k] }",
    ),
    (
        "columns by columns, a long reduction",
        "%a: bf16[5000, 48] input %b: bf16[5000, 40] input %y: f32[48, 40]",
        "map [i < 48, j < 40, k < 5000] { tasklet %y[i, j] (sum) = $0 * $1 from %a[k, i], %b[k, j] }",
    ),
    (
        "batches of heads",
        "%a: bf16[2, 37, 3, 32] input %b: bf16[2, 41, 3, 32] input %y: bf16[2, 3, 37, 41]",
        "map [b < 2, h < 3, i < 37, j < 41, k < 32] {
           tasklet %y[b, h, i, j] (sum) = $0 * $1 from %a[b, i, h, k], %b[b, j, h, k]
         }",
    ),
    (
        "convolution",
        "%x: bf16[2, 32, 9, 7] <0,2,3,1> input %w: bf16[40, 32, 3, 3] input %y: f32[2, 40, 9, 7] <0,2,3,1>",
        "map [n < 2, k < 40, p < 9, q < 7, c < 32, r < 3, s < 3] {
           tasklet %y[n, k, p, q] (sum) = $0 * $1 from %x[n, c, p + r - 1, q + s - 1 | 0.0], %w[k, c, r, s]
         }",
    ),
    (
        "convolution with a stride",
        "%x: bf16[2, 32, 9, 7] <0,2,3,1> input %w: bf16[40, 32, 3, 3] <0,2,3,1> input
         %y: bf16[2, 40, 5, 4] <0,2,3,1>",
        "map [n < 2, k < 40, p < 5, q < 4, c < 32, r < 3, s < 3] {
           tasklet %y[n, k, p, q] (sum) = $0 * $1 from %x[n, c, 2*p + r - 1, 2*q + s - 1 | 0.0], %w[k, c, r, s]
         }",
    ),
    (
        "data gradient",
        "%g: bf16[2, 32, 9, 7] <0,2,3,1> input %w: bf16[32, 40, 3, 3] input %y: f32[2, 40, 9, 7] <0,2,3,1>",
        "map [n < 2, k < 32, p < 9, q < 7, c < 40, r < 3, s < 3] {
           tasklet %y[n, c, p + r - 1, q + s - 1 | 0.0] (sum) = $0 * $1 from %g[n, k, p, q], %w[k, c, r, s]
         }",
    ),
    (
        "data gradient with a stride",
        "%g: bf16[2, 32, 5, 5] <0,2,3,1> input %w: bf16[32, 40, 3, 3] input %y: f32[2, 40, 9, 9] <0,2,3,1>",
        "map [n < 2, k < 32, p < 5, q < 5, c < 40, r < 3, s < 3] {
           tasklet %y[n, c, 2*p + r - 1, 2*q + s - 1 | 0.0] (sum) = $0 * $1 from %g[n, k, p, q], %w[k, c, r, s]
         }",
    ),
    (
        "weight gradient",
        "%g: bf16[2, 40, 9, 7] <0,2,3,1> input %x: bf16[2, 32, 9, 7] <0,2,3,1> input %y: f32[40, 32, 3, 3]",
        "map [n < 2, k < 40, p < 9, q < 7, c < 32, r < 3, s < 3] {
           tasklet %y[k, c, r, s] (sum) = $0 * $1 from %g[n, k, p, q], %x[n, c, p + r - 1, q + s - 1 | 0.0]
         }",
    ),
    (
        "weight gradient, channels inside",
        "%g: bf16[2, 40, 9, 7] <0,2,3,1> input %x: bf16[2, 32, 9, 7] <0,2,3,1> input
         %y: bf16[40, 32, 3, 3] <0,2,3,1>",
        "map [n < 2, k < 40, p < 9, q < 7, c < 32, r < 3, s < 3] {
           tasklet %y[k, c, r, s] (sum) = $0 * $1 from %g[n, k, p, q], %x[n, c, p + r - 1, q + s - 1 | 0.0]
         }",
    ),
    (
        "weight gradient, rounded in the order of channels",
        "%g: bf16[2, 40, 9, 7] <0,2,3,1> input %x: bf16[2, 32, 9, 7] <0,2,3,1> input %y: bf16[40, 32, 3, 3]",
        "map [n < 2, k < 40, p < 9, q < 7, c < 32, r < 3, s < 3] {
           tasklet %y[k, c, r, s] (sum) = $0 * $1 from %g[n, k, p, q], %x[n, c, p + r - 1, q + s - 1 | 0.0]
         }",
    ),
    (
        "weight gradient, scaled",
        "%g: bf16[2, 40, 9, 7] <0,2,3,1> input %x: bf16[2, 32, 9, 7] <0,2,3,1> input
         %t: bf16[40, 32, 3, 3] <0,2,3,1> local %y: f32[40, 32, 3, 3] <0,2,3,1>",
        "map [] kernel {
           map [n < 2, k < 40, p < 9, q < 7, c < 32, r < 3, s < 3] {
             tasklet %t[k, c, r, s] (sum) = $0 * $1 from %g[n, k, p, q], %x[n, c, p + r - 1, q + s - 1 | 0.0]
           }
           map [k < 40, c < 32, r < 3, s < 3] { tasklet %y[k, c, r, s] = $0 * 0.5 from %t[k, c, r, s] }
         }",
    ),
    (
        "more columns than sums are kept of",
        "%a: bf16[70, 64] input %b: bf16[64, 200] input %y: bf16[70, 200]",
        "map [i < 70, j < 200, k < 64] { tasklet %y[i, j] (sum) = $0 * $1 from %a[i, k], %b[k, j] }",
    ),
    (
        "parts of a reduction",
        "%a: bf16[2000, 32] input %b: bf16[2000, 32] input %y: f32[32, 32]",
        "map [i < 32, j < 32, k < 2000] { tasklet %y[i, j] (sum) = $0 * $1 from %a[k, i], %b[k, j] }",
    ),
    (
        "parts of a reduction, rounded",
        "%a: bf16[2000, 32] input %b: bf16[2000, 32] input %y: bf16[32, 32]",
        "map [i < 32, j < 32, k < 2000] { tasklet %y[i, j] (sum) = $0 * $1 from %a[k, i], %b[k, j] }",
    ),
    (
        "parts of a weight gradient",
        "%g: bf16[6, 32, 9, 7] <0,2,3,1> input %x: bf16[6, 32, 9, 7] <0,2,3,1> input
         %y: bf16[32, 32, 1, 1] <0,2,3,1>",
        "map [n < 6, k < 32, p < 9, q < 7, c < 32, r < 1, s < 1] {
           tasklet %y[k, c, r, s] (sum) = $0 * $1 from %g[n, k, p, q], %x[n, c, p + r, q + s - 1 | 0.0]
         }",
    ),
    (
        "convolution with channels outside",
        "%x: bf16[3, 32, 7, 7] input %w: bf16[40, 32] input %y: bf16[3, 40, 7, 7]",
        "map [n < 3, k < 40, p < 7, q < 7, c < 32] {
           tasklet %y[n, k, p, q] (sum) = $0 * $1 from %x[n, c, p, q], %w[k, c]
         }",
    ),
    (
        "a reduction that is packed in pieces",
        "%a: bf16[16500, 17] input %b: bf16[16500, 41] input %t: bf16[17, 41] local %y: f32[17, 41]",
        "map [] kernel {
           map [i < 17, j < 41, k < 16500] { tasklet %t[i, j] (sum) = $0 * $1 from %a[k, i], %b[k, j] }
           map [i < 17, j < 41] { tasklet %y[i, j] = $0 * 0.5 from %t[i, j] }
         }",
    ),
    (
        "element-wise work on the product",
        "%a: bf16[70, 64] input %b: bf16[64, 50] input %c: bf16[50] input %t: bf16[70, 50] local %y: bf16[70, 50]",
        "map [] kernel {
           map [i < 70, j < 50, k < 64] { tasklet %t[i, j] (sum) = $0 * $1 from %a[i, k], %b[k, j] }
           map [i < 70, j < 50] { tasklet %y[i, j] = max($0 + $1, 0.0) from %t[i, j], %c[j] }
         }",
    ),
];

fn paired_case((name, containers, map): &(&str, &str, &str)) -> (String, Graph) {
    let inputs: Vec<&str> = containers
        .split('%')
        .filter(|c| c.contains("input"))
        .map(|c| c.split(':').next().unwrap())
        .collect();
    let text = format!(
        "graph \"paired\" {{ {} inputs %{} state {{ {map} }} outputs %y }}",
        containers.replace(" %", "\n%"),
        inputs.join(", %")
    );
    let graph = graph::parse(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
    (name.to_string(), graph)
}

/// Without instructions for pairs, operands of both types are widened: row by row, and transposed.
#[test]
fn widened_products_agree_with_the_interpreter() {
    let wanted = ["rows by rows", "convolution", "weight gradient"];
    for dtype in ["bf16", "f16"] {
        let cases = PAIRED.iter().filter(|case| wanted.contains(&case.0));
        let cases: Vec<_> = cases
            .map(|(name, containers, map)| {
                paired_case(&(name, &containers.replace("bf16", dtype), map))
            })
            .collect();
        let mut isas = every_isa();
        isas.iter_mut().for_each(|o| o.target.pairs = None);
        agree_with_the_interpreter(&cases, &isas);
    }
}

/// Numbers of the packed operand of "rows by rows": 100 terms of two whole panels and one of a vector.
const PACKED_FLOATS: usize = 100 * (2 * 32 + 16);

/// Cases of [`PAIRED`] whose reductions have no dim of even size.
const ODD: [&str; 1] = ["rows by columns, terms left over"];

/// Cases whose sum threads share: by dot products, as in single precision, what follows it is a kernel of its own, and
/// the sum between the two is rounded to bf16, as PyTorch does. The interpreter does not round it.
const SHARED: [&str; 2] = [
    "weight gradient, scaled",
    "a reduction that is packed in pieces",
];

/// Tiles and dot products need a machine that has them; everything around them is the same text.
#[test]
fn products_of_pairs_agree_with_the_interpreter() {
    let mut isas = every_isa();
    let mut kinds = vec![Pairs::Plain];
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512bf16") {
        kinds.push(Pairs::Dots);
    }
    let own = isas.last().unwrap().target.pairs;
    kinds.extend(own.filter(|own| !kinds.contains(own)));
    let cases: Vec<_> = PAIRED.iter().map(paired_case).collect();
    for pairs in kinds {
        let mut options = isas.last().unwrap().clone();
        options.target = options.target.with_pairs(pairs);
        for (name, graph) in &cases {
            let lowered = lower(graph, &options.target, 2).unwrap_or_else(|e| panic!("{e}"));
            // Dot products take two steps of a reduction: none of these has a dim of even size for that.
            let is_odd = pairs == Pairs::Dots && ODD.contains(&name.as_str());
            let wanted = if is_odd { DType::F32 } else { DType::BF16 };
            let is_split = pairs == Pairs::Dots && SHARED.contains(&name.as_str());
            let of_product = |path| !is_split || path != "loops";
            for kernel in lowered.kernels.iter().filter(|k| of_product(k.path)) {
                assert_eq!(kernel.products, Some(wanted), "{name}: {}", kernel.path);
                assert_eq!(kernel.no_pairs.is_some(), is_odd, "{name}");
            }
        }
        // For products that are rounded, memory holds the packed operand, if a launch of its own packs it, and
        // nothing of the sums.
        let (_, rows) = cases.iter().find(|c| c.0 == "rows by rows").unwrap();
        let arena = |options: &CompileOptions| {
            let lowered = lower(rows, &options.target, 2).unwrap();
            lowered.memory.forward_arena_bytes
        };
        if pairs == Pairs::Dots {
            assert!([0, PACKED_FLOATS / 2 * 4].contains(&arena(&options)));
        } else {
            let packed = 65usize.div_ceil(32) * 100usize.div_ceil(32) * 2048;
            assert_eq!(arena(&options), packed);
        }
        options.target.pairs = None;
        assert!([0, PACKED_FLOATS * 4].contains(&arena(&options)));
        options.target.pairs = Some(pairs);
        isas = vec![options];
        let mut compared = cases.clone();
        compared.retain(|(name, _)| pairs != Pairs::Dots || !SHARED.contains(&name.as_str()));
        agree_with_the_interpreter(&compared, &isas);
    }
}
