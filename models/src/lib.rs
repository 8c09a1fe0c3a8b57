//! The networks, as graphs built in Rust.
