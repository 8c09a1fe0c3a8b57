/* <unnamed> */
void k__1(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  const float *x1 = buf[1];
  float *x2 = buf[2];
  float *x3 = buf[3];
  const long p_lo = 24 * tid / nt, p_hi = 24 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long i = p / 8;
    const long p0 = p % 8;
    const long a_o = p0 / 2;
    const long p1 = p0 % 2;
    const long b_b = p1;
    const long b_0 = b_b * 64, b_1 = ix_min(b_0 + 64, 65);
    float *l0 = (float *)((char *)scratch + 0);
    {
      for (long a_i = 0; a_i < 25; ++a_i) {
        const float t1 = x1[a_i + a_o*25];
        #pragma omp simd
        for (long b = b_0; b < b_1; ++b) {
          const float t0 = x0[a_i*65 + a_o*1625 + b + i*6500];
          l0[a_i*64 + b - b_0] = (sh_exp(t0) + t1);
          x2[a_i*65 + a_o*1625 + b + i*6500] = (t0 * t1);
        }
      }
    }
    {
      for (long b = b_0; b < b_1; ++b) {
        #pragma omp simd
        for (long a_i = 0; a_i < 25; ++a_i) {
          const float t0 = l0[a_i*64 + b - b_0];
          x3[a_i + a_o*25 + b*100 + i*6500] = t0;
        }
      }
    }
  }
}

/* <unnamed> */
void k__2(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  unsigned char *x1 = buf[1];
  const long p_lo = 300 * tid / nt, p_hi = 300 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long i_a = p;
    {
      #pragma omp simd
      for (long b = 0; b < 64; ++b) {
        const float t0 = x0[b + i_a*65];
        x1[b + i_a*64] = (t0 > 0.0f);
      }
    }
  }
}

/* <unnamed> */
void k__3(void *const *buf, void *scratch, long tid, long nt) {
  const unsigned char *x0 = buf[0];
  unsigned char *x1 = buf[1];
  const long p_lo = 10 * tid / nt, p_hi = 10 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long i_a_o = p;
    unsigned char *l0 = (unsigned char *)((char *)scratch + 0);
    {
      for (long i_a_i = 0; i_a_i < 30; ++i_a_i) {
        #pragma omp simd
        for (long b = 0; b < 64; ++b) {
          const int t0 = x0[b + i_a_i*64 + i_a_o*1920];
          l0[b + i_a_i*64] = !t0;
        }
      }
    }
    {
      for (long b = 0; b < 64; ++b) {
        #pragma omp simd
        for (long i_a_i = 0; i_a_i < 30; ++i_a_i) {
          const int t0 = l0[b + i_a_i*64];
          x1[b*300 + i_a_i + i_a_o*30] = t0;
        }
      }
    }
  }
}

/* <unnamed> */
void k__4(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  float *x1 = buf[1];
  const long p_lo = 20 * tid / nt, p_hi = 20 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long b = p;
    {
      #pragma omp simd
      for (long a = 0; a < 100; ++a) {
        const float t0 = x0[a*65 + b + 6500];
        x1[a + b*100] = (t0 * 3.0f);
      }
    }
  }
}

