//! Text of products by warpgroups whose operands the copy engine brings: the products and the swizzled
//! memory of [`super::warpgroup`], without a thread's registers and instructions for copies.
//!
//! # The loop
//! One warp beside the warpgroups that multiply asks the engine for blocks of both operands, a box or a few
//! each. Every place in shared memory has two barriers: `full` ends a phase when the bytes of a block are
//! there, `empty` when every multiplying warp has read the block before. No barrier of the whole block is in
//! the loop: warpgroups run apart as far as the places allow.
//!
//! # Prediction (not measured)
//! As in [`super::warpgroup`], with the same bytes from the second-level cache (blocks do not share them by
//! clusters), so the same 50 to 65% of the peak bound the largest tile. The gain is what copy instructions
//! and the barrier of each step cost there. Registers by NVRTC: 154 and 90 to 96 in the two tiles,
//! of 224 and 112.

use super::kernel::{Size, banded_position, head_with, n_blocks, store_sums};
use super::store::combine;
use super::swizzle::Swizzled;
use super::warpgroup::{BAND, declare_sums, depth, products, staged, sums};
use super::{EmittedContraction, Job, Unsupported};
use crate::ParamType;
use kernels::contraction::text::CText;

/// Threads of the warp that asks for copies.
const ASKING: i64 = 32;

/// Emits the product and, if its reduction is split, the combination.
///
/// # Errors
/// [`Unsupported::Warpgroup`].
pub(super) fn emit(job: &Job<'_>, done: &mut EmittedContraction) -> Result<(), Unsupported> {
    let tile = &job.tile;
    let (a, b) = staged(job)?;
    let map = |x: &Swizzled<'_>| {
        let map = x.map().map(ParamType::Map);
        map.map_err(|reason| Unsupported::Warpgroup { reason })
    };
    let split = tile.parts > 1;
    let (places, min_blocks) = depth(tile);
    let size = Size {
        grid: n_blocks(job) as u64,
        threads: tile.threads + ASKING,
        min_blocks,
    };
    let head = head_with(job, split, [map(&a)?, map(&b)?]);
    let mut t = head.open(&job.name, &size, job.sink.epilogue.filter(|_| !split));
    declare(&mut t, job, (&a, &b), places);
    t.line(format!("if (warpgroup == {}) {{", tile.threads / 128));
    ask(&mut t, job, (&a, &b), places);
    t.line("} else {");
    declare_sums(&mut t, tile.n);
    multiply(&mut t, job, (&a, &b), places);
    store_sums(&mut t, job, &sums(tile.n));
    t.close(2);
    head.close(job.name.clone(), t, size, done);
    if split {
        combine(job, done);
    }
    Ok(())
}

/// Shared memory, barriers, the place of the block of threads.
fn declare(t: &mut CText, job: &Job<'_>, (a, b): (&Swizzled<'_>, &Swizzled<'_>), places: i64) {
    t.line("SH_DYNAMIC(pool);");
    let mut at = 0;
    for (x, stage) in [("a", a), ("b", b)] {
        let words = places * stage.words();
        t.line(format!("SH_CARVE(unsigned, {x}_s, pool, {at}, {words});"));
        at += words * 4;
    }
    for name in ["full", "empty"] {
        t.line(format!("SH_CARVE(sh_u64, {name}, pool, {at}, {places});"));
        at += places * 8;
    }
    banded_position(t, job, BAND);
    let terms = job.tile.k;
    t.line(format!(
        "const int n_steps = (k_end - k_begin + {})/{terms};",
        terms - 1
    ));
    t.line("const int warpgroup = sh_shuffle(SH_TID / 128, 0);");
    t.line("if (SH_TID == 0) {");
    t.line(format!("for (int s = 0; s < {places}; s++) {{"));
    t.line("sh_phase_init(full, s, 1);");
    t.line(format!(
        "sh_phase_init(empty, s, {});",
        job.tile.threads / 32
    ));
    t.close(1);
    t.line("sh_phases_begin();");
    t.close(1);
    t.line("SH_SYNC(); /* the barriers are there */");
}

/// One thread asks for all blocks, each as soon as its place is read.
fn ask(t: &mut CText, job: &Job<'_>, (a, b): (&Swizzled<'_>, &Swizzled<'_>), places: i64) {
    t.line("if (SH_LANE == 0) {");
    t.line("for (int step = 0; step < n_steps; step++) {");
    t.line(format!(
        "const int s = step % {places}, k0 = k_begin + step*{};",
        job.tile.k
    ));
    t.line(format!(
        "sh_phase_wait(empty, s, step / {places} % 2 ^ 1); /* the place is read */"
    ));
    t.line(format!(
        "sh_phase_expect(full, s, {});",
        a.bytes() + b.bytes()
    ));
    a.copy_boxes(t, "block_m");
    b.copy_boxes(t, "block_n");
    t.close(2);
}

/// Warpgroups multiply block after block; the one before is read when its products have ended.
fn multiply(t: &mut CText, job: &Job<'_>, (a, b): (&Swizzled<'_>, &Swizzled<'_>), places: i64) {
    t.line("for (int step = 0; step < n_steps; step++) {");
    t.line(format!("const int now = step % {places};"));
    t.line(format!(
        "sh_phase_wait(full, now, step / {places} % 2); /* the block is there */"
    ));
    products(t, job, (a, b));
    t.line("sh_wgmma_wait<1>(acc); /* the products of the step before */");
    t.line(format!(
        "if (step > 0 && SH_LANE == 0) sh_phase_arrive(empty, (step - 1) % {places});"
    ));
    t.close(1);
    t.line("sh_wgmma_wait<0>(acc); /* all products */");
}
