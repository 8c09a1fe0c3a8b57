//! The calls of the CUDA driver that Shorthaul makes.
//!
//! Owns every use of the driver's C interface, each behind a function that gives a typed error. Never
//! keeps a stream, never waits unless asked to.
#![allow(unsafe_code)]

use super::DeviceInfo;
use crate::{CudaError, TensorMap};
use cudarc::driver::sys::{self, CUresult};
use graph::DType;
use std::env;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) code: u32,
    /// Name and sentence of the driver: `CUDA_ERROR_OUT_OF_MEMORY (out of memory)`.
    pub(super) problem: String,
}

/// No memory left on the device.
const OUT_OF_MEMORY: u32 = 2;
/// Errors after which every call on the context fails: illegal address, time-out, assertion, illegal instruction,
/// misaligned address, address space, program counter, and the like.
const CONTEXT_LOST: [u32; 11] = [214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719];

impl Failure {
    pub(super) fn is_out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }

    pub(super) fn is_context_lost(&self) -> bool {
        CONTEXT_LOST.contains(&self.code)
    }

    /// The error for a failed call of which nothing more is known.
    pub(super) fn of_call(self, call: &'static str, ordinal: usize) -> CudaError {
        match self.is_out_of_memory() {
            true => CudaError::OutOfMemory {
                ordinal,
                doing: format!("the driver said so in {call}"),
            },
            false => CudaError::Call {
                call,
                ordinal,
                problem: self.problem,
            },
        }
    }
}

fn checked(status: CUresult) -> Result<(), Failure> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver gives a text of its own, or none for a number that it does not know.
        unsafe {
            let known = get(status, &mut text) == CUresult::CUDA_SUCCESS && !text.is_null();
            known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let code = status as u32;
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("error {code}"));
    let problem = match text(sys::cuGetErrorString) {
        Some(sentence) => format!("{name} ({sentence})"),
        None => name,
    };
    Err(Failure { code, problem })
}

/// Loads and initializes the driver, once.
fn ready() -> Result<(), CudaError> {
    static STATE: OnceLock<Option<Result<(), Failure>>> = OnceLock::new();
    let state = STATE.get_or_init(|| {
        // SAFETY: asks the loader for NVIDIA's library; cudarc panics without it, so this comes first.
        unsafe { sys::is_culib_present().then(|| checked(sys::cuInit(0))) }
    });
    const NO_DEVICE: u32 = 100;
    match state {
        None => Err(CudaError::NoDriver),
        Some(Ok(())) => Ok(()),
        Some(Err(failure)) if failure.code == NO_DEVICE => Err(no_device()),
        Some(Err(failure)) => Err(failure.clone().of_call("cuInit", 0)),
    }
}

fn no_device() -> CudaError {
    CudaError::NoDevice {
        visible: env::var("CUDA_VISIBLE_DEVICES").ok(),
    }
}

pub(super) fn count() -> Result<usize, CudaError> {
    ready()?;
    let mut n: c_int = 0;
    // SAFETY: the driver is initialized, here and below; the pointer leads to a number.
    let counted = unsafe { checked(sys::cuDeviceGetCount(&mut n)) };
    counted.map_err(|f| f.of_call("cuDeviceGetCount", 0))?;
    match usize::try_from(n) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(no_device()),
    }
}

pub(super) fn version() -> Result<String, CudaError> {
    ready()?;
    let mut version: c_int = 0;
    // SAFETY: as above.
    let got = unsafe { checked(sys::cuDriverGetVersion(&mut version)) };
    got.map_err(|f| f.of_call("cuDriverGetVersion", 0))?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

pub(super) fn describe(ordinal: usize) -> Result<DeviceInfo, CudaError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let handle = handle(ordinal)?;
    let attribute = |which: Attribute| {
        let mut value: c_int = 0;
        // SAFETY: as above, and the device exists.
        let got = unsafe { checked(sys::cuDeviceGetAttribute(&mut value, which, handle)) };
        got.map(|()| value)
            .map_err(|f| f.of_call("cuDeviceGetAttribute", ordinal))
    };
    let mut name = [0; 256];
    let mut memory_bytes = 0;
    // SAFETY: as above; the name is given room for 256 bytes.
    unsafe {
        checked(sys::cuDeviceGetName(name.as_mut_ptr(), 256, handle))
            .map_err(|f| f.of_call("cuDeviceGetName", ordinal))?;
        checked(sys::cuDeviceTotalMem_v2(&mut memory_bytes, handle))
            .map_err(|f| f.of_call("cuDeviceTotalMem", ordinal))?;
    }
    let name: Vec<u8> = name
        .iter()
        .map(|c| *c as u8)
        .take_while(|c| *c != 0)
        .collect();
    Ok(DeviceInfo {
        ordinal,
        name: String::from_utf8_lossy(&name).into_owned(),
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        memory_bytes,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
    })
}

fn handle(ordinal: usize) -> Result<sys::CUdevice, CudaError> {
    ready()?;
    let mut device = 0;
    // SAFETY: as above.
    let got = unsafe { checked(sys::cuDeviceGet(&mut device, ordinal as c_int)) };
    got.map_err(|f| f.of_call("cuDeviceGet", ordinal))?;
    Ok(device)
}

/// A device's primary context.
pub(super) struct Context {
    ordinal: usize,
    context: sys::CUcontext,
}

// SAFETY: a context may be used from any thread; it is made current on the calling one.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains it, and never lets it go: PyTorch's memory lives in it.
    pub(super) fn primary(ordinal: usize) -> Result<Context, CudaError> {
        let device = handle(ordinal)?;
        let mut context = null_mut();
        // SAFETY: as above.
        let got = unsafe { checked(sys::cuDevicePrimaryCtxRetain(&mut context, device)) };
        got.map_err(|f| f.of_call("cuDevicePrimaryCtxRetain", ordinal))?;
        Ok(Context { ordinal, context })
    }

    /// Runs `body` with this context current on this thread; then the context of before is current again.
    pub(super) fn within<T>(&self, body: impl FnOnce() -> T) -> Result<T, CudaError> {
        let mut before = null_mut();
        let failed = |call| move |f: Failure| f.of_call(call, self.ordinal);
        // SAFETY: the context is held by `self`.
        unsafe {
            checked(sys::cuCtxGetCurrent(&mut before)).map_err(failed("cuCtxGetCurrent"))?;
            if before == self.context {
                return Ok(body());
            }
            checked(sys::cuCtxPushCurrent_v2(self.context)).map_err(failed("cuCtxPushCurrent"))?;
            let result = body();
            let mut popped = null_mut();
            checked(sys::cuCtxPopCurrent_v2(&mut popped)).map_err(failed("cuCtxPopCurrent"))?;
            Ok(result)
        }
    }
}

/// A loaded cubin; stays loaded. Functions and memory below are used with their context current.
#[derive(Clone, Copy)]
pub(super) struct Module(sys::CUmodule);
/// A kernel of a loaded cubin.
#[derive(Clone, Copy)]
pub(super) struct Function(sys::CUfunction);

// SAFETY: handles are plain data, valid from every thread while the module is loaded.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    pub(super) fn load(cubin: &[u8]) -> Result<Module, Failure> {
        let mut module = null_mut();
        // SAFETY: a whole ELF file, which says its own size; the driver copies it.
        unsafe { checked(sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()))? };
        Ok(Module(module))
    }

    /// The kernel of that name, loaded now: a first launch in a captured stream could not load it.
    pub(super) fn function(self, name: &CString) -> Result<Function, Failure> {
        use sys::CUfunction_attribute_enum as Attribute;
        let mut function = null_mut();
        let mut registers: c_int = 0;
        let which = Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the module is loaded and the name ends in zero.
        unsafe {
            checked(sys::cuModuleGetFunction(
                &mut function,
                self.0,
                name.as_ptr(),
            ))?;
            checked(sys::cuFuncGetAttribute(&mut registers, which, function))?;
        }
        Ok(Function(function))
    }

    /// # Safety
    /// No launch of its kernels is under way or to come.
    pub(super) unsafe fn unload(self) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        checked(unsafe { sys::cuModuleUnload(self.0) })
    }
}

impl Function {
    /// Lets launches ask for up to that many bytes of dynamic shared memory.
    pub(super) fn allow_dynamic_shared(self, bytes: u32) -> Result<(), Failure> {
        use sys::CUfunction_attribute_enum as Attribute;
        let which = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function's module is loaded.
        checked(unsafe { sys::cuFuncSetAttribute(self.0, which, bytes as c_int) })
    }

    /// Enqueues a launch.
    ///
    /// # Safety
    /// `args` has one pointer per parameter of the kernel, each to the argument's value; addresses
    /// among them are good for what the kernel does with them, until it has run; the stream belongs to
    /// the current context.
    pub(super) unsafe fn launch(
        self,
        grid: [u32; 3],
        threads: u32,
        dynamic_shared_bytes: u32,
        stream: u64,
        args: &mut [*mut c_void],
    ) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        checked(unsafe {
            sys::cuLaunchKernel(
                self.0,
                grid[0],
                grid[1],
                grid[2],
                threads,
                1,
                1,
                dynamic_shared_bytes,
                stream as usize as sys::CUstream,
                args.as_mut_ptr(),
                null_mut(),
            )
        })
    }
}

/// A buffer's matrices as the copy engine is told of them: what a kernel takes by value.
#[derive(Clone, Copy)]
pub(super) struct EncodedMap(sys::CUtensorMap);

// What the driver writes to must lie at a multiple of 64 bytes.
const _: () = assert!(align_of::<EncodedMap>() >= 64);

/// `cuTensorMapEncodeTiled`.
type Encode = unsafe extern "C" fn(
    *mut sys::CUtensorMap,
    sys::CUtensorMapDataType,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    sys::CUtensorMapInterleave,
    sys::CUtensorMapSwizzle,
    sys::CUtensorMapL2promotion,
    sys::CUtensorMapFloatOOBfill,
) -> CUresult;

/// The driver's function, which those older than CUDA 12.0 lack: then the bindings would panic.
fn encode() -> Option<Encode> {
    static FOUND: OnceLock<Option<Encode>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: the signature is the header's; the driver stays loaded.
        unsafe {
            let found = sys::culib().get::<Encode>(b"cuTensorMapEncodeTiled");
            found.ok().map(|function| *function)
        }
    })
}

impl EncodedMap {
    /// Whether the driver knows maps.
    pub(super) fn is_known() -> bool {
        encode().is_some()
    }

    /// Encodes the map for the buffer at `address`.
    ///
    /// # Errors
    /// It does not keep one of the driver's conditions, or the driver refuses it.
    pub(super) fn new(map: &TensorMap, address: u64) -> Result<EncodedMap, Failure> {
        use sys::{
            CUtensorMapDataType as Type, CUtensorMapFloatOOBfill as Beyond,
            CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as Promotion,
            CUtensorMapSwizzle as Swizzle,
        };
        let refused = |problem: &str| Failure {
            code: CUresult::CUDA_ERROR_INVALID_VALUE as u32,
            problem: format!("a map for the copy engine must keep this: {problem}"),
        };
        map.check().map_err(refused)?;
        if !address.is_multiple_of(TensorMap::ALIGNMENT as u64) {
            return Err(refused("its buffer starts at a multiple of 16 bytes"));
        }
        let encode = encode().ok_or_else(|| refused("the driver is one for CUDA 12.0 or newer"))?;
        let mut encoded = sys::CUtensorMap { opaque: [0; 16] };
        let first = address + map.offset as u64 * map.dtype.bytes() as u64;
        let sizes = map.sizes.map(u64::from);
        let strides = map.stride_bytes();
        let [lines, more] = map.lines;
        let (in_box, steps) = ([TensorMap::LINE, lines, more], [1; 3]);
        // SAFETY: every pointer leads to as many numbers as there are dimensions, strides one fewer; the
        // address is only written down.
        checked(unsafe {
            encode(
                &mut encoded,
                match map.dtype {
                    DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                    _ => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                },
                3,
                first as usize as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                in_box.as_ptr(),
                steps.as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                Beyond::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(EncodedMap(encoded))
    }

    /// The argument's value.
    pub(super) fn as_argument(&mut self) -> *mut c_void {
        std::ptr::from_mut(&mut self.0).cast()
    }
}

/// Memory of the device that belongs to Shorthaul.
pub(super) fn upload(bytes: &[u8]) -> Result<u64, Failure> {
    let mut address = 0;
    // SAFETY: fresh memory of that size is filled from a slice of that size; the copy is done when the
    // call returns.
    unsafe {
        checked(sys::cuMemAlloc_v2(&mut address, bytes.len()))?;
        checked(sys::cuMemcpyHtoD_v2(
            address,
            bytes.as_ptr().cast(),
            bytes.len(),
        ))?;
    }
    Ok(address)
}

/// # Safety
/// The address came from [`upload`], and no kernel reads it any more.
pub(super) unsafe fn free(address: u64) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    checked(unsafe { sys::cuMemFree_v2(address) })
}

/// Which device an address belongs to; `None` for memory that the driver does not know.
pub(super) fn device_of(address: u64) -> Option<usize> {
    let mut ordinal: c_int = -1;
    let which = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: the attribute is a number; addresses are only looked up.
    let got = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), which, address) };
    checked(got)
        .ok()
        .and_then(|()| usize::try_from(ordinal).ok())
}

/// Whether work given to a stream is being recorded.
pub(super) fn is_capturing(stream: u64) -> Result<bool, Failure> {
    use sys::CUstreamCaptureStatus_enum as Status;
    let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a stream of the current context.
    unsafe {
        checked(sys::cuStreamIsCapturing(
            stream as usize as sys::CUstream,
            &mut status,
        ))?
    };
    Ok(status != Status::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// A moment in a stream's work.
pub(super) struct Event(sys::CUevent);

impl Event {
    /// The moment when the stream has done what it was given so far.
    pub(super) fn record(stream: u64) -> Result<Event, Failure> {
        let mut event = null_mut();
        // SAFETY: the pointer leads to an event; a stream of the current context.
        unsafe {
            checked(sys::cuEventCreate(&mut event, 0))?;
            let event = Event(event);
            checked(sys::cuEventRecord(
                event.0,
                stream as usize as sys::CUstream,
            ))?;
            Ok(event)
        }
    }

    /// Seconds from an earlier moment to this one, once both have passed.
    pub(super) fn seconds_since(&self, earlier: &Event) -> Result<f64, Failure> {
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
        let mut milliseconds: f32 = 0.0;
        // SAFETY: both events were recorded. Every driver has this function; the bindings only know its
        // second version, which older drivers lack.
        unsafe {
            checked(sys::cuEventSynchronize(self.0))?;
            let found = sys::culib().get::<Elapsed>(b"cuEventElapsedTime");
            let elapsed = found.map_err(|error| Failure {
                code: 0,
                problem: error.to_string(),
            })?;
            checked(elapsed(&mut milliseconds, earlier.0, self.0))?;
        }
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by us; the driver keeps it until it has passed.
        let _ = checked(unsafe { sys::cuEventDestroy_v2(self.0) });
    }
}

/// Waits until the current context has done everything.
pub(super) fn wait_for_all() -> Result<(), Failure> {
    // SAFETY: a context is current.
    checked(unsafe { sys::cuCtxSynchronize() })
}

/// Waits until a stream is done.
pub(super) fn wait(stream: u64) -> Result<(), Failure> {
    // SAFETY: a stream of the current context.
    checked(unsafe { sys::cuStreamSynchronize(stream as usize as sys::CUstream) })
}
