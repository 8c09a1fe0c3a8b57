//! Tests of programs: compiled kernels run by the pool on lent memory.

use kernels::cache::Cache;
use kernels::compile::{CompileOptions, SourceUnit, compile};
use kernels::features::{CpuTarget, Isa};
use kernels::memory::{AlignedBuffer, Buffer};
use kernels::pool::Pool;
use kernels::progress::Silent;
use kernels::run::{
    BufferRef, ExternalSpec, Function, Launch, Program, ProgramParts, RunError, Threads,
};
use kernels::toolchain::{self, Search};

const N: usize = 1000;

/// `scale`: out = in * factor[0]; `total`: every thread adds its part in scratch,
/// thread 0 never reads another's scratch, so parts go to a shared array;
/// `combine`: sum of the parts.
const SOURCE: &str = r#"
void scale(void *const *buf, void *scratch, long tid, long nt) {
  const float *in = buf[0], *factor = buf[1]; float *out = buf[2];
  for (long i = tid * 1000 / nt; i < (tid + 1) * 1000 / nt; i++) out[i] = in[i] * factor[0];
}
void total(void *const *buf, void *scratch, long tid, long nt) {
  const float *in = buf[0]; float *parts = buf[1]; double *sum = scratch;
  for (int k = 0; k < 512; k++) sum[k] = 0;
  for (long i = tid * 1000 / nt; i < (tid + 1) * 1000 / nt; i++) sum[i % 512] += in[i];
  double all = 0;
  for (int k = 0; k < 512; k++) all += sum[k];
  parts[tid] = (float)all;
}
void combine(void *const *buf, void *scratch, long tid, long nt) {
  if (tid) return;
  const float *parts = buf[0]; float *out = buf[1];
  float all = 0;
  for (long t = 0; t < nt; t++) all += parts[t];
  out[0] = all;
}
void nothing(void *const *buf, void *scratch, long tid, long nt) {}
"#;

fn functions(names: &[&str]) -> Vec<Function> {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path(), 1 << 30).unwrap();
    let toolchain = toolchain::find(&Search::from_environment(), &cache).unwrap();
    let options = CompileOptions {
        target: CpuTarget::for_isa(Isa::Portable, toolchain.family()),
        toolchain,
        cache,
        jobs: 1,
    };
    let unit = SourceUnit {
        name: "test".into(),
        source: SOURCE.into(),
        symbols: names.iter().map(|name| name.to_string()).collect(),
    };
    let modules = compile(&[unit], &options, &mut Silent).unwrap();
    names
        .iter()
        .map(|name| modules[0].function(name).unwrap())
        .collect()
}

fn launch(function: &Function, name: &str, args: &[BufferRef]) -> Launch {
    Launch {
        function: function.clone(),
        args: args.to_vec(),
        name: name.into(),
    }
}

/// in (slot 0) * 3 into the saved block, its sum into slot 1.
fn scaled_sum() -> ProgramParts {
    let f = functions(&["scale", "total", "combine"]);
    use BufferRef::{Arena, Constant, External, Saved};
    ProgramParts {
        launches: vec![
            launch(&f[0], "scale", &[External(0), Constant(0), Saved(64)]),
            launch(&f[1], "total", &[Saved(64), Arena(128)]),
            launch(&f[2], "combine", &[Arena(128), External(1)]),
        ],
        constants: vec![AlignedBuffer::from_slice(&[3.0f32]).unwrap()],
        externals: vec![
            ExternalSpec {
                bytes: 4 * N,
                written: false,
            },
            ExternalSpec {
                bytes: 4,
                written: true,
            },
        ],
        arena_bytes: 128 + 64 * 4,
        saved_bytes: 64 + 4 * N,
        thread_scratch_bytes: 4096,
        planned_threads: None,
    }
}

#[test]
fn a_program_runs_its_launches_in_order_on_any_number_of_threads() {
    let program = Program::new(scaled_sum()).unwrap();
    let input: Vec<f32> = (0..N).map(|i| i as f32).collect();
    let pool = Pool::new();
    let mut arena = AlignedBuffer::zeroed(program.parts().arena_bytes).unwrap();
    let mut saved = AlignedBuffer::zeroed(program.parts().saved_bytes).unwrap();
    for n_threads in [1, 2, 3, 7] {
        pool.set_threads(n_threads);
        for _ in 0..50 {
            let mut sum = [0f32];
            let externals = [Buffer::read_only(&input), Buffer::new(&mut sum)];
            program
                .run(&externals, arena.as_buffer(), saved.as_buffer(), &pool)
                .unwrap();
            assert_eq!(sum, [3.0 * 999.0 * 500.0]);
        }
        assert_eq!(saved.as_slice::<f32>()[16 + 10], 30.0);
    }
    let mut sum = [0f32];
    let externals = [Buffer::read_only(&input), Buffer::new(&mut sum)];
    let times = program
        .run_timed(
            &externals,
            arena.as_buffer(),
            saved.as_buffer(),
            Threads::of(&pool),
        )
        .unwrap();
    let names: Vec<_> = times.iter().map(|time| time.name).collect();
    assert_eq!(names, ["scale", "total", "combine"]);
    assert_eq!(sum, [3.0 * 999.0 * 500.0]);
}

#[test]
fn a_planned_program_cuts_its_sums_alike_on_any_number_of_threads() {
    let parts = ProgramParts {
        planned_threads: Some(3),
        ..scaled_sum()
    };
    let program = Program::new(parts).unwrap();
    // Terms whose sum depends on how it is cut.
    let input: Vec<f32> = (0..N).map(|i| ((i * i) % 97) as f32 * 0.37 + 0.1).collect();
    let pool = Pool::new();
    let mut arena = AlignedBuffer::zeroed(program.parts().arena_bytes).unwrap();
    let mut saved = AlignedBuffer::zeroed(program.parts().saved_bytes).unwrap();
    let mut sum_on = |program: &Program, n_threads: usize| {
        pool.set_threads(n_threads);
        let mut sum = [0f32];
        let externals = [Buffer::read_only(&input), Buffer::new(&mut sum)];
        program
            .run(&externals, arena.as_buffer(), saved.as_buffer(), &pool)
            .unwrap();
        sum[0]
    };
    let planned = sum_on(&program, 1);
    for n_threads in [2, 3, 4, 8] {
        assert_eq!(sum_on(&program, n_threads), planned, "{n_threads} threads");
    }
    let unplanned = Program::new(scaled_sum()).unwrap();
    assert_ne!(sum_on(&unplanned, 1), planned);
    assert_eq!(sum_on(&unplanned, 3), planned);
}

#[test]
fn wrong_buffers_are_refused_with_a_sentence() {
    let program = Program::new(scaled_sum()).unwrap();
    let pool = Pool::new();
    let mut arena = AlignedBuffer::zeroed(program.parts().arena_bytes).unwrap();
    let mut saved = AlignedBuffer::zeroed(program.parts().saved_bytes).unwrap();
    let input = vec![0f32; N];
    let mut sum = [0f32];
    let read = Buffer::read_only(&input);
    let written = Buffer::new(&mut sum);
    let (arena, saved) = (arena.as_buffer(), saved.as_buffer());
    let error = |externals: &[Buffer<'_>], arena, saved| {
        program.run(externals, arena, saved, &pool).unwrap_err()
    };
    assert_eq!(
        error(&[read], arena, saved),
        RunError::ExternalCount {
            expected: 2,
            found: 1
        }
    );
    assert_eq!(
        error(&[Buffer::read_only(&input[1..]), written], arena, saved).to_string(),
        "buffer 0 needs 4000 bytes, 3996 were given"
    );
    assert_eq!(
        error(&[read, read], arena, saved),
        RunError::ReadOnly { slot: 1 }
    );
    assert_eq!(
        error(&[read, written], Buffer::none(), saved).to_string(),
        "the arena needs 384 bytes, 0 were given"
    );
    let mut unaligned = AlignedBuffer::zeroed(8192).unwrap();
    let shifted = Buffer::new(&mut unaligned.as_mut_slice::<u8>()[4..]);
    assert_eq!(
        error(&[read, written], arena, shifted).to_string(),
        "the saved block must be aligned to 64 bytes"
    );
}

#[test]
fn arguments_that_do_not_exist_are_refused() {
    use BufferRef::{Arena, Constant, External, Saved};
    for (buffer, part) in [
        (External(2), "2 external buffers"),
        (Arena(384), "384 bytes of arena"),
        (Saved(1 << 20), "4064 saved bytes"),
        (Constant(1), "1 constants"),
    ] {
        let mut parts = scaled_sum();
        parts.launches[1].args[0] = buffer;
        let message = Program::new(parts).unwrap_err().to_string();
        assert!(message.contains("launch total"), "{message}");
        assert!(message.contains(part), "{message}");
    }
}

/// Prints what an empty launch costs; run with `--ignored --nocapture` on a quiet
/// machine.
#[test]
#[ignore = "a measurement, not a check"]
fn cost_of_an_empty_launch() {
    let f = functions(&["nothing"]);
    let parts = ProgramParts {
        launches: vec![launch(&f[0], "nothing", &[]); 1000],
        ..ProgramParts::default()
    };
    let program = Program::new(parts).unwrap();
    let pool = Pool::new();
    for n_threads in [1, 2] {
        pool.set_threads(n_threads);
        let mut seconds: Vec<f64> = (0..51)
            .map(|_| {
                let start = std::time::Instant::now();
                program
                    .run(&[], Buffer::none(), Buffer::none(), &pool)
                    .unwrap();
                start.elapsed().as_secs_f64()
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        println!(
            "{n_threads} threads: {:.3} µs per launch",
            seconds[25] * 1e3
        );
    }
}
