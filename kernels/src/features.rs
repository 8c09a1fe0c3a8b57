//! Which vector instructions kernels may use, and the compiler flags that follow.
//!
//! Owns the [`CpuTarget`]. A virtual machine may advertise instructions and trap on
//! them, so what CPUID says is verified by running a compiled probe in a child
//! process, once per compiler and CPU (remembered in the cache).
//! `SHORTHAUL_ISA=avx512|avx2|portable` forces a choice, `SHORTHAUL_PAIRS=tiles|dots|plain|none` one of
//! the instructions for bf16, and `SHORTHAUL_WINOGRAD=off` turns Winograd convolutions off. Never compiles
//! kernels.

mod pairs;

use std::env;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::cache::{Cache, CacheError, EntryKind, Key};
use crate::toolchain::{Family, Toolchain};
use graph::Machine;

/// A level of vector instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What every CPU of the architecture has (SSE2 on x86-64, NEON on AArch64).
    Portable,
    /// AVX2 with fused multiply-add: 8 floats a register, 16 registers.
    Avx2,
    /// AVX-512 F, BW, DQ, VL: 16 floats a register, 32 registers.
    Avx512,
}

impl Isa {
    /// The name used by `SHORTHAUL_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// Floats in one vector register.
    pub fn vector_width_f32(self) -> usize {
        match self {
            Isa::Portable => 4,
            Isa::Avx2 => 8,
            Isa::Avx512 => 16,
        }
    }

    /// Vector registers that a kernel can name.
    pub fn vector_registers(self) -> usize {
        match self {
            Isa::Portable | Isa::Avx2 => 16,
            Isa::Avx512 => 32,
        }
    }

    fn parse(text: &str) -> Option<Isa> {
        [Isa::Portable, Isa::Avx2, Isa::Avx512]
            .into_iter()
            .find(|isa| isa.name() == text)
    }

    /// Whether the CPU advertises this level and the system saves its registers.
    fn is_advertised(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            match self {
                Isa::Portable => true,
                Isa::Avx2 => {
                    has!("avx2") && has!("fma") && has!("bmi1") && has!("bmi2") && has!("f16c")
                }
                Isa::Avx512 => {
                    Isa::Avx2.is_advertised()
                        && has!("avx512f")
                        && has!("avx512bw")
                        && has!("avx512dq")
                        && has!("avx512vl")
                        && has!("avx512cd")
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Portable
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Isa::Portable => &[],
            Isa::Avx2 => &["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"],
            Isa::Avx512 => &[
                "-mavx2",
                "-mfma",
                "-mf16c",
                "-mbmi",
                "-mbmi2",
                "-mavx512f",
                "-mavx512bw",
                "-mavx512dq",
                "-mavx512vl",
                "-mavx512cd",
                // Compilers prefer 256 bits by default for the sake of old CPUs
                // that lowered their clock; 512 bits measured 1.9 times faster.
                "-mprefer-vector-width=512",
            ],
        }
    }
}

/// Which instructions multiply bf16 numbers in pairs and sum in single precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// Tiles (AMX): 16 by 16 sums from 16 by 32 and 32 by 16 numbers in one instruction.
    Tiles,
    /// Dot products in vector lanes (AVX512-BF16).
    Dots,
    /// No such instructions: single precision. Slower than converting in advance; for tests of the code around it.
    Plain,
}

impl Pairs {
    /// The name used by `SHORTHAUL_PAIRS`.
    pub fn name(self) -> &'static str {
        match self {
            Pairs::Tiles => "tiles",
            Pairs::Dots => "dots",
            Pairs::Plain => "plain",
        }
    }
}

/// Flags for every kernel, with the reason for each. Not `-ffast-math`: NaN and
/// infinity must mean in a kernel what they mean in PyTorch. Not `-march=native`:
/// a cache folder may be shared by different machines.
const COMMON_FLAGS: &[&str] = &[
    "-std=gnu11",
    // Kernels are loaded at run time.
    "-fPIC",
    "-shared",
    // Nobody reads errno; without it sqrt is one instruction.
    "-fno-math-errno",
    // Nobody reads floating point exception flags; lets selects become masks.
    "-fno-trapping-math",
    // A product and a sum are rounded one by one, as PyTorch does it: x*x - x*x is 0, and a kernel that computes a
    // value again finds the same bits, whatever is around. Where one rounding is wanted, the text says so: `sh_fma`,
    // or `…_fma` of a vector type.
    "-ffp-contract=off",
    // `#pragma omp simd` marks vector loops; no OpenMP runtime is linked.
    "-fopenmp-simd",
    // Functions of one file may be inlined into each other despite -fPIC.
    "-fno-semantic-interposition",
    // Buffers are reused for containers of different types.
    "-fno-strict-aliasing",
    // Local tiles are arrays; guarding each function's stack buys nothing here.
    "-fno-stack-protector",
    // Warnings about generated text help nobody; errors are still shown.
    "-w",
];

/// Loop vectorization and unrolling.
const OPTIMIZE: &[&str] = &["-O3"];

/// The part of GCC's `-O3` that a step needs. Kernels compile in less time and, with AVX-512, run as fast; other
/// levels were not timed (`bench/compilers.py` measures both).
const OPTIMIZE_WITH_GCC: &[&str] = &[
    "-O2",
    // Part of `-O2` since GCC 12.
    "-ftree-vectorize",
    // Vectors also in loops whose number of steps is known only at run time.
    "-fvect-cost-model=dynamic",
    // Loops over windows of a few elements are unrolled.
    "-fpeel-loops",
    // Processors that run instructions out of order need no second scheduling.
    "-fno-schedule-insns2",
    // For `pow(x < 0 ? 0 : x, y)`, both make a branch of its own for the constant 0. A loop with such a branch is not
    // vectorized.
    "-fno-tree-pre",
    "-fno-thread-jumps",
];

/// Assumed speed of products by tiles, as a multiple of the speed in f32. It was measured on one CPU with tiles.
const TILES_ARE_FASTER: u64 = 6;
/// The same for dot products, where they are chosen: one multiplies twice as many numbers as a multiply-add does.
const DOTS_ARE_FASTER: u64 = 2;

/// What kernels are compiled for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuTarget {
    /// The level of vector instructions.
    pub isa: Isa,
    /// Floats in one vector register.
    pub vector_width_f32: usize,
    /// Every compiler flag except inputs, outputs and libraries.
    pub cflags: Vec<String>,
    /// How products of bf16 numbers are computed, where that is faster than in single precision.
    pub pairs: Option<Pairs>,
    /// Whether 3×3 convolutions may be computed as Winograd convolutions, whose rounding differs from that of direct
    /// convolution.
    pub allows_winograd: bool,
    /// The limits by which kernels are chosen.
    pub machine: Machine,
}

impl CpuTarget {
    /// The target for `isa`, without asking whether this CPU can run it.
    pub fn for_isa(isa: Isa, family: Family) -> CpuTarget {
        let optimize = match family {
            Family::Gcc => OPTIMIZE_WITH_GCC,
            Family::Clang | Family::Zig => OPTIMIZE,
        };
        let mut cflags: Vec<String> = COMMON_FLAGS
            .iter()
            .chain(optimize)
            .chain(isa.flags())
            .map(|flag| flag.to_string())
            .collect();
        if family == Family::Zig {
            // Zig targets the machine it runs on and adds checks that trap.
            let cpu = if cfg!(target_arch = "x86_64") {
                "-mcpu=x86_64"
            } else {
                "-mcpu=baseline"
            };
            cflags.extend([cpu.to_string(), "-fno-sanitize=all".to_string()]);
        }
        CpuTarget {
            isa,
            vector_width_f32: isa.vector_width_f32(),
            cflags,
            pairs: None,
            allows_winograd: true,
            machine: Machine::with_vector_width(isa.vector_width_f32()),
        }
    }

    /// Returns the target as `SHORTHAUL_WINOGRAD` says.
    ///
    /// # Errors
    /// If it is neither `on` nor `off`.
    pub fn with_environment(self) -> Result<CpuTarget, FeatureError> {
        let allows_winograd = match env::var("SHORTHAUL_WINOGRAD") {
            Err(_) => true,
            Ok(text) => match text.trim() {
                "" | "on" => true,
                "off" => false,
                _ => return Err(FeatureError::UnknownWinograd(text)),
            },
        };
        Ok(CpuTarget {
            allows_winograd,
            ..self
        })
    }

    /// Returns the target with measured limits, if there are any.
    pub fn with_machine(mut self, machine: Option<Machine>) -> CpuTarget {
        self.machine = machine.unwrap_or(self.machine);
        self.assume_rate_of_pairs();
        self
    }

    /// Assumes a rate for products of bf16 numbers if the target has instructions for them and nobody measured it.
    fn assume_rate_of_pairs(&mut self) {
        let times = match self.pairs {
            Some(Pairs::Tiles) => TILES_ARE_FASTER,
            Some(Pairs::Dots) => DOTS_ARE_FASTER,
            Some(Pairs::Plain) | None => return,
        };
        let machine = &mut self.machine;
        if machine.pair_operations_per_us == 0 {
            machine.pair_operations_per_us = times * machine.product_operations_per_us;
        }
    }

    /// Returns the target with instructions for pairs of bf16 numbers.
    pub fn with_pairs(mut self, pairs: Pairs) -> CpuTarget {
        let flags: &[&str] = match pairs {
            Pairs::Tiles => &["-mamx-tile", "-mamx-bf16"],
            Pairs::Dots => &["-mavx512bf16"],
            Pairs::Plain => &[],
        };
        self.cflags
            .extend(flags.iter().map(|flag| flag.to_string()));
        self.pairs = Some(pairs);
        self.assume_rate_of_pairs();
        self
    }
}

/// Why no target can be used.
#[derive(Debug, thiserror::Error)]
pub enum FeatureError {
    /// `SHORTHAUL_ISA` is not a level.
    #[error("SHORTHAUL_ISA is '{0}', expected avx512, avx2 or portable")]
    UnknownIsa(String),
    /// `SHORTHAUL_WINOGRAD` is not a choice.
    #[error("SHORTHAUL_WINOGRAD is '{0}', expected on or off")]
    UnknownWinograd(String),
    /// The forced level does not run on this CPU with this compiler.
    #[error("{} is asked for but does not run here: {problem}", isa.name())]
    Forced {
        /// The level asked for.
        isa: Isa,
        /// What the probe did.
        problem: String,
    },
    /// `SHORTHAUL_PAIRS` is not a choice.
    #[error("SHORTHAUL_PAIRS is '{0}', expected tiles, dots, plain or none")]
    UnknownPairs(String),
    /// The forced instructions for pairs do not run on this CPU with this compiler.
    #[error("{} for bf16 is asked for but does not run here: {problem}", pairs.name())]
    ForcedPairs {
        /// The instructions asked for.
        pairs: Pairs,
        /// What the probe did.
        problem: String,
    },
    /// Not even portable code runs.
    #[error("code compiled with {compiler} does not run on this machine: {problem}")]
    NothingRuns {
        /// The compiler.
        compiler: String,
        /// What the last probe did.
        problem: String,
    },
    /// The probe's files cannot be written.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Reads `SHORTHAUL_ISA`.
///
/// # Errors
/// If its value is not a level.
pub fn forced_isa() -> Result<Option<Isa>, FeatureError> {
    match env::var("SHORTHAUL_ISA") {
        Ok(text) if !text.trim().is_empty() => Isa::parse(text.trim())
            .map(Some)
            .ok_or(FeatureError::UnknownIsa(text)),
        _ => Ok(None),
    }
}

/// The best target that was seen to run here, or the forced one, with the instructions for pairs of bf16
/// numbers that were seen to run or forced.
///
/// # Errors
/// If the forced level does not run here, if nothing runs, or if the probe's files cannot be written.
pub fn detect(
    toolchain: &Toolchain,
    forced: Option<Isa>,
    cache: &Cache,
) -> Result<CpuTarget, FeatureError> {
    let target = detect_isa(toolchain, forced, cache)?.with_environment()?;
    pairs::detect(target, pairs::forced()?, toolchain, cache)
}

fn detect_isa(
    toolchain: &Toolchain,
    forced: Option<Isa>,
    cache: &Cache,
) -> Result<CpuTarget, FeatureError> {
    if let Some(isa) = forced {
        let verdict = verify(isa, toolchain, cache)?;
        return match verdict {
            Verdict::Runs => Ok(CpuTarget::for_isa(isa, toolchain.family())),
            Verdict::Traps(problem) | Verdict::Fails(problem) => {
                Err(FeatureError::Forced { isa, problem })
            }
        };
    }
    let mut problem = String::new();
    // From the widest to what every CPU has.
    for isa in [Isa::Avx512, Isa::Avx2, Isa::Portable] {
        match verify(isa, toolchain, cache)? {
            Verdict::Runs => return Ok(CpuTarget::for_isa(isa, toolchain.family())),
            Verdict::Traps(why) | Verdict::Fails(why) => problem = why,
        }
    }
    Err(FeatureError::NothingRuns {
        compiler: toolchain.describe(),
        problem,
    })
}

enum Verdict {
    Runs,
    /// The probe ran and ended wrongly.
    Traps(String),
    /// The probe did not run: the CPU does not advertise the level, or building or starting the probe failed.
    Fails(String),
}

fn verify(isa: Isa, toolchain: &Toolchain, cache: &Cache) -> Result<Verdict, FeatureError> {
    if !isa.is_advertised() {
        return Ok(Verdict::Fails("the CPU does not advertise it".into()));
    }
    let target = CpuTarget::for_isa(isa, toolchain.family());
    verify_probe(&target, PROBE_SOURCE, toolchain, cache)
}

/// What a program compiled for the target does here; remembered.
fn verify_probe(
    target: &CpuTarget,
    probe: &str,
    toolchain: &Toolchain,
    cache: &Cache,
) -> Result<Verdict, FeatureError> {
    let key = Key::new(&[
        "isa",
        toolchain.identity(),
        &target.cflags.join(" "),
        probe,
        cpu_identity(),
    ]);
    if let Some(answer) = cache.read(EntryKind::Probe, &key) {
        let answer = String::from_utf8_lossy(&answer).into_owned();
        return Ok(match answer.strip_prefix("traps: ") {
            Some(problem) => Verdict::Traps(problem.to_string()),
            None => Verdict::Runs,
        });
    }
    let verdict = run_probe(target, probe, toolchain, cache)?;
    // A compiler that refuses may do so for a passing reason, such as a full disk:
    // only what the CPU did is remembered. Not remembering costs one more probe.
    let answer = match &verdict {
        Verdict::Runs => Some("runs".to_string()),
        Verdict::Traps(problem) => Some(format!("traps: {problem}")),
        Verdict::Fails(_) => None,
    };
    if let Some(answer) = answer {
        let _ = cache.write(EntryKind::Probe, &key, answer.as_bytes());
    }
    Ok(verdict)
}

fn run_probe(
    target: &CpuTarget,
    probe: &str,
    toolchain: &Toolchain,
    cache: &Cache,
) -> Result<Verdict, FeatureError> {
    let folder = cache.work_folder()?;
    let source = folder.path().join("probe.c");
    let program = folder.path().join("probe");
    fs::write(&source, probe).map_err(|error| CacheError::Write {
        path: source.clone(),
        source: error,
    })?;
    let compiled = toolchain
        .process()
        .args(target.cflags.iter().filter(|flag| *flag != "-shared"))
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .output();
    match compiled {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let complaint = String::from_utf8_lossy(&output.stderr);
            let line = complaint.lines().next().unwrap_or("no message");
            return Ok(Verdict::Fails(format!("the compiler refuses: {line}")));
        }
        Err(error) => {
            return Ok(Verdict::Fails(format!(
                "the compiler does not start: {error}"
            )));
        }
    }
    let status = Command::new(&program)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    Ok(match status {
        Ok(status) if status.success() => Verdict::Runs,
        Ok(status) => Verdict::Traps(format!("the probe ended with {status}")),
        Err(error) => Verdict::Fails(format!("the probe does not start: {error}")),
    })
}

/// Model and feature list of the CPU: a cache folder may serve several machines.
pub fn cpu_identity() -> &'static str {
    static IDENTITY: OnceLock<String> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let first = text.split("\n\n").next().unwrap_or_default();
        let is_told = |line: &&str| {
            let starts = ["model name", "flags", "Features"];
            starts.iter().any(|start| line.starts_with(start))
        };
        first.lines().filter(is_told).collect::<Vec<_>>().join("\n")
    })
}

/// Uses full-width float, 16-bit and 64-bit integer vectors with masks and checks
/// the results; the loops are long enough that no part is folded away.
const PROBE_SOURCE: &str = r#"
#ifdef __FMA__
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif
static float x[1024], y[1024];
static short h[1024];
static long long q[512];
static double d[512];
__attribute__((noinline)) static void fill(int one) {
  for (int i = 0; i < 1024; i++) { x[i] = (float)(i * one); h[i] = (short)(i * one); }
  for (int i = 0; i < 512; i++) d[i] = (double)(i * one);
}
__attribute__((noinline)) static void work(float a) {
  for (int i = 0; i < 1024; i++) y[i] = x[i] > 512.0f ? FUSED(x[i], a, 1.0f) : x[i];
  for (int i = 0; i < 1024; i++) h[i] = (short)(h[i] > 100 ? h[i] * 3 : h[i] + 1);
  for (int i = 0; i < 512; i++) q[i] = (long long)(d[i] * 4.0);
}
int main(int argc, char **argv) {
  (void)argv;
  fill(argc > 0);
  work(2.0f);
  for (int i = 0; i < 1024; i++) {
    float want = i > 512 ? (float)(2 * i + 1) : (float)i;
    if (y[i] != want || h[i] != (short)(i > 100 ? i * 3 : i + 1)) return 1;
  }
  for (int i = 0; i < 512; i++) if (q[i] != 4LL * i) return 2;
  return 0;
}
"#;
