/* <unnamed> */
void k__1(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  float *x1 = buf[1];
  const long p_lo = 9 * tid / nt, p_hi = 9 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long i = p;
    {
      long j_lo = 0, j_hi = 31;
      j_lo = ix_max(j_lo, 4);
      j_hi = ix_min(j_hi, 24);
      if (!((unsigned long)(i - 1) < 6UL)) j_hi = j_lo;
      if (j_lo > 31) j_lo = 31;
      if (j_hi < j_lo) j_hi = j_lo;
      for (int side = 0; side < 2; ++side) {
        const long j_s = side ? j_hi : 0, j_t = side ? 31 : j_lo;
        #pragma omp simd
        for (long j = j_s; j < j_t; ++j) {
          const float t0 = ((unsigned long)(i - 1) < 6UL) & ((unsigned long)(j - 4) < 20UL) ? x0[i*20 + j - 24] : 0.5f;
          x1[i*31 + j] = ((t0 * 2.0f) + 1.0f);
        }
      }
      #pragma omp simd
      for (long j = j_lo; j < j_hi; ++j) {
        const float t0 = x0[i*20 + j - 24];
        x1[i*31 + j] = ((t0 * 2.0f) + 1.0f);
      }
    }
  }
}

/* <unnamed> */
void k__2(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  float *x1 = buf[1];
  const long p_lo = 6 * tid / nt, p_hi = 6 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long i = p;
    {
      long j_lo = 0, j_hi = 20;
      j_lo = ix_max(j_lo, ix_floordiv((-18), 1) + 1);
      j_hi = ix_min(j_hi, ix_floordiv(2, 1) + 1);
      if (j_lo > 20) j_lo = 20;
      if (j_hi < j_lo) j_hi = j_lo;
      for (int side = 0; side < 2; ++side) {
        const long j_s = side ? j_hi : 0, j_t = side ? 20 : j_lo;
        #pragma omp simd
        for (long j = j_s; j < j_t; ++j) {
          const float t0 = x0[i*20 - j + 19];
          const float t1 = ((unsigned long)(-j + 2) < 20UL) ? x0[i*20 - j + 2] : 0.0f;
          x1[i*20 + j] = (t0 + t1);
        }
      }
      #pragma omp simd
      for (long j = j_lo; j < j_hi; ++j) {
        const float t0 = x0[i*20 - j + 19];
        const float t1 = x0[i*20 - j + 2];
        x1[i*20 + j] = (t0 + t1);
      }
    }
  }
}

