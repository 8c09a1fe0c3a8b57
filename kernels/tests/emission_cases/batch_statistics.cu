SH_KERNEL(sh_k0, 512, 1)(SH_IN(float) x0, SH_OUT(float) x1, SH_OUT(float) x2) {
  SH_SHARED(float, s_f32, 1280);
  const int part = 0;
  const int lane = SH_TID % 8;
  sh_vec<float, 4> g1[1];
  SH_UNROLL
  for (int step = 0; step < 1; ++step) {
    SH_UNROLL
    for (int elem = 0; elem < 4; ++elem) g1[step][elem] = 0.0f;
  }
  sh_vec<float, 4> g2[1];
  SH_UNROLL
  for (int step = 0; step < 1; ++step) {
    SH_UNROLL
    for (int elem = 0; elem < 4; ++elem) g2[step][elem] = 0.0f;
  }
  for (int first = part * 64; first < 297; first += 64) {
    const int live = first + SH_TID / 8 < 297;
    const int point = live ? first + SH_TID / 8 : 296;
    const int n_h_w = point;
    {
      const int p0 = lane * 4;
      if (p0 < 20 && live) {
        const int base = p0;
        const sh_vec<float, 4> v0 = sh_load<4>(x0, (base + n_h_w*20));
        SH_UNROLL
        for (int elem = 0; elem < 4; ++elem) {
          const float t0 = v0[elem];
          const float t1 = sh_mul(t0, t0);
          g1[0][elem] = (g1[0][elem] + t0);
          g2[0][elem] = (g2[0][elem] + t1);
        }
      }
    }
  }
  {
    SH_SYNC();
    const int p0 = lane * 4;
    if (p0 < 20) {
      sh_store<4>(s_f32, SH_TID / 8 * 20 + p0, g1[0]);
    }
    SH_SYNC();
    for (int p0 = SH_TID; p0 < 20; p0 += 512) {
      float a0 = s_f32[p0];
      for (int p1 = 1; p1 < 64; ++p1) a0 = (a0 + s_f32[p1 * 20 + p0]);
      const int c = p0;
      x1[c] = a0;
    }
  }
  {
    SH_SYNC();
    const int p0 = lane * 4;
    if (p0 < 20) {
      sh_store<4>(s_f32, SH_TID / 8 * 20 + p0, g2[0]);
    }
    SH_SYNC();
    for (int p0 = SH_TID; p0 < 20; p0 += 512) {
      float a0 = s_f32[p0];
      for (int p1 = 1; p1 < 64; ++p1) a0 = (a0 + s_f32[p1 * 20 + p0]);
      const int c = p0;
      x2[c] = a0;
    }
  }
}
/* sh_k0 on 1 blocks */
