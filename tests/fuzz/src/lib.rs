//! What the fuzz targets share: the stack that the program gives to its work, and a path beside which no data is.

/// The stack that `compiler::internal_error` gives to every command: nested models and long sums make deep calls.
const STACK_BYTES: usize = 256 << 20;

/// The path of a fuzzed model. Its folder does not exist, so that no external data of a model is found.
pub const PATH: &str = "no-such-folder/fuzzed.onnx";

/// Runs `work` with that stack. A panic ends the process, which the fuzzer takes as a finding.
pub fn deep(work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, work).expect("a thread");
        thread.join().expect("no panic");
    });
}
