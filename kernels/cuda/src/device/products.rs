//! The products of a program on a device: descriptions and algorithms made at load, launches.
//!
//! Owns what is ready of both libraries, the translation of [`Gemm`] to the library's descriptions and
//! the demand for an algorithm. At a launch nothing is allocated, asked for or waited for.
#![allow(unsafe_code)]

use super::convolutions::{self, Planned};
use super::cublaslt::{
    Addresses, Algorithm, Complaint, CublasLt, Described, Object, Offer, Preferences, Session,
};
use super::{Device, Libraries};
use crate::CudaError;
use crate::passes::ALIGNMENT;
use crate::vendor::{Compute, Finish, Gemm, LibraryProduct, Matrix, Operation};
use cudarc::cublaslt::sys;
use graph::DType;
use std::sync::{Arc, Mutex, PoisonError};
use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulPreferenceAttributes_t as Wish;
use sys::cublasLtMatrixLayoutAttribute_t as LayoutAttribute;

/// `CUBLAS_OP_N` and `CUBLAS_OP_T`.
const AS_STORED: i32 = 0;
const TRANSPOSED: i32 = 1;

/// A product or convolution that is ready to be launched.
pub(super) struct Loaded {
    product: LibraryProduct,
    ready: Ready,
}

enum Ready {
    Gemm(Gemm, Multiplication),
    Convolution(crate::vendor::Convolution, Planned),
}

/// A product that is ready.
struct Multiplication {
    session: Arc<Session>,
    /// A bias' address is part of the description, so one launch has it at a time.
    described: Mutex<Described>,
    algorithm: Algorithm,
}

/// Makes a program's products ready, with the device's context current. `origins` are the parts of
/// the model that they compute, for messages.
///
/// # Errors
/// A library refuses a description, does not offer the algorithm, or is not there.
pub(super) fn load(
    device: &Device,
    libraries: &Libraries,
    products: &[LibraryProduct],
    origins: &[String],
) -> Result<Vec<Loaded>, CudaError> {
    let none = String::new();
    let mut loaded = Vec::new();
    for (n, product) in products.iter().enumerate() {
        let origin = origins.get(n).unwrap_or(&none);
        let ready = ready(device, libraries, product, origin)?;
        let ready = ready.map_err(|offered| CudaError::NoAlgorithm {
            library: product.operation.library(),
            product: product.operation.to_string(),
            origin: origin.clone(),
            ordinal: device.info.ordinal,
            rank: product.rank,
            offered,
        })?;
        loaded.push(Loaded {
            product: product.clone(),
            ready,
        });
    }
    Ok(loaded)
}

/// Makes a product or convolution ready. If its library offers too few algorithms, returns how many.
fn ready(
    device: &Device,
    libraries: &Libraries,
    product: &LibraryProduct,
    origin: &str,
) -> Result<Result<Ready, usize>, CudaError> {
    let without = |reason| CudaError::Without {
        library: product.operation.library(),
        product: product.operation.to_string(),
        origin: origin.to_string(),
        reason: Box::new(reason),
    };
    let ready = match &product.operation {
        Operation::Gemm(gemm) => {
            let library = libraries.blas().map_err(without)?;
            multiplication(device, library, product, gemm)
                .map(|found| found.map(|ready| Ready::Gemm(gemm.clone(), ready)))
        }
        Operation::Convolution(c) => {
            let library = libraries.dnn().map_err(without)?;
            convolutions::load(device, library, product, c)
                .map(|found| found.map(|ready| Ready::Convolution(c.clone(), ready)))
        }
    };
    ready.map_err(|complaint| of_product(complaint, product, origin, device.info.ordinal))
}

/// Makes a product ready. If the library offers fewer algorithms than its rank needs, returns how many.
fn multiplication(
    device: &Device,
    library: &Arc<CublasLt>,
    product: &LibraryProduct,
    gemm: &Gemm,
) -> Result<Result<Multiplication, usize>, Complaint> {
    let session = device.session(library)?;
    let described = describe(library, gemm)?;
    let preferences = preferences(library, gemm, product.workspace_bytes)?;
    let offers = session.offers(&described, &preferences, product.rank + 1)?;
    let Some(offer) = offers.get(product.rank) else {
        return Ok(Err(offers.len()));
    };
    let Offer {
        algorithm,
        workspace_bytes,
        ..
    } = *offer;
    if workspace_bytes > product.workspace_bytes {
        let problem = format!(
            "it wants {workspace_bytes} bytes of workspace, {} were allowed",
            product.workspace_bytes
        );
        let call = "cublasLtMatmulAlgoGetHeuristic";
        return Err(Complaint { call, problem });
    }
    Ok(Ok(Multiplication {
        session,
        described: Mutex::new(described),
        algorithm,
    }))
}

/// How many algorithms the library offers for an operation, at most `most`, with the device's context
/// current.
///
/// # Errors
/// The library refuses it, or is not there.
pub(super) fn n_offers(
    device: &Device,
    libraries: &Libraries,
    operation: &Operation,
    workspace_bytes: usize,
    most: usize,
) -> Result<usize, CudaError> {
    let offered = match operation {
        Operation::Gemm(gemm) => {
            let library = libraries.blas()?;
            multiplications(device, library, gemm, workspace_bytes, most)
        }
        Operation::Convolution(c) => {
            convolutions::n_offers(device, libraries.dnn()?, c, workspace_bytes, most)
        }
    };
    offered.map_err(|complaint| CudaError::Offers {
        library: operation.library(),
        call: complaint.call,
        ordinal: device.info.ordinal,
        problem: complaint.problem,
    })
}

fn multiplications(
    device: &Device,
    library: &Arc<CublasLt>,
    gemm: &Gemm,
    workspace_bytes: usize,
    most: usize,
) -> Result<usize, Complaint> {
    let session = device.session(library)?;
    let described = describe(library, gemm)?;
    let preferences = preferences(library, gemm, workspace_bytes)?;
    Ok(session.offers(&described, &preferences, most)?.len())
}

/// A failed call as the error of a product.
pub(super) fn of_product(
    complaint: Complaint,
    product: &LibraryProduct,
    origin: &str,
    ordinal: usize,
) -> CudaError {
    CudaError::Product {
        library: product.operation.library(),
        call: complaint.call,
        product: product.operation.to_string(),
        origin: origin.to_string(),
        ordinal,
        problem: complaint.problem,
    }
}

impl Loaded {
    /// What it computes.
    pub(super) fn product(&self) -> &LibraryProduct {
        &self.product
    }

    /// Enqueues it; `at` are the addresses of its parameters, in order.
    ///
    /// # Safety
    /// They are good for what it reads and writes, until it has run, and the stream belongs to the
    /// current context.
    pub(super) unsafe fn launch(&self, at: &[u64], stream: u64) -> Result<(), Complaint> {
        let workspace = self.product.workspace();
        let operands = &at[..workspace.unwrap_or(at.len())];
        let workspace = workspace.map_or(0, |n| at[n]);
        // SAFETY: passed on.
        unsafe {
            match &self.ready {
                Ready::Gemm(gemm, ready) => {
                    let bytes = self.product.workspace_bytes;
                    ready.launch(gemm, operands, (workspace, bytes), stream)
                }
                Ready::Convolution(c, ready) => ready.launch(c, operands, workspace, stream),
            }
        }
    }
}

impl Multiplication {
    /// # Safety
    /// As for [`Loaded::launch`].
    unsafe fn launch(
        &self,
        gemm: &Gemm,
        at: &[u64],
        (workspace, workspace_bytes): (u64, usize),
        stream: u64,
    ) -> Result<(), Complaint> {
        let mut described = self
            .described
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(bias) = at.get(3) {
            let pointer = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            described.description.set(pointer, bias)?;
        }
        let addresses = Addresses {
            a: at[0] + gemm.a.offset_bytes(),
            b: at[1] + gemm.b.offset_bytes(),
            d: at[2] + gemm.d.offset_bytes(),
            workspace,
            workspace_bytes,
        };
        // SAFETY: passed on; the offsets are the product's own.
        unsafe {
            self.session
                .multiply(&described, &self.algorithm, &addresses, stream)
        }
    }
}

/// A product in the library's terms.
pub(super) fn describe(library: &Arc<CublasLt>, gemm: &Gemm) -> Result<Described, Complaint> {
    use sys::cublasComputeType_t as Type;
    use sys::cudaDataType_t::{CUDA_R_32F, CUDA_R_64F};
    let (compute, scale) = match gemm.compute {
        Compute::F32Pedantic => (Type::CUBLAS_COMPUTE_32F_PEDANTIC, CUDA_R_32F),
        Compute::F32 => (Type::CUBLAS_COMPUTE_32F, CUDA_R_32F),
        Compute::F64 => (Type::CUBLAS_COMPUTE_64F, CUDA_R_64F),
    };
    let mut description = Object::of_description(library, compute, scale)?;
    let operation = |x: &Matrix| {
        if x.is_transposed {
            TRANSPOSED
        } else {
            AS_STORED
        }
    };
    description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(&gemm.a))?;
    description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(&gemm.b))?;
    use sys::cublasLtEpilogue_t as Epilogue;
    let epilogue = match gemm.finish {
        Finish::Nothing => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
        Finish::Bias => Epilogue::CUBLASLT_EPILOGUE_BIAS,
        Finish::BiasRelu => Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS,
    };
    description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32))?;
    if gemm.finish != Finish::Nothing {
        // The choice of an algorithm reads off this address how well biases are aligned.
        let least_aligned: u64 = ALIGNMENT;
        let pointer = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        description.set(pointer, &least_aligned)?;
    }
    let layout = |x: &Matrix| layout(library, x, gemm.batch);
    Ok(Described {
        description,
        layouts: [layout(&gemm.a)?, layout(&gemm.b)?, layout(&gemm.d)?],
        is_double: gemm.compute == Compute::F64,
    })
}

fn layout(
    library: &Arc<CublasLt>,
    x: &Matrix,
    batch: i64,
) -> Result<Object<sys::cublasLtMatrixLayout_t>, Complaint> {
    let sizes = [x.rows as u64, x.columns as u64];
    let mut layout = Object::of_layout(library, data_type(x.dtype), sizes, x.ld)?;
    let count = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
    layout.set(count, &(batch as i32))?;
    let stride = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
    layout.set(stride, &x.batch_stride)?;
    Ok(layout)
}

/// The workspace, the alignments that the plan of memory promises, and sums of parts of a reduction in
/// the type of the sums, not in the result's.
pub(super) fn preferences(
    library: &Arc<CublasLt>,
    gemm: &Gemm,
    workspace_bytes: usize,
) -> Result<Preferences, Complaint> {
    let mut preferences = Object::of_preference(library)?;
    let workspace = Wish::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    preferences.set(workspace, &(workspace_bytes as u64))?;
    let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    let schemes = Wish::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
    preferences.set(schemes, &scheme)?;
    for (wish, x) in [
        (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &gemm.a),
        (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &gemm.b),
        (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &gemm.d),
        (Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &gemm.d),
    ] {
        preferences.set(wish, &(x.alignment(ALIGNMENT) as u32))?;
    }
    Ok(preferences)
}

/// The library's name of a type that products have.
fn data_type(dtype: DType) -> sys::cudaDataType {
    use sys::cudaDataType_t as Type;
    match dtype {
        DType::F64 => Type::CUDA_R_64F,
        DType::BF16 => Type::CUDA_R_16BF,
        DType::F16 => Type::CUDA_R_16F,
        _ => Type::CUDA_R_32F,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn matrix(dtype: DType, rows: i64, columns: i64) -> Matrix {
        Matrix {
            dtype,
            is_transposed: false,
            rows,
            columns,
            ld: rows,
            batch_stride: rows * columns,
            offset: 0,
        }
    }

    /// The real library takes every description and wish that is made: it knows the attributes, their
    /// sizes and the values. That needs no device. `SHORTHAUL_CUBLASLT` says where it is.
    #[test]
    #[ignore = "needs cuBLASLt: set SHORTHAUL_CUBLASLT"]
    fn the_library_takes_every_description() {
        let none: [PathBuf; 0] = [];
        let library = CublasLt::find(&none).unwrap_or_else(|e| panic!("{e}"));
        assert!(library.version().starts_with("1"), "{}", library.version());
        for (dtype, compute) in [
            (DType::F32, Compute::F32Pedantic),
            (DType::BF16, Compute::F32),
            (DType::F16, Compute::F32),
            (DType::F64, Compute::F64),
        ] {
            for finish in [Finish::Nothing, Finish::Bias, Finish::BiasRelu] {
                let gemm = Gemm {
                    m: 8,
                    n: 16,
                    k: 32,
                    a: Matrix {
                        is_transposed: true,
                        ..matrix(dtype, 32, 8)
                    },
                    b: matrix(dtype, 32, 16),
                    d: matrix(dtype, 8, 16),
                    batch: 3,
                    compute,
                    finish,
                    is_swapped: false,
                };
                describe(&library, &gemm).unwrap_or_else(|e| panic!("{gemm}: {e:?}"));
                preferences(&library, &gemm, 32 << 20).unwrap_or_else(|e| panic!("{e:?}"));
            }
        }
    }
}
