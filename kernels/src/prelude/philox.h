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

#if defined(__AVX512DQ__) || defined(__AVX2__)
/* Counters of one vector. A lane holds one word of one counter. The order of the counters is such that
 * interleaving two vectors puts the numbers in order. */
#ifdef __AVX512DQ__
#define SH_PHILOX_COUNTERS 8
#define SH_PHILOX_ORDER 0, 4, 1, 5, 2, 6, 3, 7
#define SH_PHILOX_FIRST_HALF 0, 8, 2, 10, 4, 12, 6, 14
#define SH_PHILOX_SECOND_HALF 1, 9, 3, 11, 5, 13, 7, 15
#else
#define SH_PHILOX_COUNTERS 4
#define SH_PHILOX_ORDER 0, 2, 1, 3
#define SH_PHILOX_FIRST_HALF 0, 4, 2, 6
#define SH_PHILOX_SECOND_HALF 1, 5, 3, 7
#endif
#define SH_PHILOX_VECTOR vector_size(8 * SH_PHILOX_COUNTERS)
typedef sh_u64 sh_philox_lanes __attribute__((SH_PHILOX_VECTOR));
typedef sh_i32 sh_philox_words __attribute__((SH_PHILOX_VECTOR));
typedef float sh_philox_floats __attribute__((SH_PHILOX_VECTOR, aligned(4), may_alias));

/* Words, given as lanes of two, as numbers. */
SH_FN void sh_philox_store(float *to, sh_philox_lanes pairs) {
  typedef sh_u32 words __attribute__((SH_PHILOX_VECTOR));
  const sh_philox_words shifted = (sh_philox_words)((words)pairs >> 8);
  *(sh_philox_floats *)to = __builtin_convertvector(shifted, sh_philox_floats) * 0x1p-24f;
}

/* Products of the low halves of lanes. Compilers take the slower product of whole lanes. */
SH_FN sh_philox_lanes sh_philox_times(sh_philox_lanes a, sh_philox_lanes b) {
  sh_philox_lanes product;
#ifdef __AVX512DQ__
  __asm__("vpmuludq %2, %1, %0" : "=v"(product) : "v"(a), "v"(b));
#else
  __asm__("vpmuludq %2, %1, %0" : "=x"(product) : "x"(a), "x"(b));
#endif
  return product;
}

/* The numbers of the counters of one vector, from `start` on. */
SH_FN void sh_philox_fill_vector(float *to, sh_u64 key, sh_u64 start) {
  const sh_philox_lanes at = start + (sh_philox_lanes){SH_PHILOX_ORDER}, none = {0};
  const sh_philox_lanes low = none + 0xffffffffu, m0 = none + 0xd2511f53u, m1 = none + 0xcd9e8d57u;
  sh_philox_lanes c0 = at & low, c1 = at >> 32, c2 = {0}, c3 = {0};
  sh_u32 k0 = (sh_u32)key, k1 = (sh_u32)(key >> 32);
  _Pragma("GCC unroll 10") for (int round = 0; round < 10; round++) {
    const sh_philox_lanes p0 = sh_philox_times(c0, m0), p1 = sh_philox_times(c2, m1);
    c0 = (p1 >> 32) ^ c1 ^ k0;
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ k1;
    c3 = p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  const sh_philox_lanes first = (c0 & low) | (c1 << 32), second = (c2 & low) | (c3 << 32);
  sh_philox_store(to, __builtin_shufflevector(first, second, SH_PHILOX_FIRST_HALF));
  sh_philox_store(to + 2 * SH_PHILOX_COUNTERS, __builtin_shufflevector(first, second, SH_PHILOX_SECOND_HALF));
}
#endif

/* `count` numbers from the `first`-th on; the result points at the first, inside `room`. */
SH_FN const float *sh_philox_fill(float *room, sh_u64 key, sh_u64 first, long count) {
  const long skip = (long)(first & 3), n_counters = (skip + count + 3) / 4;
  const sh_u64 start = first / 4;
  long done = 0;
#ifdef SH_PHILOX_COUNTERS
  for (; done + SH_PHILOX_COUNTERS <= n_counters; done += SH_PHILOX_COUNTERS)
    sh_philox_fill_vector(room + 4 * done, key, start + (sh_u64)done);
#endif
#pragma omp simd
  for (long i = done; i < n_counters; ++i) {
    SH_PHILOX_WORDS(key, start + (sh_u64)i)
    room[4 * i] = sh_philox_unit(c0);
    room[4 * i + 1] = sh_philox_unit(c1);
    room[4 * i + 2] = sh_philox_unit(c2);
    room[4 * i + 3] = sh_philox_unit(c3);
  }
  return room + skip;
}
