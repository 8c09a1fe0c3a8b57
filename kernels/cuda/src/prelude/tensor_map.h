/* Copies of whole blocks to shared memory by the copy engine, on Hopper: one thread asks, a phase of a
   barrier in shared memory ends when they have arrived; follows warpgroup.h. A phase ends when as many
   threads have arrived as the barrier was made for and all bytes that they told of are there. */

#ifdef __CUDACC_RTC__
/* What the driver makes of a matrix in memory: cuTensorMapEncodeTiled. */
struct alignas(128) sh_tensor_map { sh_u64 opaque[16]; };
#define SH_MAP(T) const __grid_constant__ sh_tensor_map

SH_FN sh_u32 sh_phase_at(sh_u64 *b, int s) { return (sh_u32)__cvta_generic_to_shared(b + s); }
/* Barrier `s` of b, for so many arrivals; sh_phases_begin follows the last, then a barrier of the block. */
SH_FN void sh_phase_init(sh_u64 *b, int s, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sh_phase_at(b, s)), "r"(arrivals) : "memory");
}
SH_FN void sh_phases_begin() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
SH_FN void sh_phase_arrive(sh_u64 *b, int s) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sh_phase_at(b, s)) : "memory");
}
/* Arrives, and tells of bytes that are to come in this phase. */
SH_FN void sh_phase_expect(sh_u64 *b, int s, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sh_phase_at(b, s)), "r"(bytes)
               : "memory");
}
/* Until the phase of that parity has ended; the one before the first counts as ended. */
SH_FN void sh_phase_wait(sh_u64 *b, int s, int parity) {
  sh_u32 over;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over) : "r"(sh_phase_at(b, s)), "r"(parity) : "memory");
  } while (!over);
}
/* Begins the copy of a box of the map: its lines of 64 elements, from element x of line (y, z) on, to the
   words from `at` on, swizzled as warpgroup products read it; zeros beyond the ends. */
SH_FN void sh_box_copy(const sh_tensor_map &map, int x, int y, int z, unsigned *to, int at, sh_u64 *b, int s) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"((sh_u32)__cvta_generic_to_shared(to + at)), "l"(&map), "r"(sh_phase_at(b, s)), "r"(x),
                 "r"(y), "r"(z)
               : "memory");
}
#else
/* Lines of 16-bit elements in two directions: elements of a line, lines each way; their distances in
   elements; lines of a box each way. */
struct sh_tensor_map {
  sh_view v;
  sh_i64 offset;
  int sizes[3];
  sh_i64 strides[2];
  int box[2];
  int lines() const { return box[0] * box[1]; }
};
#define SH_MAP(T) const sh_tensor_map
struct sh_box { sh_tensor_map map; int x, y, z, thread; sh_u32 at; };
struct sh_phase { sh_u32 at; int arrivals, arrived, n; sh_u32 n_past; sh_i64 awaited; sh_box boxes[16]; };
enum { SH_PHASES = 32 };
/* Those of the block that began at epoch `block`. */
static struct { sh_u32 block; int n; sh_phase all[SH_PHASES]; } sh_phases;

static sh_phase &sh_phase_of(sh_out<sh_u64> b, int s) {
  const sh_u32 at = (sh_u32)b.v.start + s * 8;
  if (sh_phases.block == sh_now.block_first)
    for (int i = 0; i < sh_phases.n; i++)
      if (sh_phases.all[i].at == at) return sh_phases.all[i];
  sh_report(SH_UNINITIALIZED, b.v.name)->element = s;
  sh_end_launch();
  return sh_phases.all[0];
}
static void sh_phase_init(sh_out<sh_u64> b, int s, int arrivals) {
  if (sh_phases.block != sh_now.block_first) sh_phases.block = sh_now.block_first, sh_phases.n = 0;
  if (sh_phases.n == SH_PHASES || s < 0 || s >= b.v.n) {
    sh_fault *f = sh_report(SH_OUT_OF_BOUNDS, b.v.name);
    f->element = s, f->n = b.v.n, f->write = 1;
    sh_end_launch();
  }
  b[s] = 0;
  sh_phases.all[sh_phases.n++] = {(sh_u32)b.v.start + s * 8, arrivals};
}
static void sh_phases_begin() {
  sh_async_fence();
  sh_fences[sh_now.thread].begun = (sh_u32)sh_now.steps;
}
static void sh_phase_settle(sh_phase &p) {
  if (p.arrived != p.arrivals || p.awaited) return;
  p.arrived = 0;
  p.n_past++;
}
static void sh_phase_arrive(sh_out<sh_u64> b, int s) {
  sh_phase &p = sh_phase_of(b, s);
  p.arrived++;
  sh_phase_settle(p);
}
static void sh_phase_expect(sh_out<sh_u64> b, int s, int bytes) {
  sh_phase &p = sh_phase_of(b, s);
  p.awaited += bytes;
  p.arrived++;
  sh_phase_settle(p);
}
/* Copies arrive as late as is legal: when somebody waits for the last of what must come. */
static bool sh_is_due(const sh_phase &p) {
  sh_i64 bytes = 0;
  for (int i = 0; i < p.n; i++) bytes += p.boxes[i].map.lines() * 128;
  return p.n && p.arrived == p.arrivals && bytes == p.awaited;
}
static bool sh_is_past(const sh_fiber &f) { return (f.phase->n_past & 1) != (sh_u32)f.parity || sh_is_due(*f.phase); }
static void sh_mark_copied(sh_u32 at, int bytes, sh_u32 epoch) {
  sh_now.steps++;
  for (sh_u32 i = at; i < at + bytes; i++) {
    sh_dynamic_cells[i].w_epoch = epoch;
    sh_dynamic_cells[i].w_thread = SH_ENGINE;
    sh_written[i] = (sh_u32)sh_now.steps;
  }
}
static void sh_deliver(const sh_box &box) {
  const sh_tensor_map &m = box.map;
  const int waits = sh_now.thread;
  sh_now.thread = box.thread;
  for (int p = 0; p < m.lines() * 8; p++) {
    const int x = box.x + p % 8 * 8, y = box.y + p / 8 % m.box[0], z = box.z + p / 8 / m.box[0];
    const sh_u32 at = box.at + p * 16;
    char *to = sh_dynamic_data + (at ^ (at >> 3 & 0x70));
    if (x < m.sizes[0] && y < m.sizes[1] && z < m.sizes[2])
      __builtin_memcpy(to, sh_touch(m.v, m.offset + x + y * m.strides[0] + z * m.strides[1], 8, 2, 0), 16);
    else
      __builtin_memset(to, 0, 16);
  }
  sh_mark_copied(box.at, m.lines() * 128, sh_now.epoch);
  sh_now.thread = waits;
}
static void sh_phase_wait(sh_out<sh_u64> b, int s, int parity, int line = __builtin_LINE()) {
  sh_phase &p = sh_phase_of(b, s);
  while ((p.n_past & 1) == (sh_u32)parity) {
    if (sh_is_due(p)) {
      for (int i = 0; i < p.n; i++) sh_deliver(p.boxes[i]);
      p.n = 0;
      p.awaited = 0;
      sh_phase_settle(p);
      continue;
    }
    sh_fiber &f = sh_now.fibers[sh_now.thread];
    f.state = SH_AT_PHASE;
    f.meets = {0, line};
    f.phase = &p;
    f.parity = parity;
    sh_to_scheduler();
  }
}
static void sh_box_copy(const sh_tensor_map &map, int x, int y, int z, sh_out<unsigned> to, int at, sh_out<sh_u64> b,
                        int s) {
  sh_phase &p = sh_phase_of(b, s);
  const int bytes = map.lines() * 128;
  const sh_u32 from = (sh_u32)to.v.start + at * 4;
  if (at < 0 || at > to.v.n - bytes / 4 || p.n == 16) {
    sh_fault *f = sh_report(SH_OUT_OF_BOUNDS, to.v.name);
    f->element = at, f->n = to.v.n, f->write = 1;
    return;
  }
  /* The engine finds a barrier whose making it was told of, and the block too. */
  if (sh_written[p.at] > sh_fences[sh_dynamic_cells[p.at].w_thread].begun_ordered) {
    sh_fault *f = sh_report(SH_UNFENCED, b.v.name);
    f->element = s;
    f->other_thread = sh_dynamic_cells[p.at].w_thread;
  }
  if (from % 1024) {
    sh_fault *f = sh_report(SH_MISALIGNED, to.v.name);
    f->element = at, f->n = 256;
  }
  p.boxes[p.n++] = {map, x, y, z, sh_now.thread, from};
  __builtin_memset(sh_dynamic_data + from, 0xff, bytes);
  sh_mark_copied(from, bytes, 0);
}
#endif
