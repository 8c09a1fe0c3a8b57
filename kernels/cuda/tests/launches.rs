//! Launches in the emulator: those that a device would refuse are refused, arguments arrive as their
//! parameters say.

mod emulator_cases;

use cuda_kernels::emulate::{EmulateError, Emulator, FaultKind, Memory, Settings};
use cuda_kernels::{Arch, Arg, Kernel, Launch, Param, ParamType, element_type};
use emulator_cases::{I, N, input, kernel};
use graph::{DType, Scalar};

#[test]
fn launches_that_do_not_fit_and_texts_that_do_not_compile_are_refused() {
    let sound = kernel("fits", &format!("{I}y[i] = x[i];"));
    let emulator = Emulator::from_environment(std::slice::from_ref(&sound)).unwrap();
    let mut memory = Memory::default();
    let x = memory.add("input", &input());
    let launch = Launch {
        kernel: 0,
        grid: [1, 1, 1],
        dynamic_shared_bytes: 0,
        args: vec![Arg::Buffer(x), Arg::Buffer(x)],
    };
    let error = emulator.run(&launch, &mut memory, &Settings::of_seed(0));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("written and passed twice")
    );

    let broken = kernel("broken", "y[0] = undeclared;");
    let error = Emulator::from_environment(&[broken])
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("broken:2:") && error.contains("undeclared"),
        "{error}"
    );
    let odd = Kernel {
        threads: 48,
        ..sound.clone()
    };
    assert!(Emulator::from_environment(&[odd]).is_err());
    let double = Kernel {
        threads: 256,
        ..sound.clone()
    };
    let more = Kernel {
        min_blocks: 2,
        ..sound
    };
    for (other, what) in [(double, "threads"), (more, "min_blocks")] {
        let error = Emulator::from_environment(&[other]).err().unwrap();
        let said = format!("the text has other {what}");
        assert!(error.to_string().contains(&said), "{error}");
    }
}

/// What a device would not launch, and what it would.
#[test]
fn launches_are_held_to_the_limits_of_the_device() {
    let sound = kernel(
        "large",
        &format!("{I}if (SH_BID == 0) y[i] = x[i]; else y[i] = 0.0f;"),
    );
    let pool = kernel(
        "pool",
        &format!(
            "{I}SH_DYNAMIC(pool);\nSH_CARVE(float, s, pool, 240 * 1024, 64);\n\
             SH_SHARED(float, r, 1024);\nr[SH_TID] = 0.0f;\ny[i] = x[i];"
        ),
    );
    let emulator = Emulator::from_environment(&[sound, pool]).unwrap();
    let run = |kernel, grid, dynamic_shared_bytes, arch| {
        let mut memory = Memory::default();
        let x = memory.add("input", &input());
        let y = memory.add_unwritten("output", DType::F32, N);
        let launch = Launch {
            kernel,
            grid,
            dynamic_shared_bytes,
            args: vec![Arg::Buffer(x), Arg::Buffer(y)],
        };
        let settings = Settings {
            arch,
            ..Settings::of_seed(1)
        };
        emulator.run(&launch, &mut memory, &settings)
    };
    let of_size = |grid, bytes| run(0, grid, bytes, Arch::Sm90a);
    assert!(of_size([2, 1, 1], 227 << 10).is_ok());
    let refused = [
        ([2, 1, 1], (227 << 10) + 1),
        ([1 << 31, 1, 1], 0),
        ([1, 65536, 1], 0),
        ([1, 1, 65536], 0),
        ([1, 0, 1], 0),
        ([u32::MAX; 3], 0),
        ([1 << 20, 1 << 12, 1], 0),
    ];
    for (grid, bytes) in refused {
        let error = of_size(grid, bytes).unwrap_err();
        assert!(
            matches!(error, EmulateError::Launch { .. }),
            "{grid:?}: {error}"
        );
    }
    // On other devices blocks have less.
    for (arch, most) in [(Arch::Sm80, 163), (Arch::Sm89, 99)] {
        assert!(run(0, [2, 1, 1], most << 10, arch).is_ok());
        let error = run(0, [2, 1, 1], (most + 1) << 10, arch).unwrap_err();
        assert!(error.to_string().contains(arch.name()), "{error}");
    }
    let faults = |bytes| match run(1, [2, 1, 1], bytes, Arch::Sm90a) {
        Err(EmulateError::Faults(faults)) => faults,
        other => panic!("{other:?}"),
    };
    // Beyond the pool's end, and static and dynamic memory together.
    assert!(matches!(
        &faults(200 << 10)[0].kind,
        FaultKind::SharedTooLarge { array, .. } if array == "s"
    ));
    let together = kernel(
        "together",
        &format!("{I}SH_SHARED(float, r, 1024);\nr[SH_TID] = 0.0f;\ny[i] = x[i];"),
    );
    let emulator = Emulator::from_environment(&[together]).unwrap();
    for (bytes, fits) in [(223 << 10, true), (224 << 10, false)] {
        let mut memory = Memory::default();
        let x = memory.add("input", &input());
        let y = memory.add_unwritten("output", DType::F32, N);
        let launch = Launch {
            kernel: 0,
            grid: [2, 1, 1],
            dynamic_shared_bytes: bytes,
            args: vec![Arg::Buffer(x), Arg::Buffer(y)],
        };
        let found = emulator.run(&launch, &mut memory, &Settings::of_seed(1));
        assert_eq!(found.is_ok(), fits, "{bytes}: {found:?}");
    }
}

#[test]
fn scalars_arrive_in_their_type() {
    let types = [
        (DType::BF16, Scalar::Float(1.5), 1.5),
        (DType::F16, Scalar::Float(-0.1), DType::F16.round(-0.1)),
        (DType::F32, Scalar::Int(3), 3.0),
        (DType::F64, Scalar::Float(0.1), f64::from(0.1_f32)),
        (DType::U8, Scalar::Int(-1), 255.0),
        (DType::Bool, Scalar::Int(7), 1.0),
        (DType::I64, Scalar::Float(-2.5), -2.0),
    ];
    let kernels = types.map(|(dtype, ..)| {
        let ty = element_type(dtype);
        let half = matches!(dtype, DType::F16 | DType::BF16);
        let number = if half { "sh_to_float(v)" } else { "(float)v" };
        let name = format!("scalar_{dtype}");
        let param = |name: &str, ty| Param {
            name: name.into(),
            ty,
        };
        Kernel {
            text: format!(
                "SH_KERNEL({name}, 128, 1)({ty} v, SH_OUT(float) y) {{\n{I}y[i] = {number};\n}}\n"
            ),
            params: vec![
                param("v", ParamType::Scalar(dtype)),
                param("y", ParamType::Out(DType::F32)),
            ],
            ..kernel(&name, "")
        }
    });
    let emulator = Emulator::from_environment(&kernels).unwrap();
    for (idx, (dtype, given, expected)) in types.into_iter().enumerate() {
        let mut memory = Memory::default();
        let y = memory.add_unwritten("output", DType::F32, 128);
        let launch = Launch {
            kernel: idx,
            grid: [1, 1, 1],
            dynamic_shared_bytes: 0,
            args: vec![Arg::Scalar(given), Arg::Buffer(y)],
        };
        emulator
            .run(&launch, &mut memory, &Settings::of_seed(0))
            .unwrap();
        assert_eq!(memory.values(y), vec![expected; 128], "{dtype}");
    }
}

/// A kernel that loads vectors refuses a view that begins in the middle of one; a kernel of single elements reads it.
#[test]
fn arguments_less_aligned_than_the_kernel_needs_are_refused() {
    let kernels = [
        kernel(
            "vectors",
            &format!("{I}y[i] = sh_load<4>(x, i / 4 * 4)[i % 4];"),
        ),
        kernel("elements", &format!("{I}y[i] = x[i];")),
    ];
    assert_eq!([0, 1].map(|n| kernels[0].alignment(n)), [16, 4]);
    let emulator = Emulator::from_environment(&kernels).unwrap();
    let run = |kernel, bytes| {
        let mut memory = Memory::default();
        let x = memory.add("view", &input());
        let y = memory.add_unwritten("output", DType::F32, N);
        memory.place(x, bytes);
        let launch = Launch {
            kernel,
            grid: [2, 1, 1],
            dynamic_shared_bytes: 0,
            args: vec![Arg::Buffer(x), Arg::Buffer(y)],
        };
        emulator.run(&launch, &mut memory, &Settings::of_seed(1))?;
        assert_eq!(memory.values(y), input().to_f64());
        Ok::<(), EmulateError>(())
    };
    for (kernel, bytes) in [(0, 0), (0, 16), (0, 48), (1, 4), (1, 60)] {
        run(kernel, bytes).unwrap_or_else(|e| panic!("{kernel}, {bytes}: {e}"));
    }
    for (kernel, bytes, needed) in [(0, 4, 16), (0, 8, 16), (1, 2, 4)] {
        let error = run(kernel, bytes).unwrap_err().to_string();
        let said = format!("x needs an address that is a multiple of {needed}");
        assert!(error.contains(&said), "{error}");
    }
}

#[test]
fn buffers_without_memory_are_refused() {
    let emulator = Emulator::from_environment(&[kernel("fits", &format!("{I}y[i] = x[i];"))]);
    let mut memory = Memory::default();
    let x = memory.add_unwritten("endless", DType::F32, usize::MAX / 8);
    let y = memory.add_unwritten("output", DType::F32, N);
    let launch = Launch {
        kernel: 0,
        grid: [2, 1, 1],
        dynamic_shared_bytes: 0,
        args: vec![Arg::Buffer(x), Arg::Buffer(y)],
    };
    memory.set(x, &input());
    let error = emulator
        .unwrap()
        .run(&launch, &mut memory, &Settings::of_seed(0))
        .unwrap_err();
    assert!(error.to_string().contains("no memory"), "{error}");
}
