// Packing integer weights into panels, and reading rows of packed weights.

// Returns the offset in a unit, in bytes, of the code of an output and an input, if `num` steps share a byte. The codes
// of the output's vector begin at `start`.
INLINE int64_t code_place(int64_t start, int64_t output, int64_t input, int64_t num) {
  return start + (input / 4 / num * LANES + output % LANES) * 4 + input % 4;
}

// Stores the code of an output and an input in a unit whose codes are 0. A code of fewer than 8 bits is not negative.
INLINE void store_code(int64_t bits, uint8_t* unit, int64_t output, int64_t input, uint8_t code) {
  const int64_t start = output / LANES * (unit_code_bytes(bits) / 2), step = input / 4;
  if (bits == 8) {
    unit[code_place(start, output, input, 1)] = code ^ STORED_OFFSET;
    return;
  }
  unit[code_place(start, output, input, 2)] |= (uint8_t)((code & 15) << step % 2 * 4);
  if (bits == 6) unit[code_place(start + UPPER_BITS, output, input, 4)] |= (uint8_t)(code >> 4 << step % 4 * 2);
}

// Returns a code that `store_code` has stored.
INLINE uint8_t load_code(int64_t bits, const uint8_t* unit, int64_t output, int64_t input) {
  const int64_t start = output / LANES * (unit_code_bytes(bits) / 2), step = input / 4;
  if (bits == 8) return unit[code_place(start, output, input, 1)] ^ STORED_OFFSET;
  const uint8_t lower = unit[code_place(start, output, input, 2)] >> step % 2 * 4 & 15;
  if (bits == 4) return lower;
  return (uint8_t)(lower | (unit[code_place(start + UPPER_BITS, output, input, 4)] >> step % 4 * 2 & 3) << 4);
}

// Returns the offset of a unit in a panel. Sets `factors` to the offset of the factors of its scales.
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
    case ELEMENT_FLOAT8_E8M0FNU: ((uint8_t*)scales)[index] = exponent_of(value); break;
    case ELEMENT_FLOAT32: ((float*)scales)[index] = value; break;
    case ELEMENT_BFLOAT16: ((bfloat16*)scales)[index] = from_value_bfloat16(value); break;
    default: ((float16*)scales)[index] = from_value_float16(value);
  }
}

// Stores the scales, minima and zero points of an output in a unit. `first`: the first input of the unit.
static void pack_scales(const linear_layer* layer, const held_weight* weight, int64_t output, int64_t first,
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

// Stores the codes, scales, minima and zero points of an output in a unit.
static void pack_unit(const linear_layer* layer, const held_weight* weight, const uint8_t* indexes, int64_t output,
                      int64_t unit, char* panel) {
  const int64_t bits = code_bits(layer), size = layer->in_size, first = unit * UNIT_INPUTS, nth = output % PANEL;
  int64_t factors;
  char* codes = panel + unit_place(layer, unit, &factors);
  for (int64_t i = 0; i < UNIT_INPUTS; i++) {
    const uint8_t code = first + i < size ? ((const uint8_t*)weight->values)[output * size + first + i] : 0;
    store_code(bits, (uint8_t*)codes, nth, i, indexes[code]);
  }
  pack_scales(layer, weight, output, first, codes + unit_code_bytes(bits));
  if (!weight->scale_factor || unit % BLOCK_UNITS) return;
  const int64_t block = (output * size + first) / (UNIT_INPUTS * BLOCK_UNITS);
  store_scale(ELEMENT_FLOAT16, panel + factors, nth, weight->scale_factor[block]);
  if (weight->minimum) store_scale(ELEMENT_FLOAT16, panel + factors, PANEL + nth, weight->minimum_factor[block]);
}

static void pack_quantized(const linear_layer* layer, const held_weight* weight, char* panels, int64_t num_threads) {
  const int64_t num_units = ceil_div(layer->in_size, UNIT_INPUTS), bytes = weight_bytes(layer, code_bits(layer));
  uint8_t indexes[256] = {0};
  for (int i = 0; i < 256; i++) indexes[i] = (uint8_t)(layer->element == ELEMENT_INT6 ? i - layer->table[0] : i);
  for (int i = 15; i >= 0 && layer->element == ELEMENT_INT4; i--) indexes[(uint8_t)layer->table[i]] = (uint8_t)i;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t panel = 0; panel < ceil_div(layer->out_size, PANEL); panel++) {
    char* own = panels + panel * num_units * bytes;
    memset(own, 0, (size_t)(num_units * bytes));
    for (int64_t output = panel * PANEL; output < layer->out_size && output < (panel + 1) * PANEL; output++)
      for (int64_t unit = 0; unit < num_units; unit++) pack_unit(layer, weight, indexes, output, unit, own);
  }
}

int64_t find_codes(const int8_t* codes, int64_t num, int8_t table[16], int64_t num_threads) {
  uint8_t present[256] = {0};
#pragma omp parallel num_threads((int)num_threads)
  {
    uint8_t own[256] = {0};
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num; i++) own[codes[i] + 128] = 1;
#pragma omp critical
    for (int i = 0; i < 256; i++) present[i] |= own[i];
  }
  int lowest = INT8_MAX, highest = INT8_MIN, num_codes = 0;
  for (int code = INT8_MIN; code <= INT8_MAX; code++) {
    if (!present[code + 128]) continue;
    lowest = code < lowest ? code : lowest;
    highest = code;
    if (num_codes++ < 16) table[num_codes - 1] = (int8_t)code;
  }
  if (num_codes > 16) {
    table[0] = lowest < 0 ? -32 : 0;
    return lowest >= table[0] && highest < table[0] + 64 ? 6 : 8;
  }
  const int is_next = (lowest >= -8 && highest < 8) || (lowest >= 0 && highest < 16);
  const int first = lowest >= -8 && highest < 8 ? -8 : 0;
  for (int i = is_next ? 0 : num_codes; i < 16; i++) table[i] = (int8_t)(is_next ? first + i : highest);
  return 4;
}

// Computes a weight in two steps, each rounded: a multiplication, then a subtraction.
INLINE float dequantized(float scale, int32_t code, float minimum) {
  // volatile, to keep the compiler from fusing both steps into one rounding
  const volatile float product = scale * (float)code;
  return product - minimum;
}

INLINE float scale_value(const linear_layer* layer, const char* scales, int64_t index, const float16* factor) {
  switch (layer->scale_element) {
    case ELEMENT_INT8: return (float)((const int8_t*)scales)[index] * value_float16(*factor);
    case ELEMENT_FLOAT8_E8M0FNU: return power_of(((const uint8_t*)scales)[index]);
    case ELEMENT_FLOAT32: return ((const float*)scales)[index];
    case ELEMENT_BFLOAT16: return value_bfloat16(((const bfloat16*)scales)[index]);
    default: return value_float16(((const float16*)scales)[index]);
  }
}

// Returns the weight of an input and of the `nth` output of a panel.
static float quantized_value(const linear_layer* layer, const char* panel, int64_t nth, int64_t input) {
  const int64_t bits = code_bits(layer), num_scales = groups_of_unit(layer) * PANEL;
  int64_t place;
  const char* unit = panel + unit_place(layer, input / UNIT_INPUTS, &place);
  const char* scales = unit + unit_code_bytes(bits);
  const float16* factors = (const float16*)(panel + place) + nth;
  const int64_t g = input % UNIT_INPUTS / layer->group_size * PANEL + nth;
  const uint8_t stored = load_code(bits, (const uint8_t*)unit, nth, input % UNIT_INPUTS);
  const int8_t code = bits == 4 ? layer->table[stored] : (int8_t)(bits == 6 ? stored + layer->table[0] : stored);
  const int8_t* zeros = (const int8_t*)scales + num_scales * scale_bytes(layer) * (1 + layer->has_minima);
  const float minimum = layer->has_minima ? scale_value(layer, scales, num_scales + g, factors + PANEL) : 0.0f;
  return dequantized(scale_value(layer, scales, g, factors), code - (layer->has_zeros ? zeros[g] : 0), minimum);
}

// Reads a row of packed weights as float32.
static void take_quantized_row(const linear_layer* layer, int64_t output, float* row) {
  const int64_t num_units = ceil_div(layer->in_size, UNIT_INPUTS);
  const char* panel = (const char*)layer->panels + output / PANEL * num_units * weight_bytes(layer, code_bits(layer));
  for (int64_t i = 0; i < layer->in_size; i++) row[i] = quantized_value(layer, panel, output % PANEL, i);
}
