/* Blocks of 16-bit operands on their way to warp products: 16 bytes at a time to shared memory without
   a register between, and 8x8 matrices from there; follows tensor_core.h. On the host a copy is
   complete only when it is waited for, and until then its words count as unwritten. */

#ifdef __CUDACC_RTC__
/* N elements, 16 bytes, from element `i` of `from` to word `at` of `to`, or zeros where not valid. */
template <int N, class T> SH_FN void sh_copy_async(const T *from, sh_i64 i, bool valid, unsigned *to, int at) {
  static_assert(N * sizeof(T) == 16, "copies have 16 bytes");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"((unsigned)__cvta_generic_to_shared(to + at)),
                  "l"(__cvta_generic_to_global(from + (valid ? i : 0))), "r"(valid ? 16 : 0)
               : "memory");
}
/* Ends a group of copies. */
SH_FN void sh_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits for this thread's groups but the last N. */
template <int N> SH_FN void sh_copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

/* Four matrices of 8 rows of 8 numbers: lane l gives the word where row l % 8 of matrix l / 8 begins
   and gets row l / 4, numbers 2 (l % 4) and the next, of each; transposed, if asked for. */
#define SH_LDMATRIX(name, kind)                                                                   \
  SH_FN void name(unsigned (&r)[4], const unsigned *x, int at) {                                  \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0,%1,%2,%3}, [%4];"          \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                 \
                 : "r"((unsigned)__cvta_generic_to_shared(x + at))                                \
                 : "memory");                                                                     \
  }
SH_LDMATRIX(sh_ldmatrix, "")
SH_LDMATRIX(sh_ldmatrix_trans, ".trans")
#undef SH_LDMATRIX
#else
struct sh_copy { sh_out<unsigned> to; int at; sh_vec<unsigned, 4> data; };
enum { SH_COPIES = 64 };
/* Of one thread in the block that began at epoch `block`; groups end at copies[ends[g]]. */
static struct sh_copies { sh_u32 block; int n, n_groups, ends[SH_COPIES]; sh_copy copies[SH_COPIES]; } sh_in_flight[1024];
static sh_copies &sh_own_copies() {
  sh_copies &own = sh_in_flight[sh_now.thread];
  if (own.block != sh_now.block_first) own.block = sh_now.block_first, own.n = own.n_groups = 0;
  return own;
}
template <int N, class T>
static SH_AT_SITE void sh_copy_async(sh_in<T> from, sh_i64 i, bool valid, sh_out<unsigned> to, int at) {
  static_assert(N * sizeof(T) == 16, "copies have 16 bytes");
  sh_copies &own = sh_own_copies();
  if (own.n == SH_COPIES) {
    sh_report(SH_ENDLESS, "copies never waited for");
    sh_end_launch();
  }
  sh_copy &c = own.copies[own.n++];
  c = {to, at, {}};
  if (valid) __builtin_memcpy(&c.data, sh_touch(from.v, i, N, sizeof(T), 0), 16);
  __builtin_memset(sh_touch(to.v, at, 4, 4, 1), 0xff, 16);
  if (at >= 0 && at <= to.v.n - 4)
    for (int b = 0; b < 16; b++) to.v.region->cells[to.v.start + (sh_u64)at * 4 + b].w_epoch = 0;
}
static void sh_copy_commit() {
  sh_copies &own = sh_own_copies();
  if (own.n_groups == SH_COPIES) {
    sh_report(SH_ENDLESS, "copies never waited for");
    sh_end_launch();
  }
  own.ends[own.n_groups++] = own.n;
}
template <int N> static void sh_copy_wait() {
  sh_copies &own = sh_own_copies();
  const int done = own.n_groups - N;
  if (done <= 0) return;
  const int end = own.ends[done - 1];
  for (int k = 0; k < end; k++) {
    const sh_copy &c = own.copies[k];
    __builtin_memcpy(sh_touch(c.to.v, c.at, 4, 4, 1), &c.data, 16);
  }
  for (int k = end; k < own.n; k++) own.copies[k - end] = own.copies[k];
  for (int g = done; g < own.n_groups; g++) own.ends[g - done] = own.ends[g] - end;
  own.n -= end;
  own.n_groups = N;
}
static void sh_ldmatrix_host(unsigned (&r)[4], sh_out<unsigned> x, int at, bool transposed, int line) {
  const sh_vec<unsigned, 4> row = sh_load<4>(x, at);
  const sh_u64 words[2] = {row[0] | (sh_u64)row[1] << 32, row[2] | (sh_u64)row[3] << 32};
  const int g = sh_now.thread % 32 / 4, t = sh_now.thread % 4;
  sh_u64(*all)[8] = sh_meet({0, line}, words, 2);
  auto number = [&](int matrix, int i, int j) { return (unsigned)(all[matrix * 8 + i][j / 4] >> j % 4 * 16 & 0xffffu); };
  for (int m = 0; m < 4; m++)
    r[m] = transposed ? number(m, 2 * t, g) | number(m, 2 * t + 1, g) << 16
                      : number(m, g, 2 * t) | number(m, g, 2 * t + 1) << 16;
}
static void sh_ldmatrix(unsigned (&r)[4], sh_out<unsigned> x, int at, int line = __builtin_LINE()) {
  sh_ldmatrix_host(r, x, at, false, line);
}
static void sh_ldmatrix_trans(unsigned (&r)[4], sh_out<unsigned> x, int at, int line = __builtin_LINE()) {
  sh_ldmatrix_host(r, x, at, true, line);
}
#endif
