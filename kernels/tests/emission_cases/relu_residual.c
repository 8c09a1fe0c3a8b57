/* <unnamed> */
void k__1(void *const *buf, void *scratch, long tid, long nt) {
  const float *x0 = buf[0];
  const float *x1 = buf[1];
  float *x2 = buf[2];
  unsigned char *x3 = buf[3];
  const long p_lo = 4 * tid / nt, p_hi = 4 * (tid + 1) / nt;
  for (long p = p_lo; p < p_hi; ++p) {
    const long n_h_w_c_b = p;
    const long n_h_w_c_0 = n_h_w_c_b * 64, n_h_w_c_1 = ix_min(n_h_w_c_0 + 64, 210);
    {
      #pragma omp simd
      for (long n_h_w_c = n_h_w_c_0; n_h_w_c < n_h_w_c_1; ++n_h_w_c) {
        const float t0 = x0[n_h_w_c];
        const float t1 = x1[n_h_w_c];
        const float t2 = (t0 + t1);
        x2[n_h_w_c] = sh_max(t2, 0.0f);
        x3[n_h_w_c] = (t2 > 0.0f);
      }
    }
  }
}

