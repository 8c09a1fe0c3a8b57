//! Devices through a driver that only records: order and arguments of calls, and each failure as a
//! sentence with the kernel and its origin.
//!
//! The recording driver is compiled here and loaded under the driver's name, so that it is found before
//! any other. It is one for the process, so tests take turns.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cuda_kernels::device::{self, CudaModule, Device};
use cuda_kernels::machine::Addresses;
use cuda_kernels::nvrtc::{Cubin, Resources};
use cuda_kernels::passes::{Argument, Pass, PlacedLaunch};
use cuda_kernels::{Arch, CudaError, Kernel, LaunchOp, Param, ParamType, TensorMap};
use graph::DType;
use kernels::run::{BufferRef, ExternalSpec};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

struct Mock {
    library: Library,
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());
static COMPILED: OnceLock<tempfile::TempDir> = OnceLock::new();

impl Mock {
    fn new() -> Mock {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = COMPILED.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            let compiled = Command::new("cc")
                .args(["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so", "-o"])
                .arg(folder.path().join("libcuda.so"))
                .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mock_libcuda.c"))
                .status();
            assert!(compiled.unwrap().success());
            folder
        });
        let path = folder.path().join("libcuda.so");
        // SAFETY: our own library, which has no constructors.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL).unwrap() };
        let mock = Mock {
            library,
            _turn: turn,
        };
        mock.call0("mock_reset");
        mock.call1("mock_current", -1);
        mock
    }

    fn call0(&self, name: &str) {
        // SAFETY: the function has this signature in the C file.
        unsafe { self.library.get::<unsafe extern "C" fn()>(name).unwrap()() }
    }

    fn call1(&self, name: &str, value: c_int) {
        // SAFETY: as above.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn(c_int)>(name)
                .unwrap()(value)
        }
    }

    fn device(&self, count: c_int, major: c_int, minor: c_int) {
        type Set = unsafe extern "C" fn(c_int, c_int, c_int);
        // SAFETY: as above.
        unsafe { self.library.get::<Set>("mock_device").unwrap()(count, major, minor) }
    }

    fn fail(&self, call: &str, code: c_int, after: c_int) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int, c_int);
        let call = CString::new(call).unwrap();
        // SAFETY: as above.
        unsafe { self.library.get::<Fail>("mock_fail").unwrap()(call.as_ptr(), code, after) }
    }

    fn log(&self) -> Vec<String> {
        type Log = unsafe extern "C" fn() -> *const c_char;
        // SAFETY: as above; the text ends in zero.
        let text = unsafe { CStr::from_ptr(self.library.get::<Log>("mock_log").unwrap()()) };
        text.to_string_lossy().lines().map(String::from).collect()
    }
}

fn kernel(name: &str, origin: &str, threads: u32) -> Kernel {
    let param = |name: &str, ty| Param {
        name: name.into(),
        ty,
    };
    Kernel {
        name: name.into(),
        text: String::new(),
        params: vec![
            param("x", ParamType::In(DType::F32)),
            param("y", ParamType::Out(DType::F32)),
        ],
        threads,
        min_blocks: 1,
        origin: origin.into(),
    }
}

fn kernels() -> Vec<Kernel> {
    vec![
        kernel("sh_k0", "layers.0 (net.py:3)", 128),
        kernel("sh_k1", "layers.1 (net.py:4)", 256),
    ]
}

fn cubin(arch: Arch) -> Cubin {
    Cubin {
        arch,
        bytes: b"MOCK-ELF".to_vec(),
        resources: kernels()
            .into_iter()
            .map(|kernel| Resources {
                kernel: kernel.name,
                registers: 32,
                stack_bytes: 0,
                spill_store_bytes: 0,
                spill_load_bytes: 0,
                static_shared_bytes: 0,
            })
            .collect(),
        log: String::new(),
    }
}

fn launch(kernel: usize, grid: u32, shared: u32, args: [BufferRef; 2]) -> PlacedLaunch {
    PlacedLaunch {
        work: LaunchOp::Kernel(kernel),
        grid: [grid, 1, 1],
        dynamic_shared_bytes: shared,
        args: args
            .map(|at| Argument {
                at,
                bytes: 64,
                name: "t".into(),
            })
            .to_vec(),
        writes_saved: false,
        origin: format!("layers.{kernel} (net.py:{})", kernel + 3),
    }
}

/// x → arena + 256 → saved + 64, constant 0 → y.
fn pass() -> Pass {
    Pass {
        launches: vec![
            launch(0, 3, 0, [BufferRef::External(0), BufferRef::Arena(256)]),
            launch(1, 5, 65536, [BufferRef::Arena(256), BufferRef::Saved(64)]),
            launch(0, 1, 0, [BufferRef::Constant(0), BufferRef::External(1)]),
        ],
        externals: vec![
            ExternalSpec {
                bytes: 64,
                written: false,
            },
            ExternalSpec {
                bytes: 64,
                written: true,
            },
            ExternalSpec {
                bytes: 0,
                written: false,
            },
        ],
        arena_bytes: 512,
        saved_bytes: 128,
        alignment: cuda_kernels::passes::ALIGNMENT,
    }
}

const EXTERNALS: [u64; 3] = [0x1000, 0x2000, 0];
const ADDRESSES: Addresses<'static> = Addresses {
    externals: &EXTERNALS,
    arena: 0x10000,
    saved: 0x20000,
};

fn load(ordinal: usize) -> Result<CudaModule, CudaError> {
    let device: Arc<Device> = Device::open(ordinal)?;
    let constants = [vec![1, 2, 3, 4]];
    let pass = pass();
    let cubins = [cubin(device.arch())];
    CudaModule::load(
        &device,
        &kernels(),
        &cubins,
        &constants,
        pass.launches.iter(),
    )
}

fn run(module: &CudaModule, stream: u64) -> Result<(), CudaError> {
    // SAFETY: the recording driver executes nothing.
    unsafe { module.run(&pass(), stream, &ADDRESSES) }
}

#[test]
fn kernels_are_loaded_once_and_launched_in_order_on_the_stream_given() {
    let mock = Mock::new();
    let module = load(1).unwrap();
    let loading = mock.log();
    let wanted = [
        "cuModuleLoadData MOCK-ELF",
        "cuModuleGetFunction sh_k0",
        "cuModuleGetFunction sh_k1",
        "cuMemAlloc 4",
        "cuMemcpyHtoD 4",
        "cuFuncSetAttribute sh_k1 8 65536",
        "cuCtxPopCurrent",
    ];
    assert_eq!(loading[loading.len() - wanted.len()..], wanted);
    mock.call0("mock_reset");
    mock.call1("mock_pointer_device", 1);
    run(&module, 77).unwrap();
    let log = mock.log();
    assert_eq!(
        log[..3],
        [
            "cuCtxPushCurrent 1",
            "cuLaunchKernel sh_k0 grid 3 1 1 block 128 1 1 shared 0 stream 77 args 1000 10100",
            "cuLaunchKernel sh_k1 grid 5 1 1 block 256 1 1 shared 65536 stream 77 args 10100 20040",
        ]
    );
    assert!(
        log[3].starts_with("cuLaunchKernel sh_k0 grid 1 1 1 block 128"),
        "{}",
        log[3]
    );
    assert!(log[3].ends_with(" 2000"), "{}", log[3]);
    assert_eq!(
        log[4..],
        ["cuCtxPopCurrent"],
        "nothing is allocated, copied or waited for"
    );
}

/// A map is made for the address of each launch, and passed by value.
#[test]
fn what_the_copy_engine_reads_is_encoded_for_each_launch() {
    let mock = Mock::new();
    let device: Arc<Device> = Device::open(1).unwrap();
    let mut kernels = kernels();
    kernels[0].params[0].ty = ParamType::Map(TensorMap {
        dtype: DType::BF16,
        offset: 8,
        sizes: [64, 40, 3],
        strides: [72, 2880],
        lines: [128, 1],
    });
    let (pass, cubins) = (pass(), [cubin(device.arch())]);
    let launches = pass.launches.iter();
    let module = CudaModule::load(&device, &kernels, &cubins, &[vec![1; 4]], launches).unwrap();
    mock.call0("mock_reset");
    mock.call1("mock_pointer_device", 1);
    run(&module, 77).unwrap();
    let log = mock.log();
    let rest = "sizes 64 40 3 strides 144 5760 box 64 128 1 steps 1 1 1 interleave 0 swizzle 3 promotion 3 beyond 0";
    assert_eq!(
        log[1..3],
        [
            format!("cuTensorMapEncodeTiled type 9 rank 3 at 1010 {rest}"),
            "cuLaunchKernel sh_k0 grid 3 1 1 block 128 1 1 shared 0 stream 77 args 1010 10100"
                .into(),
        ]
    );
    assert!(log[3].starts_with("cuLaunchKernel sh_k1"), "{}", log[3]);
    mock.fail("cuTensorMapEncodeTiled", 1, 0);
    let refused = run(&module, 77).unwrap_err().to_string();
    assert!(
        refused.contains("sh_k0") && refused.contains("layers.0"),
        "{refused}"
    );
}

#[test]
fn launches_are_timed_by_events_between_them() {
    let mock = Mock::new();
    let module = load(1).unwrap();
    mock.call1("mock_pointer_device", 1);
    mock.call0("mock_reset");
    mock.call1("mock_pointer_device", 1);
    // SAFETY: the recording driver executes nothing.
    let seconds = unsafe { module.run_timed(&pass(), 77, &ADDRESSES) }.unwrap();
    assert_eq!(seconds, [f64::from(1.0_f32) * 1e-3; 3]);
    let calls = mock.log();
    let names: Vec<&str> = calls.iter().filter_map(|c| c.split(' ').next()).collect();
    let (record, launch) = ("cuEventRecord", "cuLaunchKernel");
    assert_eq!(
        names[1..8],
        [record, launch, record, launch, record, launch, record]
    );
    assert_eq!(names[8..11], ["cuEventSynchronize"; 3]);
    assert!(calls[1].ends_with("stream 77"));
}

#[test]
fn dropped_kernels_are_unloaded_at_the_next_load_and_not_in_a_capture() {
    let mock = Mock::new();
    drop(load(1).unwrap());
    mock.call0("mock_reset");
    drop(load(1).unwrap());
    let released = ["cuCtxSynchronize", "cuMemFree", "cuModuleUnload"];
    assert_eq!(mock.log()[1..4], released);
    let last = mock.log().pop();
    assert_eq!(
        last.as_deref(),
        Some("cuCtxPopCurrent"),
        "dropping calls nothing"
    );
}

#[test]
fn what_a_captured_graph_may_hold_stays_loaded() {
    let mock = Mock::new();
    let module = load(1).unwrap();
    mock.call1("mock_pointer_device", 1);
    mock.call1("mock_capturing", 1);
    run(&module, 5).unwrap();
    mock.call1("mock_capturing", 0);
    drop(module);
    mock.call0("mock_reset");
    drop(load(1).unwrap());
    let is_release = |call: &String| call == "cuMemFree" || call == "cuModuleUnload";
    assert!(!mock.log().iter().any(is_release), "{:?}", mock.log());
}

#[test]
fn what_cannot_be_waited_for_is_released_at_a_later_load() {
    let mock = Mock::new();
    drop(load(1).unwrap());
    mock.call0("mock_reset");
    mock.fail("cuCtxSynchronize", 900, 0);
    let second = load(1).unwrap();
    assert!(!mock.log().iter().any(|call| call == "cuModuleUnload"));
    mock.call0("mock_reset");
    let third = load(1).unwrap();
    let released = ["cuCtxSynchronize", "cuMemFree", "cuModuleUnload"];
    assert_eq!(mock.log()[1..4], released);
    drop((second, third));
}

#[test]
fn a_current_context_is_neither_pushed_nor_popped() {
    let mock = Mock::new();
    let module = load(0).unwrap();
    mock.call0("mock_reset");
    mock.call1("mock_current", 0);
    run(&module, 0).unwrap();
    let log = mock.log();
    assert!(
        log.iter().all(|call| call.starts_with("cuLaunchKernel")),
        "{log:?}"
    );
}

#[test]
fn running_out_of_memory_says_where_and_what_to_do() {
    let mock = Mock::new();
    mock.fail("cuModuleLoadData", 2, 0);
    let message = load(0).err().unwrap().to_string();
    assert!(
        message.contains("cuda:0 ran out of memory: loading 8 bytes of kernels"),
        "{message}"
    );
    assert!(message.contains("smaller batch"), "{message}");
    mock.fail("cuMemAlloc", 2, 0);
    let message = load(0).err().unwrap().to_string();
    assert!(message.contains("4 bytes of constants"), "{message}");
    mock.call0("mock_reset");
    load(0).unwrap();
    let released = mock.log();
    assert!(
        released.contains(&"cuModuleUnload".into()),
        "what was loaded goes: {released:?}"
    );
}

#[test]
fn refused_machine_code_names_the_model() {
    let mock = Mock::new();
    mock.fail("cuModuleLoadData", 209, 0);
    let message = load(0).err().unwrap().to_string();
    assert!(
        message.contains("layers.0 (net.py:3), layers.1 (net.py:4)"),
        "{message}"
    );
    assert!(
        message.contains("CUDA_ERROR_NO_BINARY_FOR_GPU"),
        "{message}"
    );
}

#[test]
fn failed_launches_name_the_kernel_and_its_origin() {
    let mock = Mock::new();
    let module = load(0).unwrap();
    mock.fail("cuLaunchKernel", 1, 1);
    let message = run(&module, 0).unwrap_err().to_string();
    assert!(message.starts_with("kernel sh_k1 (of layers.1 (net.py:4)) did not start on cuda:0"));
    mock.fail("cuLaunchKernel", 700, 1);
    let error = run(&module, 0).unwrap_err();
    assert!(matches!(&error, CudaError::FailedEarlier { kernel, .. } if kernel == "sh_k1"));
    assert!(
        error.to_string().contains("SHORTHAUL_CUDA_BLOCKING=1"),
        "{error}"
    );
}

#[test]
fn unknown_architectures_are_refused_with_their_number() {
    let mock = Mock::new();
    mock.device(6, 12, 0);
    let message = Device::open(5).err().unwrap().to_string();
    assert!(
        message.contains("cuda:5 (Mock 5) has compute capability 12.0"),
        "{message}"
    );
    assert!(message.contains("sm_80, sm_89, sm_90a"), "{message}");
    mock.device(2, 9, 0);
    let device = Device::open(0).unwrap();
    let none = std::iter::empty();
    let wrong = CudaModule::load(&device, &kernels(), &[cubin(Arch::Sm80)], &[], none);
    let message = wrong.err().unwrap().to_string();
    assert_eq!(
        message,
        "the kernels were compiled for sm_80, cuda:0 is sm_90a"
    );
}

#[test]
fn missing_devices_are_told_apart() {
    let mock = Mock::new();
    assert_eq!(device::count().unwrap(), 2);
    assert_eq!(device::driver_version().unwrap(), "13.0");
    assert!(matches!(
        Device::open(7).err(),
        Some(CudaError::NoSuchDevice {
            ordinal: 7,
            count: 2
        })
    ));
    mock.device(0, 9, 0);
    assert!(matches!(device::count(), Err(CudaError::NoDevice { .. })));
}

#[test]
fn buffers_of_another_device_or_address_are_refused_before_the_first_launch() {
    let mock = Mock::new();
    let module = load(1).unwrap();
    mock.call0("mock_reset");
    for (place, sentence) in [
        (
            0,
            "buffer 0 is in memory of cuda:0, but the kernels run on cuda:1",
        ),
        (
            -1,
            "buffer 0 is in memory of the host, but the kernels run on cuda:1",
        ),
    ] {
        mock.call1("mock_pointer_device", place);
        assert_eq!(run(&module, 0).unwrap_err().to_string(), sentence);
    }
    let mut shifted = EXTERNALS;
    shifted[1] += 4;
    let addresses = Addresses {
        externals: &shifted,
        ..ADDRESSES
    };
    // SAFETY: the recording driver executes nothing.
    let misaligned = unsafe { module.run(&pass(), 0, &addresses) };
    assert_eq!(
        misaligned.unwrap_err().to_string(),
        "buffer 1 must start at a multiple of 16 bytes"
    );
    assert!(
        !mock
            .log()
            .iter()
            .any(|call| call.starts_with("cuLaunchKernel"))
    );
}

#[test]
fn more_shared_memory_than_there_is_is_refused_at_loading() {
    let _mock = Mock::new();
    let device = Device::open(0).unwrap();
    let launches = [launch(
        1,
        1,
        232449,
        [BufferRef::External(0), BufferRef::External(1)],
    )];
    let cubins = [cubin(device.arch())];
    let loaded = CudaModule::load(&device, &kernels(), &cubins, &[], launches.iter());
    let message = loaded.err().unwrap().to_string();
    assert_eq!(
        message,
        "kernel sh_k1 (of layers.1 (net.py:4)) needs 232449 bytes of shared memory, a block on cuda:0 \
         has at most 232448"
    );
}

#[test]
fn waiting_blames_the_kernel_that_failed_but_never_in_a_capture() {
    let mock = Mock::new();
    let mut module = load(0).unwrap();
    module.set_blocking(true);
    mock.fail("cuStreamSynchronize", 700, 1);
    let error = run(&module, 5).unwrap_err();
    assert!(
        matches!(&error, CudaError::Failed { kernel, .. } if kernel == "sh_k1"),
        "{error}"
    );
    mock.call0("mock_reset");
    mock.call1("mock_capturing", 1);
    run(&module, 5).unwrap();
    assert!(
        !mock
            .log()
            .iter()
            .any(|call| call.starts_with("cuStreamSynchronize"))
    );
}
