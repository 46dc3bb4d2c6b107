// Packing float8 weights into panels, and reading rows of packed weights.

static void pack_float8(const linear_layer* layer, const held_weight* weight, char* panels, int64_t num_threads) {
  const int64_t size = layer->group_size, in_size = layer->in_size, bytes = float8_unit_bytes(layer);
  const int64_t num_units = in_size / size, num_blocks = ceil_div(in_size, weight->group_size);
  use_large_pages(panels, ceil_div(layer->out_size, PANEL) * num_units * bytes);
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t panel = 0; panel < ceil_div(layer->out_size, PANEL); panel++) {
    memset(panels + panel * num_units * bytes, 0, (size_t)(num_units * bytes));
    for (int64_t output = panel * PANEL; output < layer->out_size && output < (panel + 1) * PANEL; output++)
      for (int64_t first = 0; first < in_size; first += size) {
        char* unit = panels + (panel * num_units + first / size) * bytes;
        for (int64_t i = 0; i < size; i++)
          memcpy(unit + float8_place(output % PANEL, i), (const char*)weight->values + output * in_size + first + i, 1);
        memcpy(unit + size * PANEL + output % PANEL * (int64_t)sizeof(float),
               weight->scale + output * num_blocks + first / weight->group_size, sizeof(float));
      }
  }
}

// Reads a row of packed weights as float32.
static void take_float8_row(const linear_layer* layer, int64_t output, float* row) {
  const int64_t size = layer->group_size, bytes = float8_unit_bytes(layer), nth = output % PANEL;
  const char* panel = (const char*)layer->panels + output / PANEL * (layer->in_size / size) * bytes;
  for (int64_t i = 0; i < layer->in_size; i++) {
    const char* unit = panel + i / size * bytes;
    const float8* value = (const float8*)(unit + float8_place(nth, i % size));
    row[i] = value_float8(*value) * ((const float*)(unit + size * PANEL))[nth];
  }
}
