// Matrix products of float32 activations with weights of one element type, accumulated in float32: the register tiles of
// BLIS (Van Zee and van de Geijn, 2015, https://doi.org/10.1145/2764454), over weights that are packed once.
//
// Weights [out_size, in_size] are packed in panels of PANEL outputs: [ceil(out_size / PANEL), in_size, PANEL]. Each output
// is a sum of running sums over RUN inputs each, whatever else is computed with it: a row's outputs depend on no other row.

#if defined(IS_BFLOAT16)
// Two outputs share a word, so that a shift and a mask widen them.
INLINE int64_t NAME(panel_place)(int64_t output) { return output % LANES * 2 + output / LANES; }
INLINE void NAME(load_panel)(const ELEMENT* p, floats* low, floats* high) {
  words pairs;
  memcpy(&pairs, p, sizeof pairs);
  *low = (floats)(pairs << 16);
  *high = (floats)(pairs & 0xffff0000u);
}
#else
INLINE int64_t NAME(panel_place)(int64_t output) { return output; }
INLINE void NAME(load_panel)(const ELEMENT* p, floats* low, floats* high) {
  *low = NAME(load)(p);
  *high = NAME(load)(p + LANES);
}
#endif

// weight: [out_size, in_size]
void NAME(pack_linear)(const ELEMENT* weight, ELEMENT* panels, int64_t in_size, int64_t out_size, int64_t num_threads) {
  const ELEMENT zero = NAME(from_value)(0.0f);
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t first = 0; first < out_size; first += PANEL) {
    ELEMENT* panel = panels + first * in_size;
    for (int64_t j = 0; j < PANEL; j++) {
      const ELEMENT* row = first + j < out_size ? weight + (first + j) * in_size : NULL;
      for (int64_t i = 0; i < in_size; i++) panel[i * PANEL + NAME(panel_place)(j)] = row ? row[i] : zero;
    }
  }
}

// Rows of packed weights, as an embedding takes them: output[i] = weight[indexes[i]], in float32.
void NAME(take_rows)(const ELEMENT* panels, const int64_t* indexes, float* output, int64_t num_indexes, int64_t in_size) {
  for (int64_t n = 0; n < num_indexes; n++) {
    const ELEMENT* panel = panels + indexes[n] / PANEL * PANEL * in_size + NAME(panel_place)(indexes[n] % PANEL);
    for (int64_t i = 0; i < in_size; i++) output[n * in_size + i] = NAME(value)(panel[i * PANEL]);
  }
}

// Outputs of R rows, interleaved, and C panels.
INLINE void NAME(multiply_tile)(const int R, const int C, const linear_layer* layer, const float* x, int64_t panel,
                                float* y, int64_t y_stride) {
  const ELEMENT* weights = (const ELEMENT*)layer->panels + panel * PANEL * layer->in_size;
  const int64_t panel_size = PANEL * layer->in_size;
  floats totals[GROUP_ROWS][8] = {0};
  for (int64_t start = 0; start < layer->in_size; start += RUN) {
    const int64_t num = layer->in_size - start < RUN ? layer->in_size - start : RUN;
    floats sums[GROUP_ROWS][8];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) sums[r][c] = splat(0.0f);
    for (int64_t i = 0; i < num; i++, weights += PANEL, x += R) {
      floats w[8];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) NAME(load_panel)(weights + c * panel_size, &w[2 * c], &w[2 * c + 1]);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < 2 * C; c++) sums[r][c] += splat(x[r]) * w[c];
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) totals[r][c] += sums[r][c];
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * C; c++)
      store_outputs(layer, y + r * y_stride, panel * PANEL + c * LANES, totals[r][c]);
}

INLINE void NAME(multiply_rows)(const int R, const linear_layer* layer, const float* x, int64_t first, int64_t num_panels,
                                float* y, int64_t y_stride) {
  // Enough running sums to hide the latency of a multiply-add, and no more than there are registers.
  const int C = R == 1 ? 4 : R <= 3 ? 2 : 1;
  int64_t panel = first;
  for (; panel + C <= first + num_panels; panel += C) NAME(multiply_tile)(R, C, layer, x, panel, y, y_stride);
  for (; panel < first + num_panels; panel++) NAME(multiply_tile)(R, 1, layer, x, panel, y, y_stride);
}

static void NAME(multiply_panels)(const linear_layer* layer, const row_groups* groups, const float* interleaved,
                                  int64_t first, int64_t num_panels, float* y, int64_t y_stride) {
#define MULTIPLY(R) \
  case R: NAME(multiply_rows)(R, layer, x, first, num_panels, y + group.start * y_stride, y_stride); break;
  for (int64_t g = 0; g < groups->num_groups; g++) {
    const row_group group = nth_group(groups, g);
    const float* x = interleaved + group.start * layer->in_size;
    switch (group.num_rows) {
      MULTIPLY(1) MULTIPLY(2) MULTIPLY(3) MULTIPLY(4) MULTIPLY(5) MULTIPLY(6)
#if GROUP_ROWS > 6
      MULTIPLY(7) MULTIPLY(8) MULTIPLY(9) MULTIPLY(10) MULTIPLY(11) MULTIPLY(12)
#endif
    }
  }
#undef MULTIPLY
}
