// Keys and values of one element type, read directly from the pages of a cache. Scores and weighted sums are float32.

// The addresses of the keys and values of a tile's positions.
typedef struct {
  const ELEMENT *keys[TILE_POSITIONS], *values[TILE_POSITIONS];
} NAME(places);

// Loads the scales of a tile's keys and values, for an element type that has scales.
static __attribute__((unused)) void NAME(load_scales)(const tile* t, const NAME(places)* at) {
  for (int j = t->begin; j < t->end; j++) {
    memcpy(t->scales + j, at->keys[j] + t->head_dim, sizeof(float));
    memcpy(t->scales + TILE_POSITIONS + j, at->values[j] + t->head_dim, sizeof(float));
  }
}

// Loads words of a key. A word is one value, or two values if scores are added in pairs.
INLINE floats NAME(load_words)(const int in_pairs, const ELEMENT* p) {
  return in_pairs ? load_float((const float*)(const void*)p) : NAME(load)(p);
}

static NOINLINE floats NAME(load_tail)(const int in_pairs, const ELEMENT* p, int64_t size) {
  ELEMENT values[2 * LANES];
  memset(values, 0, sizeof values);
  memcpy(values, p, sizeof(ELEMENT) * (size_t)size);
  return NAME(load_words)(in_pairs, values);
}

// Number of elements in a cache line of LINE bytes.
#define LINE_ELEMENTS (LINE / (int64_t)sizeof(ELEMENT))

// sums[r][u] += queries[r][d...] * keys[u][d...]
INLINE void NAME(add_products)(const int R, const int U, const int in_pairs, const int is_tail, const tile* t,
                               const ELEMENT* const* keys, int64_t d, floats sums[DIRECT_ROWS][4]) {
  floats query[DIRECT_ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) query[r] = load_float(t->queries + r * t->stride + (in_pairs ? d / 2 : d));
#pragma GCC unroll 4
  for (int u = 0; u < U; u++) {
    const floats key = is_tail ? NAME(load_tail)(in_pairs, keys[u] + d, t->head_dim - d)
                               : NAME(load_words)(in_pairs, keys[u] + d);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r][u] = add_words(in_pairs, key, query[r], sums[r][u]);
  }
}

// Stores the sums over the lanes for R rows and U positions from the jth on.
INLINE void NAME(store_scores)(const int R, const int U, const tile* t, int j, floats sums[DIRECT_ROWS][4]) {
#define SUM(i) sums[(i) / U][(i) % U]
#define PLACE(i) (t->scores + (i) / U * TILE_POSITIONS + j + (i) % U)
  const int num_in_fours = R * U / 4 * 4;
#pragma GCC unroll 2
  for (int i = 0; i < num_in_fours; i += 4) {
    const floats4 four = sum_lanes_of_four(SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3));
    if (U == 4)
      memcpy(PLACE(i), &four, sizeof four);
    else
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) *PLACE(i + k) = four[k];
  }
#pragma GCC unroll 4
  for (int i = num_in_fours; i < R * U; i++) *PLACE(i) = sum_lanes(SUM(i));
#undef SUM
#undef PLACE
}

// Prefetches a line into the second-level cache. The first level is too small for all prefetched data, and supports
// fewer outstanding lines.
INLINE void NAME(fetch)(const ELEMENT* p) { __builtin_prefetch(p, 0, 2); }

// Scores U positions from the jth on for R rows; R * U is at most 8. The tile's values are prefetched while keys are
// scored, and the next tile's keys are prefetched while values are weighted. A core supports few outstanding reads, so
// each phase prefetches for the following phase.
INLINE void NAME(score_positions)(const int R, const int U, const int in_pairs, const tile* t, const NAME(places)* at,
                                  int j) {
  const ELEMENT *const *keys = at->keys + j, *const *values = at->values + j;
  const int64_t size = in_pairs ? 2 * LANES : LANES;
  floats sums[DIRECT_ROWS][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) sums[r][u] = splat(0.0f);
  int64_t d = 0;
  for (; d + LINE_ELEMENTS <= t->head_dim; d += LINE_ELEMENTS) {
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) NAME(fetch)(values[u] + d);
#pragma GCC unroll 8
    for (int64_t i = 0; i < LINE_ELEMENTS; i += size) NAME(add_products)(R, U, in_pairs, 0, t, keys, d + i, sums);
  }
  for (int u = 0; u < U && d < t->head_dim; u++) NAME(fetch)(values[u] + d);
  for (; d + size <= t->head_dim; d += size) NAME(add_products)(R, U, in_pairs, 0, t, keys, d, sums);
  if (d < t->head_dim) NAME(add_products)(R, U, in_pairs, 1, t, keys, d, sums);
  NAME(store_scores)(R, U, t, j, sums);
}

INLINE void NAME(score_rows)(const int R, const int in_pairs, const tile* t, const NAME(places)* at) {
  const int U = R <= 2 ? 4 : R <= 4 ? 2 : 1;
  int j = t->begin;
  for (; j + U <= t->end; j += U) NAME(score_positions)(R, U, in_pairs, t, at, j);
  for (; j < t->end; j++) NAME(score_positions)(R, 1, in_pairs, t, at, j);
}

// Scores up to DIRECT_ROWS rows against unpacked keys.
INLINE void NAME(score_directly)(const int in_pairs, const tile* t, const NAME(places)* at) {
#define SCORE(R) case R: NAME(score_rows)(R, in_pairs, t, at); break;
  switch (t->num_rows) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5) SCORE(6) SCORE(7) SCORE(8) }
#undef SCORE
}

// Packs four words of four keys: words from the dth on, keys of the positions from the jth on.
INLINE void NAME(pack_four)(const int in_pairs, const ELEMENT* const* keys, int64_t d, float* packed) {
  floats4 k[4], turned[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    k[i] = in_pairs ? load4_float((const float*)(const void*)keys[i] + d) : NAME(load4)(keys[i] + d);
  const floats4 ab_low = SHUFFLE(k[0], k[1], 0, 4, 1, 5), ab_high = SHUFFLE(k[0], k[1], 2, 6, 3, 7);
  const floats4 cd_low = SHUFFLE(k[2], k[3], 0, 4, 1, 5), cd_high = SHUFFLE(k[2], k[3], 2, 6, 3, 7);
  turned[0] = SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
  turned[1] = SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
  turned[2] = SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
  turned[3] = SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) memcpy(packed + (d + i) * TILE_POSITIONS, &turned[i], sizeof turned[i]);
}

// Returns the dth word of a key. The key may end within the word.
INLINE float NAME(word)(const int in_pairs, const ELEMENT* key, int64_t d, int64_t head_dim) {
  if (!in_pairs) return NAME(value)(key[d]);
  float word = 0.0f;
  memcpy(&word, key + 2 * d, sizeof(ELEMENT) * (size_t)(2 * d + 1 < head_dim ? 2 : 1));
  return word;
}

// packed[d][j] = keys[j][d] in words; zero for positions without a key, and after the end of a head.
INLINE void NAME(pack_keys)(const int in_pairs, const tile* t, const ELEMENT* const* keys, float* packed) {
  const int64_t num_whole = in_pairs ? t->head_dim / 2 : t->head_dim;
  const int64_t num_words = in_pairs ? (t->head_dim + 1) / 2 : t->head_dim;
  if (t->end - t->begin < TILE_POSITIONS || num_words < t->width)
    memset(packed, 0, sizeof(float) * (size_t)t->width * TILE_POSITIONS);
  int j = t->begin;
  for (; j + 4 <= t->end; j += 4) {
    int64_t d = 0;
    for (; d + 4 <= num_whole; d += 4) NAME(pack_four)(in_pairs, keys + j, d, packed + j);
    for (; d < num_words; d++)
      for (int i = 0; i < 4; i++)
        packed[d * TILE_POSITIONS + j + i] = NAME(word)(in_pairs, keys[j + i], d, t->head_dim);
  }
  for (; j < t->end; j++)
    for (int64_t d = 0; d < num_words; d++)
      packed[d * TILE_POSITIONS + j] = NAME(word)(in_pairs, keys[j], d, t->head_dim);
}

// Computes the dot products of a tile's queries and keys. `packed`: scratch memory for the tile's keys.
static NOINLINE void NAME(score)(const tile* t, const NAME(places)* at, float* packed) {
  if (t->num_rows <= DIRECT_ROWS) {
    NAME(score_directly)(0, t, at);
  } else {
    NAME(pack_keys)(0, t, at->keys, packed);
    score_packed(t, packed);
  }
}

// Positions of a tile whose values are weighted together, and the keys that are prefetched meanwhile. next_keys may be
// NULL.
typedef struct {
  int begin, end;
  const ELEMENT *const *values, *const *next_keys;
} NAME(positions);

// sums[r][d...] += weights[r][j] * values[j][d...] over some positions, for R rows and C vectors.
INLINE void NAME(weigh_columns)(const int R, const int C, const int is_tail, const tile* t, int row,
                                const NAME(positions)* p, int64_t d) {
  float* sums = t->sums.sums + row * t->stride + d;
  const float* weights = t->scores + row * TILE_POSITIONS;
  floats columns[6][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) columns[r][c] = load_float(sums + r * t->stride + c * LANES);
  for (int j = p->begin; j < p->end; j++) {
    if (p->next_keys)
#pragma GCC unroll 4
      for (int c = 0; c < C; c += LINE_ELEMENTS / LANES) NAME(fetch)(p->next_keys[j] + d + c * LANES);
    floats value[4];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      value[c] = is_tail ? NAME(load_tail)(0, p->values[j] + d, t->head_dim - d)
                         : NAME(load)(p->values[j] + d + c * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const floats weight = splat(weights[r * TILE_POSITIONS + j]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) columns[r][c] = multiply_add(weight, value[c], columns[r][c]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store_float(sums + r * t->stride + c * LANES, columns[r][c]);
}

INLINE void NAME(weigh_positions)(const int R, const tile* t, int row, const NAME(positions)* p) {
  const int C = R <= 2 ? 4 : 2;
  int64_t d = 0;
  for (; d + C * LANES <= t->head_dim; d += C * LANES) NAME(weigh_columns)(R, C, 0, t, row, p, d);
  for (; d + LANES <= t->head_dim; d += LANES) NAME(weigh_columns)(R, 1, 0, t, row, p, d);
  if (d < t->head_dim) NAME(weigh_columns)(R, 1, 1, t, row, p, d);
}

static NOINLINE void NAME(weigh_alone)(const tile* t, int row, int begin, int end, const ELEMENT* const* values) {
  if (begin < end) NAME(weigh_positions)(1, t, row, &(NAME(positions)){begin, end, values, NULL});
}

// Each row adds only the values that it sees, because 0 * NaN is NaN. Positions that all rows see are added for all
// rows together. The other positions are added row by row, before and after these, so that each row adds in the order
// of positions.
INLINE void NAME(weigh_rows)(const int R, const tile* t, int row, const ELEMENT* const* values,
                             const ELEMENT* const* next_keys) {
  const int32_t *begins = t->begins + row, *ends = t->ends + row;
  NAME(positions) common = {begins[0], ends[0], values, next_keys};
  for (int r = 1; r < R; r++) {
    common.begin = begins[r] > common.begin ? begins[r] : common.begin;
    common.end = ends[r] < common.end ? ends[r] : common.end;
  }
  if (common.begin >= common.end) {
    for (int r = 0; r < R; r++) NAME(weigh_alone)(t, row + r, begins[r], ends[r], values);
    return;
  }
  for (int r = 0; r < R; r++) NAME(weigh_alone)(t, row + r, begins[r], common.begin, values);
  NAME(weigh_positions)(R, t, row, &common);
  for (int r = 0; r < R; r++) NAME(weigh_alone)(t, row + r, common.end, ends[r], values);
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

// Finds the keys and values of the item in the tile from position `first` on, for its first KV head.
static void NAME(find_places)(const attention_step* step, const item* work, int64_t first, const ELEMENT* key_cache,
                              const ELEMENT* value_cache, NAME(places)* found) {
  const int32_t* table = step->block_tables + work->row * step->max_blocks;
  int begin, end;
  bound_tile(work, first, &begin, &end);
  key_cache += work->kv_head * step->key_strides[2];
  value_cache += work->kv_head * step->value_strides[2];
  for (int j = begin; j < end;) {
    const int64_t block = table[(first + j) / step->block_size];
    const ELEMENT* key_block = key_cache + block * step->key_strides[0];
    const ELEMENT* value_block = value_cache + block * step->value_strides[0];
    for (int64_t offset = (first + j) % step->block_size; offset < step->block_size && j < end; offset++, j++) {
      found->keys[j] = key_block + offset * step->key_strides[1];
      found->values[j] = value_block + offset * step->value_strides[1];
    }
  }
}

// Finds the same positions of the next KV head.
static void NAME(move_places)(const attention_step* step, const tile* t, const NAME(places)* at,
                              NAME(places)* after) {
  for (int j = t->begin; j < t->end; j++) {
    after->keys[j] = at->keys[j] + step->key_strides[2];
    after->values[j] = at->values[j] + step->value_strides[2];
  }
}

#undef LINE_ELEMENTS
