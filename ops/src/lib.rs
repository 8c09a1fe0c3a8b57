//! Operators, one file per family: shape rule, reference meaning, gradient, expansions, samples.
