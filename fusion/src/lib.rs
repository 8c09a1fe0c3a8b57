//! Fusion and algebraic rewrites; accounting of bytes moved and its lower bound.
