// Keys and values of one element type as they lie in the pages of a cache: found, scored and weighed in float32.

// Where the keys and values of a tile's positions lie.
typedef struct {
  const ELEMENT *keys[TILE_POSITIONS], *values[TILE_POSITIONS];
} NAME(places);

static NOINLINE floats NAME(load_tail)(const ELEMENT* p, int64_t size) {
  float values[LANES] = {0};
  for (int64_t i = 0; i < size; i++) values[i] = NAME(value)(p[i]);
  return load_float(values);
}

// Elements of the LINE bytes that memory gives at once.
#define LINE_ELEMENTS (LINE / (int64_t)sizeof(ELEMENT))

// sums[r][u] += queries[r][d...] * keys[u][d...]
INLINE void NAME(add_products)(const int R, const int U, const int is_tail, const tile* t, const ELEMENT* const* keys,
                               int64_t d, floats sums[DIRECT_ROWS][4]) {
  floats query[DIRECT_ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) query[r] = load_float(t->queries + r * t->stride + d);
#pragma GCC unroll 4
  for (int u = 0; u < U; u++) {
    const floats key = is_tail ? NAME(load_tail)(keys[u] + d, t->head_dim - d) : NAME(load)(keys[u] + d);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r][u] += key * query[r];
  }
}

// Scores U positions from the jth on for R rows; R * U at most 8. While keys are scored the values of the tile are
// fetched, and while values are weighed the keys of the next tile: a core has so few outstanding reads that either must
// not wait for the other.
INLINE void NAME(score_positions)(const int R, const int U, const tile* t, const NAME(places)* at, int j) {
  const ELEMENT *const *keys = at->keys + j, *const *values = at->values + j;
  floats sums[DIRECT_ROWS][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) sums[r][u] = splat(0.0f);
  int64_t d = 0;
  for (; d + LINE_ELEMENTS <= t->head_dim; d += LINE_ELEMENTS) {
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) __builtin_prefetch(values[u] + d);
#pragma GCC unroll 8
    for (int64_t i = 0; i < LINE_ELEMENTS; i += LANES) NAME(add_products)(R, U, 0, t, keys, d + i, sums);
  }
  for (int u = 0; u < U && d < t->head_dim; u++) __builtin_prefetch(values[u] + d);
  for (; d + LANES <= t->head_dim; d += LANES) NAME(add_products)(R, U, 0, t, keys, d, sums);
  if (d < t->head_dim) NAME(add_products)(R, U, 1, t, keys, d, sums);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    float* scores = t->scores + r * TILE_POSITIONS + j;
    if (U == 4)
      sum_lanes_of_four(sums[r], scores);
    else
#pragma GCC unroll 2
      for (int u = 0; u < U; u++) scores[u] = sum_lanes(sums[r][u]);
  }
}

INLINE void NAME(score_directly_rows)(const int R, const tile* t, const NAME(places)* at) {
  const int U = R <= 2 ? 4 : R <= 4 ? 2 : 1;
  int j = 0;
  for (; j + U <= t->num_positions; j += U) NAME(score_positions)(R, U, t, at, j);
  for (; j < t->num_positions; j++) NAME(score_positions)(R, 1, t, at, j);
}

#if defined(SCORES_IN_PAIRS) && defined(IS_BFLOAT16)
// The same by the processor's dot products of pairs, on the queries as they are: the scale comes after.
INLINE void NAME(score_in_pairs_rows)(const int R, const tile* t, const bfloat16* raw_queries,
                                      const NAME(places)* at) {
  const int64_t num_full = t->head_dim / 32 * 32, num_rest = t->head_dim - num_full;
  const __mmask32 rest = (__mmask32)((1ull << num_rest) - 1);
  for (int j = 0; j < t->num_positions; j++) {
    for (int64_t d = 0; d < t->head_dim; d += LINE_ELEMENTS) __builtin_prefetch(at->values[j] + d);
    __m512 sums[DIRECT_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < num_full; d += 32) {
      const __m512bh key = (__m512bh)_mm512_loadu_si512(at->keys[j] + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        sums[r] = _mm512_dpbf16_ps(sums[r], key, (__m512bh)_mm512_loadu_si512(raw_queries + r * MAX_HEAD_DIM + d));
    }
    if (num_rest) {
      const __m512bh key = (__m512bh)_mm512_maskz_loadu_epi16(rest, at->keys[j] + num_full);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        sums[r] =
            _mm512_dpbf16_ps(sums[r], key, (__m512bh)_mm512_loadu_si512(raw_queries + r * MAX_HEAD_DIM + num_full));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) t->scores[r * TILE_POSITIONS + j] = _mm512_reduce_add_ps(sums[r]) * t->scale;
  }
}
#endif

// `raw_queries`: [num_rows, MAX_HEAD_DIM] as they are where they are bfloat16 as the keys, else NULL.
static NOINLINE void NAME(score_directly)(const tile* t, const bfloat16* raw_queries, const NAME(places)* at) {
#define SCORE(R) case R: NAME(score_directly_rows)(R, t, at); break;
#define SCORE_IN_PAIRS(R) case R: NAME(score_in_pairs_rows)(R, t, raw_queries, at); return;
#if defined(SCORES_IN_PAIRS) && defined(IS_BFLOAT16)
  if (raw_queries) switch (t->num_rows) {
      SCORE_IN_PAIRS(1) SCORE_IN_PAIRS(2) SCORE_IN_PAIRS(3) SCORE_IN_PAIRS(4)
      SCORE_IN_PAIRS(5) SCORE_IN_PAIRS(6) SCORE_IN_PAIRS(7) SCORE_IN_PAIRS(8)
    }
#else
  (void)raw_queries;
#endif
  switch (t->num_rows) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5) SCORE(6) SCORE(7) SCORE(8) }
#undef SCORE
#undef SCORE_IN_PAIRS
}

// packed[d][j] = keys[j][d]; zero past the last position.
static void NAME(pack_keys)(const tile* t, const ELEMENT* const* keys, float* packed) {
  int j = 0;
  for (; j + 4 <= t->num_positions; j += 4) {
    int64_t d = 0;
    for (; d + 4 <= t->head_dim; d += 4) {
      const floats4 a = NAME(load4)(keys[j] + d), b = NAME(load4)(keys[j + 1] + d);
      const floats4 c = NAME(load4)(keys[j + 2] + d), e = NAME(load4)(keys[j + 3] + d);
      const floats4 ab_low = SHUFFLE(a, b, 0, 4, 1, 5), ab_high = SHUFFLE(a, b, 2, 6, 3, 7);
      const floats4 ce_low = SHUFFLE(c, e, 0, 4, 1, 5), ce_high = SHUFFLE(c, e, 2, 6, 3, 7);
      *(floats4*)(packed + d * TILE_POSITIONS + j) = SHUFFLE(ab_low, ce_low, 0, 1, 4, 5);
      *(floats4*)(packed + (d + 1) * TILE_POSITIONS + j) = SHUFFLE(ab_low, ce_low, 2, 3, 6, 7);
      *(floats4*)(packed + (d + 2) * TILE_POSITIONS + j) = SHUFFLE(ab_high, ce_high, 0, 1, 4, 5);
      *(floats4*)(packed + (d + 3) * TILE_POSITIONS + j) = SHUFFLE(ab_high, ce_high, 2, 3, 6, 7);
    }
    for (; d < t->head_dim; d++)
      for (int i = 0; i < 4; i++) packed[d * TILE_POSITIONS + j + i] = NAME(value)(keys[j + i][d]);
  }
  for (; j < TILE_POSITIONS; j++)
    for (int64_t d = 0; d < t->head_dim; d++)
      packed[d * TILE_POSITIONS + j] = j < t->num_positions ? NAME(value)(keys[j][d]) : 0.0f;
}

// sums[r][d...] += weights[r][j] * values[j][d...] over all positions, for R rows and C vectors; as much of the next keys
// is fetched, unless that is NULL.
INLINE void NAME(weigh_columns)(const int R, const int C, const int is_tail, const tile* t, int row,
                                const ELEMENT* const* values, const ELEMENT* const* next_keys, int64_t d) {
  float* sums = t->sums + row * t->stride + d;
  const float* weights = t->scores + row * TILE_POSITIONS;
  floats columns[6][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) columns[r][c] = load_float(sums + r * t->stride + c * LANES);
  for (int j = 0; j < t->num_positions; j++) {
    if (next_keys)
#pragma GCC unroll 4
      for (int c = 0; c < C; c += LINE_ELEMENTS / LANES) __builtin_prefetch(next_keys[j] + d + c * LANES);
    floats value[4];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      value[c] = is_tail ? NAME(load_tail)(values[j] + d, t->head_dim - d) : NAME(load)(values[j] + d + c * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const floats weight = splat(weights[r * TILE_POSITIONS + j]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) columns[r][c] += weight * value[c];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store_float(sums + r * t->stride + c * LANES, columns[r][c]);
}

INLINE void NAME(weigh_rows)(const int R, const tile* t, int row, const ELEMENT* const* values,
                             const ELEMENT* const* next_keys) {
  const int C = R <= 2 ? 4 : 2;
  int64_t d = 0;
  for (; d + C * LANES <= t->head_dim; d += C * LANES) NAME(weigh_columns)(R, C, 0, t, row, values, next_keys, d);
  for (; d + LANES <= t->head_dim; d += LANES) NAME(weigh_columns)(R, 1, 0, t, row, values, next_keys, d);
  if (d < t->head_dim) NAME(weigh_columns)(R, 1, 1, t, row, values, next_keys, d);
}

static NOINLINE void NAME(weigh_values)(const tile* t, const ELEMENT* const* values,
                                        const ELEMENT* const* next_keys) {
#define WEIGH(R) case R: NAME(weigh_rows)(R, t, row, values, row ? NULL : next_keys); break;
  for (int row = 0; row < t->num_rows; row += 6)
    switch (t->num_rows - row) {
      WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) WEIGH(5)
      default: NAME(weigh_rows)(6, t, row, values, row ? NULL : next_keys);
    }
#undef WEIGH
}

// Finds a tile of an item's first KV head, from position `first` to the item's end, at most `max_positions`.
static void NAME(find_places)(const attention_step* step, const item* work, int64_t first, int max_positions,
                              const ELEMENT* key_cache, const ELEMENT* value_cache, NAME(places)* found) {
  const int num_positions = work->end - first < max_positions ? (int)(work->end - first) : max_positions;
  const int32_t* table = step->block_tables + work->row * step->max_blocks;
  key_cache += work->kv_head * step->key_head_stride;
  value_cache += work->kv_head * step->value_head_stride;
  for (int j = 0; j < num_positions;) {
    const int64_t block = table[(first + j) / step->block_size];
    const ELEMENT* key_block = key_cache + block * step->key_block_stride;
    const ELEMENT* value_block = value_cache + block * step->value_block_stride;
    for (int64_t offset = (first + j) % step->block_size; offset < step->block_size && j < num_positions;
         offset++, j++) {
      found->keys[j] = key_block + offset * step->key_position_stride;
      found->values[j] = value_block + offset * step->value_position_stride;
    }
  }
}

// The same positions of the next KV head.
static void NAME(move_places)(const attention_step* step, int num_positions, const NAME(places)* at,
                              NAME(places)* after) {
  for (int j = 0; j < num_positions; j++) {
    after->keys[j] = at->keys[j] + step->key_head_stride;
    after->values[j] = at->values[j] + step->value_head_stride;
  }
}

#undef LINE_ELEMENTS
