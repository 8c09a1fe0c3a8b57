//! Long work away from the interpreter: what it tells Python, and how a person stops it.
//!
//! Owns the interpreter lock around that work. Never decides what is compiled.

use crate::program::Failure;
use compiler::CompileError;
use compiler::internal_error::{STACK_BYTES, caught};
use compiler::kernels::progress::{Progress, UnitReady};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// Longest time until Python sees a signal.
const PATIENCE: Duration = Duration::from_millis(50);

/// Runs work without the interpreter lock; a failure, or a panic, becomes an error of Python's.
///
/// # Errors
/// What the work failed with, as the exception of its kind.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Failure> + Send,
) -> PyResult<T> {
    let done = py.detach(|| caught(work).unwrap_or_else(|e| Err(Failure::Internal(e))));
    done.map_err(|failure| failure.into_python(py))
}

/// Says whether some work is abandoned: nobody waits for it any more.
#[derive(Clone, Default)]
pub(crate) struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    fn is(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Like [`detached`], but a signal (Ctrl-C) ends the wait at once.
///
/// Planning does not look for signals. It goes on in a thread of its own until it comes to a compiler, where
/// its listener finds that the work is [`Abandoned`].
///
/// # Errors
/// Those of [`detached`]; what the signal's handler raised; no thread could be started.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(Abandoned) -> Result<T, Failure> + Send + 'static,
) -> PyResult<T> {
    let abandoned = Abandoned::default();
    let (send, receive) = channel();
    let run = {
        let abandoned = abandoned.clone();
        move || {
            let done = caught(|| work(abandoned)).unwrap_or_else(|e| Err(Failure::Internal(e)));
            // Nobody may be waiting.
            let _ = send.send(done);
        }
    };
    thread::Builder::new().stack_size(STACK_BYTES).spawn(run)?;
    // The receiver moves into the closure that waits without the lock, and back.
    let mut receive = receive;
    loop {
        let (waited, end) = py.detach(move || (receive.recv_timeout(PATIENCE), receive));
        receive = end;
        match waited {
            Ok(done) => return done.map_err(|failure| failure.into_python(py)),
            Err(RecvTimeoutError::Timeout) => {
                // Python looks at signals on its main thread alone; elsewhere there are none.
                if let Err(raised) = py.check_signals() {
                    abandoned.0.store(true, Ordering::Relaxed);
                    return Err(raised);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err(
                    "the thread that compiles has ended",
                ));
            }
        }
    }
}

/// Passes progress on to a Python callable, and warnings to Python's `warnings`; stops for signals.
pub(crate) struct Listener {
    progress: Option<Py<PyAny>>,
    raised: Option<PyErr>,
    abandoned: Abandoned,
}

impl Listener {
    pub(crate) fn new(progress: Option<Py<PyAny>>) -> Listener {
        Listener::of(progress, Abandoned::default())
    }

    /// A listener of work that may be abandoned.
    pub(crate) fn of(progress: Option<Py<PyAny>>, abandoned: Abandoned) -> Listener {
        Listener {
            progress,
            raised: None,
            abandoned,
        }
    }

    fn tell(&self, done: usize, total: usize, name: &str) {
        let Some(progress) = self.progress.as_ref().filter(|_| !self.abandoned.is()) else {
            return;
        };
        Python::attach(|py| {
            if let Err(error) = progress.call1(py, (done, total, name)) {
                error.write_unraisable(py, None);
            }
        });
    }

    /// The error, or what stopped the work.
    pub(crate) fn failure(self, error: CompileError) -> Failure {
        self.raised
            .map_or(Failure::Compile(error), Failure::Interrupted)
    }
}

impl Progress for Listener {
    fn warn(&mut self, message: &str) {
        if self.abandoned.is() {
            return;
        }
        Python::attach(|py| {
            let warn = || -> PyResult<()> {
                py.import("warnings")?.call_method1("warn", (message,))?;
                Ok(())
            };
            if let Err(error) = warn() {
                error.write_unraisable(py, None);
            }
        });
    }

    fn units_written(&mut self, total: usize) {
        self.tell(0, total, "");
    }

    fn is_interrupted(&mut self) -> bool {
        if self.abandoned.is() {
            return true;
        }
        self.raised = Python::attach(|py| py.check_signals().err());
        self.raised.is_some()
    }

    fn unit_ready(&mut self, unit: &UnitReady<'_>) {
        self.tell(unit.done, unit.total, unit.name);
    }
}
