// Paged attention for one element type of queries and outputs and one element type of the cache. It computes the online
// softmax of Milakov and Gimelshein (2018, https://arxiv.org/abs/1805.02867) over pages, tiled as in FlashAttention
// (Dao et al., 2022, https://arxiv.org/abs/2205.14135).
//
// The queries of a row and the query heads of a KV head are flattened to (query, head) pairs, query first: pair p is
// query p / group of the row. Up to `tile_rows` pairs are computed together, so keys and values are read once for all
// of them. If there are few pairs, the pairs of several KV heads share a tile of positions and are computed in turn, in
// the order in which keys are stored. Positions that no pair of a tile sees are never read.

// Whether queries are scored in pairs of bfloat16.
#define IN_PAIRS_bfloat16_bfloat16 HAS_PAIRS
#if PAGED(IN_PAIRS)
#define IN_PAIRS 1
#else
#define IN_PAIRS 0
#endif

// In an int8 cache, a scale follows the values of each head and position.
#define IS_SCALED_int8 1
#if HELD(IS_SCALED)
#define IS_SCALED 1
#else
#define IS_SCALED 0
#endif

// Loads the queries of an item, as words.
static void PAGED(load_queries)(const attention_step* step, const item* work, const ELEMENT* query, tile* t) {
  const int64_t group = step->num_heads / step->num_kv_heads;
  memset(t->queries, 0, sizeof(float) * (size_t)(t->num_rows * t->stride));
  for (int m = 0; m < t->num_rows; m++) {
    const int64_t pair = work->first_pair + m % work->num_pairs;
    const int64_t token = step->query_start_loc[work->row] + pair / group;
    const int64_t head = (work->kv_head + m / work->num_pairs) * group + pair % group;
    const ELEMENT* source = query + token * step->query_token_stride + head * step->head_dim;
    float* words = t->queries + m * t->stride;
    t->positions[m] = query_position(step, work->row, pair);
    t->heads[m] = head;
    t->slopes[m] = step->alibi_slopes ? step->alibi_slopes[head] : 0.0f;
    if (IN_PAIRS)
      memcpy(words, source, sizeof(ELEMENT) * (size_t)step->head_dim);
    else
      for (int64_t d = 0; d < step->head_dim; d++) words[d] = NAME(value)(source[d]);
  }
}

static NOINLINE void PAGED(score)(const tile* t, const HELD(places)* at, float* packed) {
#if IN_PAIRS
  if (t->num_rows <= DIRECT_ROWS) {
    HELD(score_directly)(1, t, at);
  } else {
    HELD(pack_keys)(1, t, at->keys, packed);
    score_packed_pairs(t, packed);
  }
#else
  HELD(score)(t, at, packed);
#endif
}

// The data that a thread reads now, and the data that it reads next.
typedef struct {
  const attention_step* step;
  const item *work, *next;  // next is NULL after the last item
  const CACHE *key_cache, *value_cache;
  HELD(places) both[2];
  int turn;  // index of the element of `both` that is read now
} PAGED(reader);

// Finds the keys and values that are read after the nth KV head of the tile from position `first` on. These are the
// same positions of the next head, the next tile, or the first tile of the next item. Their keys are prefetched while
// values are weighted.
static const HELD(places)* PAGED(find_next)(PAGED(reader)* r, const tile* t, int64_t first, int nth) {
  const HELD(places)* at = &r->both[r->turn];
  HELD(places)* after = &r->both[1 - r->turn];
  if (nth + 1 < r->work->num_kv_heads)
    HELD(move_places)(r->step, t, at, after);
  else if (first + TILE_POSITIONS < r->work->end)
    HELD(find_places)(r->step, r->work, first + TILE_POSITIONS, r->key_cache, r->value_cache, after);
  else if (r->next)
    HELD(find_places)(r->step, r->next, first_tile(r->next), r->key_cache, r->value_cache, after);
  return after;
}

// Accumulates the tiles of a span, from position `first` on.
static void PAGED(attend_span)(PAGED(reader)* r, tile* t, int64_t first, float* packed) {
  const int64_t end = (first / SPAN_POSITIONS + 1) * SPAN_POSITIONS;
  for (; first < end && first < r->work->end; first += TILE_POSITIONS) {
    bound_tile(r->work, first, &t->begin, &t->end);
    for (int nth = 0; nth < r->work->num_kv_heads; nth++, r->turn = 1 - r->turn) {
      const HELD(places)* after = PAGED(find_next)(r, t, first, nth);
      const HELD(places)* at = &r->both[r->turn];
      tile head = head_tile(r->work, t, nth);
      if (!find_seen(r->step, r->work, &head, first)) continue;
#if IS_SCALED
      HELD(load_scales)(&head, at);
#endif
      PAGED(score)(&head, at, packed);
      weigh_scores(r->step, &head, first);
      HELD(weigh_values)(&head, at->values, after->keys);
    }
  }
}

// Computes attention for one item, span by span. If the item is a part, its spans are left in `partial`. Otherwise the
// merged state is returned, which is stored in `own`. The first keys of the thread's next item are prefetched
// meanwhile.
static state PAGED(attend_item)(PAGED(reader)* r, const ELEMENT* query, scratch* own, float* partial) {
  const item* work = r->work;
  tile t = start_tile(r->step, work, own, IN_PAIRS, IS_SCALED);
  const state merged = state_at(own->merged, t.num_rows, t.stride);
  const int64_t spans = num_spans(work->start, work->end), begin = work->start / SPAN_POSITIONS;
  PAGED(load_queries)(r->step, work, query, &t);
  if (spans < 1) start_span(&t, own->span);
  for (int64_t i = 0; i < spans; i++) {
    start_span(&t, partial ? partial + i * state_floats(t.num_rows, t.stride) : own->span);
    PAGED(attend_span)(r, &t, i ? (begin + i) * SPAN_POSITIONS : first_tile(work), own->packed);
    if (!partial && spans > 1) merge_span(r->step, work, (begin + i) * SPAN_POSITIONS, &t.sums, &merged);
  }
  return spans > 1 ? merged : t.sums;
}

// output[pair] = sums / totals
static void PAGED(write_pairs)(const attention_step* step, const item* work, const state* all, ELEMENT* output) {
  const int64_t group = step->num_heads / step->num_kv_heads, stride = padded(step->head_dim);
  for (int m = 0; m < work->num_pairs * work->num_kv_heads; m++) {
    const int64_t pair = work->first_pair + m % work->num_pairs;
    const int64_t head = (work->kv_head + m / work->num_pairs) * group + pair % group;
    const int64_t token = step->query_start_loc[work->row] + pair / group;
    ELEMENT* target = output + (token * step->num_heads + head) * step->head_dim;
    const floats total = splat(total_weight(step, all, m, head));
    for (int64_t d = 0; d < step->head_dim; d += LANES) {
      const floats average = load_float(all->sums + m * stride + d) / total;
      if (d + LANES <= step->head_dim)
        NAME(store)(target + d, average);
      else
        for (int64_t i = d; i < step->head_dim; i++) target[i] = NAME(from_value)(average[i - d]);
    }
  }
}

#if IS_SCALED
// Rounds the values of a head to integers of at most 127 in absolute value, followed by their scale. If a value is not
// finite, the scale is not finite either, so that all values of the head are read as not finite.
static void PAGED(store_elements)(const ELEMENT* source, CACHE* target, int64_t size) {
  float largest = 0.0f;
  for (int64_t d = 0; d < size; d++) {
    const float value = fabsf(NAME(value)(source[d]));
    largest = value > largest || value != value ? value : largest;
  }
  const float scale = largest / 127.0f;
  for (int64_t d = 0; d < size; d++) {
    const float value = NAME(value)(source[d]) / scale;
    target[d] = fabsf(value) < 127.5f ? (CACHE)(value + 12582912.0f - 12582912.0f) : 0;
  }
  memcpy(target + size, &scale, sizeof scale);
}
#else
INLINE void PAGED(store_elements)(const ELEMENT* source, CACHE* target, int64_t size) {
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES) HELD(store)(target + d, NAME(load)(source + d));
  for (; d < size; d++) target[d] = HELD(from_value)(NAME(value)(source[d]));
}
#endif

// Stores the new key and value of a token and a KV head in the token's slot. A token with slot -1 is skipped.
SHARED void PAGED(store_head)(const attention_step* step, int64_t token, int64_t head, const ELEMENT* key,
                              const ELEMENT* value, void* key_cache, void* value_cache) {
  const int64_t slot = step->slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / step->block_size, offset = slot % step->block_size;
  CACHE* keys = (CACHE*)key_cache + block * step->key_strides[0] + offset * step->key_strides[1];
  CACHE* values = (CACHE*)value_cache + block * step->value_strides[0] + offset * step->value_strides[1];
  PAGED(store_elements)(key, keys + head * step->key_strides[2], step->head_dim);
  PAGED(store_elements)(value, values + head * step->value_strides[2], step->head_dim);
}

static void PAGED(store_kv)(const attention_step* step, const ELEMENT* key, const ELEMENT* value, CACHE* key_cache,
                            CACHE* value_cache) {
  const int64_t size = step->num_kv_heads * step->head_dim;
#pragma omp parallel for schedule(static) num_threads((int)step->num_threads) if (step->num_threads > 1 && step->num_tokens * size >= MIN_PARALLEL_ELEMENTS)
  for (int64_t token = 0; token < step->num_tokens; token++)
    for (int64_t head = 0; head < step->num_kv_heads; head++)
      PAGED(store_head)(step, token, head, key + token * step->fresh_key_token_stride + head * step->head_dim,
                        value + token * step->fresh_value_token_stride + head * step->head_dim, key_cache, value_cache);
}

// A `task_function` for one item. It is repeatable if no item of the step is split into parts.
SHARED void PAGED(attend_task)(const void* context, int64_t task, int64_t next) {
  const attention* a = context;
  const item* work = &a->list->items[task];
  scratch own;
  PAGED(reader) r = {.step = a->step, .work = work, .next = next < 0 ? NULL : &a->list->items[next],
                     .key_cache = a->key_cache, .value_cache = a->value_cache};
  HELD(find_places)(a->step, work, first_tile(work), a->key_cache, a->value_cache, &r.both[0]);
  float* partial = work->partial < 0 ? NULL : a->list->partials + work->partial;
  const state all = PAGED(attend_item)(&r, a->query, &own, partial);
  if (!partial) PAGED(write_pairs)(a->step, work, &all, a->output);
}

// A `task_function` that runs after all items. If the task's item is the first part of a split item, merges its spans.
SHARED void PAGED(merge_task)(const void* context, int64_t task, int64_t next) {
  const attention* a = context;
  const item *work = &a->list->items[task], *last = work + work->num_parts - 1;
  (void)next;
  if (work->num_parts == 1 || work->part > 0) return;
  const int64_t num_rows = work->num_pairs * work->num_kv_heads, stride = padded(a->step->head_dim);
  const int64_t begin = work->start / SPAN_POSITIONS, spans = num_spans(work->start, last->end);
  float memory[STATE_FLOATS] __attribute__((aligned(64)));
  const state merged = state_at(memory, num_rows, stride);
  for (int64_t i = 0; i < spans; i++) {
    float* partial = a->list->partials + work->partial + i * state_floats(num_rows, stride);
    const state span = state_at(partial, num_rows, stride);
    merge_span(a->step, work, (begin + i) * SPAN_POSITIONS, &span, &merged);
  }
  PAGED(write_pairs)(a->step, work, &merged, a->output);
}

// Computes `attend` for these element types.
SHARED int64_t PAGED(attend)(const attention_step* step, const void* query, const void* key, const void* value,
                             void* key_cache, void* value_cache, void* output) {
  PAGED(store_kv)(step, key, value, key_cache, value_cache);
  work_list list;
  if (!list_work(step, &list)) return NO_MEMORY;
  const attention a = {step, &list, query, key_cache, value_cache, output};
  task_list items = {.num_tasks = list.num_items}, merges = {.num_tasks = list.partials ? list.num_items : 0};
#pragma omp parallel num_threads((int)step->num_threads) if (step->num_threads > 1 && list.num_items > 1 && list.cost >= MIN_PARALLEL_ELEMENTS)
  {
    share_tasks(&items, PAGED(attend_task), &a);
#pragma omp barrier
    share_tasks(&merges, PAGED(merge_task), &a);
  }
  free_work(&list);
  return DONE;
}

#undef IN_PAIRS
#undef IS_SCALED
