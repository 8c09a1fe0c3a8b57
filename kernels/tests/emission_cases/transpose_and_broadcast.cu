SH_KERNEL(sh_k0, 256, 1)(SH_IN(float) x0, SH_IN(float) x1, SH_OUT(float) x2) {
  const int p0 = SH_BID * 256 + SH_TID;
  if (p0 < 480) {
    const int j = p0 / 40;
    const int i = p0 % 40;
    const float t1 = x1[j];
    const float t0 = x0[(i + j*40)];
    const float t2 = (t0 + t1);
    x2[(i*12 + j)] = t2;
  }
}

SH_KERNEL(sh_k1, 128, 1)(SH_IN(float) x0, SH_IN(float) x1, SH_OUT(float) x2) {
  const int p0 = (SH_BID * 128 + SH_TID) * 4;
  if (p0 < 480) {
    const int i = p0 / 40;
    const int base = p0 % 40;
    const float t1 = x1[i];
    const sh_vec<float, 4> v0 = sh_load<4>(x0, (base + i*40));
    sh_vec<float, 4> o0;
    SH_UNROLL
    for (int elem = 0; elem < 4; ++elem) {
      const float t0 = v0[elem];
      const float t3 = sh_mul(t0, t1);
      const float t4 = (t3 + 3.0f);
      o0[elem] = t4;
    }
    sh_store<4>(x2, (base + i*40), o0);
  }
}
/* sh_k0 on 2 blocks */
/* sh_k1 on 1 blocks */
