/* What is written once for the device and for the host; follows device.h or host.h. */
#define SH_WARP (SH_TID / 32)
#define SH_LANE (SH_TID % 32)

SH_FN float sh_to_float(float x) { return x; }
template <class T> struct sh_from;
template <> struct sh_from<float> { static SH_FN_MEMBER float of(float f) { return f; } };
template <> struct sh_from<sh_bf16> { static SH_FN_MEMBER sh_bf16 of(float f) { return sh_bf16_of(f); } };
template <> struct sh_from<sh_f16> { static SH_FN_MEMBER sh_f16 of(float f) { return sh_f16_of(f); } };
/* To the nearest, ties to even. */
template <class T> SH_FN T sh_from_float(float f) { return sh_from<T>::of(f); }

/* Towards zero; NaN becomes 0, what is beyond the last number that one. Narrower integers are its low
 * bits: devices clamp there, and CPUs do what they please. */
template <class T> SH_FN long sh_truncated(T x) {
  constexpr long last = 0x7fffffffffffffffl;
  if (x != x) return 0;
  if (x >= (T)0x1p63) return last;
  return x < (T)-0x1p63 ? -last - 1 : (long)x;
}
SH_FN long sh_to_long(float x) { return sh_truncated(x); }
SH_FN long sh_to_long(double x) { return sh_truncated(x); }

/* The n-th uniform number in [0, 1) under a key by Philox 4x32-10: word n % 4 of counter n / 4. */
SH_FN float sh_uniform(sh_u64 key, sh_u64 n) {
  const sh_u64 at = n / 4;
  sh_u32 c0 = (sh_u32)at, c1 = (sh_u32)(at >> 32), c2 = 0, c3 = 0;
  sh_u32 k0 = (sh_u32)key, k1 = (sh_u32)(key >> 32);
  SH_UNROLL
  for (int round = 0; round < 10; round++) {
    const sh_u64 p0 = (sh_u64)0xd2511f53u * c0, p1 = (sh_u64)0xcd9e8d57u * c2;
    c0 = (sh_u32)(p1 >> 32) ^ c1 ^ k0;
    c1 = (sh_u32)p1;
    c2 = (sh_u32)(p0 >> 32) ^ c3 ^ k1;
    c3 = (sh_u32)p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  const sh_u32 low = n & 1 ? c1 : c0, high = n & 1 ? c3 : c2;
  return (float)((n & 2 ? high : low) >> 8) * 0x1p-24f;
}

/* Reductions over a block, to every thread, in a fixed order. Each may be used again at once. */
struct sh_sum { template <class T> static SH_FN_MEMBER T of(T a, T b) { return a + b; } };
struct sh_prod { template <class T> static SH_FN_MEMBER T of(T a, T b) { return a * b; } };
struct sh_largest {
  template <class T> static SH_FN_MEMBER T of(T a, T b) { T m = b > a ? b : a; return b != b ? b : m; }
};
struct sh_smallest {
  template <class T> static SH_FN_MEMBER T of(T a, T b) { T m = b < a ? b : a; return b != b ? b : m; }
};
/* Over each GROUP of neighbouring threads: a power of two up to 32, or whole warps. */
template <class F, int GROUP, int THREADS, int K, class T> SH_FN void sh_group_reduce(T (&v)[K]) {
  constexpr int n_warps = GROUP / 32;
  static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps, at most 1024 threads");
  static_assert(THREADS % GROUP == 0 && (GROUP % 32 == 0 || 32 % GROUP == 0), "whole groups");
  SH_BLOCK_IS(THREADS);
  SH_UNROLL
  for (int k = 0; k < K; k++) {
    SH_UNROLL
    for (int mask = (GROUP < 32 ? GROUP : 32) / 2; mask > 0; mask >>= 1)
      v[k] = F::of(v[k], sh_shuffle_xor(v[k], mask));
  }
  if constexpr (n_warps > 1) {
    SH_SHARED(T, partial, THREADS / 32 * K);
    /* A call before may still be read. */
    SH_SYNC();
    if (SH_LANE == 0) {
      SH_UNROLL
      for (int k = 0; k < K; k++) partial[SH_WARP * K + k] = v[k];
    }
    SH_SYNC();
    const int first = SH_WARP / n_warps * n_warps;
    SH_UNROLL
    for (int k = 0; k < K; k++) {
      T total = partial[first * K + k];
      for (int w = 1; w < n_warps; w++) total = F::template of<T>(total, partial[(first + w) * K + k]);
      v[k] = total;
    }
  }
}
#define SH_REDUCTION(name, F)                                                       \
  template <int GROUP, int THREADS, int K, class T> SH_FN void sh_group_##name(T (&v)[K]) { \
    sh_group_reduce<F, GROUP, THREADS, K>(v);                                       \
  }                                                                                 \
  template <int THREADS, int K, class T> SH_FN void sh_block_##name(T (&v)[K]) {    \
    sh_group_reduce<F, THREADS, THREADS, K>(v);                                     \
  }                                                                                 \
  template <int THREADS, class T> SH_FN T sh_block_##name(T v) {                    \
    T one[1] = {v};                                                                 \
    sh_group_reduce<F, THREADS, THREADS, 1>(one);                                   \
    return one[0];                                                                  \
  }
SH_REDUCTION(sum, sh_sum)
SH_REDUCTION(prod, sh_prod)
SH_REDUCTION(max, sh_largest)
SH_REDUCTION(min, sh_smallest)
#undef SH_REDUCTION

/* N times the same. */
template <class T, int N> SH_FN sh_vec<T, N> sh_splat(T x) {
  sh_vec<T, N> v;
  SH_UNROLL
  for (int i = 0; i < N; i++) v[i] = x;
  return v;
}
