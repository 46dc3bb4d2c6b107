// Matrix products of int8 activations with weights of 8 or 4 bits, in groups that have a scale each, and perhaps a zero
// point and a minimum: scale * (code - zero) - minimum. Sums over a group are integers and exact; each is taken to float32,
// times the scale of the activations, times that of the weights, and added to the sum of a run; so is the minimum, times
// the sum of the activations.
//
// A panel holds units of 32 inputs; a unit the codes of 2 vectors of outputs, then scales, minima and zeros, [1 or 2
// groups, PANEL] each. Codes of 8 bits lie as [8, LANES, 4]: four inputs of LANES outputs in a step. Of 4 bits two steps
// share a byte, the first one in the lower half; they are looked up in the layer's table, unless that counts upwards.
//
// Scales and minima are floats; or powers of two and 0, of which a byte holds the exponent as float32 has it; or integers
// of 8 bits, times a factor of float16. Then in_size is a multiple of 256, and before each 8 units there are the scales'
// factors, [PANEL], and the minima's; their products are exact in float32.
//
// Codes may be stored with an offset; the sum of the activations, times that, is taken off the sums.

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

// sums += products of four inputs with the codes of LANES outputs, which are stored with CODE_OFFSET.
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

// The same of codes below 16. Where that is faster, `sums` are of 16 bits: no 8 sums of two products are larger than
// 8 * 2 * 15 * 127. `whole_dots` adds them up.
INLINE ints add_small_dots(ints sums, words codes, words x) {
#if defined(HAS_AVX512) && !CODE_OFFSET
  return (ints)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)codes, (__m512i)x));
#elif defined(HAS_AVX2)
  return (ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)codes, (__m256i)x));
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

// Whether codes of 4 bits are what they stand for, or 8 more than that.
INLINE int needs_no_table(const linear_layer* layer) {
  int is_next = layer->table[0] == 0 || layer->table[0] == -8;
  for (int i = 1; i < 16; i++) is_next &= layer->table[i] == layer->table[i - 1] + 1;
  return is_next;
}

enum { STEPS = UNIT_INPUTS / 4 };

INLINE int64_t unit_code_bytes(int64_t bits) { return UNIT_INPUTS * PANEL * bits / 8; }
INLINE int64_t scale_bytes(const linear_layer* layer) {
  const int64_t element = layer->scale_element;
  return element == ELEMENT_FLOAT ? 4 : element == ELEMENT_INT8 || element == ELEMENT_POWER ? 1 : 2;
}
INLINE int64_t groups_of_unit(const linear_layer* layer) { return layer->group_size == UNIT_INPUTS ? 1 : 2; }

INLINE int64_t unit_bytes(const linear_layer* layer, int64_t bits) {
  const int64_t of_group = scale_bytes(layer) * (1 + layer->has_minima) + layer->has_zeros;
  return unit_code_bytes(bits) + PANEL * groups_of_unit(layer) * of_group;
}

enum { BLOCK_UNITS = 8 };  // that have factors in common

INLINE int64_t factor_bytes(const linear_layer* layer) {
  return layer->scale_element == ELEMENT_INT8 ? PANEL * (1 + layer->has_minima) * (int64_t)sizeof(float16) : 0;
}

// On average.
INLINE int64_t weight_bytes(const linear_layer* layer, int64_t bits) {
  return unit_bytes(layer, bits) + factor_bytes(layer) / BLOCK_UNITS;
}

// Powers of two, and 0, of which bytes hold the exponents.
INLINE floats load_powers(const uint8_t* exponents) {
#if defined(HAS_AVX512)
  return (floats)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)exponents)), 23);
#elif defined(HAS_AVX2)
  return (floats)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)exponents)), 23);
#else
  return (floats)((words){exponents[0], exponents[1], exponents[2], exponents[3]} << 23);
#endif
}

// Of LANES outputs from `index` on, where factors begin with the ones for the first of them.
INLINE floats load_scales(const linear_layer* layer, const char* scales, int64_t index, const float16* factors) {
  switch (layer->scale_element) {
    case ELEMENT_INT8: return load_int8((const int8*)scales + index) * load_float16(factors);
    case ELEMENT_POWER: return load_powers((const uint8_t*)scales + index);
    case ELEMENT_FLOAT: return load_float((const float*)scales + index);
    case ELEMENT_BFLOAT16: return load_bfloat16((const bfloat16*)scales + index);
    default: return load_float16((const float16*)scales + index);
  }
}

// Of LANES outputs, as integers.
INLINE ints load_zeros(const int8* zeros) { return __builtin_convertvector(load_int8(zeros), ints); }

// What a step of a vector of outputs has of a unit's codes; `of_vector`: the vector's.
INLINE words load_codes(const int coding, const char* of_vector, int step, words table) {
  const int64_t size = sizeof(words);
  if (coding == CODES_OF_8) return load_words(of_vector + step * size);
  const words both = load_words(of_vector + step / 2 * size), indexes = (step % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
  return coding == CODES_OF_TABLE ? look_up(table, indexes) : indexes;
}

// The same place, unknown to the compiler: or it would load what two branches have in common before them, into more
// registers than there are.
INLINE const void* branch_of(const void* place) {
  __asm__("" : "+r"(place));
  return place;
}

INLINE words word_of(const uint32_t* x) { return *x - (words){0}; }
INLINE floats float_of(const uint32_t* x) { return (floats)word_of(x); }

// Where a tile's weights are, and how their codes are read.
typedef struct {
  const linear_layer* layer;
  int64_t panel_bytes;
  int64_t place;  // of the first vector of the outputs in the first panel
  words table;
  int32_t mask;         // of what codes of 4 bits are stored with: all bits, or none
  const char* factors;  // of the scales of units
} code_tile;

INLINE code_tile tile_of(const int coding, const linear_layer* layer, int64_t panel_bytes, int64_t place) {
  return (code_tile){.layer = layer,
                     .panel_bytes = panel_bytes,
                     .place = place,
                     .table = coding == CODES_OF_TABLE ? offset_table(layer) : (words){0},
                     .mask = layer->table[0] ? -1 : 0};
}

// What there is to add to sums over codes, for what the codes are stored with. `sum`: of the activations, negative.
INLINE ints offset_dots(const int coding, const code_tile* t, ints sum) {
  if (coding == CODES_OF_4) return (sum << 3) & t->mask;
  return CODE_OFFSET ? sum << 7 : (ints){0};
}

// The negative sum of the activations of a group: of the whole unit, or of the `nth` half.
INLINE ints group_sum(const int is_whole, const int nth, const int pitch, const uint32_t* x) {
  const ints sum = (ints)word_of(x + INT8_SUM * pitch), first = (ints)word_of(x + INT8_FIRST_SUM * pitch);
  return is_whole ? sum : nth == 0 ? first : sum - first;
}

// dots: [R, V] -= the sums of the activations of a group times zero points.
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

// sums: [R, V] -= the sums of the activations of a group times minima.
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

// sums: [R, V] += the products of a group, the `nth` of its unit, whose integer sums over codes are `dots`.
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

// sums: [R, V] += the products of the `nth` group of a unit. `unit`: that of the first vector's panel.
INLINE void multiply_group(const int coding, const int is_whole, const int nth, const int R, const int V,
                           const code_tile* t, const char* weights, const uint32_t* inputs, floats (*sums)[8]) {
  const char* unit = branch_of(weights);
  const uint32_t* x = branch_of(inputs);
  const int bits = coding == CODES_OF_8 ? 8 : 4, num_steps = is_whole ? STEPS : STEPS / 2;
  const int64_t vector_bytes = unit_code_bytes(bits) / 2;
  ints dots[GROUP_ROWS][8];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) dots[r][v] = (ints){0};
#pragma GCC unroll 8
  for (int step = nth * num_steps; step < (nth + 1) * num_steps; step++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const char* of_vector = unit + v / 2 * t->panel_bytes + (t->place / LANES + v % 2) * vector_bytes;
      const words codes = load_codes(coding, of_vector, step, t->table);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const words four = word_of(x + step * R + r);
        dots[r][v] = coding == CODES_OF_4 ? add_small_dots(dots[r][v], codes, four) : add_code_dots(dots[r][v], codes, four);
      }
    }
  scale_dots(coding, is_whole, nth, R, V, t, unit + unit_code_bytes(bits), x, dots, sums);
}

// How many sums registers hold beside as many integer sums.
#if defined(HAS_AVX512)
#define MAX_SUMS 12
#else
#define MAX_SUMS 6
#endif

// R rows and V vectors of outputs of a run; totals: the first of them, whose rows are `size` floats.
INLINE void multiply_tile(const int coding, const int R, const int V, code_tile* t, const char* weights,
                          const uint32_t* x, int64_t num, const char* ahead, int64_t stride, float* totals, int64_t size) {
  const int64_t bytes = unit_bytes(t->layer, coding == CODES_OF_8 ? 8 : 4), of_factors = factor_bytes(t->layer);
  const int is_whole = t->layer->group_size == UNIT_INPUTS;
  floats sums[GROUP_ROWS][8];
  clear_sums(R, V, sums);
  for (int64_t i = 0; i < num; i++, ahead += stride, weights += bytes, x += INT8_WORDS * R) {
    // Into the second cache: the nearest one is full of what is multiplied now.
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

// Where a panel's outputs are computed in two tiles, each fetches half of what is fetched meanwhile.
INLINE void multiply_codes(const int coding, const int R, const int C, const linear_layer* layer, const char* weights,
                           int64_t panel_bytes, const uint32_t* x, int64_t num, const char* ahead, int64_t stride,
                           float* totals) {
  const int size = 2 * C * LANES, V = C == 1 && 2 * R > MAX_SUMS ? 1 : 2 * C;
  const int64_t share = stride * V / (2 * C);
#pragma GCC unroll 2
  for (int v = 0; v < 2 * C; v += V, ahead += num * share) {
    code_tile t = tile_of(coding, layer, panel_bytes, v * LANES);
    multiply_tile(coding, R, V, &t, weights, x, num, ahead, share, totals + v * LANES, size);
  }
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
  const int coding = layer->element == ELEMENT_INT8 ? CODES_OF_8 : needs_no_table(layer) ? CODES_OF_4 : CODES_OF_TABLE;
  return (arithmetic){.unit = UNIT_INPUTS,
                      .weight_bytes = weight_bytes(layer, code_bits(layer)),
                      .row_bytes = INT8_WORDS * 4,
                      .run = INTEGER_RUN / UNIT_INPUTS,
                      .turn = 1,
                      .runs = CODE_RUNS[coding]};
}

// A quantised weight as a loader gives it: `QuantizedWeight` of quantized.py.
typedef struct {
  const int8_t* codes;          // [out_size, in_size]
  const float* scale;           // [out_size, in_size / group_size]
  const float* minimum;         // the same, or NULL
  const int8_t* zero;           // the same, or NULL
  const float* scale_factor;    // [out_size, in_size / 256], or NULL
  const float* minimum_factor;  // the same, or NULL
  int64_t group_size;
} quantized_weight;

// Where a unit has the code of an input of an output, in bytes, and whether it is the upper half of one.
INLINE int64_t code_place(int64_t bits, int64_t output, int64_t input, int* is_upper) {
  const int64_t step = bits == 8 ? input / 4 : input / 8;
  *is_upper = bits == 4 && input / 4 % 2;
  return output / LANES * (unit_code_bytes(bits) / 2) + (step * LANES + output % LANES) * 4 + input % 4;
}

// Where a panel's unit is, and the factors of its scales.
INLINE int64_t unit_place(const linear_layer* layer, int64_t unit, int64_t* factors) {
  const int64_t bytes = unit_bytes(layer, code_bits(layer));
  *factors = unit / BLOCK_UNITS * (BLOCK_UNITS * bytes + factor_bytes(layer));
  return *factors + factor_bytes(layer) + unit % BLOCK_UNITS * bytes;
}

INLINE uint8_t exponent_of(float power) {
  uint32_t bits;
  memcpy(&bits, &power, sizeof bits);
  return (uint8_t)(bits >> 23);
}

INLINE float power_of(uint8_t exponent) {
  const uint32_t bits = (uint32_t)exponent << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

INLINE void store_scale(int64_t element, char* scales, int64_t index, float value) {
  switch (element) {
    case ELEMENT_INT8: ((int8_t*)scales)[index] = (int8_t)value; break;
    case ELEMENT_POWER: ((uint8_t*)scales)[index] = exponent_of(value); break;
    case ELEMENT_FLOAT: ((float*)scales)[index] = value; break;
    case ELEMENT_BFLOAT16: ((bfloat16*)scales)[index] = from_value_bfloat16(value); break;
    default: ((float16*)scales)[index] = from_value_float16(value);
  }
}

// The scales, minima and zeros that an output has in a unit; `first`: the unit's first input.
static void pack_scales(const linear_layer* layer, const quantized_weight* weight, int64_t output, int64_t first,
                        char* scales) {
  const int64_t num_groups = groups_of_unit(layer), size = layer->in_size, element = layer->scale_element;
  int8_t* zeros = (int8_t*)scales + num_groups * PANEL * scale_bytes(layer) * (1 + layer->has_minima);
  for (int64_t g = 0; g < num_groups && first + g * layer->group_size < size; g++) {
    const int64_t source = (output * size + first + g * layer->group_size) / weight->group_size;
    const int64_t place = g * PANEL + output % PANEL;
    store_scale(element, scales, place, weight->scale[source]);
    if (weight->minimum) store_scale(element, scales, num_groups * PANEL + place, weight->minimum[source]);
    if (weight->zero) zeros[place] = weight->zero[source];
  }
}

// What an output has in a unit.
static void pack_unit(const linear_layer* layer, const quantized_weight* weight, const uint8_t* indexes, int64_t output,
                      int64_t unit, char* panel) {
  const int64_t bits = code_bits(layer), size = layer->in_size, first = unit * UNIT_INPUTS, nth = output % PANEL;
  int64_t factors;
  char* codes = panel + unit_place(layer, unit, &factors);
  for (int64_t i = 0; i < UNIT_INPUTS; i++) {
    int is_upper;
    char* byte = codes + code_place(bits, nth, i, &is_upper);
    const uint8_t code = first + i < size ? (uint8_t)weight->codes[output * size + first + i] : 0;
    if (bits == 8)
      *byte = (char)(code ^ CODE_OFFSET);
    else
      *byte = (char)(*byte | indexes[code] << (is_upper ? 4 : 0));
  }
  pack_scales(layer, weight, output, first, codes + unit_code_bytes(bits));
  if (!weight->scale_factor || unit % BLOCK_UNITS) return;
  const int64_t block = (output * size + first) / (UNIT_INPUTS * BLOCK_UNITS);
  store_scale(ELEMENT_FLOAT16, panel + factors, nth, weight->scale_factor[block]);
  if (weight->minimum) store_scale(ELEMENT_FLOAT16, panel + factors, PANEL + nth, weight->minimum_factor[block]);
}

// panels: zeros. The layer's own panels are not looked at.
void pack_quantized(const linear_layer* layer, const quantized_weight* weight, char* panels, int64_t num_threads) {
  const int64_t num_units = ceil_div(layer->in_size, UNIT_INPUTS), bytes = weight_bytes(layer, code_bits(layer));
  uint8_t indexes[256] = {0};
  for (int i = 15; i >= 0; i--) indexes[(uint8_t)layer->table[i]] = (uint8_t)i;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t panel = 0; panel < ceil_div(layer->out_size, PANEL); panel++)
    for (int64_t output = panel * PANEL; output < layer->out_size && output < (panel + 1) * PANEL; output++)
      for (int64_t unit = 0; unit < num_units; unit++)
        pack_unit(layer, weight, indexes, output, unit, panels + panel * num_units * bytes);
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
INLINE float dequantized(float scale, int32_t code, float minimum) {
  const volatile float product = scale * (float)code;  // or both would be one instruction, and rounded once
  return product - minimum;
}

INLINE float scale_value(const linear_layer* layer, const char* scales, int64_t index, const float16* factor) {
  switch (layer->scale_element) {
    case ELEMENT_INT8: return (float)((const int8_t*)scales)[index] * value_float16(*factor);
    case ELEMENT_POWER: return power_of(((const uint8_t*)scales)[index]);
    case ELEMENT_FLOAT: return ((const float*)scales)[index];
    case ELEMENT_BFLOAT16: return value_bfloat16(((const bfloat16*)scales)[index]);
    default: return value_float16(((const float16*)scales)[index]);
  }
}

// The weight of an output, the `nth` of its panel, and of an input.
static float quantized_value(const linear_layer* layer, const char* panel, int64_t nth, int64_t input) {
  const int64_t bits = code_bits(layer), num_scales = groups_of_unit(layer) * PANEL;
  int64_t place;
  const char* unit = panel + unit_place(layer, input / UNIT_INPUTS, &place);
  const char* scales = unit + unit_code_bytes(bits);
  const float16* factors = (const float16*)(panel + place) + nth;
  const int64_t g = input % UNIT_INPUTS / layer->group_size * PANEL + nth;
  int is_upper;
  const uint8_t byte = (uint8_t)unit[code_place(bits, nth, input % UNIT_INPUTS, &is_upper)];
  const int8_t code = bits == 8 ? (int8_t)(byte ^ CODE_OFFSET) : layer->table[is_upper ? byte >> 4 : byte & 15];
  const int8_t* zeros = (const int8_t*)scales + num_scales * scale_bytes(layer) * (1 + layer->has_minima);
  const float minimum = layer->has_minima ? scale_value(layer, scales, num_scales + g, factors + PANEL) : 0.0f;
  return dequantized(scale_value(layer, scales, g, factors), code - (layer->has_zeros ? zeros[g] : 0), minimum);
}

// A row of packed weights in float32.
static void take_quantized_row(const linear_layer* layer, int64_t output, float* row) {
  const int64_t num_units = ceil_div(layer->in_size, UNIT_INPUTS);
  const char* panel = (const char*)layer->panels + output / PANEL * num_units * weight_bytes(layer, code_bits(layer));
  for (int64_t i = 0; i < layer->in_size; i++) row[i] = quantized_value(layer, panel, output % PANEL, i);
}
