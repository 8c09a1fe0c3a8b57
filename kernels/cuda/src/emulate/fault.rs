//! What the emulator finds wrong with a kernel.
//!
//! Owns the typed faults and their sentences.

use std::fmt;

/// Something a launch did that a GPU would not forgive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kernel.
    pub kernel: String,
    /// The part of the model it computes.
    pub origin: String,
    /// The block's number, counted x first.
    pub block: u32,
    /// The thread in the block.
    pub thread: u32,
    /// What it did.
    pub kind: FaultKind,
}

/// A read or a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A read.
    Read,
    /// A write.
    Write,
}

/// The sorts of faults. Elements are counted from the start of the named array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FaultKind {
    /// An element outside the array of `n`.
    OutOfBounds {
        /// The buffer or shared array.
        array: String,
        /// The element.
        element: i64,
        /// Elements of the array.
        n: i64,
        /// What was tried.
        access: Access,
    },
    /// A read of an element that nothing was written to.
    Uninitialized {
        /// The buffer or shared array.
        array: String,
        /// The element.
        element: i64,
    },
    /// Two accesses to one element, one of them a write, that nothing orders.
    Race {
        /// The buffer or shared array.
        array: String,
        /// The element.
        element: i64,
        /// The later access as executed here.
        access: Access,
        /// The block of the earlier one.
        other_block: u32,
        /// The thread of the earlier one, or the first of its warp where several read.
        other_thread: u32,
        /// The earlier access.
        other_access: Access,
    },
    /// An element or vector whose address is not a multiple of its size.
    Misaligned {
        /// The buffer or shared array.
        array: String,
        /// The element, or the vector's first.
        element: i64,
        /// Elements of the vector, 1 for a single one.
        width: i64,
    },
    /// Threads wait at a barrier that others wait for elsewhere or have left behind.
    DivergentBarrier {
        /// The line of the kernel's text at which the first such thread waits.
        line: u32,
        /// Where each thread is.
        threads: String,
    },
    /// Lanes wait in an exchange of their warp that others do not take part in.
    MissingLanes {
        /// The line of the kernel's text at which the first such thread waits.
        line: u32,
        /// Where each thread is.
        threads: String,
    },
    /// The launch made more accesses to memory than its limit.
    Endless,
    /// An asynchronous product reads what was written without a fence between the write and the barrier.
    Unfenced {
        /// The shared memory.
        array: String,
        /// The byte of it.
        element: i64,
        /// The thread that wrote it.
        writer: u32,
    },
    /// An asynchronous product without a fence of its accumulators since the group before.
    SumsUnfenced,
    /// A division of integers by zero, or one whose quotient is too large; the launch ended there.
    DividedByZero,
    /// More shared memory than the launch asked for or the device has.
    SharedTooLarge {
        /// The array that does not fit.
        array: String,
        /// Bytes needed with it.
        bytes: i64,
    },
    /// A function of the prelude made for blocks of another size.
    BlockSize {
        /// Threads that it was made for.
        threads: i64,
    },
    /// Elements of an output that were not written when the launch had ended.
    Unwritten {
        /// The buffer.
        array: String,
        /// How many.
        n: usize,
        /// The first.
        first: usize,
    },
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Read => "read",
            Access::Write => "write",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault {
            kernel,
            origin,
            block,
            thread,
            kind,
        } = self;
        write!(
            f,
            "kernel {kernel} (of {origin}), block {block}, thread {thread}: {kind}"
        )
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultKind::OutOfBounds {
                array,
                element,
                n,
                access,
            } => write!(f, "{access} of {array}[{element}], which has {n} elements"),
            FaultKind::Uninitialized { array, element } => {
                write!(
                    f,
                    "read of {array}[{element}] before anything was written to it"
                )
            }
            FaultKind::Race {
                array,
                element,
                access,
                other_block,
                other_thread,
                other_access,
            } => write!(
                f,
                "{access} of {array}[{element}] races with the {other_access} by block {other_block}, \
                 thread {other_thread}"
            ),
            FaultKind::Misaligned {
                array,
                element,
                width: 1,
            } => write!(f, "{array}[{element}] is not aligned"),
            FaultKind::Misaligned {
                array,
                element,
                width,
            } => write!(
                f,
                "vector of {width} elements at {array}[{element}] is not aligned"
            ),
            FaultKind::DivergentBarrier { line, threads } => {
                write!(
                    f,
                    "barrier at line {line} not reached by all threads: {threads}"
                )
            }
            FaultKind::MissingLanes { line, threads } => write!(
                f,
                "exchange of the warp at line {line} not reached by all its lanes: {threads}"
            ),
            FaultKind::Endless => {
                f.write_str("more accesses to memory than the limit: a loop without end?")
            }
            FaultKind::Unfenced {
                array,
                element,
                writer,
            } => write!(
                f,
                "an asynchronous product or copy uses {array}[{element}], which thread {writer} wrote without a \
                 fence (sh_async_fence, or sh_phases_begin for barriers) before the block met"
            ),
            FaultKind::SumsUnfenced => f.write_str(
                "an asynchronous product without a fence of its sums (sh_wgmma_fence) in its group",
            ),
            FaultKind::DividedByZero => f.write_str("an integer is divided by zero"),
            FaultKind::SharedTooLarge { array, bytes } => {
                write!(
                    f,
                    "shared array {array} needs {bytes} bytes with what is before it"
                )
            }
            FaultKind::BlockSize { threads } => {
                write!(
                    f,
                    "reduction over a block of {threads} threads, which this one is not"
                )
            }
            FaultKind::Unwritten { array, n, first } => {
                write!(
                    f,
                    "{n} elements of {array} were never written, the first is {first}"
                )
            }
        }
    }
}
