void NAME(void *const *buf, void *scratch, long tid, long nt) {
  const long n_rows = ROWS, n_columns = COLUMNS, depth = DEPTH, width = WIDTH, tall = TALL;
  float *restrict const keys = (float *)scratch, *restrict const values = keys + depth * BLOCK;
  float *restrict const s = values + BLOCK * tall, *restrict const o = s + STRIP * BLOCK;
  float *restrict const top = o + CHUNK * tall, *restrict const sum = top + CHUNK;
  float *restrict const qs = sum + CHUNK, *restrict const numbers = qs + STRIP * WIDE;
SEED_LINE
  for (long unit = UNITS * tid / nt; unit < UNITS * (tid + 1) / nt; ++unit) {
    const long head = unit / CHUNKS, first = unit % CHUNKS * CHUNK;
    const long n = n_rows - first < CHUNK ? n_rows - first : CHUNK;
    const REAL *restrict const q = (const REAL *)buf[0] + Q_AT, *restrict const k = (const REAL *)buf[1] + K_AT;
    const REAL *restrict const v = (const REAL *)buf[2] + V_AT;
MASK_HERE
    REAL *restrict const y = (REAL *)buf[Y_BUFFER] + Y_AT;
    float *restrict const lse = (float *)buf[LSE_BUFFER] + LSE_AT;
    float *restrict const rest = (float *)buf[REST_BUFFER] + REST_AT;
    for (long i = 0; i < n; ++i) { top[i] = -__builtin_inff(); sum[i] = 0.0f; }
    for (long i = 0; i < n * tall; ++i) o[i] = 0.0f;
    const long seen = CAUSAL && first + n < n_columns ? first + n : n_columns;
    for (long j0 = 0; j0 < seen; j0 += BLOCK) {
      const long m = seen - j0 < BLOCK ? seen - j0 : BLOCK;
      NAME_turn(keys, BLOCK, k + j0 * K_ROW, K_ROW, m, depth);
      NAME_load(values, tall, v + j0 * V_ROW, V_ROW, m, width, 1.0f);
      const float odd = HAS_MASK ? NAME_odd(keys, BLOCK, depth, m) + NAME_odd(values, tall, m, width) : 1.0f;
      for (long i0 = 0; i0 < n; i0 += STRIP) {
        const long rows = n - i0 < STRIP ? n - i0 : STRIP;
        const long last = first + i0 + rows - j0, columns = CAUSAL && last < m ? last : m;
        long low = 0, high = columns;
        SEEN_LINE
        if (low >= high) continue;
        NAME_load(qs, WIDE, q + (first + i0) * Q_ROW, Q_ROW, rows, depth, SCALE);
        NAME_set(rows, (high - low + LANES - 1) / LANES * LANES, depth, qs, WIDE, keys + low, BLOCK, s + low, BLOCK);
        for (long i = 0; i < rows; ++i) {
          float *restrict const own = s + i * BLOCK, *restrict const into = o + (i0 + i) * tall;
          const long sees = first + i0 + i - j0 + 1, c = CAUSAL && sees < high ? sees : high;
          const float before = top[i0 + i];
          float most = before, total = 0.0f;
MASK_LINE
UNIFORM_LINE
#pragma omp simd reduction(max : most)
          for (long j = low; j < c; ++j) {
            own[j] = SCORE;
            most = own[j] > most ? own[j] : most;
          }
          /* A row that sees nothing so far: all its terms are 0. */
          const float base = most == -__builtin_inff() ? 0.0f : most;
#pragma omp simd reduction(+ : total)
          for (long j = low; j < c; ++j) {
            own[j] = sh_exp(own[j] - base);
            total += own[j];
            own[j] = OWN_DROPPED;
          }
          for (long j = c < low ? low : c; j < high; ++j) own[j] = 0.0f;
          const float factor = before == most ? 1.0f : sh_exp(before - base);
          sum[i0 + i] = sum[i0 + i] * factor + total;
          top[i0 + i] = most;
          if (factor != 1.0f)
            for (long e = 0; e < tall; ++e) into[e] *= factor;
        }
        NAME_add(rows, tall, high - low, s + low, BLOCK, values + low * tall, tall, o + i0 * tall, tall);
      }
    }
    for (long i = 0; i < n; ++i) {
      const float all = sum[i] == 0.0f ? NOTHING : 1.0f / sum[i];
      for (long e = 0; e < width; ++e) y[(first + i) * Y_ROW + e] = TO(o[i * tall + e] * all);
      const float high = sum[i] == 0.0f ? -__builtin_inff() : top[i] + sh_log(sum[i]);
      lse[first + i] = high;
      /* If the maximum is large, rounding lse loses the logarithm of the sum; the rest keeps it. */
      rest[first + i] = sum[i] == 0.0f ? 0.0f : (top[i] - high) + sh_log(sum[i]);
    }
  }
}
