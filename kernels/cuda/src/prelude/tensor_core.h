/* Warp products of 16-bit operands; follows both.h. On the host the lanes exchange their registers
   through shuffles, so a lane that does not take part is found as a deadlock. */

/* Two neighbours of the reduction in one word, the first in the low half. */
template <class T> SH_FN unsigned sh_pack(T low, T high) {
  return (unsigned)low.bits | (unsigned)high.bits << 16;
}

#ifdef __CUDACC_RTC__
#define SH_MMA(name, type)                                                                      \
  SH_FN void name(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                 \
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));           \
  }
SH_MMA(sh_mma_bf16, "bf16")
SH_MMA(sh_mma_f16, "f16")
#undef SH_MMA
#else
template <class T> SH_FN float sh_half_of(unsigned word, int high) {
  T x;
  x.bits = (unsigned short)(high ? word >> 16 : word);
  return sh_to_float(x);
}
/* Lane 4g + t holds of a the rows g and g + 8, of b the column g (each at terms 2t, 2t + 1, 2t + 8,
   2t + 9), and of d the rows g and g + 8 at columns 2t and 2t + 1 (PTX ISA, mma.m16n8k16). */
template <class T> SH_FN void sh_mma_host(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  const int g = SH_LANE / 4, t = SH_LANE % 4;
  for (int lane = 0; lane < 4; lane++) {
    for (int upper = 0; upper < 2; upper++) {
      const unsigned rows[2] = {sh_shuffle(a[upper * 2], g * 4 + lane), sh_shuffle(a[upper * 2 + 1], g * 4 + lane)};
      const unsigned columns[2] = {sh_shuffle(b[upper], t * 8 + lane), sh_shuffle(b[upper], t * 8 + 4 + lane)};
      for (int e = 0; e < 4; e++)
        for (int high = 0; high < 2; high++)
          d[e] += sh_half_of<T>(rows[e / 2], high) * sh_half_of<T>(columns[e % 2], high);
    }
  }
}
SH_FN void sh_mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { sh_mma_host<sh_bf16>(d, a, b); }
SH_FN void sh_mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { sh_mma_host<sh_f16>(d, a, b); }
#endif
