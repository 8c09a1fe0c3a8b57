//! Executes CUDA text on the CPU: every thread of a block is a fiber, every access is checked.
//!
//! Owns the compilation of kernels as C++ (system compiler, cached) and the running of launches with
//! orders of blocks and threads drawn from a seed. It finds: accesses out of bounds, reads of what
//! was never written, races (by happens-before, so in any order of execution), misaligned vectors,
//! barriers and warp exchanges that not all threads reach, loops without end that touch memory,
//! outputs left unwritten. A fault never ends the process: the fibers' stacks are abandoned, which
//! loses nothing because kernels own nothing. Divisions of integers by zero are found where the
//! processor traps them (x86-64). It does not find an index outside a local array.
//!
//! Never judges values: that is the caller's comparison.

mod fault;
mod memory;
mod native;
mod traffic;
mod trap;

use std::ffi::{CString, NulError};
use std::fs;
use std::io;
use std::sync::Arc;

use graph::DType;

use crate::{Arch, Arg, Kernel, Launch, ParamType, element_type, prelude};
use kernels::cache::{Cache, CacheError, CacheSettings, EntryKind, Key};
use kernels::progress::Silent;
use kernels::run::{LoadError, Module};
use kernels::toolchain::{self, Search, Toolchain, ToolchainError};

/// Kernels that are worth one C++ file: compiling dominates, and many files compile no faster.
pub const BATCH: usize = 50;

pub use fault::{Access, Fault, FaultKind};
pub use memory::Memory;
pub use traffic::{Direction, Traffic};

/// Why a launch could not be emulated, or what was found in it.
#[derive(Debug, thiserror::Error)]
pub enum EmulateError {
    /// [`kernels::progress::Progress::is_interrupted`] said so.
    #[error("the compilation was interrupted")]
    Interrupted,
    /// The kernel did what a GPU would not forgive; all faults found are listed.
    #[error("{}", fault_lines(.0))]
    Faults(Vec<Fault>),
    /// The text is not C++ with the names of the prelude.
    #[error("the C++ compiler refused the kernels {names}:\n{complaint}")]
    Refused {
        /// The kernels' names.
        names: String,
        /// The compiler's first lines; lines are those of the kernel's text.
        complaint: String,
    },
    /// The launch does not fit the kernel.
    #[error("launch of kernel {kernel} (of {origin}): {problem}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// The part of the model it computes.
        origin: String,
        /// What does not fit.
        problem: String,
    },
    /// A launch names a kernel that the emulator does not have.
    #[error("launch of kernel number {0}, but there are only {1}")]
    NoKernel(usize, usize),
    /// A program was given another number of inputs than it has.
    #[error("{given} inputs are given, the graph has {wanted}")]
    Inputs {
        /// How many were given.
        given: usize,
        /// How many the graph has.
        wanted: usize,
    },
    /// There is no C++ compiler.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// The cache cannot be written.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The compiler or a file failed.
    #[error("compiling kernels for the emulator: {0}")]
    Io(#[from] io::Error),
    /// The compiled file cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A name with a zero byte.
    #[error("a name holds a zero byte: {0}")]
    Name(#[from] NulError),
}

impl EmulateError {
    /// Blames the error on the part of the model that a launch computes: a kernel whose text serves several parts
    /// knows only the first.
    #[must_use]
    pub fn of_launch(mut self, launched: &str) -> Self {
        match &mut self {
            EmulateError::Faults(faults) => faults
                .iter_mut()
                .for_each(|fault| fault.origin = launched.to_string()),
            EmulateError::Launch { origin, .. } => *origin = launched.to_string(),
            _ => {}
        }
        self
    }
}

fn fault_lines(faults: &[Fault]) -> String {
    let lines: Vec<String> = faults.iter().map(Fault::to_string).collect();
    lines.join("\n")
}

/// How a launch is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Draws the order of blocks and, anew after every round, of threads; 0 keeps the natural one.
    pub seed: u64,
    /// Checked accesses after which the launch counts as endless.
    pub step_limit: u64,
    /// Outputs may keep elements that no launch has written yet.
    pub partial_outputs: bool,
    /// The device whose limits launches are held to.
    pub arch: Arch,
}

impl Settings {
    /// The usual checks in the order of that seed, on Hopper.
    pub fn of_seed(seed: u64) -> Self {
        Settings {
            seed,
            step_limit: 2_000_000_000,
            partial_outputs: false,
            arch: Arch::Sm90a,
        }
    }
}

/// Compiled kernels, ready to be launched. Launches of one emulator run one after another.
pub struct Emulator {
    kernels: Vec<Kernel>,
    native: native::Native,
}

impl Emulator {
    /// Compiles `kernels` into one file with the C++ compiler and the cache that the environment
    /// names (`SHORTHAUL_CXX`, `SHORTHAUL_CACHE_DIR`).
    ///
    /// # Errors
    /// If there is no cache folder or C++ compiler, or if the text does not compile or load.
    pub fn from_environment(kernels: &[Kernel]) -> Result<Self, EmulateError> {
        let cache = Cache::open(&CacheSettings::from_environment(), &mut Silent)?;
        let toolchain = toolchain::find_cxx(&Search::cxx_from_environment(), &cache)?;
        Self::compile(kernels, &toolchain, &cache)
    }

    /// Compiles `kernels` into one file, or takes it from the cache.
    ///
    /// # Errors
    /// If the text does not compile or load.
    pub fn compile(
        kernels: &[Kernel],
        toolchain: &Toolchain,
        cache: &Cache,
    ) -> Result<Self, EmulateError> {
        for kernel in kernels {
            if kernel.threads == 0 || kernel.threads > 1024 || kernel.threads % 32 != 0 {
                return Err(launch_error(
                    kernel,
                    format!("{} threads, but a block is 32, 64, … 1024", kernel.threads),
                ));
            }
        }
        let source = source(kernels);
        Self::from_source(kernels, &source, toolchain, cache)
    }

    /// Like [`Emulator::from_environment`], but the C library switches fibers, as on CPUs other than x86-64. Each
    /// switch costs a system call.
    ///
    /// # Errors
    /// As [`Emulator::from_environment`].
    pub fn with_portable_fibers(kernels: &[Kernel]) -> Result<Self, EmulateError> {
        let cache = Cache::open(&CacheSettings::from_environment(), &mut Silent)?;
        let toolchain = toolchain::find_cxx(&Search::cxx_from_environment(), &cache)?;
        let source = format!("#define SH_PORTABLE_FIBERS 1\n{}", source(kernels));
        Self::from_source(kernels, &source, &toolchain, &cache)
    }

    fn from_source(
        kernels: &[Kernel],
        source: &str,
        toolchain: &Toolchain,
        cache: &Cache,
    ) -> Result<Self, EmulateError> {
        let key = Key::new(&[
            "cuda emulator",
            toolchain.identity(),
            &FLAGS.join("\0"),
            source,
        ]);
        let path = match cache.find(EntryKind::Library, &key) {
            Some(path) => path,
            None => {
                let library = build(kernels, source, toolchain, cache)?;
                cache.write(EntryKind::Library, &key, &library)?
            }
        };
        let module = Arc::new(Module::load(&path)?);
        Ok(Emulator {
            kernels: kernels.to_vec(),
            native: native::Native::new(module),
        })
    }

    /// Runs one launch. Buffers keep their elements and the knowledge of which were written from
    /// launch to launch. Costs about 0.1 ms a block of 128 threads and more with its accesses.
    ///
    /// # Errors
    /// All faults of a launch (a read of what nobody wrote, an access outside a buffer, a race), or that it does not
    /// fit its kernel.
    pub fn run(
        &self,
        launch: &Launch,
        memory: &mut Memory,
        settings: &Settings,
    ) -> Result<(), EmulateError> {
        self.execute(launch, memory, settings, None)
    }

    /// Runs one launch and counts what it moves; see [`Traffic`].
    ///
    /// # Errors
    /// As [`Emulator::run`].
    pub fn count(
        &self,
        launch: &Launch,
        memory: &mut Memory,
        settings: &Settings,
    ) -> Result<Traffic, EmulateError> {
        let mut counter = traffic::Counter::new(memory);
        self.execute(launch, memory, settings, Some(&mut counter))?;
        Ok(counter.finish())
    }

    fn execute(
        &self,
        launch: &Launch,
        memory: &mut Memory,
        settings: &Settings,
        counter: Option<&mut traffic::Counter>,
    ) -> Result<(), EmulateError> {
        let kernel = self
            .kernels
            .get(launch.kernel)
            .ok_or(EmulateError::NoKernel(launch.kernel, self.kernels.len()))?;
        check_size(kernel, launch, settings.arch)?;
        check_arguments(kernel, launch, memory)?;
        let mut faults = self.native.run(kernel, launch, memory, settings, counter)?;
        if faults.is_empty() && !settings.partial_outputs {
            faults = unwritten(kernel, launch, memory);
        }
        if faults.is_empty() {
            Ok(())
        } else {
            Err(EmulateError::Faults(faults))
        }
    }
}

fn unwritten(kernel: &Kernel, launch: &Launch, memory: &Memory) -> Vec<Fault> {
    let outputs = kernel.params.iter().zip(&launch.args);
    outputs
        .filter_map(|(param, arg)| match (param.ty, arg) {
            (ParamType::Out(_), Arg::Buffer(idx)) => {
                let (n, first) = memory.unwritten(*idx)?;
                let array = memory.buffers[*idx].name.clone();
                Some(Fault {
                    kernel: kernel.name.clone(),
                    origin: kernel.origin.clone(),
                    block: 0,
                    thread: 0,
                    kind: FaultKind::Unwritten { array, n, first },
                })
            }
            _ => None,
        })
        .collect()
}

fn launch_error(kernel: &Kernel, problem: String) -> EmulateError {
    EmulateError::Launch {
        kernel: kernel.name.clone(),
        origin: kernel.origin.clone(),
        problem,
    }
}

/// Most blocks of a launch in x, y and z, on every architecture.
const MOST_BLOCKS: [u32; 3] = [i32::MAX as u32, 65535, 65535];

/// Checks that the device would take the launch.
fn check_size(kernel: &Kernel, launch: &Launch, arch: Arch) -> Result<(), EmulateError> {
    let refuse = |problem: String| Err(launch_error(kernel, problem));
    let (bytes, most) = (launch.dynamic_shared_bytes, arch.shared_bytes());
    if bytes > most {
        return refuse(format!(
            "{bytes} bytes of dynamic shared memory, but a block on {} has {most} in all",
            arch.name()
        ));
    }
    let mut sizes = launch.grid.iter().zip(MOST_BLOCKS);
    if sizes.any(|(&n, most)| n == 0 || n > most) {
        return refuse(format!(
            "a grid of {:?} blocks, but the least is 1 and the most {MOST_BLOCKS:?}",
            launch.grid
        ));
    }
    // Below 2^63 by the limits above.
    let n_blocks: u64 = launch.grid.iter().map(|&n| u64::from(n)).product();
    if n_blocks > u64::from(u32::MAX) {
        return refuse(format!(
            "a grid of {:?} blocks, more than are emulated",
            launch.grid
        ));
    }
    Ok(())
}

/// Checks that arguments fit parameters, and that no buffer that is written has a second name: the device
/// compiler takes parameters for distinct memory.
fn check_arguments(kernel: &Kernel, launch: &Launch, memory: &Memory) -> Result<(), EmulateError> {
    let refuse = |problem: String| Err(launch_error(kernel, problem));
    if kernel.params.len() != launch.args.len() {
        return refuse(format!(
            "{} parameters, {} arguments",
            kernel.params.len(),
            launch.args.len()
        ));
    }
    for (n, (param, arg)) in kernel.params.iter().zip(&launch.args).enumerate() {
        let written = param.ty.is_written();
        match (param.ty, arg) {
            (
                ParamType::In(_) | ParamType::Out(_) | ParamType::InOut(_) | ParamType::Map(_),
                Arg::Buffer(idx),
            ) => {
                let dtype = param.ty.dtype();
                let Some(buffer) = memory.buffers.get(*idx) else {
                    return refuse(format!("no buffer number {idx} for {}", param.name));
                };
                if buffer.is_missing {
                    return refuse(format!(
                        "there was no memory for the buffer {}",
                        buffer.name
                    ));
                }
                if buffer.dtype != dtype {
                    let found = buffer.dtype.name();
                    return refuse(format!(
                        "{} is of {}, the buffer {} of {found}",
                        param.name,
                        dtype.name(),
                        buffer.name
                    ));
                }
                let alignment = kernel.alignment(n);
                if buffer.start % alignment != 0 {
                    return refuse(format!(
                        "{} needs an address that is a multiple of {alignment}, the buffer {} lies {} \
                         bytes behind a multiple of 64",
                        param.name, buffer.name, buffer.start
                    ));
                }
                let uses = launch.args.iter().filter(|&other| other == arg).count();
                if written && uses > 1 {
                    return refuse(format!(
                        "the buffer {} is written and passed twice",
                        buffer.name
                    ));
                }
            }
            (ParamType::Scalar(_), Arg::Scalar(_)) => {}
            _ => {
                return refuse(format!(
                    "the argument for {} has another kind than the parameter",
                    param.name
                ));
            }
        }
    }
    Ok(())
}

/// `-O1`: the checks dominate, and compiling costs more than running.
const FLAGS: [&str; 10] = [
    "-x",
    "c++",
    "-std=gnu++17",
    "-O1",
    "-w",
    "-fPIC",
    "-fno-exceptions",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-shared",
];

fn build(
    kernels: &[Kernel],
    source: &str,
    toolchain: &Toolchain,
    cache: &Cache,
) -> Result<Vec<u8>, EmulateError> {
    let folder = cache.work_folder()?;
    fs::write(folder.path().join("kernels.cpp"), source)?;
    let output = toolchain
        .process()
        .current_dir(folder.path())
        .args(FLAGS)
        .args(["-o", "kernels.so", "kernels.cpp", "-lm"])
        .output()?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = complaint.lines().take(20).collect();
        let names: Vec<&str> = kernels.iter().map(|kernel| &*kernel.name).collect();
        return Err(EmulateError::Refused {
            names: names.join(", "),
            complaint: lines.join("\n"),
        });
    }
    Ok(fs::read(folder.path().join("kernels.so"))?)
}

/// The whole C++ file: prelude, kernels, and for each a function that takes its arguments apart.
fn source(kernels: &[Kernel]) -> String {
    let mut text = prelude::host();
    for kernel in kernels {
        let name = &kernel.name;
        text.push_str(&format!("#line 1 \"{name}\"\n{}\n", kernel.text));
        // The text must state the same numbers that a device launches it with.
        for (what, n) in [
            ("threads", kernel.threads),
            ("min_blocks", kernel.min_blocks),
        ] {
            text.push_str(&format!(
                "static_assert(sh_{what}_of_{name} == {n}, \"the text has other {what}\");\n"
            ));
        }
        let args: Vec<String> = kernel
            .params
            .iter()
            .enumerate()
            .map(|(i, param)| argument(i, param.ty))
            .collect();
        text.push_str(&format!(
            "static void sh_call_{name}(const sh_arg *a) {{ {name}({}); }}\n\
             extern \"C\" void sh_run_{name}(sh_launch *l) {{ sh_run(l, sh_call_{name}); }}\n",
            args.join(", ")
        ));
    }
    text
}

fn argument(i: usize, ty: ParamType) -> String {
    match ty {
        ParamType::In(dtype) => format!(
            "sh_in<{0}>{{sh_view_of(a[{i}], sizeof({0}))}}",
            element_type(dtype)
        ),
        ParamType::Out(dtype) | ParamType::InOut(dtype) => format!(
            "sh_out<{0}>{{sh_view_of(a[{i}], sizeof({0}))}}",
            element_type(dtype)
        ),
        ParamType::Map(map) => {
            let ([x, y, z], [near, far], [lines, more]) = (map.sizes, map.strides, map.lines);
            format!(
                "sh_tensor_map{{sh_view_of(a[{i}], 2), {}, {{{x}, {y}, {z}}}, {{{near}, {far}}}, \
                 {{{lines}, {more}}}}}",
                map.offset
            )
        }
        ParamType::Scalar(dtype) => format!("*(const {}*)&a[{i}].bits", element_type(dtype)),
    }
}

fn c_name(name: &str) -> Result<CString, NulError> {
    CString::new(name)
}

fn scalar_bits(dtype: DType, value: graph::Scalar) -> u64 {
    match dtype {
        DType::F64 => value.as_f64().to_bits(),
        DType::F32 => u64::from((value.as_f64() as f32).to_bits()),
        DType::F16 | DType::BF16 => {
            let mut bytes = [0; 2];
            memory::encode_float(dtype, value.as_f64(), &mut bytes);
            u64::from(u16::from_le_bytes(bytes))
        }
        _ => value.cast(dtype).as_i64() as u64,
    }
}
