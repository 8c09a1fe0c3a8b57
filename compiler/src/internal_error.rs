//! A panic of ours as an error with a sentence, for the edges: the program and the Python package.
//!
//! A user's model never makes library code panic. If it does all the same, that is a mistake in Shorthaul: the user is
//! told where it is and asked to report it, and does not lose the process.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// A mistake in Shorthaul itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "internal error at {place}: {what}; this is a mistake in Shorthaul {}: please report it, with the model if \
     you can", env!("CARGO_PKG_VERSION")
)]
pub struct InternalError {
    /// What did not hold.
    pub what: String,
    /// File and line of the source.
    pub place: String,
}

/// Bytes of stack of a thread that works: as much as deeply nested models take.
pub const STACK_BYTES: usize = 256 << 20;

/// Calls of [`caught`] that are under way, on any thread.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
/// The first panic since a call of [`caught`] began: on a thread that it started, later ones follow from it.
static FIRST: Mutex<Option<InternalError>> = Mutex::new(None);

thread_local! {
    /// The innermost panic of this thread.
    static OWN: Cell<Option<InternalError>> = const { Cell::new(None) };
}

/// Does `work`; a panic in it, or on a thread that it starts and waits for, is an error and says nothing to
/// standard error (unless `RUST_BACKTRACE` is set).
///
/// # Errors
/// `work` panicked. What it was working on is to be given up.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, InternalError> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if UNDER_WAY.load(Ordering::SeqCst) == 0 || std::env::var_os("RUST_BACKTRACE").is_some()
            {
                before(info);
            }
            remember(info);
        }));
    });
    if UNDER_WAY.fetch_add(1, Ordering::SeqCst) == 0 {
        *first() = None;
    }
    OWN.set(None);
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    done.map_err(|payload| {
        // The thread that waited for a panicked one knows no more than that it panicked.
        let followed = said(&*payload).is_some_and(|text| text.contains("scoped thread panicked"));
        let known = match (followed, OWN.take()) {
            (false, Some(own)) => Some(own),
            (_, own) => first().clone().or(own),
        };
        known.unwrap_or_else(|| InternalError {
            what: said(&*payload).unwrap_or("a panic").to_string(),
            place: "an unknown place".to_string(),
        })
    })
}

/// Like [`caught`], on a thread with a large stack: nested models and long sums make deep calls.
///
/// # Errors
/// `work` panicked, or the system has no thread to give.
pub fn caught_deep<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, InternalError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("shorthaul".to_string())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || caught(work));
        let refused = |what: String| InternalError {
            what,
            place: "the start of a thread".to_string(),
        };
        match thread {
            Ok(thread) => thread
                .join()
                .unwrap_or_else(|_| Err(refused("it ended early".to_string()))),
            Err(error) => Err(refused(error.to_string())),
        }
    })
}

fn first() -> std::sync::MutexGuard<'static, Option<InternalError>> {
    FIRST.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember(info: &PanicHookInfo<'_>) {
    let found = InternalError {
        what: said(info.payload()).unwrap_or("a panic").to_string(),
        place: info
            .location()
            .map_or("an unknown place".to_string(), ToString::to_string),
    };
    first().get_or_insert_with(|| found.clone());
    OWN.set(Some(found));
}

fn said(payload: &(dyn std::any::Any + Send)) -> Option<&str> {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first panic is the process's: one test at a time.
    static ALONE: Mutex<()> = Mutex::new(());

    fn alone() -> std::sync::MutexGuard<'static, ()> {
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn a_panic_is_an_error_that_says_where() {
        let _guard = alone();
        assert_eq!(caught(|| 3), Ok(3));
        let error = caught(|| [1, 2][std::hint::black_box(5)]).expect_err("caught");
        let text = error.to_string();
        for part in [
            "internal error at ",
            "internal_error.rs:",
            "len is 2",
            "report",
        ] {
            assert!(text.contains(part), "`{part}` is not in {text}");
        }
        assert_eq!(caught(|| 4), Ok(4));
    }

    #[test]
    fn a_panic_of_a_thread_inside_is_the_one_that_is_told() {
        let _guard = alone();
        let inside = || {
            std::thread::scope(|scope| {
                scope.spawn(|| panic!("at the bottom"));
            });
        };
        let error = caught(inside).expect_err("caught");
        assert!(error.what.contains("at the bottom"), "{error}");
    }

    #[test]
    fn a_deep_call_has_a_stack() {
        let _guard = alone();
        fn depth(n: usize) -> usize {
            let frame = std::hint::black_box([n; 32]);
            if n == 0 {
                0
            } else {
                depth(n - 1) + frame[5] / n
            }
        }
        assert_eq!(caught_deep(|| depth(200_000)), Ok(200_000));
        let error = caught_deep(|| -> () { panic!("deep") }).expect_err("caught");
        assert_eq!(error.what, "deep");
    }
}
