/* What emitted kernels are made of, on a GPU. Compiled by NVRTC; includes nothing. */
typedef unsigned int sh_u32;
typedef int sh_i32;
typedef unsigned long long sh_u64;
typedef long long sh_i64;

#define SH_FN static __device__ __forceinline__
#define SH_FN_MEMBER __device__ __forceinline__
#define SH_KERNEL(name, threads, min_blocks) \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) name
#define SH_IN(T) const T *__restrict__
#define SH_OUT(T) T *__restrict__
#define SH_AT_IN(T) const T *
#define SH_AT_OUT(T) T *
#define SH_SHARED(T, name, n) __shared__ __align__(16) T name[n]
#define SH_DYNAMIC(name) extern __shared__ __align__(1024) unsigned char name[]
#define SH_CARVE(T, name, pool, byte_offset, n) T *const name = reinterpret_cast<T *>((pool) + (byte_offset))
#define SH_TID ((int)threadIdx.x)
#define SH_BID ((int)blockIdx.x)
#define SH_BID_Y ((int)blockIdx.y)
#define SH_BID_Z ((int)blockIdx.z)
#define SH_N_BLOCKS ((int)gridDim.x)
#define SH_SYNC() __syncthreads()
#define SH_WARP_SYNC() __syncwarp()
#define SH_BLOCK_IS(n)
#define SH_UNROLL _Pragma("unroll")

/* The spellings of the C emitter. */
#define __builtin_inff() __int_as_float(0x7f800000)
#define __builtin_inf() __longlong_as_double(0x7ff0000000000000ll)
#define __builtin_nanf(text) __int_as_float(0x7fc00000)
#define __builtin_nan(text) __longlong_as_double(0x7ff8000000000000ll)
#define __builtin_fabsf fabsf
#define __builtin_fabs fabs
#define __builtin_sqrtf sqrtf
#define __builtin_sqrt sqrt
#define __builtin_floorf floorf
#define __builtin_floor floor
#define __builtin_ceilf ceilf
#define __builtin_ceil ceil
#define __builtin_rintf rintf
#define __builtin_fmaf fmaf
#define __builtin_rint rint
#define __builtin_truncf truncf
#define __builtin_trunc trunc
#define SH_INF __builtin_inff()
#define SH_NAN __builtin_nanf("")

SH_FN sh_u32 sh_bits(float x) { return __float_as_uint(x); }
SH_FN float sh_from_bits(sh_u32 u) { return __uint_as_float(u); }

/* Functions of tasklet expressions: NVIDIA's but for angles. Their errors are not measured here; the
 * CUDA C++ Programming Guide ("Mathematical Functions") lists at most 4 ulp. */
#define SH_MATH_1(name, device) \
  SH_FN float sh_##name(float x) { return device##f(x); } \
  SH_FN double sh_##name##_f64(double x) { return device(x); }
SH_MATH_1(abs, fabs) SH_MATH_1(exp, exp) SH_MATH_1(expm1, expm1) SH_MATH_1(log, log)
SH_MATH_1(log1p, log1p) SH_MATH_1(tanh, tanh) SH_MATH_1(erf, erf) SH_MATH_1(sqrt, sqrt)
SH_MATH_1(rsqrt, rsqrt)
SH_MATH_1(floor, floor) SH_MATH_1(ceil, ceil) SH_MATH_1(round, rint) SH_MATH_1(trunc, trunc)
SH_MATH_1(atan, atan) SH_MATH_1(asin, asin) SH_MATH_1(acos, acos) SH_MATH_1(sinh, sinh)
SH_MATH_1(cosh, cosh) SH_MATH_1(asinh, asinh) SH_MATH_1(acosh, acosh) SH_MATH_1(atanh, atanh)
#undef SH_MATH_1
/* Those in single precision are trigonometry.h's; these have a stack frame of 40 bytes or less. */
SH_FN double sh_sin_f64(double x) { return sin(x); }
SH_FN double sh_cos_f64(double x) { return cos(x); }
SH_FN double sh_tan_f64(double x) { return tan(x); }
SH_FN float sh_pow(float x, float y) { return powf(x, y); }
SH_FN double sh_pow_f64(double x, double y) { return pow(x, y); }
SH_FN float sh_atan2(float y, float x) { return atan2f(y, x); }
SH_FN double sh_atan2_f64(double y, double x) { return atan2(y, x); }
SH_FN float sh_recip(float x) { return 1.0f / x; }
SH_FN double sh_recip_f64(double x) { return 1.0 / x; }
/* e^-|x| cannot overflow, so small results stay exact. */
SH_FN float sh_sigmoid(float x) { float e = expf(-fabsf(x)); return (x < 0.0f ? e : 1.0f) / (1.0f + e); }
SH_FN double sh_sigmoid_f64(double x) { double e = exp(-fabs(x)); return (x < 0.0 ? e : 1.0) / (1.0 + e); }
SH_FN float sh_sign(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : x); }
SH_FN double sh_sign_f64(double x) { return x > 0.0 ? 1.0 : (x < 0.0 ? -1.0 : x); }
SH_FN float sh_min(float a, float b) { float m = b < a ? b : a; return b != b ? b : m; }
SH_FN float sh_max(float a, float b) { float m = b > a ? b : a; return b != b ? b : m; }
SH_FN double sh_min_f64(double a, double b) { double m = b < a ? b : a; return b != b ? b : m; }
SH_FN double sh_max_f64(double a, double b) { double m = b > a ? b : a; return b != b ? b : m; }
SH_FN float sh_floordiv(float a, float b) { return floorf(a / b); }
SH_FN double sh_floordiv_f64(double a, double b) { return floor(a / b); }
SH_FN float sh_mod(float a, float b) {
  float r = fmodf(a, b);
  return (r != 0.0f && (r < 0.0f) != (b < 0.0f)) ? r + b : r;
}
SH_FN double sh_mod_f64(double a, double b) {
  double r = fmod(a, b);
  return (r != 0.0 && (r < 0.0) != (b < 0.0)) ? r + b : r;
}
SH_FN float sh_fma(float a, float b, float c) { return fmaf(a, b, c); }
/* A product that the compiler never fuses with a sum. */
SH_FN float sh_mul(float a, float b) { return __fmul_rn(a, b); }
SH_FN double sh_mul_f64(double a, double b) { return __dmul_rn(a, b); }

struct sh_bf16 { unsigned short bits; };
struct sh_f16 { unsigned short bits; };
SH_FN float sh_to_float(sh_bf16 x) { return __uint_as_float((sh_u32)x.bits << 16); }
SH_FN float sh_to_float(sh_f16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
}
SH_FN sh_bf16 sh_bf16_of(float f) {
  sh_bf16 x;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(f));
  return x;
}
SH_FN sh_f16 sh_f16_of(float f) {
  sh_f16 x;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(f));
  return x;
}

/* N elements that move together, in pieces of 2, 4, 8 or 16 bytes. */
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) sh_vec {
  T v[N];
  __device__ __forceinline__ T &operator[](int i) { return v[i]; }
  __device__ __forceinline__ const T &operator[](int i) const { return v[i]; }
};
template <int N, class T> SH_FN sh_vec<T, N> sh_load(const T *x, sh_i64 i) {
  return *reinterpret_cast<const sh_vec<T, N> *>(x + i);
}
template <int N, class T> SH_FN void sh_store(T *y, sh_i64 i, const sh_vec<T, N> &v) {
  *reinterpret_cast<sh_vec<T, N> *>(y + i) = v;
}

template <class T> SH_FN T sh_shuffle_xor(T v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
template <class T> SH_FN T sh_shuffle_down(T v, int d) { return __shfl_down_sync(0xffffffffu, v, d); }
template <class T> SH_FN T sh_shuffle(T v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
SH_FN unsigned sh_ballot(int p) { return __ballot_sync(0xffffffffu, p); }
/* The place of the lowest bit that is set. */
SH_FN int sh_lowest(unsigned bits) { return __ffs((int)bits) - 1; }
