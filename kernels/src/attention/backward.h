void NAME(void *const *buf, void *scratch, long tid, long nt) {
  const long n_rows = ROWS, n_columns = COLUMNS, depth = DEPTH, width = WIDTH, wide = WIDE, tall = TALL;
  float *restrict const keys = (float *)scratch, *restrict const turned = keys + BLOCK * wide;
  float *restrict const values = turned + depth * BLOCK;
  float *restrict const dks = values + width * BLOCK, *restrict const dvs = dks + BLOCK * wide;
  float *restrict const qs = dvs + BLOCK * tall, *restrict const dys = qs + STRIP * wide;
  float *restrict const s = dys + STRIP * tall, *restrict const ds = s + STRIP * BLOCK;
  float *restrict const delta = ds + STRIP * BLOCK, *restrict const dqs = delta + n_rows;
  float *restrict const numbers = dqs + n_rows * wide;
SEED_LINE
  for (long head = HEADS * tid / nt; head < HEADS * (tid + 1) / nt; ++head) {
    const REAL *restrict const dy = (const REAL *)buf[0] + DY_AT, *restrict const q = (const REAL *)buf[1] + Q_AT;
    const REAL *restrict const k = (const REAL *)buf[2] + K_AT, *restrict const v = (const REAL *)buf[3] + V_AT;
MASK_HERE
    const REAL *restrict const y = (const REAL *)buf[Y_BUFFER] + Y_AT;
    const float *restrict const lse = (const float *)buf[LSE_BUFFER] + LSE_AT;
REST_LINE
    REAL *restrict const dq = (REAL *)buf[DQ_BUFFER] + DQ_AT, *restrict const dk = (REAL *)buf[DK_BUFFER] + DK_AT;
    REAL *restrict const dv = (REAL *)buf[DV_BUFFER] + DV_AT;
    for (long i = 0; i < n_rows; ++i) {
      float total = 0.0f;
#pragma omp simd reduction(+ : total)
      for (long e = 0; e < width; ++e) total += FROM(dy[i * DY_ROW + e]) * FROM(y[i * Y_ROW + e]);
      delta[i] = total;
    }
    for (long i = 0; i < n_rows * wide; ++i) dqs[i] = 0.0f;
    for (long j0 = 0; j0 < n_columns; j0 += BLOCK) {
      const long m = n_columns - j0 < BLOCK ? n_columns - j0 : BLOCK;
      NAME_load(keys, wide, k + j0 * K_ROW, K_ROW, m, depth, 1.0f);
      NAME_turn(turned, BLOCK, k + j0 * K_ROW, K_ROW, m, depth);
      NAME_turn(values, BLOCK, v + j0 * V_ROW, V_ROW, m, width);
      const float own_odd = HAS_MASK ? NAME_odd(turned, BLOCK, depth, m) + NAME_odd(values, BLOCK, width, m) : 1.0f;
      for (long i = 0; i < m * wide; ++i) dks[i] = 0.0f;
      for (long i = 0; i < m * tall; ++i) dvs[i] = 0.0f;
      for (long i0 = CAUSAL ? j0 : 0; i0 < n_rows; i0 += STRIP) {
        const long rows = n_rows - i0 < STRIP ? n_rows - i0 : STRIP;
        const long last = i0 + rows - j0, columns = CAUSAL && last < m ? last : m;
        const float odd = HAS_MASK ? own_odd + NAME_odd(delta + i0, 0, 1, rows) : 1.0f;
        long low = 0, high = columns;
        SEEN_LINE
        if (low >= high) continue;
        const long padded = (high - low + LANES - 1) / LANES * LANES;
        NAME_load(qs, wide, q + i0 * Q_ROW, Q_ROW, rows, depth, SCALE);
        NAME_load(dys, tall, dy + i0 * DY_ROW, DY_ROW, rows, width, 1.0f);
        NAME_set(rows, padded, depth, qs, wide, turned + low, BLOCK, s + low, BLOCK);
        NAME_set(rows, padded, width, dys, tall, values + low, BLOCK, ds + low, BLOCK);
        for (long i = 0; i < rows; ++i) {
          float *restrict const p = s + i * BLOCK, *restrict const own = ds + i * BLOCK;
          const long sees = i0 + i - j0 + 1, c = CAUSAL && sees < high ? sees : high;
          /* If all keys of a row are hidden, its probabilities are 0 with SAFE, else NaN. */
          const float whole = lse[i0 + i], mean = delta[i0 + i];
          const float norm = SAFE && whole == -__builtin_inff() ? __builtin_inff() : whole;
          const float low_part = REST_OF_ROW;
MASK_LINE
UNIFORM_LINE
#pragma omp simd
          for (long j = low; j < c; ++j) {
            p[j] = sh_exp(SCORE_AGAIN - norm - low_part);
            own[j] = GRADIENT;
            p[j] = P_DROPPED;
          }
          for (long j = c < low ? low : c; j < high; ++j) p[j] = own[j] = 0.0f;
        }
        NAME_add_turned(high - low, tall, rows, s + low, BLOCK, dys, tall, dvs + low * tall, tall);
        NAME_add_turned(high - low, wide, rows, ds + low, BLOCK, qs, wide, dks + low * wide, wide);
        NAME_add(rows, wide, high - low, ds + low, BLOCK, keys + low * wide, wide, dqs + i0 * wide, wide);
      }
      NAME_store(dk + j0 * DK_ROW, DK_ROW, dks, wide, m, depth, 1.0f);
      NAME_store(dv + j0 * DV_ROW, DV_ROW, dvs, tall, m, width, 1.0f);
    }
    NAME_store(dq, DQ_ROW, dqs, wide, n_rows, depth, SCALE);
  }
}
