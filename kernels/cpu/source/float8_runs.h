// The matmul loops for float8.h.
//
// `multiply_float8`: sums [R, 2 * C] += the dot products of `num` inputs, an even number. `weights`: of the first
// panel.

#if defined(HAS_BFLOAT16_DOTS)
// Widens float8 codes to bfloat16. `codes`: normal numbers only, in the upper byte of each 16 bits; the lower byte is
// ignored. The exponent bias changes from 7 to 127.
INLINE __m512i widen_normal(__m512i codes) {
  const __m512i moved = _mm512_and_si512(_mm512_srai_epi16(codes, 4), _mm512_set1_epi16((int16_t)0x87f0));
  return _mm512_add_epi16(moved, _mm512_set1_epi16(0x3c00));
}

// Widens any float8 codes: looks up codes with exponent 0 by their mantissa.
static NOINLINE __m512i widen_any(__m512i codes) {
  const __m512i small = _mm512_set4_epi64(0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000);
  const __m512i size = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f00));
  const __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi16((int16_t)0x8000));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(0x0800));
  const __m512i found = _mm512_permutexvar_epi16(_mm512_srli_epi16(size, 8), small);
  return _mm512_mask_mov_epi16(widen_normal(codes), is_small, _mm512_or_si512(found, sign));
}

INLINE void multiply_float8(const int R, const int C, const int num, const char* weights, int64_t panel_bytes,
                            const char* x, floats (*sums)[8]) {
  const uint32_t* pairs = (const uint32_t*)x;
#pragma GCC unroll 4
  for (int i = 0; i < num / 2; i++) {
    words w[8];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const __m512i codes = _mm512_loadu_si512(weights + i * 2 * PANEL + c * panel_bytes);
      const __m512i first = _mm512_slli_epi16(codes, 8);
      const int has_small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0;  // rare
      w[2 * c] = (words)(__builtin_expect(has_small, 0) ? widen_any(first) : widen_normal(first));
      w[2 * c + 1] = (words)(__builtin_expect(has_small, 0) ? widen_any(codes) : widen_normal(codes));
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) sums[r][c] = add_dots(sums[r][c], pairs[i * R + r] - (words){0}, w[c]);
  }
}
#else
INLINE void multiply_float8(const int R, const int C, const int num, const char* weights, int64_t panel_bytes,
                            const char* x, floats (*sums)[8]) {
  const float* values = (const float*)x;
#pragma GCC unroll 8
  for (int nth = 0; nth < num; nth++) {
    const int i = nth ^ 1;  // the second input of a pair first, in the order of `vdpbf16ps`
    floats w[8];
#pragma GCC unroll 8
    for (int c = 0; c < 2 * C; c++)
      w[c] = load_float8((const float8*)(weights + i * PANEL + c % 2 * LANES + c / 2 * panel_bytes));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < 2 * C; c++) sums[r][c] = multiply_add(splat(values[i * R + r]), w[c], sums[r][c]);
  }
}
#endif

// totals: [R, 2 * C vectors] += the sums of a unit times its scales.
INLINE void add_scaled(const int R, const int C, floats (*sums)[8], const char* scales, int64_t panel_bytes, float* totals) {
#pragma GCC unroll 8
  for (int c = 0; c < 2 * C; c++) {
    const floats scale = load_float((const float*)(scales + c / 2 * panel_bytes) + c % 2 * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      float* total = totals + (r * 2 * C + c) * LANES;
      store_float(total, multiply_add(sums[r][c], scale, load_float(total)));
    }
  }
}

// A `run_function` of R rows and C panels. A unit consists of whole turns of UNROLLED pairs, and each turn prefetches a
// part of the data for the next unit.
INLINE void multiply_run_of_float8(const int R, const int C, const linear_layer* layer, const char* weights,
                                   int64_t panel_bytes, const char* x, int64_t num, const char* ahead, int64_t stride,
                                   float* totals) {
  enum { TURN = 2 * UNROLLED };
  const int64_t size = layer->group_size, bytes = float8_unit_bytes(layer), part = stride * TURN / size;
  for (int64_t unit = 0; unit < num; unit++, weights += bytes, x += size * R * FLOAT8_ROW_BYTES, ahead += stride) {
    floats sums[GROUP_ROWS][8];
    clear_sums(R, 2 * C, sums);
    for (int64_t i = 0, line = 0, end = part; i < size; i += TURN, end += part) {
      for (; line < end; line += LINE) __builtin_prefetch(ahead + line);
      multiply_float8(R, C, TURN, weights + i * PANEL, panel_bytes, x + i * R * FLOAT8_ROW_BYTES, sums);
    }
    add_scaled(R, C, sums, weights + size * PANEL, panel_bytes, totals);
  }
}

#define MULTIPLY(R, C) \
  static void multiply_float8_##R##x##C(const linear_layer* layer, const char* weights, int64_t panel_bytes, \
                                        const char* x, int64_t num, const char* ahead, int64_t stride, float* totals) { \
    multiply_run_of_float8(R, C, layer, weights, panel_bytes, x, num, ahead, stride, totals); \
  }
EVERY_RUN(MULTIPLY)
#undef MULTIPLY

#define ENTRY(R, C) [C == 1 ? R : 0] = multiply_float8_##R##x##C,
SHARED const run_function FLOAT8_RUNS[] = {EVERY_RUN(ENTRY)};
#undef ENTRY
