// Matmuls of int8 activations with weights of 8, 6 or 4 bits. Each group of inputs has a scale, and optionally a zero
// point and a minimum: weight = scale * (code - zero) - minimum. Sums over a group are integers and exact. Each sum is
// converted to float32, multiplied by the scale of the activations and the scale of the weights, and added to the sum
// of a run. The minimum, multiplied by the sum of the activations, is added in the same way.
//
// A panel consists of units of 32 inputs. A unit contains the codes of 2 vectors of outputs, then scales, minima and
// zero points, [1 or 2 groups, PANEL] each. Codes of 8 bits are stored as [8, LANES, 4]: each step has four inputs of
// LANES outputs. With 4 bits, two steps share a byte, and the first step is in the lower half. Codes of 4 bits are
// looked up in the layer's table, unless the table counts upwards. With 6 bits, the lower 4 bits are stored like codes
// of 4 bits. The upper 2 bits follow them; four steps share a byte, and the first step is in the lowest bits.
//
// Scales and minima have one of three formats: floats; powers of two and 0, stored in a byte as the exponent of a
// float32; or 8-bit integers times a float16 factor. With factors, in_size is a multiple of 256. The factors of the
// scales, [PANEL], and of the minima precede each 8 units. An integer times its factor is exact in float32.
//
// Codes may be stored with an offset. The sum of the activations times the offset is then subtracted from the sums.

enum { CODES_OF_8, CODES_OF_4, CODES_OF_TABLE, CODES_OF_6 };
// Instructions that multiply unsigned with signed bytes need non-negative codes.
#if defined(__AVX512VNNI__) && defined(HAS_AVX512)
#define CODE_OFFSET 128
#else
#define CODE_OFFSET 0
#endif
// Tiles multiply signed codes. So codes are stored without the offset, which is added before vectors multiply them.
#if defined(HAS_TILES)
#define STORED_OFFSET 0
#else
#define STORED_OFFSET CODE_OFFSET
#endif

INLINE words load_words(const void* p) {
  words v;
  memcpy(&v, p, sizeof v);
  return v;
}

#if defined(HAS_AVX2)
// Returns the same sums, but hides their terms from the compiler. GCC would otherwise add all terms of a unit like a
// tree, and store most of them in memory until then.
INLINE ints in_order(ints sums) {
  __asm__("" : "+x"(sums));
  return sums;
}
#endif

// sums += the dot products of four inputs with the codes of LANES outputs. The codes are stored with CODE_OFFSET.
INLINE ints add_code_dots(ints sums, words codes, words x) {
#if CODE_OFFSET
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#elif defined(HAS_AVX512)
  // Move the signs to the activations. A sum of two products is at most 2 * 128 * 127.
  const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)codes), _mm512_setzero_si512(), (__m512i)x);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)codes), turned);
  return sums + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(HAS_AVX2)
  const __m256i turned = _mm256_sign_epi8((__m256i)x, (__m256i)codes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), turned);
  return in_order(sums + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (ints)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, (int8x16_t)x);
#else
  for (int shift = 0; shift < 32; shift += 8)
    sums += ((ints)(codes << (24 - shift)) >> 24) * ((ints)(x << (24 - shift)) >> 24);
  return sums;
#endif
}

// Like add_code_dots, for codes below 16. `sums` have 16 bits where that is faster: 8 sums of two products are at most
// 8 * 2 * 15 * 127. `whole_dots` widens them.
INLINE ints add_small_dots(ints sums, words codes, words x) {
#if defined(HAS_AVX512) && !CODE_OFFSET
  return (ints)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)codes, (__m512i)x));
#elif defined(HAS_AVX2)
  return in_order((ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)codes, (__m256i)x)));
#else
  return add_code_dots(sums, codes, x);
#endif
}

INLINE ints whole_dots(ints sums) {
#if defined(HAS_AVX512) && !CODE_OFFSET
  return (ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(HAS_AVX2)
  return (ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
  return sums;
#endif
}

// sums += the dot products of eight inputs with codes of 6 bits, in two steps.
INLINE ints add_medium_dots(ints sums, words first, words second, words x, words next) {
#if defined(HAS_AVX512) && !CODE_OFFSET
  const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)first, (__m512i)x),
                                         _mm512_maddubs_epi16((__m512i)second, (__m512i)next));
  return sums + whole_dots((ints)pairs);
#elif defined(HAS_AVX2)
  // Sums of four products are at most 4 * 63 * 127, which 16 bits hold.
  const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)first, (__m256i)x),
                                         _mm256_maddubs_epi16((__m256i)second, (__m256i)next));
  return in_order(sums + whole_dots((ints)pairs));
#else
  return add_code_dots(add_code_dots(sums, first, x), second, next);
#endif
}

// Returns the table's entry for every byte of `indexes`, all below 16.
INLINE words look_up(words table, words indexes) {
#if defined(HAS_AVX512)
  return (words)_mm512_shuffle_epi8((__m512i)table, (__m512i)indexes);
#elif defined(HAS_AVX2)
  return (words)_mm256_shuffle_epi8((__m256i)table, (__m256i)indexes);
#elif defined(__aarch64__)
  return (words)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indexes);
#else
  uint8_t entries[16], bytes[4 * LANES];
  memcpy(entries, &table, sizeof entries);
  memcpy(bytes, &indexes, sizeof bytes);
  for (int i = 0; i < 4 * LANES; i++) bytes[i] = entries[bytes[i]];
  return load_words(bytes);
#endif
}

// Returns the layer's table, with the offset of codes, repeated in every 16 bytes of a vector.
INLINE words offset_table(const linear_layer* layer) {
  uint8_t entries[4 * LANES];
  for (int i = 0; i < 4 * LANES; i++) entries[i] = (uint8_t)layer->table[i % 16] ^ STORED_OFFSET;
  return load_words(entries);
}

// Returns whether each 4-bit code equals its value, or its value plus 8.
INLINE int needs_no_table(const linear_layer* layer) {
  int is_next = layer->table[0] == 0 || layer->table[0] == -8;
  for (int i = 1; i < 16; i++) is_next &= layer->table[i] == layer->table[i - 1] + 1;
  return is_next;
}

enum {
  STEPS = UNIT_INPUTS / 4,
  UPPER_BITS = STEPS / 2 * LANES * 4  // where the upper bits of 6-bit codes begin in a vector's codes
};

INLINE int bits_of(const int coding) { return coding == CODES_OF_8 ? 8 : coding == CODES_OF_6 ? 6 : 4; }

INLINE int64_t unit_code_bytes(int64_t bits) { return UNIT_INPUTS * PANEL * bits / 8; }
INLINE int64_t scale_bytes(const linear_layer* layer) {
  const int64_t element = layer->scale_element;
  return element == ELEMENT_FLOAT32 ? 4 : element == ELEMENT_INT8 || element == ELEMENT_FLOAT8_E8M0FNU ? 1 : 2;
}
INLINE int64_t groups_of_unit(const linear_layer* layer) { return layer->group_size == UNIT_INPUTS ? 1 : 2; }

INLINE int64_t unit_bytes(const linear_layer* layer, int64_t bits) {
  const int64_t of_group = scale_bytes(layer) * (1 + layer->has_minima) + layer->has_zeros;
  return unit_code_bytes(bits) + PANEL * groups_of_unit(layer) * of_group;
}

enum { BLOCK_UNITS = 8 };  // units that share factors

INLINE int64_t factor_bytes(const linear_layer* layer) {
  return layer->scale_element == ELEMENT_INT8 ? PANEL * (1 + layer->has_minima) * (int64_t)sizeof(float16) : 0;
}

// Average bytes of a unit, including its share of the factors.
INLINE int64_t weight_bytes(const linear_layer* layer, int64_t bits) {
  return unit_bytes(layer, bits) + factor_bytes(layer) / BLOCK_UNITS;
}

// Loads powers of two and 0 from bytes that contain their exponents.
INLINE floats load_powers(const uint8_t* exponents) {
#if defined(HAS_AVX512)
  return (floats)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)exponents)), 23);
#elif defined(HAS_AVX2)
  return (floats)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)exponents)), 23);
#else
  return (floats)((words){exponents[0], exponents[1], exponents[2], exponents[3]} << 23);
#endif
}

// Loads the scales of LANES outputs from `index` on. `factors` begins with the factor of the first of these outputs.
INLINE floats load_scales(const linear_layer* layer, const char* scales, int64_t index, const float16* factors) {
  switch (layer->scale_element) {
    case ELEMENT_INT8: return load_int8((const int8*)scales + index) * load_float16(factors);
    case ELEMENT_FLOAT8_E8M0FNU: return load_powers((const uint8_t*)scales + index);
    case ELEMENT_FLOAT32: return load_float((const float*)scales + index);
    case ELEMENT_BFLOAT16: return load_bfloat16((const bfloat16*)scales + index);
    default: return load_float16((const float16*)scales + index);
  }
}

// Loads the zero points of LANES outputs as integers.
INLINE ints load_zeros(const int8* zeros) { return __builtin_convertvector(load_int8(zeros), ints); }

// Loads the codes of one step for a vector of outputs. `of_vector`: the vector's codes in the unit.
INLINE words load_codes(const int coding, const char* of_vector, int step, words table) {
  const int64_t size = sizeof(words);
  if (coding == CODES_OF_8) return load_words(of_vector + step * size);
  const words both = load_words(of_vector + step / 2 * size), indexes = (step % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
  if (coding == CODES_OF_6) {
    const words upper = load_words(of_vector + UPPER_BITS + step / 4 * size);
    return indexes | ((step % 4 < 2 ? upper << (4 - step % 4 * 2) : upper >> (step % 4 * 2 - 4)) & 0x30303030u);
  }
  return coding == CODES_OF_TABLE ? look_up(table, indexes) : indexes;
}

// Returns the same pointer, but hides this from the compiler. Otherwise the compiler would move loads that two branches
// have in common in front of the branches, and run out of registers.
INLINE const void* branch_of(const void* place) {
  __asm__("" : "+r"(place));
  return place;
}

INLINE words word_of(const uint32_t* x) { return *x - (words){0}; }
INLINE floats float_of(const uint32_t* x) { return (floats)word_of(x); }

// The location of a tile's weights, and the way to read their codes.
typedef struct {
  const linear_layer* layer;
  int64_t panel_bytes;
  int64_t place;  // of the first vector of outputs in the first panel
  words table;
  int32_t mask;         // for the offset of codes below 8 bits: all bits if they are stored with an offset, or 0
  const char* factors;  // of the scales of the current units
} code_tile;

INLINE code_tile tile_of(const int coding, const linear_layer* layer, int64_t panel_bytes, int64_t place) {
  return (code_tile){.layer = layer,
                     .panel_bytes = panel_bytes,
                     .place = place,
                     .table = coding == CODES_OF_TABLE ? offset_table(layer) : (words){0},
                     .mask = layer->table[0] ? -1 : 0};
}

// Returns the value to add to sums over codes, to compensate the offset with which codes are stored. `sum`: the negated
// sum of the activations.
INLINE ints offset_dots(const int coding, const code_tile* t, ints sum) {
  if (coding == CODES_OF_4) return (sum << 3) & t->mask;
  if (coding == CODES_OF_6) return (sum << 5) & t->mask;
  return CODE_OFFSET ? sum << 7 : (ints){0};
}

// Returns the negated sum of the activations of a group: of the whole unit, or of its `nth` half.
INLINE ints group_sum(const int is_whole, const int nth, const int pitch, const uint32_t* x) {
  const ints sum = (ints)word_of(x + INT8_SUM * pitch), first = (ints)word_of(x + INT8_FIRST_SUM * pitch);
  return is_whole ? sum : nth == 0 ? first : sum - first;
}

// dots: [R, V] -= the sums of the activations of a group times the zero points.
INLINE void take_zeros_off(const int is_whole, const int nth, const int R, const int V, const code_tile* t,
                           const char* zeros, const uint32_t* inputs, ints (*dots)[8]) {
  const uint32_t* x = branch_of(inputs);
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) {
    const ints zero = load_zeros((const int8*)zeros + v / 2 * t->panel_bytes + t->place + v % 2 * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) dots[r][v] += group_sum(is_whole, nth, R, x + r) * zero;
  }
}

// sums: [R, V] -= the sums of the activations of a group times the minima.
INLINE void take_minima_off(const int is_whole, const int nth, const int R, const int V, const code_tile* t,
                            const char* minima, const uint32_t* inputs, floats (*sums)[8]) {
  const uint32_t* x = branch_of(inputs);
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) {
    const int64_t from = v / 2 * t->panel_bytes, place = t->place + v % 2 * LANES;
    const floats minimum = load_scales(t->layer, minima + from, place, (const float16*)(t->factors + from) + PANEL + place);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const floats scaled = is_whole ? float_of(x + INT8_SCALED_SUM * R + r)
                                     : __builtin_convertvector(group_sum(is_whole, nth, R, x + r), floats) *
                                           float_of(x + INT8_SCALE * R + r);
      sums[r][v] = multiply_add(scaled, minimum, sums[r][v]);
    }
  }
}

// sums: [R, V] += the result of the `nth` group of a unit. `dots`: its integer sums over codes.
INLINE void scale_dots(const int coding, const int is_whole, const int nth, const int R, const int V, const code_tile* t,
                       const char* scales, const uint32_t* inputs, ints (*dots)[8], floats (*sums)[8]) {
  const linear_layer* layer = t->layer;
  const int64_t num = is_whole ? PANEL : 2 * PANEL, size = scale_bytes(layer);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const ints whole = coding == CODES_OF_4 ? whole_dots(dots[r][v]) : dots[r][v];
      dots[r][v] = whole + offset_dots(coding, t, group_sum(is_whole, nth, R, inputs + r));
    }
  if (layer->has_zeros)
    take_zeros_off(is_whole, nth, R, V, t, scales + num * size * (1 + layer->has_minima) + nth * PANEL, inputs, dots);
  const uint32_t* x = branch_of(inputs);
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) {
    const int64_t from = v / 2 * t->panel_bytes, place = t->place + v % 2 * LANES;
    const floats scale = load_scales(layer, scales + nth * PANEL * size + from, place, (const float16*)(t->factors + from) + place);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      sums[r][v] = multiply_add(__builtin_convertvector(dots[r][v], floats) * float_of(x + INT8_SCALE * R + r), scale, sums[r][v]);
  }
  if (layer->has_minima) take_minima_off(is_whole, nth, R, V, t, scales + (num + nth * PANEL) * size, inputs, sums);
}

// sums: [R, V] += the dot products of the `nth` group of a unit. `weights`: the unit in the panel of the first vector.
INLINE void multiply_group(const int coding, const int is_whole, const int nth, const int R, const int V,
                           const code_tile* t, const char* weights, const uint32_t* inputs, floats (*sums)[8]) {
  const char* unit = branch_of(weights);
  const uint32_t* x = branch_of(inputs);
  const int bits = bits_of(coding), num_steps = is_whole ? STEPS : STEPS / 2, turn = coding == CODES_OF_6 ? 2 : 1;
  const int64_t vector_bytes = unit_code_bytes(bits) / 2;
  ints dots[GROUP_ROWS][8];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) dots[r][v] = (ints){0};
#pragma GCC unroll 8
  for (int step = nth * num_steps; step < (nth + 1) * num_steps; step += turn)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const char* of_vector = unit + v / 2 * t->panel_bytes + (t->place / LANES + v % 2) * vector_bytes;
      const words codes = load_codes(coding, of_vector, step, t->table);
      const words next = turn == 2 ? load_codes(coding, of_vector, step + 1, t->table) : codes;
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const words four = word_of(x + input_place(R, r, step));
        if (coding == CODES_OF_6)
          dots[r][v] = add_medium_dots(dots[r][v], codes, next, four, word_of(x + input_place(R, r, step + 1)));
        else if (coding == CODES_OF_4)
          dots[r][v] = add_small_dots(dots[r][v], codes, four);
        else
          dots[r][v] = add_code_dots(dots[r][v], codes ^ (CODE_OFFSET - STORED_OFFSET) * 0x01010101u, four);
      }
    }
  scale_dots(coding, is_whole, nth, R, V, t, unit + unit_code_bytes(bits), x, dots, sums);
}

// The number of float sums that fit into the registers together with the same number of integer sums.
#if defined(HAS_AVX512)
#define MAX_SUMS 12
#else
#define MAX_SUMS 6
#endif

// Computes R rows and V vectors of outputs of a run. totals: the first output; rows are `size` floats apart.
INLINE void multiply_tile(const int coding, const int R, const int V, code_tile* t, const char* weights,
                          const uint32_t* x, int64_t num, const char* ahead, int64_t stride, float* totals, int64_t size) {
  const int64_t bytes = unit_bytes(t->layer, bits_of(coding)), of_factors = factor_bytes(t->layer);
  const int is_whole = t->layer->group_size == UNIT_INPUTS;
  floats sums[GROUP_ROWS][8];
  clear_sums(R, V, sums);
  for (int64_t i = 0; i < num; i++, ahead += stride, weights += bytes, x += INT8_WORDS * R) {
    // Prefetch into the second-level cache: the first level is full of the data that is multiplied now.
    for (int64_t line = 0; line < stride; line += LINE) __builtin_prefetch(ahead + line, 0, 2);
    if (i % BLOCK_UNITS == 0) {
      t->factors = weights;
      weights += of_factors;
    }
    if (is_whole) {
      multiply_group(coding, 1, 0, R, V, t, weights, x, sums);
    } else {
      multiply_group(coding, 0, 0, R, V, t, weights, x, sums);
      multiply_group(coding, 0, 1, R, V, t, weights, x, sums);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) add_sums(1, V, &sums[r], totals + r * size);
}

#if defined(HAS_TILES)
#include "tiles.h"
#endif

// If the outputs of a panel are computed in two tiles, each tile prefetches half of the data.
INLINE void multiply_codes(const int coding, const int R, const int C, const linear_layer* layer, const char* weights,
                           int64_t panel_bytes, const uint32_t* x, int64_t num, const char* ahead, int64_t stride,
                           float* totals) {
#if defined(HAS_TILES)
  if (R >= MIN_TILE_ROWS) {
    multiply_in_tiles(coding, R, layer, weights, x, num, ahead, stride, totals);
    return;
  }
#endif
  const int size = 2 * C * LANES, V = C == 1 && 2 * R > MAX_SUMS ? 1 : 2 * C;
  const int64_t share = stride * V / (2 * C);
#pragma GCC unroll 2
  for (int v = 0; v < 2 * C; v += V, ahead += num * share) {
    code_tile t = tile_of(coding, layer, panel_bytes, v * LANES);
    multiply_tile(coding, R, V, &t, weights, x, num, ahead, share, totals + v * LANES, size);
  }
}

// The run functions for each coding: integer_runs.h.
extern SHARED const run_function INT8_RUNS[], INT6_RUNS[], INT4_RUNS[], TABLE_RUNS[];

INLINE int coding_of(const linear_layer* layer) {
  switch (layer->element) {
    case ELEMENT_INT8: return CODES_OF_8;
    case ELEMENT_INT6: return CODES_OF_6;
    default: return needs_no_table(layer) ? CODES_OF_4 : CODES_OF_TABLE;
  }
}

INLINE int64_t code_bits(const linear_layer* layer) {
  return layer->element == ELEMENT_INT8 ? 8 : layer->element == ELEMENT_INT6 ? 6 : 4;
}

INLINE arithmetic integer_arithmetic(const linear_layer* layer) {
  static const run_function* const RUNS_OF[] = {
      [CODES_OF_8] = INT8_RUNS, [CODES_OF_6] = INT6_RUNS, [CODES_OF_4] = INT4_RUNS, [CODES_OF_TABLE] = TABLE_RUNS};
  return (arithmetic){.unit = UNIT_INPUTS,
                      .weight_bytes = weight_bytes(layer, code_bits(layer)),
                      .row_bytes = INT8_WORDS * 4,
                      .run = INTEGER_RUN / UNIT_INPUTS,
                      .turn = 1,
                      .uses_tiles = 1,
                      .runs = RUNS_OF[coding_of(layer)]};
}
