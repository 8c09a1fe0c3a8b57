SH_KERNEL(sh_k0, 256, 1)(SH_IN(float) x0, SH_IN(float) x1, SH_OUT(float) x2) {
  const int p0 = SH_BID * 256 + SH_TID;
  const int n = p0 / 768;
  const int i_p = p0 / 256 % 3;
  const int p_phase = p0 / 128 % 2;
  const int c = p0 / 8 % 16;
  const int s = p0 % 8;
  float a0 = 0.0f;
  for (int r = 0; r < 2; ++r) {
    const long t8 = (r*2 + ((p_phase + 1) % 2));
    const int t10 = (t8 < 3L);
    const long t11 = (i_p - r + ((p_phase + 1) / 2));
    const int t12 = (t11 < 3L);
    const int t13 = (t11 >= 0L);
    const int t14 = (t12 & t13);
    for (int q = 0; q < 4; ++q) {
      const float t0 = ((unsigned long)(i_p - r + ((p_phase + 1) / 2)) < 3UL) ? (float)x0[(c + i_p*64 + n*192 + q*16 - r*64 + ((p_phase + 1) / 2)*64)] : 0.0f;
      const float t1 = ((unsigned long)(r*2 + ((p_phase + 1) % 2)) < 3UL) & ((unsigned long)(-q*2 + s + 2) < 5UL) ? (float)x1[(c*15 - q*2 + r*10 + s + ((p_phase + 1) % 2)*5 + 2)] : 0.0f;
      const long t2 = (-q*2 + s + 2);
      const int t4 = (t2 < 5L);
      const int t6 = (t2 >= 0L);
      const int t7 = (t4 & t6);
      const float t15 = sh_mul(t0, t1);
      const float t17 = (t14 ? t15 : 0.0f);
      const float t18 = (t10 ? t17 : 0.0f);
      const float t19 = (t7 ? t18 : 0.0f);
      a0 = (a0 + t19);
    }
  }
  x2[(c + i_p*256 + n*768 + p_phase*128 + s*16)] = a0;
}
/* sh_k0 on 6 blocks */
