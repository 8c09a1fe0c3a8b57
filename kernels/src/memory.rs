//! Memory that kernels work in: aligned blocks we own, and views of memory that
//! others own.
//!
//! Owns alignment and advice to the system about large blocks. Never decides what
//! is kept where: that is buffer planning.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Alignment in bytes of every block: a cache line, and a 512-bit vector.
pub const ALIGNMENT: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

mod sealed {
    pub trait Sealed {}
}

/// A number type whose every bit pattern is a value, so that slices of it may be
/// seen as bytes and back.
pub trait Element: sealed::Sealed + Copy + 'static {}

macro_rules! elements {
    ($($t:ty),*) => { $(impl sealed::Sealed for $t {} impl Element for $t {})* };
}
elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// An owned block of bytes aligned to [`ALIGNMENT`], at first zero.
pub struct AlignedBuffer {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the block is plain memory with one owner, like a `Vec<u8>`.
unsafe impl Send for AlignedBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// A zeroed block, or `None` if the system has no memory left. Blocks of
    /// several megabytes are aligned for huge pages and ask for them.
    pub fn zeroed(bytes: usize) -> Option<AlignedBuffer> {
        if bytes == 0 {
            return Some(AlignedBuffer::default());
        }
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc::alloc_zeroed(Self::layout(bytes)?) })?;
        advise_huge_pages(start, bytes);
        Some(AlignedBuffer { start, bytes })
    }

    /// A block that holds a copy of `values`.
    pub fn from_slice<T: Element>(values: &[T]) -> Option<AlignedBuffer> {
        let mut buffer = AlignedBuffer::zeroed(size_of_val(values))?;
        buffer.as_mut_slice().copy_from_slice(values);
        Some(buffer)
    }

    fn layout(bytes: usize) -> Option<Layout> {
        let align = if bytes >= 2 * HUGE_PAGE {
            HUGE_PAGE
        } else {
            ALIGNMENT
        };
        Layout::from_size_align(bytes, align).ok()
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the block has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its first byte; dangling but aligned if empty.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The whole values of type `T` that fit.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        // SAFETY: aligned to 64, initialized, any bits are a `T`, borrowed from self.
        unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().cast(), self.bytes / size_of::<T>())
        }
    }

    /// The whole values of type `T` that fit, to write.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: as for `as_slice`; the mutable borrow makes access exclusive.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.bytes / size_of::<T>())
        }
    }

    /// The block as a kernel's buffer.
    pub fn as_buffer(&mut self) -> Buffer<'_> {
        Buffer::new(self.as_mut_slice::<u8>())
    }
}

impl Default for AlignedBuffer {
    fn default() -> Self {
        AlignedBuffer {
            // Aligned though it points to nothing, so that slices of it are valid.
            start: NonNull::without_provenance(
                const { std::num::NonZeroUsize::new(ALIGNMENT).unwrap() },
            ),
            bytes: 0,
        }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.bytes).filter(|layout| layout.size() > 0) {
            // SAFETY: allocated in `zeroed` with the same layout.
            unsafe { alloc::dealloc(self.start.as_ptr(), layout) }
        }
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuffer({} bytes)", self.bytes)
    }
}

/// Large pages spare a kernel most of its address translation misses.
fn advise_huge_pages(start: NonNull<u8>, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= 2 * HUGE_PAGE {
        // SAFETY: the range was just allocated; the advice changes no contents,
        // and a refusal changes nothing.
        unsafe {
            libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

/// Memory lent to a program for one run.
#[derive(Debug, Clone, Copy)]
pub struct Buffer<'a> {
    start: *mut u8,
    bytes: usize,
    writable: bool,
    lent: PhantomData<&'a mut [u8]>,
}

impl<'a> Buffer<'a> {
    /// Values that kernels may read and write.
    pub fn new<T: Element>(values: &'a mut [T]) -> Buffer<'a> {
        Buffer {
            start: values.as_mut_ptr().cast(),
            bytes: size_of_val(values),
            writable: true,
            lent: PhantomData,
        }
    }

    /// Values that kernels may only read.
    pub fn read_only<T: Element>(values: &'a [T]) -> Buffer<'a> {
        Buffer {
            start: values.as_ptr().cast_mut().cast(),
            bytes: size_of_val(values),
            writable: false,
            lent: PhantomData,
        }
    }

    /// No memory, for an arena or a saved block that a program does not have.
    pub fn none() -> Buffer<'static> {
        Buffer {
            start: std::ptr::null_mut(),
            bytes: 0,
            writable: true,
            lent: PhantomData,
        }
    }

    /// Memory owned by somebody else, such as a tensor of PyTorch.
    ///
    /// # Safety
    /// For `'a`, the `bytes` bytes at `start` are allocated and initialized, and
    /// nobody else writes them; if `writable`, nobody else reads them either.
    pub unsafe fn from_raw(start: *mut u8, bytes: usize, writable: bool) -> Buffer<'a> {
        Buffer {
            start,
            bytes,
            writable,
            lent: PhantomData,
        }
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether kernels may write it.
    pub fn is_writable(&self) -> bool {
        self.writable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zeroed_and_aligned() {
        for bytes in [0, 1, 63, 64, 4096, 5 << 20] {
            let mut buffer = AlignedBuffer::zeroed(bytes).unwrap();
            assert_eq!(buffer.as_ptr() as usize % ALIGNMENT, 0);
            assert_eq!(buffer.as_slice::<u8>(), vec![0; bytes]);
            buffer.as_mut_slice::<u8>().fill(1);
            assert_eq!(buffer.as_slice::<f32>().len(), bytes / 4);
        }
        let copy = AlignedBuffer::from_slice(&[1.5f64, -2.0]).unwrap();
        assert_eq!(copy.as_slice::<f64>(), [1.5, -2.0]);
    }

    #[test]
    fn an_impossible_size_is_none() {
        assert!(AlignedBuffer::zeroed(usize::MAX).is_none());
    }
}
