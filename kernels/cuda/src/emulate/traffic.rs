//! What a launch moves between the device's memory and its multiprocessors, counted.
//!
//! Owns the grouping of accesses into those that a warp makes together, and the sectors each such
//! access touches. Never knows of kernels' meaning or of time.

use super::Memory;
use std::collections::BTreeMap;

/// The fewest bytes that memory moves.
const SECTOR_BYTES: u64 = 32;
const LANES: u32 = 32;

/// Accesses in one direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Direction {
    /// Instructions: accesses that the threads of a warp make together.
    pub instructions: u64,
    /// Bytes that threads asked for, each time they did.
    pub bytes: u64,
    /// Different sectors of 32 bytes that each instruction touched, summed up.
    pub sectors: u64,
    /// Different sectors that each block touched, summed up: what moves if a multiprocessor's cache
    /// holds what the threads of a block meet again.
    pub block_sectors: u64,
    /// Bytes of different elements: for loads only those that the launch had not written itself before.
    pub unique_bytes: u64,
    /// Bytes asked for by the width of a thread's access in bytes (16: full vectors).
    pub bytes_by_width: BTreeMap<u32, u64>,
}

/// Global memory traffic of one launch. Shared memory is not counted.
///
/// A device executes an access for the active threads of a warp at once; fibers execute it one by one.
/// Accesses of a warp's threads are taken together if they stand at one place of the compiled text and
/// each is the n-th there of its thread. That is what a device does where threads of a warp take the
/// same path. Where they part (loops of different lengths around the access, or an early end), n-th
/// accesses are joined that a device may make apart. Copies that the compiler makes of one access
/// count as places of their own, for all threads alike.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Reads.
    pub loads: Direction,
    /// Writes.
    pub stores: Direction,
}

impl Traffic {
    /// The traffic of work that reads and writes these bytes, each once.
    pub fn once(read: u64, written: u64) -> Traffic {
        let direction = |bytes: u64| Direction {
            bytes,
            sectors: bytes.div_ceil(SECTOR_BYTES),
            block_sectors: bytes.div_ceil(SECTOR_BYTES),
            unique_bytes: bytes,
            ..Direction::default()
        };
        Traffic {
            loads: direction(read),
            stores: direction(written),
        }
    }

    /// Bytes that any kernel computing the same would move: each element once.
    pub fn unique_bytes(&self) -> u64 {
        self.loads.unique_bytes + self.stores.unique_bytes
    }

    /// Bytes that move between the caches and the multiprocessors: whole sectors, as often as asked.
    pub fn sector_bytes(&self) -> u64 {
        SECTOR_BYTES * (self.loads.sectors + self.stores.sectors)
    }

    /// Bytes that move beyond the multiprocessors' own caches: sectors once for each block.
    pub fn block_bytes(&self) -> u64 {
        SECTOR_BYTES * (self.loads.block_sectors + self.stores.block_sectors)
    }

    /// The share of the moved bytes that had to move: 1 where every sector is used whole and once.
    pub fn efficiency(&self) -> f64 {
        self.unique_bytes() as f64 / self.sector_bytes().max(1) as f64
    }

    /// Adds another launch's traffic.
    pub fn add(&mut self, other: &Traffic) {
        let pairs = [
            (&mut self.loads, &other.loads),
            (&mut self.stores, &other.stores),
        ];
        for (sum, more) in pairs {
            sum.instructions += more.instructions;
            sum.bytes += more.bytes;
            sum.sectors += more.sectors;
            sum.block_sectors += more.block_sectors;
            sum.unique_bytes += more.unique_bytes;
            for (width, bytes) in &more.bytes_by_width {
                *sum.bytes_by_width.entry(*width).or_insert(0) += bytes;
            }
        }
    }
}

/// One access of one thread.
pub(super) struct AccessMade {
    /// Index of the buffer.
    pub(super) buffer: usize,
    /// Where in the compiled text.
    pub(super) site: usize,
    pub(super) block: u32,
    pub(super) thread: u32,
    /// Position of the first byte.
    pub(super) offset: u64,
    pub(super) bytes: u32,
    pub(super) write: bool,
}

const READ: u8 = 1;
const WRITTEN: u8 = 2;

/// Warp, place in the text, how many times the thread was there before, buffer, direction, sector.
type Touch = (u32, usize, u32, usize, bool, u64);

/// Counts one launch.
pub(super) struct Counter {
    /// Bits for each element of each buffer, and its size in bytes.
    elements: Vec<(Vec<u8>, u64)>,
    block: Option<u32>,
    /// How often each thread came by each place.
    visits: Vec<Vec<(usize, u32)>>,
    /// What the block touched.
    touches: Vec<Touch>,
    traffic: Traffic,
}

impl Counter {
    pub(super) fn new(memory: &Memory) -> Self {
        let buffers = memory.buffers.iter();
        Counter {
            elements: buffers
                .map(|b| (vec![0; b.n_elements], b.dtype.bytes() as u64))
                .collect(),
            block: None,
            visits: vec![Vec::new(); 1024],
            touches: Vec::new(),
            traffic: Traffic::default(),
        }
    }

    /// Counts an access; blocks come one after another.
    pub(super) fn add(&mut self, a: &AccessMade) {
        if self.block != Some(a.block) {
            self.end_block();
            self.block = Some(a.block);
        }
        let visits = &mut self.visits[a.thread as usize];
        let visit = match visits.iter_mut().find(|(site, _)| *site == a.site) {
            Some((_, n)) => {
                *n += 1;
                *n
            }
            None => {
                visits.push((a.site, 0));
                0
            }
        };
        let last = a.offset + u64::from(a.bytes) - 1;
        let warp = a.thread / LANES;
        for sector in a.offset / SECTOR_BYTES..=last / SECTOR_BYTES {
            self.touches
                .push((warp, a.site, visit, a.buffer, a.write, sector));
        }
        let (known, size) = &mut self.elements[a.buffer];
        let direction = match a.write {
            true => &mut self.traffic.stores,
            false => &mut self.traffic.loads,
        };
        let new = if a.write { WRITTEN } else { READ };
        let old = if a.write { WRITTEN } else { READ | WRITTEN };
        for element in a.offset / *size..=last / *size {
            let bits = &mut known[element as usize];
            if *bits & old == 0 {
                direction.unique_bytes += *size;
            }
            *bits |= new;
        }
        direction.bytes += u64::from(a.bytes);
        *direction.bytes_by_width.entry(a.bytes).or_insert(0) += u64::from(a.bytes);
    }

    fn end_block(&mut self) {
        let mut touches = std::mem::take(&mut self.touches);
        touches.sort_unstable();
        touches.dedup();
        let mut before = None;
        for (warp, site, visit, buffer, write, _) in &touches {
            let instruction = Some((*warp, *site, *visit, *buffer, *write));
            let direction = self.direction(*write);
            direction.instructions += u64::from(instruction != before);
            direction.sectors += 1;
            before = instruction;
        }
        let place = |t: &Touch| (t.4, t.3, t.5);
        touches.sort_unstable_by_key(place);
        touches.dedup_by_key(|t| place(t));
        for (.., write, _) in &touches {
            self.direction(*write).block_sectors += 1;
        }
        touches.clear();
        self.touches = touches;
        self.visits.iter_mut().for_each(Vec::clear);
    }

    fn direction(&mut self, write: bool) -> &mut Direction {
        match write {
            true => &mut self.traffic.stores,
            false => &mut self.traffic.loads,
        }
    }

    pub(super) fn finish(mut self) -> Traffic {
        self.end_block();
        self.traffic
    }
}
