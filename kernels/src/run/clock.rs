//! The clock that times launches.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

/// The clock that times launches.
pub(super) struct Clock {
    start: Instant,
    is_alone: bool,
}

impl Clock {
    pub(super) fn new(is_alone: bool) -> Clock {
        Clock {
            start: Instant::now(),
            is_alone,
        }
    }

    pub(super) fn now(&self) -> Duration {
        let own = self.is_alone.then(thread_time).flatten();
        own.unwrap_or_else(|| self.start.elapsed())
    }
}

/// CPU time of the calling thread so far, if the system tells it.
fn thread_time() -> Option<Duration> {
    #[cfg(unix)]
    {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the call writes to `time` alone, which lives until it returns.
        let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
        (status == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
    #[cfg(not(unix))]
    {
        None
    }
}
