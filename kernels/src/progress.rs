//! How long-running work reports what it is doing to the program at the edge.
//!
//! Owns the [`Progress`] trait and the silent listener. Never prints: the
//! program at the edge decides what a person sees.

/// A listener for compilation progress and for warnings.
pub trait Progress {
    /// Something is degraded but work goes on; `message` is one sentence.
    fn warn(&mut self, message: &str) {
        let _ = message;
    }

    /// All decisions are made and the C text of `total` units is written; what takes long begins now.
    fn units_written(&mut self, total: usize) {
        let _ = total;
    }

    /// Whether the user wants to stop. Asked about ten times a second while compilers run; on `true` they are
    /// ended and the compilation gives up.
    fn is_interrupted(&mut self) -> bool {
        false
    }

    /// One source unit is ready (compiled or taken from the cache).
    fn unit_ready(&mut self, unit: &UnitReady<'_>) {
        let _ = unit;
    }
}

/// What is known when one source unit becomes ready.
#[derive(Debug, Clone)]
pub struct UnitReady<'a> {
    /// The unit's name, as the caller gave it.
    pub name: &'a str,
    /// Units ready so far, this one included.
    pub done: usize,
    /// Distinct units in this call.
    pub total: usize,
    /// Seconds since the call began.
    pub seconds: f64,
    /// The unit came from the cache; no compiler ran.
    pub cached: bool,
}

/// A listener that ignores everything.
#[derive(Debug, Default, Clone, Copy)]
pub struct Silent;

impl Progress for Silent {}
