//! Products on a device through a driver and a cuBLASLt that only record: what is described at load,
//! what is called at a launch, and each failure as a sentence with the product and its origin.
#![allow(unsafe_code)]

mod recorders;

use cuda_kernels::CudaError;
use cuda_kernels::device::{CublasLt, CudaModule, Device, Libraries};
use cuda_kernels::machine::Addresses;
use cuda_kernels::passes::{Pass, PlacedLaunch};
use cuda_kernels::vendor::{Compute, Finish, Gemm, LibraryProduct, Matrix, Operation};
use graph::DType;
use kernels::run::BufferRef;
use recorders::Recorders;

/// `[4, 16] x [8, 16]ᵀ + bias` in bf16, row-major, from the third row of its first factor on.
fn gemm(finish: Finish) -> Gemm {
    let matrix = |is_transposed, rows, columns, offset| Matrix {
        dtype: DType::BF16,
        is_transposed,
        rows,
        columns,
        ld: rows,
        batch_stride: 0,
        offset,
    };
    Gemm {
        m: 8,
        n: 4,
        k: 16,
        a: matrix(true, 16, 8, 0),
        b: matrix(false, 16, 4, 2 * 16),
        d: matrix(false, 8, 4, 0),
        batch: 1,
        compute: Compute::F32,
        finish,
        is_swapped: true,
    }
}

const WORKSPACE: usize = 4 << 20;

fn product(name: &str, gemm: Gemm, rank: usize) -> LibraryProduct {
    LibraryProduct::new(name.into(), Operation::Gemm(gemm), rank, WORKSPACE)
}

fn products() -> Vec<LibraryProduct> {
    let plain = Gemm {
        a: Matrix {
            batch_stride: 128,
            ..gemm(Finish::Nothing).a
        },
        batch: 2,
        compute: Compute::F32Pedantic,
        ..gemm(Finish::Nothing)
    };
    vec![
        product("sh_p0", gemm(Finish::BiasRelu), 2),
        product("sh_p1", plain, 0),
    ]
}

fn launch(product: usize, args: &[BufferRef], line: u32) -> PlacedLaunch {
    recorders::launch(product, args, format!("layers.{product} (net.py:{line})"))
}

/// The first product twice, with other biases, then the second on what they made.
fn pass() -> Pass {
    use BufferRef::{Arena, External, Saved};
    Pass {
        launches: vec![
            launch(
                0,
                &[External(1), External(0), Arena(0), External(2), Arena(4096)],
                3,
            ),
            launch(
                0,
                &[External(1), Arena(0), Saved(64), Saved(0), Arena(4096)],
                5,
            ),
            launch(1, &[External(1), Saved(64), External(3), Arena(4096)], 6),
        ],
        externals: recorders::externals(4, 3),
        arena_bytes: 4096 + WORKSPACE,
        saved_bytes: 128,
        alignment: cuda_kernels::passes::ALIGNMENT,
    }
}

const EXTERNALS: [u64; 4] = [0x1000, 0x2000, 0x3000, 0x4000];
const ADDRESSES: Addresses<'static> = Addresses {
    externals: &EXTERNALS,
    arena: 0x100_0000,
    saved: 0x20000,
};

fn load(recorders: &Recorders) -> Result<CudaModule, CudaError> {
    let device = Device::open(0)?;
    let libraries = Libraries::find(&[recorders.folder()])?;
    assert_eq!(libraries.cublaslt_version(), Some("13.4.1"));
    let pass = pass();
    let module = CudaModule::load(&device, &[], &[], &[], pass.launches.iter())?;
    module.with_products(&libraries, &products(), pass.launches.iter())
}

fn run(module: &CudaModule, stream: u64) -> Result<(), CudaError> {
    // SAFETY: the recorders execute nothing.
    unsafe { module.run(&pass(), stream, &ADDRESSES) }
}

#[test]
fn descriptions_and_algorithms_are_made_at_load() {
    let recorders = Recorders::new();
    assert_eq!(recorders.alive(), 0, "other tests gave back what they made");
    let module = load(&recorders).unwrap();
    let log = recorders.blas_log();
    let log = log
        .strip_prefix(&["cublasLtCreate".to_string()])
        .unwrap_or(&log);
    // Compute type and scale 32F; transposed, as stored; ReLU after bias; a bias aligned to 16 bytes.
    // Layouts in bf16. Then 4 MiB, sums of parts in the type of sums, alignments; the third algorithm.
    let first = [
        "cublasLtMatmulDescCreate 68 0",
        "cublasLtMatmulDescSetAttribute 3 4 1",
        "cublasLtMatmulDescSetAttribute 4 4 0",
        "cublasLtMatmulDescSetAttribute 7 4 6",
        "cublasLtMatmulDescSetAttribute 8 8 16",
        "cublasLtMatrixLayoutCreate 14 16 x 8 ld 16",
        "cublasLtMatrixLayoutSetAttribute 5 4 1",
        "cublasLtMatrixLayoutSetAttribute 6 8 0",
        "cublasLtMatrixLayoutCreate 14 16 x 4 ld 16",
        "cublasLtMatrixLayoutSetAttribute 5 4 1",
        "cublasLtMatrixLayoutSetAttribute 6 8 0",
        "cublasLtMatrixLayoutCreate 14 8 x 4 ld 8",
        "cublasLtMatrixLayoutSetAttribute 5 4 1",
        "cublasLtMatrixLayoutSetAttribute 6 8 0",
        "cublasLtMatmulPreferenceSetAttribute 1 8 4194304",
        "cublasLtMatmulPreferenceSetAttribute 3 4 2",
        "cublasLtMatmulPreferenceSetAttribute 5 4 16",
        "cublasLtMatmulPreferenceSetAttribute 6 4 16",
        "cublasLtMatmulPreferenceSetAttribute 7 4 16",
        "cublasLtMatmulPreferenceSetAttribute 8 4 16",
        "cublasLtMatmulAlgoGetHeuristic 3",
    ];
    assert_eq!(log[..first.len()], first);
    // Pedantic, a batch of two, no epilogue, the first algorithm.
    let second = &log[first.len()..];
    assert_eq!(second[0], "cublasLtMatmulDescCreate 69 0");
    assert_eq!(second[3], "cublasLtMatmulDescSetAttribute 7 4 1");
    assert_eq!(
        second[5..7],
        [
            "cublasLtMatrixLayoutSetAttribute 5 4 2",
            "cublasLtMatrixLayoutSetAttribute 6 8 128"
        ]
    );
    assert_eq!(second.last().unwrap(), "cublasLtMatmulAlgoGetHeuristic 1");
    assert_eq!(
        recorders.alive(),
        8,
        "two descriptions with three layouts each"
    );
    drop(module);
    assert_eq!(recorders.alive(), 0);
    let again = load(&recorders).unwrap();
    let created = recorders.blas_log();
    let created = created
        .iter()
        .filter(|call| *call == "cublasLtCreate")
        .count();
    assert!(created <= 1, "one handle for the device");
    drop(again);
}

#[test]
fn a_launch_calls_the_library_alone_on_the_stream_given() {
    let recorders = Recorders::new();
    let module = load(&recorders).unwrap();
    recorders.reset();
    run(&module, 77).unwrap();
    // The bias is set before each launch of its description; A, B at its offset, D as C too.
    let calls = [
        "cublasLtMatmulDescSetAttribute 8 8 12288",
        "cublasLtMatmul 1 0 a 2000 b 1040 c 1000000 d 1000000 bias 3000 algorithm 102 workspace 1001000 \
         4194304 stream 77",
        "cublasLtMatmulDescSetAttribute 8 8 131072",
        "cublasLtMatmul 1 0 a 2000 b 1000040 c 20040 d 20040 bias 20000 algorithm 102 workspace 1001000 \
         4194304 stream 77",
        "cublasLtMatmul 1 0 a 2000 b 20080 c 4000 d 4000 bias 0 algorithm 100 workspace 1001000 4194304 \
         stream 77",
    ];
    assert_eq!(recorders.blas_log(), calls);
    let driver = recorders.driver_log();
    assert_eq!(
        driver,
        ["cuCtxPushCurrent 0", "cuCtxPopCurrent"],
        "nothing is allocated or waited for"
    );
}

#[test]
fn what_the_library_refuses_names_the_product_and_its_origin() {
    let recorders = Recorders::new();
    let text = gemm(Finish::Nothing).to_string();
    for (call, status, words) in [
        (
            "cublasLtMatmulDescCreate",
            13,
            "CUBLAS_STATUS_EXECUTION_FAILED (as the test asked)",
        ),
        ("cublasLtMatrixLayoutSetAttribute", 99, "status 99. Leave"),
        (
            "cublasLtMatmulAlgoGetHeuristic",
            13,
            "CUBLAS_STATUS_EXECUTION_FAILED",
        ),
    ] {
        recorders.fail_blas(call, status);
        let message = load(&recorders).err().unwrap().to_string();
        let said = format!(
            "cuBLASLt failed in {call} for product {text} (of layers.0 (net.py:3)) on cuda:0: {words}"
        );
        assert!(message.starts_with(&said), "{message}");
        assert!(
            message.ends_with("Leave the table of products out, and our own kernels compute it")
        );
    }
    let module = load(&recorders).unwrap();
    recorders.fail_blas("cublasLtMatmul", 15);
    let message = run(&module, 1).unwrap_err().to_string();
    assert!(message.contains("failed in cublasLtMatmul") && message.contains("NOT_SUPPORTED (as"));
}

#[test]
fn a_product_that_fails_while_it_runs_is_named_where_launches_wait() {
    let recorders = Recorders::new();
    let mut module = load(&recorders).unwrap();
    module.set_blocking(true);
    recorders.fail_driver("cuStreamSynchronize", 700);
    let message = run(&module, 1).unwrap_err().to_string();
    let said = "kernel sh_p0 (cuBLASLt's m 8 n 4 k 16 batch 1; ";
    assert!(message.starts_with(said), "{message}");
    assert!(
        message.contains("(of layers.0 (net.py:3)) failed on cuda:0"),
        "{message}"
    );
}

/// Where candidates are measured, the library says how many algorithms it has.
#[test]
fn offers_are_counted() {
    let recorders = Recorders::new();
    let device = Device::open(0).unwrap();
    let libraries = Libraries::find(&[recorders.folder()]).unwrap();
    let plain = Operation::Gemm(gemm(Finish::Nothing));
    let offered = |workspace, most| device.offers(&libraries, &plain, workspace, most);
    for (workspace, most, wanted) in [(WORKSPACE, 8, 5), (WORKSPACE, 3, 3), (0, 8, 1)] {
        assert_eq!(offered(workspace, most).unwrap(), wanted);
    }
    recorders.fail_blas("cublasLtMatmulDescCreate", 13);
    let refused = offered(WORKSPACE, 8).unwrap_err().to_string();
    let said =
        "cuBLASLt failed in cublasLtMatmulDescCreate on cuda:0: CUBLAS_STATUS_EXECUTION_FAILED (as";
    assert!(refused.starts_with(said), "{refused}");
}

#[test]
fn an_algorithm_that_is_not_offered_is_told() {
    let recorders = Recorders::new();
    for (offers, found) in [(2, 2), (0, 0)] {
        recorders.offers(offers);
        let error = load(&recorders).err().unwrap();
        assert!(
            matches!(&error, CudaError::NoAlgorithm { rank: 2, offered, .. } if *offered == found)
        );
        let message = error.to_string();
        assert!(
            message.contains("(of layers.0 (net.py:3)), but cuBLASLt offers"),
            "{message}"
        );
        assert!(
            message.contains("measure the table of products anew"),
            "{message}"
        );
    }
    // A library may say by its status that it offers none.
    recorders.fail_blas("cublasLtMatmulAlgoGetHeuristic", 15);
    recorders.offers(0);
    assert!(matches!(
        load(&recorders).err(),
        Some(CudaError::NoAlgorithm { offered: 0, .. })
    ));
}

#[test]
fn a_folder_without_the_library_is_told() {
    let recorders = Recorders::new();
    let names = ("SHORTHAUL_CUBLASLT", "libcublasLt.so.13");
    let [damaged, _] = recorders.of_wrong_folders(names, CublasLt::find);
    assert!(
        matches!(damaged, CudaError::LibraryUnusable { .. }),
        "{damaged}"
    );
    assert!(damaged.to_string().contains("too short"), "{damaged}");
    recorders.of_wrong_folders(names, Libraries::find);
}

/// Convolutions need no cuBLASLt, so only the first product reports it missing.
#[test]
fn a_library_that_is_not_there_is_missed_by_its_product() {
    let recorders = Recorders::new();
    let folders = [recorders.folder()];
    let libraries = Libraries::new(None, None, &folders);
    assert_eq!(libraries.cublaslt_version(), None);
    let device = Device::open(0).unwrap();
    let pass = pass();
    let load = |products: &[LibraryProduct]| {
        let module = CudaModule::load(&device, &[], &[], &[], pass.launches.iter()).unwrap();
        module.with_products(&libraries, products, pass.launches.iter())
    };
    load(&[]).map(drop).unwrap();
    let message = load(&products()).err().unwrap().to_string();
    let said = format!(
        "product {} (of layers.0 (net.py:3)) was to be cuBLASLt's, but cuBLASLt (libcublasLt.so) was not \
         found; looked in {} and the loader's folders. Install ",
        gemm(Finish::Nothing),
        folders[0].display()
    );
    assert!(message.starts_with(&said), "{message}");
    let offers = device.offers(&libraries, &products()[0].operation, 0, 1);
    assert!(matches!(offers, Err(CudaError::NoLibrary { .. })));
}
