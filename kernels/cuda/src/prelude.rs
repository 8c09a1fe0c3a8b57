//! The text before emitted kernels: the names of the prelude, for a device or for the host.
//!
//! Owns its assembly. Neither form includes a header (the host's does for `ucontext` where the CPU is
//! not an x86-64), so both compile in milliseconds. The host form takes the functions of tasklet
//! expressions from the CPU's prelude, the device form NVIDIA's, except for `trigonometry.h`.

use kernels::emit::scalar::INTEGER_SUPPORT;

/// Small angles are reduced by a branch of their own.
const BRANCHING: &str = "#define SH_BRANCHING\n";

/// What NVRTC compiles kernels with.
pub fn device() -> String {
    let integers = INTEGER_SUPPORT.replace("static inline", "SH_FN");
    [
        BRANCHING,
        include_str!("prelude/device.h"),
        kernels::prelude::TRIGONOMETRY,
        include_str!("prelude/both.h"),
        include_str!("prelude/tensor_core.h"),
        include_str!("prelude/tile_memory.h"),
        include_str!("prelude/warpgroup.h"),
        include_str!("prelude/tensor_map.h"),
        &integers,
    ]
    .concat()
}

/// What the emulator compiles kernels with.
pub fn host() -> String {
    [
        BRANCHING,
        kernels::prelude::MATH,
        include_str!("prelude/host.h"),
        include_str!("prelude/both.h"),
        include_str!("prelude/tensor_core.h"),
        include_str!("prelude/tile_memory.h"),
        include_str!("prelude/warpgroup.h"),
        include_str!("prelude/tensor_map.h"),
        INTEGER_SUPPORT,
        include_str!("prelude/calls.h"),
    ]
    .concat()
}
