// The operations that keep states of sequences: CONVOLVE and DELTA_RULE. kernels/states.py specifies the results.
//
// A task computes some channels, or some value columns of a head, token by token. Channels and value columns do not
// depend on each other, and each is computed by the same instructions whatever the other rows, the task and the number
// of tokens are. So the results are the same bits however the work is divided.
//
// A row may write the state that it reads. A second run of a task would then start from the result of the first run, so
// tasks are not repeatable (tasks.h): every task is started by one thread, and the others wait for it.

enum {
  CHANNEL_UNIT = 64,
  CHANNELS = 512,  // the largest number of channels of a task of CONVOLVE
  // Value columns that are computed together. The columns of one head, a tile, stay in the L1 cache.
  COLUMNS = LANES == 4 ? 16 : 2 * LANES,
  VECTORS = COLUMNS / LANES,
};

INLINE float* state_of(const operation* o, const state_rows* rows, int32_t state) {
  return rows->states + state * rows->state_size + o->state_offset;
}

typedef struct {
  const operation* o;
  const state_rows* rows;
  int64_t num_channels;  // of a task
  const float* input;    // [num_tokens, in_width]
  float* output;         // [num_tokens, width]
} convolution;

// Returns the number of channels of a task. Longer runs of channels are read faster.
INLINE int64_t channels_per_task(const operation* o, int64_t num_threads) {
  const int64_t num = ceil_div(o->width, TASKS_PER_THREAD * num_threads * CHANNEL_UNIT) * CHANNEL_UNIT;
  return num < CHANNELS ? num : CHANNELS;
}

// Computes channels from `first` on for one token. seen: [num_seen, CHANNELS], the last inputs, which are updated.
INLINE void convolve_token(const convolution* c, int64_t token, int64_t first, int64_t num, const int64_t num_seen,
                           float (*seen)[CHANNELS]) {
  const operation* o = c->o;
  const int64_t width = o->width;
  const float* x = c->input + token * o->in_width + first;
  const float *weights = (const float*)o->weight.values + first, *bias = o->bias.values;
  float* output = c->output + token * width + first;
  for (int64_t i = 0; i < num; i += LANES) {
    const int64_t left = num - i;
    floats last = load_some(x + i, left), y = bias ? load_some(bias + first + i, left) : splat(0.0f);
    if (o->is_gated) last *= load_some(x + 2 * width + i, left);
    for (int64_t j = 0; j < num_seen; j++) {
      const floats earlier = load_float(seen[j] + i);
      y = multiply_add(load_some(weights + j * width + i, left), earlier, y);
      if (j) store_float(seen[j - 1] + i, earlier);
    }
    y = multiply_add(load_some(weights + num_seen * width + i, left), last, y);
    store_float(seen[num_seen - 1] + i, last);
    store_some(output + i, o->is_gated ? load_some(x + width + i, left) * y : y / (splat(1.0f) + exponential(-y)), left);
  }
}

// Computes channels from `first` on for a row. The state is [num_seen, width].
INLINE void convolve_row(const convolution* c, int64_t row, int64_t first, int64_t num, const int64_t num_seen) {
  const operation* o = c->o;
  const state_rows* rows = c->rows;
  const int32_t start = rows->query_start_loc[row], end = rows->query_start_loc[row + 1];
  int32_t save = rows->save_start_loc[row];
  float seen[MAX_KERNEL_SIZE][CHANNELS];
  const float* read = state_of(o, rows, rows->reads[row]) + first;
  for (int64_t j = 0; j < num_seen; j++) memcpy(seen[j], read + j * o->width, sizeof(float) * (size_t)num);
  for (int32_t token = start; token <= end; token++) {
    for (; save < rows->save_start_loc[row + 1] && rows->save_counts[save] == token - start; save++) {
      float* state = state_of(o, rows, rows->save_states[save]) + first;
      for (int64_t j = 0; j < num_seen; j++) memcpy(state + j * o->width, seen[j], sizeof(float) * (size_t)num);
    }
    if (token < end) convolve_token(c, token, first, num, num_seen, seen);
  }
}

// A `task_function`: computes some channels of all rows.
static void convolve_task(const void* context, int64_t task, int64_t next) {
  const convolution* c = context;
  const int64_t first = task * c->num_channels, left = c->o->width - first;
  const int64_t num = left < c->num_channels ? left : c->num_channels;
  (void)next;
  for (int64_t row = 0; row < c->rows->num_rows; row++) switch (c->o->kernel_size) {  // unrolled for common sizes
      case 3: convolve_row(c, row, first, num, 2); break;
      case 4: convolve_row(c, row, first, num, 3); break;
      default: convolve_row(c, row, first, num, c->o->kernel_size - 1);
    }
}

// The operands of DELTA_RULE, in the form that tasks read.
typedef struct {
  const operation* o;
  const state_rows* rows;
  int64_t num_tokens, tiles_per_task;
  const float* input;  // [num_tokens, in_width]
  float* heads;        // [num_key_heads, num_tokens, 2, key_dim]: normalized queries and keys
  float* factors;      // [num_heads, num_tokens, 2]: the factor of the state, and the factor of its change
  float* output;       // [num_tokens, width]
} delta_rule;

INLINE int64_t delta_rule_floats(const operation* o, int64_t num_tokens) {
  return 2 * num_tokens * (o->num_key_heads * o->key_dim + o->num_heads);
}

INLINE int64_t num_tiles(const operation* o) { return ceil_div(o->value_dim, COLUMNS); }

// Normalizes the queries and keys of a token, and computes its factors. gates: [2 * num_heads].
static NOINLINE void prepare_delta_rule(const delta_rule* c, int64_t token, const float* gates) {
  const operation* o = c->o;
  const int64_t size = o->key_dim, num_heads = o->num_heads;
  const float *decay = o->decay.values, *bias = o->bias.values, *x = c->input + token * o->in_width;
  for (int is_key = 0; is_key < 2; is_key++)
    for (int64_t head = 0; head < o->num_key_heads; head++, x += size) {
      float* target = c->heads + ((head * c->num_tokens + token) * 2 + is_key) * size;
      floats squares = splat(0.0f);
      for (int64_t i = 0; i < size; i += LANES) {
        const floats values = load_some(x + i, size - i);
        squares = multiply_add(values, values, squares);
      }
      const float norm = sqrtf(sum_lanes(squares) + 1e-6f), factor = 1.0f / (is_key ? norm : norm * sqrtf((float)size));
      for (int64_t i = 0; i < size; i++) target[i] = x[i] * factor;
    }
  for (int64_t head = 0; head < num_heads; head++) {
    float* factors = c->factors + (head * c->num_tokens + token) * 2;
    factors[0] = expf(decay[head] * softplus(gates[num_heads + head] + bias[head]));
    factors[1] = 1.0f / (1.0f + expf(-gates[head]));
  }
}

// Sums over the keys are divided into the even and the odd indexes, so that the processor adds up both at once.
typedef struct {
  floats parts[2][VECTORS];
} tile_sums;

// sums = S^T key, of a tile whose rows are `stride` apart. Meanwhile as much memory is prefetched from `ahead` on.
INLINE tile_sums read_tile(const float* state, int64_t stride, const float* key, int64_t size, const float* ahead) {
  tile_sums sums = {{{{0}}}};
  for (int64_t j = 0; j < size; j += 2)
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      if (j + odd == size) break;
      for (int i = 0; i < COLUMNS; i += LINE / (int)sizeof(float))
        __builtin_prefetch(ahead + (j + odd) * COLUMNS + i, 0, 2);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++)
        sums.parts[odd][v] =
            multiply_add(load_float(state + (j + odd) * stride + v * LANES), splat(key[j + odd]), sums.parts[odd][v]);
    }
  return sums;
}

// target = factor * source + key change^T; output = target^T query; read = target^T next_key, unless that is NULL.
// `bypasses`: whether the target is aligned and stored without reading it into the caches.
INLINE void update_tile(const float* source, int64_t source_stride, float* target, int64_t target_stride, int64_t size,
                        float factor, const floats* change, const float* key, const float* query,
                        const float* next_key, const int bypasses, tile_sums* output, tile_sums* read) {
  tile_sums out = {{{{0}}}}, next = {{{{0}}}};
  const floats kept = splat(factor);
  for (int64_t j = 0; j < size; j += 2)
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      if (j + odd == size) break;
      const floats k = splat(key[j + odd]), q = splat(query[j + odd]), n = splat(next_key ? next_key[j + odd] : 0.0f);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        const floats old = load_float(source + (j + odd) * source_stride + v * LANES);
        const floats state = multiply_add(old, kept, k * change[v]);
        float* place = target + (j + odd) * target_stride + v * LANES;
        if (bypasses)
          store_past_caches(place, state);
        else
          store_float(place, state);
        out.parts[odd][v] = multiply_add(state, q, out.parts[odd][v]);
        if (next_key) next.parts[odd][v] = multiply_add(state, n, next.parts[odd][v]);
      }
    }
  *output = out;
  *read = next;
}

// Copies `num` columns of a tile; the tiles may be the same.
static void copy_tile(const float* source, int64_t source_stride, float* target, int64_t target_stride, int64_t size,
                      int64_t num) {
  if (source == target) return;
  for (int64_t j = 0; j < size; j++)
    memcpy(target + j * target_stride, source + j * source_stride, sizeof(float) * (size_t)num);
}

// Computes the tile of a row that begins at `column` of a head. Between tokens, the tile is in memory of its own; the
// first token reads it from the row's state, and the last token writes it to the first state that is saved then.
// ahead: the part of a state that is read next.
static NOINLINE void compute_tile(const delta_rule* c, int64_t row, int64_t head, int64_t column, const float* ahead) {
  const operation* o = c->o;
  const state_rows* rows = c->rows;
  const int64_t size = o->key_dim, width = o->value_dim, place = head * size * width + column;
  const int64_t num = width - column < COLUMNS ? width - column : COLUMNS, start = rows->query_start_loc[row];
  const int64_t num_tokens = rows->query_start_loc[row + 1] - start, end = rows->save_start_loc[row + 1];
  const float* queries = c->heads + (head / (o->num_heads / o->num_key_heads) * c->num_tokens + start) * 2 * size;
  const float* factors = c->factors + (head * c->num_tokens + start) * 2;
  const float* values = c->input + start * o->in_width + o->in_width - o->width + head * width + column;
  float* output = c->output + start * o->width + head * width + column;
  _Alignas(LINE) float tile[MAX_HEAD_DIM * COLUMNS];
  const float* source = state_of(o, rows, rows->reads[row]) + place;
  int64_t stride = width, save = rows->save_start_loc[row];
  for (; save < end && !rows->save_counts[save]; save++)
    copy_tile(source, width, state_of(o, rows, rows->save_states[save]) + place, width, size, num);
  if (num < COLUMNS) {
    memset(tile, 0, sizeof(float) * (size_t)(size * COLUMNS));
    copy_tile(source, width, tile, COLUMNS, size, num);
    source = tile;
    stride = COLUMNS;
  }
  tile_sums read = {{{{0}}}}, sums;
  if (num_tokens)
    read = read_tile(source, stride, queries + size, size, ahead + column * size);
  for (int64_t token = 0; token < num_tokens; token++, queries += 2 * size) {
    const float factor = factors[2 * token], rate = factors[2 * token + 1], *key = queries + size;
    const int is_last = token == num_tokens - 1, is_direct = is_last && num == COLUMNS && save < end;
    float* target = is_direct ? state_of(o, rows, rows->save_states[save]) + place : tile;
    const int64_t target_stride = is_direct ? width : COLUMNS;
    floats change[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      const floats value = load_some(values + token * o->in_width + v * LANES, num - v * LANES);
      change[v] = splat(rate) * multiply_add(splat(-factor), read.parts[0][v] + read.parts[1][v], value);
    }
    if (is_direct && source != target && (uintptr_t)target % sizeof(floats) == 0 && target_stride % LANES == 0)
      update_tile(source, stride, target, target_stride, size, factor, change, key, queries, NULL, 1, &sums, &read);
    else if (is_last)
      update_tile(source, stride, target, target_stride, size, factor, change, key, queries, NULL, 0, &sums, &read);
    else
      update_tile(source, stride, target, target_stride, size, factor, change, key, queries, key + 2 * size, 0, &sums, &read);
    source = target;
    stride = target_stride;
    for (; save < end && rows->save_counts[save] == token + 1; save++)
      copy_tile(source, stride, state_of(o, rows, rows->save_states[save]) + place, width, size, num);
    for (int v = 0; v < VECTORS; v++)
      store_some(output + token * o->width + v * LANES, sums.parts[0][v] + sums.parts[1][v], num - v * LANES);
  }
}

// Returns the head of a row whose tiles a task computes.
INLINE int64_t head_of_task(const delta_rule* c, int64_t task, int64_t* row) {
  const int64_t nth = task / ceil_div(num_tiles(c->o), c->tiles_per_task);
  *row = nth / c->o->num_heads;
  return nth % c->o->num_heads;
}

// A `task_function`: computes some tiles of a head of a row. Meanwhile the head of the next task is prefetched, in the
// order of its addresses.
static void apply_delta_rule_task(const void* context, int64_t task, int64_t next) {
  const delta_rule* c = context;
  const operation* o = c->o;
  const int64_t part = task % ceil_div(num_tiles(o), c->tiles_per_task);
  const int64_t first = part * c->tiles_per_task * COLUMNS, past = first + c->tiles_per_task * COLUMNS;
  int64_t row, next_row;
  const int64_t head = head_of_task(c, task, &row), next_head = head_of_task(c, next < 0 ? task : next, &next_row);
  const float* ahead = state_of(o, c->rows, c->rows->reads[next_row]) + next_head * o->key_dim * o->value_dim;
  for (int64_t column = first; column < past && column < o->value_dim; column += COLUMNS)
    compute_tile(c, row, head, column, ahead);
  finish_stores();
}

// Returns the number of tiles of a task. A task is a whole head if there are enough heads for the threads.
INLINE int64_t tiles_per_task(const operation* o, const state_rows* rows, int64_t num_threads) {
  return rows->num_rows * o->num_heads >= TASKS_PER_THREAD * num_threads ? num_tiles(o) : 1;
}
