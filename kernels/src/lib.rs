//! Lowering to kernels, buffer planning, C emission, compilation, running.
