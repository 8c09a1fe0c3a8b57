SH_KERNEL(sh_k0, 128, 1)(SH_IN(long long) x0, SH_IN(float) x1, SH_OUT(float) x2) {
  const int p0 = (SH_BID * 128 + SH_TID) * 4;
  if (p0 < 400) {
    const int base = p0;
    const long t0 = x0[0];
    const sh_vec<float, 4> v1 = sh_load<4>(x1, base);
    sh_vec<float, 4> o0;
    SH_UNROLL
    for (int elem = 0; elem < 4; ++elem) {
      const int i_j = base + elem;
      const float t1 = v1[elem];
      const long t2 = i_j;
      const float t3 = sh_uniform((unsigned long)t0, (unsigned long)t2);
      const int t5 = (t3 < 0.9f);
      const float t6 = (t1 / 0.9f);
      const float t8 = (t5 ? t6 : 0.0f);
      o0[elem] = t8;
    }
    sh_store<4>(x2, base, o0);
  }
}
/* sh_k0 on 1 blocks */
