/* <unnamed> */
void k__1(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  float *x1 = buf[1];
  float *x2 = buf[2];
  double *w1 = (double *)((char *)buf[3] + tid * 384 + 0);
  float *s1 = (float *)((char *)scratch + 0);
  for (long i = 0; i < 20; ++i) w1[i] = 0.0;
  double *w2 = (double *)((char *)buf[3] + tid * 384 + 192);
  float *s2 = (float *)((char *)scratch + 128);
  for (long i = 0; i < 20; ++i) w2[i] = 0.0;
  const long p_lo = 297 * tid / nt, p_hi = 297 * (tid + 1) / nt;
  for (long p_b = p_lo; p_b < p_hi; p_b += 32) {
    const long p_e = ix_min(p_b + 32, p_hi);
    #pragma omp simd
    for (long i = 0; i < 20; ++i) s1[i] = 0.0f;
    #pragma omp simd
    for (long i = 0; i < 20; ++i) s2[i] = 0.0f;
    for (long p = p_b; p < p_e; ++p) {
      const long n_h_w = p;
      {
        #pragma omp simd
        for (long c = 0; c < 20; ++c) {
          const float t0 = x0[c + n_h_w*20];
          s1[c] = s1[c] + t0;
          s2[c] = (s2[c] + (t0 * t0));
        }
      }
    }
    #pragma omp simd
    for (long i = 0; i < 20; ++i) w1[i] = (w1[i] + s1[i]);
    #pragma omp simd
    for (long i = 0; i < 20; ++i) w2[i] = (w2[i] + s2[i]);
  }
}

/* <unnamed> */
void k__2_combine(void *const *buf, void *scratch, long tid, long nt) {
  float *x0 = buf[0];
  const char *w0 = (const char *)buf[2] + 0;
  for (long i = 20 * tid / nt; i < 20 * (tid + 1) / nt; ++i) {
    double sum = 0.0;
    for (long k = 0; k < nt; ++k) sum = (sum + ((const double *)(w0 + k * 384))[i]);
    x0[i] = (float)sum;
  }
  float *x1 = buf[1];
  const char *w1 = (const char *)buf[2] + 192;
  for (long i = 20 * tid / nt; i < 20 * (tid + 1) / nt; ++i) {
    double sum = 0.0;
    for (long k = 0; k < nt; ++k) sum = (sum + ((const double *)(w1 + k * 384))[i]);
    x1[i] = (float)sum;
  }
}

