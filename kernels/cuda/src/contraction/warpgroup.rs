//! Text of products by warpgroups, for Hopper: 128 threads multiply 64 rows by all columns of a tile, with
//! both operands in swizzled shared memory ([`super::swizzle`]) and the sums in registers. What becomes of
//! the sums is [`super::store`]'s, so an epilogue is the same text as in other kernels.
//!
//! # The loop
//! Every thread copies (16 bytes at a time, [`BEHIND`] blocks less than there are places ahead) and
//! multiplies. A step waits for its own copies, fences them (copies are seen by the asynchronous products
//! only behind a fence), meets all threads at the one barrier of the step, issues its products, begins the
//! copies of a block to come, and waits for the products of the step *before*: the tensor cores always
//! have a group in their queue. A place is copied to again two steps after it was multiplied, since the
//! barrier of a step tells that all threads' products of the step before the last have ended.
//!
//! # Floor and prediction (not measured)
//! The floor is 2·m·n·k operations at 790 TFLOP/s, the ceiling measured on an H200, beside the bytes of
//! both operands and the result at 4.3 TB/s. A multiprocessor multiplies 2048 pairs a cycle, so a step of
//! 128×256×64 takes 1024 cycles. In it
//! - a product of 64×256×16 reads 2 + 8 KiB of shared memory in 128 cycles, 80 of the 128 bytes that a
//!   cycle gives; 64×128×16 reads 2 + 4 KiB in 64 cycles, 96; 64×64×16 reads 4 KiB in 32 cycles, 128: the
//!   smallest tile is bound by shared memory. (`mma.sync` in tiles of 64×32 a warp would read 192.)
//! - copies bring 48 KiB (128×256), 48 bytes a cycle; two blocks of 128×128 bring 64 bytes in the same
//!   time. The second-level cache gives 24 to 32 bytes a cycle to each multiprocessor at 5.5 to 7 TB/s
//!   together, as published for the H100 (not measured here). So without multicast to a cluster the
//!   prediction is 50 to 65% of the peak for the largest tile and 40 to 50% for the middle one, for products
//!   of thousands of rows and columns.
//!
//! With one block of threads a multiprocessor nothing is multiplied while sums are stored: at 20 instructions
//! a sum, 128 sums of 8 warps take 5000 cycles of four schedulers, beside 16,000 for 1024 terms. Two blocks
//! hide that behind each other's products, which may decide for the middle tile.
//!
//! Registers by NVRTC (the tests named `cuda_warpgroup` and `cuda_nvrtc_networks` print and gate them): 158 to
//! 168 in the largest tile with one block a multiprocessor (255 may be used), 93 to 101 in the middle one with
//! two (128), 60 to 72 in the smallest with three (168); no spills. Shared memory: 192, 96 and 64 KiB.

use super::kernel::{Size, Sums, banded_position, n_blocks, product_head, store_sums};
use super::store::combine;
use super::swizzle::{PRODUCTS, Swizzled, declare_shared};
use super::tile::Tile;
use super::{EmittedContraction, Job, Unsupported};
use graph::DType;
use kernels::contraction::text::CText;

/// Blocks of terms in shared memory that are not yet to be copied to: the one that is multiplied, and the
/// one before it.
const BEHIND: i64 = 2;

/// Blocks of rows that neighbouring blocks of threads cover first. 132 blocks of 128×256 that run at a time
/// read the fewest bytes of both factors as 16×8 blocks, 264 of 128×128 as 16×16: for 50,000 columns and 1024
/// terms 8 MiB a wave instead of 69, which memory could not bring in the wave's 11 µs.
pub(super) const BAND: i64 = 16;

/// Blocks of terms that shared memory holds, and blocks of threads of a multiprocessor.
pub(super) fn depth(tile: &Tile) -> (i64, i64) {
    match tile.n {
        256 => (4, 1),
        128 => (3, 2),
        _ => (4, 3),
    }
}

/// Emits the product and, if its reduction is split, the combination.
///
/// # Errors
/// [`Unsupported::Warpgroup`].
pub(super) fn emit(job: &Job<'_>, done: &mut EmittedContraction) -> Result<(), Unsupported> {
    let tile = &job.tile;
    let (a, b) = staged(job)?;
    let split = tile.parts > 1;
    let (places, min_blocks) = depth(tile);
    let size = Size {
        grid: n_blocks(job) as u64,
        threads: tile.threads,
        min_blocks,
    };
    let head = product_head(job, split);
    let mut t = head.open(&job.name, &size, job.sink.epilogue.filter(|_| !split));
    t.line("SH_DYNAMIC(pool);");
    let mut at = 0;
    for (x, stage) in [("a", &a), ("b", &b)] {
        let words = places * stage.words();
        t.line(format!("SH_CARVE(unsigned, {x}_s, pool, {at}, {words});"));
        at += words * 4;
    }
    banded_position(&mut t, job, BAND);
    declare_shared(&mut t);
    a.declare(&mut t, "block_m");
    b.declare(&mut t, "block_n");
    t.line("const int warpgroup = sh_shuffle(SH_TID / 128, 0);");
    declare_sums(&mut t, tile.n);
    multiply(&mut t, job, (&a, &b), places);
    store_sums(&mut t, job, &sums(tile.n));
    t.close(1);
    head.close(job.name.clone(), t, size, done);
    if split {
        combine(job, done);
    }
    Ok(())
}

/// Both operands in swizzled shared memory.
pub(super) fn staged<'a>(job: &Job<'a>) -> Result<(Swizzled<'a>, Swizzled<'a>), Unsupported> {
    let of = |letter, dtype| {
        Swizzled::new(job.form, letter, dtype, &job.tile).ok_or(Unsupported::Warpgroup {
            reason: "an operand has neither terms nor rows in whole pieces of 16 bytes",
        })
    };
    Ok((of("a", job.types.a)?, of("b", job.types.b)?))
}

/// The loop over blocks of terms.
fn multiply(t: &mut CText, job: &Job<'_>, (a, b): (&Swizzled<'_>, &Swizzled<'_>), places: i64) {
    let (ahead, terms) = (places - BEHIND, job.tile.k);
    t.line(format!(
        "const int n_steps = (k_end - k_begin + {})/{terms};",
        terms - 1
    ));
    t.line("SH_UNROLL");
    t.line(format!("for (int begun = 0; begun < {ahead}; begun++) {{"));
    t.line(format!("const int k0 = k_begin + begun*{terms};"));
    load(t, (a, b), "begun");
    t.close(1);
    t.line(format!("int now = 0, next = {ahead};"));
    t.line("for (int step = 0; step < n_steps; step++) {");
    t.line(format!(
        "sh_copy_wait<{}>(); /* this thread's part of the block is there */",
        ahead - 1
    ));
    t.line("sh_async_fence();");
    t.line("SH_SYNC(); /* the block is written, the one before the last is read */");
    products(t, job, (a, b));
    t.line(format!(
        "const int k0 = k_begin + (step + {ahead})*{terms};"
    ));
    load(t, (a, b), "next");
    t.line("sh_wgmma_wait<1>(acc); /* the products of the step before */");
    for place in ["now", "next"] {
        t.line(format!(
            "{place} = {place} == {} ? 0 : {place} + 1;",
            places - 1
        ));
    }
    t.close(1);
    t.line("sh_wgmma_wait<0>(acc); /* all products */");
}

/// Begins the copies of the block from term `k0` on, if there are terms, and ends their group.
fn load(t: &mut CText, (a, b): (&Swizzled<'_>, &Swizzled<'_>), place: &str) {
    t.line("if (k0 < k_end) {");
    a.load(t, "k0", &format!("{place}*{}", a.words()));
    b.load(t, "k0", &format!("{place}*{}", b.words()));
    t.close(1);
    t.line("sh_copy_commit();");
}

/// Issues the products of the block at place `now`.
pub(super) fn products(t: &mut CText, job: &Job<'_>, (a, b): (&Swizzled<'_>, &Swizzled<'_>)) {
    let name = match job.types.a {
        DType::BF16 => "sh_wgmma_bf16",
        _ => "sh_wgmma_f16",
    };
    t.line("sh_wgmma_fence(acc);");
    t.line("SH_UNROLL");
    t.line(format!("for (int p = 0; p < {PRODUCTS}; p++) {{"));
    let now = |x: &Swizzled<'_>, row: &str| {
        let from = format!("now*{}", x.words());
        x.matrix(&from, row, &format!("p*{}", job.tile.k / PRODUCTS))
    };
    t.line(format!("const sh_u64 x = {};", now(a, "warpgroup*64")));
    t.line(format!("const sh_u64 y = {};", now(b, "0")));
    t.line(format!(
        "{name}<{}, {}>(acc, x, y);",
        a.by_terms(),
        b.by_terms()
    ));
    t.close(1);
    t.line("sh_wgmma_commit();");
}

/// Declares a thread's sums, zero at first.
pub(super) fn declare_sums(t: &mut CText, columns: i64) {
    t.line(format!("float acc[{}];", columns / 2));
    t.line("SH_UNROLL");
    t.line(format!(
        "for (int i = 0; i < {}; i++) acc[i] = 0;",
        columns / 2
    ));
}

/// Lane 4g + t of warp w of a warpgroup has rows 16w + g and 16w + g + 8 at columns 8j + 2t and the next.
pub(super) fn sums(columns: i64) -> Sums {
    Sums {
        n_rows: 2,
        row: "SH_WARP*16 + SH_LANE/4 + i*8".to_string(),
        n_columns: columns / 4,
        column: "j/2*8 + SH_LANE%4*2 + j%2".to_string(),
        sum: "acc[j/2*4 + i*2 + j%2]".to_string(),
    }
}
