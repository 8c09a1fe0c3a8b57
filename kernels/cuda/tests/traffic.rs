//! The emulator's counts of memory traffic: of kernels whose traffic is known, and of emitted
//! kernels at realistic rows, held by a snapshot.

use cuda_kernels::emulate::{Direction, Emulator, Memory, Settings, Traffic};
use cuda_kernels::{Arg, Kernel, Launch, LaunchOp, Param, ParamType, execute, lower};
use graph::{ContainerId, DType, Graph, Tensor};
use graph_cases::{files, joined};
use kernels::plan::Buffer;
use std::fs;
use std::path::PathBuf;

#[path = "../../tests/graph_cases/mod.rs"]
mod graph_cases;

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
    assert_eq!(found[7].loads.block_sectors, 32 * warps);
    assert_eq!(loads(8), (warps, warps * 64, warps * 2, warps * 64));
    assert_eq!(loads(9), whole);
}

/// Floats in [0, 1); integers that name 2000 rows in no order, some twice.
fn input(graph: &Graph, id: ContainerId) -> Tensor {
    let c = graph.container(id);
    let sizes = c.shape.iter().map(|s| s.as_const().unwrap() as usize);
    let shape: Vec<usize> = sizes.collect();
    let unit = |i: usize| f64::from(graph::philox::uniform(u64::from(id.0), i as u64));
    let all = 0..shape.iter().product::<usize>();
    if c.dtype.is_float() {
        return Tensor::from_f64(
            c.dtype,
            &shape,
            all.map(|i| c.dtype.round(unit(i))).collect(),
        );
    }
    Tensor::from_i64(
        c.dtype,
        &shape,
        all.map(|i| (unit(i) * 2000.0) as i64).collect(),
    )
}

/// Shares of bytes by the width of accesses: `16:95% 4:5%`.
fn widths(d: &Direction) -> String {
    let all = d.bytes_by_width.iter().rev();
    let share = all.map(|(w, b)| format!("{w}:{}%", (100 * b + d.bytes / 2) / d.bytes.max(1)));
    share.collect::<Vec<_>>().join(" ")
}

/// For every map of `traffic_cases`: the bytes of its containers, and their share of the bytes that its
/// launches move, with sectors counted once for each block, and for each instruction. Then each launch. Rows
/// are as long as in networks, but fewer.
#[test]
fn emitted_kernels_move_what_they_must() {
    let wanted = std::env::var("TRAFFIC_CASE").unwrap_or_default();
    let graph = joined(&files("traffic_cases", &wanted), "f32");
    let program = lower::lower(&graph).unwrap();
    let inputs: Vec<Tensor> = graph.inputs.iter().map(|id| input(&graph, *id)).collect();
    let host = execute::compile(&graph, &program).unwrap();
    let traffic = host.traffic(&inputs).unwrap();
    let mut text = String::new();
    for (map, info) in program.maps.iter().enumerate() {
        let own = || {
            let launches = program.launches.iter().zip(&traffic);
            launches.filter(|(l, _)| l.map == map)
        };
        let moved: u64 = own().map(|(_, t)| t.sector_bytes()).sum();
        let floor = info.bytes_read + info.bytes_written;
        let mut lines = String::new();
        let mut name = String::new();
        for (launch, t) in own() {
            let LaunchOp::Kernel(n) = launch.work else {
                continue;
            };
            let kernel = &program.kernels[n];
            let outs = kernel.params.iter().zip(&launch.args);
            let outs = outs.filter(|(p, _)| matches!(p.ty, ParamType::Out(_)));
            let outs: Vec<String> = outs
                .map(|(_, b)| match b {
                    Buffer::Container(id) => graph.container(*id).name.clone(),
                    Buffer::Workspace(_) => "workspace".to_string(),
                })
                .collect();
            name = outs.first().cloned().unwrap_or_default();
            lines += &format!(
                "  {} x {} threads: efficiency {:.3}, loads {} KiB ({}), stores {} KiB ({}) to {}\n",
                launch.grid,
                kernel.threads,
                t.efficiency(),
                t.loads.sectors * 32 / 1024,
                widths(&t.loads),
                t.stores.sectors * 32 / 1024,
                widths(&t.stores),
                outs.join(", ")
            );
        }
        let beyond: u64 = own().map(|(_, t)| t.block_bytes()).sum();
        let ratio = |bytes| floor as f64 / bytes as f64;
        text += &format!(
            "{name}: floor {} KiB, of sectors by block {:.3}, by instruction {:.3}\n{lines}",
            floor / 1024,
            ratio(beyond),
            ratio(moved)
        );
    }
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/traffic_cases/traffic.txt");
    if !wanted.is_empty() {
        program.kernels.iter().for_each(|k| println!("{}", k.text));
        println!("{text}");
    } else if std::env::var_os("SHORTHAUL_UPDATE").is_some() {
        fs::write(&path, &text).unwrap();
    } else {
        let before = fs::read_to_string(&path).unwrap_or_default();
        assert!(before == text, "{} is now:\n{text}", path.display());
    }
}
