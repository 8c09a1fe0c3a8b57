//! Chains of products as CUDA text executed on the host against the interpreter in double precision:
//! attention forward and backward at sizes that no tile divides, masks, dropout, planted faults.

mod chain_cases;
mod chain_runs;

use chain_cases::{Case, Mask, graph, input};
use chain_runs::{CASE, SEEDS, check, check_graph};
use cuda_kernels::emulate::{EmulateError, Fault, FaultKind};
use cuda_kernels::nvrtc::{Nvrtc, compile_all, gate};
use cuda_kernels::{Arch, execute, lower};
use graph::Tensor;
use kernels::cache::Cache;
use kernels::progress::Silent;

#[test]
fn attention_at_sizes_that_no_tile_divides() {
    check(
        &[
            Case {
                name: "plain",
                ..CASE
            },
            Case {
                name: "wide",
                rows: 70,
                columns: 100,
                widths: [64, 64],
                ..CASE
            },
            Case {
                name: "half",
                dtype: "f16",
                rows: 64,
                columns: 64,
                widths: [64, 24],
                ..CASE
            },
            Case {
                name: "uneven",
                rows: 20,
                columns: 40,
                widths: [80, 72],
                heads: 1,
                ..CASE
            },
            Case {
                name: "widest",
                rows: 65,
                columns: 40,
                widths: [128, 128],
                heads: 1,
                ..CASE
            },
        ],
        true,
    );
}

/// A chain without a kernel of its own goes through memory, and its results are right, too.
#[test]
fn chains_of_other_forms_are_launches_of_their_own() {
    let wide = Case {
        name: "too_wide",
        widths: [136, 32],
        ..CASE
    };
    let single = Case {
        name: "single",
        dtype: "f32",
        ..CASE
    };
    let odd = Case {
        name: "odd",
        widths: [36, 20],
        ..CASE
    };
    check(&[wide, single, odd], false);
}

#[test]
fn attention_with_masks_and_dropout() {
    check(
        &[
            Case {
                name: "causal",
                mask: Mask::Causal,
                batch: 2,
                ..CASE
            },
            Case {
                name: "added",
                mask: Mask::Added,
                rows: 20,
                columns: 48,
                batch: 2,
                ..CASE
            },
            Case {
                name: "dropped",
                mask: Mask::Dropout,
                rows: 32,
                columns: 64,
                ..CASE
            },
            Case {
                name: "far",
                mask: Mask::FarDropout,
                columns: 40,
                heads: 1,
                ..CASE
            },
            Case {
                name: "blind",
                mask: Mask::Before,
                is_backward: false,
                ..CASE
            },
        ],
        true,
    );
}

/// How often the forward kernel goes over the columns: once, if what is divided last is a multiple of powers
/// against a maximum; twice, if only that is not so, since the sum needs no sweep of its own; else three times.
#[test]
fn a_running_maximum_saves_sweeps() {
    let case = Case {
        name: "x",
        columns: 100,
        heads: 1,
        is_backward: false,
        ..CASE
    };
    let text = graph(&[case]).to_string();
    let masked = graph(&[Case {
        mask: Mask::Added,
        ..case
    }]);
    let power = "exp($0 * 0.125 - $1)";
    assert_eq!(text.matches(power).count(), 2);
    let more = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        text.replace(from, to)
    };
    for (text, sweeps) in [
        (text.clone(), 1),
        (masked.to_string(), 1),
        (more(power, "exp($0 * 0.125 - $1 * 0.5)"), 1),
        (
            more(&format!("{power} / $2"), &format!("{power} / $2 + 0.5")),
            2,
        ),
        (more(&format!("{power} / $2"), &format!("{power} * $2")), 2),
        (more(power, "exp($0 * 0.125 - $1 * $0)"), 3),
        (
            more(&format!("= {power} from"), "= exp($0 * 0.125) * $1 from"),
            3,
        ),
    ] {
        let program = check_graph(&graph::parse(&text).unwrap());
        let found = program.kernels[0].text.matches("SH_SYNC();").count();
        assert_eq!(found, sweeps, "{text}");
    }
}

/// Chains that no running maximum corrects, or only at a row's end, are right, too: raw products as left
/// factors, divisors from memory, powers of another value than the maximum is of.
#[test]
fn what_a_running_maximum_does_not_cover_is_right() {
    let case = Case {
        name: "x",
        columns: 100,
        heads: 1,
        is_backward: false,
        ..CASE
    };
    let text = graph(&[case]).to_string();
    let changed = |changes: &[(&str, &str)]| {
        changes.iter().fold(text.clone(), |text, (from, to)| {
            assert!(text.contains(from), "{from}: {text}");
            text.replace(from, to)
        })
    };
    let raw = [("%x_p[u, v, w, x], %x_v", "%x_t[u, v, w, x], %x_v")];
    let divided = [
        (
            "  inputs %x_q",
            "  %x_w: f32[1, 1, 33] input\n  inputs %x_w, %x_q",
        ),
        ("- $1) / $2 from", "- $1) / ($2 + $3 * $3) from"),
        (
            "from %x_t[u, v, w, x], %x_m[u, v, w], %x_l[u, v, w]",
            "from %x_t[u, v, w, x], %x_m[u, v, w], %x_l[u, v, w], %x_w[u, v, w]",
        ),
    ];
    let other = [("exp($0 * 0.125 - $1)", "exp($0 * 0.25 - $1)")];
    // 16 bits with five of exponent hold these after the division only.
    let large = [
        ("bf16", "f16"),
        ("- $1) / $2 from", "- $1) * 100000.0 / $2 from"),
    ];
    for changes in [&raw[..], &divided[..], &other[..], &large[..]] {
        let program = check_graph(&graph::parse(&changed(changes)).unwrap());
        assert_eq!(program.maps[0].path, "chain");
    }
}

/// What others read is stored where it is made: with columns in pairs and without.
#[test]
fn tiles_that_others_read_are_stored() {
    let case = Case {
        is_stored: true,
        heads: 1,
        ..CASE
    };
    check(
        &[
            Case {
                name: "pairs",
                columns: 100,
                ..case
            },
            Case {
                name: "single",
                rows: 70,
                ..case
            },
            Case {
                name: "parts",
                mask: Mask::Dropout,
                columns: 40,
                widths: [32, 128],
                heads: 2,
                ..case
            },
        ],
        true,
    );
}

/// Chains that only reduce rows to numbers, without products out of tiles, are one launch.
#[test]
fn reductions_of_products_are_one_launch() {
    let text = "graph \"sums\" {
        %x_q: bf16[2, 70, 32] input
        %x_k: bf16[2, 40, 32] input
        %x_t: bf16[2, 70, 40] local
        %x_m: f32[2, 70]
        %x_l: f32[2, 70]
        inputs %x_q, %x_k
        state {
          map [] kernel {
            map [b < 2, i < 70, j < 40, d < 32] sequential {
              tasklet %x_t[b, i, j] (sum) = $0 * $1 from %x_q[b, i, d], %x_k[b, j, d]
            }
            map [b < 2, i < 70, j < 40] sequential {
              tasklet %x_m[b, i] (max) = $0 from %x_t[b, i, j]
            }
            map [b < 2, i < 70, j < 40] sequential {
              tasklet %x_l[b, i] (sum) = exp($0 - $1) from %x_t[b, i, j], %x_m[b, i]
            }
          }
        }
        outputs %x_m, %x_l
      }";
    let program = check_graph(&graph::parse(text).unwrap());
    let paths: Vec<&str> = program.maps.iter().map(|m| m.path).collect();
    assert_eq!((paths, program.launches.len()), (vec!["chain"], 1));
}

/// Gradients of keys that three heads of queries share: rows are keys, and the columns of each head are
/// swept in turn, with numbers of the head, of its columns and of neither.
#[test]
fn columns_of_groups_are_swept_in_turn() {
    let text = "graph \"groups\" {
        %x_q: bf16[2, 3, 100, 32] input
        %x_k: bf16[2, 70, 32] input
        %x_m: f32[2, 3, 100] input
        %x_w: f32[3] input
        %x_t: bf16[2, 3, 100, 70] local
        %x_p: bf16[2, 3, 100, 70] local
        %x_y: bf16[2, 70, 32]
        inputs %x_q, %x_k, %x_m, %x_w
        state {
          map [] kernel {
            map [h < 2, r < 3, i < 100, j < 70, d < 32] sequential {
              tasklet %x_t[h, r, i, j] (sum) = $0 * $1 from %x_q[h, r, i, d], %x_k[h, j, d]
            }
            map [h < 2, r < 3, i < 100, j < 70] sequential {
              tasklet %x_p[h, r, i, j] = select({j} <= {i}, $0 * $2 - $1, 0.0) from %x_t[h, r, i, j], %x_m[h, r, i], %x_w[r]
            }
            map [h < 2, r < 3, i < 100, j < 70, e < 32] sequential {
              tasklet %x_y[h, j, e] (sum) = $0 * $1 from %x_p[h, r, i, j], %x_q[h, r, i, e]
            }
          }
        }
        outputs %x_y
      }";
    let program = check_graph(&graph::parse(text).unwrap());
    let paths: Vec<&str> = program.maps.iter().map(|m| m.path).collect();
    assert_eq!((paths, program.launches.len()), (vec!["chain"], 1));
    let text = &program.kernels[0].text;
    assert!(
        text.contains("for (int group0 = 0; group0 < 3; group0++)"),
        "{text}"
    );
}

/// A tile whose type differs from the other factor's would be rounded to that type before they are multiplied.
#[test]
fn factors_of_two_types_are_launches_of_their_own() {
    let case = Case {
        name: "x",
        is_backward: false,
        ..CASE
    };
    let text = graph(&[case]).to_string();
    let wide = text.replace("%x_p: bf16", "%x_p: f32");
    assert_ne!(text, wide);
    let program = check_graph(&graph::parse(&wide).unwrap());
    assert!(program.maps.iter().all(|m| m.path != "chain"));
}

/// Every barrier is needed: without one, another thread's copy is read before it is there, or written
/// over before it is read.
#[test]
fn barriers_that_are_left_out_are_found() {
    let graph = graph(&[Case {
        name: "raced",
        columns: 100,
        ..CASE
    }]);
    let sound = lower::lower(&graph).unwrap();
    let inputs: Vec<Tensor> = graph.inputs.iter().map(|id| input(&graph, *id)).collect();
    let texts = sound.kernels.iter().map(|k| k.text.as_str());
    let barriers: Vec<usize> = texts.map(|t| t.matches("SH_SYNC();").count()).collect();
    assert_eq!(barriers, [1, 2, 1]);
    for (kernel, n) in [(0, 0), (1, 0), (1, 1), (2, 0)] {
        let mut program = sound.clone();
        let text = &mut program.kernels[kernel].text;
        let (at, _) = text.match_indices("SH_SYNC();").nth(n).unwrap();
        text.replace_range(at..at + "SH_SYNC();".len(), ";");
        let host = execute::compile(&graph, &program).unwrap();
        let is_race = |f: &Fault| matches!(f.kind, FaultKind::Race { .. });
        let raced = SEEDS.iter().any(|seed| match host.run(&inputs, *seed) {
            Err(EmulateError::Faults(faults)) => faults.iter().any(is_race),
            _ => false,
        });
        assert!(raced, "barrier {n} of kernel {kernel}");
    }
}

/// At the sizes of networks: no spills, no stack, registers for two blocks at least.
#[test]
#[ignore = "needs NVRTC: run by `cargo xtask test`"]
fn chains_fit_into_registers() {
    let large = Case {
        heads: 16,
        batch: 8,
        rows: 512,
        columns: 512,
        widths: [64, 64],
        ..CASE
    };
    let graph = graph(&[
        Case {
            name: "bert",
            ..large
        },
        Case {
            name: "dropped",
            mask: Mask::Dropout,
            ..large
        },
        Case {
            name: "stored",
            is_stored: true,
            ..large
        },
        Case {
            name: "causal",
            mask: Mask::Causal,
            widths: [128, 128],
            dtype: "f16",
            ..large
        },
        Case {
            name: "ragged",
            mask: Mask::Added,
            rows: 500,
            columns: 333,
            widths: [80, 40],
            ..large
        },
    ]);
    let program = lower::lower(&graph).unwrap();
    let nvrtc = Nvrtc::find(&[]).expect("NVRTC is there");
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    for arch in Arch::ALL {
        let cubins = compile_all(&program.kernels, arch, &nvrtc, &cache, 2, &mut Silent).unwrap();
        assert_eq!(gate(&program.kernels, &cubins), []);
    }
}
