//! What can go wrong when a CUDA program is loaded or launched.
//!
//! Owns the error type of devices and of the emulator's runs, and its sentences.

use super::Arch;
use super::emulate::EmulateError;
use super::library::Names;
use super::vendor::TableError;
use std::path::PathBuf;

/// Why kernels could not be loaded, or did not run.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "this machine has no CUDA driver (libcuda.so.1 is not found); install NVIDIA's driver, or keep \
         the model on the CPU"
    )]
    NoDriver,
    /// The driver found no device.
    #[error(
        "the CUDA driver offers no device{}; run on a machine with an NVIDIA GPU, or keep the model on \
         the CPU",
        of_visible(.visible)
    )]
    NoDevice {
        /// `CUDA_VISIBLE_DEVICES`, where it is set.
        visible: Option<String>,
    },
    /// A device number that does not exist.
    #[error("there is no device cuda:{ordinal}; the driver offers {count}")]
    NoSuchDevice {
        /// What was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A device that there is no code for.
    #[error(
        "cuda:{ordinal} ({name}) has compute capability {major}.{minor}; Shorthaul compiles for {}. \
         Use such a device, keep the model on the CPU, or pass fallback=\"eager\"",
        arches()
    )]
    UnsupportedArch {
        /// The device.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Its compute capability, before the dot.
        major: i32,
        /// Behind the dot.
        minor: i32,
    },
    /// Machine code of another architecture.
    #[error("the kernels were compiled for {}, cuda:{ordinal} is {}", compiled.name(), device.name())]
    WrongArch {
        /// The device.
        ordinal: usize,
        /// Architecture of the cubins.
        compiled: Arch,
        /// Architecture of the device.
        device: Arch,
    },
    /// The device has no memory left.
    #[error(
        "cuda:{ordinal} ran out of memory: {doing}. Use a smaller batch, or free memory that PyTorch \
         keeps (`torch.cuda.empty_cache()`)"
    )]
    OutOfMemory {
        /// The device.
        ordinal: usize,
        /// What needed memory.
        doing: String,
    },
    /// The driver refused machine code.
    #[error("cuda:{ordinal} does not load the kernels of {origins}: {problem}")]
    Load {
        /// The device.
        ordinal: usize,
        /// The parts of the model.
        origins: String,
        /// The driver's words.
        problem: String,
    },
    /// A driver that cannot describe what a kernel reads.
    #[error(
        "kernel {kernel} (of {origin}) is fed by the copy engine of Hopper, which the driver of \
         cuda:{ordinal} (for CUDA {version}) does not know; install one for CUDA 12.0 or newer, or leave \
         the table of products out"
    )]
    OldDriver {
        /// The kernel.
        kernel: String,
        /// The part of the model.
        origin: String,
        /// The device.
        ordinal: usize,
        /// The driver's version.
        version: String,
    },
    /// A kernel wants more shared memory than a block can have.
    #[error(
        "kernel {kernel} (of {origin}) needs {bytes} bytes of shared memory, a block on cuda:{ordinal} \
         has at most {most}"
    )]
    SharedMemory {
        /// The kernel.
        kernel: String,
        /// The part of the model.
        origin: String,
        /// The device.
        ordinal: usize,
        /// Bytes asked for.
        bytes: u32,
        /// Bytes there are.
        most: i32,
    },
    /// A launch was refused.
    #[error("kernel {kernel} (of {origin}) did not start on cuda:{ordinal}: {problem}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// The part of the model.
        origin: String,
        /// The device.
        ordinal: usize,
        /// The driver's words.
        problem: String,
    },
    /// A kernel failed while it ran; seen where launches wait.
    #[error(
        "kernel {kernel} (of {origin}) failed on cuda:{ordinal}: {problem}. The device takes no more \
         work from this process: start it again. Please report the model"
    )]
    Failed {
        /// The kernel.
        kernel: String,
        /// The part of the model.
        origin: String,
        /// The device.
        ordinal: usize,
        /// The driver's words.
        problem: String,
    },
    /// Something enqueued earlier had failed.
    #[error(
        "cuda:{ordinal} had failed before kernel {kernel} (of {origin}) was launched: {problem}. Some \
         kernel enqueued earlier, Shorthaul's or PyTorch's, did it; set SHORTHAUL_CUDA_BLOCKING=1 and \
         CUDA_LAUNCH_BLOCKING=1 and run again to learn which. The device takes no more work from this \
         process"
    )]
    FailedEarlier {
        /// The kernel that could not be launched.
        kernel: String,
        /// The part of the model.
        origin: String,
        /// The device.
        ordinal: usize,
        /// The driver's words.
        problem: String,
    },
    /// A library that computes products or convolutions is nowhere.
    #[error(
        "{} ({}) was not found; looked in {}. Install the CUDA build of PyTorch or `pip install {}`, \
         set {} to the library's folder, or leave the table of products out",
        library.name,
        library.stem,
        super::nvrtc::display_folders(.folders),
        library.package,
        library.variable
    )]
    NoLibrary {
        /// Which.
        library: &'static Names,
        /// The folders searched.
        folders: Vec<PathBuf>,
    },
    /// The variable of such a library names folders without it.
    #[error(
        "{} names {}, where no {} is; set it to the folder of {}, or unset it",
        library.variable,
        super::nvrtc::paths(.folders),
        library.stem,
        library.stem
    )]
    NotInFolders {
        /// Which.
        library: &'static Names,
        /// The folders named.
        folders: Vec<PathBuf>,
    },
    /// Such a library is there and cannot be used.
    #[error(
        "{} cannot be used: {problem}; set {} to another folder, or leave the table of products out",
        path.display(),
        library.variable
    )]
    LibraryUnusable {
        /// Which.
        library: &'static Names,
        /// Its file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The table gives a product or a convolution to a library that is not there.
    #[error("product {product} (of {origin}) was to be {library}'s, but {reason}")]
    Without {
        /// Which library.
        library: &'static str,
        /// The product's description.
        product: String,
        /// The part of the model.
        origin: String,
        /// Why it is not there.
        reason: Box<CudaError>,
    },
    /// A library does not say what it offers for a product.
    #[error("{library} failed in {call} on cuda:{ordinal}: {problem}")]
    Offers {
        /// Which library.
        library: &'static str,
        /// The function.
        call: &'static str,
        /// The device.
        ordinal: usize,
        /// The library's words.
        problem: String,
    },
    /// A library refused a product or a convolution, at load or at launch.
    #[error(
        "{library} failed in {call} for product {product} (of {origin}) on cuda:{ordinal}: {problem}. \
         Leave the table of products out, and our own kernels compute it"
    )]
    Product {
        /// Which.
        library: &'static str,
        /// The function.
        call: &'static str,
        /// The product's description.
        product: String,
        /// The part of the model.
        origin: String,
        /// The device.
        ordinal: usize,
        /// The library's words.
        problem: String,
    },
    /// A library does not offer the algorithm that was chosen.
    #[error(
        "algorithm {rank} was chosen for product {product} (of {origin}), but {library} offers {offered} \
         on cuda:{ordinal}; measure the table of products anew with bench/gpu/tables.py, or leave it out"
    )]
    NoAlgorithm {
        /// Which library.
        library: &'static str,
        /// The product's description.
        product: String,
        /// The part of the model.
        origin: String,
        /// The device.
        ordinal: usize,
        /// What was chosen.
        rank: usize,
        /// How many there are.
        offered: usize,
    },
    /// An operator of PyTorch's failed.
    #[error(
        "{operator} failed for {origin}: {problem}. Leave the table of products out, and our own kernels \
         compute it"
    )]
    Operator {
        /// What was called.
        operator: String,
        /// The part of the model.
        origin: String,
        /// Its words.
        problem: String,
    },
    /// A program that needs PyTorch was asked for where there is none.
    #[error(
        "the table of products gives {origin} to {operator}, which only a program that runs in PyTorch can \
         call: use the Python package, or leave the table out"
    )]
    NoOperators {
        /// What was to be called.
        operator: String,
        /// The part of the model.
        origin: String,
    },
    /// The table of products cannot be used.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Memory of another device.
    #[error("{buffer} is in memory of {found}, but the kernels run on cuda:{expected}")]
    WrongDevice {
        /// Which buffer.
        buffer: String,
        /// Where it is.
        found: String,
        /// Where it must be.
        expected: usize,
    },
    /// Another call of the driver failed.
    #[error("the CUDA driver failed in {call} on cuda:{ordinal}: {problem}")]
    Call {
        /// The function.
        call: &'static str,
        /// The device.
        ordinal: usize,
        /// The driver's words.
        problem: String,
    },
    /// The number of external buffers is wrong.
    #[error("the program takes {expected} buffers, {found} were given")]
    ExternalCount {
        /// Slots of the program.
        expected: usize,
        /// Buffers given.
        found: usize,
    },
    /// A buffer without an address.
    #[error("{buffer} needs {bytes} bytes, none were given")]
    NoMemory {
        /// Which buffer.
        buffer: String,
        /// Bytes needed.
        bytes: usize,
    },
    /// A buffer at an address that vectors cannot be read from.
    #[error(
        "{buffer} must start at a multiple of {} bytes",
        super::passes::ALIGNMENT
    )]
    Misaligned {
        /// Which buffer.
        buffer: String,
    },
    /// The emulator found a fault, or cannot run.
    #[error(transparent)]
    Emulate(#[from] EmulateError),
}

fn of_visible(value: &Option<String>) -> String {
    let given = value.as_ref();
    given.map_or_else(String::new, |v| format!(" (CUDA_VISIBLE_DEVICES is `{v}`)"))
}

fn arches() -> String {
    Arch::ALL.map(Arch::name).join(", ")
}
