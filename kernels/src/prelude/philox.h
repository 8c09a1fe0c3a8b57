/* Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
 * SC'11): counter-based random numbers, bit for bit those of every other back end.
 * Follows math.h. */

/* A word: the low half of 64 bits where vectors multiply those, so that no round converts; there the
 * high half has no meaning. */
#ifdef __AVX512DQ__
typedef sh_u64 sh_philox_lane;
#else
typedef sh_u32 sh_philox_lane;
#endif

/* Declares c0..c3, the four words for counter (lo, hi, 0, 0) and key (lo, hi). */
#define SH_PHILOX_WORDS(key, counter)                                            \
  const sh_u64 at = (counter);                                                   \
  sh_philox_lane c0 = (sh_philox_lane)at, c1 = (sh_u32)(at >> 32), c2 = 0, c3 = 0; \
  sh_u32 k0 = (sh_u32)(key), k1 = (sh_u32)((key) >> 32);                         \
  _Pragma("GCC unroll 10") for (int round = 0; round < 10; round++) {            \
    const sh_u64 p0 = (sh_u64)0xd2511f53u * (sh_u32)c0;                          \
    const sh_u64 p1 = (sh_u64)0xcd9e8d57u * (sh_u32)c2;                          \
    c0 = (sh_philox_lane)(p1 >> 32) ^ c1 ^ k0;                                   \
    c1 = (sh_philox_lane)p1;                                                     \
    c2 = (sh_philox_lane)(p0 >> 32) ^ c3 ^ k1;                                   \
    c3 = (sh_philox_lane)p0;                                                     \
    k0 += 0x9e3779b9u;                                                           \
    k1 += 0xbb67ae85u;                                                           \
  }

/* A word as a number in [0, 1), a multiple of 2^-24. */
SH_FN float sh_philox_unit(sh_philox_lane word) {
  /* Through a signed number: unsigned ones have no vector conversion before AVX-512. */
  return (float)(sh_i32)((sh_u32)word >> 8) * 0x1p-24f;
}

/* The n-th uniform number under a key: word n % 4 of counter n / 4. */
SH_FN float sh_philox_uniform(sh_u64 key, sh_u64 n) {
  SH_PHILOX_WORDS(key, n / 4)
  const sh_philox_lane low = n & 1 ? c1 : c0, high = n & 1 ? c3 : c2;
  return sh_philox_unit(n & 2 ? high : low);
}

/* Floats that `sh_philox_fill` may write for `count` numbers. */
#define SH_PHILOX_ROOM(count) ((count) + 8)

/* `count` numbers from the `first`-th on; the result points at the first, inside `room`. */
SH_FN const float *sh_philox_fill(float *room, sh_u64 key, sh_u64 first, long count) {
  const long skip = (long)(first & 3), n_counters = (skip + count + 3) / 4;
  const sh_u64 start = first / 4;
#pragma omp simd
  for (long i = 0; i < n_counters; ++i) {
    SH_PHILOX_WORDS(key, start + (sh_u64)i)
    room[4 * i] = sh_philox_unit(c0);
    room[4 * i + 1] = sh_philox_unit(c1);
    room[4 * i + 2] = sh_philox_unit(c2);
    room[4 * i + 3] = sh_philox_unit(c3);
  }
  return room + skip;
}
