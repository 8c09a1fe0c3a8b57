/* Vector mathematics for emitted kernels.
 *
 * Every float function is branch-free, so that a loop over it becomes vector code;
 * each states its greatest error in units in the last place, measured against f64
 * by the tests with and without fused multiply-add. All keep the meaning of NaN,
 * infinities, signed zeros and subnormal numbers. Includes nothing.
 * Names: sh_NAME for float, sh_NAME_f64 for double (doubles.h, or the C library's
 * functions, 1 ulp).
 */
typedef __UINT32_TYPE__ sh_u32;
typedef __INT32_TYPE__ sh_i32;
typedef __UINT64_TYPE__ sh_u64;
typedef __INT64_TYPE__ sh_i64;

#define SH_FN static inline __attribute__((always_inline, unused))
#define SH_INF __builtin_inff()
#define SH_NAN __builtin_nanf("")

/* a b + c, rounded once where the processor can. Compilers fuse nothing by themselves: kernels that compute a value
 * again have to find the same bits. */
#if defined(__FP_FAST_FMAF) || defined(__FMA__)
SH_FN float sh_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
SH_FN float sh_fma(float a, float b, float c) { return a * b + c; }
#endif
#if defined(__FP_FAST_FMA) || defined(__FMA__)
SH_FN double sh_fma_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
SH_FN double sh_fma_f64(double a, double b, double c) { return a * b + c; }
#endif

SH_FN sh_u32 sh_bits(float x) { union { float f; sh_u32 u; } v = {x}; return v.u; }
SH_FN float sh_from_bits(sh_u32 u) { union { sh_u32 u; float f; } v = {u}; return v.f; }
SH_FN float sh_abs(float x) { return __builtin_fabsf(x); }
SH_FN float sh_copysign(float x, float s) {
  return sh_from_bits((sh_bits(x) & 0x7fffffffu) | (sh_bits(s) & 0x80000000u));
}

/* 2^n for -126 <= n <= 127. */
SH_FN float sh_pow2i(sh_i32 n) { return sh_from_bits((sh_u32)(n + 127) << 23); }

/* x = n ln2 + r with |r| <= ln2/2, for |x| <= 150. Adding 1.5 * 2^23 rounds to an
 * integer, which then also stands in the low bits; ln2 is split so that the first
 * product is exact. */
SH_FN float sh_reduce_ln2(float x, sh_i32 *n) {
  float t = sh_fma(x, 1.44269504f, 12582912.0f);
  float f = t - 12582912.0f;
  *n = (sh_i32)(sh_bits(t) - 0x4b400000u);
  return sh_fma(f, 2.12194440e-4f, sh_fma(f, -0.693359375f, x));
}

/* e^r - 1 for |r| <= ln2/2. Minimax fit, relative error 2^-31. */
SH_FN float sh_expm1_reduced(float r) {
  float q = 0x1.9e7cf8p-13f;
  q = sh_fma(q, r, 0x1.6d3a84p-10f);
  q = sh_fma(q, r, 0x1.1112d4p-7f);
  q = sh_fma(q, r, 0x1.5554f8p-5f);
  q = sh_fma(q, r, 0x1.555554p-3f);
  q = sh_fma(q, r, 0.5f);
  return sh_fma(r * r, q, r);
}

/* e^x, 1 ulp. */
SH_FN float sh_exp(float x) {
  /* Beyond these bounds the result is 0 or infinity; NaN passes all selects. What is 0 is not computed: results below
   * the smallest normal number take a hundred times as long, and a mask makes many. */
  float c = x < -104.0f ? 0.0f : x;
  c = c > 89.0f ? 89.0f : c;
  sh_i32 n;
  float r = sh_reduce_ln2(c, &n);
  float p = sh_expm1_reduced(r) + 1.0f;
  /* Two factors reach below the smallest normal and above the largest number. */
  sh_i32 h = n >> 1;
  float y = p * sh_pow2i(h) * sh_pow2i(n - h);
  return x < -104.0f ? 0.0f : y;
}

/* e^x - 1, 1.5 ulp. */
SH_FN float sh_expm1(float x) {
  float c = x < -20.0f ? -20.0f : x;
  c = c > 89.0f ? 89.0f : c;
  sh_i32 n;
  float r = sh_reduce_ln2(c, &n);
  /* Half the result, since 2^128 is not a number. */
  float half = sh_pow2i(n - 1);
  float y = 2.0f * sh_fma(half, sh_expm1_reduced(r), half - 0.5f);
  /* Subnormal halves would lose a bit, and -0 its sign. */
  return sh_abs(x) < 0x1p-30f ? x : y;
}

/* ln of a positive finite number, plus `low`; bits of e and m: x = m 2^e with m in
 * [2/3, 4/3). Minimax fit, relative error 2^-27.7. */
SH_FN float sh_log_positive(float x, float low) {
  int tiny = x < 0x1p-126f;
  float y = tiny ? x * 8388608.0f : x;
  sh_u32 bits = sh_bits(y);
  sh_i32 e = (sh_i32)(bits - 0x3f2aaaabu) >> 23;
  float z = sh_from_bits(bits - ((sh_u32)e << 23)) - 1.0f;
  float f = (float)e - (tiny ? 23.0f : 0.0f);
  float p = -0x1.07e5f4p-3f;
  p = sh_fma(p, z, 0x1.1e73a0p-3f);
  p = sh_fma(p, z, -0x1.f32078p-4f);
  p = sh_fma(p, z, 0x1.1ed424p-3f);
  p = sh_fma(p, z, -0x1.559d36p-3f);
  p = sh_fma(p, z, 0x1.99d05ep-3f);
  p = sh_fma(p, z, -0x1.fffef4p-3f);
  p = sh_fma(p, z, 0x1.555506p-2f);
  float s = z * z;
  float t = sh_fma(s * z, p, sh_fma(f, -2.12194440e-4f, low));
  t = sh_fma(s, -0.5f, t);
  return sh_fma(f, 0.693359375f, z + t);
}

/* Logarithm's value outside the positive finite numbers. */
SH_FN float sh_log_special(float x, float y) {
  float zero_or_nan = x == 0.0f ? -SH_INF : SH_NAN;
  float positive = x < SH_INF ? y : x;
  return x > 0.0f ? positive : zero_or_nan;
}

/* ln x, 1 ulp. */
SH_FN float sh_log(float x) { return sh_log_special(x, sh_log_positive(x, 0.0f)); }

/* ln(1 + x), 1 ulp: the rounding error of 1 + x comes back as a correction. */
SH_FN float sh_log1p(float x) {
  float u = 1.0f + x;
  float lost = x < 1.0f ? x - (u - 1.0f) : 1.0f - (u - x);
  float y = sh_log_special(u, sh_log_positive(u, lost / u));
  return sh_abs(x) < 0x1p-30f ? x : y;
}

/* tanh x = m / (m + 2) with m = e^2x - 1, 2.5 ulp. */
SH_FN float sh_tanh(float x) {
  float a = sh_abs(x);
  a = a > 10.0f ? 10.0f : a;
  sh_i32 n;
  float r = sh_reduce_ln2(2.0f * a, &n);
  float scale = sh_pow2i(n);
  float m = sh_fma(scale, sh_expm1_reduced(r), scale - 1.0f);
  float y = sh_copysign(m / (m + 2.0f), x);
  return x != x ? x : y;
}

/* 1 / (1 + e^-x), 2.5 ulp; e^-|x| cannot overflow, so small results stay exact. */
SH_FN float sh_sigmoid(float x) {
  float e = sh_exp(-sh_abs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* erf x = 1 - e^-Q(|x|), 2.5 ulp; Q is a minimax fit, by which erf has a relative error of 2^-28. One polynomial for
 * all x takes fewer operations than one near zero and one beyond. */
SH_FN float sh_erf(float x) {
  float a = sh_abs(x);
  a = a > 3.95f ? 3.95f : a;
  float q = -0x1.369768p-17f;
  q = sh_fma(q, a, 0x1.ed6d16p-14f);
  q = sh_fma(q, a, -0x1.4bca3cp-11f);
  q = sh_fma(q, a, 0x1.b50096p-10f);
  q = sh_fma(q, a, -0x1.5061fp-13f);
  q = sh_fma(q, a, -0x1.39cdc4p-6f);
  q = sh_fma(q, a, 0x1.a4fa5ep-4f);
  q = sh_fma(q, a, 0x1.45f2fap-1f);
  q = sh_fma(q, a, -0x1.d1p-25f);
  q = sh_fma(q, a, 0x1.20dd76p+0f * a);
  sh_i32 n;
  float r = sh_reduce_ln2(-q, &n);
  float scale = sh_pow2i(n);
  return sh_copysign(sh_fma(-scale, sh_expm1_reduced(r), 1.0f - scale), x);
}

/* 1 / sqrt(x), 1.5 ulp. */
SH_FN float sh_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

/* log2 of a float >= 0 in double, relative error 2^-39: the series of
 * atanh((m-1)/(m+1)), m in [sqrt(1/2), sqrt(2)). */
SH_FN double sh_log2_wide(float x) {
  int tiny = x < 0x1p-126f;
  sh_u32 bits = sh_bits(tiny ? x * 8388608.0f : x);
  sh_i32 e = (sh_i32)(bits - 0x3f3504f3u) >> 23;
  double m = (double)sh_from_bits(bits - ((sh_u32)e << 23));
  double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 2.0 / 13.0;
  p = sh_fma_f64(p, z, 2.0 / 11.0);
  p = sh_fma_f64(p, z, 2.0 / 9.0);
  p = sh_fma_f64(p, z, 2.0 / 7.0);
  p = sh_fma_f64(p, z, 2.0 / 5.0);
  p = sh_fma_f64(p, z, 2.0 / 3.0);
  p = sh_fma_f64(p, z, 2.0);
  return p * s * 1.4426950408889634 + (double)(e - (tiny ? 23 : 0));
}

/* 2^t in double for |t| <= 300, relative error 2^-31 (Taylor of degree 8). */
SH_FN double sh_exp2_wide(double t) {
  double shifted = t + 0x1.8p52;
  double f = (t - (shifted - 0x1.8p52)) * 0.6931471805599453;
  double p = 1.0 / 40320.0;
  p = sh_fma_f64(p, f, 1.0 / 5040.0);
  p = sh_fma_f64(p, f, 1.0 / 720.0);
  p = sh_fma_f64(p, f, 1.0 / 120.0);
  p = sh_fma_f64(p, f, 1.0 / 24.0);
  p = sh_fma_f64(p, f, 1.0 / 6.0);
  p = sh_fma_f64(p, f, 0.5);
  p = sh_fma_f64(p, f, 1.0);
  p = sh_fma_f64(p, f, 1.0);
  union { double d; sh_u64 u; } n = {shifted}, scale;
  scale.u = (n.u + 1023u) << 52;
  return p * scale.d;
}

/* x^y as C defines it, 1 ulp; through doubles, so half as wide. */
SH_FN float sh_pow(float x, float y) {
  float a = sh_abs(x);
  double l = sh_log2_wide(a);
  l = a == 0.0f ? -__builtin_inf() : l;
  l = a < SH_INF ? l : (double)a;
  double t = (double)y * l;
  double bounded = t < -300.0 ? -300.0 : t;
  bounded = bounded > 300.0 ? 300.0 : bounded;
  /* NaN stays NaN. */
  float r = (float)sh_exp2_wide(bounded);
  /* |x| = 1 with y infinite gave 0 * inf. Bitwise `and`: `&&` would branch. */
  r = ((a == 1.0f) & (y == y)) ? 1.0f : r;
  /* Infinity counts as an even integer: inf - inf is not 1/2. */
  float half = 0.5f * y;
  sh_u32 odd = half - __builtin_floorf(half) == 0.5f ? 0x80000000u : 0u;
  r = sh_from_bits(sh_bits(r) ^ (sh_bits(x) & odd));
  float fractional = __builtin_floorf(y) == y ? r : SH_NAN;
  float finite_negative = a < SH_INF ? fractional : r;
  r = x < 0.0f ? finite_negative : r;
  r = x == 1.0f ? 1.0f : r;
  return y == 0.0f ? 1.0f : r;
}

/* Simple ones. Minimum and maximum are NaN if either operand is, as in PyTorch; of equal operands, such as
   zeros with both signs, they are the first. */
SH_FN float sh_sqrt(float x) { return __builtin_sqrtf(x); }
SH_FN float sh_recip(float x) { return 1.0f / x; }
SH_FN float sh_floor(float x) { return __builtin_floorf(x); }
SH_FN float sh_ceil(float x) { return __builtin_ceilf(x); }
SH_FN float sh_round(float x) { return __builtin_rintf(x); }
SH_FN float sh_trunc(float x) { return __builtin_truncf(x); }
SH_FN float sh_sign(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : x); }
/* Two selects rather than one on `a > b || a != a`: a condition with two parts becomes a branch that
   keeps loops from being vectorized. If a is NaN, the comparison is false and a is taken. */
SH_FN float sh_min(float a, float b) { float m = b < a ? b : a; return b != b ? b : m; }
SH_FN float sh_max(float a, float b) { float m = b > a ? b : a; return b != b ? b : m; }
/* Integers in the order of floats, where NaN is the largest (the smallest for minima) and -0 is below 0. */
SH_FN sh_i32 sh_ordered(sh_i32 bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
SH_FN sh_i32 sh_max_key(float x) { return sh_ordered(x != x ? 0x7fc00000 : (sh_i32)sh_bits(x)); }
SH_FN sh_i32 sh_min_key(float x) { return sh_ordered(x != x ? (sh_i32)0xffc00000u : (sh_i32)sh_bits(x)); }
SH_FN float sh_of_key(sh_i32 key) { return sh_from_bits((sh_u32)sh_ordered(key)); }
SH_FN float sh_floordiv(float a, float b) { return __builtin_floorf(a / b); }
/* Remainder with the sign of b. */
SH_FN float sh_mod(float a, float b) {
  float r = __builtin_fmodf(a, b);
  return (r != 0.0f && (r < 0.0f) != (b < 0.0f)) ? r + b : r;
}

/* Rare in networks: the C library's, one number at a time. */
SH_FN float sh_atan(float x) { return __builtin_atanf(x); }
SH_FN float sh_asin(float x) { return __builtin_asinf(x); }
SH_FN float sh_acos(float x) { return __builtin_acosf(x); }
SH_FN float sh_sinh(float x) { return __builtin_sinhf(x); }
SH_FN float sh_cosh(float x) { return __builtin_coshf(x); }
SH_FN float sh_asinh(float x) { return __builtin_asinhf(x); }
SH_FN float sh_acosh(float x) { return __builtin_acoshf(x); }
SH_FN float sh_atanh(float x) { return __builtin_atanhf(x); }
SH_FN float sh_atan2(float y, float x) { return __builtin_atan2f(y, x); }

SH_FN double sh_abs_f64(double x) { return __builtin_fabs(x); }
SH_FN double sh_erf_f64(double x) { return __builtin_erf(x); }
SH_FN double sh_sqrt_f64(double x) { return __builtin_sqrt(x); }
SH_FN double sh_rsqrt_f64(double x) { return 1.0 / __builtin_sqrt(x); }
SH_FN double sh_recip_f64(double x) { return 1.0 / x; }
SH_FN double sh_sin_f64(double x) { return __builtin_sin(x); }
SH_FN double sh_cos_f64(double x) { return __builtin_cos(x); }
SH_FN double sh_tan_f64(double x) { return __builtin_tan(x); }
SH_FN double sh_pow_f64(double x, double y) { return __builtin_pow(x, y); }
SH_FN double sh_floor_f64(double x) { return __builtin_floor(x); }
SH_FN double sh_ceil_f64(double x) { return __builtin_ceil(x); }
SH_FN double sh_round_f64(double x) { return __builtin_rint(x); }
SH_FN double sh_trunc_f64(double x) { return __builtin_trunc(x); }
SH_FN double sh_sign_f64(double x) { return x > 0.0 ? 1.0 : (x < 0.0 ? -1.0 : x); }
SH_FN double sh_min_f64(double a, double b) { double m = b < a ? b : a; return b != b ? b : m; }
SH_FN double sh_max_f64(double a, double b) { double m = b > a ? b : a; return b != b ? b : m; }
SH_FN sh_i64 sh_bits_f64(double x) { union { double f; sh_i64 i; } v = {x}; return v.i; }
SH_FN sh_i64 sh_ordered_f64(sh_i64 bits) { return bits ^ ((bits >> 63) & 0x7fffffffffffffffLL); }
SH_FN sh_i64 sh_max_key_f64(double x) { return sh_ordered_f64(x != x ? 0x7ff8000000000000LL : sh_bits_f64(x)); }
SH_FN sh_i64 sh_min_key_f64(double x) {
  return sh_ordered_f64(x != x ? (sh_i64)0xfff8000000000000ULL : sh_bits_f64(x));
}
SH_FN double sh_of_key_f64(sh_i64 key) {
  union { sh_i64 i; double f; } v = {sh_ordered_f64(key)};
  return v.f;
}
SH_FN double sh_floordiv_f64(double a, double b) { return __builtin_floor(a / b); }
SH_FN double sh_mod_f64(double a, double b) {
  double r = __builtin_fmod(a, b);
  return (r != 0.0 && (r < 0.0) != (b < 0.0)) ? r + b : r;
}
SH_FN double sh_atan_f64(double x) { return __builtin_atan(x); }
SH_FN double sh_asin_f64(double x) { return __builtin_asin(x); }
SH_FN double sh_acos_f64(double x) { return __builtin_acos(x); }
SH_FN double sh_sinh_f64(double x) { return __builtin_sinh(x); }
SH_FN double sh_cosh_f64(double x) { return __builtin_cosh(x); }
SH_FN double sh_asinh_f64(double x) { return __builtin_asinh(x); }
SH_FN double sh_acosh_f64(double x) { return __builtin_acosh(x); }
SH_FN double sh_atanh_f64(double x) { return __builtin_atanh(x); }
SH_FN double sh_atan2_f64(double y, double x) { return __builtin_atan2(y, x); }
