/* Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
 * SC'11): counter-based random numbers, bit for bit those of every other back end.
 * Follows math.h. */

/* The first of the four words for counter (lo, hi, 0, 0) and key (lo, hi). */
SH_FN sh_u32 sh_philox_word(sh_u64 key, sh_u64 counter) {
  sh_u32 c0 = (sh_u32)counter, c1 = (sh_u32)(counter >> 32), c2 = 0, c3 = 0;
  sh_u32 k0 = (sh_u32)key, k1 = (sh_u32)(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    sh_u64 p0 = (sh_u64)0xd2511f53u * c0, p1 = (sh_u64)0xcd9e8d57u * c2;
    c0 = (sh_u32)(p1 >> 32) ^ c1 ^ k0;
    c1 = (sh_u32)p1;
    c2 = (sh_u32)(p0 >> 32) ^ c3 ^ k1;
    c3 = (sh_u32)p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return c0;
}

/* Uniform in [0, 1), a multiple of 2^-24. */
SH_FN float sh_philox_uniform(sh_u64 key, sh_u64 counter) {
  /* Through a signed number: unsigned ones have no vector conversion before AVX-512. */
  return (float)(sh_i32)(sh_philox_word(key, counter) >> 8) * 0x1p-24f;
}
