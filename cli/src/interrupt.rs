//! Signals: Ctrl-C and termination remove unfinished files and end the program with 130; a limit on the size
//! of files is an error of whoever writes.

use signal_hook::consts::SIGXFSZ;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the first signal only asks to stop.
static IS_PATIENT: AtomicBool = AtomicBool::new(false);
/// Whether a signal has asked to stop.
static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// Installs the handlers.
///
/// # Errors
/// There is one already, or the system refuses it.
pub fn install() -> anyhow::Result<()> {
    // Handled, the signal leaves the write to fail with a reason.
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    ctrlc::set_handler(|| {
        if IS_PATIENT.load(Ordering::SeqCst) && !IS_ASKED.swap(true, Ordering::SeqCst) {
            return;
        }
        onnx::file::abandon(|| {
            crate::progress::clear();
            std::process::exit(130)
        });
    })?;
    Ok(())
}

/// Says whether the first signal, from now on, only asks to stop; a second one then ends the program.
pub fn be_patient(is_patient: bool) {
    IS_PATIENT.store(is_patient, Ordering::SeqCst);
}

/// Whether a signal has asked to stop.
pub fn is_asked() -> bool {
    IS_ASKED.load(Ordering::SeqCst)
}
