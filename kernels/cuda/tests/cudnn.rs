//! Convolutions on a device through a driver and libraries that only record: what is described and planned
//! at load, what is called at a launch, and each failure as a sentence with the convolution and its origin.
#![allow(unsafe_code)]

mod recorders;

use cuda_kernels::CudaError;
use cuda_kernels::device::{CudaModule, Cudnn, Device, Libraries};
use cuda_kernels::machine::Addresses;
use cuda_kernels::passes::Pass;
use cuda_kernels::vendor::{Array, Convolution, Direction, Finish, LibraryProduct, Operation};
use graph::DType;
use kernels::run::BufferRef;
use recorders::Recorders;

/// 3x3 over `[2, 8, 6, 6]` to 16 channels; filters begin 32 elements behind their buffer's start.
fn convolution(direction: Direction, dtype: DType, finish: Finish) -> Convolution {
    let array = |sizes: [i64; 4], offset| {
        let [_, c, h, w] = sizes;
        Array {
            dtype,
            sizes,
            strides: [c * h * w, 1, c * w, c],
            offset,
        }
    };
    Convolution {
        direction,
        x: array([2, 8, 6, 6], 0),
        w: array([16, 8, 3, 3], 32),
        y: array([2, 16, 6, 6], 0),
        groups: 1,
        pads: [[1, 1], [1, 1]],
        strides: [1, 1],
        dilations: [1, 1],
        finish,
        is_swapped: false,
    }
}

const WORKSPACE: usize = 4 << 20;
const ORIGIN: &str = "layer1.0.conv2 (net.py:3)";

fn product(convolution: Convolution, rank: usize) -> LibraryProduct {
    let operation = Operation::Convolution(convolution);
    LibraryProduct::new("sh_p0".into(), operation, rank, WORKSPACE)
}

/// One launch of a product on the caller's buffers, with its workspace in the arena.
fn pass(product: &LibraryProduct) -> Pass {
    let externals = product.params.len() - 1;
    let mut at: Vec<BufferRef> = (0..externals).map(BufferRef::External).collect();
    at.push(BufferRef::Arena(4096));
    Pass {
        launches: vec![recorders::launch(0, &at, ORIGIN.into())],
        externals: recorders::externals(externals, 2),
        arena_bytes: 4096 + WORKSPACE,
        saved_bytes: 0,
        alignment: cuda_kernels::passes::ALIGNMENT,
    }
}

const EXTERNALS: [u64; 4] = [0x1000, 0x2000, 0x3000, 0x4000];

fn load(recorders: &Recorders, product: &LibraryProduct) -> Result<CudaModule, CudaError> {
    let device = Device::open(0)?;
    let libraries = Libraries::find(&[recorders.folder()])?;
    assert_eq!(libraries.cudnn_version(), Some("9.26.0"));
    let pass = pass(product);
    let module = CudaModule::load(&device, &[], &[], &[], pass.launches.iter())?;
    module.with_products(
        &libraries,
        std::slice::from_ref(product),
        pass.launches.iter(),
    )
}

fn run(module: &CudaModule, product: &LibraryProduct, stream: u64) -> Result<(), CudaError> {
    let pass = pass(product);
    let addresses = Addresses {
        externals: &EXTERNALS[..pass.externals.len()],
        arena: 0x100_0000,
        saved: 0,
    };
    // SAFETY: the recorders execute nothing.
    unsafe { module.run(&pass, stream, &addresses) }
}

/// The lines of a load, without the handle that the first one makes for all.
fn loaded(recorders: &Recorders) -> Vec<String> {
    let mut log = recorders.dnn_log();
    log.retain(|line| line != "cudnnCreate");
    log
}

#[test]
fn a_graph_is_described_at_load() {
    let recorders = Recorders::new();
    let forward = convolution(Direction::Forward, DType::BF16, Finish::Nothing);
    // No other test has looked for plans in a workspace of this size.
    let operation = Operation::Convolution(forward);
    let product = LibraryProduct::new("sh_p0".into(), operation, 0, WORKSPACE - 64);
    let module = load(&recorders, &product).unwrap();
    // Three arrays: number, bf16, sizes, strides, alignment, in memory. The second begins 64 bytes
    // behind its buffer's start, which is as well aligned.
    let arrays = [
        "set 17 #1 906 type 3: 1",
        "set 17 #1 901 type 1: 9",
        "set 17 #1 902 type 3: 2 8 6 6",
        "set 17 #1 903 type 3: 120 1 30 8",
        "set 17 #1 900 type 3: 10",
        "set 17 #1 907 type 2: 0",
        "finalize 17 #1",
        "set 17 #2 906 type 3: 2",
        "set 17 #2 901 type 1: 9",
        "set 17 #2 902 type 3: 10 8 3 3",
        "set 17 #2 903 type 3: 48 1 18 8",
        "set 17 #2 900 type 3: 10",
        "set 17 #2 907 type 2: 0",
        "finalize 17 #2",
        "set 17 #3 906 type 3: 3",
        "set 17 #3 901 type 1: 9",
        "set 17 #3 902 type 3: 2 10 6 6",
        "set 17 #3 903 type 3: 240 1 60 10",
        "set 17 #3 900 type 3: 10",
        "set 17 #3 907 type 2: 0",
        "finalize 17 #3",
    ];
    // The window: sums in f32, cross-correlation, two directions, dilations, strides, pads. The operation on
    // x, w, y by that window, times 1 plus 0 of what was there. The graph, by the session's handle.
    let operation = [
        "set 1 #4 100 type 1: 0",
        "set 1 #4 101 type 7: 1",
        "set 1 #4 106 type 3: 2",
        "set 1 #4 102 type 3: 1 1",
        "set 1 #4 103 type 3: 1 1",
        "set 1 #4 105 type 3: 1 1",
        "set 1 #4 104 type 3: 1 1",
        "finalize 1 #4",
        "set 10 #5 704 type 15: #1",
        "set 10 #5 703 type 15: #2",
        "set 10 #5 705 type 15: #3",
        "set 10 #5 702 type 15: #4",
        "set 10 #5 700 type 4: 1",
        "set 10 #5 701 type 4: 0",
        "finalize 10 #5",
        "set 15 #6 800 type 0: d00d",
        "set 15 #6 801 type 15: #5",
        "finalize 15 #6",
    ];
    // What is recommended for it; the first engine is not deterministic, so the second is planned.
    let plan = [
        "set 4 #7 201 type 15: #6",
        "set 4 #7 200 type 8: 3",
        "finalize 4 #7",
        "set 5 #15 400 type 0: d00d",
        "set 5 #15 401 type 15: #9",
        "finalize 5 #15",
    ];
    let log = loaded(&recorders);
    let wanted: Vec<&str> = arrays.into_iter().chain(operation).chain(plan).collect();
    assert_eq!(log, wanted);
    drop(module);
    assert_eq!(recorders.dnn_alive(), 0, "all descriptors were given back");
}

/// The gradients name the same arrays by other attributes: what is read first and second, and what is made.
#[test]
fn gradients_name_what_they_read_and_make() {
    let recorders = Recorders::new();
    for (direction, kind, operands) in [
        (
            Direction::Data,
            12,
            ["711 type 15: #1", "709 type 15: #2", "710 type 15: #3"],
        ),
        (
            Direction::Filter,
            11,
            ["716 type 15: #1", "717 type 15: #2", "715 type 15: #3"],
        ),
    ] {
        recorders.reset();
        let convolution = convolution(direction, DType::F16, Finish::Nothing);
        let sizes = convolution.operands().map(|(_, array)| array.sizes);
        drop(load(&recorders, &product(convolution, 0)).unwrap());
        let log = loaded(&recorders);
        for operand in operands {
            let line = format!("set {kind} #5 {operand}");
            assert!(log.contains(&line), "{line}: {log:#?}");
        }
        for (n, sizes) in (1..).zip(sizes) {
            let sizes = sizes.map(|size| format!("{size:x}")).join(" ");
            let line = format!("set 17 #{n} 902 type 3: {sizes}");
            assert!(log.contains(&line), "{line}: {log:#?}");
        }
    }
}

#[test]
fn bias_and_relu_are_operations_behind_the_sums() {
    let recorders = Recorders::new();
    let biased = convolution(Direction::Forward, DType::BF16, Finish::BiasRelu);
    drop(load(&recorders, &product(biased, 0)).unwrap());
    let log = loaded(&recorders);
    // The bias is one row of channels; sums and biased sums are f32 and reach no memory.
    for line in [
        "set 17 #4 906 type 3: 4",
        "set 17 #4 902 type 3: 1 10 1 1",
        "set 17 #5 906 type 3: 5",
        "set 17 #5 901 type 1: 0",
        "set 17 #5 907 type 2: 1",
        "set 10 #7 705 type 15: #5",
        "set 17 #8 907 type 2: 1",
        "set 0 #9 0 type 14: 0",
        "set 0 #9 1 type 1: 0",
        "set 13 #10 751 type 15: #5",
        "set 13 #10 752 type 15: #4",
        "set 13 #10 753 type 15: #8",
        "set 0 #11 0 type 14: 64",
        "set 13 #12 751 type 15: #8",
        "set 13 #12 753 type 15: #3",
        "set 15 #13 801 type 15: #7 #10 #12",
    ] {
        assert!(log.iter().any(|l| l == line), "{line}: {log:#?}");
    }
    recorders.reset();
    let biased = convolution(Direction::Forward, DType::BF16, Finish::Bias);
    drop(load(&recorders, &product(biased, 0)).unwrap());
    let log = loaded(&recorders);
    let last = "set 13 #9 753 type 15: #3".to_string();
    assert!(log.contains(&last), "{log:#?}");
    assert!(
        log.contains(&"set 15 #10 801 type 15: #7 #9".to_string()),
        "{log:#?}"
    );
}

#[test]
fn a_launch_calls_the_library_alone_on_the_stream_given() {
    let recorders = Recorders::new();
    let product = product(
        convolution(Direction::Forward, DType::BF16, Finish::Bias),
        1,
    );
    let module = load(&recorders, &product).unwrap();
    let made = recorders.dnn_alive();
    recorders.reset();
    run(&module, &product, 77).unwrap();
    let log = recorders.dnn_log();
    let [.., stream, execute] = log.as_slice() else {
        panic!("{log:#?}");
    };
    assert_eq!(stream, "cudnnSetStream d00d 77");
    assert_eq!(
        execute,
        "execute d00d engine 2 1 at 1000 2 at 2040 3 at 3000 4 at 4000 workspace 1001000"
    );
    let pack = |line: &&String| line.starts_with("set 16 ") || line.starts_with("finalize 16 ");
    assert_eq!(log.iter().filter(pack).count(), log.len() - 2, "{log:#?}");
    assert_eq!(
        recorders.dnn_alive(),
        made,
        "the addresses' descriptor is given back"
    );
    let driver = recorders.driver_log();
    assert_eq!(
        driver,
        ["cuCtxPushCurrent 0", "cuCtxPopCurrent"],
        "nothing is allocated or waited for"
    );
}

/// For bf16, the recorder's engines 1, 2 and 5 are left: 0 is not deterministic, 3 has no plan, 4 wants too much
/// workspace. For f32, tensor cores would be TF32, so only 5 is left.
#[test]
fn ranks_count_what_computes_the_same_sums() {
    let recorders = Recorders::new();
    let device = Device::open(0).unwrap();
    let libraries = Libraries::find(&[recorders.folder()]).unwrap();
    let offered = |dtype, workspace, most| {
        let convolution = convolution(Direction::Forward, dtype, Finish::Nothing);
        let operation = Operation::Convolution(convolution);
        let offered = device.offers(&libraries, &operation, workspace, most);
        offered.map_err(|error| error.to_string())
    };
    assert_eq!(offered(DType::BF16, WORKSPACE, 8), Ok(3));
    assert_eq!(offered(DType::BF16, WORKSPACE, 2), Ok(2));
    assert_eq!(offered(DType::BF16, 0, 8), Ok(2));
    assert_eq!(offered(DType::BF16, 1 << 31, 8), Ok(4));
    assert_eq!(offered(DType::F32, WORKSPACE, 8), Ok(1));
    recorders.fail_dnn("cudnnBackendFinalize", 3000);
    let refused = offered(DType::F16, 64, 8).unwrap_err();
    assert_eq!(
        refused,
        "cuDNN failed in cudnnBackendFinalize on cuda:0: CUDNN_BACKEND_TENSOR_DESCRIPTOR: \
         CUDNN_STATUS_NOT_SUPPORTED (as the test asked)"
    );
}

/// A plan may take seconds to make. Measuring every rank makes each plan once to count it and once to load it;
/// with a measured table, only plans that are loaded are made.
#[test]
fn plans_are_not_made_again_to_be_counted() {
    let recorders = Recorders::new();
    let device = Device::open(0).unwrap();
    let libraries = Libraries::find(&[recorders.folder()]).unwrap();
    let convolution = convolution(Direction::Data, DType::BF16, Finish::Nothing);
    let operation = Operation::Convolution(convolution);
    let workspace = WORKSPACE - 128;
    let mut made = Vec::new();
    for rank in 0..5 {
        recorders.reset();
        let offered = device.offers(&libraries, &operation, workspace, rank + 1);
        if offered.unwrap() > rank {
            let product = LibraryProduct::new("sh_p0".into(), operation.clone(), rank, workspace);
            drop(load(&recorders, &product).unwrap());
        }
        let is_plan = |line: &&String| line.starts_with("finalize 5 ");
        made.push(recorders.dnn_log().iter().filter(is_plan).count());
    }
    // Engines 1 and 2; 4, which wants too much, and 5; no more.
    assert_eq!(made, [2, 2, 3, 0, 0]);
}

#[test]
fn one_thread_at_a_time_uses_the_handle() {
    let recorders = Recorders::new();
    let [forward, data, filter] = [Direction::Forward, Direction::Data, Direction::Filter]
        .map(|direction| product(convolution(direction, DType::F16, Finish::Nothing), 1));
    let module = load(&recorders, &forward).unwrap();
    recorders.slow_dnn();
    std::thread::scope(|scope| {
        for product in [&data, &filter] {
            let recorders = &recorders;
            scope.spawn(move || drop(load(recorders, product).unwrap()));
        }
        for _ in 0..10 {
            run(&module, &forward, 1).unwrap();
        }
    });
    assert_eq!(recorders.dnn_overlaps(), 0);
}

/// If nothing is offered because something fails, the error has the library's words; the failure is not remembered.
#[test]
fn what_the_library_says_is_kept_where_nothing_is_found() {
    let recorders = Recorders::new();
    let filter = convolution(Direction::Filter, DType::F16, Finish::Nothing);
    let operation = Operation::Convolution(filter);
    let product = LibraryProduct::new("sh_p0".into(), operation, 0, WORKSPACE - 192);
    let device = Device::open(0).unwrap();
    let libraries = Libraries::find(&[recorders.folder()]).unwrap();
    for (kind, name) in [(4, "ENGINEHEUR"), (5, "EXECUTION_PLAN")] {
        recorders.break_dnn(kind, 3000);
        let words = format!(
            "CUDNN_BACKEND_{name}_DESCRIPTOR: CUDNN_STATUS_NOT_SUPPORTED (as the test asked)"
        );
        let message = load(&recorders, &product).err().unwrap().to_string();
        let said = format!("(of {ORIGIN}) on cuda:0: {words}");
        assert!(message.contains(&said), "{message}");
        let offered = device.offers(&libraries, &product.operation, WORKSPACE - 192, 8);
        let message = offered.unwrap_err().to_string();
        assert!(message.ends_with(&words), "{message}");
        recorders.reset();
    }
    load(&recorders, &product).map(drop).unwrap();
}

#[test]
fn what_the_library_refuses_names_the_convolution_and_its_origin() {
    let recorders = Recorders::new();
    let product = product(
        convolution(Direction::Data, DType::BF16, Finish::Nothing),
        0,
    );
    let text = product.operation.to_string();
    recorders.fail_dnn("cudnnBackendFinalize", 3000);
    let message = load(&recorders, &product).err().unwrap().to_string();
    let said = format!(
        "cuDNN failed in cudnnBackendFinalize for product {text} (of {ORIGIN}) on cuda:0: \
         CUDNN_BACKEND_TENSOR_DESCRIPTOR: CUDNN_STATUS_NOT_SUPPORTED (as the test asked). Leave the table"
    );
    assert!(message.starts_with(&said), "{message}");
    recorders.fail_dnn("cudnnBackendSetAttribute", 2000);
    let message = load(&recorders, &product).err().unwrap().to_string();
    assert!(
        message.contains("CUDNN_ATTR_TENSOR_UNIQUE_ID: ? (as the test asked)"),
        "{message}"
    );
    let module = load(&recorders, &product).unwrap();
    for call in ["cudnnSetStream", "cudnnBackendExecute"] {
        recorders.fail_dnn(call, 5000);
        let message = run(&module, &product, 1).unwrap_err().to_string();
        assert!(
            message.contains(&format!("cuDNN failed in {call} for")),
            "{message}"
        );
        assert!(
            message.contains("CUDNN_STATUS_EXECUTION_FAILED"),
            "{message}"
        );
    }
}

#[test]
fn a_rank_that_is_not_offered_is_told() {
    let recorders = Recorders::new();
    let product = product(
        convolution(Direction::Filter, DType::BF16, Finish::Nothing),
        7,
    );
    let error = load(&recorders, &product).err().unwrap();
    assert!(
        matches!(
            &error,
            CudaError::NoAlgorithm {
                rank: 7,
                offered: 3,
                ..
            }
        ),
        "{error}"
    );
    let message = error.to_string();
    assert!(
        message.contains("but cuDNN offers 3 on cuda:0"),
        "{message}"
    );
}

#[test]
fn a_folder_without_the_library_is_told() {
    let recorders = Recorders::new();
    let names = ("SHORTHAUL_CUDNN", "libcudnn.so.9");
    let [damaged, _] = recorders.of_wrong_folders(names, Cudnn::find);
    assert!(
        matches!(damaged, CudaError::LibraryUnusable { .. }),
        "{damaged}"
    );
    let message = damaged.to_string();
    assert!(message.contains("set SHORTHAUL_CUDNN"), "{message}");
    recorders.of_wrong_folders(names, Libraries::find);
}

/// Products need no cuDNN, so only the first convolution reports it missing.
#[test]
fn a_library_that_is_not_there_is_missed_by_its_convolution() {
    let recorders = Recorders::new();
    let folders = [recorders.folder()];
    let libraries = Libraries::new(None, None, &folders);
    let product = product(
        convolution(Direction::Data, DType::BF16, Finish::Nothing),
        0,
    );
    let pass = pass(&product);
    let device = Device::open(0).unwrap();
    let module = CudaModule::load(&device, &[], &[], &[], pass.launches.iter()).unwrap();
    let products = std::slice::from_ref(&product);
    let missed = module.with_products(&libraries, products, pass.launches.iter());
    let message = missed.err().unwrap().to_string();
    let said = format!(
        "product {} (of {ORIGIN}) was to be cuDNN's, but cuDNN (libcudnn.so) was not found; looked in {} and",
        product.operation,
        folders[0].display()
    );
    assert!(message.starts_with(&said), "{message}");
}
