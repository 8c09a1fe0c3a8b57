//! Ctrl-C and termination: unfinished files go, and the program ends with 130.

/// Installs the handler.
///
/// # Errors
/// There is one already.
pub fn install() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {
        onnx::file::abandon(|| {
            crate::progress::clear();
            std::process::exit(130)
        });
    })
}
