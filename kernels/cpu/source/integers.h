// Matrix products of int8 activations with weights of 8 or 4 bits, in groups that have a scale each, and perhaps a
// minimum: scale * code - minimum. Sums over a group are integers and exact; each is taken to float32, times the scale of
// the activations, times that of the weights, and added to the sum of a run; so is the minimum, times the sum of the
// activations.
//
// A panel holds units of 32 inputs; a unit the codes of 2 vectors of outputs, then scales and minima, [1 or 2 groups,
// PANEL] each. Codes of 8 bits lie as [8, LANES, 4]: four inputs of LANES outputs in a step. Of 4 bits two steps share
// a byte, the first one in the lower half; they are looked up in the layer's table, unless that counts upwards.
//
// Codes may be stored with an offset; the sum of the activations, times that, is what sums then begin with.

enum { CODES_OF_8, CODES_OF_4, CODES_OF_TABLE };
// Instructions that multiply unsigned with signed bytes need codes that are not negative.
#if defined(__AVX512VNNI__) && defined(HAS_AVX512)
#define CODE_OFFSET 128
#else
#define CODE_OFFSET 0
#endif

INLINE words load_words(const void* p) {
  words v;
  memcpy(&v, p, sizeof v);
  return v;
}

// sums += products of four inputs with the codes of LANES outputs, offset by CODE_OFFSET.
INLINE ints add_code_dots(ints sums, words codes, words x) {
#if CODE_OFFSET
  return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#elif defined(HAS_AVX512)
  // Signs go to the activations: no sum of two products is larger than 2 * 128 * 127.
  const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)codes), _mm512_setzero_si512(), (__m512i)x);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)codes), turned);
  return sums + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(HAS_AVX2)
  const __m256i turned = _mm256_sign_epi8((__m256i)x, (__m256i)codes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), turned);
  return sums + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (ints)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, (int8x16_t)x);
#else
  for (int shift = 0; shift < 32; shift += 8)
    sums += ((ints)(codes << (24 - shift)) >> 24) * ((ints)(x << (24 - shift)) >> 24);
  return sums;
#endif
}

// The table's entry of every byte; `indexes` are below 16.
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

// The layer's table in every 16 bytes of a vector, offset as codes are.
INLINE words offset_table(const linear_layer* layer) {
  uint8_t entries[4 * LANES];
  for (int i = 0; i < 4 * LANES; i++) entries[i] = (uint8_t)layer->table[i % 16] ^ CODE_OFFSET;
  return load_words(entries);
}

INLINE int counts_upwards(const linear_layer* layer) {
  int is_next = 1;
  for (int i = 1; i < 16; i++) is_next &= layer->table[i] == layer->table[i - 1] + 1;
  return is_next;
}

enum { STEPS = UNIT_INPUTS / 4 };

INLINE int64_t unit_code_bytes(int64_t bits) { return UNIT_INPUTS * PANEL * bits / 8; }
INLINE int64_t scale_bytes(const linear_layer* layer) { return layer->scale_element == ELEMENT_FLOAT ? 4 : 2; }
INLINE int64_t groups_of_unit(const linear_layer* layer) { return layer->group_size == UNIT_INPUTS ? 1 : 2; }

INLINE int64_t unit_bytes(const linear_layer* layer, int64_t bits) {
  const int64_t num_scales = PANEL * groups_of_unit(layer) * (1 + layer->has_minima);
  return unit_code_bytes(bits) + num_scales * scale_bytes(layer);
}

INLINE floats load_scales(const linear_layer* layer, const char* scales, int64_t index) {
  return layer->scale_element == ELEMENT_FLOAT ? load_float((const float*)scales + index)
                                               : load_float16((const float16*)scales + index);
}

// What a step of a vector of outputs has of a unit's codes; `of_vector`: the vector's.
INLINE words load_codes(const int coding, const char* of_vector, int step, words table) {
  const int64_t size = sizeof(words);
  if (coding == CODES_OF_8) return load_words(of_vector + step * size);
  const words both = load_words(of_vector + step / 2 * size), indexes = (step % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
  return coding == CODES_OF_TABLE ? look_up(table, indexes) : indexes;
}

INLINE words word_of(const uint32_t* x) { return *x - (words){0}; }
INLINE floats float_of(const uint32_t* x) { return (floats)word_of(x); }

// sums: [R, V] += the products of a group, the `nth` of its unit, whose integer sums are `dots`. `place`: of the first
// vector of the outputs in the panel.
INLINE void scale_dots(const int R, const int V, const int pitch, const linear_layer* layer, const char* scales, int64_t stride,
                       int64_t place, int nth, const uint32_t* x, ints (*dots)[8], floats (*sums)[8]) {
  const int64_t num_groups = groups_of_unit(layer);
  const int part = num_groups == 1 ? 0 : 1 + nth;
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) {
    const char* of_panel = scales + v / 2 * stride;
    const int64_t index = nth * PANEL + place + v % 2 * LANES;
    const floats w = load_scales(layer, of_panel, index);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      sums[r][v] = multiply_add(__builtin_convertvector(dots[r][v], floats) * float_of(x + INT8_SCALE * pitch + r), w, sums[r][v]);
    if (!layer->has_minima) continue;
    const floats minima = load_scales(layer, of_panel, index + num_groups * PANEL);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      sums[r][v] = multiply_add(float_of(x + (INT8_NEGATIVE_SUM + part) * pitch + r), minima, sums[r][v]);
  }
}

// What a coding takes beside the codes: the table, and the offset of what it gives.
typedef struct {
  words table;
  int32_t offset;
} code_reading;

// sums: [R, V] += the products of a unit. `weights`: the unit of the first vector's panel.
INLINE void multiply_unit(const int coding, const int R, const int V, const int pitch, const linear_layer* layer,
                          const char* weights, int64_t panel_bytes, int64_t place, const uint32_t* x, code_reading by,
                          floats (*sums)[8]) {
  const int is_whole = layer->group_size == UNIT_INPUTS, bits = coding == CODES_OF_8 ? 8 : 4;
  const int has_offset = coding == CODES_OF_4 || CODE_OFFSET != 0;
  const int64_t vector_bytes = unit_code_bytes(bits) / 2;
  ints dots[GROUP_ROWS][8];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    if (half == 0 || !is_whole) {
      const uint32_t* x_sums = x + (INT8_SUM + (is_whole ? 0 : 1 + half)) * pitch;
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const ints first = has_offset ? (ints)word_of(x_sums + r) * by.offset : (ints){0};
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) dots[r][v] = first;
      }
    }
#pragma GCC unroll 4
    for (int step = half * STEPS / 2; step < (half + 1) * STEPS / 2; step++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        const char* of_vector = weights + v / 2 * panel_bytes + (place / LANES + v % 2) * vector_bytes;
        const words codes = load_codes(coding, of_vector, step, by.table);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) dots[r][v] = add_code_dots(dots[r][v], codes, word_of(x + step * pitch + r));
      }
    if (half == 1 || !is_whole)
      scale_dots(R, V, pitch, layer, weights + unit_code_bytes(bits), panel_bytes, place, is_whole ? 0 : half, x, dots, sums);
  }
}

// How many sums registers hold beside as many integer sums.
#if defined(HAS_AVX512)
#define MAX_SUMS 12
#else
#define MAX_SUMS 6
#endif

// R rows and V vectors of outputs of a run of `pitch` rows; totals: the first of them, whose rows are `size` floats.
INLINE void multiply_tile(const int coding, const int R, const int V, const int pitch, const linear_layer* layer,
                          const char* weights, int64_t panel_bytes, int64_t place, const uint32_t* x, int64_t num,
                          const char* ahead, int64_t stride, float* totals, int64_t size) {
  const int64_t bytes = unit_bytes(layer, coding == CODES_OF_8 ? 8 : 4);
  const code_reading by = {coding == CODES_OF_TABLE ? offset_table(layer) : (words){0},
                           coding == CODES_OF_4 ? layer->table[0] : -CODE_OFFSET};
  floats sums[GROUP_ROWS][8];
  clear_sums(R, V, sums);
  for (int64_t i = 0; i < num; i++, ahead += stride) {
    for (int64_t line = 0; line < stride; line += LINE) __builtin_prefetch(ahead + line);
    multiply_unit(coding, R, V, pitch, layer, weights + i * bytes, panel_bytes, place, x + i * INT8_WORDS * pitch, by,
                  sums);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) add_sums(1, V, &sums[r], totals + r * size);
}

INLINE void multiply_codes(const int coding, const int R, const int C, const linear_layer* layer, const char* weights,
                           int64_t panel_bytes, const uint32_t* x, int64_t num, const char* ahead, int64_t stride,
                           float* totals) {
  const int size = 2 * C * LANES, V = C == 1 && 2 * R > MAX_SUMS ? 1 : 2 * C;
#pragma GCC unroll 2
  for (int v = 0; v < 2 * C; v += V)
    multiply_tile(coding, R, V, R, layer, weights, panel_bytes, v * LANES, x, num, ahead, v ? 0 : stride,
                  totals + v * LANES, size);
}

#define MULTIPLY_CODES(coding, R, C) \
  static void multiply_##coding##_##R##x##C(const linear_layer* layer, const char* weights, int64_t panel_bytes, \
                                            const char* x, int64_t num, const char* ahead, int64_t stride, \
                                            float* totals) { \
    multiply_codes(coding, R, C, layer, weights, panel_bytes, (const uint32_t*)x, num, ahead, stride, totals); \
  }
#define MULTIPLY(R, C) \
  MULTIPLY_CODES(CODES_OF_8, R, C) MULTIPLY_CODES(CODES_OF_4, R, C) MULTIPLY_CODES(CODES_OF_TABLE, R, C)
EVERY_RUN(MULTIPLY)
#undef MULTIPLY

#define ENTRY(R, C) \
  [CODES_OF_8][C == 1 ? R : 0] = multiply_CODES_OF_8_##R##x##C, \
  [CODES_OF_4][C == 1 ? R : 0] = multiply_CODES_OF_4_##R##x##C, \
  [CODES_OF_TABLE][C == 1 ? R : 0] = multiply_CODES_OF_TABLE_##R##x##C,
static const run_function CODE_RUNS[][GROUP_ROWS + 1] = {EVERY_RUN(ENTRY)};
#undef ENTRY

INLINE int64_t code_bits(const linear_layer* layer) { return layer->element == ELEMENT_INT4 ? 4 : 8; }

INLINE arithmetic integer_arithmetic(const linear_layer* layer) {
  const int coding = layer->element == ELEMENT_INT8 ? CODES_OF_8 : counts_upwards(layer) ? CODES_OF_4 : CODES_OF_TABLE;
  return (arithmetic){.unit = UNIT_INPUTS,
                      .weight_bytes = unit_bytes(layer, code_bits(layer)),
                      .row_bytes = INT8_WORDS * 4,
                      .run = INTEGER_RUN / UNIT_INPUTS,
                      .turn = 1,
                      .runs = CODE_RUNS[coding]};
}

// A quantised weight as a loader gives it: `QuantizedWeight` of quantized.py.
typedef struct {
  const int8_t* codes;   // [out_size, in_size]
  const float* scale;    // [out_size, in_size / group_size]
  const float* minimum;  // the same, or NULL
  int64_t group_size;
} quantized_weight;

// Where a unit has the code of an input of an output, in bytes, and whether it is the upper half of one.
INLINE int64_t code_place(int64_t bits, int64_t output, int64_t input, int* is_upper) {
  const int64_t step = bits == 8 ? input / 4 : input / 8;
  *is_upper = bits == 4 && input / 4 % 2;
  return output / LANES * (unit_code_bytes(bits) / 2) + (step * LANES + output % LANES) * 4 + input % 4;
}

INLINE void store_scale(const linear_layer* layer, char* scales, int64_t index, float value) {
  if (layer->scale_element == ELEMENT_FLOAT)
    ((float*)scales)[index] = value;
  else
    ((float16*)scales)[index] = from_value_float16(value);
}

// What an output has in a unit; `first`: the unit's first input.
static void pack_unit(const linear_layer* layer, const quantized_weight* weight, const uint8_t* indexes, int64_t output,
                      int64_t first, char* unit) {
  const int64_t bits = code_bits(layer), size = layer->in_size, num_groups = groups_of_unit(layer);
  const int64_t nth = output % PANEL;
  for (int64_t i = 0; i < UNIT_INPUTS; i++) {
    int is_upper;
    char* byte = unit + code_place(bits, nth, i, &is_upper);
    const uint8_t code = first + i < size ? (uint8_t)weight->codes[output * size + first + i] : 0;
    if (bits == 8)
      *byte = (char)(code ^ CODE_OFFSET);
    else
      *byte = (char)(*byte | indexes[code] << (is_upper ? 4 : 0));
  }
  char* scales = unit + unit_code_bytes(bits);
  for (int64_t g = 0; g < num_groups && first + g * layer->group_size < size; g++) {
    const int64_t source = (output * size + first + g * layer->group_size) / weight->group_size;
    store_scale(layer, scales, g * PANEL + nth, weight->scale[source]);
    if (weight->minimum) store_scale(layer, scales, (num_groups + g) * PANEL + nth, weight->minimum[source]);
  }
}

// panels: zeros. The layer's own panels are not looked at.
void pack_quantized(const linear_layer* layer, const quantized_weight* weight, char* panels, int64_t num_threads) {
  const int64_t num_units = ceil_div(layer->in_size, UNIT_INPUTS), bytes = unit_bytes(layer, code_bits(layer));
  uint8_t indexes[256] = {0};
  for (int i = 15; i >= 0; i--) indexes[(uint8_t)layer->table[i]] = (uint8_t)i;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t panel = 0; panel < ceil_div(layer->out_size, PANEL); panel++)
    for (int64_t output = panel * PANEL; output < layer->out_size && output < (panel + 1) * PANEL; output++)
      for (int64_t unit = 0; unit < num_units; unit++)
        pack_unit(layer, weight, indexes, output, unit * UNIT_INPUTS, panels + (panel * num_units + unit) * bytes);
}

// present[code + 128] = 1 for each code that there is.
void find_codes(const int8_t* codes, int64_t num, uint8_t* present, int64_t num_threads) {
#pragma omp parallel num_threads((int)num_threads)
  {
    uint8_t own[256] = {0};
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num; i++) own[codes[i] + 128] = 1;
#pragma omp critical
    for (int i = 0; i < 256; i++) present[i] |= own[i];
  }
}

// A weight by its formula: a product that is rounded, then a difference.
INLINE float dequantized(float scale, int8_t code, float minimum) {
  const volatile float product = scale * (float)code;  // or both would be one instruction, and rounded once
  return product - minimum;
}

INLINE float scale_value(const linear_layer* layer, const char* scales, int64_t index) {
  return layer->scale_element == ELEMENT_FLOAT ? ((const float*)scales)[index]
                                               : value_float16(((const float16*)scales)[index]);
}

// A row of packed weights in float32.
static void take_quantized_row(const linear_layer* layer, int64_t output, float* row) {
  const int64_t bits = code_bits(layer), bytes = unit_bytes(layer, bits), nth = output % PANEL;
  const int64_t num_groups = groups_of_unit(layer), num_units = ceil_div(layer->in_size, UNIT_INPUTS);
  const char* panel = (const char*)layer->panels + output / PANEL * num_units * bytes;
  for (int64_t i = 0; i < layer->in_size; i++) {
    const char* unit = panel + i / UNIT_INPUTS * bytes;
    const char* scales = unit + unit_code_bytes(bits);
    const int64_t g = i % UNIT_INPUTS / layer->group_size * PANEL + nth;
    int is_upper;
    const uint8_t byte = (uint8_t)unit[code_place(bits, nth, i % UNIT_INPUTS, &is_upper)];
    const int8_t code = bits == 8 ? (int8_t)(byte ^ CODE_OFFSET) : layer->table[is_upper ? byte >> 4 : byte & 15];
    const float minimum = layer->has_minima ? scale_value(layer, scales, g + num_groups * PANEL) : 0.0f;
    row[i] = dequantized(scale_value(layer, scales, g), code, minimum);
  }
}
