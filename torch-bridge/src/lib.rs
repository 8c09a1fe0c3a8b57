//! The Python package's native half.
