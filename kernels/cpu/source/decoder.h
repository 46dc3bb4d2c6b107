// A decoder-only transformer (Llama, Mistral, Qwen2, Qwen3) over one step, from embeddings to final hidden states, in one
// region of threads: they meet after each part of a layer instead of being sent home. Activations and cache are float32,
// weights of any element type.

// `decoder.py` mirrors these structures.
typedef struct {
  const float *attention_norm, *mlp_norm;  // [hidden_size]
  const float *query_norm, *key_norm;      // [head_dim], or NULL
  linear_layer qkv, output, gate_up, down;
  float *key_cache, *value_cache;
  int64_t window;  // positions that a query attends to, its own included; 0: all up to its own
} decoder_layer;

typedef struct {
  const decoder_layer* layers;
  const float* norm;  // [hidden_size]
  int64_t num_layers, hidden_size, intermediate_size;
  float eps;
} decoder;

// Which of a step's parts takes how long. `decoder.py` mirrors their order.
enum { NORMS, PRODUCTS, ROTARY, ATTENTION, ACTIVATION, NUM_PARTS };

typedef struct {
  int64_t last;              // nanoseconds on the clock
  int64_t parts[NUM_PARTS];  // nanoseconds
} step_times;

// What all threads of a step share.
typedef struct {
  const decoder* model;
  const attention_step* step;
  row_groups groups;
  const float *cos, *sin;  // [num_tokens, head_dim]
  float *x, *update;       // [num_tokens, hidden_size]: the residual stream, and what a layer adds to it
  float* normed;           // [num_tokens, hidden_size]
  float* heads;            // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
  float* attended;         // [num_tokens, num_heads, head_dim]
  float* gate_up;          // [num_tokens, 2 * intermediate_size]
  float* interleaved;      // of the widest input of a matrix product
  step_times* times;
} decoding;

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Books the time since the last call to a part. Called by all threads after they have met.
static void end_part(const decoding* d, int part) {
#pragma omp master
  {
    const int64_t now = nanoseconds();
    d->times->parts[part] += now - d->times->last;
    d->times->last = now;
  }
}

// x += update where there is one; normed = norm(x).
static void norm_tokens(const decoding* d, const float* weight, const float* update, float* normed) {
  const int64_t size = d->model->hidden_size;
#pragma omp for schedule(static)
  for (int64_t token = 0; token < d->step->num_tokens; token++) {
    if (update) add_float(d->x + token * size, update + token * size, size);
    normalize_float(d->x + token * size, weight, normed + token * size, size, d->model->eps);
  }
}

// interleaved = norm(x), after x += update where there is one.
static void norm_into_groups(const decoding* d, const float* weight, const float* update) {
  const int64_t size = d->model->hidden_size;
#pragma omp for schedule(static)
  for (int64_t token = 0; token < d->step->num_tokens; token++) {
    float *x = d->x + token * size, *normed = d->normed + token * size;
    if (update) add_float(x, update + token * size, size);
    normalize_float(x, weight, normed, size, d->model->eps);
    interleave_row(&d->groups, token, normed, size, d->interleaved);
  }
}

static void turn_and_store_heads(const decoding* d, const decoder_layer* layer) {
  const attention_step* step = d->step;
  const int64_t size = step->head_dim, num_turned = step->num_heads + step->num_kv_heads;
#pragma omp for schedule(static)
  for (int64_t token = 0; token < step->num_tokens; token++) {
    float* heads = d->heads + token * step->query_token_stride;
    for (int64_t head = 0; head < num_turned; head++) {
      const float* weight = head < step->num_heads ? layer->query_norm : layer->key_norm;
      if (weight) normalize_float(heads + head * size, weight, heads + head * size, size, d->model->eps);
      rotate_float(heads + head * size, d->cos + token * size, d->sin + token * size, size);
    }
    store_token_float(step, token, heads + step->num_heads * size, heads + num_turned * size, layer->key_cache,
                      layer->value_cache);
  }
}

static void silu_into_groups(const decoding* d) {
  const int64_t size = d->model->intermediate_size;
#pragma omp for schedule(static)
  for (int64_t token = 0; token < d->step->num_tokens; token++) {
    float* gate_up = d->gate_up + token * 2 * size;
    silu_mul_token_float(gate_up, gate_up + size, gate_up, size);
    interleave_row(&d->groups, token, gate_up, size, d->interleaved);
  }
}

static void decode_layer(const decoding* d, const decoder_layer* layer, const work_list* list, const float* update) {
  attention_step step = *d->step;
  step.window = layer->window;
  norm_into_groups(d, layer->attention_norm, update);
  end_part(d, NORMS);
  multiply(&layer->qkv, &d->groups, d->interleaved, d->heads);
  end_part(d, PRODUCTS);
  turn_and_store_heads(d, layer);
  end_part(d, ROTARY);
  attend_items_float(&step, list, d->heads, layer->key_cache, layer->value_cache, d->attended);
  interleave_rows(&d->groups, d->attended, step.num_heads * step.head_dim, d->interleaved);
  end_part(d, ATTENTION);
  multiply(&layer->output, &d->groups, d->interleaved, d->update);
  end_part(d, PRODUCTS);
  norm_into_groups(d, layer->mlp_norm, d->update);
  end_part(d, NORMS);
  multiply(&layer->gate_up, &d->groups, d->interleaved, d->gate_up);
  end_part(d, PRODUCTS);
  silu_into_groups(d);
  end_part(d, ACTIVATION);
  multiply(&layer->down, &d->groups, d->interleaved, d->update);
  end_part(d, PRODUCTS);
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

// One allocation for all that a step computes in. NULL if there is none.
static float* share_out(decoding* d) {
  const attention_step* step = d->step;
  const int64_t hidden = d->model->hidden_size, intermediate = d->model->intermediate_size;
  const int64_t attended = step->num_heads * step->head_dim;
  int64_t widest = hidden > intermediate ? hidden : intermediate;
  widest = widest > attended ? widest : attended;
  const int64_t sizes[] = {hidden, hidden, step->query_token_stride, attended, 2 * intermediate, widest};
  float** parts[] = {&d->update, &d->normed, &d->heads, &d->attended, &d->gate_up, &d->interleaved};
  int64_t total = 0;
  for (int i = 0; i < 6; i++) total += (sizes[i] * step->num_tokens + 15) / 16 * 16;
  float* memory = aligned_alloc(64, (size_t)total * sizeof(float));
  if (!memory) return NULL;
  float* next = memory;
  for (int i = 0; i < 6; i++) {
    *parts[i] = next;
    next += (sizes[i] * step->num_tokens + 15) / 16 * 16;
  }
  return memory;
}

// x: [num_tokens, hidden_size], embeddings that are overwritten; hidden: [num_tokens, hidden_size], normed; times:
// [NUM_PARTS] nanoseconds. 0, or 1 if there is no memory.
int decode(const decoder* model, const attention_step* step, float* x, const float* cos, const float* sin, float* hidden,
           int64_t* times) {
  step_times clock = {.last = nanoseconds()};
  decoding d = {.model = model, .step = step, .groups = group_rows(step->num_tokens), .cos = cos, .sin = sin, .x = x,
                .times = &clock};
  work_list* lists = calloc((size_t)model->num_layers, sizeof(work_list));
  int* list_of_layer = malloc(sizeof(int) * (size_t)model->num_layers);
  float* memory = share_out(&d);
  const int is_ready = lists && list_of_layer && memory && list_layers(model, step, lists, list_of_layer);
  if (is_ready) {
#pragma omp parallel num_threads((int)step->num_threads) if (step->num_threads > 1)
    {
      for (int64_t l = 0; l < model->num_layers; l++)
        decode_layer(&d, &model->layers[l], &lists[list_of_layer[l]], l ? d.update : NULL);
      norm_tokens(&d, model->norm, d.update, hidden);
      end_part(&d, NORMS);
    }
    memcpy(times, clock.parts, sizeof clock.parts);
  }
  if (lists)
    for (int64_t l = 0; l < model->num_layers; l++) free_work(&lists[l]);
  free(lists);
  free(list_of_layer);
  free(memory);
  return !is_ready;
}
