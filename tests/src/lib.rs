//! Tests that cross rooms.
