//! The emulator's counts of memory traffic, on kernels of which the traffic is known.

use graph::{DType, Tensor};
use kernels::cuda::emulate::{Emulator, Memory, Settings, Traffic};
use kernels::cuda::{Arg, Kernel, Launch, Param, ParamType};

/// Elements of `x`; `y` has as many.
const N: usize = 4096;
const BLOCKS: u32 = 4;

fn kernel(name: &str, body: &str) -> Kernel {
    let param = |name: &str, ty| Param {
        name: name.into(),
        ty,
    };
    Kernel {
        name: name.into(),
        text: format!(
            "SH_KERNEL({name}, 128, 1)(SH_IN(float) x, SH_OUT(float) y) {{\n\
             const int i = SH_BID * 128 + SH_TID;\n{body}\n}}\n"
        ),
        params: vec![
            param("x", ParamType::In(DType::F32)),
            param("y", ParamType::Out(DType::F32)),
        ],
        threads: 128,
        min_blocks: 1,
        origin: "test".into(),
    }
}

fn counts(bodies: &[(&str, &str)]) -> Vec<Traffic> {
    let kernels: Vec<Kernel> = bodies.iter().map(|(n, b)| kernel(n, b)).collect();
    let emulator = Emulator::from_environment(&kernels).unwrap();
    let count = |idx| {
        let mut memory = Memory::default();
        let x = memory.add("x", &Tensor::zeros(DType::F32, &[N]));
        let y = memory.add("y", &Tensor::zeros(DType::F32, &[N]));
        let launch = Launch {
            kernel: idx,
            grid: [BLOCKS, 1, 1],
            dynamic_shared_bytes: 0,
            args: vec![Arg::Buffer(x), Arg::Buffer(y)],
        };
        let counts = |seed, memory: &mut Memory| {
            emulator
                .count(&launch, memory, &Settings::of_seed(seed))
                .unwrap()
        };
        let natural = counts(0, &mut memory);
        assert_eq!(counts(3, &mut memory), natural, "in another order");
        natural
    };
    (0..kernels.len()).map(count).collect()
}

#[test]
fn known_traffic_is_counted() {
    let found = counts(&[
        ("copied", "y[i] = x[i];"),
        ("strided", "y[i] = x[2 * i];"),
        ("far", "y[i] = x[8 * i % 4096];"),
        ("one_for_all", "y[i] = x[0];"),
        ("vectors", "sh_store<4>(y, 4 * i, sh_load<4>(x, 4 * i));"),
        ("shifted", "y[i] = x[i + 1];"),
        ("twice", "y[i] = x[i];\nSH_SYNC();\ny[i] = y[i] + x[i];"),
        (
            "walked",
            "float a = 0.0f;\nfor (int k = 0; k < 8; k++) a += x[8 * i + k];\ny[i] = a;",
        ),
        ("half", "if (SH_LANE < 16) y[i] = x[i];"),
        ("reversed", "y[i] = x[511 - i];"),
    ]);
    let warps = u64::from(BLOCKS) * 4;
    let loads = |n: usize| {
        let d = &found[n].loads;
        (d.instructions, d.bytes, d.sectors, d.unique_bytes)
    };
    let stores = |n: usize| {
        let d = &found[n].stores;
        (d.instructions, d.bytes, d.sectors, d.unique_bytes)
    };
    let whole = (warps, warps * 128, warps * 4, warps * 128);
    assert_eq!((loads(0), stores(0)), (whole, whole));
    assert_eq!(found[0].efficiency(), 1.0);
    assert_eq!(loads(1), (warps, warps * 128, warps * 8, warps * 128));
    assert_eq!(found[1].efficiency(), 256.0 / 384.0);
    assert_eq!(loads(2).2, warps * 32);
    assert_eq!(loads(3), (warps, warps * 128, warps, 4));
    assert_eq!(loads(4), (warps, warps * 512, warps * 16, warps * 512));
    assert_eq!(found[4].loads.bytes_by_width.get(&16), Some(&(warps * 512)));
    assert_eq!(found[0].loads.bytes_by_width.get(&4), Some(&(warps * 128)));
    assert_eq!(loads(5).2, warps * 5);
    // What the launch wrote itself needs no loading.
    assert_eq!(
        loads(6),
        (3 * warps, 3 * warps * 128, 3 * warps * 4, warps * 128)
    );
    assert_eq!(stores(6).3, warps * 128);
    // Each of the eight steps touches 32 sectors, of which all is used in the end.
    assert_eq!(
        loads(7),
        (8 * warps, warps * 1024, 8 * 32 * warps, warps * 1024)
    );
    assert_eq!(loads(8), (warps, warps * 64, warps * 2, warps * 64));
    assert_eq!(loads(9), whole);
}
