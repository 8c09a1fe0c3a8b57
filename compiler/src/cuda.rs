//! The end of the straight line for CUDA: a plan lowered, compiled for a device or for the emulator,
//! ready to run.
//!
//! Owns the choice of architecture and the progress of compilation. Never launches: callers run the
//! passes on the [`Machine`].

use crate::attention::{self, ChosenAttention, Operators};
use crate::error::CompileError;
use crate::plan::{Plan, Step};
use crate::report::Memory;
use crate::steering::{Choices, planned};
use crate::torch::Captured;
use crate::undone::{undone, unfollowed};
use cuda_kernels::device::{CudaModule, Device, Libraries};
use cuda_kernels::emulated::Emulated;
use cuda_kernels::lower::{CudaProgram, lower_with};
use cuda_kernels::machine::Machine;
use cuda_kernels::nvrtc::{self, Cubin, Nvrtc};
use cuda_kernels::passes::{Pass, PlacedLaunch, constants, passes};
use cuda_kernels::vendor::{Candidate, Offers, Products, Table};
use cuda_kernels::{Arch, CudaError, Kernel};
use fusion::Target;
use kernels::cache::{Cache, CacheSettings};
use kernels::contraction::ScalarForm;
use kernels::lowering::{KernelCost, KernelInfo};
use kernels::plan::Buffer;
use kernels::progress::Progress;
use std::path::PathBuf;
use std::sync::Arc;

/// What a CUDA program is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaTarget<'a> {
    /// The emulator on host memory.
    Emulated {
        /// Decides the order of blocks and threads.
        seed: u64,
    },
    /// A device.
    Device {
        /// Its number.
        ordinal: usize,
        /// Folders to look for NVRTC, cuBLASLt and cuDNN in, such as the wheels' `nvidia/*/lib`.
        nvrtc: &'a [PathBuf],
    },
}

/// What computes products of matrices.
#[derive(Clone, Debug, Default)]
pub enum ProductsBy {
    /// Our own kernels.
    #[default]
    Own,
    /// What a table says is the fastest: one measured on the device, or any for the emulator.
    Table(Arc<Table>),
    /// One candidate wherever the library offers it: how tables are measured.
    Every {
        /// Which.
        candidate: Candidate,
        /// Bytes of workspace of every product of the library.
        workspace_bytes: usize,
    },
}

/// A step that runs on a device or in the emulator. Its external buffers are those of
/// [`crate::Executable`].
pub struct CudaExecutable {
    /// What was decided.
    pub plan: Plan,
    /// The kernels and where containers live.
    pub program: CudaProgram,
    /// Computes the outputs and the saved block.
    pub forward: Pass,
    /// Computes the gradients from the saved block.
    pub backward: Pass,
    /// Runs both.
    pub machine: Machine,
    /// How each kernel was made, in order.
    pub kernels: Vec<KernelInfo>,
    /// What computes each attention of the model, where a table or the caller could choose.
    pub attentions: Vec<ChosenAttention>,
}

impl Captured {
    /// CUDA kernels for the sizes the graph was captured with; `wrt` as for [`Captured::compile`].
    ///
    /// # Errors
    /// The graph has no kernels yet; there is no NVRTC, no device, no code for the device, or no memory; or an
    /// operator of PyTorch's was chosen, and `operators` says that there is no PyTorch.
    pub fn compile_cuda(
        &self,
        wrt: &[usize],
        target: &CudaTarget<'_>,
        products: &ProductsBy,
        operators: Operators,
        choices: &Choices,
        progress: &mut dyn Progress,
    ) -> Result<CudaExecutable, CompileError> {
        let graph = &mut self.graph().clone();
        let attentions = attention::choose(graph, self.hints(), products, wrt, operators)?;
        let step = match wrt {
            [] => Step::forward(graph)?,
            _ => Step::training(graph, wrt)?,
        };
        let plan = planned(&step, self.hints(), (Target::Cuda, 1), choices)?;
        let built = CudaExecutable::build(plan, target, products, progress)?;
        Ok(CudaExecutable {
            attentions,
            ..built
        })
    }
}

impl CudaExecutable {
    /// Lowers, emits and compiles a plan.
    ///
    /// # Errors
    /// As for [`Captured::compile_cuda`].
    pub fn build(
        mut plan: Plan,
        target: &CudaTarget<'_>,
        products: &ProductsBy,
        progress: &mut dyn Progress,
    ) -> Result<CudaExecutable, CompileError> {
        // A missing device is told before the work.
        let device = match target {
            CudaTarget::Emulated { .. } => None,
            CudaTarget::Device { ordinal, .. } => Some(Device::open(*ordinal)?),
        };
        let libraries = match (target, products) {
            (CudaTarget::Emulated { .. }, _) | (_, ProductsBy::Own) => None,
            (
                _,
                ProductsBy::Every {
                    candidate: Candidate::Warpgroup(_) | Candidate::Attention(_),
                    ..
                },
            ) => None,
            (CudaTarget::Device { nvrtc, .. }, _) => Some(Arc::new(Libraries::find(nvrtc)?)),
        };
        let chosen = chosen(products, device.as_ref(), libraries.as_ref())?;
        let program = lower_with(&plan.graph, &chosen)?;
        let [forward, backward] =
            passes(&plan.graph, &program).map_err(|error| CompileError::Lower(error.into()))?;
        let constants = constants(&plan.graph, &program);
        let machine = match (target, device) {
            (CudaTarget::Device { nvrtc, .. }, Some(device)) => {
                let cubins = cubins(&program.kernels, device.arch(), nvrtc, progress)?;
                let launches = forward.launches.iter().chain(&backward.launches);
                let kernels = &program.kernels;
                let module =
                    CudaModule::load(&device, kernels, &cubins, &constants, launches.clone())?
                        .with_calls(&program.calls);
                Machine::Device(match libraries.filter(|_| !program.products.is_empty()) {
                    Some(found) => module.with_products(&found, &program.products, launches)?,
                    None => module,
                })
            }
            (CudaTarget::Emulated { seed }, _) => {
                let emulated = emulated(&program.kernels, constants, *seed, progress)?;
                let emulated = emulated.with_calls(&program.calls);
                Machine::Emulated(emulated.with_products(&program.products))
            }
            (CudaTarget::Device { .. }, None) => return Err(CudaError::NoDriver.into()),
        };
        let kernels = kernel_infos(&program, !matches!(products, ProductsBy::Own));
        let notes = unfollowed(&plan, &undone(&plan, &kernels));
        plan.notes.extend(notes);
        Ok(CudaExecutable {
            kernels,
            plan,
            program,
            forward,
            backward,
            machine,
            attentions: Vec::new(),
        })
    }

    /// Memory of both passes.
    pub fn memory(&self) -> Memory {
        Memory {
            forward_arena_bytes: self.forward.arena_bytes,
            backward_arena_bytes: self.backward.arena_bytes,
            saved_bytes: self.forward.saved_bytes,
            thread_scratch_bytes: 0,
        }
    }
}

/// What runs kernels that need nothing but the caller's buffers.
///
/// # Errors
/// No NVRTC, no device, or no code for the device.
pub(crate) fn machine(
    kernels: &[Kernel],
    launches: &[PlacedLaunch],
    target: &CudaTarget<'_>,
    progress: &mut dyn Progress,
) -> Result<Machine, CompileError> {
    match target {
        CudaTarget::Emulated { seed } => {
            emulated(kernels, Vec::new(), *seed, progress).map(Machine::Emulated)
        }
        CudaTarget::Device { ordinal, nvrtc } => {
            let device = Device::open(*ordinal)?;
            let cubins = cubins(kernels, device.arch(), nvrtc, progress)?;
            let module = CudaModule::load(&device, kernels, &cubins, &[], launches.iter())?;
            Ok(Machine::Device(module))
        }
    }
}

fn emulated(
    kernels: &[Kernel],
    constants: Vec<Vec<u8>>,
    seed: u64,
    progress: &mut dyn Progress,
) -> Result<Emulated, CompileError> {
    let emulated = Emulated::compile(kernels, constants, seed, progress);
    Ok(emulated.map_err(CudaError::from)?)
}

fn cubins(
    kernels: &[Kernel],
    arch: Arch,
    folders: &[PathBuf],
    progress: &mut dyn Progress,
) -> Result<Vec<Cubin>, CompileError> {
    let nvrtc = Nvrtc::find(folders)?;
    let cache = Cache::open(&CacheSettings::from_environment(), progress);
    let cache = cache.map_err(nvrtc::NvrtcError::from)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cubins = nvrtc::compile_all(kernels, arch, &nvrtc, &cache, threads, progress);
    Ok(cubins?)
}

/// How products are chosen on a device or in the emulator.
fn chosen(
    products: &ProductsBy,
    device: Option<&Arc<Device>>,
    libraries: Option<&Arc<Libraries>>,
) -> Result<Products, CudaError> {
    Ok(match products {
        ProductsBy::Own => Products::Own,
        ProductsBy::Table(table) => {
            if let (Some(device), Some(found)) = (device, libraries) {
                let cudnn = found.cudnn_version();
                table.check(&device.info().name, found.cublaslt_version(), cudnn)?;
            }
            Products::Measured(Arc::clone(table))
        }
        ProductsBy::Every {
            candidate: Candidate::Warpgroup(_),
            ..
        } if device.is_some_and(|device| device.arch() != Arch::Sm90a) => Products::Own,
        ProductsBy::Every {
            candidate,
            workspace_bytes,
        } => Products::Every {
            candidate: *candidate,
            workspace_bytes: *workspace_bytes,
            offers: match (device, libraries) {
                (Some(device), Some(found)) => {
                    let (device, found) = (Arc::clone(device), Arc::clone(found));
                    let bytes = *workspace_bytes;
                    Offers::new(move |operation, most| {
                        let offered = device.offers(&found, operation, bytes, most);
                        offered.map_err(|error| error.to_string())
                    })
                }
                _ => Offers::default(),
            },
        },
    })
}

/// What each map became, for reports; with the choices of products where there were some.
fn kernel_infos(program: &CudaProgram, with_choices: bool) -> Vec<KernelInfo> {
    let maps = program.maps.iter().enumerate();
    maps.map(|(n, map)| {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        let mut names = Vec::new();
        for launch in program.launches.iter().filter(|l| l.map == n) {
            names.push(program.name(launch.work));
            for (buffer, param) in launch.args.iter().zip(program.params(launch.work)) {
                let Buffer::Container(id) = buffer else {
                    continue;
                };
                let list = match param.ty.is_written() {
                    true => &mut writes,
                    false => &mut reads,
                };
                if !list.contains(id) {
                    list.push(*id);
                }
            }
        }
        reads.retain(|id| !writes.contains(id));
        KernelInfo {
            name: names.join("+"),
            origin: map.origin.clone(),
            operators: map.operators.clone(),
            stage: map.stage,
            path: map.path,
            products: None,
            flops: map.flops,
            work: KernelCost::default(),
            cuts: None,
            uncut: None,
            n_launches: map.n_launches,
            reads,
            writes,
            bytes_copied: map.bytes_copied,
            choice: (map.product.as_ref())
                .filter(|_| with_choices)
                .map(ToString::to_string),
            // The limits of a GPU are not known, so what this costs is not predicted.
            scalar: map.scalar.map(|reason| ScalarForm { reason, cost: None }),
            no_pairs: None,
            splits: map.splits.clone(),
        }
    })
    .collect()
}
