//! The GPU back end: CUDA text, its execution on the CPU, its compilation by NVRTC.
//!
//! Owns the vocabulary that emission, emulation and compilation share: architectures, kernels,
//! launches. Emitted text uses only the names of the prelude ([`prelude`]), which mean intrinsics on
//! a device and checked memory and fibers on the host; so the very text that NVRTC compiles is
//! executed in the ordinary test run:
//!
//! ```no_run
//! use graph::{DType, Tensor};
//! use cuda_kernels::emulate::{Emulator, Memory, Settings};
//! use cuda_kernels::{Arg, Kernel, Launch, Param, ParamType};
//!
//! let kernel = Kernel {
//!     name: "twice".into(),
//!     text: "SH_KERNEL(twice, 64, 1)(SH_IN(float) x, SH_OUT(float) y) {\n\
//!            const int i = SH_BID * 64 + SH_TID;\n y[i] = 2.0f * x[i];\n}\n".into(),
//!     params: vec![
//!         Param { name: "x".into(), ty: ParamType::In(DType::F32) },
//!         Param { name: "y".into(), ty: ParamType::Out(DType::F32) },
//!     ],
//!     threads: 64,
//!     min_blocks: 1,
//!     origin: "example".into(),
//! };
//! let emulator = Emulator::from_environment(&[kernel])?; // Batch about 50: compiling dominates.
//! for seed in 0..3 {
//!     let mut memory = Memory::default(); // A fresh one, or what an earlier run wrote counts as written.
//!     let x = memory.add("x", &Tensor::zeros(DType::F32, &[128]));
//!     let y = memory.add_unwritten("y", DType::F32, 128);
//!     let launch = Launch {
//!         kernel: 0,
//!         grid: [2, 1, 1],
//!         dynamic_shared_bytes: 0,
//!         args: vec![Arg::Buffer(x), Arg::Buffer(y)],
//!     };
//!     emulator.run(&launch, &mut memory, &Settings::of_seed(seed))?;
//!     let result = memory.values(y); // Vec<f64>
//! }
//! # Ok::<(), cuda_kernels::emulate::EmulateError>(())
//! ```
//!
//! Never decides what a kernel computes.

pub use error::CudaError;
use kernels::plan::Buffer;
pub use tensor_map::TensorMap;

use graph::{DType, Scalar};

mod chain;
pub mod contraction;
pub mod device;
mod emit;
pub mod emulate;
pub mod emulated;
mod error;
pub mod execute;
mod interface;
mod library;
pub mod lower;
pub mod machine;
pub mod nvrtc;
pub mod passes;
pub mod pooled;
pub mod prelude;
mod schedule;
mod tensor_map;
mod value_text;
pub mod vendor;

/// A GPU architecture that code is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arch {
    /// Ampere (A100).
    Sm80,
    /// Ada (L4, RTX 40).
    Sm89,
    /// Hopper (H100, H200) with its own instructions.
    Sm90a,
}

impl Arch {
    /// All of them.
    pub const ALL: [Arch; 3] = [Arch::Sm80, Arch::Sm89, Arch::Sm90a];

    /// The name that compilers use.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
        }
    }

    /// Bytes of shared memory that a block can have, static and dynamic together.
    pub fn shared_bytes(self) -> u32 {
        match self {
            Arch::Sm80 => 163 << 10,
            Arch::Sm89 => 99 << 10,
            Arch::Sm90a => 227 << 10,
        }
    }
}

/// One emitted kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// Its C name, unique in a program.
    pub name: String,
    /// Its text without the prelude: `SH_KERNEL(name, threads, min_blocks)(…) { … }` and helpers.
    pub text: String,
    /// Parameters in order.
    pub params: Vec<Param>,
    /// Threads of a block, a multiple of 32 up to 1024.
    pub threads: u32,
    /// Blocks that must fit one multiprocessor (bounds the registers).
    pub min_blocks: u32,
    /// The part of the model it computes, for messages.
    pub origin: String,
}

impl Kernel {
    /// The alignment in bytes of the address that is passed for the `n`-th parameter: that of an element, or of
    /// the widest vector that the text loads, copies or stores, under whatever name.
    pub fn alignment(&self, n: usize) -> usize {
        let param = &self.params[n];
        if matches!(param.ty, ParamType::Map(_)) {
            return TensorMap::ALIGNMENT;
        }
        let renamed = self.text.split_once(&format!(" = {};", param.name));
        let renamed = renamed.and_then(|(before, _)| before.split_whitespace().next_back());
        let accesses = ["sh_load<", "sh_copy_async<", "sh_store<"].into_iter();
        let widths = accesses.flat_map(|name| self.text.split(name).skip(1));
        let widths = widths.filter_map(|access| {
            let (width, rest) = access.split_once(">(")?;
            let (of, _) = rest.split_once(',')?;
            (of == param.name || Some(of) == renamed).then(|| width.parse().ok())?
        });
        // Wider ones move in pieces of 16 bytes.
        (param.ty.dtype().bytes() * widths.max().unwrap_or(1)).min(16)
    }

    /// Bytes of the pool that the text carves its arrays from: its dynamic shared memory.
    pub fn dynamic_shared_bytes(&self) -> u32 {
        let carved = self.text.split("SH_CARVE(").skip(1).filter_map(|rest| {
            let (given, _) = rest.split_once(')')?;
            let given: Vec<&str> = given.split(',').map(str::trim).collect();
            let [ctype, _, _, offset, n] = given[..] else {
                return None;
            };
            let bytes = match ctype {
                "unsigned" => 4,
                "sh_u64" => 8,
                _ => Self::DTYPES
                    .into_iter()
                    .find(|d| element_type(*d) == ctype)?
                    .bytes(),
            };
            let (offset, n): (u32, u32) = (offset.parse().ok()?, n.parse().ok()?);
            Some(offset + n * bytes as u32)
        });
        carved.max().unwrap_or(0)
    }

    /// Element types of arrays in shared memory.
    const DTYPES: [DType; 5] = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I32];
}

/// A parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Its C name.
    pub name: String,
    /// What is passed.
    pub ty: ParamType,
}

/// What a parameter takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamType {
    /// A buffer that is only read in the whole launch.
    In(DType),
    /// A buffer that is written, perhaps also read afterwards.
    Out(DType),
    /// A buffer that is read and written, and holds something before the launch.
    InOut(DType),
    /// A buffer that is only read, by the copy engine of Hopper.
    Map(TensorMap),
    /// A number: `long long` for I64, `float` for F32 and so on.
    Scalar(DType),
}

impl ParamType {
    /// Type of a buffer's elements, or of a number.
    pub fn dtype(self) -> DType {
        match self {
            ParamType::In(dtype)
            | ParamType::Out(dtype)
            | ParamType::InOut(dtype)
            | ParamType::Scalar(dtype) => dtype,
            ParamType::Map(map) => map.dtype,
        }
    }

    /// Whether a buffer is written.
    pub fn is_written(self) -> bool {
        matches!(self, ParamType::Out(_) | ParamType::InOut(_))
    }

    /// How the copy engine reads a buffer, if it does.
    pub fn map(self) -> Option<TensorMap> {
        match self {
            ParamType::Map(map) => Some(map),
            _ => None,
        }
    }
}

/// One launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Index of the kernel among those of the program.
    pub kernel: usize,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Bytes of the shared pool that `SH_DYNAMIC` names.
    pub dynamic_shared_bytes: u32,
    /// One argument per parameter.
    pub args: Vec<Arg>,
}

/// What a launch of a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LaunchOp {
    /// A kernel, by its position among the program's.
    Kernel(usize),
    /// A product by cuBLASLt or a convolution by cuDNN, by its position among the program's.
    Product(usize),
    /// What an operator of PyTorch's computes, by its position among the program's.
    Call(usize),
}

/// One launch with its kernel, before both have a place in a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Emitted {
    /// The kernel.
    pub kernel: Kernel,
    /// Blocks, in one direction; not yet compared with the device's limit.
    pub grid: u64,
    /// What its parameters stand for, in order.
    pub args: Vec<Buffer>,
}

/// An argument of a launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// Index of a buffer of the memory launched on.
    Buffer(usize),
    /// A number.
    Scalar(Scalar),
}

/// The element type in CUDA text; `bool` is a byte that is 0 or 1.
pub fn element_type(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool | DType::U8 => "unsigned char",
        DType::I8 => "signed char",
        DType::I16 => "short",
        DType::I32 => "int",
        DType::I64 => "long long",
        DType::F16 => "sh_f16",
        DType::BF16 => "sh_bf16",
        DType::F32 => "float",
        DType::F64 => "double",
    }
}
