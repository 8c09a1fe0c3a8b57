//! A CUDA program in the places of its memory plan: both passes in the emulator, on one arena and one
//! saved block whose bytes several containers share, against the interpreter.
#![allow(unsafe_code)]

use cuda_kernels::emulate::{EmulateError, Fault, FaultKind};
use cuda_kernels::emulated::Emulated;
use cuda_kernels::lower::lower;
use cuda_kernels::machine::{Addresses, Machine};
use cuda_kernels::passes::{Pass, constants, passes};
use cuda_kernels::{CudaError, LaunchOp, ParamType};
use graph::{Bindings, DType, Graph, NoLibrary, Precision, Tensor, interpret};
use kernels::progress::{Progress, Silent, UnitReady};
use kernels::run::BufferRef;

const ROWS: usize = 6;
const COLUMNS: usize = 40;

/// Two sums of rows, one saved for the backward pass, arrays that live one after another, a constant.
const STEP: &str = "graph \"step\" {
  %x: f32[6, 40] input
  %k: f32[3] constant [0.5, 2.0, -1.0]
  %a: f32[6, 40]
  %s: f32[6]
  %b: f32[6, 40]
  %r: f32[6]
  %y: f32[6, 40]
  %c: f32[6, 40]
  %g: f32[6]
  %d: f32[6, 40]
  inputs %x
  state {
    map [i < 6, j < 40] { tasklet %a[i, j] = exp($0) from %x[i, j] }
    map [i < 6, j < 40] @\"divisor\" { tasklet %s[i] (sum) = $0 from %a[i, j] }
    map [i < 6, j < 40] { tasklet %b[i, j] = $0 / $1 from %a[i, j], %s[i] }
    map [i < 6, j < 40] { tasklet %r[i] (sum) = $0 * $0 from %b[i, j] }
    map [i < 6, j < 40] { tasklet %y[i, j] = $0 * $1 + $2 from %b[i, j], %r[i], %k[1] }
    map [i < 6, j < 40] !backward { tasklet %c[i, j] = $0 * $1 from %x[i, j], %s[i] }
    map [i < 6, j < 40] @\"gradient\" !backward { tasklet %g[i] (sum) = $0 from %c[i, j] }
    map [i < 6, j < 40] !backward { tasklet %d[i, j] = $0 - $1 from %c[i, j], %g[i] }
  }
  outputs %y, %d
}
";

fn step() -> Graph {
    graph::parse(STEP).unwrap_or_else(|e| panic!("{e}"))
}

fn built(graph: &Graph) -> (Machine, [Pass; 2]) {
    let program = lower(graph).unwrap();
    let passes = passes(graph, &program).unwrap();
    let constants = constants(graph, &program);
    let emulated = Emulated::compile(&program.kernels, constants, 3, &mut Silent);
    (Machine::Emulated(emulated.unwrap()), passes)
}

/// Memory aligned as PyTorch aligns it, full of NaN.
fn block(bytes: usize) -> Vec<u128> {
    vec![u128::MAX; bytes.div_ceil(16) + 1]
}

#[test]
fn both_passes_compute_in_shared_memory_what_the_graph_means() {
    let graph = step();
    let n = ROWS * COLUMNS;
    let x: Vec<f32> = (0..n as u64)
        .map(|i| graph::philox::uniform(1, i) - 0.5)
        .collect();
    let data = x.iter().map(|v| f64::from(*v)).collect();
    let given = [Tensor::from_f64(DType::F32, &[ROWS, COLUMNS], data)];
    let none = Bindings::new();
    let expected = interpret(&graph, &given, &none, &NoLibrary, Precision::Double).unwrap();
    let (machine, [forward, backward]) = built(&graph);
    let all = 4 * n * 4;
    assert!(
        forward.arena_bytes < all,
        "arrays share bytes: {}",
        forward.arena_bytes
    );
    assert!(forward.saved_bytes >= 4 * ROWS && backward.arena_bytes > 0);
    let (mut y, mut d) = (vec![0.0_f32; n], vec![0.0_f32; n]);
    let externals = [
        x.as_ptr() as u64,
        y.as_mut_ptr() as u64,
        d.as_mut_ptr() as u64,
    ];
    assert!(externals.iter().all(|address| address % 16 == 0));
    let arena = block(forward.arena_bytes.max(backward.arena_bytes));
    let saved = block(forward.saved_bytes);
    let addresses = Addresses {
        externals: &externals,
        arena: arena.as_ptr() as u64,
        saved: saved.as_ptr() as u64,
    };
    for pass in [&forward, &backward] {
        // SAFETY: every block has the size that the passes state.
        unsafe { machine.run(pass, 0, &addresses) }.unwrap();
    }
    for (found, expected) in [&y, &d].iter().zip(&expected) {
        for (a, b) in found.iter().zip(expected.to_f64()) {
            assert!(
                (f64::from(*a) - b).abs() <= 2e-5 * b.abs().max(1.0),
                "{a} is not {b}"
            );
        }
    }
    let short = Addresses {
        externals: &externals[1..],
        ..addresses
    };
    // SAFETY: refused before anything is read.
    let refused = unsafe { machine.run(&forward, 0, &short) };
    let count = |e: &CudaError| {
        matches!(
            e,
            CudaError::ExternalCount {
                expected: 3,
                found: 2
            }
        )
    };
    assert!(refused.is_err_and(|e| count(&e)));
}

/// A plan that gave two live containers the same bytes would compute with the wrong ones: here a reader
/// is sent to bytes that no launch has written.
#[test]
fn a_place_that_nothing_was_written_to_is_found() {
    let graph = step();
    let (machine, [mut forward, mut backward]) = built(&graph);
    forward.arena_bytes += 4096;
    backward.arena_bytes += 4096;
    let read_from_arena =
        |a: &&mut cuda_kernels::passes::Argument| matches!(a.at, BufferRef::Arena(_));
    let program = lower(&graph).unwrap();
    let moved = forward.launches.iter_mut().find_map(|launch| {
        let params = program.params(launch.work);
        let reads = launch.args.iter_mut().zip(params);
        let mut reads = reads.filter(|(_, p)| matches!(p.ty, ParamType::In(_)));
        reads.find_map(|(a, _)| Some(a).filter(read_from_arena))
    });
    moved.expect("a launch reads from the arena").at = BufferRef::Arena(forward.arena_bytes - 2048);
    let gradient = backward.launches.iter_mut();
    let mut gradient = gradient.filter(|launch| launch.origin.contains("gradient"));
    let sums = gradient.next_back().expect("a launch for the gradient");
    let LaunchOp::Kernel(n) = sums.work else {
        panic!("no product is asked for");
    };
    let kernel = &program.kernels[n];
    assert!(
        kernel.origin.contains("divisor"),
        "of equal text: {}",
        kernel.origin
    );
    sums.args[0].at = BufferRef::Arena(backward.arena_bytes - 2048);
    let (x, y, d) = (block(960), block(960), block(960));
    let arena = block(forward.arena_bytes.max(backward.arena_bytes));
    let saved = block(forward.saved_bytes);
    let externals = [x.as_ptr() as u64, y.as_ptr() as u64, d.as_ptr() as u64];
    let addresses = Addresses {
        externals: &externals,
        arena: arena.as_ptr() as u64,
        saved: saved.as_ptr() as u64,
    };
    for (pass, origin) in [(&forward, ""), (&backward, "gradient")] {
        // SAFETY: every block has the size that the pass states.
        let found = unsafe { machine.run(pass, 0, &addresses) };
        let Err(CudaError::Emulate(EmulateError::Faults(faults))) = found else {
            panic!("no fault was found");
        };
        let is_it = |f: &Fault| {
            matches!(f.kind, FaultKind::Uninitialized { .. }) && f.origin.contains(origin)
        };
        assert!(faults.iter().all(is_it), "{faults:?}");
    }
}

/// A listener who wants to stop.
struct Impatient;

impl Progress for Impatient {
    fn is_interrupted(&mut self) -> bool {
        true
    }

    fn unit_ready(&mut self, unit: &UnitReady<'_>) {
        panic!("{} of {} files were compiled", unit.done, unit.total);
    }
}

#[test]
fn compilation_stops_when_it_is_interrupted() {
    let kernels = lower(&step()).unwrap().kernels;
    let stopped = Emulated::compile(&kernels, vec![], 3, &mut Impatient);
    assert!(matches!(stopped.err(), Some(EmulateError::Interrupted)));
}
