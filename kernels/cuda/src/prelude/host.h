/* The same kernels on the CPU: blocks one after another, threads as fibers, every access to memory
 * checked. Follows prelude/math.h; includes nothing on x86-64. A fault is recorded and the launch
 * goes on with poison where it can; where it cannot, the fibers' stacks are abandoned (kernels own
 * nothing that would need a destructor) and the launch ends. */

#define SH_FN_MEMBER inline
#define SH_KERNEL(name, threads, min_blocks)                                        \
  enum { sh_threads_of_##name = threads, sh_min_blocks_of_##name = min_blocks };    \
  static void name
#define SH_IN(T) sh_in<T>
#define SH_OUT(T) sh_out<T>
#define SH_AT_IN(T) sh_in<T>
#define SH_AT_OUT(T) sh_out<T>
#define SH_SHARED(T, name, n)               \
  static sh_site name##_site = {#name, 0, 0}; \
  sh_out<T> name = sh_shared_at<T>(name##_site, n)
#define SH_DYNAMIC(name) sh_pool name
#define SH_CARVE(T, name, pool, byte_offset, n) sh_out<T> name = sh_carve<T>(#name, byte_offset, n)
#define SH_TID (sh_now.thread)
#define SH_BID (sh_now.block[0])
#define SH_BID_Y (sh_now.block[1])
#define SH_BID_Z (sh_now.block[2])
#define SH_N_BLOCKS ((int)sh_now.launch->grid[0])
#define SH_SYNC() sh_block_barrier(sh_place{__COUNTER__ + 1, __LINE__})
#define SH_WARP_SYNC() sh_warp_barrier(sh_place{__COUNTER__ + 1, __LINE__})
#define SH_BLOCK_IS(n) sh_block_is(n)
#define SH_UNROLL

enum sh_fault_kind {
  SH_OUT_OF_BOUNDS = 1, SH_UNINITIALIZED, SH_RACE, SH_MISALIGNED, SH_DIVERGENT_BARRIER,
  SH_MISSING_LANES, SH_ENDLESS, SH_SHARED_TOO_LARGE, SH_BLOCK_SIZE, SH_DIVIDED_BY_ZERO, SH_UNFENCED,
  SH_SUMS_UNFENCED
};
struct sh_fault {
  sh_u32 kind, thread, other_thread, block, other_block, write, other_write, line;
  sh_i64 element, n;
  char name[64];
  char note[512];
};
/* When an element was written and read last in this launch. Epochs count barriers over all blocks of
 * a launch, so equal epochs mean one block and no barrier between; clocks count the warp's barriers
 * within an epoch. Readers: a thread, or 0x8000 + warp, or 0xffff for several warps. */
struct sh_cell {
  sh_u32 w_epoch, r_epoch, r_first;
  unsigned short w_clock, r_clock, w_thread, r_thread;
};
struct sh_region {
  char *data;
  sh_u64 bytes;
  sh_u32 granule, is_shared;
  sh_cell *cells;
  unsigned char *initialized;
  const char *name;
};
struct sh_arg { sh_region *region; sh_u64 bits; };
struct sh_launch {
  sh_u32 grid[3], threads, dynamic_bytes, shared_limit, fault_capacity, n_faults, stack_bytes;
  sh_u64 seed, step_limit;
  char *stacks;
  const sh_arg *args;
  sh_fault *faults;
  /* Per block in order of execution: its number, and the epoch it began in. */
  sh_u32 *block_order, *block_epochs;
  /* Told of every access to a buffer, if not null: where in the text, by whom, which bytes. */
  void (*count)(void *counter, const sh_region *region, const void *site, sh_u32 block, sh_u32 thread,
                sh_u64 offset, sh_u32 bytes, sh_u32 write);
  void *counter;
};

enum sh_state { SH_RUNS, SH_AT_BARRIER, SH_AT_WARP, SH_DONE, SH_AT_PHASE };
/* A place of the text where threads meet: threads meet only where it is the same for all. */
struct sh_place { int id, line; };
/* `meets` is where a fiber waits, `call` the kernel's call of a function of the prelude it is in, `phase`
 * what it waits for SH_AT_PHASE. */
struct sh_fiber { void *sp; sh_state state; sh_place meets, call; struct sh_phase *phase; int parity; };
static bool sh_is_past(const sh_fiber &f);
/* Told when all threads of a block have ended. */
static void sh_block_ended();
struct sh_warp { sh_u64 exchange[2][32][8]; sh_u32 arrived, generation, clock; };
struct sh_site { const char *name; sh_u32 epoch; sh_u64 at; };
enum { SH_SHARED_BYTES = 227 * 1024, SH_STATIC_BYTES = 48 * 1024 };

static struct {
  int thread, block[3];
  sh_u32 epoch, launch_first, block_first, at_barrier, n_done, ended;
  sh_u64 static_used, steps;
  sh_launch *launch;
  void (*kernel)(const sh_arg *);
  void *scheduler;
  sh_fiber fibers[1024];
  sh_warp warps[32];
} sh_now;
alignas(1024) static char sh_static_data[SH_STATIC_BYTES], sh_dynamic_data[SH_SHARED_BYTES];
static sh_cell sh_static_cells[SH_STATIC_BYTES], sh_dynamic_cells[SH_SHARED_BYTES];
/* For what reads shared memory asynchronously: at which step each byte of the pool was written last, and
 * after which step each thread made its last fence (or its last of new phases), the last that a barrier
 * followed. */
static sh_u32 sh_written[SH_SHARED_BYTES];
/* Stands for the copy engine where threads are told. */
enum { SH_ENGINE = 0xfffe };
static struct { sh_u32 made, ordered, begun, begun_ordered; } sh_fences[1024];
static sh_region sh_static_region = {sh_static_data, SH_STATIC_BYTES, 1, 1, sh_static_cells, nullptr, "static"};
static sh_region sh_dynamic_region = {sh_dynamic_data, SH_SHARED_BYTES, 1, 1, sh_dynamic_cells, nullptr, "dynamic"};

#if defined(__x86_64__) && !defined(SH_PORTABLE_FIBERS)
extern "C" __attribute__((visibility("hidden"))) void sh_switch(void **save, void *to);
asm(R"(
.text
.hidden sh_switch
.globl sh_switch
.type sh_switch,@function
sh_switch:
 pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
 movq %rsp,(%rdi); movq %rsi,%rsp
 popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
 ret
)");
static void *sh_fresh(int, char *stack_top, void (*entry)()) {
  void **sp = (void **)stack_top;
  *--sp = nullptr;
  *--sp = (void *)entry;
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  return sp;
}
#else
#include <ucontext.h>
static ucontext_t sh_contexts[1024], sh_scheduler_context;
static void sh_switch(void **save, void *to) {
  *save = *save ? *save : (void *)&sh_scheduler_context;
  swapcontext((ucontext_t *)*save, (ucontext_t *)to);
}
static void *sh_fresh(int i, char *stack_top, void (*entry)()) {
  getcontext(&sh_contexts[i]);
  sh_contexts[i].uc_stack.ss_sp = stack_top - sh_now.launch->stack_bytes;
  sh_contexts[i].uc_stack.ss_size = sh_now.launch->stack_bytes;
  makecontext(&sh_contexts[i], entry, 0);
  return &sh_contexts[i];
}
#endif
static void sh_to_scheduler() { sh_switch(&sh_now.fibers[sh_now.thread].sp, sh_now.scheduler); }
static void sh_end_launch() {
  sh_now.ended = 1;
  sh_to_scheduler();
}

static void sh_text(char *to, int room, const char *from) {
  int i = 0;
  for (; i + 1 < room && from[i]; i++) to[i] = from[i];
  to[i] = 0;
}
static int sh_block_number() {
  const sh_u32 *grid = sh_now.launch->grid;
  return sh_now.block[0] + grid[0] * (sh_now.block[1] + grid[1] * sh_now.block[2]);
}
static sh_u32 sh_block_of(sh_u32 epoch) {
  sh_launch *l = sh_now.launch;
  const sh_u32 n = l->grid[0] * l->grid[1] * l->grid[2];
  sh_u32 at = 0;
  while (at + 1 < n && l->block_epochs[at + 1] && l->block_epochs[at + 1] <= epoch) at++;
  return l->block_order[at];
}
/* The record of a new fault; one that says the same of the same array is kept three times. */
static sh_fault *sh_report(sh_u32 kind, const char *name) {
  static sh_fault dropped;
  sh_launch *l = sh_now.launch;
  sh_u32 alike = 0;
  for (sh_u32 i = 0; i < l->n_faults; i++) {
    const char *a = l->faults[i].name, *b = name;
    while (*a && *a == *b) a++, b++;
    alike += l->faults[i].kind == kind && !*a && !*b;
  }
  if (alike >= 3) return &dropped;
  if (l->n_faults == l->fault_capacity) {
    /* Where it has ended, no fiber runs that could be left. */
    if (!sh_now.ended) sh_end_launch();
    return &dropped;
  }
  sh_fault *f = &l->faults[l->n_faults++];
  f->kind = kind;
  f->thread = sh_now.thread;
  f->block = sh_block_number();
  sh_text(f->name, sizeof f->name, name);
  return f;
}

/* The processor trapped in a fiber; the caller is a signal handler on the fiber's stack, which is
 * abandoned with it. */
extern "C" void sh_divided_by_zero() {
  sh_report(SH_DIVIDED_BY_ZERO, "");
  sh_end_launch();
}

struct sh_pool {};
struct sh_view { sh_region *region; sh_u64 start; sh_i64 n; const char *name; };

static void sh_race(const sh_view &v, sh_i64 i, int write, sh_u32 epoch, unsigned thread, int other_write) {
  sh_fault *f = sh_report(SH_RACE, v.name);
  f->element = i;
  f->n = v.n;
  f->write = write;
  f->other_write = other_write;
  f->other_block = sh_block_of(epoch);
  f->other_thread = thread == 0xffff || thread == SH_ENGINE ? 0 : thread & 0x8000 ? (thread & 0x7fff) * 32 : thread;
}
static inline void sh_check_cell(const sh_view &v, sh_cell &c, sh_i64 i, int write) {
  const unsigned me = sh_now.thread, warp = me / 32;
  const sh_u32 epoch = sh_now.epoch;
  const unsigned clock = (unsigned short)sh_now.warps[warp].clock;
  const bool shared = v.region->is_shared;
  if (c.w_epoch == epoch) {
    if (c.w_thread != me && (c.w_thread / 32 != warp || c.w_clock == clock))
      sh_race(v, i, write, c.w_epoch, c.w_thread, 1);
  } else if (!shared && c.w_epoch && c.w_epoch < sh_now.block_first) {
    sh_race(v, i, write, c.w_epoch, c.w_thread, 1);
  }
  if (write) {
    if (c.r_epoch == epoch && c.r_thread != me &&
        (c.r_thread == 0xffff || ((c.r_thread & 0x8000 ? c.r_thread & 0x7fff : c.r_thread / 32) != warp) ||
         c.r_clock == clock))
      sh_race(v, i, 1, c.r_epoch, c.r_thread, 0);
    else if (!shared && c.r_first && c.r_first < sh_now.block_first)
      sh_race(v, i, 1, c.r_first, 0xffff, 0);
    c.w_epoch = epoch;
    c.w_clock = clock;
    c.w_thread = me;
    return;
  }
  if (!c.r_first) c.r_first = epoch;
  if (c.r_epoch != epoch) {
    c.r_thread = me;
  } else if (c.r_thread != me && c.r_thread != 0xffff) {
    const unsigned other = c.r_thread & 0x8000 ? c.r_thread & 0x7fff : c.r_thread / 32;
    c.r_thread = other != warp ? 0xffff : c.r_clock != clock ? me : 0x8000 | warp;
  }
  c.r_epoch = epoch;
  c.r_clock = clock;
}
/* An access stands where it was written in the kernel: sh_touch knows it by its return address. */
#define SH_AT_SITE __attribute__((always_inline)) inline
/* The place of `count` elements of `size` bytes, checked; poison or a sink where they may not be. */
static __attribute__((noinline)) char *sh_touch(const sh_view &v, sh_i64 i, int count, int size, int write) {
  alignas(16) static char poison[64], sink[64];
  if (++sh_now.steps > sh_now.launch->step_limit) {
    sh_report(SH_ENDLESS, v.name);
    sh_end_launch();
  }
  if (i < 0 || i > v.n - count) {
    sh_fault *f = sh_report(SH_OUT_OF_BOUNDS, v.name);
    f->element = i < 0 ? i : (i >= v.n ? i : v.n);
    f->n = v.n;
    f->write = write;
    __builtin_memset(poison, 0xff, sizeof poison);
    return write ? sink : poison;
  }
  const sh_region &r = *v.region;
  const sh_u64 first = v.start + (sh_u64)i * size, end = first + (sh_u64)count * size;
  if ((sh_u64)(r.data + first) % ((sh_u64)count * size)) {
    sh_fault *f = sh_report(SH_MISALIGNED, v.name);
    f->element = i;
    f->n = count;
    f->write = write;
  }
  bool uninitialized = false;
  for (sh_u64 c = first / r.granule; c <= (end - 1) / r.granule; c++) {
    const sh_i64 element = (sh_i64)((c * r.granule - v.start) / size);
    sh_cell &cell = r.cells[c];
    const bool known = r.is_shared ? cell.w_epoch >= sh_now.block_first : r.initialized[c];
    if (!write && !known && !uninitialized) {
      uninitialized = true;
      sh_fault *f = sh_report(SH_UNINITIALIZED, v.name);
      f->element = element;
      f->n = v.n;
    }
    sh_check_cell(v, cell, element, write);
    if (write && !r.is_shared) r.initialized[c] = 1;
    if (write && r.data == sh_dynamic_data) sh_written[c] = (sh_u32)sh_now.steps;
  }
  if (sh_now.launch->count && !r.is_shared)
    sh_now.launch->count(sh_now.launch->counter, &r, __builtin_return_address(0), sh_block_number(),
                         sh_now.thread, first, (sh_u32)(end - first), write);
  return r.data + first;
}

template <class T> struct sh_ref {
  sh_view v;
  sh_i64 i;
  SH_AT_SITE operator T() const { return *(const T *)sh_touch(v, i, 1, sizeof(T), 0); }
  SH_AT_SITE T operator=(T x) const { *(T *)sh_touch(v, i, 1, sizeof(T), 1) = x; return x; }
  SH_AT_SITE T operator=(const sh_ref &x) const { return *this = (T)x; }
  template <class U> SH_AT_SITE T operator+=(U x) const { return *this = (T)((T)*this + x); }
  template <class U> SH_AT_SITE T operator-=(U x) const { return *this = (T)((T)*this - x); }
  template <class U> SH_AT_SITE T operator*=(U x) const { return *this = (T)((T)*this * x); }
};
template <class T> struct sh_in {
  sh_view v;
  SH_AT_SITE T operator[](sh_i64 i) const { return *(const T *)sh_touch(v, i, 1, sizeof(T), 0); }
};
template <class T> struct sh_out {
  sh_view v;
  sh_ref<T> operator[](sh_i64 i) const { return {v, i}; }
};
template <class T> struct sh_plain { typedef T type; };
template <class T> struct sh_plain<sh_ref<T>> { typedef T type; };
static sh_view sh_view_of(const sh_arg &a, int size) {
  return {a.region, 0, (sh_i64)(a.region->bytes / size), a.region->name};
}
template <class T> static sh_out<T> sh_shared_at(sh_site &site, sh_i64 n) {
  /* What any block reaches counts for all. */
  if (site.epoch < sh_now.launch_first) {
    site.epoch = sh_now.launch_first;
    site.at = (sh_now.static_used + 15) / 16 * 16;
    sh_now.static_used = site.at + n * sizeof(T);
  }
  if (sh_now.static_used > SH_STATIC_BYTES ||
      sh_now.static_used + sh_now.launch->dynamic_bytes > sh_now.launch->shared_limit) {
    sh_report(SH_SHARED_TOO_LARGE, site.name)->n = (sh_i64)sh_now.static_used + sh_now.launch->dynamic_bytes;
    sh_end_launch();
  }
  return {{&sh_static_region, site.at, n, site.name}};
}
template <class T> static sh_out<T> sh_carve(const char *name, sh_u64 at, sh_i64 n) {
  const sh_u64 room = sh_now.launch->dynamic_bytes;
  if (room > SH_SHARED_BYTES || n < 0 || at > room || (sh_u64)n > (room - at) / sizeof(T)) {
    sh_report(SH_SHARED_TOO_LARGE, name)->n = (sh_i64)(at + n * sizeof(T));
    sh_end_launch();
  }
  return {{&sh_dynamic_region, at, n, name}};
}

struct sh_bf16 { unsigned short bits; };
struct sh_f16 { unsigned short bits; };
SH_FN float sh_to_float(sh_bf16 x) { return sh_from_bits((sh_u32)x.bits << 16); }
SH_FN float sh_to_float(sh_f16 x) {
  const sh_u32 sign = (sh_u32)(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  /* Subnormal numbers count in steps of 2^-24. */
  if (rest < 0x400u) return sh_from_bits(sh_bits((float)rest * 0x1p-24f) | sign);
  if (rest >= 0x7c00u) return sh_from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return sh_from_bits(sign | ((rest << 13) + (112u << 23)));
}
SH_FN sh_bf16 sh_bf16_of(float f) {
  const sh_u32 u = sh_bits(f);
  if (f != f) return {0x7fff};
  return {(unsigned short)((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
}
SH_FN sh_f16 sh_f16_of(float f) {
  const sh_u32 u = sh_bits(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {0x7fff};
  if (a >= 0x477ff000u) return {(unsigned short)(sign | 0x7c00u)};
  /* Adding 1/2 makes the unit in the last place 2^-24: the sum rounds. */
  if (a < 0x38800000u) return {(unsigned short)(sign | (sh_bits(sh_from_bits(a) + 0.5f) - 0x3f000000u))};
  return {(unsigned short)(sign | ((a - (112u << 23) + 0xfffu + (a >> 13 & 1u)) >> 13))};
}

template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) sh_vec {
  T v[N];
  T &operator[](int i) { return v[i]; }
  const T &operator[](int i) const { return v[i]; }
};
/* Pieces of at most 16 bytes. */
template <int N, class T> struct sh_pieces {
  enum { each = N * sizeof(T) < 16 ? N : (int)(16 / sizeof(T)) };
  static SH_AT_SITE void load(sh_vec<T, N> &v, const sh_view &x, sh_i64 i) {
    for (int at = 0; at < N; at += each)
      __builtin_memcpy(&v.v[at], sh_touch(x, i + at, each, sizeof(T), 0), each * sizeof(T));
  }
  static SH_AT_SITE void store(const sh_vec<T, N> &v, const sh_view &y, sh_i64 i) {
    for (int at = 0; at < N; at += each)
      __builtin_memcpy(sh_touch(y, i + at, each, sizeof(T), 1), &v.v[at], each * sizeof(T));
  }
};
template <int N, class T, template <class> class P> static SH_AT_SITE sh_vec<T, N> sh_load(P<T> x, sh_i64 i) {
  sh_vec<T, N> v;
  sh_pieces<N, T>::load(v, x.v, i);
  return v;
}
template <int N, class T> static SH_AT_SITE void sh_store(sh_out<T> y, sh_i64 i, const sh_vec<T, N> &v) {
  sh_pieces<N, T>::store(v, y.v, i);
}

/* A function of the prelude that the kernel calls: threads meet in it only if they came by one call.
 * Functions of the kernel's own text are not told apart by their calls. */
struct sh_call {
  explicit sh_call(sh_place at) { sh_now.fibers[sh_now.thread].call = at; }
  ~sh_call() { sh_now.fibers[sh_now.thread].call = {0, 0}; }
};
static bool sh_alike(const sh_fiber &a, const sh_fiber &b) {
  return a.meets.id == b.meets.id && a.meets.line == b.meets.line && a.call.id == b.call.id;
}
static void sh_block_barrier(sh_place at) {
  sh_fiber *f = sh_now.fibers;
  const sh_u32 n = sh_now.launch->threads;
  f[sh_now.thread].state = SH_AT_BARRIER;
  f[sh_now.thread].meets = at;
  bool alike = ++sh_now.at_barrier == n;
  for (sh_u32 i = 1; alike && i < n; i++) alike = sh_alike(f[i], f[0]);
  if (!alike) return sh_to_scheduler();
  sh_now.at_barrier = 0;
  sh_now.epoch++;
  for (sh_u32 i = 0; i < n; i++) {
    f[i].state = SH_RUNS;
    sh_fences[i].ordered = sh_fences[i].made;
    sh_fences[i].begun_ordered = sh_fences[i].begun;
  }
  for (sh_u32 i = 0; i < n / 32; i++) sh_now.warps[i].clock = 0;
}
/* Waits for the warp; afterwards every lane's words stand in the result. */
static sh_u64 (*sh_meet(sh_place at, const sh_u64 *words, int n))[8] {
  sh_warp &w = sh_now.warps[sh_now.thread / 32];
  const sh_u32 slot = w.generation & 1;
  sh_fiber *lanes = sh_now.fibers + sh_now.thread / 32 * 32;
  for (int i = 0; i < n; i++) w.exchange[slot][sh_now.thread % 32][i] = words[i];
  sh_now.fibers[sh_now.thread].state = SH_AT_WARP;
  sh_now.fibers[sh_now.thread].meets = at;
  bool alike = ++w.arrived == 32;
  for (int i = 1; alike && i < 32; i++) alike = sh_alike(lanes[i], lanes[0]);
  if (!alike) {
    sh_to_scheduler();
  } else {
    w.arrived = 0;
    w.generation++;
    for (int i = 0; i < 32; i++) lanes[i].state = SH_RUNS;
  }
  return w.exchange[slot];
}
static void sh_warp_barrier(sh_place at) {
  sh_warp &w = sh_now.warps[sh_now.thread / 32];
  const sh_u32 before = w.generation;
  sh_meet(at, nullptr, 0);
  /* Once for the warp: whoever runs first afterwards. */
  static sh_u32 counted[32];
  if (counted[sh_now.thread / 32] != before + 1) w.clock++;
  counted[sh_now.thread / 32] = before + 1;
}
template <class V, class T = typename sh_plain<V>::type> static T sh_from_lane(V given, int lane, int line) {
  const T v = given;
  sh_u64 word = 0;
  __builtin_memcpy(&word, &v, sizeof v);
  const int own = sh_now.thread % 32;
  sh_u64(*all)[8] = sh_meet({0, line}, &word, 1);
  T result;
  __builtin_memcpy(&result, all[lane < 0 ? own : lane], sizeof result);
  return result;
}
template <class V> static auto sh_shuffle_xor(V v, int mask, int line = __builtin_LINE()) {
  return sh_from_lane(v, sh_now.thread % 32 ^ mask, line);
}
template <class V> static auto sh_shuffle_down(V v, int d, int line = __builtin_LINE()) {
  const int lane = sh_now.thread % 32 + d;
  return sh_from_lane(v, lane > 31 ? -1 : lane, line);
}
template <class V> static auto sh_shuffle(V v, int lane, int line = __builtin_LINE()) {
  return sh_from_lane(v, lane & 31, line);
}
/* The place of the lowest bit that is set. */
static int sh_lowest(unsigned bits) { return __builtin_ctz(bits); }
static unsigned sh_ballot(int p, int line = __builtin_LINE()) {
  const sh_u64 word = p != 0;
  sh_u64(*all)[8] = sh_meet({0, line}, &word, 1);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= (unsigned)all[i][0] << i;
  return bits;
}
/* A function of the prelude made for blocks of n threads. */
static void sh_block_is(int n) {
  if (sh_now.launch->threads != (sh_u32)n) {
    sh_report(SH_BLOCK_SIZE, "")->n = n;
    sh_end_launch();
  }
}

static void sh_entry() {
  sh_now.kernel(sh_now.launch->args);
  sh_now.fibers[sh_now.thread].state = SH_DONE;
  sh_now.n_done++;
  sh_to_scheduler();
}
static sh_u64 sh_random(sh_u64 &state) {
  state += 0x9e3779b97f4a7c15ull;
  sh_u64 z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
/* Seed 0 keeps the natural order. */
template <class I> static void sh_permute(I *order, sh_u32 n, sh_u64 seed, sh_u64 &random) {
  for (sh_u32 i = 0; i < n; i++) order[i] = i;
  for (sh_u32 i = n; seed && i > 1; i--) {
    const sh_u32 j = (sh_u32)(sh_random(random) % i);
    const I t = order[i - 1];
    order[i - 1] = order[j];
    order[j] = t;
  }
}
/* Where a fiber waits, as a line: of the kernel's text even if it waits inside of the prelude. */
static int sh_line(const sh_fiber &f) { return f.call.id ? f.call.line : f.meets.line; }
/* Appends runs of threads in one state at one place: " 0-31 barrier@4, 32-63 ended". */
static void sh_dump(char *note, int room) {
  static const char *const names[] = {"runs", "barrier@", "warp@", "ended", "phase@"};
  int at = 0;
  auto put = [&](const char *s) { while (*s && at + 1 < room) note[at++] = *s++; };
  auto number = [&](int v) {
    char digits[12];
    int n = 11;
    digits[n] = 0;
    do digits[--n] = (char)('0' + v % 10); while (v /= 10);
    put(digits + n);
  };
  const int n = (int)sh_now.launch->threads;
  for (int i = 0, end; i < n; i = end) {
    const sh_fiber &f = sh_now.fibers[i];
    for (end = i + 1; end < n && sh_now.fibers[end].state == f.state && sh_alike(sh_now.fibers[end], f);) end++;
    put(i ? ", " : "");
    number(i);
    if (end - 1 > i) put("-"), number(end - 1);
    put(" ");
    put(names[f.state]);
    if (f.state != SH_RUNS && f.state != SH_DONE) number(sh_line(f));
  }
  note[at] = 0;
}
static void sh_stuck() {
  bool in_warp = false;
  const int n = (int)sh_now.launch->threads;
  for (int i = n - 1; i >= 0; i--) {
    in_warp |= sh_now.fibers[i].state == SH_AT_WARP;
    if (sh_now.fibers[i].state != SH_DONE) sh_now.thread = i;
  }
  sh_now.ended = 1;
  sh_fault *f = sh_report(in_warp ? SH_MISSING_LANES : SH_DIVERGENT_BARRIER, "");
  f->line = (sh_u32)sh_line(sh_now.fibers[sh_now.thread]);
  sh_dump(f->note, sizeof f->note);
}
static void sh_run_block(sh_u64 &random) {
  sh_launch *l = sh_now.launch;
  unsigned short order[1024];
  sh_now.at_barrier = sh_now.n_done = 0;
  for (sh_u32 i = 0; i < l->threads / 32; i++) sh_now.warps[i].arrived = sh_now.warps[i].clock = 0;
  for (sh_u32 i = 0; i < l->threads; i++) {
    char *top = l->stacks + (sh_u64)(i + 1) * l->stack_bytes;
    sh_now.fibers[i] = {sh_fresh((int)i, top, sh_entry), SH_RUNS, {0, 0}, {0, 0}};
    sh_fences[i] = {0, 0, 0, 0};
  }
  while (sh_now.n_done < l->threads && !sh_now.ended) {
    bool progress = false;
    sh_permute(order, l->threads, l->seed, random);
    for (sh_u32 k = 0; k < l->threads && !sh_now.ended; k++) {
      sh_fiber &f = sh_now.fibers[order[k]];
      if (f.state == SH_AT_PHASE && sh_is_past(f)) f.state = SH_RUNS;
      if (f.state != SH_RUNS) continue;
      progress = true;
      sh_now.thread = order[k];
      sh_switch(&sh_now.scheduler, sh_now.fibers[order[k]].sp);
    }
    if (!progress) sh_stuck();
  }
  if (!sh_now.ended) sh_block_ended();
}
static void sh_run(sh_launch *l, void (*kernel)(const sh_arg *)) {
  const sh_u32 n = l->grid[0] * l->grid[1] * l->grid[2];
  sh_u64 random = l->seed;
  sh_now.launch = l;
  sh_now.kernel = kernel;
  sh_now.steps = sh_now.ended = 0;
  sh_now.static_used = 0;
  sh_now.launch_first = sh_now.epoch + 1;
  sh_now.scheduler = nullptr;
  /* Epochs go on from launch to launch, so what earlier ones left in shared memory is old. */
  sh_permute(l->block_order, n, l->seed, random);
  for (sh_u32 k = 0; k < n && !sh_now.ended; k++) {
    const sh_u32 b = l->block_order[k];
    sh_now.block[0] = b % l->grid[0];
    sh_now.block[1] = b / l->grid[0] % l->grid[1];
    sh_now.block[2] = b / l->grid[0] / l->grid[1];
    sh_now.block_first = ++sh_now.epoch;
    l->block_epochs[k] = sh_now.epoch;
    sh_run_block(random);
  }
}

/* The host's compiler is told to fuse nothing. */
SH_FN float sh_mul(float a, float b) { return a * b; }
SH_FN double sh_mul_f64(double a, double b) { return a * b; }
