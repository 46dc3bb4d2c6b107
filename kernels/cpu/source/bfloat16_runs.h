// Matmuls of bfloat16 activations with bfloat16 weights, two inputs at a time (`vdpbf16ps`). The multiplications are
// exact. Their results are added to the sum one after the other, the second input first, and each sum is rounded to
// float32. Denormal numbers count as 0.
//
// If a processor has no such instruction, ELEMENT_BFLOAT16 is multiplied as float32 (linear.h).

#if defined(HAS_BFLOAT16_DOTS)
INLINE floats add_dots(floats sums, words x, words weights) {
  return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)weights);
}

// sums: [R, 2 * C] += the dot products of `num` pairs of inputs.
INLINE void multiply_pairs(const int R, const int C, const int num, const char* weights, int64_t panel_bytes,
                           const uint32_t* x, floats (*sums)[8]) {
#pragma GCC unroll 4
  for (int i = 0; i < num; i++) {
    words w[8];
#pragma GCC unroll 8
    for (int c = 0; c < 2 * C; c++)
      memcpy(&w[c], weights + (2 * i + c % 2) * (int64_t)sizeof(words) + c / 2 * panel_bytes, sizeof(words));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) sums[r][c] = add_dots(sums[r][c], x[i * R + r] - (words){0}, w[c]);
  }
}

// A `run_function` of R rows and C panels.
INLINE void multiply_run_of_pairs(const int R, const int C, const char* weights, int64_t panel_bytes, const uint32_t* x,
                                  int64_t num, const char* ahead, int64_t stride, float* totals) {
  const int64_t pair_bytes = 2 * (int64_t)sizeof(words);
  floats sums[GROUP_ROWS][8];
  clear_sums(R, 2 * C, sums);
  int64_t i = 0;
  for (; i + UNROLLED <= num; i += UNROLLED, ahead += stride) {
    for (int64_t line = 0; line < stride; line += LINE) __builtin_prefetch(ahead + line);
    multiply_pairs(R, C, UNROLLED, weights + i * pair_bytes, panel_bytes, x + i * R, sums);
  }
  for (; i < num; i++) multiply_pairs(R, C, 1, weights + i * pair_bytes, panel_bytes, x + i * R, sums);
  add_sums(R, 2 * C, sums, totals);
}

#define MULTIPLY(R, C) \
  static void multiply_pairs_##R##x##C(const linear_layer* layer, const char* weights, int64_t panel_bytes, \
                                       const char* x, int64_t num, const char* ahead, int64_t stride, float* totals) { \
    (void)layer; \
    multiply_run_of_pairs(R, C, weights, panel_bytes, (const uint32_t*)x, num, ahead, stride, totals); \
  }
EVERY_RUN(MULTIPLY)
#undef MULTIPLY

#define ENTRY(R, C) [C == 1 ? R : 0] = multiply_pairs_##R##x##C,
SHARED const run_function PAIR_RUNS[] = {EVERY_RUN(ENTRY)};
#undef ENTRY

#endif
