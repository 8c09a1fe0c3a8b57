//! Measures the prelude's functions against f64, and those of f64 against the C library's
//! long doubles; holds them to their stated errors, on every instruction set this CPU has;
//! checks that loops over them become vector code, and that random numbers are those of the graph.

use std::ffi::c_void;
use std::fmt::Write;
use std::sync::{Arc, OnceLock};

use kernels::cache::Cache;
use kernels::compile::{CompileOptions, SourceUnit, compile};
use kernels::features::{self, CpuTarget, Isa};
use kernels::memory::{AlignedBuffer, Buffer, Element};
use kernels::pool::Pool;
use kernels::prelude;
use kernels::progress::Silent;
use kernels::run::{BufferRef, ExternalSpec, Launch, Module, Program, ProgramParts};
use kernels::toolchain::{self, Family, Search, Toolchain};

/// Numbers handled by one call of a test kernel.
const BLOCK: usize = 1 << 16;

/// Function, meaning, greatest error in ulp.
type Case = (&'static str, fn(f64) -> f64, f64);

const CASES: [Case; 11] = [
    ("exp", f64::exp, 1.0),
    ("expm1", f64::exp_m1, 1.5),
    ("log", f64::ln, 1.0),
    ("log1p", f64::ln_1p, 1.0),
    ("tanh", f64::tanh, 2.5),
    ("erf", libm::erf, 2.5),
    ("sigmoid", |x| 1.0 / (1.0 + (-x).exp()), 2.5),
    ("sin", f64::sin, 2.0),
    ("cos", f64::cos, 2.0),
    ("tan", f64::tan, 3.5),
    ("rsqrt", |x| 1.0 / x.sqrt(), 1.5),
];

/// Functions of f64: greatest error in ulp, and their meaning in long doubles.
const DOUBLES: [(&str, f64, &str); 6] = [
    ("exp", 1.25, "__builtin_expl(x)"),
    ("expm1", 2.0, "__builtin_expm1l(x)"),
    ("log", 1.0, "__builtin_logl(x)"),
    ("log1p", 1.0, "__builtin_log1pl(x)"),
    ("tanh", 2.5, "__builtin_tanhl(x)"),
    ("sigmoid", 2.5, "1.0L / (1.0L + __builtin_expl(-x))"),
];

/// A loop over a function of f64.
fn double_kernel(name: &str) -> String {
    format!(
        "void k_{name}(void *const *buf, void *scratch, long tid, long nt) {{\n\
         const double *restrict x = buf[0]; double *restrict out = buf[1];\n\
         #pragma omp simd\n\
         for (long i = 0; i < {BLOCK}; i++) out[i] = sh_{name}(x[i]);\n}}\n"
    )
}

/// A loop that measures the errors of a function of f64 in ulp.
fn error_kernel(name: &str, meaning: &str) -> String {
    format!(
        "static long double meaning_of_{name}(long double x) {{ return {meaning}; }}\n\
         void k_{name}_errors(void *const *buf, void *scratch, long tid, long nt) {{\n\
         const double *x = buf[0], *got = buf[1]; double *out = buf[2];\n\
         for (long i = 0; i < {BLOCK}; i++) out[i] = ulps(got[i], meaning_of_{name}(x[i]));\n}}\n"
    )
}

/// The error of a double in units in the last place of what it should be, as [`ulp_error`] has it for floats.
const ULPS: &str = "
static double ulps(double got, long double want) {
  const double near = (double)want;
  if (near != near || got != got || __builtin_isinf(near) || __builtin_isinf(got)) {
    const int edge = __builtin_fabsl(want) > 0x1.fffffffffffffp1023L && got * near > 0x1p1022;
    return got == near || (got != got && near != near) || edge ? 0.0 : __builtin_inf();
  }
  if (near == 0.0 && got == 0.0 && !__builtin_signbit(near) != !__builtin_signbit(got)) return __builtin_inf();
  int exponent;
  __builtin_frexp(near, &exponent);
  exponent = near == 0.0 || exponent < -1021 ? -1021 : exponent;
  return (double)(__builtin_fabsl((long double)got - want) / __builtin_ldexpl(1.0L, exponent - 53));
}
";

fn kernel_text(name: &str, argument_count: usize) -> String {
    let (extra, call) = match argument_count {
        1 => ("", format!("sh_{name}(x[i])")),
        _ => ("const float *y = buf[1];", format!("sh_{name}(x[i], y[i])")),
    };
    format!(
        "void k_{name}(void *const *buf, void *scratch, long tid, long nt) {{\n\
         const float *restrict x = buf[0]; {extra} float *restrict out = buf[{argument_count}];\n\
         #pragma omp simd\n\
         for (long i = 0; i < {BLOCK}; i++) out[i] = {call};\n}}\n"
    )
}

fn text() -> String {
    let mut text = prelude::ALL.to_string();
    for (name, _, _) in CASES {
        text.push_str(&kernel_text(name, 1));
    }
    text.push_str(&kernel_text("pow", 2));
    text.push_str(&kernel_text("max", 2));
    text.push_str(&kernel_text("min", 2));
    text.push_str(&kernel_text("mod", 2));
    text.push_str(&philox_kernel());
    text.push_str(ULPS);
    for (name, _, meaning) in DOUBLES {
        text.push_str(&double_kernel(&format!("{name}_f64")));
        text.push_str(&error_kernel(name, meaning));
    }
    text
}

/// A loop that converts 16-bit numbers.
fn conversion_kernel(name: &str) -> String {
    let (from, to) = match name.starts_with("to_") {
        true => ("float", "sh_u16"),
        false => ("sh_u16", "float"),
    };
    format!(
        "void k_{name}(void *const *buf, void *scratch, long tid, long nt) {{\n\
         const {from} *restrict x = buf[0]; {to} *restrict out = buf[1];\n\
         #pragma omp simd\n\
         for (long i = 0; i < {BLOCK}; i++) out[i] = sh_{name}(x[i]);\n}}\n"
    )
}

fn philox_kernel() -> String {
    format!(
        "void k_philox(void *const *buf, void *scratch, long tid, long nt) {{\n\
         const sh_u64 *restrict key = buf[0]; float *restrict out = buf[1];\n\
         #pragma omp simd\n\
         for (long i = 0; i < {BLOCK}; i++)\n\
         out[i] = sh_philox_uniform(key[0], key[1] + (sh_u64)i);\n}}\n\
         void k_philox_fill(void *const *buf, void *scratch, long tid, long nt) {{\n\
         const sh_u64 *restrict key = buf[0]; float *restrict out = buf[1];\n\
         float room[SH_PHILOX_ROOM({BLOCK})];\n\
         const float *from = sh_philox_fill(room, key[0], key[1], {BLOCK});\n\
         for (long i = 0; i < {BLOCK}; i++)\n\
         out[i] = from[i];\n}}\n"
    )
}

fn toolchain_in(cache: &Cache) -> Toolchain {
    toolchain::find(&Search::from_environment(), cache).unwrap()
}

/// The test kernels for every instruction set that runs here.
fn modules() -> &'static [(Isa, Arc<Module>)] {
    static MODULES: OnceLock<Vec<(Isa, Arc<Module>)>> = OnceLock::new();
    MODULES.get_or_init(|| compile_modules(&text()))
}

fn compile_modules(text: &str) -> Vec<(Isa, Arc<Module>)> {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    let toolchain = toolchain_in(&cache);
    let mut modules = Vec::new();
    for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
        let Ok(target) = features::detect(&toolchain, Some(isa), &cache) else {
            continue;
        };
        let options = CompileOptions {
            toolchain: toolchain.clone(),
            target,
            cache: cache.clone(),
            jobs: 1,
        };
        let unit = SourceUnit {
            name: "mathematics".into(),
            source: text.to_string(),
            symbols: Vec::new(),
        };
        let module = compile(&[unit], &options, &mut Silent).unwrap().remove(0);
        modules.push((isa, module));
    }
    assert!(!modules.is_empty());
    modules
}

/// Runs a kernel on whole blocks; the last block of input repeats its last number.
fn apply<T: Element + Default>(module: &Arc<Module>, name: &str, inputs: &[&[T]]) -> Vec<T> {
    let function = module.function(&format!("k_{name}")).unwrap();
    let n_buffers = inputs.len() + 1;
    let program = Program::new(ProgramParts {
        launches: vec![Launch {
            function,
            args: (0..n_buffers).map(BufferRef::External).collect(),
            name: name.into(),
        }],
        externals: (0..n_buffers)
            .map(|slot| ExternalSpec {
                bytes: size_of::<T>() * BLOCK,
                written: slot + 1 == n_buffers,
            })
            .collect(),
        ..ProgramParts::default()
    })
    .unwrap();
    let pool = Pool::new();
    pool.set_threads(1);
    let mut results = Vec::new();
    for start in (0..inputs[0].len()).step_by(BLOCK) {
        let blocks: Vec<Vec<T>> = inputs
            .iter()
            .map(|input| {
                let end = input.len().min(start + BLOCK);
                let mut block = input[start..end].to_vec();
                block.resize(BLOCK, input[end - 1]);
                block
            })
            .collect();
        let mut out = vec![T::default(); BLOCK];
        let mut buffers: Vec<Buffer<'_>> = blocks
            .iter()
            .map(|block| Buffer::read_only(block))
            .collect();
        buffers.push(Buffer::new(&mut out));
        program
            .run(&buffers, Buffer::none(), Buffer::none(), &pool)
            .unwrap();
        results.extend_from_slice(&out);
    }
    results.truncate(inputs[0].len());
    results
}

/// Error of `got` in units in the last place of `want` as a float; infinite where
/// one is special and the other is not.
fn ulp_error(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if rounded.is_nan() || rounded.is_infinite() || got.is_nan() || got.is_infinite() {
        let same = got == rounded || (got.is_nan() && rounded.is_nan());
        // The greatest number may round up to infinity, and infinity down.
        let edge = want.abs() > f64::from(f32::MAX) * (1.0 - 1e-7)
            && f64::from(got).abs() > f64::from(f32::MAX) * (1.0 - 1e-6)
            && got.is_sign_positive() == rounded.is_sign_positive();
        return if same || edge { 0.0 } else { f64::INFINITY };
    }
    if want == 0.0 && got == 0.0 && got.is_sign_negative() != want.is_sign_negative() {
        return f64::INFINITY;
    }
    let exponent = (want.abs().max(f64::MIN_POSITIVE).to_bits() >> 52) as i32 - 1023;
    let ulp = f64::from(exponent.max(-126) - 23).exp2();
    (f64::from(got) - want).abs() / ulp
}

const SPECIALS: [f32; 20] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    -2.0,
    3.0,
    -3.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-45,
    -1e-45,
    16_777_216.0,
    8_388_609.0,
];

/// Every 1021st of all bit patterns (subnormal, huge, NaN included), a dense part
/// of the line where functions bend, and the special numbers: about five million.
fn sweep() -> Vec<f32> {
    let patterns = (0..u32::MAX).step_by(1021).map(f32::from_bits);
    let dense = (-400_000..400_000).map(|i| i as f32 * 2.6e-4);
    patterns.chain(dense).chain(SPECIALS).collect()
}

#[test]
fn functions_keep_their_stated_error() {
    keep_their_stated_error(modules(), &CASES);
}

/// The functions as GPU kernels compute them.
#[test]
fn angles_keep_their_stated_error_with_a_branch_for_small_ones() {
    let mut cases = CASES.to_vec();
    cases.retain(|case| ["sin", "cos", "tan"].contains(&case.0));
    let modules = compile_modules(&format!("#define SH_BRANCHING\n{}", text()));
    keep_their_stated_error(&modules[modules.len() - 1..], &cases);
}

fn keep_their_stated_error(modules: &[(Isa, Arc<Module>)], cases: &[Case]) {
    let inputs = sweep();
    let mut report = String::new();
    let mut fine = true;
    for &(name, meaning, bound) in cases {
        let wants: Vec<f64> = inputs.iter().map(|x| meaning(f64::from(*x))).collect();
        for (isa, module) in modules {
            let got = apply(module, name, &[&inputs]);
            let (mut worst, mut at) = (0f64, 0f32);
            for ((x, got), want) in inputs.iter().zip(&got).zip(&wants) {
                let error = ulp_error(*got, *want);
                if error > worst {
                    (worst, at) = (error, *x);
                }
            }
            fine &= worst <= bound;
            let level = isa.name();
            let _ = writeln!(
                report,
                "{name} {level}: {worst:.3} of {bound} ulp, at {at:e}"
            );
        }
    }
    println!("{report}");
    assert!(fine, "\n{report}");
}

#[test]
fn functions_of_doubles_keep_their_stated_error() {
    let specials = SPECIALS.iter().map(|x| f64::from(*x));
    let extremes = [
        f64::MAX,
        f64::MIN_POSITIVE,
        5e-324,
        709.78,
        -708.4,
        -745.13,
        -745.14,
        709.79,
    ];
    let signed = extremes.into_iter().flat_map(|x| [x, -x]);
    let patterns = (0..u64::MAX)
        .step_by(18_446_744_073_709)
        .map(f64::from_bits);
    let dense = (-400_000..400_000).map(|i| f64::from(i) * 2.1e-3);
    let near = (-400_000..400_000).map(|i| f64::from(i) * 1.3e-6);
    let inputs: Vec<f64> = specials
        .chain(signed)
        .chain(patterns)
        .chain(dense)
        .chain(near)
        .collect();
    let mut report = String::new();
    let mut fine = true;
    for (name, bound, _) in DOUBLES {
        for (isa, module) in modules() {
            let got = apply(module, &format!("{name}_f64"), &[&inputs]);
            let errors = apply(module, &format!("{name}_errors"), &[&inputs, &got]);
            let (worst, at) = errors
                .iter()
                .zip(&inputs)
                .map(|(error, x)| (*error, *x))
                .fold(
                    (0.0, 0.0),
                    |worst, one| if one.0 > worst.0 { one } else { worst },
                );
            fine &= worst <= bound && errors.iter().any(|error| *error > 0.0);
            let level = isa.name();
            let _ = writeln!(
                report,
                "{name} of f64 {level}: {worst:.3} of {bound} ulp, at {at:e}"
            );
        }
    }
    println!("{report}");
    assert!(fine, "\n{report}");
}

#[test]
fn powers_keep_their_stated_error() {
    let mut x = Vec::new();
    let mut y = Vec::new();
    for a in SPECIALS {
        for b in SPECIALS {
            x.push(a);
            y.push(b);
        }
    }
    for i in 0..1_000_000u32 {
        // Pairs spread over all bit patterns, and pairs whose power is a number.
        let bits = i.wrapping_mul(2_654_435_761);
        x.push(f32::from_bits(bits));
        y.push(f32::from_bits(bits.rotate_left(13) ^ i));
        let base = f32::from_bits(bits & 0x7fff_ffff);
        let span = 148.0 / base.log2().abs().max(1e-3);
        x.push(base);
        y.push(span * (i as f32 / 500_000.0 - 1.0));
        x.push(-f32::from(i as u16) * 0.01);
        y.push((i % 23) as f32 - 11.0);
    }
    for (isa, module) in modules() {
        let got = apply(module, "pow", &[&x, &y]);
        let mut worst = (0f64, 0f32, 0f32, 0f32);
        for ((x, y), got) in x.iter().zip(&y).zip(&got) {
            let error = ulp_error(*got, f64::from(*x).powf(f64::from(*y)));
            if error > worst.0 {
                worst = (error, *x, *y, *got);
            }
        }
        println!("pow {}: {worst:?}", isa.name());
        assert!(worst.0 <= 1.0, "{}: {worst:?}", isa.name());
    }
}

#[test]
fn extrema_and_remainders_treat_special_numbers_as_pytorch_does() {
    let nan = f32::NAN;
    let a = [1.0, nan, 1.0, nan, -7.0, 7.0, -7.0, 6.0];
    let b = [2.0, 1.0, nan, nan, 3.0, -3.0, -3.0, 3.0];
    for (_, module) in modules() {
        let largest = apply(module, "max", &[&a, &b]);
        let smallest = apply(module, "min", &[&a, &b]);
        let remainder = apply(module, "mod", &[&a, &b]);
        assert_eq!((largest[0], smallest[0]), (2.0, 1.0));
        for i in 1..4 {
            assert!(largest[i].is_nan() && smallest[i].is_nan());
        }
        assert_eq!(remainder[4..], [2.0, -2.0, -1.0, 0.0]);
    }
}

#[test]
fn random_numbers_are_those_of_the_graph() {
    for (isa, module) in modules() {
        for kernel in ["k_philox", "k_philox_fill"] {
            for (key, first) in [(0u64, 0u64), (42, 0xffff_ff01), (u64::MAX, (1 << 60) + 3)] {
                let numbers = random_block(module, kernel, key, first);
                for (i, number) in numbers.iter().enumerate() {
                    let want = graph::philox::uniform(key, first + i as u64);
                    assert_eq!(
                        number.to_bits(),
                        want.to_bits(),
                        "{isa:?} {kernel} {key} {i}"
                    );
                }
            }
            // Random123's known answer for zeros.
            let known = [0x6627_e8d5u32, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
            let numbers = random_block(module, kernel, 0, 0);
            for (number, word) in numbers.iter().zip(known) {
                assert_eq!(*number, (word >> 8) as f32 / 16_777_216.0);
            }
        }
    }
}

fn random_block(module: &Arc<Module>, kernel: &str, key: u64, first: u64) -> Vec<f32> {
    let program = Program::new(ProgramParts {
        launches: vec![Launch {
            function: module.function(kernel).unwrap(),
            args: vec![BufferRef::Constant(0), BufferRef::External(0)],
            name: "philox".into(),
        }],
        constants: vec![AlignedBuffer::from_slice(&[key, first]).unwrap()],
        externals: vec![ExternalSpec {
            bytes: 4 * BLOCK,
            written: true,
        }],
        ..ProgramParts::default()
    })
    .unwrap();
    let pool = Pool::new();
    pool.set_threads(1);
    let mut out = vec![0f32; BLOCK];
    program
        .run(
            &[Buffer::new(&mut out)],
            Buffer::none(),
            Buffer::none(),
            &pool,
        )
        .unwrap();
    out
}

/// The gradient of `pow` by its exponent, at a number that a select bounds.
const CLAMPED_POW: &str = "void k_clamped_pow(const float *x, float *restrict out, float y) {
  const int at_zero = y >= 0.0f;
  for (long i = 0; i < 1024; i++) {
    const float bounded = x[i] < 1e-6f ? 1e-6f : x[i];
    out[i] = (bounded == 0.0f) & at_zero ? 0.0f : sh_pow(bounded, y) * sh_log(bounded);
  }
}
";

/// GCC's own report says which loops became vector code.
#[test]
fn loops_over_the_functions_become_vector_code() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    let toolchain = toolchain_in(&cache);
    if toolchain.family() != Family::Gcc || !cfg!(target_arch = "x86_64") {
        return;
    }
    let mut names: Vec<&str> = CASES.iter().map(|case| case.0).collect();
    names.extend(["pow", "max", "min", "philox", "clamped_pow"]);
    names.extend(["to_bf16", "from_bf16", "to_f16", "from_f16"]);
    names.extend([
        "exp_f64",
        "expm1_f64",
        "log_f64",
        "log1p_f64",
        "tanh_f64",
        "sigmoid_f64",
    ]);
    for isa in [Isa::Avx512, Isa::Avx2] {
        for name in &names {
            let source = match *name {
                "philox" => philox_kernel(),
                "clamped_pow" => CLAMPED_POW.to_owned(),
                "pow" | "max" | "min" => kernel_text(name, 2),
                name if name.contains("f16") => conversion_kernel(name),
                name if name.ends_with("_f64") => double_kernel(name),
                _ => kernel_text(name, 1),
            };
            let path = folder.path().join("loop.c");
            std::fs::write(&path, format!("{}{source}", prelude::ALL)).unwrap();
            let output = toolchain
                .process()
                .args(CpuTarget::for_isa(isa, Family::Gcc).cflags)
                .args(["-fopt-info-vec", "-o"])
                .arg(folder.path().join("loop.so"))
                .arg(&path)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{said}");
            let vectorized = said.contains("loop vectorized");
            assert!(vectorized, "{name} for {}: {said}", isa.name());
        }
    }
}

/// Prints the time per number of each function; run with `--ignored --nocapture`
/// on a quiet machine.
#[test]
#[ignore = "a measurement, not a check"]
fn time_per_number() {
    let x: Vec<f32> = (0..BLOCK).map(|i| 0.1 + i as f32 * 1e-4).collect();
    let mut names: Vec<&str> = CASES.iter().map(|case| case.0).collect();
    names.push("pow");
    for (isa, module) in modules() {
        for name in &names {
            let inputs: &[&[f32]] = if *name == "pow" { &[&x, &x] } else { &[&x] };
            let function = module.function(&format!("k_{name}")).unwrap();
            let mut out = vec![0f32; BLOCK];
            let mut pointers: Vec<*mut c_void> = inputs
                .iter()
                .map(|input| input.as_ptr().cast_mut().cast())
                .collect();
            pointers.push(out.as_mut_ptr().cast());
            let mut best = f64::INFINITY;
            for _ in 0..20 {
                let start = std::time::Instant::now();
                call(&function, &pointers);
                best = best.min(start.elapsed().as_secs_f64());
            }
            println!("{} {name}: {:.2} ns", isa.name(), best * 1e9 / BLOCK as f64);
        }
    }
}

#[allow(unsafe_code)]
fn call(function: &kernels::run::Function, buffers: &[*mut c_void]) {
    // SAFETY: the buffers hold `BLOCK` floats each, as the kernels expect.
    unsafe { function.call(buffers.as_ptr(), std::ptr::null_mut(), 0, 1) }
}

#[test]
fn the_prelude_compiles_alone_without_system_headers() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    let toolchain = toolchain_in(&cache);
    let path = folder.path().join("prelude.c");
    std::fs::write(&path, prelude::ALL).unwrap();
    let output = toolchain
        .process()
        .args(["-std=gnu11", "-nostdinc", "-fsyntax-only"])
        .args([
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
            "-Wno-unused-command-line-argument",
        ])
        .arg(&path)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
