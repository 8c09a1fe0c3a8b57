SH_KERNEL(sh_k0, 64, 1)(SH_IN(float) x0, SH_OUT(float) x1) {
  const int p0 = (SH_BID * 64 + SH_TID) * 4;
  if (p0 < 200) {
    const int n = p0 / 100;
    const int oh = p0 / 20 % 5;
    const int ow = p0 / 4 % 5;
    const int base = p0 % 4;
    float a0[4];
    SH_UNROLL
    for (int elem = 0; elem < 4; ++elem) a0[elem] = (-__builtin_inff());
    for (int r = 0; r < 3; ++r) {
      for (int s = 0; s < 3; ++s) {
        const sh_vec<float, 4> v0 = ((unsigned long)(oh*2 + r - 1) < 9UL) & ((unsigned long)(ow*2 + s - 1) < 10UL) ? sh_load<4>(x0, (base + n*360 + oh*80 + ow*8 + r*40 + s*4 - 44)) : sh_splat<float, 4>((-__builtin_inff()));
        SH_UNROLL
        for (int elem = 0; elem < 4; ++elem) {
          const float t0 = v0[elem];
          a0[elem] = sh_max(a0[elem], t0);
        }
      }
    }
    sh_vec<float, 4> o0;
    SH_UNROLL
    for (int elem = 0; elem < 4; ++elem) {
      o0[elem] = a0[elem];
    }
    sh_store<4>(x1, (base + n*100 + oh*20 + ow*4), o0);
  }
}
/* sh_k0 on 1 blocks */
