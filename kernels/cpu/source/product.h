// Matrix products with weights of any element type.

enum { PANELS_PER_TASK = 4 };

// y: [num_rows, out_size]. Called by all threads of a region, which meet at its end.
static void multiply(const linear_layer* layer, const row_groups* groups, const float* interleaved, float* y) {
  const int64_t num_panels = (layer->out_size + PANEL - 1) / PANEL;
#pragma omp for schedule(dynamic, 1)
  for (int64_t first = 0; first < num_panels; first += PANELS_PER_TASK) {
    const int64_t num = num_panels - first < PANELS_PER_TASK ? num_panels - first : PANELS_PER_TASK;
    switch (layer->element) {
      case ELEMENT_FLOAT: multiply_panels_float(layer, groups, interleaved, first, num, y, layer->out_size); break;
      case ELEMENT_BFLOAT16: multiply_panels_bfloat16(layer, groups, interleaved, first, num, y, layer->out_size); break;
      default: multiply_panels_float16(layer, groups, interleaved, first, num, y, layer->out_size);
    }
  }
}

// x: [num_rows, in_size], y: [num_rows, out_size]. 0, or 1 if there is no memory.
int linear(const linear_layer* layer, const float* x, float* y, int64_t num_rows, int64_t num_threads) {
  const row_groups groups = group_rows(num_rows);
  float* interleaved = NULL;
  if (num_rows > 1) {
    interleaved = aligned_alloc(64, (size_t)(num_rows * layer->in_size * (int64_t)sizeof(float) + 63) / 64 * 64);
    if (!interleaved) return 1;
  }
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
  {
    if (num_rows > 1) interleave_rows(&groups, x, layer->in_size, interleaved);
    multiply(layer, &groups, num_rows > 1 ? interleaved : x, y);
  }
  free(interleaved);
  return 0;
}
