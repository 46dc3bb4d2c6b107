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

// The same of one row of a table [num_rows, size] that is not packed.
INLINE void NAME(widen_row)(const ELEMENT* table, int64_t index, float* output, int64_t size) {
  for (int64_t i = 0; i < size; i++) output[i] = NAME(value)(table[index * size + i]);
}

// sums: [R, 2 * C], of R interleaved rows and C panels, += the products of `num` inputs.
INLINE void NAME(multiply_inputs)(const int R, const int C, const int num, const ELEMENT* weights, int64_t panel_size,
                                  const float* x, floats (*sums)[8]) {
#pragma GCC unroll 4
  for (int i = 0; i < num; i++) {
    floats w[8];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) NAME(load_panel)(weights + i * PANEL + c * panel_size, &w[2 * c], &w[2 * c + 1]);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) sums[r][c] += splat(x[i * R + r]) * w[c];
  }
}

// totals: [R, C * PANEL] += the products of a run of `num` inputs. Meanwhile other weights are fetched, `stride` bytes
// for every UNROLLED inputs: a core that only waits for them where it needs them either reads or computes.
INLINE void NAME(multiply_run)(const int R, const int C, const ELEMENT* weights, int64_t panel_size, const float* x,
                               int64_t num, const char* ahead, int64_t stride, float* totals) {
  floats sums[GROUP_ROWS][8];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * C; c++) sums[r][c] = splat(0.0f);
  int64_t i = 0;
  for (; i + UNROLLED <= num; i += UNROLLED, ahead += stride) {
    for (int64_t line = 0; line < stride; line += LINE) __builtin_prefetch(ahead + line);
    NAME(multiply_inputs)(R, C, UNROLLED, weights + i * PANEL, panel_size, x + i * R, sums);
  }
  for (; i < num; i++) NAME(multiply_inputs)(R, C, 1, weights + i * PANEL, panel_size, x + i * R, sums);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * C; c++) {
      float* total = totals + (r * 2 * C + c) * LANES;
      store_float(total, load_float(total) + sums[r][c]);
    }
}

// One row and four panels from `panel` on: as fast as memory by itself.
static void NAME(multiply_row)(const product* p, int64_t panel) {
  const int64_t in_size = p->layer->in_size, panel_size = PANEL * in_size;
  float totals[2][4 * PANEL] __attribute__((aligned(64))) = {{0}};
  for (int half = 0; half <= p->is_gated; half++) {
    const ELEMENT* weights = (const ELEMENT*)p->layer->panels + (panel + half * p->num_panels) * panel_size;
    for (int64_t start = 0; start < in_size; start += RUN)
      NAME(multiply_run)(1, 4, weights + start * PANEL, panel_size, (const float*)p->x + start, run_length(in_size, start), NULL, 0,
                         totals[half]);
  }
  store_products(p, 0, 1, panel * PANEL, 4 * PANEL, totals[0], totals[1]);
}

// totals: [num_groups, rows of a group, PANEL], zeros, += the products of one panel. Its runs are taken one after the
// other, so that a run stays in the nearest cache while all groups use it; each group fetches its part of the same run
// of `ahead` meanwhile.
static void NAME(multiply_panel)(const product* p, int64_t panel, int64_t first_group, int64_t num_groups,
                                 const ELEMENT* ahead, float (*totals)[GROUP_ROWS * PANEL]) {
  const int64_t in_size = p->layer->in_size;
  const ELEMENT* weights = (const ELEMENT*)p->layer->panels + panel * PANEL * in_size;
  const int64_t stride = UNROLLED * PANEL * (int64_t)sizeof(ELEMENT) / p->groups->num_groups;
  for (int64_t start = 0; start < in_size; start += RUN) {
    const int64_t num = run_length(in_size, start), part = num / UNROLLED * stride;
    const char* fetched = (const char*)(ahead + start * PANEL) + first_group * part;
    for (int64_t g = 0; g < num_groups; g++, fetched += part) {
      const row_group group = nth_group(p->groups, first_group + g);
      const float* x = (const float*)p->x + group.start * in_size + start * group.num_rows;
#define MULTIPLY(R) \
  case R: NAME(multiply_run)(R, 1, weights + start * PANEL, 0, x, num, fetched, stride, totals[g]); break;
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

// One panel, and `later`, which is computed later and fetched meanwhile.
static void NAME(multiply_groups)(const product* p, int64_t panel, int64_t later) {
  const ELEMENT* panels = p->layer->panels;
  for (int64_t first = 0; first < p->groups->num_groups; first += MAX_GROUPS) {
    const int64_t rest = p->groups->num_groups - first, num_groups = rest < MAX_GROUPS ? rest : MAX_GROUPS;
    float totals[2][MAX_GROUPS][GROUP_ROWS * PANEL] __attribute__((aligned(64)));
    for (int half = 0; half <= p->is_gated; half++) {
      const int64_t skipped = half * p->num_panels;
      const ELEMENT* ahead = panels + (later + skipped) * PANEL * p->layer->in_size;
      memset(totals[half], 0, sizeof totals[half][0] * (size_t)num_groups);
      NAME(multiply_panel)(p, panel + skipped, first, num_groups, ahead, totals[half]);
    }
    for (int64_t g = 0; g < num_groups; g++) {
      const row_group group = nth_group(p->groups, first + g);
      store_products(p, group.start, group.num_rows, panel * PANEL, PANEL, totals[0][g], totals[1][g]);
    }
  }
}

// A task's panels, from `first` to `end`. Meanwhile a panel is fetched that is computed AHEAD panels later, or that the
// thread's next task begins with at `next` (-1: there is none).
static void NAME(multiply_panels)(const product* p, int64_t first, int64_t end, int64_t next) {
  int64_t panel = first;
  if (p->groups->num_rows == 1)
    for (; panel + 4 <= end; panel += 4) NAME(multiply_row)(p, panel);
  for (; panel < end; panel++) {
    const int64_t later = panel + AHEAD < end ? panel + AHEAD : next < 0 ? panel : next + panel + AHEAD - end;
    NAME(multiply_groups)(p, panel, later < p->num_panels ? later : panel);
  }
}
