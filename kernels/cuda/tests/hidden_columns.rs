//! Columns that blocks of rows do not see and chains do not visit: results are the same, fewer products are
//! counted, and ranges that are off by one are found.

mod chain_cases;
mod chain_runs;

use chain_cases::{Case, Mask, graph, input};
use chain_runs::{CASE, SEEDS, check, tolerance};
use cuda_kernels::{execute, lower};
use graph::{Bindings, NoLibrary, Precision, Tensor, interpret};

/// Three blocks of rows and the columns that they see: one more than causal, so that a last visited block holds
/// but one seen number, and a band.
fn seen(mask: Mask, [rows, columns]: [i64; 2]) -> Case {
    Case {
        name: "seen",
        mask,
        rows,
        columns,
        heads: 1,
        ..CASE
    }
}

#[test]
fn columns_that_rows_do_not_see_are_not_visited() {
    let of = |name, mask, sizes| Case {
        name,
        ..seen(mask, sizes)
    };
    check(
        &[
            of("causal", Mask::Causal, [150, 150]),
            of("more", Mask::After, [150, 150]),
            of("tall", Mask::After, [150, 70]),
            of("long", Mask::After, [70, 150]),
            of("band", Mask::Band, [190, 190]),
            Case {
                is_backward: false,
                ..of("before", Mask::Before, [150, 150])
            },
        ],
        true,
    );
}

/// What is counted of each kernel: products over the blocks of columns that a block of rows visits.
#[test]
fn hidden_columns_are_not_multiplied() {
    let flops = |mask, sizes| {
        let program = lower::lower(&graph(&[seen(mask, sizes)])).unwrap();
        let all: Vec<u64> = program.maps.iter().map(|m| m.flops).collect();
        all
    };
    // A product is 32 wide. Forward a kernel has two, over blocks of 64 columns; both gradients compute the
    // scores and their gradients, twice by rows for the sums that come first, in blocks of 32 columns.
    let products = [2, 5, 4].map(|n| n * 2 * 32);
    assert_eq!(
        flops(Mask::None, [192, 192]),
        products.map(|n| n * 192 * 192)
    );
    let half = 64 * (64 + 128 + 192);
    assert_eq!(flops(Mask::Causal, [192, 192]), products.map(|n| n * half));
    // By columns, what sees one more row begins a block earlier.
    let [forward, rows, columns] = products;
    let (wide, narrow) = (64 * (128 + 192 + 192), 64 * (96 + 160 + 192));
    let later = 64 * (192 + 160 + 96);
    assert_eq!(
        flops(Mask::After, [192, 192]),
        [forward * wide, rows * narrow, columns * later]
    );
}

/// A range that ends one column early, or begins one late, leaves out a number that a row sees.
#[test]
fn ranges_that_are_off_by_one_are_found() {
    const NAMES: [&str; 7] = [
        "sound", "end0", "end1", "end2", "begin0", "begin1", "begin2",
    ];
    // Kernels of equal text are one kernel.
    let of = |(n, name): (i64, &'static str)| Case {
        name,
        ..seen(Mask::Band, [192, 192 + 8 * n])
    };
    let cases: Vec<Case> = (0..).zip(NAMES).map(of).collect();
    let graph = graph(&cases);
    let mut program = lower::lower(&graph).unwrap();
    assert_eq!(program.kernels.len(), 3 * NAMES.len());
    for n in 1..NAMES.len() {
        let (from, to) = match n {
            1..=3 => ("- 1 + 2; /* seen */", "- 1 + 1; /* seen */"),
            _ => ("block_row + -1; /* seen */", "block_row + 0; /* seen */"),
        };
        let text = &mut program.kernels[3 * n + (n - 1) % 3].text;
        assert!(text.contains(from), "{text}");
        *text = text.replace(from, to);
    }
    let inputs: Vec<Tensor> = graph.inputs.iter().map(|id| input(&graph, *id)).collect();
    let none = Bindings::new();
    let expected = interpret(&graph, &inputs, &none, &NoLibrary, Precision::Double).unwrap();
    let host = execute::compile(&graph, &program).unwrap();
    let found = host.run(&inputs, SEEDS[0]).unwrap();
    let is_right = |name: &str| {
        let output = graph
            .outputs
            .iter()
            .position(|o| graph.container(o.container).name == name);
        let output = output.unwrap();
        let (e, f) = (expected[output].to_f64(), found[output].to_f64());
        let scale = e.iter().fold(0.0, |m, x| f64::max(m, x.abs()));
        let near = |(e, f): (&f64, &f64)| (e - f).abs() <= tolerance(&graph, name) * scale;
        e.iter().zip(&f).all(near)
    };
    for (n, name) in NAMES.into_iter().enumerate() {
        for (kernel, result) in ["o", "gq", "gv"].into_iter().enumerate() {
            let is_planted = n > 0 && (n - 1) % 3 == kernel;
            // A fault in the forward kernel makes results of the backward ones wrong, too, so those are not compared.
            if is_planted || n == 0 {
                assert_eq!(
                    is_right(&format!("{name}_{result}")),
                    n == 0,
                    "{name}: {result}"
                );
            }
        }
    }
}

/// All columns are visited if a point that a row does not see changes something.
#[test]
fn points_that_change_something_are_visited() {
    let case = Case {
        is_backward: false,
        ..seen(Mask::Causal, [150, 150])
    };
    let text = graph(&[case]).to_string();
    // Passes over what is seen, and over all columns.
    let passes = |text: &str| {
        let program = lower::lower(&graph::parse(text).unwrap()).unwrap();
        assert_eq!(program.maps[0].path, "chain", "{text}");
        let text = &program.kernels[0].text;
        ["first < end;", "first < 150;"].map(|all| text.matches(all).count())
    };
    assert_eq!(passes(&text), [1, 0]);
    // Another score than −∞.
    assert!(text.contains("-inf"));
    assert_eq!(passes(&text.replace("-inf", "-100.0")), [0, 1]);
    // A comparison of more than row and column.
    let twice = text.replace("{x} <= {w}", "{2*x} <= {w}");
    assert_ne!(twice, text);
    assert_eq!(passes(&twice), [0, 1]);
    // A tile that is stored, after its rows' numbers.
    let stored = Case {
        is_stored: true,
        ..case
    };
    assert_eq!(passes(&graph(&[stored]).to_string()), [1, 1]);
}
