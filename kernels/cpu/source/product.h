// Matrix products with weights of any element type.

INLINE product plain_product(const linear_layer* layer, const row_groups* groups, const void* x, float* y) {
  return (product){.layer = layer, .groups = groups, .x = x, .y = y, .num_panels = (layer->out_size + PANEL - 1) / PANEL};
}

INLINE int can_gate(const linear_layer* layer) { return layer->out_size % (2 * PANEL) == 0; }

INLINE product gated_product(const linear_layer* layer, const row_groups* groups, const void* x, float* y) {
  product p = plain_product(layer, groups, x, y);
  p.is_gated = 1;
  p.num_panels /= 2;
  return p;
}

INLINE int64_t num_product_tasks(const product* p) { return (p->num_panels + PANELS_PER_TASK - 1) / PANELS_PER_TASK; }

// A `task_function` of a product; repeatable.
static void multiply_task(const void* context, int64_t task, int64_t next) {
  const product* p = context;
  const int64_t first = task * PANELS_PER_TASK;
  const int64_t end = first + PANELS_PER_TASK < p->num_panels ? first + PANELS_PER_TASK : p->num_panels;
  const int64_t next_first = next < 0 ? -1 : next * PANELS_PER_TASK;
  switch (p->layer->element) {
    case ELEMENT_FLOAT: multiply_panels_float(p, first, end, next_first); break;
    case ELEMENT_BFLOAT16: multiply_panels_bfloat16(p, first, end, next_first); break;
    default: multiply_panels_float16(p, first, end, next_first);
  }
}

// x: [num_rows, in_size], y: [num_rows, out_size]. 0, or 1 if there is no memory.
int linear(const linear_layer* layer, const float* x, float* y, int64_t num_rows, int64_t num_threads) {
  const row_groups groups = group_rows(num_rows);
  const int kind = activation_kind(layer);
  if (num_rows == 0) return 0;
  void* prepared = aligned_alloc(64, (size_t)(prepared_bytes(kind, num_rows, layer->in_size) + 63) / 64 * 64);
  if (!prepared) return 1;
  const product p = plain_product(layer, &groups, prepared, y);
  task_list tasks = {.num_tasks = num_product_tasks(&p)};
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
  {
    prepare_rows(kind, &groups, x, layer->in_size, prepared);
    share_tasks(&tasks, multiply_task, &p);
  }
  free(prepared);
  return 0;
}
