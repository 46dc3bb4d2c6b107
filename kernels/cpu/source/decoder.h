// Runs a model for one step, from token ids to logits, in one parallel region. The model is a list of operations, which
// `decoder_kernel.py` builds and this file carries out one after the other. The code here does not depend on the kind
// of model. Activations are float32, matmuls round their input as their layers specify, and weights and cache may have
// any element type.
//
// An operation reads and writes *buffers*: float32, [num_tokens, width]. Some operations work token by token (embed,
// add, normalize, activate, choose, sum slots, gate, and preparing the input of a matmul): the threads divide the
// tokens among them. The other operations are divided into tasks. For matmuls with experts, the number of tasks is
// known only during the step.
//
// In a step with few tokens, tasks are repeatable (tasks.h), so that no thread waits for a thread that has lost its
// core. Each operation that runs by tasks then writes to memory of its own. Work that is done token by token is
// repeated by every thread in the thread's own memory, which takes less time than another barrier. The tasks that update
// states are never repeatable (states.h).

// The functions that compute attention over a cache of one element type.
typedef struct {
  void (*store_head)(const attention_step*, int64_t, int64_t, const float*, const float*, void*, void*);
  task_function attend, merge;
} attention_functions;

#define DECLARE(cache) \
  SHARED void store_head_float_##cache(const attention_step*, int64_t, int64_t, const float*, const float*, void*, \
                                       void*); \
  SHARED void attend_task_float_##cache(const void*, int64_t, int64_t); \
  SHARED void merge_task_float_##cache(const void*, int64_t, int64_t);
DECLARE(float) DECLARE(bfloat16) DECLARE(float16) DECLARE(float8) DECLARE(int8)
#undef DECLARE

#define FUNCTIONS(cache) {store_head_float_##cache, attend_task_float_##cache, merge_task_float_##cache}
static const attention_functions ATTENTION_OVER[] = {[ELEMENT_FLOAT32] = FUNCTIONS(float),
                                                     [ELEMENT_BFLOAT16] = FUNCTIONS(bfloat16),
                                                     [ELEMENT_FLOAT16] = FUNCTIONS(float16),
                                                     [ELEMENT_FLOAT8_E4M3FN] = FUNCTIONS(float8),
                                                     [ELEMENT_INT8] = FUNCTIONS(int8)};
#undef FUNCTIONS

static const step_part PART_OF[] = {
    [OPERATION_EMBED] = PART_NORMS,
    [OPERATION_ADD] = PART_NORMS,
    [OPERATION_NORMALIZE] = PART_NORMS,
    [OPERATION_NORMALIZE_PROJECTIONS] = PART_NORMS,
    [OPERATION_MULTIPLY] = PART_PRODUCTS,
    [OPERATION_ACTIVATE] = PART_PRODUCTS,
    [OPERATION_ROUTE_TOP_K] = PART_PRODUCTS,
    [OPERATION_MULTIPLY_ROUTED] = PART_PRODUCTS,
    [OPERATION_COMBINE_EXPERTS] = PART_PRODUCTS,
    [OPERATION_GATE] = PART_PRODUCTS,
    [OPERATION_CLIP] = PART_PRODUCTS,
    [OPERATION_QK_NORM_ROPE_STORE] = PART_ROTARY,
    [OPERATION_ATTEND_PAGED] = PART_ATTENTION,
    [OPERATION_LM_HEAD] = PART_HEAD,
    [OPERATION_ALL_REDUCE] = PART_RANKS,
    [OPERATION_CONVOLVE] = PART_ATTENTION,
    [OPERATION_DELTA_RULE] = PART_ATTENTION,
    [OPERATION_NORMALIZE_GATED] = PART_NORMS,
};

enum {
  FEW_TOKENS = 8,
  HEADS_PER_TASK = 4,  // heads that one task of QK_NORM_ROPE_STORE rotates
  // task lists per operation: attention's items and merges, or the head's logits and the search for the highest
  LISTS = 2,
};

// The data that all threads of a step share.
typedef struct {
  const decoder* model;
  const attention_step* step;
  const decoder_step* tokens;
  row_groups groups;       // of all tokens
  row_groups head_groups;  // of the tokens that have logits
  int is_few;
  float* memory;
  // Offsets in floats from `memory`. In a step with few tokens, each thread has a part of own_size floats, which begins
  // at `own`. A buffer that is computed token by token is in that part, and the output of an operation that runs by
  // tasks is at the operation's own place. Otherwise each buffer has one place.
  int64_t *buffer_places, *operation_places;  // [num_buffers], [num_operations]
  int64_t prepared;                           // prepared input of a matmul; with few tokens it is in the thread's part
  int64_t expert_rows;                        // the rows of each expert, stored likewise
  int64_t raw_logits;                         // the matmul of the head, if the logits are computed from it
  int64_t own, own_size;
  work_list* works;     // [num_operations]: one list for each kind of layers, see `is_work_of`
  int* work_of;         // [num_operations]: index into `works`
  task_list* lists;     // [num_operations, LISTS]
  int64_t last;         // time of the last measurement, nanoseconds
  int64_t* times;       // [NUM_PARTS] nanoseconds
  // the operation at which an all-reduce failed, and after which all threads stop; -1: no failure
  _Atomic int64_t lost_at;
} decoding;

// The state of one thread while it carries out the operations.
typedef struct {
  decoding* d;
  float* own;                   // the thread's part of `memory`, if there are few tokens
  float* places[MAX_BUFFERS];   // current place of each buffer
  // whether all threads have passed a barrier since the last work that was done token by token
  int is_settled;
} walk;

INLINE int is_by_tasks(operation_kind kind) {
  return kind == OPERATION_MULTIPLY || kind == OPERATION_MULTIPLY_ROUTED || kind == OPERATION_QK_NORM_ROPE_STORE ||
         kind == OPERATION_ATTEND_PAGED || kind == OPERATION_LM_HEAD || kind == OPERATION_ALL_REDUCE ||
         kind == OPERATION_CONVOLVE || kind == OPERATION_DELTA_RULE;
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Runs `body` for every token. The same thread always gets the same tokens, so that consecutive operations that work
// token by token need no barrier between them.
#define FOR_TOKENS(w, num, body) \
  if ((w)->d->is_few) { \
    for (int64_t token = 0; token < (num); token++) body; \
  } else { \
    _Pragma("omp for schedule(static) nowait") for (int64_t token = 0; token < (num); token++) body; \
    (w)->is_settled = 0; \
  }

static void settle(walk* w) {
  if (!w->is_settled && !w->d->is_few) {
#pragma omp barrier
  }
  w->is_settled = 1;
}

static void run_tasks(walk* w, int64_t op, int list, task_function run, const void* context) {
  task_list* tasks = &w->d->lists[op * LISTS + list];
  settle(w);
  if (w->d->is_few) {
    finish_tasks(tasks, run, context);
  } else {
    share_tasks(tasks, run, context);
#pragma omp barrier
  }
}

// Operations that work token by token

enum { ROW_PART = 256 };

// output = `size` values of an element type, from index `first` on, as float32.
static void widen(const void* values, int64_t element, int64_t first, float* output, int64_t size) {
  switch (element) {
    case ELEMENT_FLOAT32: widen_float((const float*)values + first, output, size); break;
    case ELEMENT_BFLOAT16: widen_bfloat16((const bfloat16*)values + first, output, size); break;
    default: widen_float16((const float16*)values + first, output, size);
  }
}

static NOINLINE void embed_token(const operation* o, int64_t id, int64_t position, float* x, int64_t size) {
  if (!o->table.values)
    take_row(o->linear, id, x);
  else
    widen(o->table.values, o->table.element, id * size, x, size);
  if (o->factor != 1.0f)
    for (int64_t i = 0; i < size; i++) x[i] *= o->factor;
  if (!o->positions.values) return;
  float position_row[ROW_PART];
  for (int64_t first = 0; first < size; first += ROW_PART) {
    const int64_t num = size - first < ROW_PART ? size - first : ROW_PART;
    widen(o->positions.values, o->positions.element, position * size + first, position_row, num);
    add_float(x + first, position_row, num);
  }
}

INLINE float sum_floats(const float* x, int64_t size) {
  floats sums = splat(0.0f);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) sums += load_float(x + i);
  float sum = sum_lanes(sums);
  for (; i < size; i++) sum += x[i];
  return sum;
}

static NOINLINE void add_token(const operation* o, float* x, const float* update, int64_t size) {
  if (o->factor == 1.0f)
    add_float(x, update, size);
  else
    for (int64_t i = 0; i < size; i++) x[i] += update[i] * o->factor;
}

// Layer normalization (Ba et al., 2016, https://arxiv.org/abs/1607.06450). bias: [size], or NULL.
static NOINLINE void normalize_layer(const float* x, const float* weight, const float* bias, float* output, int64_t size,
                                     float eps) {
  const float mean = sum_floats(x, size) / (float)size;
  for (int64_t i = 0; i < size; i++) output[i] = x[i] - mean;
  const float factor = inverse_rms_float(output, size, eps);
  for (int64_t i = 0; i < size; i++) output[i] = output[i] * factor * weight[i] + (bias ? bias[i] : 0.0f);
}

static NOINLINE void normalize_projections(const operation* o, const float* x, float* output, int64_t size) {
  const tensor* norms[] = {&o->query_norm, &o->key_norm};
  int64_t first = 0;
  for (int64_t part = 0; part < 2; first += norms[part++]->width) {
    const float* weight = norms[part]->values;
    if (!o->head_dim) normalize_float(x + first, weight, output + first, norms[part]->width, o->eps);
    else
      for (int64_t i = 0; i < norms[part]->width; i += o->head_dim)
        normalize_layer(x + first + i, weight + i, NULL, output + first + i, o->head_dim, o->eps);
  }
  memcpy(output + first, x + first, sizeof(float) * (size_t)(size - first));
}

static NOINLINE void normalize_token(const operation* o, float* x, const float* update, float* output, int64_t size) {
  if (update) add_token(o, x, update, size);
  if (o->is_centered)
    normalize_layer(x, o->weight.values, o->bias.values, output, size, o->eps);
  else
    normalize_float(x, o->weight.values, output, size, o->eps);
}

// x / 2 * (1 + erf(x / sqrt(2))), or its approximation by tanh (Hendrycks and Gimpel, 2016,
// https://arxiv.org/abs/1606.08415).
INLINE floats gelu(floats x, activation_function function) {
  const floats inner = function == FUNCTION_GELU ? error_function(x * splat(0.70710678118654752f))
                                        : hyperbolic_tangent((x * x * x * splat(0.044715f) + x) *
                                                             splat(0.79788456080286536f));
  return splat(0.5f) * x * (splat(1.0f) + inner);
}

INLINE floats activated(floats x, activation_function function) {
  switch (function) {
    case FUNCTION_SILU: return x / (splat(1.0f) + exponential(-x));
    case FUNCTION_RELU: return larger(x, splat(0.0f));
    case FUNCTION_RELU2: return larger(x, splat(0.0f)) * larger(x, splat(0.0f));
    default: return gelu(x, function);
  }
}

INLINE floats gated(const operation* o, floats gate, floats up) {
  if (o->function != FUNCTION_CLAMPED_SWIGLU) return activated(gate, o->function) * up;
  const floats limit = splat(o->limit);
  gate = choose(gate > limit, limit, gate);
  up = choose(up > limit, limit, choose(up < -limit, -limit, up));
  return (up + splat(1.0f)) * (gate / (splat(1.0f) + exponential(-gate * splat(o->alpha))));
}

// e^min(x, eps) - 1 - x for an eps near 0, without cancellation: a Taylor polynomial near 0.
INLINE floats exponential_less_tangent(floats x, floats eps) {
  const floats low = choose(x > eps, eps, x);
  floats p = splat(1.0f / 40320.0f);
  p = p * low + splat(1.0f / 5040.0f);
  p = p * low + splat(1.0f / 720.0f);
  p = p * low + splat(1.0f / 120.0f);
  p = p * low + splat(1.0f / 24.0f);
  p = p * low + splat(1.0f / 6.0f);
  p = p * low + splat(0.5f);
  return choose(low > splat(-0.5f), p * low * low + (low - x), exponential(low) - splat(1.0f) - x);
}

// xIELU (Huang and Schlag, 2024, https://arxiv.org/abs/2411.13010).
static NOINLINE void xielu_token(const float* parameters, const float* input, float* output, int64_t size) {
  const floats beta = splat(parameters[2]), eps = splat(parameters[3]);
  const floats positive = splat(softplus(parameters[0])), negative = beta + splat(softplus(parameters[1]));
  for (int64_t i = 0; i < size; i += LANES) {
    const floats x = load_some(input + i, size - i);
    const floats curved = choose(x > splat(0.0f), positive * x * x, negative * exponential_less_tangent(x, eps));
    store_some(output + i, curved + beta * x, size - i);
  }
}

// input: [size], or [2 * size] if it contains gates and ups.
static NOINLINE void activate_token(const operation* o, const float* input, float* output, int64_t size) {
  if (o->function == FUNCTION_XIELU) {
    xielu_token(o->parameters.values, input, output, size);
    return;
  }
  if (o->is_gated && o->function == FUNCTION_SILU) {
    silu_mul_token_float(input, input + size, output, size);
    return;
  }
  for (int64_t i = 0; i < size; i += LANES) {
    const int64_t num = size - i;
    const floats values = load_some(input + i, num);
    store_some(output + i, o->is_gated ? gated(o, values, load_some(input + size + i, num)) : activated(values, o->function),
               num);
  }
}

// gates: [num_gates], one for all values or one for each.
static NOINLINE void gate_token(const float* input, const float* gates, int64_t num_gates, float* output, int64_t size) {
  if (num_gates == 1) {
    const float factor = (splat(1.0f) / (splat(1.0f) + exponential(splat(-gates[0]))))[0];
    for (int64_t i = 0; i < size; i++) output[i] = input[i] * factor;
    return;
  }
  for (int64_t i = 0; i < size; i += LANES) {
    const floats gate = load_some(gates + i, size - i);
    store_some(output + i, load_some(input + i, size - i) / (splat(1.0f) + exponential(-gate)), size - i);
  }
}

// x, gates, output: heads of the weight's size.
static NOINLINE void normalize_gated(const operation* o, const float* x, const float* gates, float* output, int64_t size) {
  for (int64_t i = 0; i < size; i += o->weight.width)
    normalize_float(x + i, o->weight.values, output + i, o->weight.width, o->eps);
  silu_mul_token_float(gates, output, output, size);
}

static void clip_token(const operation* o, const float* input, float* output, int64_t size) {
  for (int64_t i = 0; i < size; i++)
    output[i] = input[i] > o->limit ? o->limit : input[i] < -o->limit ? -o->limit : input[i];
}

// Operations that run by tasks

// Prepares the rows of x for a matmul. `rows`: the tokens that are the rows of the groups; NULL: all tokens.
static const void* prepare(walk* w, const linear_layer* layer, const row_groups* groups, const float* x,
                           const int64_t* rows) {
  const decoding* d = w->d;
  void* prepared = (d->is_few ? w->own : d->memory) + d->prepared;
  const int64_t kind = activation_kind(layer), size = layer->in_size;
  FOR_TOKENS(w, groups->num_rows, prepare_row(kind, groups, token, x + (rows ? rows[token] : token) * size, size, prepared))
  return prepared;
}

static void multiply(walk* w, int64_t op, const float* input, float* output) {
  const operation* o = &w->d->model->operations[op];
  const row_groups* groups = &w->d->groups;
  const void* prepared = prepare(w, o->linear, groups, input, NULL);
  const product p = o->is_gated ? gated_product(o->linear, groups, prepared, output)
                                : plain_product(o->linear, groups, prepared, output);
  run_tasks(w, op, 0, multiply_task, &p);
}

// Returns the step's rows with the heads and the scoring of an operation's layer, and the block tables and slots of its
// layer group.
INLINE attention_step of_layer(const attention_step* step, const operation* o) {
  attention_step own = *o->attention;
  own.query_start_loc = step->query_start_loc;
  own.seq_lens = step->seq_lens;
  own.block_tables = step->block_tables + o->layer_group * step->num_rows * step->max_blocks;
  own.slot_mapping = step->slot_mapping + o->layer_group * step->num_tokens;
  own.num_tokens = step->num_tokens;
  own.num_rows = step->num_rows;
  own.max_blocks = step->max_blocks;
  own.num_threads = step->num_threads;
  own.sinks = o->sinks.values;
  return own;
}

typedef struct {
  const decoding* d;
  const operation* o;
  attention_step step;
  const float* heads;
  float* queries;
} turning;

// A `task_function`: normalizes and rotates heads of queries and keys, and stores keys and values in the cache.
static void turn_task(const void* context, int64_t task, int64_t next) {
  const turning* t = context;
  const operation* o = t->o;
  const attention_step* step = &t->step;
  const int64_t size = step->head_dim, num_turned = step->num_heads + step->num_kv_heads;
  const int64_t num_all = step->num_tokens * num_turned, end = (task + 1) * HEADS_PER_TASK;
  const float *cos = o->rope[0].values, *sin = o->rope[1].values, *growth = o->growth.values;
  (void)next;
  for (int64_t i = task * HEADS_PER_TASK; i < end && i < num_all; i++) {
    const int64_t token = i / num_turned, head = i % num_turned;
    const float* source = t->heads + (token * (num_turned + step->num_kv_heads) + head) * size;
    const float* weight = (head < step->num_heads ? &o->query_norm : &o->key_norm)->values;
    float x[MAX_HEAD_DIM];
    if (weight && !o->rotates_first)
      normalize_float(source, weight, x, size, o->eps);
    else
      memcpy(x, source, sizeof(float) * (size_t)size);
    const int64_t position = t->d->tokens->positions[token], angle = position * size;
    if (cos) rotate_float(x, cos + angle, sin + angle, size);
    if (weight && o->rotates_first) normalize_float(x, weight, x, size, o->eps);
    if (head < step->num_heads && growth) {
      const float scale = growth[position];
      for (int64_t j = 0; j < size; j++) x[j] *= scale;
    }
    if (head < step->num_heads)
      memcpy(t->queries + (token * step->num_heads + head) * size, x, sizeof(float) * (size_t)size);
    else
      ATTENTION_OVER[t->d->model->cache_element].store_head(step, token, head - step->num_heads, x,
                                                            source + step->num_kv_heads * size, o->key_cache,
                                                            o->value_cache);
  }
}

// The number of rows of each expert is known after the slots have been sorted. With few tokens, every thread sorts
// them.
static void multiply_routed(walk* w, int64_t op, const float* input, int64_t in_width, float* output,
                            const float* routes) {
  const decoding* d = w->d;
  const operation* o = &d->model->operations[op];
  const int64_t num_tokens = d->step->num_tokens, num_chosen = o->routing.num_chosen, in_size = o->linear->in_size;
  float* memory = d->is_few ? w->own : d->memory;
  const expert_rows rows = place_expert_rows(memory + d->expert_rows, o->routing.num_experts, num_tokens * num_chosen);
  if (d->is_few) {
    sort_slots(routes, num_tokens, num_chosen, o->routing.num_experts, &rows);
  } else {
    settle(w);
#pragma omp single
    sort_slots(routes, num_tokens, num_chosen, o->routing.num_experts, &rows);
  }
  const expert_products p = {o->linear, &rows, memory + d->prepared, output, (int)o->is_gated};
  // from slot to slot; 0 if all slots of a token read the same input
  const int64_t stride = in_width == in_size ? 0 : in_size;
  FOR_TOKENS(w, num_tokens, for (int64_t i = 0; i < num_chosen; i++)
    prepare_slot(&p, ids_of(routes + token * 2 * num_chosen)[i], token * num_chosen + i,
                 input + token * in_width + i * stride, memory + d->prepared))
  d->lists[op * LISTS].num_tasks = *rows.num_used * num_expert_tasks(o->linear, (int)o->is_gated);
  run_tasks(w, op, 0, multiply_experts_task, &p);
}

static void turn(walk* w, int64_t op, const float* input, float* output) {
  const operation* o = &w->d->model->operations[op];
  const turning t = {w->d, o, of_layer(w->d->step, o), input, output};
  run_tasks(w, op, 0, turn_task, &t);
}

static void attend_tokens(walk* w, int64_t op, const float* input, float* output) {
  const decoding* d = w->d;
  const operation* o = &d->model->operations[op];
  const work_list* list = &d->works[d->work_of[op]];
  const attention_step step = of_layer(d->step, o);
  const attention a = {&step, list, input, o->key_cache, o->value_cache, output};
  const attention_functions* functions = &ATTENTION_OVER[d->model->cache_element];
  run_tasks(w, op, 0, functions->attend, &a);
  if (list->partials) run_tasks(w, op, 1, functions->merge, &a);
}

static void convolve(walk* w, int64_t op, const float* input, float* output) {
  const decoding* d = w->d;
  const operation* o = &d->model->operations[op];
  const convolution c = {o, d->tokens->states, channels_per_task(o, d->step->num_threads), input, output};
  run_tasks(w, op, 0, convolve_task, &c);
}

static void apply_delta_rule(walk* w, int64_t op, const float* input, const float* gates, float* output) {
  const decoding* d = w->d;
  const operation* o = &d->model->operations[op];
  const int64_t num_tokens = d->step->num_tokens;
  float* heads = (d->is_few ? w->own : d->memory) + d->prepared;
  const delta_rule c = {o, d->tokens->states, num_tokens, tiles_per_task(o, d->tokens->states, d->step->num_threads), input,
                        heads, heads + 2 * num_tokens * o->num_key_heads * o->key_dim, output};
  FOR_TOKENS(w, num_tokens, prepare_delta_rule(&c, token, gates + token * o->gate_width))
  run_tasks(w, op, 0, apply_delta_rule_task, &c);
}

typedef struct {
  const operation* o;
  const decoder_step* tokens;
  const float* raw;  // [num_logits, size]; the logits themselves, if they need no scaling or softcap
  int64_t size;
} highest_search;

INLINE int shapes_logits(const operation* o) { return o->factor != 1.0f || o->softcap != 0.0f; }

static NOINLINE void shape_logits(const operation* o, const float* raw, float* logits, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) {
    floats values = load_some(raw + i, size - i) * splat(o->factor);
    if (o->softcap != 0.0f) values = splat(o->softcap) * hyperbolic_tangent(values / splat(o->softcap));
    store_some(logits + i, values, size - i);
  }
}

// A `task_function`: finishes the logits of a row and finds the highest; repeatable.
static void highest_task(const void* context, int64_t row, int64_t next) {
  const highest_search* c = context;
  float* logits = c->tokens->logits + row * c->size;
  if (c->raw != c->tokens->logits) shape_logits(c->o, c->raw + row * c->size, logits, c->size);
  floats highest = splat(-INFINITY);
  ints is_nan = {0};
  int has_nan = 0;
  int64_t i = 0, found = 0;
  (void)next;
  for (; i + LANES <= c->size; i += LANES) {
    const floats values = load_float(logits + i);
    highest = larger(values, highest);
    is_nan |= values != values;
  }
  for (int lane = 0; lane < LANES; lane++) has_nan |= is_nan[lane];
  float value = largest_lane(highest);
  for (; i < c->size; i++) {
    value = logits[i] > value ? logits[i] : value;
    has_nan |= isnan(logits[i]);
  }
  while (!has_nan && logits[found] != value) found++;
  c->tokens->highest[row] = has_nan ? -1 : found;
}

static void predict(walk* w, int64_t op, const float* input) {
  const decoding* d = w->d;
  const operation* o = &d->model->operations[op];
  const decoder_step* tokens = d->tokens;
  const int64_t size = o->linear->in_size, num_tokens = d->step->num_tokens;
  if (!d->is_few || omp_get_thread_num() == 0) {
    FOR_TOKENS(w, num_tokens, memcpy(tokens->hidden + token * size, input + token * size, sizeof(float) * (size_t)size))
  }
  if (!tokens->num_logits) return;
  settle(w);  // the tokens with logits may belong to other threads
  const void* prepared = prepare(w, o->linear, &d->head_groups, input, tokens->logit_rows);
  float* raw = shapes_logits(o) ? d->memory + d->raw_logits : tokens->logits;
  const product head = plain_product(o->linear, &d->head_groups, prepared, raw);
  run_tasks(w, op, 0, multiply_task, &head);
  const highest_search c = {o, tokens, raw, o->linear->out_size};
  run_tasks(w, op, 1, highest_task, &c);
}

// The thread that called `decode` runs the all-reduce, and the other threads wait for it. If tasks are repeatable, the
// output must not share memory with the input, because a late thread may still write to the input.
static void all_reduce(walk* w, int64_t op, const float* input, float* output, int64_t size) {
  decoding* d = w->d;
  task_list* tasks = &d->lists[op * LISTS];
  const size_t num_bytes = sizeof(float) * (size_t)(d->step->num_tokens * size);
  settle(w);
#pragma omp master
  {
    memcpy(d->tokens->exchanged, input, num_bytes);
    if (d->model->all_reduce() != DONE) atomic_store(&d->lost_at, op);
    memcpy(output, d->tokens->exchanged, num_bytes);
    finish_task(tasks, 0);
  }
  if (d->is_few) {
    // Yield the core meanwhile to the threads that communicate with other ranks.
    while (!atomic_load_explicit(&tasks->num_done, memory_order_acquire)) sched_yield();
  } else {
#pragma omp barrier
  }
}

// Carrying out the operations on one thread

static float* place_output(walk* w, int64_t op) {
  const decoding* d = w->d;
  const operation* o = &d->model->operations[op];
  const int64_t buffer = o->output;
  if (!buffer) return NULL;
  float* place = !d->is_few             ? d->memory + d->buffer_places[buffer]
                 : is_by_tasks(o->kind) ? d->memory + d->operation_places[op]
                                         : w->own + d->buffer_places[buffer];
  return w->places[buffer] = place;
}

static void run_operation(walk* w, int64_t op) {
  const decoding* d = w->d;
  const operation* o = &d->model->operations[op];
  const decoder_step* tokens = d->tokens;
  const int64_t num_tokens = d->step->num_tokens;
  float* input = o->input ? w->places[o->input] : NULL;
  float* output = place_output(w, op);
  const int64_t in_size = o->in_width, size = o->width;
  const float* update = o->update ? w->places[o->update] : NULL;
  const float* routes = o->routes ? w->places[o->routes] : NULL;
  switch (o->kind) {
    case OPERATION_EMBED:
      FOR_TOKENS(w, num_tokens, embed_token(o, tokens->token_ids[token], tokens->positions[token], output + token * size, size))
      break;
    case OPERATION_ADD:
      FOR_TOKENS(w, num_tokens, add_token(o, input + token * in_size, update + token * in_size, in_size))
      break;
    case OPERATION_NORMALIZE_PROJECTIONS:
      FOR_TOKENS(w, num_tokens, normalize_projections(o, input + token * size, output + token * size, size))
      break;
    case OPERATION_NORMALIZE:
      FOR_TOKENS(w, num_tokens, normalize_token(o, input + token * size, update ? update + token * size : NULL,
                                                output + token * size, size))
      break;
    case OPERATION_ACTIVATE:
      FOR_TOKENS(w, num_tokens, for (int64_t part = 0; part < o->num_parts; part++)
        activate_token(o, input + token * in_size + part * (in_size / o->num_parts),
                       output + token * size + part * (size / o->num_parts), size / o->num_parts))
      break;
    case OPERATION_ROUTE_TOP_K:
      FOR_TOKENS(w, num_tokens, route_tokens(&o->routing, input + token * in_size, output + token * size))
      break;
    case OPERATION_MULTIPLY_ROUTED: multiply_routed(w, op, input, in_size, output, routes); break;
    case OPERATION_COMBINE_EXPERTS:
      FOR_TOKENS(w, num_tokens, sum_slots(routes + token * 2 * o->routing.num_chosen, o->routing.num_chosen,
                                          input + token * in_size, output + token * size, size))
      break;
    case OPERATION_GATE:
      FOR_TOKENS(w, num_tokens, gate_token(input + token * size, w->places[o->gate] + token * o->gate_width, o->gate_width,
                                           output + token * size, size))
      break;
    case OPERATION_CLIP:
      FOR_TOKENS(w, num_tokens, clip_token(o, input + token * size, output + token * size, size))
      break;
    case OPERATION_NORMALIZE_GATED:
      FOR_TOKENS(w, num_tokens, normalize_gated(o, input + token * size, w->places[o->gate] + token * size,
                                                output + token * size, size))
      break;
    case OPERATION_CONVOLVE: convolve(w, op, input, output); break;
    case OPERATION_DELTA_RULE: apply_delta_rule(w, op, input, w->places[o->gate], output); break;
    case OPERATION_MULTIPLY: multiply(w, op, input, output); break;
    case OPERATION_QK_NORM_ROPE_STORE: turn(w, op, input, output); break;
    case OPERATION_ATTEND_PAGED: attend_tokens(w, op, input, output); break;
    case OPERATION_ALL_REDUCE: all_reduce(w, op, input, output, size); break;
    default: predict(w, op, input);
  }
}

static void decode_tokens(decoding* d) {
  walk w = {.d = d, .own = d->memory + d->own + omp_get_thread_num() * d->own_size, .is_settled = 1};
#pragma omp master
  d->last = nanoseconds();
  for (int64_t op = 0; op < d->model->num_operations; op++) {
    run_operation(&w, op);
    if (atomic_load(&d->lost_at) == op) break;
#pragma omp master
    {
      const int64_t now = nanoseconds();
      d->times[PART_OF[d->model->operations[op].kind]] += now - d->last;
      d->last = now;
    }
  }
}

// Preparation before the threads start

INLINE int64_t aligned(int64_t size) { return (size + 15) / 16 * 16; }

// Returns the number of floats of the prepared input of a matmul or a delta rule; 0 for other operations.
static int64_t prepared_floats(const decoding* d, const operation* o) {
  if (o->kind == OPERATION_MULTIPLY_ROUTED) {
    const int64_t num_slots = d->step->num_tokens * o->routing.num_chosen;
    return ceil_div(prepared_bytes(activation_kind(o->linear), num_slots, o->linear->in_size), (int64_t)sizeof(float));
  }
  if (o->kind == OPERATION_DELTA_RULE) return delta_rule_floats(o, d->step->num_tokens);
  if (o->kind != OPERATION_MULTIPLY && o->kind != OPERATION_LM_HEAD) return 0;
  const int64_t num_rows = o->kind == OPERATION_LM_HEAD ? d->tokens->num_logits : d->step->num_tokens;
  return ceil_div(prepared_bytes(activation_kind(o->linear), num_rows, o->linear->in_size), (int64_t)sizeof(float));
}

// Assigns a place in memory to each buffer. Returns the total number of floats.
static int64_t share_out(decoding* d) {
  const decoder* model = d->model;
  const int64_t num_tokens = d->step->num_tokens;
  int64_t buffers = 0, prepared = 0, rows = 0, total;
  for (int64_t i = 0; i < model->num_buffers; i++) {
    d->buffer_places[i] = buffers;
    buffers += aligned(model->widths[i] * num_tokens);
  }
  for (int64_t op = 0; op < model->num_operations; op++) {
    const operation* o = &model->operations[op];
    const int64_t size = prepared_floats(d, o);
    prepared = size > prepared ? size : prepared;
    if (o->kind != OPERATION_MULTIPLY_ROUTED) continue;
    const int64_t words = expert_rows_words(o->routing.num_experts, num_tokens * o->routing.num_chosen);
    rows = words > rows ? words : rows;
  }
  d->prepared = buffers;
  d->expert_rows = buffers + aligned(prepared);
  total = d->expert_rows + aligned(rows);
  d->own = 0;
  d->own_size = d->is_few ? total : 0;
  if (d->is_few) total *= d->step->num_threads;
  for (int64_t op = 0; op < model->num_operations; op++) {
    const operation* o = &model->operations[op];
    d->operation_places[op] = total;
    if (d->is_few && is_by_tasks(o->kind) && o->output) total += aligned(o->width * num_tokens);
    if (o->kind != OPERATION_LM_HEAD || !shapes_logits(o)) continue;
    d->raw_logits = total;
    total += aligned(d->tokens->num_logits * o->linear->out_size);
  }
  return total;
}

// Creates a work list for each kind of attention layers. Returns 0 if memory is exhausted.
static int list_works(decoding* d) {
  int num_lists = 0;
  for (int64_t op = 0; op < d->model->num_operations; op++) {
    const operation* o = &d->model->operations[op];
    if (o->kind != OPERATION_ATTEND_PAGED) continue;
    int found = 0;
    while (found < num_lists && !is_work_of(&d->works[found], o->attention)) found++;
    d->work_of[op] = found;
    if (found < num_lists) continue;
    const attention_step step = of_layer(d->step, o);
    if (!list_work(&step, &d->works[num_lists++])) return 0;
  }
  return 1;
}

// Sets the number of tasks in each list of an operation. Returns whether the tasks are repeatable.
static int count_tasks(const decoding* d, int64_t op, int64_t* counts) {
  const operation* o = &d->model->operations[op];
  counts[0] = counts[1] = 0;
  if (o->kind == OPERATION_MULTIPLY || o->kind == OPERATION_LM_HEAD) {
    const row_groups* groups = o->kind == OPERATION_LM_HEAD ? &d->head_groups : &d->groups;
    const product p = o->is_gated ? gated_product(o->linear, groups, NULL, NULL) : plain_product(o->linear, groups, NULL, NULL);
    counts[0] = num_product_tasks(&p);
    counts[1] = o->kind == OPERATION_LM_HEAD ? d->tokens->num_logits : 0;
  } else if (o->kind == OPERATION_MULTIPLY_ROUTED) {
    const int64_t num_slots = d->step->num_tokens * o->routing.num_chosen, num_experts = o->routing.num_experts;
    const int64_t num_used = num_slots < num_experts ? num_slots : num_experts;  // an upper bound
    counts[0] = num_used * num_expert_tasks(o->linear, (int)o->is_gated);
  } else if (o->kind == OPERATION_QK_NORM_ROPE_STORE) {
    counts[0] = ceil_div(d->step->num_tokens * (o->num_heads + o->num_kv_heads), HEADS_PER_TASK);
  } else if (o->kind == OPERATION_CONVOLVE) {
    counts[0] = ceil_div(o->width, channels_per_task(o, d->step->num_threads));
    return 0;  // a second run would read what the first run has written
  } else if (o->kind == OPERATION_DELTA_RULE) {
    const state_rows* rows = d->tokens->states;
    counts[0] = rows->num_rows * o->num_heads * ceil_div(num_tiles(o), tiles_per_task(o, rows, d->step->num_threads));
    return 0;
  } else if (o->kind == OPERATION_ALL_REDUCE) {
    counts[0] = 1;
    return 0;  // the all-reduce must run only once
  } else if (o->kind == OPERATION_ATTEND_PAGED) {
    const work_list* list = &d->works[d->work_of[op]];
    counts[0] = list->num_items;
    counts[1] = list->partials ? list->num_items : 0;
    return d->is_few && !list->partials;  // all operations share the memory of the partial results
  }
  return d->is_few;
}

// Returns the task lists of all operations, or NULL if memory is exhausted.
static task_list* list_tasks(const decoding* d) {
  const int64_t num_operations = d->model->num_operations;
  int64_t counts[LISTS], total = 0;
  for (int64_t op = 0; op < num_operations; op++) {
    count_tasks(d, op, counts);
    total += counts[0] + counts[1];
  }
  const size_t size = sizeof(task_list) * (size_t)(num_operations * LISTS);
  task_list* tasks = aligned_alloc(64, size + (size_t)(total + 63) / 64 * 64);
  if (!tasks) return NULL;
  memset(tasks, 0, size + (size_t)total);
  _Atomic uint8_t* done = (_Atomic uint8_t*)((char*)tasks + size);
  for (int64_t op = 0; op < num_operations; op++) {
    const int is_repeatable = count_tasks(d, op, counts);
    for (int i = 0; i < LISTS; i++, done += counts[i - 1]) {
      tasks[op * LISTS + i].num_tasks = counts[i];
      tasks[op * LISTS + i].done = is_repeatable ? done : NULL;
    }
  }
  return tasks;
}

// Returns 0 if memory is exhausted.
static int prepare_step(decoding* d) {
  const decoder* model = d->model;
  d->works = calloc((size_t)model->num_operations, sizeof(work_list));
  d->work_of = calloc((size_t)model->num_operations, sizeof(int));
  d->buffer_places = calloc((size_t)(model->num_buffers + model->num_operations), sizeof(int64_t));
  if (!d->works || !d->work_of || !d->buffer_places) return 0;
  d->operation_places = d->buffer_places + model->num_buffers;
  d->memory = aligned_alloc(64, sizeof(float) * (size_t)share_out(d));
  if (!d->memory || !list_works(d)) return 0;
  d->lists = list_tasks(d);
  return d->lists != NULL;
}

int64_t is_gateable(const linear_layer* layer) { return can_gate(layer); }

// Below this number of multiplications, a second thread costs more than it saves.
enum { MIN_PARALLEL_PRODUCTS = 1 << 22 };

// Returns the number of multiplications of a whole step: of matmuls, of attention to keys and values, and with states.
static int64_t count_products(const decoder* model, const attention_step* step, int64_t num_logits) {
  int64_t num_positions = 0, num_products = 0;
  for (int64_t row = 0; row < step->num_rows; row++)
    num_positions += step->seq_lens[row] * (step->query_start_loc[row + 1] - step->query_start_loc[row]);
  for (int64_t op = 0; op < model->num_operations; op++) {
    const operation* o = &model->operations[op];
    const int64_t num_weights = o->linear ? o->linear->in_size * o->linear->out_size : 0;  // of one expert
    num_products += o->kind == OPERATION_MULTIPLY          ? num_weights * step->num_tokens
                    : o->kind == OPERATION_MULTIPLY_ROUTED ? num_weights * o->routing.num_chosen * step->num_tokens
                    : o->kind == OPERATION_LM_HEAD         ? num_weights * num_logits
                    : o->kind == OPERATION_ATTEND_PAGED    ? 2 * num_positions * o->num_heads * o->head_dim
                    : o->kind == OPERATION_DELTA_RULE      ? 4 * step->num_tokens * o->width * o->key_dim
                                                           : 0;
  }
  return num_products;
}

int64_t decode(const decoder* model, const attention_step* given, decoder_step* tokens) {
  attention_step own = *given;
  const attention_step* step = &own;
  if (count_products(model, given, tokens->num_logits) < MIN_PARALLEL_PRODUCTS) own.num_threads = 1;
  decoding d = {.model = model, .step = step, .tokens = tokens, .groups = group_rows(step->num_tokens),
                .head_groups = group_rows(tokens->num_logits), .is_few = step->num_tokens <= FEW_TOKENS, .times = tokens->times, .lost_at = -1};
  const int is_ready = prepare_step(&d);
  memset(tokens->times, 0, sizeof tokens->times);
  if (is_ready) {
#pragma omp parallel num_threads((int)step->num_threads) if (step->num_threads > 1)
    decode_tokens(&d);
  }
  if (d.works)
    for (int64_t op = 0; op < model->num_operations; op++) free_work(&d.works[op]);
  free(d.works);
  free(d.work_of);
  free(d.buffer_places);
  free(d.lists);
  free(d.memory);
  return !is_ready ? NO_MEMORY : d.lost_at < 0 ? DONE : LOST_RANKS;
}
