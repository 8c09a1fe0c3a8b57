//! NVRTC: kernels become cubins for every architecture, with resources read and gated.
//!
//! The tests that need the library are ignored in a plain `cargo test`; `cargo xtask test` runs them
//! with `SHORTHAUL_NVRTC` set to the folder of PyTorch's wheel.

use cuda_kernels::nvrtc::{GateError, Nvrtc, NvrtcError, compile, gate};
use cuda_kernels::{Arch, Kernel, Param, ParamType, lower};
use graph::DType;
use graph_cases::{files, joined};
use kernels::cache::Cache;

#[path = "../../tests/graph_cases/mod.rs"]
mod graph_cases;

fn kernel(name: &str, body: &str) -> Kernel {
    let param = |name: &str, ty| Param {
        name: name.into(),
        ty,
    };
    Kernel {
        name: name.into(),
        text: format!(
            "SH_KERNEL({name}, 128, 1)(SH_IN(float) x, SH_OUT(float) y) {{\n{body}\n}}\n"
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

/// Every name of the prelude that emitted text may use.
fn all_names() -> Kernel {
    let mut body = String::from(
        "const int i = SH_BID * 128 + SH_TID;\nfloat v = x[i];\ndouble d = v;\n\
         SH_SHARED(float, s, 128);\nSH_DYNAMIC(pool);\nSH_CARVE(sh_bf16, h, pool, 256, 128);\n\
         s[SH_TID] = v; h[SH_TID] = sh_from_float<sh_bf16>(v); SH_SYNC(); SH_WARP_SYNC();\n\
         sh_f16 g = sh_from_float<sh_f16>(v);\n\
         v += s[127 - SH_TID] + sh_to_float(h[SH_TID ^ 1]) + sh_to_float(g) + sh_to_float(v);\n\
         v += sh_shuffle_xor(v, 1) + sh_shuffle_down(v, 1) + sh_shuffle(v, 3) + (float)sh_ballot(v > 0);\n\
         float k[2] = {v, 1.0f};\nsh_block_sum<128, 2>(k);\n\
         v += k[0] + sh_block_max<128>(v) + sh_block_min<128>(v) + sh_block_prod<128>(v);\n\
         d += sh_block_sum<128>(d) + (double)sh_block_max<128>((long long)i);\n\
         v += sh_uniform(7ull, (sh_u64)i) + (float)(SH_BID_Y + SH_BID_Z + SH_N_BLOCKS + SH_WARP + SH_LANE);\n\
         sh_vec<float, 4> q = sh_load<4>(x, 4 * (long long)SH_TID); v += q[0] + q[3];\n\
         v += (float)(ix_floordiv(i, 3) + ix_mod(i, 5) + ix_max32(i, 1) + ix_pow(i, 2) + ix_shl(i, 2) + ix_shr(i, 2));\n\
         v += __builtin_fabsf(v) + __builtin_inff() * (float)ix_isnanf(v);\n\
         v += (float)(unsigned char)sh_to_long(v) + (float)sh_to_long(d);\n",
    );
    for name in [
        "abs", "exp", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "sqrt", "rsqrt", "recip",
        "sin", "cos", "tan", "floor", "ceil", "round", "trunc", "sign", "atan", "asin", "acos",
        "sinh", "cosh", "asinh", "acosh", "atanh",
    ] {
        body.push_str(&format!("v += sh_{name}(v); d += sh_{name}_f64(d);\n"));
    }
    for name in ["pow", "min", "max", "floordiv", "mod", "atan2", "mul"] {
        body.push_str(&format!(
            "v += sh_{name}(v, 2.5f); d += sh_{name}_f64(d, 2.5);\n"
        ));
    }
    body.push_str("y[i] = v + (float)d;");
    kernel("all_names", &body)
}

fn sum() -> Kernel {
    kernel(
        "sum",
        "const int i = SH_BID * 512 + 4 * SH_TID;\nsh_vec<float, 4> v = sh_load<4>(x, i);\n\
         float k[2] = {v[0] + v[1] + v[2] + v[3], v[0] * v[0]};\nsh_block_sum<128, 2>(k);\n\
         SH_UNROLL\nfor (int j = 0; j < 4; j++) v[j] = sh_exp(v[j]) * k[0] * sh_rsqrt(k[1]);\nsh_store<4>(y, i, v);",
    )
}

/// A fresh cache, so that NVRTC really runs.
fn fresh() -> (tempfile::TempDir, Cache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    (folder, cache)
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn kernels_become_cubins_for_every_architecture() {
    let nvrtc = Nvrtc::find(&[]).unwrap();
    let (_folder, cache) = fresh();
    let kernels = [all_names(), sum()];
    for arch in Arch::ALL {
        let cubin = compile(&kernels, arch, &nvrtc, &cache).unwrap();
        assert_eq!(cubin.log, "", "{arch:?}");
        assert_eq!(cubin.resources[1].kernel, "sum");
        // Alone: a pool of another kernel in the file would round the static arrays up.
        let alone = compile(&kernels[1..], arch, &nvrtc, &cache).unwrap();
        let sum = &alone.resources[0];
        // Four warps, two sums, four bytes.
        // On Hopper with what the system keeps.
        let shared = if arch == Arch::Sm90a { 1056 } else { 32 };
        let found = (sum.stack_bytes, sum.static_shared_bytes);
        assert_eq!(found, (0, shared), "{arch:?}");
        assert!((8..=64).contains(&sum.registers), "{arch:?}: {sum:?}");
        assert_eq!(gate(&kernels[1..], &[alone]), []);
        assert_eq!(
            compile(&kernels, arch, &nvrtc, &cache).unwrap(),
            cubin,
            "from the cache"
        );
    }
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn stack_frames_are_refused_with_the_kernel_and_its_origin() {
    let nvrtc = Nvrtc::find(&[]).unwrap();
    let (_folder, cache) = fresh();
    let kernels = [
        sum(),
        kernel(
            "indexed",
            "float v[16] = {};\nfor (int k = 0; k < 64; k++) v[(int)x[k] & 15] += x[k + SH_TID];\n\
             y[SH_TID] = v[(int)x[SH_TID] & 15];",
        ),
    ];
    let cubin = compile(&kernels, Arch::Sm80, &nvrtc, &cache).unwrap();
    let errors = gate(&kernels, &[cubin]);
    assert!(
        matches!(&errors[..], [GateError::Stack { kernel, bytes: 64.., .. }] if kernel == "indexed"),
        "{errors:?}"
    );
    assert!(errors[0].to_string().contains("indexed (of test)"));
}

#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn errors_name_the_kernel_and_its_line() {
    let nvrtc = Nvrtc::find(&[]).unwrap();
    let (_folder, cache) = fresh();
    let broken = kernel("broken", "y[0] = 1.0f;\ny[1] = undeclared;");
    let error = compile(&[sum(), broken], Arch::Sm90a, &nvrtc, &cache).unwrap_err();
    assert!(matches!(error, NvrtcError::Refused { .. }));
    let text = error.to_string();
    assert!(
        text.contains("broken(3): error") && text.contains("undeclared"),
        "{text}"
    );
}

/// Kernels of the emission and traffic cases, in half and in single precision.
#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn emitted_kernels_keep_to_registers() {
    let nvrtc = Nvrtc::find(&[]).unwrap();
    let (_folder, cache) = fresh();
    for (folder, single) in [
        ("traffic_cases", "f32"),
        ("../../tests/emission_cases", "f32"),
        ("../../tests/emission_cases", "bf16"),
    ] {
        let graph = joined(&files(folder, ""), single);
        let program = lower::lower(&graph).unwrap();
        for arch in [Arch::Sm80, Arch::Sm90a] {
            let cubin = compile(&program.kernels, arch, &nvrtc, &cache).unwrap();
            let errors = gate(&program.kernels, std::slice::from_ref(&cubin));
            assert!(errors.is_empty(), "{folder} {arch:?}: {errors:?}");
            for (kernel, r) in program.kernels.iter().zip(&cubin.resources) {
                let head = kernel.text.lines().next().unwrap_or_default();
                println!("{arch:?} {} registers: {head}", r.registers);
            }
        }
    }
}
