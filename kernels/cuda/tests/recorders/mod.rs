//! A driver, a cuBLASLt and a cuDNN that only record, compiled here and loaded under their names; launches of
//! products that are recorded.
//!
//! There is one of each for the process, so tests take turns.
#![allow(unsafe_code)]
// Each test uses some of them.
#![allow(dead_code)]

use cuda_kernels::passes::{Argument, PlacedLaunch};
use cuda_kernels::{CudaError, LaunchOp, TensorMap};
use graph::DType;
use kernels::run::{BufferRef, ExternalSpec};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

static TURN: Mutex<()> = Mutex::new(());
static COMPILED: OnceLock<tempfile::TempDir> = OnceLock::new();

/// All recorders, for one test at a time.
pub struct Recorders {
    driver: Library,
    blas: Library,
    dnn: Library,
    folder: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

fn compile(folder: &tempfile::TempDir, source: &str, soname: &str) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/");
    let compiled = Command::new("cc")
        .args([
            "-shared",
            "-fPIC",
            "-O1",
            &format!("-Wl,-soname,{soname}"),
            "-o",
        ])
        .arg(folder.path().join(soname))
        .arg(format!("{path}{source}"))
        .status();
    assert!(compiled.unwrap().success());
}

impl Recorders {
    pub fn new() -> Recorders {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: whoever reads the environment in these tests has a turn.
        unsafe {
            std::env::remove_var("SHORTHAUL_CUBLASLT");
            std::env::remove_var("SHORTHAUL_CUDNN");
        }
        let folder = COMPILED.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            compile(&folder, "mock_libcuda.c", "libcuda.so");
            compile(&folder, "mock_libcublaslt.c", "libcublasLt.so");
            compile(&folder, "mock_libcudnn.c", "libcudnn.so");
            folder
        });
        let open = |name, flags| {
            let path = folder.path().join(name);
            // SAFETY: our own library, which has no constructors.
            unsafe { Library::open(Some(path), RTLD_NOW | flags).unwrap() }
        };
        let recorders = Recorders {
            // Found before any other driver.
            driver: open("libcuda.so", RTLD_GLOBAL),
            blas: open("libcublasLt.so", RTLD_LOCAL),
            dnn: open("libcudnn.so", RTLD_LOCAL),
            folder: folder.path().to_path_buf(),
            _turn: turn,
        };
        recorders.reset();
        type Current = unsafe extern "C" fn(c_int);
        // SAFETY: the function has this signature in the C file, here and below.
        unsafe { recorders.driver.get::<Current>("mock_current").unwrap()(-1) };
        recorders
    }

    /// Where the recording libraries are.
    pub fn folder(&self) -> PathBuf {
        self.folder.clone()
    }

    /// Forgets calls and failures.
    pub fn reset(&self) {
        for library in [&self.driver, &self.blas, &self.dnn] {
            // SAFETY: as above.
            unsafe { library.get::<unsafe extern "C" fn()>("mock_reset").unwrap()() };
        }
    }

    /// Algorithms that the library offers.
    pub fn offers(&self, n: c_int) {
        type Offers = unsafe extern "C" fn(c_int);
        // SAFETY: as above.
        unsafe { self.blas.get::<Offers>("mock_offers").unwrap()(n) };
    }

    /// Descriptions that were made and not given back.
    pub fn alive(&self) -> c_int {
        alive(&self.blas)
    }

    /// The same of cuDNN.
    pub fn dnn_alive(&self) -> c_int {
        alive(&self.dnn)
    }

    /// Lets the next such call fail.
    pub fn fail_blas(&self, call: &str, status: c_int) {
        fail(&self.blas, call, status);
    }

    /// The same of cuDNN.
    pub fn fail_dnn(&self, call: &str, status: c_int) {
        fail(&self.dnn, call, status);
    }

    /// Lets no descriptor of cuDNN of that kind be finalized.
    pub fn break_dnn(&self, kind: c_int, status: c_int) {
        type Break = unsafe extern "C" fn(c_int, c_int);
        // SAFETY: as above.
        unsafe { self.dnn.get::<Break>("mock_break").unwrap()(kind, status) };
    }

    /// Lets cuDNN take its time in calls that use the handle.
    pub fn slow_dnn(&self) {
        // SAFETY: as above.
        unsafe { self.dnn.get::<unsafe extern "C" fn()>("mock_slow").unwrap()() };
    }

    /// How many calls used cuDNN's handle while another one did.
    pub fn dnn_overlaps(&self) -> c_int {
        type Overlaps = unsafe extern "C" fn() -> c_int;
        // SAFETY: as above.
        unsafe { self.dnn.get::<Overlaps>("mock_overlaps").unwrap()() }
    }

    /// What is said of a folder where `file` is damaged, and of an empty one that `variable` names.
    pub fn of_wrong_folders<L>(
        &self,
        (variable, file): (&str, &str),
        find: impl Fn(&[PathBuf]) -> Result<L, CudaError>,
    ) -> [CudaError; 2] {
        let [damaged, empty] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        std::fs::write(damaged.path().join(file), "no library").unwrap();
        let damaged = find(&[damaged.path().to_path_buf()]).err();
        // SAFETY: whoever reads the environment in these tests has a turn, which this is.
        unsafe { std::env::set_var(variable, empty.path()) };
        // Folders that have it do not help.
        let absent = find(&[self.folder()]).err();
        // SAFETY: as above.
        unsafe { std::env::remove_var(variable) };
        let said = format!("{variable} names {}, where no ", empty.path().display());
        let absent = absent.expect("an empty folder has no library");
        assert!(absent.to_string().starts_with(&said), "{absent}");
        [damaged.expect("a damaged library is not loaded"), absent]
    }

    /// Lets the next such call of the driver fail.
    pub fn fail_driver(&self, call: &str, code: c_int) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int, c_int);
        let call = CString::new(call).unwrap();
        // SAFETY: as above.
        unsafe { self.driver.get::<Fail>("mock_fail").unwrap()(call.as_ptr(), code, 0) };
    }

    /// How many arguments of a launch are recorded; a kernel has at least as many.
    pub fn params(&self, n: c_int) {
        // SAFETY: as above.
        unsafe {
            self.driver
                .get::<unsafe extern "C" fn(c_int)>("mock_params")
                .unwrap()(n);
        }
    }

    /// Whether the driver takes a map of 16-bit elements at an address, asked by itself.
    pub fn takes(&self, map: &TensorMap, address: u64) -> bool {
        type Encode = unsafe extern "C" fn(
            *mut [u64; 16],
            c_int,
            u32,
            u64,
            *const u64,
            *const u64,
            *const u32,
            *const u32,
            c_int,
            c_int,
            c_int,
            c_int,
        ) -> c_int;
        #[repr(align(64))]
        struct Encoded([u64; 16]);
        let mut encoded = Encoded([0; 16]);
        let dtype = if map.dtype == DType::F16 { 6 } else { 9 };
        let (sizes, strides) = (map.sizes.map(u64::from), map.strides.map(|n| n * 2));
        let (in_box, steps) = ([64, map.lines[0], map.lines[1]], [1; 3]);
        let first = address + map.offset as u64 * 2;
        // SAFETY: as above; there are as many numbers as the rank says.
        let status = unsafe {
            self.driver.get::<Encode>("cuTensorMapEncodeTiled").unwrap()(
                &mut encoded.0,
                dtype,
                3,
                first,
                sizes.as_ptr(),
                strides.as_ptr(),
                in_box.as_ptr(),
                steps.as_ptr(),
                0,
                3,
                3,
                0,
            )
        };
        status == 0
    }

    pub fn driver_log(&self) -> Vec<String> {
        log(&self.driver)
    }

    pub fn blas_log(&self) -> Vec<String> {
        log(&self.blas)
    }

    pub fn dnn_log(&self) -> Vec<String> {
        log(&self.dnn)
    }
}

/// One launch of a product on 64 bytes each.
pub fn launch(product: usize, args: &[BufferRef], origin: String) -> PlacedLaunch {
    let argument = |at: &BufferRef| Argument {
        at: *at,
        bytes: 64,
        name: "t".into(),
    };
    PlacedLaunch {
        work: LaunchOp::Product(product),
        grid: [1, 1, 1],
        dynamic_shared_bytes: 0,
        args: args.iter().map(argument).collect(),
        writes_saved: false,
        origin,
    }
}

/// Buffers of the caller, of which one is written.
pub fn externals(n: usize, written: usize) -> Vec<ExternalSpec> {
    let external = |slot| ExternalSpec {
        bytes: 64,
        written: slot == written,
    };
    (0..n).map(external).collect()
}

fn alive(library: &Library) -> c_int {
    type Alive = unsafe extern "C" fn() -> c_int;
    // SAFETY: as above.
    unsafe { library.get::<Alive>("mock_alive").unwrap()() }
}

fn fail(library: &Library, call: &str, status: c_int) {
    type Fail = unsafe extern "C" fn(*const c_char, c_int);
    let call = CString::new(call).unwrap();
    // SAFETY: as above.
    unsafe { library.get::<Fail>("mock_fail").unwrap()(call.as_ptr(), status) };
}

fn log(library: &Library) -> Vec<String> {
    type Log = unsafe extern "C" fn() -> *const c_char;
    // SAFETY: as above; the text ends in zero.
    let text = unsafe { CStr::from_ptr(library.get::<Log>("mock_log").unwrap()()) };
    text.to_string_lossy().lines().map(String::from).collect()
}
