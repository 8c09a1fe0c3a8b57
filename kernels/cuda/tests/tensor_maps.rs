//! What the copy engine is told of operands, compared with the driver's documented conditions: those of every
//! product that is emitted in tests, by a driver that records and checks them.
#![allow(unsafe_code)]

#[path = "../../tests/contraction_cases/mod.rs"]
mod contraction_cases;
mod contraction_runs;
mod recorders;
mod warpgroup_cases;

use contraction_cases::matmul;
use contraction_runs::{BF16, Wanted, cases};
use cuda_kernels::contraction::emit_for_warpgroups;
use cuda_kernels::device::{CudaModule, Device};
use cuda_kernels::machine::Addresses;
use cuda_kernels::nvrtc::{Cubin, Resources};
use cuda_kernels::passes::{Argument, Pass, PlacedLaunch};
use cuda_kernels::{CudaError, Kernel, LaunchOp, ParamType, TensorMap};
use graph::DType;
use kernels::run::BufferRef;
use recorders::Recorders;

/// Breaks one condition of a map.
type Change = fn(&mut TensorMap);

/// Heads that lie between each other in a row, as attention's do: their distance is shorter than a line's.
fn heads() -> Vec<Wanted> {
    let c = matmul([16, 512, 512, 64], "mbk", "nbk", "bmn");
    let context = matmul([16, 512, 64, 512], "bmk", "kbn", "mbn");
    let of = |label: &str, c, tile| (label.to_string(), c, BF16, None, Some(tile));
    vec![
        of("scores", c.clone(), 3),
        of("scores", c, 4),
        of("context", context.clone(), 3),
        of("context", context, 4),
    ]
}

fn run(device: &std::sync::Arc<Device>, kernels: &[Kernel], address: u64) -> Result<(), CudaError> {
    let resources = |kernel: &Kernel| Resources {
        kernel: kernel.name.clone(),
        registers: 32,
        stack_bytes: 0,
        spill_store_bytes: 0,
        spill_load_bytes: 0,
        static_shared_bytes: 0,
    };
    let cubins = [Cubin {
        arch: device.arch(),
        bytes: b"MOCK-ELF".to_vec(),
        resources: kernels.iter().map(resources).collect(),
        log: String::new(),
    }];
    let launch = |(n, kernel): (usize, &Kernel)| PlacedLaunch {
        work: LaunchOp::Kernel(n),
        grid: [1, 1, 1],
        dynamic_shared_bytes: kernel.dynamic_shared_bytes(),
        args: kernel
            .params
            .iter()
            .map(|param| Argument {
                at: BufferRef::Arena(0),
                bytes: 64,
                name: param.name.clone(),
            })
            .collect(),
        writes_saved: false,
        origin: kernel.origin.clone(),
    };
    let pass = Pass {
        launches: kernels.iter().enumerate().map(launch).collect(),
        externals: vec![],
        arena_bytes: 64,
        saved_bytes: 0,
        alignment: cuda_kernels::passes::ALIGNMENT,
    };
    let module = CudaModule::load(device, kernels, &cubins, &[], pass.launches.iter())?;
    let addresses = Addresses {
        externals: &[],
        arena: address,
        saved: 0,
    };
    // SAFETY: the recording driver executes nothing.
    unsafe { module.run(&pass, 0, &addresses) }
}

#[test]
fn every_map_keeps_the_drivers_conditions() {
    let recorders = Recorders::new();
    recorders.params(1);
    let device = Device::open(0).unwrap();
    let all = [
        warpgroup_cases::products(),
        warpgroup_cases::others(),
        warpgroup_cases::large(),
        heads(),
    ];
    let (_, kernels) = cases(emit_for_warpgroups, all.concat());
    let maps = |k: &Kernel| k.params.iter().filter_map(|p| p.ty.map()).count();
    let n: usize = kernels.iter().map(maps).sum();
    assert!(n >= 40, "{n} maps");
    run(&device, &kernels, 0x1_0000).unwrap();
    let log = recorders.driver_log();
    let encoded = log
        .iter()
        .filter(|l| l.starts_with("cuTensorMapEncodeTiled"));
    assert_eq!(encoded.count(), n);
    // The next head comes before the next row.
    let rest = "sizes 64 16 512 strides 128 2048 box 64 1 128 steps 1 1 1 ";
    assert!(log.iter().any(|line| line.contains(rest)), "{log:#?}");
}

/// The driver's conditions are ours: whatever is asked of it, both take it or both refuse.
#[test]
fn conditions_agree_with_the_drivers() {
    let recorders = Recorders::new();
    recorders.params(1);
    let device = Device::open(0).unwrap();
    let good = TensorMap {
        dtype: DType::BF16,
        offset: 8,
        sizes: [64, 40, 3],
        strides: [72, 2880],
        lines: [128, 1],
    };
    let mut kernel = Kernel {
        name: "sh_k0".into(),
        text: String::new(),
        params: vec![cuda_kernels::Param {
            name: "x".into(),
            ty: ParamType::Map(good),
        }],
        threads: 128,
        min_blocks: 1,
        origin: "layers.0 (net.py:3)".into(),
    };
    run(&device, std::slice::from_ref(&kernel), 0x1000).unwrap();
    let mut told = Vec::new();
    let changes: [(&str, Change); 14] = [
        ("nothing", |_| {}),
        ("f16", |m| m.dtype = DType::F16),
        ("apart", |m| m.strides = [1 << 20, 40 << 20]),
        ("most lines", |m| m.lines = [256, 1]),
        ("other way", |m| m.lines = [1, 64]),
        ("offset", |m| m.offset = 4),
        ("no lines", |m| m.sizes[1] = 0),
        ("line off", |m| m.strides = [68, 68 * 40]),
        ("too far", |m| m.strides[1] = 72 << 33),
        ("overlap", |m| m.strides = [56, 56 * 40]),
        ("planes in lines", |m| m.strides[1] = 64),
        ("between lines", |m| m.strides[1] = 2888),
        ("many lines", |m| m.lines = [264, 1]),
        ("empty box", |m| m.lines = [128, 0]),
    ];
    for (n, (name, change)) in changes.into_iter().enumerate() {
        let mut map = good;
        change(&mut map);
        kernel.params[0].ty = ParamType::Map(map);
        let ours = run(&device, std::slice::from_ref(&kernel), 0x1000);
        assert_eq!(ours.is_ok(), n < 5, "{name}");
        assert_eq!(recorders.takes(&map, 0x1000), n < 5, "{name}");
        told.extend(ours.err().map(|error| error.to_string()));
    }
    assert!(
        told.iter().all(|t| t.starts_with(
            "kernel sh_k0 (of layers.0 (net.py:3)) did not start on cuda:0: a map for the copy engine must keep"
        )),
        "{told:#?}"
    );
    assert!(!recorders.takes(&good, 0x1008), "an odd address");
}
