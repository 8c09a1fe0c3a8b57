//! Reverse-mode differentiation of a graph; what to save and what to recompute.
