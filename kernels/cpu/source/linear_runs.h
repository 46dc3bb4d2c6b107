// The matmul loops of linear.h.
#include "linear.h"

// sums: [R, 2 * C] += the dot products of `num` units, for R interleaved rows and C panels.
INLINE void NAME(multiply_units)(const int R, const int C, const int num, const ELEMENT* weights, int64_t panel_size,
                                 const float* x, floats (*sums)[8]) {
#pragma GCC unroll 8
  for (int nth = 0; nth < num * NAME(UNIT); nth++) {
    const int i = nth ^ (NAME(UNIT) - 1);  // the second input of a pair first, in the order of `vdpbf16ps`
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
SHARED const run_function NAME(RUNS)[] = {EVERY_RUN(ENTRY)};
#undef ENTRY
