typedef float NAME_v __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
FUNCTIONS

/* c[M, N] = a·b or, with `add`, c + a·b: element (m, k) of a is at m·row + k·column, rows of b and c are contiguous.
 * The sum of a·b begins at 0: rounding errors of a block of terms stay small beside those of c. */
static inline __attribute__((always_inline)) void NAME_tile(
    const int n_rows, const int n_vectors, const int add, long depth, const float *restrict a, long row, long column,
    const float *restrict b, long b_row, float *restrict c, long c_row) {
  NAME_v sums[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < n_rows; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < n_vectors; ++j)
      sums[i][j] = (NAME_v){0};
  for (long k = 0; k < depth; ++k) {
    NAME_v columns[TILE_VECTORS];
#pragma GCC unroll 16
    for (int j = 0; j < n_vectors; ++j) columns[j] = *(const NAME_v *)(b + k * b_row + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < n_rows; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < n_vectors; ++j)
        sums[i][j] = NAME_v_fma(NAME_v_all(a[i * row + k * column]), columns[j], sums[i][j]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < n_rows; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < n_vectors; ++j) {
      NAME_v *const own = (NAME_v *)(c + i * c_row + j * LANES);
      if (add) sums[i][j] += *own;
      *own = sums[i][j];
    }
}

static inline __attribute__((always_inline)) void NAME_panel(
    const int n_vectors, const int add, long m, long depth, const float *restrict a, long row, long column,
    const float *restrict b, long b_row, float *restrict c, long c_row) {
  long i = 0;
  for (; i + TILE_ROWS <= m; i += TILE_ROWS)
    NAME_tile(TILE_ROWS, n_vectors, add, depth, a + i * row, row, column, b, b_row, c + i * c_row, c_row);
  for (; i + 2 <= m; i += 2)
    NAME_tile(2, n_vectors, add, depth, a + i * row, row, column, b, b_row, c + i * c_row, c_row);
  if (i < m) NAME_tile(1, n_vectors, add, depth, a + i * row, row, column, b, b_row, c + i * c_row, c_row);
}

/* N is a multiple of LANES. */
static inline __attribute__((always_inline)) void NAME_product(
    const int add, long m, long n, long depth, const float *restrict a, long row, long column,
    const float *restrict b, long b_row, float *restrict c, long c_row) {
  long j = 0;
  for (; j + TILE_VECTORS * LANES <= n; j += TILE_VECTORS * LANES)
    NAME_panel(TILE_VECTORS, add, m, depth, a, row, column, b + j, b_row, c + j, c_row);
  for (; j < n; j += LANES) NAME_panel(1, add, m, depth, a, row, column, b + j, b_row, c + j, c_row);
}

/* c = a·b, c += a·b and c += aᵀ·b, where rows of a are contiguous. */
static __attribute__((noinline)) void NAME_set(
    long m, long n, long depth, const float *a, long row, const float *b, long b_row, float *c, long c_row) {
  NAME_product(0, m, n, depth, a, row, 1, b, b_row, c, c_row);
}
static __attribute__((noinline)) void NAME_add(
    long m, long n, long depth, const float *a, long row, const float *b, long b_row, float *c, long c_row) {
  for (long k = 0; k < depth; k += TERMS)
    NAME_product(1, m, n, depth - k < TERMS ? depth - k : TERMS, a + k, row, 1, b + k * b_row, b_row, c, c_row);
}
static __attribute__((noinline)) void NAME_add_turned(
    long m, long n, long depth, const float *a, long row, const float *b, long b_row, float *c, long c_row) {
  NAME_product(1, m, n, depth, a, 1, row, b, b_row, c, c_row);
}

/* Rows of `width` elements times a factor, filled with zeros up to `wide`. */
static void NAME_load(
    float *restrict to, long wide, const REAL *restrict from, long row, long n, long width, float factor) {
  for (long i = 0; i < n; ++i) {
    for (long d = 0; d < width; ++d) to[i * wide + d] = FROM(from[i * row + d]) * factor;
    for (long d = width; d < wide; ++d) to[i * wide + d] = 0.0f;
  }
}

/* The transpose, in blocks of 16 rows; columns behind the last row are zeros. */
static void NAME_turn(float *restrict to, long wide, const REAL *restrict from, long row, long n, long width) {
  long i = 0;
  for (; i + 16 <= n; i += 16)
    for (long d = 0; d < width; ++d)
      for (long l = 0; l < 16; ++l) to[d * wide + i + l] = FROM(from[(i + l) * row + d]);
  for (long d = 0; d < width; ++d) {
    for (long l = i; l < n; ++l) to[d * wide + l] = FROM(from[l * row + d]);
    for (long l = n; l < wide && l < n + LANES; ++l) to[d * wide + l] = 0.0f;
  }
}

static void NAME_store(
    REAL *restrict to, long row, const float *restrict from, long wide, long n, long width, float factor) {
  for (long i = 0; i < n; ++i)
    for (long d = 0; d < width; ++d) to[i * row + d] = TO(from[i * wide + d] * factor);
}

/* 0 if all numbers are finite, else NaN. A masked key with NaN or infinity makes a row NaN, as in PyTorch. */
static float NAME_odd(const float *restrict x, long row, long n, long width) {
  float odd = 0.0f;
  for (long i = 0; i < n; ++i) {
#pragma omp simd reduction(+ : odd)
    for (long d = 0; d < width; ++d) odd += x[i * row + d] * 0.0f;
  }
  return odd;
}
