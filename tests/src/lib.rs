//! Tests that cross rooms.

pub mod mutate;
