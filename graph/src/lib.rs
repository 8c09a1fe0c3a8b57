//! The data-centric graph: containers, states, maps, memlets, tasklets; its text form, verifier, interpreter and simplification.
