/* <unnamed> */
void k__1_fill(void *const *buf, void *scratch, long tid, long nt) {
  float *x0 = buf[0];
  for (long i = 99 * tid / nt; i < 99 * (tid + 1) / nt; ++i) x0[i] = 0.0f;
}

/* <unnamed> */
void k__2(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  const long *x1 = buf[1];
  float *x2 = buf[2];
  const long p_lo = 1 * tid / nt, p_hi = 1 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    {
      for (long b_i_t = 0; b_i_t < 24; ++b_i_t) {
        const long t1 = x1[b_i_t];
        #pragma omp simd
        for (long j = 0; j < 33; ++j) {
          const float t0 = x0[b_i_t*33 + j];
          x2[j + t1*33] = x2[j + t1*33] + t0;
        }
      }
    }
  }
}

