// Matmuls with weights of any element type. Each output is the sum of running sums over RUN inputs each. This order
// does not depend on the other rows, so a row's outputs do not depend on other rows.

INLINE arithmetic layer_arithmetic(const linear_layer* layer) {
#if defined(HAS_BFLOAT16_DOTS)
  if (layer->element == ELEMENT_BFLOAT16 && layer->activation == ELEMENT_BFLOAT16) return pair_arithmetic();
#endif
  switch (layer->element) {
    case ELEMENT_INT8:
    case ELEMENT_INT6:
    case ELEMENT_INT4: return integer_arithmetic(layer);
    case ELEMENT_FLOAT8_E4M3FN: return float8_arithmetic(layer);
    case ELEMENT_FLOAT32: return arithmetic_float();
    case ELEMENT_BFLOAT16: return arithmetic_bfloat16();
    default: return arithmetic_float16();
  }
}

// Returns the element type to which a layer's matmul rounds its input.
INLINE int64_t activation_kind(const linear_layer* layer) { return layer->activation; }

INLINE int64_t panels_of_tasks(const row_groups* groups, int64_t num_panels) {
  return groups->num_rows > 1 && num_panels < FEW_PANELS ? 1 : PANELS_PER_TASK;
}

INLINE product plain_product(const linear_layer* layer, const row_groups* groups, const void* x, float* y) {
  const int64_t num_panels = ceil_div(layer->out_size, PANEL);
  return (product){.layer = layer,
                   .by = layer_arithmetic(layer),
                   .groups = groups,
                   .x = x,
                   .y = y,
                   .num_panels = num_panels,
                   .panels_per_task = panels_of_tasks(groups, num_panels)};
}

INLINE int can_gate(const linear_layer* layer) { return layer->out_size % (2 * PANEL) == 0; }

INLINE product gated_product(const linear_layer* layer, const row_groups* groups, const void* x, float* y) {
  product p = plain_product(layer, groups, x, y);
  p.is_gated = 1;
  p.num_panels /= 2;
  p.panels_per_task = panels_of_tasks(groups, p.num_panels);
  return p;
}

INLINE int64_t num_product_tasks(const product* p) { return ceil_div(p->num_panels, p->panels_per_task); }

INLINE int64_t num_units(const product* p) { return ceil_div(p->layer->in_size, p->by.unit); }

INLINE const char* nth_panel(const product* p, int64_t panel) {
  return (const char*)p->layer->panels + panel * num_units(p) * p->by.weight_bytes;
}

// Multiplies one row with four panels from `panel` on. This alone is as fast as memory, except with 4-bit codes, whose
// multiplication takes as long as their transfer. For these, four panels of `later` are prefetched meanwhile, unless
// `later` is NULL.
static void multiply_row(const product* p, int64_t panel, const product* later, int64_t later_panel) {
  const int64_t num = num_units(p), run = p->by.run, stride = later ? 4 * p->by.turn * p->by.weight_bytes : 0;
  float totals[2][4 * PANEL] __attribute__((aligned(64))) = {{0}};
  for (int half = 0; half <= p->is_gated; half++) {
    const char* weights = nth_panel(p, panel + half * p->num_panels);
    const char* ahead = later ? nth_panel(later, later_panel + half * later->num_panels) : NULL;
    for (int64_t start = 0; start < num; start += run)
      p->by.runs[0](p->layer, weights + start * p->by.weight_bytes, num * p->by.weight_bytes,
                (const char*)p->x + start * p->by.row_bytes, num - start < run ? num - start : run,
                later ? ahead + 4 * start * p->by.weight_bytes : NULL, stride, totals[half]);
  }
  store_products(p, 0, 1, panel * PANEL, 4 * PANEL, totals[0], totals[1]);
}

// totals: [num_groups, rows of a group, PANEL], initially 0, += the results of one panel. The runs of the panel are
// computed one after the other, so that a run stays in the nearest cache while all groups use it. Meanwhile each group
// prefetches its part of the same run of the panel at `ahead`.
static void multiply_panel(const product* p, int64_t panel, int64_t first_group, int64_t num_groups, const char* ahead,
                           float (*totals)[GROUP_ROWS * PANEL]) {
  const arithmetic* by = &p->by;
  const int64_t num = num_units(p), run = by->run;
  const int64_t stride = by->turn * by->weight_bytes / p->groups->num_groups;
  const int64_t row_size = prepared_row_bytes(p->layer->activation, p->layer->in_size);
  for (int64_t start = 0; start < num; start += run) {
    const int64_t length = num - start < run ? num - start : run, part = length / by->turn * stride;
    const char* weights = nth_panel(p, panel) + start * by->weight_bytes;
    const char* fetched = ahead + start * by->weight_bytes + first_group * part;
    for (int64_t g = 0; g < num_groups; g++, fetched += part) {
      const row_group group = nth_group(p->groups, first_group + g);
      const char* x = (const char*)p->x + group.start * row_size + start * by->row_bytes * group.num_rows;
      by->runs[group.num_rows](p->layer, weights, 0, x, length, fetched, stride, totals[g]);
    }
  }
}

// Computes one panel. Another panel, of the same or a similar matmul, is computed later and is prefetched meanwhile.
static void multiply_groups(const product* p, int64_t panel, const product* later, int64_t later_panel) {
  for (int64_t first = 0; first < p->groups->num_groups; first += MAX_GROUPS) {
    const int64_t rest = p->groups->num_groups - first, num_groups = rest < MAX_GROUPS ? rest : MAX_GROUPS;
    float totals[2][MAX_GROUPS][GROUP_ROWS * PANEL] __attribute__((aligned(64)));
    for (int half = 0; half <= p->is_gated; half++) {
      const int64_t skipped = half * p->num_panels;
      memset(totals[half], 0, sizeof totals[half][0] * (size_t)num_groups);
      multiply_panel(p, panel + skipped, first, num_groups, nth_panel(later, later_panel + skipped), totals[half]);
    }
    for (int64_t g = 0; g < num_groups; g++) {
      const row_group group = nth_group(p->groups, first + g);
      store_products(p, group.start, group.num_rows, panel * PANEL, PANEL, totals[0][g], totals[1][g]);
    }
  }
}

// Computes the panels of a task. Each panel prefetches the panel that is computed AHEAD panels later. At the end of the
// task that is a panel of the thread's next task, which belongs to `then` (NULL: there is no next task).
static void multiply_panels(const product* p, int64_t task, const product* then, int64_t next) {
#if defined(HAS_TILES)
  const int64_t largest = nth_group(p->groups, 0).num_rows;
  const int uses_tiles = p->by.uses_tiles && largest >= MIN_TILE_ROWS;
  if (uses_tiles) shape_tiles(p->layer, largest);  // other code of this thread may have changed the shapes
#endif
  int64_t panel = task * p->panels_per_task;
  const int64_t first = next * p->panels_per_task;  // the first panel of the next task, in `then`
  const int64_t end = panel + p->panels_per_task < p->num_panels ? panel + p->panels_per_task : p->num_panels;
  if (p->groups->num_rows == 1)
    for (; panel + 4 <= end; panel += 4) {
      const int is_of_task = panel + 8 <= end;
      const product* of = is_of_task ? p : then;
      const int64_t later = is_of_task ? panel + 4 : first;
      const int fetches = p->layer->element == ELEMENT_INT4 && of && later + 4 <= of->num_panels;
      multiply_row(p, panel, fetches ? of : NULL, later);
    }
  for (; panel < end; panel++) {
    const int is_of_task = panel + AHEAD < end;
    const int64_t later = is_of_task ? panel + AHEAD : first + panel + AHEAD - end;
    if (is_of_task || (then && later < then->num_panels))
      multiply_groups(p, panel, is_of_task ? p : then, later);
    else
      multiply_groups(p, panel, p, panel);
  }
#if defined(HAS_TILES)
  if (uses_tiles) release_tiles();
#endif
}

// A `task_function` for a matmul; repeatable. `next`: -1 if there is no next task.
static void multiply_task(const void* context, int64_t task, int64_t next) {
  multiply_panels(context, task, next < 0 ? NULL : context, next);
}

int64_t packed_bytes(const linear_layer* layer) {
  const arithmetic by = layer_arithmetic(layer);
  return ceil_div(layer->out_size, PANEL) * ceil_div(layer->in_size, by.unit) * by.weight_bytes;
}

// Reads a row of packed weights as float32, for embeddings.
static void take_row(const linear_layer* layer, int64_t index, float* row) {
  switch (layer->element) {
    case ELEMENT_FLOAT32: lookup_rows_float(layer->panels, &index, row, 1, layer->in_size); break;
    case ELEMENT_BFLOAT16: lookup_rows_bfloat16(layer->panels, &index, row, 1, layer->in_size); break;
    case ELEMENT_FLOAT16: lookup_rows_float16(layer->panels, &index, row, 1, layer->in_size); break;
    case ELEMENT_FLOAT8_E4M3FN: take_float8_row(layer, index, row); break;
    default: take_quantized_row(layer, index, row);
  }
}

int64_t lookup_rows(const linear_layer* layer, const int64_t* indexes, float* output, int64_t num_indexes) {
  for (int64_t n = 0; n < num_indexes; n++) take_row(layer, indexes[n], output + n * layer->in_size);
  return DONE;
}

int64_t linear(const linear_layer* layer, const float* x, float* y, int64_t num_rows, int64_t num_threads) {
  const row_groups groups = group_rows(num_rows);
  const int64_t kind = activation_kind(layer);
  if (num_rows == 0) return DONE;
  void* prepared = aligned_alloc(64, (size_t)ceil_div(prepared_bytes(kind, num_rows, layer->in_size), 64) * 64);
  if (!prepared) return NO_MEMORY;
  const product p = plain_product(layer, &groups, prepared, y);
  task_list tasks = {.num_tasks = num_product_tasks(&p)};
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
  {
    prepare_rows(kind, &groups, x, layer->in_size, prepared);
    share_tasks(&tasks, multiply_task, &p);
  }
  free(prepared);
  return DONE;
}
