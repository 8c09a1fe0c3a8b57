//! Times the contractions of ResNet-50, MobileNetV2 and a BERT-large layer, per pass, and prints
//! GFLOP/s. `cargo run --release --example contraction_bench -- [--filter TEXT] [--threads N] [--reps N]`
//! With `--in-turn 1` the threads' shares run one after the other and processor time counts (for a
//! machine that is not quiet); with `--check 1` sampled outputs are compared with their definition.

#![allow(unsafe_code)]

#[path = "../tests/contraction_cases/mod.rs"]
mod contraction_cases;

use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Barrier;
use std::time::Instant;

use contraction_cases::{Conv, extent, matmul};
use kernels::contraction::{
    Axis, Contraction, ContractionTarget, EmittedContraction, Hooks, Operand, emit,
};

type Kernel = unsafe extern "C" fn(*const *mut c_void, *mut c_void, i64, i64);

struct Row {
    network: &'static str,
    label: String,
    times: u32,
    contraction: Contraction,
}

fn convolutions(network: &'static str, layers: &[(u32, Conv)]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (i, (times, conv)) in layers.iter().enumerate() {
        let kind = match (conv.groups, conv.c) {
            (1, _) => String::new(),
            (_, 1) => "depthwise".to_string(),
            (groups, _) => format!("{groups} groups "),
        };
        let label = |pass: &str| {
            let (c, k) = (conv.c * conv.groups, conv.k * conv.groups);
            format!(
                "{network} {pass} {kind}{0}x{0} {c}->{k} {1} s{2}",
                conv.kernel[0], conv.size[0], conv.stride
            )
        };
        let mut push = |pass: &str, contraction| {
            rows.push(Row {
                network,
                label: label(pass),
                times: *times,
                contraction,
            });
        };
        push("forward", conv.forward());
        if i > 0 {
            push("dgrad", conv.data_gradient());
        }
        push("wgrad", conv.weight_gradient());
    }
    rows
}

fn resnet50() -> Vec<(u32, Conv)> {
    let mut l = vec![(
        1,
        Conv {
            nchw_input: true,
            pad: 3,
            ..Conv::square(8, 3, 64, 224, 7, 2)
        },
    )];
    let mut c_in = 64;
    for (stage, (mid, size, blocks)) in [(64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)]
        .into_iter()
        .enumerate()
    {
        let (stride, in_size) = if stage == 0 { (1, size) } else { (2, size * 2) };
        l.push((1, Conv::square(8, c_in, mid, in_size, 1, 1)));
        l.push((1, Conv::square(8, mid, mid, in_size, 3, stride)));
        l.push((1, Conv::square(8, c_in, mid * 4, in_size, 1, stride)));
        l.push((blocks, Conv::square(8, mid, mid * 4, size, 1, 1)));
        l.push((blocks - 1, Conv::square(8, mid * 4, mid, size, 1, 1)));
        l.push((blocks - 1, Conv::square(8, mid, mid, size, 3, 1)));
        c_in = mid * 4;
    }
    l
}

fn mobilenet_v2() -> Vec<(u32, Conv)> {
    let mut l = vec![(
        1,
        Conv {
            nchw_input: true,
            ..Conv::square(8, 3, 32, 224, 3, 2)
        },
    )];
    let (mut c, mut size) = (32, 112);
    for (expand, out, n, stride) in [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ] {
        for i in 0..n {
            let s = if i == 0 { stride } else { 1 };
            if expand > 1 {
                l.push((1, Conv::square(8, c, c * expand, size, 1, 1)));
            }
            l.push((1, Conv::depthwise(8, c * expand, size, 3, s)));
            size /= s;
            l.push((1, Conv::square(8, c * expand, out, size, 1, 1)));
            c = out;
        }
    }
    l.push((1, Conv::square(8, 320, 1280, 7, 1, 1)));
    merge_equal(l)
}

/// Grouped 3x3 convolutions: ResNeXt-50 32x4d and RegNet-Y-400MF.
fn grouped() -> Vec<(u32, Conv)> {
    let layer = |groups, per_group, size, stride| Conv {
        groups,
        ..Conv::square(8, per_group, per_group, size, 3, stride)
    };
    vec![
        // The first has no data gradient in this list.
        (3, layer(32, 4, 56, 1)),
        (3, layer(32, 4, 56, 1)),
        (1, layer(32, 8, 56, 2)),
        (3, layer(32, 8, 28, 1)),
        (5, layer(32, 16, 14, 1)),
        (2, layer(32, 32, 7, 1)),
        (2, layer(13, 8, 28, 1)),
        (5, layer(26, 8, 14, 1)),
    ]
}

fn merge_equal(layers: Vec<(u32, Conv)>) -> Vec<(u32, Conv)> {
    let mut out: Vec<(u32, Conv)> = Vec::new();
    for (n, c) in layers {
        match out
            .iter_mut()
            .find(|o| format!("{:?}", o.1) == format!("{c:?}"))
        {
            Some(o) => o.0 += n,
            None => out.push((n, c)),
        }
    }
    out
}

/// Linear layers on [tokens, features] and attention on [B, L, heads, head] views.
fn bert_layer() -> Vec<Row> {
    let (batch, len, heads, head) = (2, 512, 16, 64);
    let tokens = batch * len;
    let mut rows = Vec::new();
    let mut push = |times, label: String, contraction| {
        rows.push(Row {
            network: "bert",
            label: format!("bert {label}"),
            times,
            contraction,
        })
    };
    for (times, out, inp) in [(4, 1024, 1024), (1, 4096, 1024), (1, 1024, 4096)] {
        push(
            times,
            format!("forward {inp}->{out}"),
            matmul([1, tokens, out, inp], "mk", "nk", "mn"),
        );
        push(
            times,
            format!("dgrad {inp}->{out}"),
            matmul([1, tokens, inp, out], "mk", "kn", "mn"),
        );
        push(
            times,
            format!("wgrad {inp}->{out}"),
            matmul([1, out, inp, tokens], "km", "kn", "mn"),
        );
    }
    for (label, m, n, k, a, b, out) in [
        ("Q K^T", len, len, head, "mbk", "nbk", "bmn"),
        ("P V", len, head, len, "bmk", "kbn", "mbn"),
        ("dO V^T", len, len, head, "mbk", "nbk", "bmn"),
        ("P^T dO", len, head, len, "bkm", "kbn", "mbn"),
        ("dS K", len, head, len, "bmk", "kbn", "mbn"),
        ("dS^T Q", len, head, len, "bkm", "kbn", "mbn"),
    ] {
        // The heads of one sequence; the two sequences follow each other.
        push(
            2,
            format!("attention {label}"),
            matmul([heads, m, n, k], a, b, out),
        );
    }
    rows
}

struct Loaded {
    row: Row,
    e: EmittedContraction,
    kernels: Vec<Kernel>,
}

fn lines(bytes: usize) -> Vec<[u64; 512]> {
    vec![[0; 512]; bytes / 4096 + 2]
}

fn page(v: &mut [[u64; 512]]) -> *mut c_void {
    let at = v.as_mut_ptr() as usize;
    (at.div_ceil(4096) * 4096) as *mut c_void
}

/// Least and median seconds of a run on `nt` threads.
fn time(l: &Loaded, nt: i64, reps: usize) -> (f64, f64) {
    let c = &l.row.contraction;
    let mut data = [
        extent(&c.a) * 4,
        extent(&c.b) * 4,
        extent(&c.out) * 4,
        l.e.shared_scratch_bytes,
    ]
    .map(lines);
    for operand in &mut data[..2] {
        for (i, w) in operand.iter_mut().flatten().enumerate() {
            let x = ((i * 7919 % 1000) as f32 / 1000.0).to_bits() as u64;
            *w = x | (x << 32);
        }
    }
    let buf: Vec<usize> = data.iter_mut().map(|d| page(d) as usize).collect();
    let mut own: Vec<_> = (0..nt).map(|_| lines(l.e.thread_scratch_bytes)).collect();
    let own: Vec<usize> = own.iter_mut().map(|d| page(d) as usize).collect();
    let barrier = Barrier::new(nt as usize);
    let spin = std::sync::atomic::AtomicUsize::new(0);
    let wait = |round: &mut usize| {
        use std::sync::atomic::Ordering::SeqCst;
        *round += nt as usize;
        spin.fetch_add(1, SeqCst);
        while spin.load(SeqCst) < *round {
            std::hint::spin_loop();
        }
    };
    let mut seconds = Vec::new();
    std::thread::scope(|s| {
        let work = |tid: i64| {
            let mut round = 0;
            let mut times = Vec::new();
            barrier.wait();
            for _ in 0..reps + 2 {
                let start = Instant::now();
                for k in &l.kernels {
                    unsafe {
                        k(
                            buf.as_ptr().cast(),
                            own[tid as usize] as *mut c_void,
                            tid,
                            nt,
                        )
                    };
                    wait(&mut round);
                }
                times.push(start.elapsed().as_secs_f64());
            }
            times.split_off(2)
        };
        let others: Vec<_> = (1..nt).map(|tid| s.spawn(move || work(tid))).collect();
        seconds = work(0);
        for o in others {
            o.join().expect("no panic");
        }
    });
    seconds.sort_by(f64::total_cmp);
    (seconds[0], seconds[seconds.len() / 2])
}

/// Processor seconds of this thread so far.
fn thread_seconds() -> f64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + 1e-9 * t.tv_nsec as f64
}

/// Like [`time`] on a machine that others use: the threads' shares run one after the other, and each
/// launch counts the processor time of its longest share.
fn time_in_turn(l: &Loaded, nt: i64, reps: usize) -> (f64, f64) {
    let c = &l.row.contraction;
    let mut data = [
        extent(&c.a) * 4,
        extent(&c.b) * 4,
        extent(&c.out) * 4,
        l.e.shared_scratch_bytes,
    ]
    .map(lines);
    for operand in &mut data {
        for w in operand.iter_mut().flatten() {
            *w = 0x3f80_0000_3f80_0000;
        }
    }
    let buf: Vec<usize> = data.iter_mut().map(|d| page(d) as usize).collect();
    let mut own = lines(l.e.thread_scratch_bytes);
    let mut seconds = Vec::new();
    for _ in 0..reps + 1 {
        let mut total = 0.0;
        let mut each = Vec::new();
        for k in &l.kernels {
            let mut longest: f64 = 0.0;
            for tid in 0..nt {
                let start = thread_seconds();
                unsafe { k(buf.as_ptr().cast(), page(&mut own), tid, nt) };
                longest = longest.max(thread_seconds() - start);
            }
            total += longest;
            each.push(longest);
        }
        seconds.push((total, each));
    }
    seconds.remove(0);
    seconds.sort_by(|a, b| a.0.total_cmp(&b.0));
    if argument("--launches").is_some() {
        let each: Vec<String> = seconds[0]
            .1
            .iter()
            .map(|s| format!("{:.3}", s * 1e3))
            .collect();
        println!("  ms per launch: {}", each.join(", "));
    }
    (seconds[0].0, seconds[seconds.len() / 2].0)
}

/// Runs `l` on random numbers and compares a few outputs with their definition in f64.
fn check(l: &Loaded, nt: i64) {
    let c = &l.row.contraction;
    let mut seed = 1u64;
    let mut next = || {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        seed >> 33
    };
    let mut random = |n: usize| -> Vec<f32> {
        (0..n)
            .map(|_| (next() % 2001) as f32 / 1000.0 - 1.0)
            .collect()
    };
    let (a, b) = (random(extent(&c.a)), random(extent(&c.b)));
    let mut out = vec![f32::NAN; extent(&c.out)];
    let mut shared = lines(l.e.shared_scratch_bytes);
    let mut own = lines(l.e.thread_scratch_bytes);
    let buf = [
        a.as_ptr() as usize,
        b.as_ptr() as usize,
        out.as_mut_ptr() as usize,
        page(&mut shared) as usize,
    ];
    for k in &l.kernels {
        for tid in 0..nt {
            unsafe { k(buf.as_ptr().cast(), page(&mut own), tid, nt) };
        }
    }
    assert!(
        out.iter().all(|x| x.is_finite()),
        "{}: some outputs were not written",
        l.row.label
    );
    for _ in 0..12 {
        let at: Vec<i64> = c
            .out
            .axes
            .iter()
            .map(|ax| (next() % ax.size as u64) as i64)
            .collect();
        let z: i64 = c.out.base
            + c.out
                .axes
                .iter()
                .zip(&at)
                .map(|(ax, v)| ax.stride * v)
                .sum::<i64>();
        let (want, size) = definition(c, &at, &a, &b);
        let got = f64::from(out[z as usize]);
        assert!(
            (got - want).abs() <= 1e-5 * size + 1e-6,
            "{}: {at:?} is {got}, not {want}",
            l.row.label
        );
    }
}

/// The output at position `at` of its axes, and the sum of its terms' magnitudes.
fn definition(c: &Contraction, at: &[i64], a: &[f32], b: &[f32]) -> (f64, f64) {
    // A dim that is an output axis by itself is known; all others are tried.
    let mut known = vec![None; c.dims.len()];
    for (ax, &v) in c.out.axes.iter().zip(at) {
        if let [(d, 1)] = ax.terms[..] {
            known[d] = Some(v - ax.offset);
        }
    }
    let free: Vec<usize> = (0..c.dims.len()).filter(|&d| known[d].is_none()).collect();
    let mut x: Vec<i64> = known.iter().map(|k| k.unwrap_or(0)).collect();
    let (mut sum, mut size) = (0.0, 0.0);
    loop {
        let hit = c
            .out
            .axes
            .iter()
            .zip(at)
            .all(|(ax, &v)| position(ax, &x) == v);
        if let (true, Some(i), Some(j)) = (hit, address(&c.a, &x), address(&c.b, &x)) {
            let term = f64::from(a[i]) * f64::from(b[j]);
            (sum, size) = (sum + term, size + term.abs());
        }
        let Some(n) = (0..free.len())
            .rev()
            .find(|&n| x[free[n]] + 1 < c.dims[free[n]])
        else {
            return (sum, size);
        };
        x[free[n]] += 1;
        for &d in &free[n + 1..] {
            x[d] = 0;
        }
    }
}

fn position(ax: &Axis, x: &[i64]) -> i64 {
    ax.offset + ax.terms.iter().map(|&(d, k)| k * x[d]).sum::<i64>()
}

fn address(op: &Operand, x: &[i64]) -> Option<usize> {
    let mut sum = op.base;
    for ax in &op.axes {
        let v = position(ax, x);
        if ax.guarded && !(0..ax.size).contains(&v) {
            return None;
        }
        sum += v * ax.stride;
    }
    Some(sum as usize)
}

fn argument(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|a| a != name);
    args.nth(1)
}

/// Compiles, unless the same text has been compiled before; returns the library's path.
fn compile(source: &str) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    source.hash(&mut hasher);
    let stem = std::env::temp_dir().join(format!("contraction_bench_{:016x}", hasher.finish()));
    let (c, so) = (stem.with_extension("c"), stem.with_extension("so"));
    if so.exists() {
        return so;
    }
    let started = Instant::now();
    std::fs::write(&c, source).expect("a writable temporary directory");
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
    let flags = [
        "-O3",
        "-march=native",
        "-mprefer-vector-width=512",
        "-w",
        "-shared",
        "-fPIC",
        "-o",
    ];
    let done = Command::new(cc)
        .args(flags)
        .args([&so, &c])
        .status()
        .expect("a C compiler");
    assert!(done.success(), "the emitted C does not compile");
    println!(
        "compiled {} in {:.1} s",
        c.display(),
        started.elapsed().as_secs_f64()
    );
    so
}

fn main() {
    let threads: i64 = argument("--threads")
        .and_then(|s| s.parse().ok())
        .unwrap_or(2);
    let reps: usize = argument("--reps").and_then(|s| s.parse().ok()).unwrap_or(5);
    let filter = argument("--filter").unwrap_or_default();
    let mut rows = convolutions("resnet50", &resnet50());
    rows.extend(convolutions("mobilenetv2", &mobilenet_v2()));
    rows.extend(convolutions("grouped", &grouped()));
    rows.extend(bert_layer());
    rows.retain(|r| r.label.contains(&filter) && r.times > 0);
    let target = ContractionTarget {
        vector_width: 16,
        threads,
        machine: graph::Machine::with_vector_width(16),
        requested: kernels::contraction::BlockingRequest::default(),
        known: Vec::new(),
    };
    let started = Instant::now();
    let mut source = String::new();
    let mut emitted = Vec::new();
    for (i, row) in rows.into_iter().enumerate() {
        let e = emit(
            &format!("k{i}"),
            &row.contraction,
            &Hooks::default(),
            &target,
        )
        .expect("supported");
        source.push_str(&e.source);
        emitted.push((row, e));
    }
    let emit_seconds = started.elapsed().as_secs_f64();
    let so = compile(&source);
    println!(
        "{} contractions, {} KB of C, emitted in {emit_seconds:.2} s",
        emitted.len(),
        source.len() / 1000
    );
    let lib = unsafe { libloading::Library::new(&so).expect("loadable") };
    let mut loaded = Vec::new();
    for (row, e) in emitted {
        let symbol = |s: &str| unsafe { *lib.get::<Kernel>(s.as_bytes()).expect("the launch") };
        let kernels = e.launches.iter().map(|l| symbol(&l.symbol)).collect();
        loaded.push(Loaded { row, e, kernels });
    }
    if argument("--compile-only").is_some() {
        return;
    }
    if argument("--check").is_some() {
        for l in &loaded {
            check(l, threads);
        }
        println!(
            "{} contractions agree with their definition at sampled outputs",
            loaded.len()
        );
        return;
    }
    let mut totals: Vec<(&str, f64, f64, f64)> = Vec::new();
    for l in &loaded {
        let timer = if argument("--in-turn").is_some() {
            time_in_turn
        } else {
            time
        };
        let (best, t) = timer(l, threads, reps);
        let n = f64::from(l.row.times);
        let flops = l.e.flops as f64;
        println!(
            "{:44} {:22} x{} {:9.3} ms {:7.1} GFLOP/s, best {:7.1}",
            l.row.label,
            l.e.path,
            l.row.times,
            t * 1e3,
            flops / t / 1e9,
            flops / best / 1e9
        );
        match totals.iter_mut().find(|x| x.0 == l.row.network) {
            Some(x) => (x.1, x.2, x.3) = (x.1 + t * n, x.2 + best * n, x.3 + flops * n),
            None => totals.push((l.row.network, t * n, best * n, flops * n)),
        }
    }
    for (network, t, best, flops) in totals {
        let rate = |t: f64| flops / t / 1e9;
        println!(
            "total {network}: {:.1} ms, {:.1} GFLOP/s; best {:.1} ms, {:.1}",
            t * 1e3,
            rate(t),
            best * 1e3,
            rate(best)
        );
    }
}
