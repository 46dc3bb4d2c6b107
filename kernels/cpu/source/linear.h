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

// outputs: [R, C * PANEL], of R interleaved rows and C panels. Meanwhile other weights are fetched, `stride` bytes of
// them for each input: a core that only waits for them where it needs them either reads or computes.
INLINE void NAME(multiply_tile)(const int R, const int C, const linear_layer* layer, const float* x, int64_t panel,
                                const char* ahead, int64_t stride, float* outputs) {
  const int64_t panel_size = PANEL * layer->in_size;
  const ELEMENT* weights = (const ELEMENT*)layer->panels + panel * panel_size;
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
      if (R > 1) {
        __builtin_prefetch(ahead);
        ahead += stride;
      }
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
    for (int c = 0; c < 2 * C; c++) store_float(outputs + (r * 2 * C + c) * LANES, totals[r][c]);
}

// C panels from `panel` on, for one group of R rows; `ahead` is what the group's part of the fetching begins with.
INLINE void NAME(multiply_group)(const int R, const int C, const product* p, int64_t start, int64_t panel,
                                 const char* ahead, int64_t stride) {
  float outputs[GROUP_ROWS * 4 * PANEL] __attribute__((aligned(64)));
  const float* x = p->x + start * p->layer->in_size;
  NAME(multiply_tile)(R, C, p->layer, x, panel, ahead, stride, outputs);
  if (!p->is_gated) {
    store_outputs(p, start, R, panel * PANEL, C * PANEL, outputs);
    return;
  }
  float ups[GROUP_ROWS * 4 * PANEL] __attribute__((aligned(64)));
  const int64_t half = p->num_panels * PANEL * p->layer->in_size * (int64_t)sizeof(ELEMENT);
  NAME(multiply_tile)(R, C, p->layer, x, panel + p->num_panels, ahead + half, stride, ups);
  store_gated(p, start, R, panel * PANEL, C * PANEL, outputs, ups);
}

// A task's panels, from `first` to `end`, and those that are fetched meanwhile: each group fetches its part of a panel
// that is computed two panels later, or that the thread's next task begins with at `next` (-1: there is none).
static void NAME(multiply_panels)(const product* p, int64_t first, int64_t end, int64_t next) {
  const int64_t num_bytes = PANEL * p->layer->in_size * (int64_t)sizeof(ELEMENT);
  const int64_t num_groups = p->groups->num_groups;
  const int64_t stride = PANEL * (int64_t)sizeof(ELEMENT) / num_groups;
  const char* panels = (const char*)p->layer->panels;
  int64_t panel = first;
  if (num_groups == 1 && p->groups->num_rows == 1)  // as fast as memory by itself
    for (; panel + 4 <= end; panel += 4) NAME(multiply_group)(1, 4, p, 0, panel, panels, 0);
  for (; panel < end; panel++) {
    const int64_t later = panel + AHEAD < end ? panel + AHEAD : next < 0 ? panel : next + panel + AHEAD - end;
    for (int64_t g = 0; g < num_groups; g++) {
      const row_group group = nth_group(p->groups, g);
      const char* ahead = panels + (later < p->num_panels ? later : panel) * num_bytes + g * num_bytes / num_groups;
#define MULTIPLY(R) \
  case R: NAME(multiply_group)(R, 1, p, group.start, panel, ahead, stride); break;
      switch (group.num_rows) {
        MULTIPLY(1) MULTIPLY(2) MULTIPLY(3) MULTIPLY(4) MULTIPLY(5) MULTIPLY(6)
#if GROUP_ROWS > 6
        MULTIPLY(7) MULTIPLY(8) MULTIPLY(9) MULTIPLY(10) MULTIPLY(11) MULTIPLY(12)
#endif
      }
#undef MULTIPLY
    }
  }
}
