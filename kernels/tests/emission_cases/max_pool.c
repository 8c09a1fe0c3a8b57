/* <unnamed> */
void k__1(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  float *x1 = buf[1];
  const long p_lo = 50 * tid / nt, p_hi = 50 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long n = p / 25;
    const long p0 = p % 25;
    const long oh = p0 / 5;
    const long p1 = p0 % 5;
    const long ow = p1;
    for (long c = 0; c < 4; ++c) {
      x1[c + n*100 + oh*20 + ow*4] = (-__builtin_inff());
    }
    {
      for (long r = 0; r < 3; ++r) {
        if (((unsigned long)(oh*2 + r - 1) < 9UL)) {
          for (long s = 0; s < 3; ++s) {
            if (((unsigned long)(ow*2 + s - 1) < 10UL)) {
              #pragma omp simd
              for (long c = 0; c < 4; ++c) {
                const float t0 = x0[c + n*360 + oh*80 + ow*8 + r*40 + s*4 - 44];
                x1[c + n*100 + oh*20 + ow*4] = sh_max(x1[c + n*100 + oh*20 + ow*4], t0);
              }
            }
          }
        }
      }
    }
  }
}

