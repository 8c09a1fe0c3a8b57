/* Vector mathematics in double precision: exponentials and logarithms, by the methods of math.h, which comes before.
 *
 * Errors are measured against 80-bit numbers. Shifts to the right are of unsigned numbers, and integers become
 * doubles through their bits: AVX2 has no other vector instructions for 64-bit integers.
 */
SH_FN sh_u64 sh_bits_of_f64(double x) { union { double f; sh_u64 u; } v = {x}; return v.u; }
SH_FN double sh_f64_of_bits(sh_u64 u) { union { sh_u64 u; double f; } v = {u}; return v.f; }
SH_FN double sh_copysign_f64(double x, double s) {
  const sh_u64 sign = 0x8000000000000000ull;
  return sh_f64_of_bits((sh_bits_of_f64(x) & ~sign) | (sh_bits_of_f64(s) & sign));
}

/* 2^n for -1022 <= n <= 1023. */
SH_FN double sh_pow2i_f64(sh_u64 n) { return sh_f64_of_bits((n + 1023u) << 52); }

/* x = n ln2 + r with |r| <= ln2/2, for |x| <= 800; n modulo 2^64. The first part of ln2 has 32 bits. */
SH_FN double sh_reduce_ln2_f64(double x, sh_u64 *n) {
  double shifted = sh_fma_f64(x, 0x1.71547652b82fep+0, 0x1.8p52);
  double f = shifted - 0x1.8p52;
  *n = sh_bits_of_f64(shifted) - 0x4338000000000000ull;
  return sh_fma_f64(f, -0x1.a39ef35793c76p-33, sh_fma_f64(f, -0x1.62e42feep-1, x));
}

/* e^r - 1 for |r| <= ln2/2. Minimax fit, absolute error 2^-56. */
SH_FN double sh_expm1_reduced_f64(double r) {
  double q = 0x1.af632bae1c31ep-26;
  q = sh_fma_f64(q, r, 0x1.2891860f119d7p-22);
  q = sh_fma_f64(q, r, 0x1.71ddf6b37121cp-19);
  q = sh_fma_f64(q, r, 0x1.a019b90c837fdp-16);
  q = sh_fma_f64(q, r, 0x1.a01a01b00c602p-13);
  q = sh_fma_f64(q, r, 0x1.6c16c1788c0b6p-10);
  q = sh_fma_f64(q, r, 0x1.111111110f803p-7);
  q = sh_fma_f64(q, r, 0x1.5555555553d62p-5);
  q = sh_fma_f64(q, r, 0x1.5555555555558p-3);
  q = sh_fma_f64(q, r, 0.5);
  return sh_fma_f64(r * r, q, r);
}

/* e^x, 1.25 ulp. Steps as in sh_exp. */
SH_FN double sh_exp_f64(double x) {
  double c = x < -746.0 ? 0.0 : x;
  c = c > 710.0 ? 710.0 : c;
  sh_u64 n;
  double p = sh_expm1_reduced_f64(sh_reduce_ln2_f64(c, &n)) + 1.0;
  sh_u64 h = ((n + 2048u) >> 1) - 1024u;
  double y = p * sh_pow2i_f64(h) * sh_pow2i_f64(n - h);
  return x < -746.0 ? 0.0 : y;
}

/* e^x - 1, 2 ulp. */
SH_FN double sh_expm1_f64(double x) {
  double c = x < -50.0 ? -50.0 : x;
  c = c > 710.0 ? 710.0 : c;
  sh_u64 n;
  double r = sh_reduce_ln2_f64(c, &n);
  double half = sh_pow2i_f64(n - 1u);
  double y = 2.0 * sh_fma_f64(half, sh_expm1_reduced_f64(r), half - 0.5);
  return __builtin_fabs(x) < 0x1p-60 ? x : y;
}

/* ln of a positive finite number, plus `low`: x = m 2^e with m in [sqrt(1/2), sqrt(2)), and ln m is a series in
 * s = (m - 1)/(m + 1). Minimax fit, relative error 2^-56. */
SH_FN double sh_log_positive_f64(double x, double low) {
  int tiny = x < 0x1p-1022;
  sh_u64 t = sh_bits_of_f64(tiny ? x * 0x1p54 : x) + (0x3ff0000000000000ull - 0x3fe6a09e667f3bcdull);
  double m = sh_f64_of_bits((t & 0xfffffffffffffull) + 0x3fe6a09e667f3bcdull);
  double e = sh_f64_of_bits((t >> 52) | 0x4330000000000000ull) - (tiny ? 0x1p52 + 1077.0 : 0x1p52 + 1023.0);
  double f = m - 1.0, s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  double q = 0x1.2b5fc0c734e05p-3;
  q = sh_fma_f64(q, z, 0x1.39fdb9173ca66p-3);
  q = sh_fma_f64(q, z, 0x1.7462ba29cd8fap-3);
  q = sh_fma_f64(q, z, 0x1.c71c62d03623bp-3);
  q = sh_fma_f64(q, z, 0x1.2492492e03ec0p-2);
  q = sh_fma_f64(q, z, 0x1.9999999995223p-2);
  q = sh_fma_f64(q, z, 0x1.5555555555558p-1);
  double rest = sh_fma_f64(s, sh_fma_f64(q, z, half), sh_fma_f64(e, 0x1.a39ef35793c76p-33, low));
  return sh_fma_f64(e, 0x1.62e42feep-1, f - (half - rest));
}

/* Logarithm's value outside the positive finite numbers. */
SH_FN double sh_log_special_f64(double x, double y) {
  double zero_or_nan = x == 0.0 ? -__builtin_inf() : __builtin_nan("");
  double positive = x < __builtin_inf() ? y : x;
  return x > 0.0 ? positive : zero_or_nan;
}

/* ln x, 1 ulp. */
SH_FN double sh_log_f64(double x) { return sh_log_special_f64(x, sh_log_positive_f64(x, 0.0)); }

/* ln(1 + x), 1 ulp: the rounding error of 1 + x comes back as a correction. */
SH_FN double sh_log1p_f64(double x) {
  double u = 1.0 + x;
  double lost = x < 1.0 ? x - (u - 1.0) : 1.0 - (u - x);
  double y = sh_log_special_f64(u, sh_log_positive_f64(u, lost / u));
  return __builtin_fabs(x) < 0x1p-60 ? x : y;
}

/* tanh x = m / (m + 2) with m = e^2x - 1, 2.5 ulp. */
SH_FN double sh_tanh_f64(double x) {
  double a = __builtin_fabs(x);
  a = a > 22.0 ? 22.0 : a;
  sh_u64 n;
  double r = sh_reduce_ln2_f64(2.0 * a, &n);
  double scale = sh_pow2i_f64(n);
  double m = sh_fma_f64(scale, sh_expm1_reduced_f64(r), scale - 1.0);
  double y = sh_copysign_f64(m / (m + 2.0), x);
  return x != x ? x : y;
}

/* 1 / (1 + e^-x), 2.5 ulp. */
SH_FN double sh_sigmoid_f64(double x) {
  double e = sh_exp_f64(-__builtin_fabs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}
