//! Traps of the processor inside a launch become faults of the kernel instead of the process's end.
//!
//! Owns the signal handler for arithmetic traps. It concerns only the thread that runs a launch; for
//! any other the handler that was there before takes over.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

thread_local! {
    /// What ends the launch of this thread.
    static ON_TRAP: Cell<Option<unsafe extern "C" fn()>> = const { Cell::new(None) };
}

/// What handled the signal before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Runs `launch`; a trap in it calls `on_trap`, which must leave the fiber for good.
pub(super) fn during(on_trap: unsafe extern "C" fn(), launch: impl FnOnce()) {
    BEFORE.get_or_init(install);
    ON_TRAP.with(|cell| cell.set(Some(on_trap)));
    launch();
    ON_TRAP.with(|cell| cell.set(None));
}

fn install() -> libc::sigaction {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both structures are whole; the handler does nothing but switch stacks or step aside.
    // The signal stays unblocked in the handler, which is not returned from.
    unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_NODEFER;
        libc::sigaction(libc::SIGFPE, &action, before.as_mut_ptr());
        before.assume_init()
    }
}

extern "C" fn handler(_signal: libc::c_int) {
    match ON_TRAP.with(Cell::get) {
        // SAFETY: the trap is synchronous, so this is the fiber that divided; it holds no lock.
        Some(on_trap) => unsafe { on_trap() },
        None => {
            let before = BEFORE.get().map_or(ptr::null(), ptr::from_ref);
            // SAFETY: what was there before, put back: the instruction traps again.
            unsafe { libc::sigaction(libc::SIGFPE, before, ptr::null_mut()) };
        }
    }
}
