//! The convolutions of a program on a device: graphs and plans made at load, launches.
//!
//! Owns the translation of [`Convolution`] to cuDNN's graph of operations. At a launch no memory of the
//! device is allocated, nothing is asked for or waited for; addresses can be given to the library only in a
//! small descriptor on the host.
#![allow(unsafe_code)]

use super::Device;
use super::cublaslt::Complaint;
use super::cudnn::{
    Address, Attribute, ConvolutionMode, Cudnn, DataType, Descriptor, Flag, Int, Kind,
    NanPropagation, PointwiseMode, Session,
};
use super::plans::{Asked, ExecutionPlan, Handed, PlanDevice};
use crate::passes::ALIGNMENT;
use crate::vendor::{Array, Convolution, Direction, Finish, LibraryProduct};
use cudarc::cudnn::sys;
use graph::DType;
use std::sync::Arc;
use sys::cudnnPointwiseMode_t as Pointwise;

/// Numbers of the arrays in a graph: those of memory in the order of a launch's parameters.
const MEMORY: [i64; 4] = [1, 2, 3, 4];
/// Number of the array that only passes from one operation to the next.
const SUMS: i64 = 5;
const BIASED: i64 = 6;

/// A convolution that is ready to be launched.
pub(super) struct Planned {
    session: Arc<Session>,
    plan: ExecutionPlan,
    /// What the plan is made of.
    _graph: Graph,
}

/// A convolution in the library's terms.
struct Graph {
    whole: Descriptor,
    /// What it is made of, which must stay.
    _parts: Vec<Descriptor>,
}

/// Makes a convolution ready, with the device's context current. If the library offers fewer plans than the
/// convolution's rank needs, returns how many.
///
/// # Errors
/// The library refuses the description, or every plan of it.
pub(super) fn load(
    device: &Device,
    library: &Arc<Cudnn>,
    product: &LibraryProduct,
    convolution: &Convolution,
) -> Result<Result<Planned, usize>, Complaint> {
    let session = device.dnn_session(library)?;
    let mut turn = session.turn();
    let key = (convolution.clone(), product.workspace_bytes);
    let mut ranking = turn.rankings.get(&key).cloned().unwrap_or_default();
    let place = PlanDevice::Session(&turn);
    let graph = describe(library, place, convolution)?;
    let asked = Asked {
        library,
        place,
        graph: &graph.whole,
        convolution,
        workspace_bytes: product.workspace_bytes,
    };
    let plan = asked.plan(&mut ranking, product.rank)?;
    let offered = ranking.offered(product.rank);
    turn.rankings.insert(key, ranking);
    drop(turn);
    Ok(match plan {
        Some(plan) => Ok(Planned {
            session,
            plan,
            _graph: graph,
        }),
        None => Err(offered),
    })
}

/// How many plans the library offers for a convolution, at most `most`, with the device's context
/// current.
///
/// # Errors
/// The library refuses the description, or every plan of it.
pub(super) fn n_offers(
    device: &Device,
    library: &Arc<Cudnn>,
    convolution: &Convolution,
    workspace_bytes: usize,
    most: usize,
) -> Result<usize, Complaint> {
    let session = device.dnn_session(library)?;
    let mut turn = session.turn();
    let key = (convolution.clone(), workspace_bytes);
    let mut ranking = turn.rankings.get(&key).cloned().unwrap_or_default();
    if !ranking.is_known(most) {
        let place = PlanDevice::Session(&turn);
        let graph = describe(library, place, convolution)?;
        let asked = Asked {
            library,
            place,
            graph: &graph.whole,
            convolution,
            workspace_bytes,
        };
        asked.look(&mut ranking, most)?;
        turn.rankings.insert(key, ranking.clone());
    }
    Ok(ranking.offered(most))
}

impl Planned {
    /// Enqueues the convolution; `at` are the addresses of its parameters, in order, and of its
    /// workspace, 0 if it has none.
    ///
    /// # Safety
    /// They are good for what the convolution reads and writes, until it has run, and the stream belongs
    /// to the current context.
    pub(super) unsafe fn launch(
        &self,
        convolution: &Convolution,
        at: &[u64],
        workspace: u64,
        stream: u64,
    ) -> Result<(), Complaint> {
        let offsets = convolution
            .operands()
            .map(|(_, array)| array.offset_bytes());
        let offsets = offsets.into_iter().chain([0]);
        let addresses = at
            .iter()
            .zip(offsets)
            .map(|(at, offset)| Address(at + offset));
        let addresses: Vec<Address> = addresses.collect();
        let numbers: Vec<Int> = MEMORY[..addresses.len()].iter().map(|n| Int(*n)).collect();
        let library = &self.session.library;
        let mut pack = Descriptor::new(library, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &numbers)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &addresses)?;
        let workspace = [Address(workspace)];
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &workspace)?;
        let pack = pack.finalized()?;
        // SAFETY: passed on; the plan was made for this convolution and a workspace of this size.
        unsafe { self.session.turn().execute(&self.plan.plan, &pack, stream) }
    }
}

/// A convolution as a graph of one operation, and one for its bias and one for its ReLU, if it has them.
fn describe(
    library: &Arc<Cudnn>,
    place: PlanDevice<'_>,
    c: &Convolution,
) -> Result<Graph, Complaint> {
    let [first, second, result] = c.operands().map(|(_, array)| array);
    let is_finished = c.finish != Finish::Nothing;
    let sums = Array {
        dtype: DType::F32,
        ..*result
    };
    let mut parts = vec![
        tensor(library, first, MEMORY[0], false)?,
        tensor(library, second, MEMORY[1], false)?,
        tensor(library, result, MEMORY[2], false)?,
    ];
    if is_finished {
        let channels = result.sizes[1];
        let bias = Array {
            dtype: result.dtype,
            sizes: [1, channels, 1, 1],
            strides: [channels, 1, channels, channels],
            offset: 0,
        };
        parts.push(tensor(library, &bias, MEMORY[3], false)?);
        parts.push(tensor(library, &sums, SUMS, true)?);
    }
    let made = if is_finished { &parts[4] } else { &parts[2] };
    let operation = convolve(library, c, [&parts[0], &parts[1], made])?;
    let mut operations = vec![operation];
    if is_finished {
        let is_last = c.finish == Finish::Bias;
        if !is_last {
            parts.push(tensor(library, &sums, BIASED, true)?);
        }
        let biased = if is_last { &parts[2] } else { &parts[5] };
        let add = Pointwise::CUDNN_POINTWISE_ADD;
        let added = pointwise(library, add, &parts[4], Some(&parts[3]), biased)?;
        operations.push(added);
        if !is_last {
            let relu = Pointwise::CUDNN_POINTWISE_RELU_FWD;
            operations.push(pointwise(library, relu, &parts[5], None, &parts[2])?);
        }
    }
    let mut whole = Descriptor::new(library, Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
    let handed = Handed {
        handle: Some(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE),
        properties: None,
    };
    place.hand(&mut whole, handed)?;
    let all: Vec<&Descriptor> = operations.iter().map(|(node, _)| node).collect();
    whole.set_descriptors(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, &all)?;
    let whole = whole.finalized()?;
    parts.extend(operations.into_iter().flat_map(|(node, how)| [node, how]));
    Ok(Graph {
        whole,
        _parts: parts,
    })
}

/// An array, by its number.
fn tensor(
    library: &Arc<Cudnn>,
    array: &Array,
    number: i64,
    is_virtual: bool,
) -> Result<Descriptor, Complaint> {
    let mut made = Descriptor::new(library, Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
    let alignment = gcd(ALIGNMENT, array.offset_bytes()) as i64;
    made.set(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[Int(number)])?;
    made.set(
        Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE,
        &[data_type(array.dtype)],
    )?;
    made.set(
        Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS,
        &array.sizes.map(Int),
    )?;
    made.set(
        Attribute::CUDNN_ATTR_TENSOR_STRIDES,
        &array.strides.map(Int),
    )?;
    made.set(
        Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT,
        &[Int(alignment)],
    )?;
    made.set(Attribute::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[Flag(is_virtual)])?;
    made.finalized()
}

fn gcd(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

/// The operation of a direction, which reads `first` and `second` and makes `result`; with its window.
fn convolve(
    library: &Arc<Cudnn>,
    c: &Convolution,
    [first, second, result]: [&Descriptor; 3],
) -> Result<(Descriptor, Descriptor), Complaint> {
    let mut window = Descriptor::new(library, Kind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
    let mode = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION as u32;
    window.set(
        Attribute::CUDNN_ATTR_CONVOLUTION_COMP_TYPE,
        &[data_type(DType::F32)],
    )?;
    window.set(
        Attribute::CUDNN_ATTR_CONVOLUTION_CONV_MODE,
        &[ConvolutionMode(mode)],
    )?;
    window.set(Attribute::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[Int(2)])?;
    window.set(
        Attribute::CUDNN_ATTR_CONVOLUTION_DILATIONS,
        &c.dilations.map(Int),
    )?;
    window.set(
        Attribute::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES,
        &c.strides.map(Int),
    )?;
    window.set(
        Attribute::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS,
        &c.pads[0].map(Int),
    )?;
    window.set(
        Attribute::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS,
        &c.pads[1].map(Int),
    )?;
    let window = window.finalized()?;
    use Attribute as A;
    let (kind, names) = match c.direction {
        Direction::Forward => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            [
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
            ],
        ),
        Direction::Data => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            [
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
            ],
        ),
        Direction::Filter => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
            [
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                A::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
            ],
        ),
    };
    let mut node = Descriptor::new(library, kind)?;
    let [one, two, to, how, alpha, beta] = names;
    node.set_descriptors(one, &[first])?;
    node.set_descriptors(two, &[second])?;
    node.set_descriptors(to, &[result])?;
    node.set_descriptors(how, &[&window])?;
    node.set(alpha, &[1.0_f32])?;
    node.set(beta, &[0.0_f32])?;
    Ok((node.finalized()?, window))
}

/// A function of each element in f32, with its settings.
fn pointwise(
    library: &Arc<Cudnn>,
    mode: Pointwise,
    x: &Descriptor,
    b: Option<&Descriptor>,
    y: &Descriptor,
) -> Result<(Descriptor, Descriptor), Complaint> {
    let mut how = Descriptor::new(library, Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
    how.set(
        Attribute::CUDNN_ATTR_POINTWISE_MODE,
        &[PointwiseMode(mode as u32)],
    )?;
    how.set(
        Attribute::CUDNN_ATTR_POINTWISE_MATH_PREC,
        &[data_type(DType::F32)],
    )?;
    if mode == Pointwise::CUDNN_POINTWISE_RELU_FWD {
        // A NaN stays one, as it does everywhere else; the library's default may make it 0.
        let stays = sys::cudnnNanPropagation_t::CUDNN_PROPAGATE_NAN;
        how.set(
            Attribute::CUDNN_ATTR_POINTWISE_NAN_PROPAGATION,
            &[NanPropagation(stays as u32)],
        )?;
    }
    let how = how.finalized()?;
    let mut node = Descriptor::new(library, Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
    node.set_descriptors(
        Attribute::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
        &[&how],
    )?;
    node.set_descriptors(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &[x])?;
    if let Some(b) = b {
        node.set_descriptors(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &[b])?;
    }
    node.set_descriptors(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &[y])?;
    Ok((node.finalized()?, how))
}

/// The library's name of a type that convolutions have.
fn data_type(dtype: DType) -> DataType {
    use sys::cudnnDataType_t as Type;
    DataType(match dtype {
        DType::BF16 => Type::CUDNN_DATA_BFLOAT16,
        DType::F16 => Type::CUDNN_DATA_HALF,
        _ => Type::CUDNN_DATA_FLOAT,
    } as u32)
}

#[cfg(test)]
mod tests {
    use super::super::cudnn::Character;
    use super::super::plans::Ranking;
    use super::*;
    use std::path::PathBuf;

    /// What cuDNN 9.26 wants to know of a device that is not there, in its own words: an H200's.
    const H200: &str = r#"{"deviceVer": 900, "driverVer": 13000, "deviceName": "NVIDIA H200",
        "smCountOrigin": 0, "multiProcessorCount": 132, "warpSize": 32, "maxGridSize": [2147483647, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536, "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": 232448, "oversizedSharedMemoryPerBlock": 0,
        "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32,
        "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
        "supportCoopLaunch": 1, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
        "l2CacheSize": 62914560, "totalGlobalMem": 150000000000, "cudaDeviceId": 0}"#;

    fn h200(library: &Arc<Cudnn>) -> Descriptor {
        let mut device =
            Descriptor::new(library, Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR).unwrap();
        let text: Vec<Character> = H200.bytes().chain([0]).map(Character).collect();
        let json = Attribute::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION;
        device.set(json, &text).unwrap();
        device.finalized().unwrap_or_else(|e| panic!("{e:?}"))
    }

    fn convolution(direction: Direction, dtype: DType, window: i64, groups: i64) -> Convolution {
        let array = |sizes: [i64; 4]| {
            let [_, c, h, w] = sizes;
            Array {
                dtype,
                sizes,
                strides: [c * h * w, 1, c * w, c],
                offset: 0,
            }
        };
        let pad = window / 2;
        Convolution {
            direction,
            x: array([8, 64, 56, 56]),
            w: array([128, 64 / groups, window, window]),
            y: array([8, 128, 28, 28]),
            groups,
            // 56 + 2 * pad - window counts down to 55 from the first response to the last by twos.
            pads: [[pad, pad], [pad - 1, pad - 1].map(|n: i64| n.max(0))],
            strides: [2, 2],
            dilations: [1, 1],
            finish: Finish::Nothing,
            is_swapped: false,
        }
    }

    /// The real library takes every description, recommends engines for an H200, tells their notes and
    /// plans some of them: it knows the attributes, their types and values, and has these convolutions.
    /// The test needs no device; the handle and launches would. `SHORTHAUL_CUDNN` names the library's folder.
    #[test]
    #[ignore = "needs cuDNN: set SHORTHAUL_CUDNN"]
    fn the_library_plans_every_description() {
        let none: [PathBuf; 0] = [];
        let library = Cudnn::find(&none).unwrap_or_else(|e| panic!("{e}"));
        assert!(library.version().starts_with("9."), "{}", library.version());
        let device = h200(&library);
        let place = PlanDevice::Properties(&device);
        use Direction::{Data, Filter, Forward};
        let mut all = Vec::new();
        for direction in [Forward, Data, Filter] {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                for (window, groups) in [(3, 1), (7, 1), (1, 1), (3, 4)] {
                    all.push(convolution(direction, dtype, window, groups));
                }
            }
        }
        for finish in [Finish::Bias, Finish::BiasRelu] {
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                let plain = convolution(Forward, dtype, 3, 1);
                all.push(Convolution { finish, ..plain });
            }
        }
        for c in all {
            let graph = describe(&library, place, &c).unwrap_or_else(|e| panic!("{c}: {e:?}"));
            let asked = Asked {
                library: &library,
                place,
                graph: &graph.whole,
                convolution: &c,
                workspace_bytes: 64 << 20,
            };
            let found = asked.plan(&mut Ranking::default(), 0);
            let found = found.unwrap_or_else(|e| panic!("{c}: {e:?}"));
            assert!(found.is_some(), "no plan with sums as described: {c}");
        }
        let mut wrong = convolution(Forward, DType::BF16, 3, 1);
        wrong.y.sizes[2] += 1;
        let told = describe(&library, place, &wrong).err().unwrap();
        assert!(told.problem.contains("CUDNN_STATUS_BAD_PARAM"), "{told:?}");
    }
}
