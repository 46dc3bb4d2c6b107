// Division of a step's attention into items, which threads process one after the other, and the data of an item.
//
// The result of a query is bitwise the same, whichever other queries are in the step and however the step is divided.
// Positions are therefore counted from the row's first position: tiles begin at multiples of TILE_POSITIONS and spans
// at multiples of SPAN_POSITIONS. A span is accumulated separately, tile by tile, and a query's spans are merged from
// first to last. Items and threads divide the work only between spans.

// Some (query, head) pairs of a row, for each of some KV heads, and the positions they attend to. A part of an item
// covers only some whole spans. An item has up to `tile_rows` rows: all pairs of its first KV head, then all pairs of
// the next one.
typedef struct {
  int64_t start, end;  // positions
  int64_t first_pair;
  int32_t row, kv_head, num_kv_heads, num_pairs, part, num_parts;
  int64_t partial;  // offset of the sums of its spans in `partials`, span after span; -1: the item is not split
} item;

typedef struct {
  item* items;
  float* partials;
  int64_t num_items, cost;  // cost: number of key elements that are scored
  int64_t window, num_heads, num_kv_heads, head_dim;  // of the layers for which the list was made
} work_list;

// Returns whether a layer has the window and the sizes of heads for which a list was made.
INLINE int is_work_of(const work_list* list, const attention_step* layer) {
  return list->window == layer->window && list->num_heads == layer->num_heads &&
         list->num_kv_heads == layer->num_kv_heads && list->head_dim == layer->head_dim;
}

// The data that attention tasks work on.
typedef struct {
  const attention_step* step;
  const work_list* list;
  const void *query, *key_cache, *value_cache;
  void* output;
} attention;

// The accumulated state of some rows: sums of weighted values, relative to e^maximum, and the total weights.
typedef struct {
  float* sums;    // [num_rows, stride]
  float* maxima;  // [num_rows]
  float* totals;  // [num_rows]
} state;

// An item while it is computed, or the rows of one of its KV heads.
typedef struct {
  int num_rows;
  int64_t kv_head;  // the first KV head
  int begin, end;   // the positions of the tile that exist
  int64_t head_dim, stride;
  int64_t width;           // words of a query; a word is one value, or two bfloat16 values if scores are added in pairs
  float* queries;          // [num_rows, stride], words; zero after the end of the head
  int64_t* positions;      // [num_rows], of the queries
  float* slopes;           // [num_rows], of ALiBi
  int64_t* heads;          // [num_rows], query heads
  float* scores;           // [num_rows, TILE_POSITIONS], later replaced by the weights
  int32_t *begins, *ends;  // [num_rows]: the positions of the tile that each row sees
  float* scales;           // [2, TILE_POSITIONS]: scales of the tile's keys and values; NULL: the type has no scales
  state sums;              // of the span
} tile;

// Floats of the largest state of an item: TILE_ROWS rows of narrow heads, or half as many rows of wide heads. Each row
// also has a maximum and a total. The rows of an item then stay in the second-level cache.
enum { NARROW_HEAD_DIM = MAX_HEAD_DIM / 2, STATE_FLOATS = TILE_ROWS * (NARROW_HEAD_DIM + LANES + 2) };

// Returns the maximum number of rows of an item.
INLINE int64_t tile_rows(int64_t head_dim) { return head_dim > NARROW_HEAD_DIM ? TILE_ROWS / 2 : TILE_ROWS; }

// The scratch memory of one thread.
typedef struct {
  float queries[STATE_FLOATS] __attribute__((aligned(64)));
  float scores[TILE_ROWS * TILE_POSITIONS] __attribute__((aligned(64)));
  float span[STATE_FLOATS] __attribute__((aligned(64)));
  float merged[STATE_FLOATS] __attribute__((aligned(64)));
  float packed[(MAX_HEAD_DIM + LANES) * TILE_POSITIONS] __attribute__((aligned(64)));
  float scales[2 * TILE_POSITIONS];
  int64_t positions[TILE_ROWS];
  float slopes[TILE_ROWS];
  int64_t heads[TILE_ROWS];
  int32_t begins[TILE_ROWS], ends[TILE_ROWS];
} scratch;

INLINE int64_t padded(int64_t head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// Returns the number of floats of a state, rounded up to whole cache lines.
INLINE int64_t state_floats(int64_t num_rows, int64_t stride) { return (num_rows * (stride + 2) + 15) / 16 * 16; }

INLINE state state_at(float* memory, int64_t num_rows, int64_t stride) {
  float* maxima = memory + num_rows * stride;
  return (state){.sums = memory, .maxima = maxima, .totals = maxima + num_rows};
}

static inline void start_span(tile* t, float* memory) {
  t->sums = state_at(memory, t->num_rows, t->stride);
  memset(t->sums.sums, 0, sizeof(float) * (size_t)(t->num_rows * t->stride));
  for (int m = 0; m < t->num_rows; m++) {
    t->sums.maxima[m] = -INFINITY;
    t->sums.totals[m] = 0.0f;
  }
}

INLINE tile start_tile(const attention_step* step, const item* work, scratch* own, const int in_pairs, const int is_scaled) {
  return (tile){.num_rows = work->num_pairs * work->num_kv_heads,
                .kv_head = work->kv_head,
                .head_dim = step->head_dim,
                .stride = padded(step->head_dim),
                .width = padded(in_pairs ? (step->head_dim + 1) / 2 : step->head_dim),
                .queries = own->queries,
                .positions = own->positions,
                .slopes = own->slopes,
                .heads = own->heads,
                .scores = own->scores,
                .scales = is_scaled ? own->scales : NULL,
                .begins = own->begins,
                .ends = own->ends};
}

INLINE int64_t first_tile(const item* work) { return work->start / TILE_POSITIONS * TILE_POSITIONS; }

// Returns the positions of the item in the tile from position `first` on, relative to `first`.
INLINE void bound_tile(const item* work, int64_t first, int* begin, int* end) {
  *begin = work->start > first ? (int)(work->start - first) : 0;
  *end = work->end - first < TILE_POSITIONS ? (int)(work->end - first) : TILE_POSITIONS;
}

// Returns the rows of the nth KV head.
INLINE tile head_tile(const item* work, const tile* t, int nth) {
  tile head = *t;
  const int64_t first = nth * work->num_pairs;
  head.num_rows = work->num_pairs;
  head.kv_head += nth;
  head.queries += first * t->stride;
  head.scores += first * TILE_POSITIONS;
  head.positions += first;
  head.slopes += first;
  head.heads += first;
  head.begins += first;
  head.ends += first;
  head.sums.sums += first * t->stride;
  head.sums.maxima += first;
  head.sums.totals += first;
  return head;
}

// Returns the position of a pair's query.
INLINE int64_t query_position(const attention_step* step, int64_t row, int64_t pair) {
  const int64_t num_queries = step->query_start_loc[row + 1] - step->query_start_loc[row];
  return step->seq_lens[row] - num_queries + pair / (step->num_heads / step->num_kv_heads);
}

INLINE int64_t first_visible(const attention_step* step, int64_t position) {
  return step->window > 0 && position >= step->window ? position - step->window + 1 : 0;
}

INLINE int64_t last_visible(const attention_step* step, int64_t row, int64_t position) {
  if (!step->is_bidirectional) return position;
  const int64_t last = step->seq_lens[row] - 1, seen = position + step->window - 1;
  return step->window > 0 && seen < last ? seen : last;
}

// Returns whether a query attends to the block that contains a position up to its own.
INLINE int sees_block(const block_pattern* p, int64_t position, int64_t head, int64_t key_position) {
  if (!p->block_size) return 1;
  const int64_t block = key_position / p->block_size;
  return position / p->block_size - block < p->num_local || (block + p->first + head * p->head_step) % p->stride == 0;
}

INLINE int64_t num_spans(int64_t start, int64_t end) {
  return start < end ? (end - 1) / SPAN_POSITIONS - start / SPAN_POSITIONS + 1 : 0;
}

static int64_t count_pairs(const attention_step* step, int64_t row) {
  return (step->query_start_loc[row + 1] - step->query_start_loc[row]) * (step->num_heads / step->num_kv_heads);
}

// The way in which a step is divided into items.
typedef struct {
  int64_t num_kv_heads;  // of an item with few pairs
  int64_t max_parts;     // the maximum number of parts of an item's context
} cut;

// Returns the number of KV heads of an item with `num_pairs` pairs for each KV head. A block stores the keys of all its
// KV heads consecutively, and memory delivers such runs faster than the keys of one head. Items with many pairs are
// limited by computation instead.
INLINE int64_t item_kv_heads(const cut* c, int64_t num_pairs) { return num_pairs <= DIRECT_ROWS ? c->num_kv_heads : 1; }

static int64_t count_items(const attention_step* step, const cut* c) {
  const int64_t max_rows = tile_rows(step->head_dim);
  int64_t num_items = 0;
  for (int64_t row = 0; row < step->num_rows; row++) {
    const int64_t num_pairs = count_pairs(step, row);
    num_items += (num_pairs + max_rows - 1) / max_rows * (step->num_kv_heads / item_kv_heads(c, num_pairs));
  }
  return num_items;
}

static int64_t longest_context(const attention_step* step) {
  int64_t longest = 0;
  for (int64_t row = 0; row < step->num_rows; row++) {
    const int64_t last = step->seq_lens[row] - 1, length = last + 1 - first_visible(step, last);
    longest = length > longest ? length : longest;
  }
  return longest;
}

// Chooses a division that gives every thread work if there are few items. It first assigns fewer KV heads to each item,
// and then splits items into parts. Long contexts are only split into parts, because reading all KV heads together is
// faster. The division does not change the result of an item.
static cut choose_cut(const attention_step* step) {
  const int64_t wanted = step->num_threads > 1 ? TASKS_PER_THREAD * step->num_threads : 1;
  const int is_long = longest_context(step) >= LONG_CONTEXT;
  cut c = {.num_kv_heads = step->num_kv_heads, .max_parts = 1};
  while (c.num_kv_heads > 1 && (step->num_kv_heads % c.num_kv_heads ||
                                c.num_kv_heads * DIRECT_ROWS > tile_rows(step->head_dim) ||
                                (!is_long && count_items(step, &c) < wanted)))
    c.num_kv_heads--;
  const int64_t num_items = count_items(step, &c);
  if (num_items > 0 && num_items < wanted) c.max_parts = (wanted + num_items - 1) / num_items;
  return c;
}

// Appends the parts of one tile of rows, each of whole spans. Only counts them if `items` is not allocated yet.
// `num_floats` is increased by the size of the partial sums.
static void list_tile(const attention_step* step, work_list* list, item whole, int64_t max_parts, int64_t* num_floats) {
  const int64_t spans = num_spans(whole.start, whole.end), wanted = spans < max_parts ? spans : max_parts;
  const int64_t share = wanted > 1 ? (spans + wanted - 1) / wanted : spans;
  const int64_t parts = share ? (spans + share - 1) / share : 1;
  const int64_t first = whole.start / SPAN_POSITIONS;
  for (int64_t part = 0; part < parts; part++, list->num_items++) {
    item work = whole;
    work.part = (int32_t)part;
    work.num_parts = (int32_t)parts;
    work.partial = parts > 1 ? *num_floats : -1;
    if (part > 0) work.start = (first + part * share) * SPAN_POSITIONS;
    if (part + 1 < parts) work.end = (first + (part + 1) * share) * SPAN_POSITIONS;
    if (parts > 1)
      *num_floats += num_spans(work.start, work.end) *
                     state_floats(work.num_pairs * work.num_kv_heads, padded(step->head_dim));
    if (!list->items) continue;
    list->items[list->num_items] = work;
    list->cost += (work.end - work.start) * step->head_dim * work.num_kv_heads;
  }
}

// Returns the number of floats of all partial sums.
static int64_t list_items(const attention_step* step, work_list* list, const cut* c) {
  const int64_t max_rows = tile_rows(step->head_dim);
  int64_t num_floats = 0;
  list->num_items = list->cost = 0;
  for (int64_t row = 0; row < step->num_rows; row++) {
    const int64_t num_pairs = count_pairs(step, row);
    for (int64_t first = 0; first < num_pairs; first += max_rows) {
      const int64_t num = num_pairs - first < max_rows ? num_pairs - first : max_rows;
      item whole = {.row = (int32_t)row, .first_pair = first, .num_pairs = (int32_t)num};
      whole.start = first_visible(step, query_position(step, row, first));
      whole.end = last_visible(step, row, query_position(step, row, first + num - 1)) + 1;
      whole.num_kv_heads = (int32_t)item_kv_heads(c, num_pairs);
      for (int64_t kv_head = 0; kv_head < step->num_kv_heads; kv_head += whole.num_kv_heads) {
        whole.kv_head = (int32_t)kv_head;
        list_tile(step, list, whole, c->max_parts, &num_floats);
      }
    }
  }
  return num_floats;
}

static void free_work(work_list* list) {
  free(list->items);
  free(list->partials);
  *list = (work_list){0};
}

// Returns 0 if memory is exhausted.
static int list_work(const attention_step* step, work_list* list) {
  const cut c = choose_cut(step);
  *list = (work_list){.window = step->window, .num_heads = step->num_heads, .num_kv_heads = step->num_kv_heads,
                      .head_dim = step->head_dim};
  const int64_t num_floats = list_items(step, list, &c);
  list->items = malloc(sizeof(item) * (size_t)(list->num_items + 1));
  list->partials = num_floats ? aligned_alloc(64, sizeof(float) * (size_t)num_floats) : NULL;
  if (!list->items || (num_floats && !list->partials)) {
    free_work(list);
    return 0;
  }
  list_items(step, list, &c);
  return 1;
}
