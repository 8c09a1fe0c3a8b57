SH_KERNEL(sh_k0, 256, 1)(SH_IN(float) x0, SH_OUT(float) x4) {
  const int part = 0;
  const int lane = SH_TID % 32;
  const int first = part * 8;
  const int live = first + SH_TID / 32 < 6;
  const int point = live ? first + SH_TID / 32 : 5;
  const int b = point / 3;
  const int i = point % 3;
  float h1;
  float h2[2];
  float h3;
  float l0[2];
  {
    SH_UNROLL
    for (int step = 0; step < 2; ++step) {
      const int p0 = (step * 32 + lane);
      if (p0 < 37 && live) {
        const int j = p0;
        l0[step] = x0[(b*111 + i*37 + j)];
      }
    }
  }
  {
    float b0[1] = {(-__builtin_inff())};
    SH_UNROLL
    for (int step = 0; step < 2; ++step) {
      const int p0 = (step * 32 + lane);
      if (p0 < 37 && live) {
        const float t0 = l0[step];
        b0[0] = sh_max(b0[0], t0);
      }
    }
    sh_group_max<32, 256>(b0);
    h1 = b0[0];
  }
  {
    float b0[1] = {0.0f};
    SH_UNROLL
    for (int step = 0; step < 2; ++step) {
      const int p0 = (step * 32 + lane);
      if (p0 < 37 && live) {
        const float t1 = h1;
        const float t0 = l0[step];
        const float t2 = (t0 - t1);
        const float t3 = sh_exp(t2);
        h2[step] = t3;
        b0[0] = (b0[0] + t3);
      }
    }
    sh_group_sum<32, 256>(b0);
    h3 = b0[0];
  }
  {
    SH_UNROLL
    for (int step = 0; step < 2; ++step) {
      const int p0 = (step * 32 + lane);
      if (p0 < 37 && live) {
        const int j = p0;
        const float t1 = h3;
        const float t0 = h2[step];
        const float t2 = (t0 / t1);
        x4[(b*111 + i*37 + j)] = t2;
      }
    }
  }
}
/* sh_k0 on 1 blocks */
