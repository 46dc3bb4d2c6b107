// Paged attention for one element type of queries and outputs and one of the cache: the online softmax of Milakov and
// Gimelshein (2018, https://arxiv.org/abs/1805.02867) over pages, as FlashAttention (Dao et al., 2022,
// https://arxiv.org/abs/2205.14135) tiles it.
//
// The queries of a row and the query heads of a KV head are flattened to (query, head) pairs, query first: pair p is
// query p / group of the row. Up to TILE_ROWS pairs attend together, so keys and values are read once for all of them;
// where they are few, those of several KV heads take turns at each tile of positions, in the order in which keys lie.
// Positions that no pair of a tile sees are never read.

// Loads the item's queries, as they are and scaled.
static void PAGED(load_queries)(const attention_step* step, const item* work, const ELEMENT* query, tile* t,
                                bfloat16* raw_queries) {
  const int64_t group = step->num_heads / step->num_kv_heads;
  for (int m = 0; m < t->num_rows; m++) {
    const int64_t pair = work->first_pair + m % work->num_pairs;
    const int64_t token = step->query_start_loc[work->row] + pair / group;
    const int64_t head = (work->kv_head + m / work->num_pairs) * group + pair % group;
    const ELEMENT* source = query + token * step->query_token_stride + head * step->head_dim;
    for (int64_t d = 0; d < step->head_dim; d++)
      t->queries[m * t->stride + d] = NAME(value)(source[d]) * step->scale;
    if (raw_queries) {
      memset(raw_queries + m * MAX_HEAD_DIM, 0, sizeof(bfloat16) * MAX_HEAD_DIM);
      memcpy(raw_queries + m * MAX_HEAD_DIM, source, sizeof(bfloat16) * (size_t)step->head_dim);
    }
  }
}

// Attends for one item: sums, maxima and totals of its rows, not yet divided. The first keys of the item that the thread
// takes next, NULL if there is none, are fetched meanwhile.
static void PAGED(attend_item)(const attention_step* step, const item* work, const item* next, const ELEMENT* query,
                               const CACHE* key_cache, const CACHE* value_cache, tile* t, float* packed) {
  HELD(places) both[2] = {0};
  bfloat16* raw_queries = NULL;
#if defined(SCORES_IN_PAIRS) && defined(IS_BFLOAT16)
  bfloat16 raw[TILE_ROWS * MAX_HEAD_DIM];
  if (work->num_pairs <= DIRECT_ROWS) raw_queries = raw;
#endif
  start_tile(step, work, t);
  PAGED(load_queries)(step, work, query, t, raw_queries);
  const int is_direct = work->num_pairs <= DIRECT_ROWS;
  const int max_positions = is_direct ? DIRECT_POSITIONS : TILE_POSITIONS;
  HELD(find_places)(step, work, work->start, max_positions, key_cache, value_cache, &both[0]);
  int turn = 0;
  for (int64_t first = work->start; first < work->end; first += max_positions) {
    const int64_t later = first + max_positions;
    t->num_positions = later > work->end ? (int)(work->end - first) : max_positions;
    for (int nth = 0; nth < work->num_kv_heads; nth++, turn = 1 - turn) {
      const HELD(places)* at = &both[turn];
      HELD(places)* after = &both[1 - turn];
      if (nth + 1 < work->num_kv_heads)
        HELD(move_places)(step, t->num_positions, at, after);
      else if (later < work->end)
        HELD(find_places)(step, work, later, max_positions, key_cache, value_cache, after);
      else if (next)
        HELD(find_places)(step, next, next->start, max_positions, key_cache, value_cache, after);
      tile head = head_tile(work, t, nth);
      if (is_direct) {
        HELD(score_directly)(&head, raw_queries ? raw_queries + nth * work->num_pairs * MAX_HEAD_DIM : NULL, at);
      } else {
        HELD(pack_keys)(&head, at->keys, packed);
        score_packed(&head, packed);
      }
      weigh_scores(step, work, &head, first);
      HELD(weigh_values)(&head, at->values, after->keys);
    }
  }
}

// output[pair] = the parts' sums, divided by their totals; `parts` are consecutive tiles of one item. Where there are
// groups, tokens are interleaved as the next product takes them.
static void PAGED(write_pairs)(const attention_step* step, const item* work, const tile* parts, int num_parts,
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

INLINE void PAGED(store_elements)(const ELEMENT* source, CACHE* target, int64_t size) {
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES) HELD(store)(target + d, NAME(load)(source + d));
  for (; d < size; d++) target[d] = HELD(from_value)(NAME(value)(source[d]));
}

// Writes the fresh key and value of a token and a KV head to its slot; a token of slot -1 is skipped.
static void PAGED(store_head)(const attention_step* step, int64_t token, int64_t head, const ELEMENT* key,
                              const ELEMENT* value, void* key_cache, void* value_cache) {
  const int64_t slot = step->slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / step->block_size, offset = slot % step->block_size;
  CACHE* keys = (CACHE*)key_cache + block * step->key_block_stride + offset * step->key_position_stride;
  CACHE* values = (CACHE*)value_cache + block * step->value_block_stride + offset * step->value_position_stride;
  PAGED(store_elements)(key, keys + head * step->key_head_stride, step->head_dim);
  PAGED(store_elements)(value, values + head * step->value_head_stride, step->head_dim);
}

void PAGED(store_kv)(const attention_step* step, const ELEMENT* key, const ELEMENT* value, CACHE* key_cache,
                     CACHE* value_cache) {
  const int64_t size = step->num_kv_heads * step->head_dim;
#pragma omp parallel for schedule(static) num_threads((int)step->num_threads) if (step->num_threads > 1 && step->num_tokens * size >= MIN_PARALLEL_ELEMENTS)
  for (int64_t token = 0; token < step->num_tokens; token++)
    for (int64_t head = 0; head < step->num_kv_heads; head++)
      PAGED(store_head)(step, token, head, key + token * step->fresh_key_token_stride + head * step->head_dim,
                        value + token * step->fresh_value_token_stride + head * step->head_dim, key_cache, value_cache);
}

// A `task_function`: an item. Repeatable where no item is a part of one.
static void PAGED(attend_task)(const void* context, int64_t task, int64_t next) {
  const attention* a = context;
  const item *work = &a->list->items[task], *following = next < 0 ? NULL : &a->list->items[next];
  scratch own;
  tile t = scratch_tile(&own);
  if (work->partial >= 0) {
    t.sums = a->list->partials + work->partial * PARTIAL_FLOATS;
    t.maxima = t.sums + TILE_ROWS * PADDED_HEAD_DIM;
    t.totals = t.maxima + TILE_ROWS;
  }
  PAGED(attend_item)(a->step, work, following, a->query, a->key_cache, a->value_cache, &t, own.packed);
  if (work->partial < 0) PAGED(write_pairs)(a->step, work, &t, 1, a->groups, a->output);
}

// A `task_function`, after all items: puts together the parts of an item that begins here.
static void PAGED(merge_task)(const void* context, int64_t task, int64_t next) {
  const attention* a = context;
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
  PAGED(write_pairs)(a->step, work, parts, work->num_parts, a->groups, a->output);
}

// output: [num_tokens, num_heads, head_dim]. 0, or 1 if there is no memory.
int PAGED(paged_attention)(const attention_step* step, const ELEMENT* query, const CACHE* key_cache,
                           const CACHE* value_cache, ELEMENT* output) {
  work_list list;
  if (!list_work(step, &list)) return 1;
  const attention a = {step, &list, query, key_cache, value_cache, NULL, output};
  task_list items = {.num_tasks = list.num_items}, merges = {.num_tasks = list.partials ? list.num_items : 0};
#pragma omp parallel num_threads((int)step->num_threads) if (step->num_threads > 1 && list.num_items > 1 && list.cost >= MIN_PARALLEL_ELEMENTS)
  {
    share_tasks(&items, PAGED(attend_task), &a);
#pragma omp barrier
    share_tasks(&merges, PAGED(merge_task), &a);
  }
  free_work(&list);
  return 0;
}

// store_kv, then paged_attention.
int PAGED(attend)(const attention_step* step, const ELEMENT* query, const ELEMENT* key, const ELEMENT* value,
                  CACHE* key_cache, CACHE* value_cache, ELEMENT* output) {
  PAGED(store_kv)(step, key, value, key_cache, value_cache);
  return PAGED(paged_attention)(step, query, key_cache, value_cache, output);
}

#undef CACHE
#undef CACHE_NAME
