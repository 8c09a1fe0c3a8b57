/* Products of a warpgroup (four warps from a multiple of four on) that read both operands from shared
   memory, on Hopper (sm_90a); follows tile_memory.h. They are asynchronous: issued between a fence and a
   commit, complete when waited for, and until then they read shared memory and own their accumulators.

   An operand lies in lines of 128 bytes, its swizzled form: the 16 bytes of place p in line l lie at place
   p ^ l % 8. Where an operand's terms are contiguous, a line is a row (or column) of 64 terms; where its
   rows are, a line is a term of 64 rows, and the next 64 rows lie LEADING bytes on. STRIDE is the
   distance of 8 lines. */

#ifdef __CUDACC_RTC__
/* The descriptor of an operand that begins at word `at` of x (PTX ISA, "Matrix Descriptor Format").
   SWIZZLE 1, 2, 3: lines of 128, 64, 32 bytes; 0: 16 bytes, and LEADING and STRIDE change roles. */
template <int SWIZZLE, int LEADING, int STRIDE> SH_FN sh_u64 sh_matrix(const unsigned *x, int at) {
  const sh_u32 start = ((sh_u32)__cvta_generic_to_shared(x + at) & 0x3ffff) >> 4;
  return (sh_u64)(start | (sh_u32)(LEADING >> 4) << 16) |
         (sh_u64)((sh_u32)(STRIDE >> 4) | (sh_u32)SWIZZLE << 30) << 32;
}
/* What this thread wrote or copied to shared memory is seen by products issued after a barrier. */
SH_FN void sh_async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/* Keeps the compiler from moving uses of accumulators across. */
template <int N> SH_FN void sh_held(float (&d)[N]) {
  SH_UNROLL
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
/* Before the first product of a group: hands the accumulators over. */
template <int N> SH_FN void sh_wgmma_fence(float (&d)[N]) {
  sh_held(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/* Ends a group of products. */
SH_FN void sh_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits for the warpgroup's groups but the last LEFT; with none left the accumulators are back. */
template <int LEFT, int N> SH_FN void sh_wgmma_wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
  sh_held(d);
}

#define SH_8(m, i) m(i), m(i + 1), m(i + 2), m(i + 3), m(i + 4), m(i + 5), m(i + 6), m(i + 7)
#define SH_32(m, i) SH_8(m, i), SH_8(m, i + 8), SH_8(m, i + 16), SH_8(m, i + 24)
#define SH_64(m, i) SH_32(m, i), SH_32(m, i + 32)
#define SH_128(m, i) SH_64(m, i), SH_64(m, i + 64)
#define SH_SUM(i) "+f"(d[i])
#define SH_SUMS_32                                                                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
  "%26,%27,%28,%29,%30,%31"
#define SH_SUMS_64                                                                                  \
  SH_SUMS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"    \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SH_SUMS_128                                                                                 \
  SH_SUMS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,"    \
  "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,"  \
  "%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124," \
  "%125,%126,%127"
/* Adds to d the product of 64 rows and N columns over 16 terms; BY_TERMS: an operand's lines are terms. */
#define SH_WGMMA(name, type, n, sums, all, after)                                                  \
  template <int A_BY_TERMS, int B_BY_TERMS> SH_FN void name(float (&d)[sums], sh_u64 a, sh_u64 b) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " "                \
                 "{" SH_SUMS_##sums "}, " after ";\n}\n"                                            \
                 : all(SH_SUM, 0)                                                                   \
                 : "l"(a), "l"(b), "n"(A_BY_TERMS), "n"(B_BY_TERMS));                               \
  }
#define SH_WGMMA_OF(name, type)                                                    \
  SH_WGMMA(name, type, 64, 32, SH_32, "%32, %33, p, 1, 1, %34, %35")               \
  SH_WGMMA(name, type, 128, 64, SH_64, "%64, %65, p, 1, 1, %66, %67")              \
  SH_WGMMA(name, type, 256, 128, SH_128, "%128, %129, p, 1, 1, %130, %131")
SH_WGMMA_OF(sh_wgmma_bf16, "bf16")
SH_WGMMA_OF(sh_wgmma_f16, "f16")
#undef SH_WGMMA_OF
#undef SH_WGMMA
#undef SH_SUM
#undef SH_8
#undef SH_32
#undef SH_64
#undef SH_128
#else
/* Of the addresses that descriptors hold: a device keeps the first KiB to itself. */
enum { SH_POOL_AT = 1024, SH_PRODUCTS = 64 };
template <int SWIZZLE, int LEADING, int STRIDE> static sh_u64 sh_matrix(sh_out<unsigned> x, int at) {
  const sh_u32 start = ((sh_u32)(SH_POOL_AT + x.v.start + (sh_u64)at * 4) & 0x3ffff) >> 4;
  return (sh_u64)(start | (sh_u32)(LEADING >> 4) << 16) |
         (sh_u64)((sh_u32)(STRIDE >> 4) | (sh_u32)SWIZZLE << 30) << 32;
}
/* The byte of the pool where term k of row (or column) mn begins, as hardware finds it: the swizzle
   exchanges bits of the address, not of the place in the operand. */
static sh_u32 sh_term_at(sh_u64 matrix, int by_terms, int mn, int k) {
  const sh_u32 start = (sh_u32)(matrix & 0x3fff) << 4, leading = (sh_u32)(matrix >> 16 & 0x3fff) << 4;
  const sh_u32 stride = (sh_u32)(matrix >> 32 & 0x3fff) << 4, swizzle = (sh_u32)(matrix >> 62);
  const sh_u32 pieces = swizzle ? 16u >> swizzle : 1, line = pieces * 16;
  sh_u32 at = start;
  if (!by_terms) at += mn % 8 * line + mn / 8 * stride + k / 8 * (swizzle ? 16 : leading) + k % 8 * 2;
  else if (swizzle) at += k % 8 * line + k / 8 * stride + mn / 8 / pieces * leading + mn / 8 % pieces * 16 + mn % 8 * 2;
  else at += k % 8 * line + k / 8 * leading + mn / 8 * stride + mn % 8 * 2;
  return (at ^ (at >> 3 & (pieces - 1) * 16)) - SH_POOL_AT;
}
struct sh_product {
  void (*add)(float *sums, sh_u64 a, sh_u64 b);
  void (*check)(sh_u64 a, sh_u64 b, sh_u32 issued);
  sh_u64 a, b;
  sh_u32 issued;
};
/* Of one thread in the block that began at epoch `block`; groups end at products[ends[g]]. While `sums`
   is not null its elements belong to products: they stand in `value`, and poison in their place. */
static struct sh_multiplier {
  sh_u32 block;
  int n, n_groups, ends[SH_PRODUCTS], n_sums;
  bool is_fenced;
  /* What was issued in the block, in order. */
  sh_u64 issued;
  float *sums, value[128];
  sh_product products[SH_PRODUCTS];
} sh_multipliers[1024];
static sh_multiplier &sh_own_multiplier() {
  sh_multiplier &own = sh_multipliers[sh_now.thread];
  if (own.block != sh_now.block_first) {
    own.block = sh_now.block_first;
    own.n = own.n_groups = 0;
    own.sums = nullptr;
    own.is_fenced = false;
    own.issued = 0;
  }
  return own;
}
/* A product reads 16 bytes at any time from its issue to its end: nobody may write them meanwhile, and
   what it finds must have reached it through the writer's fence and a barrier; what the copy engine
   brought needs none. All warps read. */
static void sh_check_piece(sh_u32 at, sh_u32 issued) {
  const sh_view pool = {&sh_dynamic_region, 0, (sh_i64)sh_now.launch->dynamic_bytes, "pool"};
  if (at > pool.n || at + 16 > pool.n) {
    sh_fault *f = sh_report(SH_OUT_OF_BOUNDS, pool.name);
    f->element = at;
    f->n = pool.n;
    return;
  }
  bool told = false;
  for (sh_u32 i = at; i < at + 16; i++) {
    sh_cell &c = sh_dynamic_cells[i];
    const bool unknown = c.w_epoch < sh_now.block_first, copied = c.w_thread == SH_ENGINE;
    const bool changed = issued && sh_written[i] > issued;
    const bool same = c.w_epoch == sh_now.epoch && !copied;
    const bool unfenced = !issued && !copied && sh_written[i] > sh_fences[c.w_thread].ordered;
    if (!told && (same || changed)) {
      sh_race(pool, i, 0, c.w_epoch ? c.w_epoch : sh_now.epoch, c.w_thread, 1);
    } else if (!told && unknown) {
      sh_report(SH_UNINITIALIZED, pool.name)->element = i;
    } else if (!told && unfenced) {
      sh_fault *f = sh_report(SH_UNFENCED, pool.name);
      f->element = i;
      f->other_thread = c.w_thread;
    }
    told |= unknown || changed || unfenced || same;
    if (!c.r_first) c.r_first = sh_now.epoch;
    c.r_epoch = sh_now.epoch;
    c.r_thread = 0xffff;
  }
}
/* This thread's share of an operand's pieces. */
static void sh_check_operand(sh_u64 matrix, int by_terms, int rows, sh_u32 issued) {
  for (int p = sh_now.thread % 128; p < rows * 2; p += 128)
    sh_check_piece(by_terms ? sh_term_at(matrix, 1, p % (rows / 8) * 8, p / (rows / 8))
                            : sh_term_at(matrix, 0, p % rows, p / rows * 8), issued);
}
template <class T> static float sh_term(sh_u64 matrix, int by_terms, int mn, int k) {
  const sh_u32 at = sh_term_at(matrix, by_terms, mn, k);
  T x = {0x7fff};
  if (at <= SH_SHARED_BYTES - sizeof x) __builtin_memcpy(&x, sh_dynamic_data + at, sizeof x);
  return sh_to_float(x);
}
/* Lane 4g + t of warp w holds rows 16w + g and 16w + g + 8 at columns 8j + 2t and 8j + 2t + 1: sums
   4j to 4j + 3 (PTX ISA, wgmma.mma_async, "Register Fragments"). */
template <class T, int A_BY_TERMS, int B_BY_TERMS, int SUMS> struct sh_wgmma_host {
  static void add(float *sums, sh_u64 a, sh_u64 b) {
    const int lane = sh_now.thread % 32, row = sh_now.thread % 128 / 32 * 16 + lane / 4;
    float x[2][16];
    for (int h = 0; h < 2; h++)
      for (int k = 0; k < 16; k++) x[h][k] = sh_term<T>(a, A_BY_TERMS, row + 8 * h, k);
    for (int c = 0; c < SUMS / 2; c++) {
      const int column = c / 2 * 8 + lane % 4 * 2 + c % 2, at = c / 2 * 4 + c % 2;
      for (int k = 0; k < 16; k++) {
        const float y = sh_term<T>(b, B_BY_TERMS, column, k);
        sums[at] += x[0][k] * y;
        sums[at + 2] += x[1][k] * y;
      }
    }
  }
  static void check(sh_u64 a, sh_u64 b, sh_u32 issued) {
    sh_check_operand(a, A_BY_TERMS, 64, issued);
    sh_check_operand(b, B_BY_TERMS, SUMS * 2, issued);
  }
};
static void sh_async_fence() { sh_fences[sh_now.thread].made = (sh_u32)sh_now.steps; }
template <int N> static void sh_wgmma_fence(float (&)[N], int line = __builtin_LINE()) {
  sh_own_multiplier().is_fenced = true;
  sh_meet({0, line}, nullptr, 0);
}
template <class T, int A_BY_TERMS, int B_BY_TERMS, int SUMS>
static void sh_wgmma_issue(float (&d)[SUMS], sh_u64 a, sh_u64 b) {
  typedef sh_wgmma_host<T, A_BY_TERMS, B_BY_TERMS, SUMS> host;
  sh_multiplier &own = sh_own_multiplier();
  if (own.n == SH_PRODUCTS || (own.sums && own.sums != d)) {
    sh_report(SH_ENDLESS, own.n == SH_PRODUCTS ? "products never waited for" : "products of two arrays of sums");
    sh_end_launch();
  }
  if (!own.is_fenced) sh_report(SH_SUMS_UNFENCED, "");
  own.issued = ((own.issued + a) * 0x9e3779b97f4a7c15ull + b) * 0xbf58476d1ce4e5b9ull + SUMS * 4 + A_BY_TERMS * 2 + B_BY_TERMS;
  host::check(a, b, 0);
  if (!own.sums) {
    own.sums = d;
    own.n_sums = SUMS;
    __builtin_memcpy(own.value, d, sizeof d);
    __builtin_memset(d, 0xff, sizeof d);
  }
  own.products[own.n++] = {host::add, host::check, a, b, (sh_u32)sh_now.steps};
}
#define SH_WGMMA(name, type)                                                   \
  template <int A_BY_TERMS, int B_BY_TERMS, int SUMS>                          \
  static void name(float (&d)[SUMS], sh_u64 a, sh_u64 b) {                     \
    sh_wgmma_issue<type, A_BY_TERMS, B_BY_TERMS>(d, a, b);                     \
  }
SH_WGMMA(sh_wgmma_bf16, sh_bf16)
SH_WGMMA(sh_wgmma_f16, sh_f16)
#undef SH_WGMMA
static void sh_wgmma_commit() {
  sh_multiplier &own = sh_own_multiplier();
  if (own.n_groups == SH_PRODUCTS) {
    sh_report(SH_ENDLESS, "products never waited for");
    sh_end_launch();
  }
  own.ends[own.n_groups++] = own.n;
  own.is_fenced = false;
}
/* Threads of a warpgroup that issued other products than its first thread, or not all. */
static void sh_block_ended() {
  for (sh_u32 i = 0; i < sh_now.launch->threads; i++) {
    const sh_multiplier &own = sh_multipliers[i], &first = sh_multipliers[i / 128 * 128];
    auto issued = [](const sh_multiplier &m) { return m.block == sh_now.block_first ? m.issued : 0; };
    if (issued(own) == issued(first)) continue;
    sh_now.thread = (int)i;
    sh_now.ended = 1;
    sh_text(sh_report(SH_MISSING_LANES, "")->note, 64, "its warpgroup issued other products");
    return;
  }
}
template <int LEFT, int N> static void sh_wgmma_wait(float (&)[N], int line = __builtin_LINE()) {
  sh_multiplier &own = sh_own_multiplier();
  const int done = own.n_groups - LEFT;
  if (done > 0) {
    const int end = own.ends[done - 1];
    for (int i = 0; i < end; i++) {
      const sh_product &p = own.products[i];
      p.check(p.a, p.b, p.issued);
      p.add(own.value, p.a, p.b);
    }
    for (int i = end; i < own.n; i++) own.products[i - end] = own.products[i];
    for (int g = done; g < own.n_groups; g++) own.ends[g - done] = own.ends[g] - end;
    own.n -= end;
    own.n_groups = LEFT;
    if (own.n == 0 && own.sums) {
      __builtin_memcpy(own.sums, own.value, own.n_sums * sizeof(float));
      own.sums = nullptr;
    }
  }
  sh_meet({0, line}, nullptr, 0);
}
#endif
