SH_KERNEL(sh_k0, 512, 1)(SH_IN(float) x0, SH_IN(float) x1, SH_IN(float) x2, SH_IN(float) x3, SH_IN(float) x4, SH_OUT(float) x9, SH_OUT(float) x10, SH_OUT(float) x11) {
  SH_SHARED(float, s_f32, 1280);
  const int part = 0;
  const int lane = SH_TID % 16;
  sh_vec<float, 4> l2[1];
  {
    const int p0 = lane * 4;
    if (p0 < 40) {
      const int base = p0;
      l2[0] = sh_load<4>(x4, base);
    }
  }
  sh_vec<float, 4> g10[1];
  SH_UNROLL
  for (int step = 0; step < 1; ++step) {
    SH_UNROLL
    for (int elem = 0; elem < 4; ++elem) g10[step][elem] = 0.0f;
  }
  sh_vec<float, 4> g11[1];
  SH_UNROLL
  for (int step = 0; step < 1; ++step) {
    SH_UNROLL
    for (int elem = 0; elem < 4; ++elem) g11[step][elem] = 0.0f;
  }
  for (int first = part * 32; first < 150; first += 32) {
    const int live = first + SH_TID / 16 < 150;
    const int point = live ? first + SH_TID / 16 : 149;
    const int i = point;
    const float u0 = x3[i];
    sh_vec<float, 4> h5[1];
    float h6;
    float h7;
    float h8;
    sh_vec<float, 4> l1[1];
    {
      const int p0 = lane * 4;
      if (p0 < 40 && live) {
        const int base = p0;
        l1[0] = sh_load<4>(x1, (base + i*40));
      }
    }
    {
      float b0[2] = {0.0f, 0.0f};
      const int p0 = lane * 4;
      if (p0 < 40 && live) {
        const int base = p0;
        const float t1 = x2[i];
        const float t2 = u0;
        const sh_vec<float, 4> v0 = sh_load<4>(x0, (base + i*40));
        SH_UNROLL
        for (int elem = 0; elem < 4; ++elem) {
          const float t0 = v0[elem];
          const float t3 = (t0 - t1);
          const float t4 = sh_mul(t3, t2);
          const float t5 = l1[0][elem];
          const float t6 = l2[0][elem];
          const float t7 = sh_mul(t5, t6);
          const float t8 = sh_mul(t7, t4);
          h5[0][elem] = t4;
          b0[0] = (b0[0] + t7);
          b0[1] = (b0[1] + t8);
        }
      }
      sh_group_sum<16, 512>(b0);
      h6 = b0[0];
      h7 = b0[1];
    }
    {
      const float t0 = h6;
      const float t2 = (t0 / 40.0f);
      h8 = t2;
    }
    {
      const int p0 = lane * 4;
      if (p0 < 40 && live) {
        const int base = p0;
        const float t2 = h8;
        const float t4 = h7;
        const float t5 = u0;
        sh_vec<float, 4> o0;
        SH_UNROLL
        for (int elem = 0; elem < 4; ++elem) {
          const float t0 = l1[0][elem];
          const float t1 = l2[0][elem];
          const float t3 = h5[0][elem];
          const float t6 = sh_mul(t0, t1);
          const float t7 = (t6 - t2);
          const float t8 = sh_mul(t3, t4);
          const float t10 = (t8 / 40.0f);
          const float t11 = (t7 - t10);
          const float t12 = sh_mul(t5, t11);
          const float t13 = sh_mul(t0, t3);
          o0[elem] = t12;
          g10[0][elem] = (g10[0][elem] + t13);
          g11[0][elem] = (g11[0][elem] + t0);
        }
        sh_store<4>(x9, (base + i*40), o0);
      }
    }
  }
  {
    SH_SYNC();
    const int p0 = lane * 4;
    if (p0 < 40) {
      sh_store<4>(s_f32, SH_TID / 16 * 40 + p0, g10[0]);
    }
    SH_SYNC();
    for (int p0 = SH_TID; p0 < 40; p0 += 512) {
      float a0 = s_f32[p0];
      for (int p1 = 1; p1 < 32; ++p1) a0 = (a0 + s_f32[p1 * 40 + p0]);
      const int j = p0;
      x10[j] = a0;
    }
  }
  {
    SH_SYNC();
    const int p0 = lane * 4;
    if (p0 < 40) {
      sh_store<4>(s_f32, SH_TID / 16 * 40 + p0, g11[0]);
    }
    SH_SYNC();
    for (int p0 = SH_TID; p0 < 40; p0 += 512) {
      float a0 = s_f32[p0];
      for (int p1 = 1; p1 < 32; ++p1) a0 = (a0 + s_f32[p1 * 40 + p0]);
      const int j = p0;
      x11[j] = a0;
    }
  }
}
/* sh_k0 on 1 blocks */
