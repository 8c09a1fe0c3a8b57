//! The `shorthaul` program.

fn main() {}
