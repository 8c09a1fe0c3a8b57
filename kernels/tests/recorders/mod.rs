//! A driver, a cuBLASLt and a cuDNN that only record, compiled here and loaded under their names.
//!
//! There is one of each for the process, so tests take turns.
#![allow(unsafe_code)]
// Each test uses some of them.
#![allow(dead_code)]

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

    /// Lets the next such call of the driver fail.
    pub fn fail_driver(&self, call: &str, code: c_int) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int, c_int);
        let call = CString::new(call).unwrap();
        // SAFETY: as above.
        unsafe { self.driver.get::<Fail>("mock_fail").unwrap()(call.as_ptr(), code, 0) };
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
