SH_KERNEL(sh_k0, 256, 1)(SH_OUT(float) x0) {
  const long p = (long)SH_BID * 256 + SH_TID;
  if (p < 99) x0[p] = 0.0f;
}

SH_KERNEL(sh_k1, 64, 1)(SH_IN(long long) x0, SH_IN(float) x1, SH_OUT(float) x2) {
  const int part = SH_BID;
  const int p0 = SH_TID;
  const int j = p0;
  float a0 = 0.0f;
  long at = -1;
  for (int first = 0; first < 24; first += 32) {
    long to = -1;
    if (first + SH_LANE < 24) {
      const int p1 = first + SH_LANE;
      const int b_i_t = p1;
      const long t1 = x0[b_i_t];
      to = t1;
    }
    unsigned found = sh_ballot(to >= 0 && to % 3 == part);
    while (found) {
      const int p2 = sh_lowest(found);
      found &= found - 1;
      const long next = sh_shuffle(to, p2);
      if (next != at) {
        if (at >= 0 && p0 < 33) {
          x2[j + at*33] = (x2[j + at*33] + a0);
        }
        at = next;
        a0 = 0.0f;
      }
      if (p0 < 33) {
        const int p1 = first + p2;
        const int b_i_t = p1;
        const float t0 = x1[(b_i_t*33 + j)];
        a0 = (a0 + t0);
      }
    }
  }
  if (at >= 0 && p0 < 33) {
    x2[j + at*33] = (x2[j + at*33] + a0);
  }
}
/* sh_k0 on 1 blocks */
/* sh_k1 on 3 blocks */
