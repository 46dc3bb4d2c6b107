// Paged attention for one element type: the online softmax of Milakov and Gimelshein (2018,
// https://arxiv.org/abs/1805.02867) over pages, as FlashAttention (Dao et al., 2022, https://arxiv.org/abs/2205.14135)
// tiles it.
//
// The queries of a row and the query heads of a KV head are flattened to (query, head) pairs, query first: pair p is
// query p / group of the row. Up to TILE_ROWS pairs attend together, so keys and values are read once for all of them;
// where they are few, those of several KV heads take turns at each tile of positions, in the order in which keys lie.
// Positions that no pair of a tile sees are never read.

#if defined(IS_BFLOAT16) && defined(HAS_AVX512) && defined(__AVX512BF16__)
#define SCORES_IN_PAIRS 1
#endif

// Where the keys and values of a tile's positions lie.
typedef struct {
  const ELEMENT *keys[TILE_POSITIONS], *values[TILE_POSITIONS];
} NAME(places);

static __attribute__((noinline)) floats NAME(load_tail)(const ELEMENT* p, int64_t size) {
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

#ifdef SCORES_IN_PAIRS
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

static __attribute__((noinline)) void NAME(score_directly)(const tile* t, const ELEMENT* raw_queries, const NAME(places)* at) {
#ifdef SCORES_IN_PAIRS
#define SCORE(R) case R: NAME(score_in_pairs_rows)(R, t, raw_queries, at); break;
#else
  (void)raw_queries;
#define SCORE(R) case R: NAME(score_directly_rows)(R, t, at); break;
#endif
  switch (t->num_rows) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5) SCORE(6) SCORE(7) SCORE(8) }
#undef SCORE
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

static __attribute__((noinline)) void NAME(weigh_values)(const tile* t, const ELEMENT* const* values, const ELEMENT* const* next_keys) {
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

// Loads the item's queries, as they are and scaled.
static void NAME(load_queries)(const attention_step* step, const item* work, const ELEMENT* query, tile* t,
                               ELEMENT* raw_queries) {
  const int64_t group = step->num_heads / step->num_kv_heads;
  for (int m = 0; m < t->num_rows; m++) {
    const int64_t pair = work->first_pair + m % work->num_pairs;
    const int64_t token = step->query_start_loc[work->row] + pair / group;
    const int64_t head = (work->kv_head + m / work->num_pairs) * group + pair % group;
    const ELEMENT* source = query + token * step->query_token_stride + head * step->head_dim;
    for (int64_t d = 0; d < step->head_dim; d++)
      t->queries[m * t->stride + d] = NAME(value)(source[d]) * step->scale;
    if (raw_queries) {
      memset(raw_queries + m * MAX_HEAD_DIM, 0, sizeof(ELEMENT) * MAX_HEAD_DIM);
      memcpy(raw_queries + m * MAX_HEAD_DIM, source, sizeof(ELEMENT) * (size_t)step->head_dim);
    }
  }
}

// Attends for one item: sums, maxima and totals of its rows, not yet divided. The first keys of the item that the thread
// takes next, NULL if there is none, are fetched meanwhile.
static void NAME(attend_item)(const attention_step* step, const item* work, const item* next, const ELEMENT* query,
                              const ELEMENT* key_cache, const ELEMENT* value_cache, tile* t, float* packed) {
  NAME(places) both[2] = {0};
  ELEMENT* raw_queries = NULL;
#ifdef SCORES_IN_PAIRS
  ELEMENT raw[TILE_ROWS * MAX_HEAD_DIM];
  if (work->num_pairs <= DIRECT_ROWS) raw_queries = raw;
#endif
  start_tile(step, work, t);
  NAME(load_queries)(step, work, query, t, raw_queries);
  const int is_direct = work->num_pairs <= DIRECT_ROWS;
  const int max_positions = is_direct ? DIRECT_POSITIONS : TILE_POSITIONS;
  NAME(find_places)(step, work, work->start, max_positions, key_cache, value_cache, &both[0]);
  int turn = 0;
  for (int64_t first = work->start; first < work->end; first += max_positions) {
    const int64_t later = first + max_positions;
    t->num_positions = later > work->end ? (int)(work->end - first) : max_positions;
    for (int nth = 0; nth < work->num_kv_heads; nth++, turn = 1 - turn) {
      const NAME(places)* at = &both[turn];
      NAME(places)* after = &both[1 - turn];
      if (nth + 1 < work->num_kv_heads)
        NAME(move_places)(step, t->num_positions, at, after);
      else if (later < work->end)
        NAME(find_places)(step, work, later, max_positions, key_cache, value_cache, after);
      else if (next)
        NAME(find_places)(step, next, next->start, max_positions, key_cache, value_cache, after);
      tile head = head_tile(work, t, nth);
      if (is_direct) {
        NAME(score_directly)(&head, raw_queries ? raw_queries + nth * work->num_pairs * MAX_HEAD_DIM : NULL, at);
      } else {
        NAME(pack_keys)(&head, at->keys, packed);
        score_packed(&head, packed);
      }
      weigh_scores(step, work, &head, first);
      NAME(weigh_values)(&head, at->values, after->keys);
    }
  }
}

// output[pair] = the parts' sums, divided by their totals; `parts` are consecutive tiles of one item. Where there are
// groups, tokens are interleaved as the next product takes them.
static void NAME(write_pairs)(const attention_step* step, const item* work, const tile* parts, int num_parts,
                              const row_groups* groups, ELEMENT* output) {
  const int64_t group = step->num_heads / step->num_kv_heads;
  for (int m = 0; m < parts->num_rows; m++) {
    float maximum = -INFINITY, total = 0.0f, factors[MAX_PARTS];
    for (int i = 0; i < num_parts; i++) maximum = parts[i].maxima[m] > maximum ? parts[i].maxima[m] : maximum;
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    for (int i = 0; i < num_parts; i++) {
      factors[i] = num_parts == 1 ? 1.0f : expf(parts[i].maxima[m] - base);
      total += factors[i] * parts[i].totals[m];
    }
    const int64_t pair = work->first_pair + m % work->num_pairs;
    const int64_t kv_head = work->kv_head + m / work->num_pairs;
    const int64_t token = step->query_start_loc[work->row] + pair / group;
    const int64_t size = step->num_heads * step->head_dim;
    int64_t stride = 1;
    ELEMENT* target = output + (groups ? row_place(groups, token, size, &stride) : token * size);
    target += (kv_head * group + pair % group) * step->head_dim * stride;
    int64_t d = 0;
    for (; d < step->head_dim; d += LANES) {
      floats sum = splat(0.0f);
      for (int i = 0; i < num_parts; i++)
        sum += splat(factors[i]) * load_float(parts[i].sums + m * parts[i].stride + d);
      sum = sum / splat(total);
      if (stride == 1 && d + LANES <= step->head_dim)
        NAME(store)(target + d, sum);
      else
        for (int64_t i = d; i < d + LANES && i < step->head_dim; i++) target[i * stride] = NAME(from_value)(sum[i - d]);
    }
  }
}

// Writes the fresh key and value of a token and a KV head to its slot; a token of slot -1 is skipped.
INLINE void NAME(store_head)(const attention_step* step, int64_t token, int64_t head, const ELEMENT* key,
                             const ELEMENT* value, ELEMENT* key_cache, ELEMENT* value_cache) {
  const int64_t slot = step->slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / step->block_size, offset = slot % step->block_size;
  const size_t num_bytes = sizeof(ELEMENT) * (size_t)step->head_dim;
  memcpy(key_cache + block * step->key_block_stride + offset * step->key_position_stride + head * step->key_head_stride,
         key, num_bytes);
  memcpy(value_cache + block * step->value_block_stride + offset * step->value_position_stride +
             head * step->value_head_stride,
         value, num_bytes);
}

void NAME(store_kv)(const attention_step* step, const ELEMENT* key, const ELEMENT* value, ELEMENT* key_cache,
                    ELEMENT* value_cache) {
  const int64_t size = step->num_kv_heads * step->head_dim;
#pragma omp parallel for schedule(static) num_threads((int)step->num_threads) if (step->num_threads > 1 && step->num_tokens * size >= MIN_PARALLEL_ELEMENTS)
  for (int64_t token = 0; token < step->num_tokens; token++)
    for (int64_t head = 0; head < step->num_kv_heads; head++)
      NAME(store_head)(step, token, head, key + token * step->fresh_key_token_stride + head * step->head_dim,
                       value + token * step->fresh_value_token_stride + head * step->head_dim, key_cache, value_cache);
}

// What the tasks of attention work on. Where there are groups, outputs are interleaved as the next product takes them.
typedef struct {
  const attention_step* step;
  const work_list* list;
  const ELEMENT *query, *key_cache, *value_cache;
  const row_groups* groups;
  ELEMENT* output;
} NAME(attention);

// A `task_function`: an item. Repeatable where no item is a part of one.
static void NAME(attend_task)(const void* context, int64_t task, int64_t next) {
  const NAME(attention)* a = context;
  const item *work = &a->list->items[task], *following = next < 0 ? NULL : &a->list->items[next];
  scratch own;
  tile t = scratch_tile(&own);
  if (work->partial >= 0) {
    t.sums = a->list->partials + work->partial * PARTIAL_FLOATS;
    t.maxima = t.sums + TILE_ROWS * PADDED_HEAD_DIM;
    t.totals = t.maxima + TILE_ROWS;
  }
  NAME(attend_item)(a->step, work, following, a->query, a->key_cache, a->value_cache, &t, own.packed);
  if (work->partial < 0) NAME(write_pairs)(a->step, work, &t, 1, a->groups, a->output);
}

// A `task_function`, after all items: puts together the parts of an item that begins here.
static void NAME(merge_task)(const void* context, int64_t task, int64_t next) {
  const NAME(attention)* a = context;
  const item* work = &a->list->items[task];
  (void)next;
  if (work->num_parts == 1 || work->part > 0) return;
  tile parts[MAX_PARTS];
  for (int p = 0; p < work->num_parts; p++) {
    parts[p].num_rows = work->num_pairs * work->num_kv_heads;
    parts[p].stride = padded(a->step->head_dim);
    parts[p].sums = a->list->partials + (work->partial + p) * PARTIAL_FLOATS;
    parts[p].maxima = parts[p].sums + TILE_ROWS * PADDED_HEAD_DIM;
    parts[p].totals = parts[p].maxima + TILE_ROWS;
  }
  NAME(write_pairs)(a->step, work, parts, work->num_parts, a->groups, a->output);
}

// output: [num_tokens, num_heads, head_dim]. 0, or 1 if there is no memory.
int NAME(paged_attention)(const attention_step* step, const ELEMENT* query, const ELEMENT* key_cache,
                          const ELEMENT* value_cache, ELEMENT* output) {
  work_list list;
  if (!list_work(step, &list)) return 1;
  const NAME(attention) a = {step, &list, query, key_cache, value_cache, NULL, output};
  task_list items = {.num_tasks = list.num_items}, merges = {.num_tasks = list.partials ? list.num_items : 0};
#pragma omp parallel num_threads((int)step->num_threads) if (step->num_threads > 1 && list.num_items > 1 && list.cost >= MIN_PARALLEL_ELEMENTS)
  {
    share_tasks(&items, NAME(attend_task), &a);
#pragma omp barrier
    share_tasks(&merges, NAME(merge_task), &a);
  }
  free_work(&list);
  return 0;
}

// store_kv, then paged_attention.
int NAME(attend)(const attention_step* step, const ELEMENT* query, const ELEMENT* key, const ELEMENT* value,
                 ELEMENT* key_cache, ELEMENT* value_cache, ELEMENT* output) {
  NAME(store_kv)(step, key, value, key_cache, value_cache);
  return NAME(paged_attention)(step, query, key_cache, value_cache, output);
}

#undef SCORES_IN_PAIRS
#undef LINE_ELEMENTS
