//! Which instructions for pairs of bf16 numbers run here, and asking the system for them.
//!
//! A virtual machine may have tiles (AMX) and hide them, or show them and trap, so CPUID is not asked: a
//! compiled block of a product is run in a child process and its sums are checked. Linux gives a process
//! tiles on request only. A dot product (AVX512-BF16) multiplies twice as many numbers as a multiply-add in single
//! precision, but some processors start only half as many of them (Intel's of the fourth generation), others as many
//! (AMD Zen 4): the probe times both, and without tiles dot products are chosen where they gain.

use super::{CpuTarget, FeatureError, Isa, Pairs, Verdict, verify_probe};
use crate::cache::Cache;
use crate::prelude;
use crate::toolchain::Toolchain;
use std::env;

/// Reads `SHORTHAUL_PAIRS`. The outer option says whether it is set, the inner one what it asks for.
pub(super) fn forced() -> Result<Option<Option<Pairs>>, FeatureError> {
    let Ok(text) = env::var("SHORTHAUL_PAIRS") else {
        return Ok(None);
    };
    let known = [Pairs::Tiles, Pairs::Dots, Pairs::Plain];
    match text.trim() {
        "" => Ok(None),
        "none" => Ok(Some(None)),
        name => match known.into_iter().find(|p| p.name() == name) {
            Some(pairs) => Ok(Some(Some(pairs))),
            None => Err(FeatureError::UnknownPairs(text)),
        },
    }
}

/// The target with the best instructions for pairs that were seen to run here, or the forced ones.
pub(super) fn detect(
    target: CpuTarget,
    forced: Option<Option<Pairs>>,
    toolchain: &Toolchain,
    cache: &Cache,
) -> Result<CpuTarget, FeatureError> {
    let (pairs, must) = match forced {
        Some(None) => return Ok(target),
        Some(Some(pairs)) => (pairs, true),
        None if target.isa == Isa::Avx512 => {
            let with_tiles = probed(&target, Pairs::Tiles, false, toolchain, cache)?;
            return match with_tiles.pairs {
                Some(_) => Ok(with_tiles),
                None => probed(&target, Pairs::Dots, false, toolchain, cache),
            };
        }
        None => return Ok(target),
    };
    probed(&target, pairs, must, toolchain, cache)
}

/// Adds the instructions if the probe ran and, unless `must`, found them faster. Else returns the target unchanged, or
/// an error if `must`.
fn probed(
    target: &CpuTarget,
    pairs: Pairs,
    must: bool,
    toolchain: &Toolchain,
    cache: &Cache,
) -> Result<CpuTarget, FeatureError> {
    let wanted = target.clone().with_pairs(pairs);
    let verdict = verify_probe(&wanted, &probe(pairs, must), toolchain, cache)?;
    let problem = match verdict {
        Verdict::Runs if pairs != Pairs::Tiles || request_tiles() => return Ok(wanted),
        Verdict::Runs => "the system does not give tiles to this process".to_string(),
        Verdict::Traps(problem) | Verdict::Fails(problem) => problem,
    };
    match must {
        true => Err(FeatureError::ForcedPairs { pairs, problem }),
        false => Ok(target.clone()),
    }
}

/// Asks Linux for the state of tiles (`ARCH_REQ_XCOMP_PERM`, `XFEATURE_XTILEDATA`), for all threads.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[allow(unsafe_code)]
fn request_tiles() -> bool {
    // SAFETY: the call takes two numbers, and grants or refuses.
    unsafe { libc::syscall(libc::SYS_arch_prctl, 0x1023, 18) == 0 }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn request_tiles() -> bool {
    false
}

/// A program that computes blocks of a product, first set and then added to, and checks every sum: the
/// numbers are small integers, so each is exact.
fn probe(pairs: Pairs, must: bool) -> String {
    if pairs == Pairs::Dots {
        let timed = if must { "" } else { "#define TIMED\n" };
        return format!("{timed}{DOTS_PROBE}");
    }
    let (chosen, request) = match pairs {
        Pairs::Tiles => (
            "#define SH_PAIRS_TILES\n",
            "if (syscall(158, 0x1023, 18) != 0) return 1;",
        ),
        Pairs::Dots | Pairs::Plain => ("", ""),
    };
    format!(
        "{chosen}{}{}{}\nlong syscall(long, ...);\n\
         int main(int argc, char **argv) {{\n(void)argv; (void)&syscall;\n{request}\n{PROBE_BODY}",
        prelude::MATH,
        prelude::HALVES,
        prelude::PAIRS
    )
}

/// A program that checks a dot product and, if `TIMED`, whether independent ones take at most 0.7 times as long for
/// each number as multiply-adds do: the shortest of several times counts. Ends with 3 if they do not.
const DOTS_PROBE: &str = r#"
#include <time.h>
typedef float vf __attribute__((vector_size(64)));
typedef unsigned vu __attribute__((vector_size(64)));
#define DOTS(i) __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(s##i) : "v"(a), "v"(b));
#define FUSED(i) __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(s##i) : "v"(a), "v"(b));
#define ALL(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11)
#define DECLARE(i) vf s##i = {0};
#define SUM(i) + s##i[0]
static double ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}
int main(int argc, char **argv) {
  (void)argv;
  /* Pairs (1, 2) times pairs (argc, 3). */
  const vu zero = {0}, ones = zero + 0x40003f80u;
  float whole = (float)argc;
  unsigned bits;
  __builtin_memcpy(&bits, &whole, 4);
  const vu threes = zero + (0x40400000u | bits >> 16);
  vf a = (vf)ones, b = (vf)threes, sum = {0};
  sum += 5.0f;
  __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  for (int i = 0; i < 16; i++) if (sum[i] != 5.0f + whole + 6.0f) return 2;
#ifdef TIMED
  double dots = 1e18, fused = 1e18;
  ALL(DECLARE)
  for (int round = 0; round < 40; round++) {
    double from = ns();
    for (int k = 0; k < 4000; k++) { ALL(DOTS) }
    double between = ns();
    for (int k = 0; k < 4000; k++) { ALL(FUSED) }
    double to = ns();
    if (between - from < dots) dots = between - from;
    if (to - between < fused) fused = to - between;
  }
  if (0 ALL(SUM) == 1e30f) return 4;
  if (dots > 0.7 * 2 * fused) return 3;
#endif
  return 0;
}
"#;

const PROBE_BODY: &str = r#"
  static sh_u16 a[2048], b[2048];
  static float c[1024] __attribute__((aligned(64)));
  for (int i = 0; i < 2048; i++) {
    a[i] = sh_to_bf16((float)((i * 7 + argc) % 13 - 6));
    b[i] = sh_to_bf16((float)((i * 5 + argc) % 11 - 5));
  }
  sh_pairs_begin();
  sh_pairs_block(a, b, c, 32, 2, 0, b, 1);
  sh_pairs_block(a, b, c, 32, 1, 1, b, 0);
  sh_pairs_end();
  for (int i = 0; i < 32; i++) for (int j = 0; j < 32; j++) {
    float sum = 0;
    for (int n = 0; n < 3; n++) for (int k = 0; k < 32; k++)
      sum += sh_from_bf16(a[n % 2 * 1024 + i / 16 * 512 + i % 16 * 32 + k]) *
             sh_from_bf16(b[n % 2 * 1024 + j / 16 * 512 + k / 2 * 32 + j % 16 * 2 + k % 2]);
    if (c[i * 32 + j] != sum) return 2;
  }
  return 0;
}
"#;

#[cfg(test)]
mod tests {
    use super::{Pairs, detect};
    use crate::cache::Cache;
    use crate::features::{CpuTarget, Family, FeatureError, Isa};
    use crate::toolchain::{Search, find};
    use graph::DType;

    #[test]
    fn tiles_have_a_rate_that_is_measured_or_assumed() {
        let target = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
        let measured = |rate| {
            let mut machine = target.machine;
            machine.pair_operations_per_us = rate;
            Some(machine)
        };
        let rate = |target: CpuTarget| target.machine.product_rate(DType::BF16);
        let product = target.machine.product_rate(DType::F32);
        assert_eq!(rate(target.clone()), product);
        let tiles = target.clone().with_pairs(Pairs::Tiles);
        assert!(rate(tiles.clone()) > product);
        assert_eq!(tiles.machine.product_rate(DType::F32), product);
        // Limits that were measured without tiles in mind leave the assumption.
        assert_eq!(
            rate(tiles.clone().with_machine(measured(0))),
            rate(tiles.clone())
        );
        assert_eq!(rate(tiles.with_machine(measured(7 * product))), 7 * product);
        assert_eq!(rate(target.clone().with_machine(measured(0))), product);
    }

    #[test]
    fn what_traps_is_not_used_unless_asked_for_and_then_refused() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path(), 1 << 20).unwrap();
        let toolchain = find(&Search::from_environment(), &cache).unwrap();
        let plain = CpuTarget::for_isa(Isa::Portable, toolchain.family());
        let forced = |pairs| detect(plain.clone(), Some(Some(pairs)), &toolchain, &cache);
        assert_eq!(forced(Pairs::Plain).unwrap().pairs, Some(Pairs::Plain));
        let none = detect(plain.clone(), Some(None), &toolchain, &cache).unwrap();
        assert_eq!(none, plain);
        assert_eq!(
            detect(plain.clone(), None, &toolchain, &cache).unwrap(),
            plain
        );
        let wide = CpuTarget::for_isa(Isa::Avx512, Family::Gcc);
        let own = detect(wide.clone(), None, &toolchain, &cache).unwrap();
        match forced(Pairs::Tiles) {
            Ok(target) => assert_eq!(
                (target.pairs, own.pairs),
                (Some(Pairs::Tiles), target.pairs)
            ),
            Err(FeatureError::ForcedPairs { pairs, .. }) => {
                assert_eq!(pairs, Pairs::Tiles);
                // Dot products are chosen only where they run; whether they gain is the probe's to say.
                let dots = detect(wide.clone(), Some(Some(Pairs::Dots)), &toolchain, &cache);
                match own.pairs {
                    None => assert_eq!(own, wide),
                    Some(_) => assert_eq!(own, dots.unwrap()),
                }
            }
            Err(other) => panic!("{other}"),
        }
    }
}
