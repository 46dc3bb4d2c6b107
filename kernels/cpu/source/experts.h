// Mixture of experts: routing tokens, and multiplying tokens by the weights of their experts. kernels/experts.py
// specifies the results and the terms. A *slot* is one pair of token and chosen expert. Slots are [num_tokens *
// num_chosen, width], and the slots of a token are in the order of its expert ids.
//
// The *routes* of a token are [2 * num_chosen] words: the ids of its experts, ascending, as integers, then their
// weights.

static const float MIN_SUM = 1e-20f;

INLINE const int32_t* ids_of(const float* routes) { return (const int32_t*)routes; }
INLINE const float* weights_of(const float* routes, int64_t num_chosen) { return routes + num_chosen; }

// logits: [MAX_EXPERTS]; entries after the last expert are -infinity.
static void score_experts(const expert_routing* c, const float* logits, float* scores) {
  floats highest = splat(-INFINITY), sums = splat(0.0f);
  for (int64_t i = 0; i < c->num_experts; i += LANES) highest = larger(load_float(logits + i), highest);
  const floats top = splat(largest_lane(highest));
  for (int64_t i = 0; i < c->num_experts; i += LANES) {
    const floats x = load_float(logits + i);
    const floats score = c->scoring == SCORING_SIGMOID ? splat(1.0f) / (splat(1.0f) + exponential(-x)) : exponential(x - top);
    store_float(scores + i, score);
    sums += score;
  }
  if (c->scoring == SCORING_SIGMOID) return;
  const floats sum = splat(sum_lanes(sums));
  for (int64_t i = 0; i < c->num_experts; i += LANES) store_float(scores + i, load_float(scores + i) / sum);
}

// Finds the indexes of the `num` highest values, in descending order of the values. Of equal values, the first one
// comes first. found: [num], the values.
static void rank_highest(const float* values, int64_t num_values, int64_t num, int32_t* places, float* found) {
  int64_t num_found = 0;
  for (int64_t i = 0; i < num_values; i++) {
    const float value = values[i];
    if (num_found == num && !(value > found[num - 1])) continue;
    int64_t at = num_found < num ? num_found++ : num - 1;
    for (; at > 0 && value > found[at - 1]; at--) {
      found[at] = found[at - 1];
      places[at] = places[at - 1];
    }
    found[at] = value;
    places[at] = (int32_t)i;
  }
}

// ranks: [num_experts]; set to -infinity for the experts of groups that are not chosen.
static void choose_groups(const expert_routing* c, float* ranks) {
  const int64_t size = c->num_experts / c->num_groups;
  float best[MAX_EXPERTS], found[MAX_EXPERTS];
  int32_t places[MAX_EXPERTS];
  for (int64_t g = 0; g < c->num_groups; g++) {
    rank_highest(ranks + g * size, size, size < 2 ? size : 2, places, found);
    best[g] = size < 2 ? found[0] : found[0] + found[1];
  }
  uint8_t is_chosen[MAX_EXPERTS] = {0};
  rank_highest(best, c->num_groups, c->num_chosen_groups, places, found);
  for (int64_t i = 0; i < c->num_chosen_groups; i++) is_chosen[places[i]] = 1;
  for (int64_t i = 0; i < c->num_experts; i++) ranks[i] = is_chosen[i / size] ? ranks[i] : -INFINITY;
}

INLINE void sort_ids(int32_t* ids, int64_t num) {
  for (int64_t i = 1; i < num; i++) {
    const int32_t id = ids[i];
    int64_t at = i;
    for (; at > 0 && ids[at - 1] > id; at--) ids[at] = ids[at - 1];
    ids[at] = id;
  }
}

// Sets the scores of the chosen experts. ids: [num_chosen], the best first. left: the logits; overwritten.
static void mix_sparsely(const expert_routing* c, const int32_t* ids, float* left, float* scores) {
  for (int64_t nth = 0; nth < c->num_chosen; nth++) {
    const float top = left[ids[nth]];
    float sum = 0.0f;
    for (int64_t i = 0; i < c->num_experts; i++) {
      const int is_far = (top - left[i]) / fmaxf(fabsf(left[i]), top) > 2.0f * c->jitter;
      sum += is_far ? 0.0f : expf(left[i] - top);
    }
    scores[ids[nth]] = 1.0f / sum;
    left[ids[nth]] = -INFINITY;
  }
}

// logits: [num_experts]. routes: the token's routes.
static NOINLINE void route_tokens(const expert_routing* c, const float* logits, float* routes) {
  float padded[MAX_EXPERTS], scores[MAX_EXPERTS], ranks[MAX_EXPERTS];
  int32_t* ids = (int32_t*)routes;
  float* weights = routes + c->num_chosen;
  for (int64_t i = 0; i < (c->num_experts + LANES - 1) / LANES * LANES; i++)
    padded[i] = i < c->num_experts ? logits[i] : -INFINITY;
  score_experts(c, padded, scores);
  // Scores are monotonic, but rounding could make the scores of different logits equal. Scores of groups are added up.
  const int has_groups = c->scoring == SCORING_SIGMOID && c->num_groups > 1;
  const float* ranked = has_groups || c->correction ? scores : padded;
  for (int64_t i = 0; i < c->num_experts; i++) {
    const float rank = ranked[i] + (c->correction ? c->correction[i] : 0.0f);
    ranks[i] = isnan(rank) ? INFINITY : rank;  // a NaN is chosen, so that it reaches the output
  }
  if (c->num_groups > 1) choose_groups(c, ranks);
  rank_highest(ranks, c->num_experts, c->num_chosen, ids, weights);
  if (c->scoring == SCORING_SPARSE_MIXER) mix_sparsely(c, ids, padded, scores);
  sort_ids(ids, c->num_chosen);
  float sum = MIN_SUM;
  for (int64_t i = 0; i < c->num_chosen; i++) sum += weights[i] = scores[ids[i]];
  for (int64_t i = 0; i < c->num_chosen; i++) weights[i] = (c->renormalizes ? weights[i] / sum : weights[i]) * c->factor;
}

// The slots of each expert. They are grouped by expert, in the order of tokens, and form the *rows* of the expert's
// matmul.
typedef struct {
  int32_t* num_used;  // [1]: number of experts that have slots
  int32_t* used;      // [num_experts]: the experts that have slots, ascending
  int32_t* starts;   // [num_experts + 1]: the first row of each expert, with or without slots
  int32_t* slots;    // [num_slots]: the slot of each row
  int32_t* rows;     // [num_slots]: the row of each slot
} expert_rows;

INLINE int64_t expert_rows_words(int64_t num_experts, int64_t num_slots) { return 2 * (1 + num_experts + num_slots); }

INLINE expert_rows place_expert_rows(void* memory, int64_t num_experts, int64_t num_slots) {
  int32_t* words = memory;
  return (expert_rows){.num_used = words,
                       .used = words + 1,
                       .starts = words + 1 + num_experts,
                       .slots = words + 2 * (1 + num_experts),
                       .rows = words + 2 * (1 + num_experts) + num_slots};
}

// routes: [num_tokens, 2 * num_chosen].
static void sort_slots(const float* routes, int64_t num_tokens, int64_t num_chosen, int64_t num_experts,
                       const expert_rows* rows) {
  int32_t* starts = rows->starts;
  memset(starts, 0, sizeof *starts * (size_t)(num_experts + 1));
  for (int64_t token = 0; token < num_tokens; token++)
    for (int64_t i = 0; i < num_chosen; i++) starts[ids_of(routes + token * 2 * num_chosen)[i] + 1]++;
  for (int64_t expert = 0; expert < num_experts; expert++) starts[expert + 1] += starts[expert];
  // Each start advances to the next expert's start while its rows are assigned; the memmove below shifts them back.
  for (int64_t token = 0; token < num_tokens; token++)
    for (int64_t i = 0; i < num_chosen; i++) {
      const int64_t slot = token * num_chosen + i;
      const int32_t row = starts[ids_of(routes + token * 2 * num_chosen)[i]]++;
      rows->slots[row] = (int32_t)slot;
      rows->rows[slot] = row;
    }
  memmove(starts + 1, starts, sizeof *starts * (size_t)num_experts);
  starts[0] = 0;
  *rows->num_used = 0;
  for (int64_t expert = 0; expert < num_experts; expert++)
    if (starts[expert + 1] > starts[expert]) rows->used[(*rows->num_used)++] = (int32_t)expert;
}

INLINE int64_t num_rows_of(const expert_rows* rows, int64_t expert) {
  return rows->starts[expert + 1] - rows->starts[expert];
}

// The matmuls of all slots with the weights of their experts.
typedef struct {
  const linear_layer* layers;  // [num_experts], of the same sizes and activation
  const expert_rows* rows;
  const void* x;  // prepared: the rows of each expert separately, expert after expert
  float* y;       // [num_slots, out_size]; if gated, [num_slots, out_size / 2]
  int is_gated;
} expert_products;

// Prepares the row of a slot.
static void prepare_slot(const expert_products* p, int64_t expert, int64_t slot, const float* x, void* prepared) {
  const linear_layer* layer = p->layers;
  const int64_t kind = activation_kind(layer), start = p->rows->starts[expert];
  const row_groups groups = group_rows(num_rows_of(p->rows, expert));
  char* of_expert = (char*)prepared + start * prepared_row_bytes(kind, layer->in_size);
  prepare_row(kind, &groups, p->rows->rows[slot] - start, x, layer->in_size, of_expert);
}

// Returns the matmul of the `nth` expert that has slots. Sets `groups` to its row groups.
static product expert_product(const expert_products* p, int64_t nth, row_groups* groups) {
  const int64_t expert = p->rows->used[nth], start = p->rows->starts[expert];
  const linear_layer* layer = &p->layers[expert];
  *groups = group_rows(num_rows_of(p->rows, expert));
  const char* x = (const char*)p->x + start * prepared_row_bytes(activation_kind(layer), layer->in_size);
  product of_expert = p->is_gated ? gated_product(layer, groups, x, p->y) : plain_product(layer, groups, x, p->y);
  of_expert.places = p->rows->slots + start;
  of_expert.panels_per_task = PANELS_PER_EXPERT_TASK;
  return of_expert;
}

// Returns the number of tasks of each expert.
INLINE int64_t num_expert_tasks(const linear_layer* layer, int is_gated) {
  return ceil_div(ceil_div(layer->out_size, PANEL) / (is_gated ? 2 : 1), PANELS_PER_EXPERT_TASK);
}

// A `task_function`; repeatable.
static void multiply_experts_task(const void* context, int64_t task, int64_t next) {
  const expert_products* p = context;
  const int64_t num = num_expert_tasks(p->layers, p->is_gated);
  row_groups groups, next_groups;
  const product now = expert_product(p, task / num, &groups);
  if (next < 0) {
    multiply_panels(&now, task % num, NULL, 0);
    return;
  }
  const product then = expert_product(p, next / num, &next_groups);
  multiply_panels(&now, task % num, &then, next % num);
}

// slots: [num_chosen, size], the slots of one token.
static NOINLINE void sum_slots(const float* routes, int64_t num_chosen, const float* slots, float* output,
                               int64_t size) {
  const float* weights = weights_of(routes, num_chosen);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    floats total = splat(0.0f);
    for (int64_t nth = 0; nth < num_chosen; nth++)
      total = multiply_add(load_float(slots + nth * size + i), splat(weights[nth]), total);
    store_float(output + i, total);
  }
  for (; i < size; i++) {
    output[i] = 0.0f;
    for (int64_t nth = 0; nth < num_chosen; nth++) output[i] += slots[nth * size + i] * weights[nth];
  }
}

int64_t multiply_experts(const linear_layer* layers, int64_t num_experts, const int64_t* ids, const float* x,
                         int64_t rows_of_token, float* y, int64_t num_tokens, int64_t num_chosen, int64_t num_threads) {
  const int64_t num_slots = num_tokens * num_chosen, in_size = layers->in_size, kind = activation_kind(layers);
  if (num_slots == 0) return DONE;
  float* routes = calloc((size_t)num_slots, 2 * sizeof(float));
  int32_t* memory = calloc((size_t)expert_rows_words(num_experts, num_slots), sizeof(int32_t));
  void* prepared = aligned_alloc(64, (size_t)ceil_div(prepared_bytes(kind, num_slots, in_size), 64) * 64);
  const int is_ready = routes && memory && prepared;
  if (is_ready) {
    for (int64_t slot = 0; slot < num_slots; slot++)
      ((int32_t*)routes)[slot / num_chosen * 2 * num_chosen + slot % num_chosen] = (int32_t)ids[slot];
    const expert_rows rows = place_expert_rows(memory, num_experts, num_slots);
    sort_slots(routes, num_tokens, num_chosen, num_experts, &rows);
    const expert_products p = {layers, &rows, prepared, y, 0};
    task_list tasks = {.num_tasks = *rows.num_used * num_expert_tasks(layers, 0)};
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(static)
      for (int64_t slot = 0; slot < num_slots; slot++)
        prepare_slot(&p, ids[slot], slot, x + (rows_of_token == 1 ? slot / num_chosen : slot) * in_size, prepared);
      share_tasks(&tasks, multiply_experts_task, &p);
    }
  }
  free(routes);
  free(memory);
  free(prepared);
  return is_ready ? DONE : NO_MEMORY;
}
