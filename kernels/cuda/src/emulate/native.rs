//! The calling convention between the emulator and compiled kernels: `sh_launch` of `host.h`.
//!
//! Owns the structures that both sides share, the fibers' stacks and the one call across.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use super::traffic::{AccessMade, Counter};
use super::trap;
use super::{Access, EmulateError, Fault, FaultKind, Memory, Settings, c_name, scalar_bits};
use crate::{Arg, Kernel, Launch, ParamType};
use kernels::memory::AlignedBuffer;
use kernels::run::Module;

/// Bytes of a fiber's stack, guard page included.
const STACK_BYTES: usize = 256 << 10;
const GUARD_BYTES: usize = 16 << 10;
const FAULT_CAPACITY: usize = 32;
/// `sizeof(sh_cell)`.
const CELL_BYTES: usize = 20;

#[repr(C)]
struct NativeRegion {
    data: *mut u8,
    bytes: u64,
    granule: u32,
    is_shared: u32,
    cells: *mut u8,
    initialized: *mut u8,
    name: *const c_char,
}

#[repr(C)]
struct NativeArg {
    region: *mut NativeRegion,
    bits: u64,
}

#[repr(C)]
#[derive(Clone)]
struct NativeFault {
    kind: u32,
    thread: u32,
    other_thread: u32,
    block: u32,
    other_block: u32,
    write: u32,
    other_write: u32,
    line: u32,
    element: i64,
    n: i64,
    name: [u8; 64],
    note: [u8; 512],
}

#[repr(C)]
struct NativeLaunch {
    grid: [u32; 3],
    threads: u32,
    dynamic_bytes: u32,
    shared_limit: u32,
    fault_capacity: u32,
    n_faults: u32,
    stack_bytes: u32,
    seed: u64,
    step_limit: u64,
    stacks: *mut u8,
    args: *const NativeArg,
    faults: *mut NativeFault,
    block_order: *mut u32,
    block_epochs: *mut u32,
    count: Option<CountAccess>,
    counter: *mut c_void,
}

/// What a launch tells of every access to a buffer: counter, region, place in the text, block, thread,
/// offset in bytes, bytes, whether it writes.
type CountAccess =
    unsafe extern "C" fn(*mut c_void, *const NativeRegion, usize, u32, u32, u64, u32, u32);

/// A counter and where the regions of its launch begin.
struct Counting<'c> {
    counter: &'c mut Counter,
    regions: *const NativeRegion,
}

unsafe extern "C" fn count_access(
    counting: *mut c_void,
    region: *const NativeRegion,
    site: usize,
    block: u32,
    thread: u32,
    offset: u64,
    bytes: u32,
    write: u32,
) {
    // SAFETY: the launch hands on what `run` gave it; `region` is one of its regions.
    let (counting, buffer) = unsafe {
        let counting = &mut *counting.cast::<Counting>();
        let buffer = region.offset_from(counting.regions) as usize;
        (counting, buffer)
    };
    counting.counter.add(&AccessMade {
        buffer,
        site,
        block,
        thread,
        offset,
        bytes,
        write: write != 0,
    });
}

/// One launch at a time: a kernel's state is global to its file, and two emulators of equal kernels
/// share one loaded file.
static RUNNING: Mutex<()> = Mutex::new(());

/// Loaded kernels.
pub(super) struct Native {
    module: Arc<Module>,
}

impl Native {
    pub(super) fn new(module: Arc<Module>) -> Self {
        Native { module }
    }

    /// Runs a launch whose arguments were checked; the result is what was found.
    pub(super) fn run(
        &self,
        kernel: &Kernel,
        launch: &Launch,
        memory: &mut Memory,
        settings: &Settings,
        counter: Option<&mut Counter>,
    ) -> Result<Vec<Fault>, EmulateError> {
        let run = self.module.symbol(&format!("sh_run_{}", kernel.name))?;
        // SAFETY: the emulator's own text defines this symbol with this signature.
        let run: unsafe extern "C" fn(*mut NativeLaunch) = unsafe { std::mem::transmute(run) };
        let mut shadow = Shadow::of(launch, memory)?;
        let args = arguments(kernel, launch, &mut shadow.regions);
        let stacks = Stacks::of(kernel.threads as usize)?;
        let n_blocks = launch.grid.iter().map(|&n| n as usize).product();
        let (mut order, mut epochs) = (vec![0_u32; n_blocks], vec![0_u32; n_blocks]);
        let mut faults = vec![NativeFault::EMPTY; FAULT_CAPACITY];
        let mut counting = counter.map(|counter| Counting {
            counter,
            regions: shadow.regions.as_ptr(),
        });
        let mut native = NativeLaunch {
            grid: launch.grid,
            threads: kernel.threads,
            dynamic_bytes: launch.dynamic_shared_bytes,
            shared_limit: settings.arch.shared_bytes(),
            fault_capacity: FAULT_CAPACITY as u32,
            n_faults: 0,
            stack_bytes: STACK_BYTES as u32,
            seed: settings.seed,
            step_limit: settings.step_limit,
            stacks: stacks.start.cast(),
            args: args.as_ptr(),
            faults: faults.as_mut_ptr(),
            block_order: order.as_mut_ptr(),
            block_epochs: epochs.as_mut_ptr(),
            count: counting.is_some().then_some(count_access as CountAccess),
            counter: counting
                .as_mut()
                .map_or(ptr::null_mut(), |c| ptr::from_mut(c).cast()),
        };
        let divided = self.module.symbol("sh_divided_by_zero")?;
        // SAFETY: as above.
        let divided: unsafe extern "C" fn() = unsafe { std::mem::transmute(divided) };
        let guard = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: every pointer leads to memory of the sizes given that outlives the call; checked
        // accesses stay inside; the lock makes the file's global state ours.
        trap::during(divided, || unsafe { run(&mut native) });
        drop(guard);
        let n_faults = native.n_faults as usize;
        Ok(faults[..n_faults.min(FAULT_CAPACITY)]
            .iter()
            .map(|fault| fault.typed(kernel))
            .collect())
    }
}

/// What a launch knows of each buffer besides its elements.
struct Shadow {
    regions: Vec<NativeRegion>,
    _names: Vec<CString>,
    _cells: Vec<AlignedBuffer>,
}

impl Shadow {
    /// The shadow of the buffers that are arguments of `launch`; the others get no cells.
    fn of(launch: &Launch, memory: &mut Memory) -> Result<Shadow, EmulateError> {
        let mut shadow = Shadow {
            regions: Vec::new(),
            _names: Vec::new(),
            _cells: Vec::new(),
        };
        for (idx, buffer) in memory.buffers.iter_mut().enumerate() {
            let used = launch.args.contains(&Arg::Buffer(idx));
            let bytes = if used {
                buffer.n_elements * CELL_BYTES
            } else {
                0
            };
            let cells = AlignedBuffer::zeroed(bytes)
                .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
            let name = c_name(&buffer.name)?;
            shadow.regions.push(NativeRegion {
                data: buffer.address(),
                bytes: (buffer.n_elements * buffer.dtype.bytes()) as u64,
                granule: buffer.dtype.bytes() as u32,
                is_shared: 0,
                cells: cells.as_ptr(),
                initialized: buffer.initialized.as_mut_ptr(),
                name: name.as_ptr(),
            });
            shadow._names.push(name);
            shadow._cells.push(cells);
        }
        Ok(shadow)
    }
}

fn arguments(kernel: &Kernel, launch: &Launch, regions: &mut [NativeRegion]) -> Vec<NativeArg> {
    let start = regions.as_mut_ptr();
    let one = |(arg, ty): (&Arg, ParamType)| match (*arg, ty) {
        (Arg::Buffer(idx), _) => NativeArg {
            region: start.wrapping_add(idx),
            bits: 0,
        },
        (Arg::Scalar(value), ParamType::Scalar(dtype)) => NativeArg {
            region: ptr::null_mut(),
            bits: scalar_bits(dtype, value),
        },
        (Arg::Scalar(_), _) => NativeArg {
            region: ptr::null_mut(),
            bits: 0,
        },
    };
    let types = kernel.params.iter().map(|param| param.ty);
    launch.args.iter().zip(types).map(one).collect()
}

/// Stacks of a block's fibers, each above a page that may not be touched.
struct Stacks {
    start: *mut c_void,
    bytes: usize,
}

impl Stacks {
    fn of(n: usize) -> Result<Stacks, EmulateError> {
        let bytes = n * STACK_BYTES;
        // SAFETY: a fresh private mapping.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        let stacks = Stacks { start, bytes };
        for i in 0..n {
            // SAFETY: within the mapping.
            let refused = unsafe {
                let guard = start.cast::<u8>().add(i * STACK_BYTES).cast();
                libc::mprotect(guard, GUARD_BYTES, libc::PROT_NONE)
            };
            if refused != 0 {
                return Err(std::io::Error::last_os_error().into());
            }
        }
        Ok(stacks)
    }
}

impl Drop for Stacks {
    fn drop(&mut self) {
        // SAFETY: our own mapping, no longer used.
        unsafe { libc::munmap(self.start, self.bytes) };
    }
}

impl NativeFault {
    const EMPTY: NativeFault = NativeFault {
        kind: 0,
        thread: 0,
        other_thread: 0,
        block: 0,
        other_block: 0,
        write: 0,
        other_write: 0,
        line: 0,
        element: 0,
        n: 0,
        name: [0; 64],
        note: [0; 512],
    };

    fn typed(&self, kernel: &Kernel) -> Fault {
        let text = |bytes: &[u8]| {
            CStr::from_bytes_until_nul(bytes)
                .map(|text| text.to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        let access = |write: u32| {
            if write != 0 {
                Access::Write
            } else {
                Access::Read
            }
        };
        let array = text(&self.name);
        let element = self.element;
        let kind = match self.kind {
            1 => FaultKind::OutOfBounds {
                array,
                element,
                n: self.n,
                access: access(self.write),
            },
            2 => FaultKind::Uninitialized { array, element },
            3 => FaultKind::Race {
                array,
                element,
                access: access(self.write),
                other_block: self.other_block,
                other_thread: self.other_thread,
                other_access: access(self.other_write),
            },
            4 => FaultKind::Misaligned {
                array,
                element,
                width: self.n,
            },
            5 => FaultKind::DivergentBarrier {
                line: self.line,
                threads: text(&self.note),
            },
            6 => FaultKind::MissingLanes {
                line: self.line,
                threads: text(&self.note),
            },
            7 => FaultKind::Endless,
            9 => FaultKind::BlockSize { threads: self.n },
            10 => FaultKind::DividedByZero,
            11 => FaultKind::Unfenced {
                array,
                element,
                writer: self.other_thread,
            },
            12 => FaultKind::SumsUnfenced,
            _ => FaultKind::SharedTooLarge {
                array,
                bytes: self.n,
            },
        };
        Fault {
            kernel: kernel.name.clone(),
            origin: kernel.origin.clone(),
            block: self.block,
            thread: self.thread,
            kind,
        }
    }
}
