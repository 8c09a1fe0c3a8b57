/* <unnamed> */
void k__1(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  float *x1 = buf[1];
  const long p_lo = 6 * tid / nt, p_hi = 6 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long b_i = p;
    float l0 = 0;
    float l1[37] __attribute__((aligned(64)));
    float l2 = 0;
    {
      int a0 = sh_max_key((-__builtin_inff()));
      #pragma omp simd reduction(max:a0)
      for (long j = 0; j < 32; ++j) {
        const float t0 = x0[b_i*37 + j];
        a0 = ix_max32(a0, sh_max_key(t0));
      }
      for (long j = 32; j < 37; ++j) {
        const float t0 = x0[b_i*37 + j];
        a0 = ix_max32(a0, sh_max_key(t0));
      }
      l0 = sh_of_key(a0);
    }
    {
      const float t1 = l0;
      float a1 = 0.0f;
      #pragma omp simd reduction(+:a1)
      for (long j = 0; j < 32; ++j) {
        const float t0 = x0[b_i*37 + j];
        const float t3 = sh_exp((t0 - t1));
        l1[j] = t3;
        a1 = a1 + t3;
      }
      for (long j = 32; j < 37; ++j) {
        const float t0 = x0[b_i*37 + j];
        const float t3 = sh_exp((t0 - t1));
        l1[j] = t3;
        a1 = a1 + t3;
      }
      l2 = a1;
    }
    {
      const float t1 = l2;
      #pragma omp simd
      for (long j = 0; j < 37; ++j) {
        const float t0 = l1[j];
        x1[b_i*37 + j] = (t0 / t1);
      }
    }
  }
}

