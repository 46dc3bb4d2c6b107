// How a step is cut into items that threads take one after the other, and what an item works on.

// Some (query, head) pairs of a row for each of some KV heads, and the positions they attend to; or a part of those. It
// has up to TILE_ROWS rows: all pairs of its first KV head, then those of the next one.
typedef struct {
  int64_t start, end;  // positions
  int64_t first_pair;
  int32_t row, kv_head, num_kv_heads, num_pairs, part, num_parts;
  int64_t partial;  // where its unfinished sums go; -1: nowhere, it is whole
} item;

typedef struct {
  item* items;
  float* partials;
  int64_t num_items, cost;  // cost: elements of keys that are scored
  int64_t window;           // that it was made for
} work_list;

// What the tasks of attention work on. Where there are groups, outputs are interleaved as the next product takes them.
typedef struct {
  const attention_step* step;
  const work_list* list;
  const void *query, *key_cache, *value_cache;
  const row_groups* groups;
  void* output;
} attention;

// An item while it is computed, or what it has of one KV head.
typedef struct {
  int num_rows;
  int64_t kv_head;    // the first one
  int num_positions;  // that are scored at once
  int64_t head_dim, stride;
  float scale;
  float* queries;  // [num_rows, stride], scaled
  float* scores;   // [num_rows, TILE_POSITIONS], then the weights
  float* sums;     // [num_rows, stride]
  float* maxima;   // [num_rows]
  float* totals;   // [num_rows]
} tile;

enum {
  MAX_PARTS = 64,
  PADDED_HEAD_DIM = MAX_HEAD_DIM + LANES,
  PARTIAL_FLOATS = TILE_ROWS * (PADDED_HEAD_DIM + 2),
};

// What a thread computes in.
typedef struct {
  float queries[TILE_ROWS * PADDED_HEAD_DIM] __attribute__((aligned(64)));
  float scores[TILE_ROWS * TILE_POSITIONS] __attribute__((aligned(64)));
  float sums[TILE_ROWS * PADDED_HEAD_DIM] __attribute__((aligned(64)));
  float packed[MAX_HEAD_DIM * TILE_POSITIONS] __attribute__((aligned(64)));
  float maxima[TILE_ROWS], totals[TILE_ROWS];
} scratch;

INLINE int64_t padded(int64_t head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

INLINE tile scratch_tile(scratch* own) {
  return (tile){.queries = own->queries,
                .scores = own->scores,
                .sums = own->sums,
                .maxima = own->maxima,
                .totals = own->totals};
}

static void start_tile(const attention_step* step, const item* work, tile* t) {
  t->num_rows = work->num_pairs * work->num_kv_heads;
  t->kv_head = work->kv_head;
  t->head_dim = step->head_dim;
  t->stride = padded(step->head_dim);
  t->scale = step->scale;
  for (int m = 0; m < t->num_rows; m++) {
    t->maxima[m] = -INFINITY;
    t->totals[m] = 0.0f;
  }
  memset(t->sums, 0, sizeof(float) * (size_t)(t->num_rows * t->stride));
  // Zero past the head's end, against keys that are zero there too.
  memset(t->queries, 0, sizeof(float) * (size_t)(t->num_rows * t->stride));
}

// The rows of the nth KV head.
INLINE tile head_tile(const item* work, const tile* t, int nth) {
  tile head = *t;
  const int64_t first = nth * work->num_pairs;
  head.num_rows = work->num_pairs;
  head.kv_head += nth;
  head.queries += first * t->stride;
  head.scores += first * TILE_POSITIONS;
  head.sums += first * t->stride;
  head.maxima += first;
  head.totals += first;
  return head;
}

// The position of a pair's query.
INLINE int64_t query_position(const attention_step* step, int64_t row, int64_t pair) {
  const int64_t num_queries = step->query_start_loc[row + 1] - step->query_start_loc[row];
  return step->seq_lens[row] - num_queries + pair / (step->num_heads / step->num_kv_heads);
}

INLINE int64_t first_visible(const attention_step* step, int64_t position) {
  return step->window > 0 && position >= step->window ? position - step->window + 1 : 0;
}

static int64_t count_pairs(const attention_step* step, int64_t row) {
  return (step->query_start_loc[row + 1] - step->query_start_loc[row]) * (step->num_heads / step->num_kv_heads);
}

// How a step's items are cut.
typedef struct {
  int64_t num_kv_heads;  // of an item of few pairs
  int64_t max_parts;     // of an item's context
} cut;

// KV heads of an item with so many pairs for each. A block holds the keys of all its KV heads one behind the other, and
// memory gives such runs faster than a head's alone; many pairs compute for longer than they read.
INLINE int64_t item_kv_heads(const cut* c, int64_t num_pairs) { return num_pairs <= DIRECT_ROWS ? c->num_kv_heads : 1; }

static int64_t count_items(const attention_step* step, const cut* c) {
  int64_t num_items = 0;
  for (int64_t row = 0; row < step->num_rows; row++) {
    const int64_t num_pairs = count_pairs(step, row);
    num_items += (num_pairs + TILE_ROWS - 1) / TILE_ROWS * (step->num_kv_heads / item_kv_heads(c, num_pairs));
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

// So that threads have something to do where there are few items: first fewer KV heads for each, then parts; but parts of
// long contexts, which are to be read as fast as memory gives them.
static cut choose_cut(const attention_step* step) {
  const int64_t wanted = step->num_threads > 1 ? TASKS_PER_THREAD * step->num_threads : 1;
  const int is_long = longest_context(step) >= LONG_CONTEXT;
  cut c = {.num_kv_heads = step->num_kv_heads, .max_parts = 1};
  while (c.num_kv_heads > 1 && (step->num_kv_heads % c.num_kv_heads || c.num_kv_heads * DIRECT_ROWS > TILE_ROWS ||
                                (!is_long && count_items(step, &c) < wanted)))
    c.num_kv_heads--;
  const int64_t num_items = count_items(step, &c);
  if (num_items > 0 && num_items < wanted) c.max_parts = (wanted + num_items - 1) / num_items;
  if (c.max_parts > MAX_PARTS) c.max_parts = MAX_PARTS;
  return c;
}

// Appends the parts of one tile; only counts where there are no items yet.
static void list_tile(const attention_step* step, work_list* list, item whole, int64_t max_parts, int64_t* num_partials) {
  const int64_t length = whole.end - whole.start;
  int64_t parts = length / MIN_PART < max_parts ? length / MIN_PART : max_parts;
  if (parts < 1) parts = 1;
  const int64_t share = ((length + parts - 1) / parts + TILE_POSITIONS - 1) / TILE_POSITIONS * TILE_POSITIONS;
  parts = (length + share - 1) / share;
  for (int64_t part = 0; part < parts; part++, list->num_items++) {
    const int64_t partial = parts > 1 ? (*num_partials)++ : -1;
    if (!list->items) continue;
    item* work = &list->items[list->num_items];
    *work = whole;
    work->start = whole.start + part * share;
    work->end = part + 1 == parts ? whole.end : work->start + share;
    work->part = (int32_t)part;
    work->num_parts = (int32_t)parts;
    work->partial = partial;
    list->cost += (work->end - work->start) * step->head_dim * work->num_kv_heads;
  }
}

static int64_t list_items(const attention_step* step, work_list* list, const cut* c) {
  int64_t num_partials = 0;
  list->num_items = list->cost = 0;
  for (int64_t row = 0; row < step->num_rows; row++) {
    const int64_t num_pairs = count_pairs(step, row);
    for (int64_t first = 0; first < num_pairs; first += TILE_ROWS) {
      const int64_t num = num_pairs - first < TILE_ROWS ? num_pairs - first : TILE_ROWS;
      item whole = {.row = (int32_t)row, .first_pair = first, .num_pairs = (int32_t)num};
      whole.start = first_visible(step, query_position(step, row, first));
      whole.end = query_position(step, row, first + num - 1) + 1;
      whole.num_kv_heads = (int32_t)item_kv_heads(c, num_pairs);
      for (int64_t kv_head = 0; kv_head < step->num_kv_heads; kv_head += whole.num_kv_heads) {
        whole.kv_head = (int32_t)kv_head;
        list_tile(step, list, whole, c->max_parts, &num_partials);
      }
    }
  }
  return num_partials;
}

static void free_work(work_list* list) {
  free(list->items);
  free(list->partials);
  *list = (work_list){0};
}

// 0 if there is no memory.
static int list_work(const attention_step* step, work_list* list) {
  const cut c = choose_cut(step);
  *list = (work_list){.window = step->window};
  const int64_t num_partials = list_items(step, list, &c);
  list->items = malloc(sizeof(item) * (size_t)(list->num_items + 1));
  list->partials = num_partials ? malloc(sizeof(float) * (size_t)num_partials * PARTIAL_FLOATS) : NULL;
  if (!list->items || (num_partials && !list->partials)) {
    free_work(list);
    return 0;
  }
  list_items(step, list, &c);
  return 1;
}
