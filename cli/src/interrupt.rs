//! Signals: Ctrl-C and termination remove unfinished files and end the program with 130; a limit on the size
//! of files is an error of whoever writes.

use signal_hook::consts::SIGXFSZ;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Installs the handlers.
///
/// # Errors
/// There is one already, or the system refuses it.
pub fn install() -> anyhow::Result<()> {
    // Handled, the signal leaves the write to fail with a reason.
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    ctrlc::set_handler(|| {
        onnx::file::abandon(|| {
            crate::progress::clear();
            std::process::exit(130)
        });
    })?;
    Ok(())
}
