SH_KERNEL(sh_k0, 256, 1)(SH_IN(float) x0, SH_OUT(float) w1) {
  const int part = SH_BID % 4;
  const int lane = SH_TID;
  const int i = (SH_BID / 4);
  float g1 = 0.0f;
  {
    for (int p0 = (part * 256 + lane); p0 < 9001; p0 += 1024) {
      const int j = p0;
      const float t0 = x0[(i*9001 + j)];
      g1 = (g1 + t0);
    }
  }
  {
    const float a0 = sh_block_sum<256>(g1);
    if (SH_TID == 0) w1[part*5 + i] = a0;
  }
}

SH_KERNEL(sh_k1, 512, 1)(SH_IN(float) x0, SH_OUT(float) x1) {
  SH_SHARED(float, s0, 512);
  const int p0 = SH_BID * 32 + SH_LANE;
  float a0 = 0.0f;
  if (p0 < 5) {
    for (int part = SH_WARP; part < 4; part += 16) a0 = (a0 + x0[part * 5 + p0]);
  }
  s0[SH_TID] = a0;
  SH_SYNC();
  if (SH_WARP == 0 && p0 < 5) {
    for (int p1 = 1; p1 < 16; ++p1) a0 = (a0 + s0[p1 * 32 + SH_LANE]);
    x1[p0] = a0;
  }
}
/* sh_k0 on 20 blocks */
/* sh_k1 on 1 blocks */
