/* Numbers of 16 bits in memory, computed with in single precision.
 *
 * Values of such containers travel through a kernel as their bits (sh_u16); arithmetic widens them and
 * a store rounds once, to nearest even. NaN stays NaN, infinities, signed zeros and subnormal numbers are
 * kept. Branch-free, so that loops become vector code with the instructions of any machine.
 */
typedef __UINT16_TYPE__ sh_u16;

SH_FN float sh_from_bf16(sh_u16 h) { return sh_from_bits((sh_u32)h << 16); }

SH_FN sh_u16 sh_to_bf16(float x) {
  sh_u32 u = sh_bits(x);
  sh_u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (sh_u16)(x != x ? 0x7fc0u : rounded);
}

/* The exponent moves from 15 to 127 by a product, which is exact for subnormal numbers too; what was
 * infinite or NaN gets the exponent of those back. */
SH_FN float sh_from_f16(sh_u16 h) {
  sh_u32 u = ((sh_u32)h & 0x7fffu) << 13;
  sh_u32 moved = sh_bits(sh_from_bits(u) * 0x1p112f);
  moved = u >= 0x0f800000u ? (moved | 0x7f800000u) : moved;
  return sh_from_bits(moved | (((sh_u32)h & 0x8000u) << 16));
}

SH_FN sh_u16 sh_to_f16(float x) {
  sh_u32 u = sh_bits(x), sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  /* Below 2^-14: adding 1/2 leaves a multiple of 2^-24 in the low bits, rounded. */
  sh_u32 tiny = sh_bits(sh_from_bits(u) + 0.5f) - 0x3f000000u;
  sh_u32 normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
  sh_u32 large = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
  sh_u32 h = u < 0x38800000u ? tiny : normal;
  h = u >= 0x47800000u ? large : h;
  return (sh_u16)(h | (u > 0x7f800000u ? 0u : sign));
}
