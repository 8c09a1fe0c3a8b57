SH_KERNEL(sh_k0, 128, 1)(SH_IN(float) x0, SH_IN(float) x1, SH_OUT(float) x2, SH_OUT(unsigned char) x3) {
  const int p0 = (SH_BID * 128 + SH_TID) * 2;
  if (p0 < 210) {
    const int base = p0;
    const sh_vec<float, 2> v0 = sh_load<2>(x0, base);
    const sh_vec<float, 2> v1 = sh_load<2>(x1, base);
    sh_vec<float, 2> o0;
    sh_vec<unsigned char, 2> o1;
    SH_UNROLL
    for (int elem = 0; elem < 2; ++elem) {
      const float t0 = v0[elem];
      const float t1 = v1[elem];
      const float t2 = (t0 + t1);
      const float t4 = sh_max(t2, 0.0f);
      const int t5 = (t2 > 0.0f);
      o0[elem] = t4;
      o1[elem] = t5;
    }
    sh_store<2>(x2, base, o0);
    sh_store<2>(x3, base, o1);
  }
}
/* sh_k0 on 1 blocks */
