//! The cost model of a contraction's blocking plan: estimated cycles, and the time that they take on a machine.
//! Chooses nothing.
//!
//! A cycle is the time in which a thread can do 64 operations of a product; with vectors of 16 floats that is one
//! of the processor's.

use graph::{Level, Machine};

use super::blocking::{
    ContractionPlan, VectorSource, Wishes, block_size, div_up, must_stage, product,
};

/// Operations of a product in a cycle.
const OPERATIONS: f64 = 64.0;
/// Part of the second-level cache that blocks may fill.
const ROOM: f64 = 0.7;

/// The machine in cycles.
struct Cycles {
    /// Bytes of blocks that stay in the second-level cache.
    room: f64,
    /// Cycles of a byte from the third-level cache.
    l3: f64,
    /// Cycles of a byte from memory.
    memory: f64,
}

impl Cycles {
    fn new(machine: &Machine) -> Cycles {
        let cycles_per_us = machine.product_operations_per_us as f64 / OPERATIONS;
        let of_byte = |level: Level| cycles_per_us / level.bytes_per_us.max(1) as f64;
        Cycles {
            room: machine.l2.bytes as f64 * ROOM,
            l3: of_byte(machine.l3),
            memory: of_byte(machine.memory),
        }
    }
}

/// Nanoseconds that `cycles` cycles take.
pub(super) fn ns(cycles: f64, w: &Wishes) -> f64 {
    cycles * OPERATIONS * 1e3 / w.machine.product_operations_per_us.max(1) as f64
}

/// How often packing fetches a cache line of the vector operand: an operand beyond the second-level
/// cache is fetched again by each block that uses only a part of the line.
fn again(p: &ContractionPlan, room: f64) -> f64 {
    let s = &p.shape;
    let element = p.vector.element;
    if (product(&s.n) * product(&s.k) * element.bytes()) as f64 <= room || s.diagonal.is_some() {
        return 1.0;
    }
    let panels = div_up(p.panels(), p.n_chunks);
    let mut columns: Vec<(i64, i64)> = Vec::new();
    let mut room = div_up(panels, p.inner_panels());
    for d in s.n[..s.n.len() - 1].iter().rev() {
        columns.push((d.b, d.size.min(room.max(1))));
        room = div_up(room, d.size);
    }
    let inner = p.n_inner();
    columns.push((inner.b, inner.size.min(panels * p.nr())));
    let terms = s.k.iter().map(|d| (d.b, block_size(p, d.id)));
    let mut steps: Vec<(i64, i64)> = terms.chain(columns).filter(|d| d.1 > 1).collect();
    steps.sort_unstable();
    let mut run = 1;
    for (step, size) in steps {
        if step == run {
            run *= size;
        }
    }
    element.per_line() as f64 / run.min(element.per_line()) as f64
}

/// Estimated cycles of the slowest thread.
pub(super) fn cost(p: &ContractionPlan, w: &Wishes) -> f64 {
    let s = &p.shape;
    let Cycles { room, l3, memory } = Cycles::new(&w.machine);
    let f = |x: i64| x as f64;
    let (m, n, k, batch) = (
        f(product(&s.m)),
        f(product(&s.n)),
        f(product(&s.k)),
        f(product(&s.batch)),
    );
    let (m_blocks, k_blocks) = (f(p.m_cut.count(&s.m)), f(p.k_cut.count(&s.k)));
    let items = f(p.parts) * batch * m_blocks * f(p.n_chunks);
    let threads = f(w.threads);
    let share = (items / threads).ceil() / items;
    let kp = f(p.k_block());
    let each = f(p.vector.element.bytes());
    let a_bytes = f(p.a_numbers) * each;
    let chunk = f(div_up(p.panels(), p.n_chunks) * p.nr());
    let rows = m / m_blocks;
    let b_bytes = kp * f(p.nr()) * each;
    let column = s.m[s.m.len() - 1].a == 1;

    // Arithmetic, slowed by what does not fit.
    let lanes = f(p.panels() * p.nr());
    let calls = batch * k_blocks * f(p.panels()) * (m / f(p.tiling.largest())).max(1.0);
    let mut slow = 1.0;
    let resident = a_bytes
        + match p.source {
            VectorSource::Thread => chunk * kp * each,
            _ => b_bytes,
        };
    slow += (resident / room - 1.0).clamp(0.0, 2.0) * 0.4;
    if column {
        slow += ((kp - 512.0) / 4096.0).clamp(0.0, 0.3);
    }
    if p.source == VectorSource::Direct {
        slow += 0.04 + ((kp - 512.0) / 2048.0).clamp(0.0, 0.4);
    }
    let mut cycles = batch * m * lanes * k * each / 128.0 * slow + calls * 60.0;

    // Movement.
    if must_stage(p, w) {
        let again = if p.n_chunks > 1 && k_blocks > 1.0 {
            f(p.n_chunks)
        } else {
            threads.min(f(p.n_chunks))
        };
        cycles += batch * m_blocks * k_blocks * a_bytes * again * (1.5 * l3);
    } else {
        cycles += batch * m_blocks * k_blocks * a_bytes * f(p.n_chunks) * (0.5 * l3);
    }
    let b_total = n * k * each;
    let fetched = b_total * (again(p, room) - 1.0);
    let from = if b_total * f(p.n_chunks).recip() < room - a_bytes {
        0.1 * l3
    } else {
        0.7 * l3
    };
    cycles += match p.source {
        VectorSource::Shared => {
            batch * (b_total * (1.5 * memory + m_blocks * from) + fetched * memory)
                + 3000.0 * threads
        }
        VectorSource::Direct => batch * m_blocks * b_total * l3,
        VectorSource::Thread => {
            let once = p.n_chunks == 1 && k_blocks == 1.0;
            batch
                * (b_total * memory + fetched * memory)
                * if once {
                    m_blocks.min(threads)
                } else {
                    m_blocks
                }
        }
    };
    let block_out = rows * chunk * each;
    let out_bytes = batch * m * n * each;
    if block_out + a_bytes > room && p.panels() > 1 {
        cycles += out_bytes * (0.6 * l3);
    }
    // All members of a batch inside the positions share lines and pages of a block.
    if p.batch_inside() && (a_bytes + block_out) * batch > room {
        cycles += batch * (m_blocks * a_bytes + out_bytes / batch) * (1.5 * memory);
    }
    if k_blocks > 1.0 {
        let far = if block_out > 8e5 { 1.5 * l3 } else { 0.6 * l3 };
        cycles += out_bytes * 2.0 * (k_blocks / f(p.parts)) * far * f(p.parts);
    }
    if p.to_scratch {
        cycles += out_bytes * (f(p.parts) + 1.0) * memory + 3000.0 * threads;
    }
    if w.epilogue {
        cycles += out_bytes
            * if block_out + a_bytes > room {
                1.5 * l3
            } else {
                0.0
            };
    }
    cycles * share + items / threads * 150.0
}
