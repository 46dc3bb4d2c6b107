// A decoder-only transformer (Llama, Mistral, Qwen2, Qwen3) over one step, from token ids to logits, in one region of
// threads: they meet after each part of a layer instead of being sent home. Activations are float32, weights and cache of
// any element type.
//
// Where a step has few tokens, its parts are repeatable (tasks.h), so that no thread waits for one that has lost its core:
// every layer has buffers of its own, and every thread norms all tokens for itself, which takes less time than to meet
// once more.

// `decoder.py` mirrors these structures.
typedef struct {
  const float *attention_norm, *mlp_norm;  // [hidden_size]
  const float *query_norm, *key_norm;      // [head_dim], or NULL
  linear_layer qkv, output, gate_up, down;
  void *key_cache, *value_cache;
  int64_t window;  // positions that a query attends to, its own included; 0: all up to its own
} decoder_layer;

typedef struct {
  const decoder_layer* layers;
  const float* norm;  // [hidden_size]
  linear_layer head;
  const void* embedding;  // [vocab_size, hidden_size] of an element type; NULL: the head's weights
  int64_t embedding_element;
  const float *cos, *sin;  // [positions, head_dim]
  int64_t num_layers, hidden_size, intermediate_size;
  int64_t cache_element;  // what the cache holds: HELD_FLOAT and so on
  float eps;
} decoder;

// Attention over a cache of some element type.
typedef struct {
  void (*store_head)(const attention_step*, int64_t, int64_t, const float*, const float*, void*, void*);
  task_function attend, merge;
} attention_functions;

static const attention_functions ATTENTION_OVER[] = {
    [HELD_FLOAT] = {store_head_float_float, attend_task_float_float, merge_task_float_float},
    [HELD_BFLOAT16] = {store_head_float_bfloat16, attend_task_float_bfloat16, merge_task_float_bfloat16},
    [HELD_FLOAT16] = {store_head_float_float16, attend_task_float_float16, merge_task_float_float16},
    [HELD_FLOAT8] = {store_head_float_float8, attend_task_float_float8, merge_task_float_float8},
    [HELD_INT8] = {store_head_float_int8, attend_task_float_int8, merge_task_float_int8},
};

// Which of a step's parts takes how long. `decoder.py` mirrors their order.
enum { NORMS, PRODUCTS, ROTARY, ATTENTION, HEAD, NUM_PARTS };

enum {
  FEW_TOKENS = 8,
  HEADS_PER_TASK = 4,  // that are turned
};

typedef struct {
  int64_t last;              // nanoseconds on the clock
  int64_t parts[NUM_PARTS];  // nanoseconds
} step_times;

enum { QKV, TURN, ATTEND, MERGE, OUTPUT, GATE_UP, DOWN, NUM_LISTS };  // of each layer
enum { LOGITS, HIGHEST, NUM_LAST_LISTS };                              // behind those of all layers

// What a step is given and, beside keys and values, computes. `decoder.py` mirrors this structure.
typedef struct {
  const int64_t *token_ids, *positions;  // [num_tokens]
  const int64_t* logit_rows;             // [num_logits]: which tokens have logits
  int64_t num_logits;                    // at most num_tokens
  float* hidden;                         // [num_tokens, hidden_size], normed
  float* logits;                         // [num_logits, out_size of the head]
  int64_t* highest;                      // [num_logits]: which logit is, the first of equals; -1: there is a NaN
} decoder_step;

// What all threads of a step share. Buffers of a layer are `layer_size` floats behind those of the layer before where
// there are few tokens, and the same else.
typedef struct {
  const decoder* model;
  const attention_step* step;
  const decoder_step* tokens;
  row_groups groups;       // of tokens
  row_groups head_groups;  // of those that have logits
  int is_few;
  int64_t layer_size;
  float* heads;           // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
  float* queries;         // [num_tokens, num_heads, head_dim], turned
  float* attended;        // [num_tokens, num_heads, head_dim]
  float* interleaved;     // the same as the next product takes it
  float* update;          // [num_tokens, hidden_size]: what attention adds to x
  float* gate_up;         // [num_tokens, 2 * intermediate_size], where the two are not computed together
  float* activated;       // [num_tokens, intermediate_size], interleaved
  float* last_update;     // [num_tokens, hidden_size]: what the layer adds last
  float* x;               // [num_tokens, hidden_size]: the residual stream, where there are many tokens; of all layers
  float* normed;          // [num_tokens, hidden_size], interleaved, where there are many tokens; of all layers
  float* own;             // [num_threads, 2, FEW_TOKENS, hidden_size], where there are few tokens; of all layers
  task_list* lists;       // [num_layers, NUM_LISTS], and NUM_LAST_LISTS
  step_times* times;
} decoding;

// What a thread norms: its own where there are few tokens, else what all share.
typedef struct {
  float *x, *normed;
} residual;

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Books the time since the last call to a part, as the first thread sees it.
static void end_part(const decoding* d, int part) {
#pragma omp master
  {
    const int64_t now = nanoseconds();
    d->times->parts[part] += now - d->times->last;
    d->times->last = now;
  }
}

static void run_part(const decoding* d, int64_t layer, int list, task_function run, const void* context, int part) {
  task_list* tasks = &d->lists[layer * NUM_LISTS + list];
  if (d->is_few) {
    finish_tasks(tasks, run, context);
  } else {
    share_tasks(tasks, run, context);
#pragma omp barrier
  }
  end_part(d, part);
}

static void embed_token(const decoding* d, int64_t token, float* x) {
  const decoder* model = d->model;
  const int64_t size = model->hidden_size, *id = &d->tokens->token_ids[token];
#define EMBED(type) \
  if (model->embedding) \
    widen_row_##type(model->embedding, *id, x, size); \
  else \
    take_rows_##type(model->head.panels, id, x, 1, size); \
  break;
  switch (model->embedding ? model->embedding_element : model->head.element) {
    case ELEMENT_FLOAT: EMBED(float)
    case ELEMENT_BFLOAT16: EMBED(bfloat16)
    default: EMBED(float16)
  }
#undef EMBED
}

static residual embed_tokens(const decoding* d) {
  const int64_t num_tokens = d->step->num_tokens, size = d->model->hidden_size;
  residual r = {d->x, d->normed};
  if (d->is_few) {
    r.x = d->own + omp_get_thread_num() * 2 * FEW_TOKENS * size;
    r.normed = r.x + FEW_TOKENS * size;
    for (int64_t token = 0; token < num_tokens; token++) embed_token(d, token, r.x + token * size);
  } else {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < num_tokens; token++) embed_token(d, token, r.x + token * size);
  }
#pragma omp master
  d->times->last = nanoseconds();
  return r;
}

// normed = norm(x), after x += update where there is one.
static void norm_token(const decoding* d, const residual* r, int64_t token, const float* weight, const float* update) {
  const int64_t size = d->model->hidden_size;
  float* x = r->x + token * size;
  if (update) add_float(x, update + token * size, size);
  const float factor = inverse_rms_float(x, size, d->model->eps);
  int64_t stride;
  float* target = r->normed + row_place(&d->groups, token, size, &stride);
  for (int64_t i = 0; i < size; i++) target[i * stride] = x[i] * factor * weight[i];
}

static void norm_tokens(const decoding* d, const residual* r, const float* weight, const float* update) {
  if (d->is_few) {
    for (int64_t token = 0; token < d->step->num_tokens; token++) norm_token(d, r, token, weight, update);
  } else {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < d->step->num_tokens; token++) norm_token(d, r, token, weight, update);
  }
  end_part(d, NORMS);
}

// hidden = norm(x + update), and what the head takes of it.
static void norm_last(const decoding* d, const residual* r, const float* update) {
  const int64_t size = d->model->hidden_size, num_tokens = d->step->num_tokens;
  const decoder_step* tokens = d->tokens;
  if (d->is_few) {
    for (int64_t token = 0; token < num_tokens; token++) {
      float* x = r->x + token * size;
      add_float(x, update + token * size, size);
      normalize_float(x, d->model->norm, x, size, d->model->eps);
    }
    for (int64_t i = 0; i < tokens->num_logits; i++)
      interleave_row(&d->head_groups, i, r->x + tokens->logit_rows[i] * size, size, r->normed);
#pragma omp master
    memcpy(tokens->hidden, r->x, sizeof(float) * (size_t)(num_tokens * size));
  } else {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < num_tokens; token++) {
      float* x = r->x + token * size;
      add_float(x, update + token * size, size);
      normalize_float(x, d->model->norm, tokens->hidden + token * size, size, d->model->eps);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tokens->num_logits; i++)
      interleave_row(&d->head_groups, i, tokens->hidden + tokens->logit_rows[i] * size, size, r->normed);
  }
  end_part(d, NORMS);
}

typedef struct {
  const decoding* d;
  const decoder_layer* layer;
  const float* heads;
  float* queries;
} turning;

// A `task_function`: norms and turns heads of queries and keys, and stores keys and values.
static void turn_task(const void* context, int64_t task, int64_t next) {
  const turning* t = context;
  const attention_step* step = t->d->step;
  const int64_t size = step->head_dim, num_turned = step->num_heads + step->num_kv_heads;
  const int64_t num_all = step->num_tokens * num_turned, end = (task + 1) * HEADS_PER_TASK;
  (void)next;
  for (int64_t i = task * HEADS_PER_TASK; i < end && i < num_all; i++) {
    const int64_t token = i / num_turned, head = i % num_turned;
    const float* source = t->heads + (token * (num_turned + step->num_kv_heads) + head) * size;
    const float* weight = head < step->num_heads ? t->layer->query_norm : t->layer->key_norm;
    float x[MAX_HEAD_DIM];
    if (weight)
      normalize_float(source, weight, x, size, t->d->model->eps);
    else
      memcpy(x, source, sizeof(float) * (size_t)size);
    const int64_t angle = t->d->tokens->positions[token] * size;
    rotate_float(x, t->d->model->cos + angle, t->d->model->sin + angle, size);
    if (head < step->num_heads)
      memcpy(t->queries + (token * step->num_heads + head) * size, x, sizeof(float) * (size_t)size);
    else
      ATTENTION_OVER[t->d->model->cache_element].store_head(step, token, head - step->num_heads, x,
                                                            source + step->num_kv_heads * size, t->layer->key_cache,
                                                            t->layer->value_cache);
  }
}

static void silu_tokens(const decoding* d, float* gate_up, float* activated) {
  const int64_t size = d->model->intermediate_size;
#pragma omp for schedule(static)
  for (int64_t token = 0; token < d->step->num_tokens; token++) {
    float* row = gate_up + token * 2 * size;
    silu_mul_token_float(row, row + size, row, size);
    interleave_row(&d->groups, token, row, size, activated);
  }
}

// What attention gave as the next product takes it. Where there are few tokens every thread writes all of it.
static const float* interleave_attended(const decoding* d, int64_t offset) {
  const int64_t size = d->step->num_heads * d->step->head_dim;
  const float* attended = d->attended + offset;
  float* interleaved = d->interleaved + offset;
  if (d->is_few)
    for (int64_t token = 0; token < d->step->num_tokens; token++)
      interleave_row(&d->groups, token, attended + token * size, size, interleaved);
  else
    interleave_rows(&d->groups, attended, size, interleaved);
  return interleaved;
}

static void attend_layer(const decoding* d, int64_t l, const work_list* list, const float* normed) {
  const decoder_layer* layer = &d->model->layers[l];
  const int64_t offset = l * d->layer_size;
  const product qkv = plain_product(&layer->qkv, &d->groups, normed, d->heads + offset);
  run_part(d, l, QKV, multiply_task, &qkv, PRODUCTS);
  const turning t = {d, layer, d->heads + offset, d->queries + offset};
  run_part(d, l, TURN, turn_task, &t, ROTARY);
  attention_step step = *d->step;
  step.window = layer->window;
  step.query_token_stride = step.num_heads * step.head_dim;
  const attention a = {&step, list, d->queries + offset, layer->key_cache, layer->value_cache, d->attended + offset};
  const attention_functions* functions = &ATTENTION_OVER[d->model->cache_element];
  run_part(d, l, ATTEND, functions->attend, &a, ATTENTION);
  if (list->partials) run_part(d, l, MERGE, functions->merge, &a, ATTENTION);
  const product output = plain_product(&layer->output, &d->groups, interleave_attended(d, offset), d->update + offset);
  run_part(d, l, OUTPUT, multiply_task, &output, PRODUCTS);
}

static void feed_forward(const decoding* d, int64_t l, const float* normed) {
  const decoder_layer* layer = &d->model->layers[l];
  const int64_t offset = l * d->layer_size;
  float* activated = d->activated + offset;
  if (can_gate(&layer->gate_up)) {
    const product gate_up = gated_product(&layer->gate_up, &d->groups, normed, activated);
    run_part(d, l, GATE_UP, multiply_task, &gate_up, PRODUCTS);
  } else {
    const product gate_up = plain_product(&layer->gate_up, &d->groups, normed, d->gate_up);
    run_part(d, l, GATE_UP, multiply_task, &gate_up, PRODUCTS);
    silu_tokens(d, d->gate_up, activated);
  }
  const product down = plain_product(&layer->down, &d->groups, activated, d->last_update + offset);
  run_part(d, l, DOWN, multiply_task, &down, PRODUCTS);
}

// A `task_function`: looks for the highest logit of a row; repeatable.
static void highest_task(const void* context, int64_t row, int64_t next) {
  const decoding* d = context;
  const int64_t size = d->model->head.out_size;
  const float* logits = d->tokens->logits + row * size;
  floats highest = splat(-INFINITY);
  ints is_nan = {0};
  int has_nan = 0;
  int64_t i = 0, found = 0;
  (void)next;
  for (; i + LANES <= size; i += LANES) {
    const floats values = load_float(logits + i);
    highest = larger(values, highest);
    is_nan |= values != values;
  }
  for (int lane = 0; lane < LANES; lane++) has_nan |= is_nan[lane];
  float value = largest_lane(highest);
  for (; i < size; i++) {
    value = logits[i] > value ? logits[i] : value;
    has_nan |= isnan(logits[i]);
  }
  while (!has_nan && logits[found] != value) found++;
  d->tokens->highest[row] = has_nan ? -1 : found;
}

static void compute_logits(const decoding* d, const float* normed) {
  const int64_t num_layers = d->model->num_layers;
  const product head = plain_product(&d->model->head, &d->head_groups, normed, d->tokens->logits);
  run_part(d, num_layers, LOGITS, multiply_task, &head, HEAD);
  run_part(d, num_layers, HIGHEST, highest_task, d, HEAD);
}

// Of one thread.
static void decode_tokens(const decoding* d, const work_list* lists, const int* list_of_layer) {
  const decoder* model = d->model;
  const residual r = embed_tokens(d);
  const float* update = NULL;
  for (int64_t l = 0; l < model->num_layers; l++) {
    norm_tokens(d, &r, model->layers[l].attention_norm, update);
    attend_layer(d, l, &lists[list_of_layer[l]], r.normed);
    norm_tokens(d, &r, model->layers[l].mlp_norm, d->update + l * d->layer_size);
    feed_forward(d, l, r.normed);
    update = d->last_update + l * d->layer_size;
  }
  norm_last(d, &r, update);
  if (d->tokens->num_logits) compute_logits(d, r.normed);
}

// A list of work for each window that a layer has; layers with equal windows share one. 0 if there is no memory.
static int list_layers(const decoder* model, const attention_step* step, work_list* lists, int* list_of_layer) {
  int num_lists = 0;
  for (int64_t l = 0; l < model->num_layers; l++) {
    int found = 0;
    while (found < num_lists && lists[found].window != model->layers[l].window) found++;
    list_of_layer[l] = found;
    if (found < num_lists) continue;
    attention_step windowed = *step;
    windowed.window = model->layers[l].window;
    if (!list_work(&windowed, &lists[num_lists++])) return 0;
  }
  return 1;
}

INLINE int64_t aligned(int64_t size) { return (size + 15) / 16 * 16; }

// Points the buffers into `memory`, unless that is NULL; returns how many floats they take.
static int64_t share_out(decoding* d, float* memory) {
  const attention_step* step = d->step;
  const int64_t num_tokens = step->num_tokens, hidden = d->model->hidden_size * num_tokens;
  const int64_t intermediate = d->model->intermediate_size * num_tokens;
  const int64_t attended = step->num_heads * step->head_dim * num_tokens;
  const int is_gated = can_gate(&d->model->layers[0].gate_up);
  const int64_t of_layer[] = {step->query_token_stride * num_tokens, attended, attended, attended, hidden, intermediate,
                              hidden};
  float** layer_parts[] = {&d->heads, &d->queries, &d->attended, &d->interleaved, &d->update, &d->activated,
                           &d->last_update};
  const int64_t of_all[] = {d->is_few ? 0 : hidden, d->is_few ? 0 : hidden, is_gated ? 0 : 2 * intermediate,
                            d->is_few ? step->num_threads * 2 * FEW_TOKENS * d->model->hidden_size : 0};
  float** parts[] = {&d->x, &d->normed, &d->gate_up, &d->own};
  int64_t total = 0;
  for (int i = 0; i < 7; i++) {
    if (memory) *layer_parts[i] = memory + total;
    total += aligned(of_layer[i]);
  }
  d->layer_size = d->is_few ? total : 0;
  if (d->is_few) total *= d->model->num_layers;
  for (int i = 0; i < 4; i++) {
    if (memory) *parts[i] = memory + total;
    total += aligned(of_all[i]);
  }
  return total;
}

// How many tasks the parts of a layer have.
static void count_tasks(const decoding* d, const decoder_layer* layer, const work_list* list, int64_t* counts) {
  const int64_t num_turned = d->step->num_tokens * (d->step->num_heads + d->step->num_kv_heads);
  const linear_layer* layers[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
  const int lists[] = {QKV, OUTPUT, GATE_UP, DOWN};
  for (int i = 0; i < 4; i++) {
    const int is_gated = lists[i] == GATE_UP && can_gate(layers[i]);
    const product p = is_gated ? gated_product(layers[i], &d->groups, NULL, NULL)
                               : plain_product(layers[i], &d->groups, NULL, NULL);
    counts[lists[i]] = num_product_tasks(&p);
  }
  counts[TURN] = (num_turned + HEADS_PER_TASK - 1) / HEADS_PER_TASK;
  counts[ATTEND] = list->num_items;
  counts[MERGE] = list->partials ? list->num_items : 0;
}

// The lists of tasks of all layers. NULL if there is no memory.
static task_list* list_tasks(const decoding* d, const work_list* lists, const int* list_of_layer) {
  const int64_t num_layers = d->model->num_layers;
  int64_t counts[NUM_LISTS], total = 0;
  for (int64_t l = 0; l < num_layers; l++) {
    count_tasks(d, &d->model->layers[l], &lists[list_of_layer[l]], counts);
    for (int i = 0; i < NUM_LISTS; i++) total += counts[i];
  }
  const product head = plain_product(&d->model->head, &d->head_groups, NULL, NULL);
  const int64_t last_counts[] = {num_product_tasks(&head), d->tokens->num_logits};
  const int64_t num_lists = num_layers * NUM_LISTS;
  for (int i = 0; i < NUM_LAST_LISTS; i++) total += last_counts[i];
  const size_t size = sizeof(task_list) * (size_t)(num_lists + NUM_LAST_LISTS);
  task_list* tasks = aligned_alloc(64, size + (size_t)(total + 63) / 64 * 64);
  if (!tasks) return NULL;
  memset(tasks, 0, size + (size_t)total);
  _Atomic uint8_t* done = (_Atomic uint8_t*)((char*)tasks + size);
  for (int64_t l = 0; l < num_layers; l++) {
    const work_list* list = &lists[list_of_layer[l]];
    count_tasks(d, &d->model->layers[l], list, counts);
    for (int i = 0; i < NUM_LISTS; i++) {
      const int is_split = (i == ATTEND || i == MERGE) && list->partials;  // layers share their parts' memory
      tasks[l * NUM_LISTS + i].num_tasks = counts[i];
      tasks[l * NUM_LISTS + i].done = d->is_few && !is_split ? done : NULL;
      done += counts[i];
    }
  }
  for (int i = 0; i < NUM_LAST_LISTS; i++, done += last_counts[i - 1])
    tasks[num_lists + i] = (task_list){.num_tasks = last_counts[i], .done = d->is_few ? done : NULL};
  return tasks;
}

// times: [NUM_PARTS] nanoseconds. 0, or 1 if there is no memory.
int decode(const decoder* model, const attention_step* step, const decoder_step* tokens, int64_t* times) {
  step_times clock = {0};
  decoding d = {.model = model, .step = step, .tokens = tokens, .groups = group_rows(step->num_tokens),
                .head_groups = group_rows(tokens->num_logits), .times = &clock};
  d.is_few = step->num_tokens <= FEW_TOKENS && can_gate(&model->layers[0].gate_up);
  work_list* lists = calloc((size_t)model->num_layers, sizeof(work_list));
  int* list_of_layer = malloc(sizeof(int) * (size_t)model->num_layers);
  float* memory = aligned_alloc(64, sizeof(float) * (size_t)share_out(&d, NULL));
  const int is_listed = lists && list_of_layer && memory && list_layers(model, step, lists, list_of_layer);
  d.lists = is_listed ? list_tasks(&d, lists, list_of_layer) : NULL;
  if (d.lists) {
    share_out(&d, memory);
#pragma omp parallel num_threads((int)step->num_threads) if (step->num_threads > 1)
    decode_tokens(&d, lists, list_of_layer);
    memcpy(times, clock.parts, sizeof clock.parts);
  }
  if (lists)
    for (int64_t l = 0; l < model->num_layers; l++) free_work(&lists[l]);
  const int has_failed = !d.lists;
  free(d.lists);
  free(lists);
  free(list_of_layer);
  free(memory);
  return has_failed;
}
