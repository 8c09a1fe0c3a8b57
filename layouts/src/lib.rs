//! Global choice of data layout.
