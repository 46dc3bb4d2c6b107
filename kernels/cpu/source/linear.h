// Matrix products of float32 activations with weights of one element type, accumulated in float32: the register tiles of
// BLIS (Van Zee and van de Geijn, 2015, https://doi.org/10.1145/2764454), over weights that are packed once.
//
// Weights [out_size, in_size] are packed in panels of PANEL outputs: [ceil(out_size / PANEL), in_size, PANEL]; those of
// bfloat16 in pairs of inputs, [ceil(out_size / PANEL), ceil(in_size / 2), PANEL, 2], as `vdpbf16ps` takes them, and as a
// shift and a mask widen them.

#if defined(IS_BFLOAT16)
enum { NAME(UNIT) = 2 };
#else
enum { NAME(UNIT) = 1 };
#endif

// Of output `output` and input `input` of a panel.
INLINE int64_t NAME(panel_place)(int64_t output, int64_t input) {
  return (input / NAME(UNIT) * PANEL + output) * NAME(UNIT) + input % NAME(UNIT);
}

INLINE int64_t NAME(padded_size)(int64_t in_size) { return ceil_div(in_size, NAME(UNIT)) * NAME(UNIT); }

// The weights of LANES outputs from `output` on.
INLINE floats NAME(load_weights)(const ELEMENT* panel, int64_t output, int64_t input) {
#if defined(IS_BFLOAT16)
  words pairs;
  memcpy(&pairs, panel + NAME(panel_place)(output, input / 2 * 2), sizeof pairs);
  return (floats)(input % 2 ? pairs & 0xffff0000u : pairs << 16);
#else
  return NAME(load)(panel + NAME(panel_place)(output, input));
#endif
}

// weight: [out_size, in_size]. What is missing of the last panel and unit is 0.
void NAME(pack_linear)(const ELEMENT* weight, ELEMENT* panels, int64_t in_size, int64_t out_size, int64_t num_threads) {
  const ELEMENT zero = NAME(from_value)(0.0f);
  const int64_t padded_size = NAME(padded_size)(in_size);
  use_large_pages(panels, ceil_div(out_size, PANEL) * PANEL * padded_size * (int64_t)sizeof(ELEMENT));
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t first = 0; first < out_size; first += PANEL) {
    ELEMENT* panel = panels + first * padded_size;
    for (int64_t j = 0; j < PANEL; j++) {
      const ELEMENT* row = first + j < out_size ? weight + (first + j) * in_size : NULL;
      for (int64_t i = 0; i < padded_size; i++) panel[NAME(panel_place)(j, i)] = row && i < in_size ? row[i] : zero;
    }
  }
}

// Rows of packed weights, as an embedding takes them: output[i] = weight[indexes[i]], in float32.
static void NAME(take_rows)(const ELEMENT* panels, const int64_t* indexes, float* output, int64_t num_indexes,
                            int64_t in_size) {
  for (int64_t n = 0; n < num_indexes; n++) {
    const ELEMENT* panel = panels + indexes[n] / PANEL * PANEL * NAME(padded_size)(in_size);
    for (int64_t i = 0; i < in_size; i++)
      output[n * in_size + i] = NAME(value)(panel[NAME(panel_place)(indexes[n] % PANEL, i)]);
  }
}

// Values as float32.
INLINE void NAME(widen)(const ELEMENT* values, float* output, int64_t size) {
  for (int64_t i = 0; i < size; i++) output[i] = NAME(value)(values[i]);
}

// sums: [R, 2 * C], of R interleaved rows and C panels, += the products of `num` units.
INLINE void NAME(multiply_units)(const int R, const int C, const int num, const ELEMENT* weights, int64_t panel_size,
                                 const float* x, floats (*sums)[8]) {
#pragma GCC unroll 8
  for (int nth = 0; nth < num * NAME(UNIT); nth++) {
    const int i = nth ^ (NAME(UNIT) - 1);  // of a pair the second one first, as `vdpbf16ps` has it
    floats w[8];
#pragma GCC unroll 8
    for (int c = 0; c < 2 * C; c++) w[c] = NAME(load_weights)(weights + c / 2 * panel_size, c % 2 * LANES, i);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) sums[r][c] = multiply_add(splat(x[i * R + r]), w[c], sums[r][c]);
  }
}

// A `run_function` of R rows and C panels.
INLINE void NAME(multiply_run)(const int R, const int C, const ELEMENT* weights, int64_t panel_size, const float* x,
                               int64_t num, const char* ahead, int64_t stride, float* totals) {
  const int size = NAME(UNIT), turn = UNROLLED / size;
  floats sums[GROUP_ROWS][8];
  clear_sums(R, 2 * C, sums);
  int64_t i = 0;
  for (; i + turn <= num; i += turn, ahead += stride) {
    for (int64_t line = 0; line < stride; line += LINE) __builtin_prefetch(ahead + line);
    NAME(multiply_units)(R, C, turn, weights + i * size * PANEL, panel_size, x + i * size * R, sums);
  }
  for (; i < num; i++) NAME(multiply_units)(R, C, 1, weights + i * size * PANEL, panel_size, x + i * size * R, sums);
  add_sums(R, 2 * C, sums, totals);
}

#define MULTIPLY(R, C) \
  static void NAME(multiply_##R##x##C)(const linear_layer* layer, const char* weights, int64_t panel_bytes, \
                                       const char* x, int64_t num, const char* ahead, int64_t stride, float* totals) { \
    (void)layer; \
    NAME(multiply_run)(R, C, (const ELEMENT*)weights, panel_bytes / (int64_t)sizeof(ELEMENT), (const float*)x, num, \
                       ahead, stride, totals); \
  }
EVERY_RUN(MULTIPLY)
#undef MULTIPLY

#define ENTRY(R, C) [C == 1 ? R : 0] = NAME(multiply_##R##x##C),
static const run_function NAME(RUNS)[] = {EVERY_RUN(ENTRY)};
#undef ENTRY

INLINE arithmetic NAME(arithmetic)(void) {
  return (arithmetic){.unit = NAME(UNIT),
                      .weight_bytes = NAME(UNIT) * PANEL * (int64_t)sizeof(ELEMENT),
                      .row_bytes = NAME(UNIT) * (int64_t)sizeof(float),
                      .run = RUN / NAME(UNIT),
                      .turn = UNROLLED / NAME(UNIT),
                      .runs = NAME(RUNS)};
}
