/* Products of bf16 numbers in pairs, summed in single precision: blocks of 32 rows by 32 columns.
 *
 * A block of operand a is two tiles of [16 rows][16 pairs], of operand b two of [16 pairs][16 columns];
 * a pair is two neighbouring steps of the reduction in one 32-bit number. SH_PAIRS_TILES chooses
 * instructions, without it the compiler does. Subnormal numbers count as zero
 * where instructions say so. Needs halves.h before it.
 */
typedef sh_u32 sh_pairs __attribute__((vector_size(64), aligned(2), may_alias));

#define SH_PAIRS_EXCHANGE(bit, low, high)                                       \
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & bit)) {       \
    const sh_pairs x = v[i], y = v[i + bit];                                    \
    v[i] = low;                                                                 \
    v[i + bit] = high;                                                          \
  }

/* Rows become columns: in each step, vectors whose numbers differ in one bit exchange the elements that
 * differ in it. */
static inline __attribute__((unused)) void sh_pairs_transpose(sh_pairs *v) {
  SH_PAIRS_EXCHANGE(1,
    __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
    __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
  SH_PAIRS_EXCHANGE(2,
    __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
    __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  SH_PAIRS_EXCHANGE(4,
    __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
    __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  SH_PAIRS_EXCHANGE(8,
    __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
    __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
}

/* Stores 16 vectors as one tile. */
SH_FN void sh_pairs_store(sh_u16 *d, const sh_pairs *v) {
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) *(sh_pairs *)(d + i * 32) = v[i];
}

/* 16 by 16 numbers of single precision from rows to columns. */
static __attribute__((noinline, unused)) void sh_pairs_turn(
    const float *s, long s_pitch, float *d, long d_pitch) {
  sh_pairs v[16];
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) v[i] = *(const sh_pairs *)(s + i * s_pitch);
  sh_pairs_transpose(v);
  _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) *(sh_pairs *)(d + i * d_pitch) = v[i];
}

/* c[32][32] (+)= the product of n blocks of a and b; rows of c are pitch numbers apart. Of what is read next,
 * `lines` cache lines for each block are brought near. */
static __attribute__((noinline, unused)) void sh_pairs_block(
    const sh_u16 *a, const sh_u16 *b, float *c, long pitch, long n, int adds, const sh_u16 *next, long lines) {
#if defined(SH_PAIRS_TILES)
  const long row = 64, c_row = pitch * 4;
  float *const c_low = c + pitch * 16;
  if (adds) {
    __asm__ volatile("tileloadd (%0,%4,1), %%tmm0\n\ttileloadd (%1,%4,1), %%tmm1\n\t"
                     "tileloadd (%2,%4,1), %%tmm2\n\ttileloadd (%3,%4,1), %%tmm3"
                     : : "r"(c), "r"(c + 16), "r"(c_low), "r"(c_low + 16), "r"(c_row) : "memory");
  } else {
    __asm__ volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
  }
  for (; n > 0; n--, a += 1024, b += 1024) {
    for (long i = 0; i < lines; i++, next += 32) __builtin_prefetch(next, 0, 2);
    __asm__ volatile("tileloadd (%0,%4,1), %%tmm4\n\ttileloadd (%2,%4,1), %%tmm6\n\t"
                     "tileloadd (%3,%4,1), %%tmm7\n\ttdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
                     "tileloadd (%1,%4,1), %%tmm5\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
                     "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3"
                     : : "r"(a), "r"(a + 512), "r"(b), "r"(b + 512), "r"(row) : "memory");
  }
  __asm__ volatile("tilestored %%tmm0, (%0,%4,1)\n\ttilestored %%tmm1, (%1,%4,1)\n\t"
                   "tilestored %%tmm2, (%2,%4,1)\n\ttilestored %%tmm3, (%3,%4,1)"
                   : : "r"(c), "r"(c + 16), "r"(c_low), "r"(c_low + 16), "r"(c_row) : "memory");
#else
  (void)next; (void)lines;
  typedef float vf __attribute__((vector_size(64), aligned(4), may_alias));
  for (int tile = 0; tile < 2; tile++) for (int from = 0; from < 16; from += 8) {
    float *at = c + (tile * 16 + from) * pitch;
    vf s[8][2];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) for (int j = 0; j < 2; j++)
      s[i][j] = adds ? *(const vf *)(at + i * pitch + j * 16) : (vf){0};
    for (long k = 0; k < n * 16; k++) {
      const sh_u16 *rows = a + (k >> 4) * 1024 + tile * 512 + from * 32 + (k & 15) * 2;
      const sh_u16 *columns = b + (k >> 4) * 1024 + (k & 15) * 32;
      const sh_pairs y0 = *(const sh_pairs *)columns, y1 = *(const sh_pairs *)(columns + 512);
      const vf low0 = (vf)(y0 << 16), high0 = (vf)(y0 & 0xffff0000u);
      const vf low1 = (vf)(y1 << 16), high1 = (vf)(y1 & 0xffff0000u);
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
        const float x0 = sh_from_bf16(rows[i * 32]), x1 = sh_from_bf16(rows[i * 32 + 1]);
        s[i][0] += low0 * x0;
        s[i][1] += low1 * x0;
        s[i][0] += high0 * x1;
        s[i][1] += high1 * x1;
      }
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) for (int j = 0; j < 2; j++)
      *(vf *)(at + i * pitch + j * 16) = s[i][j];
  }
#endif
}

/* Before the first block of a launch and after its last. */
SH_FN void sh_pairs_begin(void) {
#if defined(SH_PAIRS_TILES)
  /* Palette 1, eight tiles of 16 rows and 64 bytes. */
  static const struct { sh_u16 head[8]; sh_u16 bytes[16]; unsigned char rows[16]; } __attribute__((aligned(64)))
    shape = {{1}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  __asm__ volatile("ldtilecfg %0" : : "m"(shape));
#endif
}
SH_FN void sh_pairs_end(void) {
#if defined(SH_PAIRS_TILES)
  __asm__ volatile("tilerelease");
#endif
}

/* Two runs of 16 numbers as 16 pairs. */
typedef sh_u16 sh_run __attribute__((vector_size(32), aligned(2), may_alias));
SH_FN sh_pairs sh_pairs_interleave(sh_run low, sh_run high) {
  return __builtin_convertvector(low, sh_pairs) | (__builtin_convertvector(high, sh_pairs) << 16);
}
