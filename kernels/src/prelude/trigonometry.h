/* sin, cos and tan in single precision, for the CPU and for a GPU; follows what defines SH_FN, sh_abs,
 * sh_bits. NVIDIA's own keep the bits of a large angle in an array, which is a stack frame. */
/* |x| = (4 k + quadrant + f) pi/2 with |f| <= 1/2 for every finite x; returns
 * f pi/2. Payne and Hanek's method: a window of the bits of 2/pi, placed so that
 * multiples of 4 fall off its upper end, times the 24-bit significand. */
SH_FN float sh_reduce_half_pi(float x, sh_u32 *quadrant) {
  /* 26 zeros, then the bits of 2/pi. */
  static const sh_u32 two_over_pi[8] = {0x00000028u, 0xbe60db93u, 0x91054a7fu, 0x09d5f47du,
                                        0x4d377036u, 0xd8a5664fu, 0x10e4107fu, 0x9458eaf7u};
  float a = sh_abs(x);
  sh_u32 bits = sh_bits(a);
  sh_u32 significand = (bits & 0x7fffffu) | 0x800000u;
  /* Below 1/2 the result is x itself: any window will do. */
  sh_i32 place = (sh_i32)(bits >> 23) - 126;
  place = place < 0 ? 0 : place;
  place = place > 128 ? 128 : place;
  sh_u32 word = (sh_u32)place >> 5, shift = (sh_u32)place & 31u;
  sh_u32 w0 = two_over_pi[word], w1 = two_over_pi[word + 1];
  sh_u32 w2 = two_over_pi[word + 2], w3 = two_over_pi[word + 3];
  sh_u32 high = (w0 << shift) | ((w1 >> 1) >> (31u - shift));
  sh_u32 mid = (w1 << shift) | ((w2 >> 1) >> (31u - shift));
  sh_u32 low = (w2 << shift) | ((w3 >> 1) >> (31u - shift));
  sh_u64 sum = (sh_u64)significand * mid + (((sh_u64)significand * low) >> 32);
  /* Bits 63 and 62 of the whole count quarter turns, the rest is the fraction. */
  sh_u32 top = (sh_u32)(sum >> 32) + significand * high;
  sh_u32 bottom = (sh_u32)sum;
  sh_u32 q = (top + 0x20000000u) >> 30;
  sh_i32 fraction_high = (sh_i32)((top << 2) | (bottom >> 30));
  sh_i32 fraction_low = (sh_i32)((bottom << 2) >> 1);
  double f = (double)fraction_high * 0x1p-32 + (double)fraction_low * 0x1p-63;
  float r = (float)(f * 1.5707963267948966);
  int small = a < 0.5f;
  *quadrant = small ? 0u : (q & 3u);
  return small ? a : r;
}

/* The same where a branch is cheap and most angles are small, as on a GPU: up to 2^16 by Cody and
 * Waite's method, pi/2 in three parts; 1 ulp. */
#ifdef SH_BRANCHING
SH_FN float sh_reduce_angle(float x, sh_u32 *quadrant) {
  float a = sh_abs(x);
  if (!(a < 65536.0f)) return sh_reduce_half_pi(x, quadrant);
  float n = __builtin_rintf(a * 0x1.45f306p-1f);
  float r = __builtin_fmaf(n, -0x1.921fb4p+0f, a);
  r = __builtin_fmaf(n, -0x1.4442d2p-24f, r);
  r = __builtin_fmaf(n, 0x1.ee59dap-50f, r);
  *quadrant = (sh_u32)n & 3u;
  return r;
}
#else
#define sh_reduce_angle sh_reduce_half_pi
#endif

/* sin and cos for |r| <= pi/4; minimax fits of relative error 2^-27.9 and 2^-33. */
SH_FN float sh_sin_reduced(float r) {
  float s = r * r;
  float p = -0x1.9951fap-13f;
  p = sh_fma(p, s, 0x1.110774p-7f);
  p = sh_fma(p, s, -0x1.555546p-3f);
  return sh_fma(r * s, p, r);
}
SH_FN float sh_cos_reduced(float r) {
  float s = r * r;
  float p = 0x1.99e816p-16f;
  p = sh_fma(p, s, -0x1.6c0c28p-10f);
  p = sh_fma(p, s, 0x1.55554ap-5f);
  return sh_fma(s * s, p, 1.0f - 0.5f * s);
}

/* sin x, 2 ulp for every finite x. */
SH_FN float sh_sin(float x) {
  sh_u32 q;
  float r = sh_reduce_angle(x, &q);
  float y = (q & 1u) ? sh_cos_reduced(r) : sh_sin_reduced(r);
  y = sh_from_bits(sh_bits(y) ^ ((q & 2u) << 30) ^ (sh_bits(x) & 0x80000000u));
  return sh_abs(x) < SH_INF ? y : SH_NAN;
}

/* cos x, 2 ulp for every finite x. */
SH_FN float sh_cos(float x) {
  sh_u32 q;
  float r = sh_reduce_angle(x, &q);
  float y = (q & 1u) ? sh_sin_reduced(r) : sh_cos_reduced(r);
  y = sh_from_bits(sh_bits(y) ^ (((q + 1u) & 2u) << 30));
  return sh_abs(x) < SH_INF ? y : SH_NAN;
}

/* tan x, 3.5 ulp for every finite x. */
SH_FN float sh_tan(float x) {
  sh_u32 q;
  float r = sh_reduce_angle(x, &q);
  float s = sh_sin_reduced(r), c = sh_cos_reduced(r);
  int swap = (q & 1u) != 0;
  float y = (swap ? -c : s) / (swap ? s : c);
  y = sh_from_bits(sh_bits(y) ^ (sh_bits(x) & 0x80000000u));
  return sh_abs(x) < SH_INF ? y : SH_NAN;
}
