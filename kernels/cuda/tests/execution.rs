//! Faults of whole programs executed on the host: what is wrong with them is blamed on the part of the
//! model that it belongs to.

use cuda_kernels::emulate::{EmulateError, Fault, FaultKind};
use cuda_kernels::{execute, lower};
use graph::{DType, Graph, Tensor};

/// Two look-ups of equal text.
fn look_ups() -> Graph {
    let text = "graph \"two look-ups\" {
  %i: i64[64] input
  %j: i64[64] input
  %table: f32[10] input
  %y: f32[64]
  %z: f32[64]
  inputs %i, %j, %table
  state {
    map [n < 64] @\"first\" {
      tasklet %y[n] = $1 from %i[n], %table[$0]
    }
    map [n < 64] @\"second\" {
      tasklet %z[n] = $1 from %j[n], %table[$0]
    }
  }
  outputs %y, %z
}
";
    graph::parse(text).unwrap_or_else(|e| panic!("{e}"))
}

fn indices(last: i64) -> Tensor {
    let all = (0..64).map(|n| if n == 63 { last } else { n % 10 });
    Tensor::from_i64(DType::I64, &[64], all.collect())
}

fn table() -> Tensor {
    Tensor::from_f64(DType::F32, &[10], (0..10).map(f64::from).collect())
}

fn faults(result: Result<Vec<Tensor>, EmulateError>) -> Vec<Fault> {
    match result {
        Err(EmulateError::Faults(faults)) => faults,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("no fault"),
    }
}

#[test]
fn faults_name_the_part_of_the_launch() {
    let graph = look_ups();
    let program = lower::lower(&graph).unwrap();
    assert_eq!(program.kernels.len(), 1, "kept once");
    let host = execute::compile(&graph, &program).unwrap();
    assert!(host.run(&[indices(0), indices(9), table()], 1).is_ok());
    for (i, j, part) in [(10, 0, "first"), (0, 10, "second")] {
        let faults = faults(host.run(&[indices(i), indices(j), table()], 1));
        let is_it = |f: &Fault| {
            f.origin.contains(part) && matches!(f.kind, FaultKind::OutOfBounds { element: 10, .. })
        };
        assert!(faults.iter().all(is_it), "{part}: {faults:?}");
    }
}

#[test]
fn outputs_that_no_launch_writes_are_faults() {
    let graph = look_ups();
    let inputs = [indices(0), indices(1), table()];
    let mut program = lower::lower(&graph).unwrap();
    program.launches.pop();
    let host = execute::compile(&graph, &program).unwrap();
    let [fault] = &faults(host.run(&inputs, 1))[..] else {
        panic!("one output is not written");
    };
    let z = FaultKind::Unwritten {
        array: "z".into(),
        n: 64,
        first: 0,
    };
    assert_eq!((fault.kind.clone(), fault.kernel.as_str()), (z, "none"));
}

#[test]
fn another_number_of_inputs_is_refused() {
    let graph = look_ups();
    let program = lower::lower(&graph).unwrap();
    let host = execute::compile(&graph, &program).unwrap();
    let error = host.run(&[indices(0), indices(1)], 1).unwrap_err();
    assert_eq!(error.to_string(), "2 inputs are given, the graph has 3");
}
