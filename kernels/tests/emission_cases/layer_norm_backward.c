/* <unnamed> */
void k__1(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  const float *x1 = buf[1];
  const float *x2 = buf[2];
  const float *x3 = buf[3];
  const float *x4 = buf[4];
  float *x5 = buf[5];
  float *x6 = buf[6];
  float *x7 = buf[7];
  double *w6 = (double *)((char *)buf[8] + tid * 640 + 0);
  float *s6 = (float *)((char *)scratch + 0);
  for (long i = 0; i < 40; ++i) w6[i] = 0.0;
  double *w7 = (double *)((char *)buf[8] + tid * 640 + 320);
  float *s7 = (float *)((char *)scratch + 192);
  for (long i = 0; i < 40; ++i) w7[i] = 0.0;
  const long p_lo = 150 * tid / nt, p_hi = 150 * (tid + 1) / nt;
  for (long p_b = p_lo; p_b < p_hi; p_b += 32) {
    const long p_e = ix_min(p_b + 32, p_hi);
    #pragma omp simd
    for (long i = 0; i < 40; ++i) s6[i] = 0.0f;
    #pragma omp simd
    for (long i = 0; i < 40; ++i) s7[i] = 0.0f;
    for (long p = p_b; p < p_e; ++p) {
      const long i = p;
      float l0[40] __attribute__((aligned(64)));
      float l1 = 0;
      float l2 = 0;
      float l3 = 0;
      {
        const float t1 = x1[i];
        const float t2 = x2[i];
        float a1 = 0.0f;
        float a2 = 0.0f;
        #pragma omp simd reduction(+:a1) reduction(+:a2)
        for (long j = 0; j < 40; ++j) {
          const float t0 = x0[i*40 + j];
          const float t4 = ((t0 - t1) * t2);
          const float t5 = x3[i*40 + j];
          const float t6 = x4[j];
          const float t7 = (t5 * t6);
          l0[j] = t4;
          a1 = a1 + t7;
          a2 = (a2 + (t7 * t4));
        }
        l1 = a1;
        l2 = a2;
      }
      {
        const float t0 = l1;
        l3 = (t0 / 40.0f);
      }
      {
        const float t2 = l3;
        const float t4 = l2;
        const float t5 = x2[i];
        #pragma omp simd
        for (long j = 0; j < 40; ++j) {
          const float t0 = x3[i*40 + j];
          const float t1 = x4[j];
          const float t3 = l0[j];
          x5[i*40 + j] = (t5 * (((t0 * t1) - t2) - ((t3 * t4) / 40.0f)));
          s6[j] = (s6[j] + (t0 * t3));
          s7[j] = s7[j] + t0;
        }
      }
    }
    #pragma omp simd
    for (long i = 0; i < 40; ++i) w6[i] = (w6[i] + s6[i]);
    #pragma omp simd
    for (long i = 0; i < 40; ++i) w7[i] = (w7[i] + s7[i]);
  }
}

/* <unnamed> */
void k__2_combine(void *const *buf, void *scratch, long tid, long nt) {
  float *x0 = buf[0];
  const char *w0 = (const char *)buf[2] + 0;
  for (long i = 40 * tid / nt; i < 40 * (tid + 1) / nt; ++i) {
    double sum = 0.0;
    for (long k = 0; k < nt; ++k) sum = (sum + ((const double *)(w0 + k * 640))[i]);
    x0[i] = (float)sum;
  }
  float *x1 = buf[1];
  const char *w1 = (const char *)buf[2] + 320;
  for (long i = 40 * tid / nt; i < 40 * (tid + 1) / nt; ++i) {
    double sum = 0.0;
    for (long k = 0; k < nt; ++k) sum = (sum + ((const double *)(w1 + k * 640))[i]);
    x1[i] = (float)sum;
  }
}

