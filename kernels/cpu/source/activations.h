// Activations in the form that matmuls read, called *prepared*. Rows that are multiplied together form a group, and the
// rows of a group are interleaved. If tiles multiply them, the inputs of a unit are not: [rows of g, 32]. Each row is prepared independently of other rows. A row's inputs are padded with
// zeros.
//
// - ELEMENT_FLOAT32: float32; group g is [in_size, rows of g].
// - ELEMENT_BFLOAT16: rounded to bfloat16; group g is [in_size / 2, rows of g, 2]. If the processor has no bfloat16
//   multiplication, the rounded values are stored as float32, in the layout of ELEMENT_FLOAT32.
// - ELEMENT_INT8: int8 with a scale per unit of 32 inputs; group g is [in_size / 32, INT8_WORDS, rows of g].

// The words of one row in a unit: its inputs, four per word; the scale; the negated integer sum of all inputs; the
// negated integer sum of the first half; and the negated sum of all inputs times the scale, which is multiplied by
// minima.
enum { UNIT_INPUTS = 32, INT8_SCALE = 8, INT8_SUM, INT8_FIRST_SUM, INT8_SCALED_SUM, INT8_WORDS };

// Bytes of one prepared row.
INLINE int64_t prepared_row_bytes(int64_t kind, int64_t in_size) {
  if (kind == ELEMENT_INT8) return ceil_div(in_size, UNIT_INPUTS) * INT8_WORDS * 4;
#if defined(HAS_BFLOAT16_DOTS)
  if (kind == ELEMENT_BFLOAT16) return ceil_div(in_size, 2) * 4;
#endif
  (void)kind;
  return ceil_div(in_size, 2) * 2 * (int64_t)sizeof(float);
}

// Bytes of all prepared rows.
INLINE int64_t prepared_bytes(int64_t kind, int64_t num_rows, int64_t in_size) {
  return num_rows * prepared_row_bytes(kind, in_size);
}

// Returns the group that contains a row.
INLINE row_group group_of_row(const row_groups* groups, int64_t row) {
  const int64_t num_in_larger = groups->num_larger * (groups->size + 1);
  return nth_group(groups, row < num_in_larger ? row / (groups->size + 1)
                                               : groups->num_larger + (row - num_in_larger) / groups->size);
}

// x: [in_size]. target: the place of the row's first value; further values follow at a distance of `stride`.
INLINE void prepare_floats(const float* x, int64_t in_size, int is_rounded, float* target, int64_t stride) {
  for (int64_t i = 0; i < in_size; i++)
    target[i * stride] = is_rounded ? value_bfloat16(from_value_bfloat16(x[i])) : x[i];
  if (in_size % 2) target[in_size * stride] = 0.0f;
}

// Prepares a row of bfloat16 pairs, like `prepare_floats`.
INLINE void prepare_bfloat16(const float* x, int64_t in_size, uint32_t* target, int64_t stride) {
  bfloat16 rounded[2 * LANES];
  for (int64_t first = 0; first < in_size; first += 2 * LANES) {
    const int64_t num = in_size - first < 2 * LANES ? in_size - first : 2 * LANES;
    float padded[2 * LANES] = {0};
    const float* values = x + first;
    if (num < 2 * LANES) values = memcpy(padded, values, sizeof(float) * (size_t)num);
    store_bfloat16(rounded, load_float(values));
    store_bfloat16(rounded + LANES, load_float(values + LANES));
    for (int64_t pair = 0; pair < ceil_div(num, 2); pair++)
      memcpy(&target[(first / 2 + pair) * stride], &rounded[2 * pair], sizeof *target);
  }
}

// Returns the factor that maps a unit's inputs to integers of at most 127, and sets `scale` to the inverse factor,
// which is the largest absolute value / 127. Both are 0 if all inputs are close to 0. The scale is NaN if an input is
// not finite.
INLINE float scale_unit(const float* x, float* scale) {
  ints largest = {0};
  for (int i = 0; i < UNIT_INPUTS; i += LANES) {
    // absolute values; their bits are ordered like their values
    const ints bits = (ints)load_float(x + i) & 0x7fffffff;
    const ints is_larger = bits > largest;
    largest = (bits & is_larger) | (largest & ~is_larger);
  }
  const int32_t bits = largest_int(largest);
  float value;
  memcpy(&value, &bits, sizeof value);
  *scale = bits >= 0x7f800000 ? NAN : value > 1e-30f ? value / 127.0f : 0.0f;
  return bits < 0x7f800000 && value > 1e-30f ? 127.0f / value : 0.0f;
}

// Returns the index in a unit of the word with four inputs of a row.
INLINE int64_t input_place(int64_t num_rows, int64_t row, int64_t word) {
#if defined(HAS_TILES)
  (void)num_rows;
  return row * (UNIT_INPUTS / 4) + word;
#else
  return word * num_rows + row;
#endif
}

// x: [UNIT_INPUTS], which may contain NaN and infinities.
INLINE void prepare_unit(const float* x, uint32_t* unit, int64_t nth, int64_t num_rows) {
  float scale;
  const float factor = scale_unit(x, &scale);
  int8_t codes[UNIT_INPUTS];
  ints parts[2] = {{0}, {0}};
  for (int i = 0; i < UNIT_INPUTS; i += LANES) {
    const ints rounded = factor == 0.0f ? (ints){0} : round_to_ints(load_float(x + i) * splat(factor));
    const bytes narrow = __builtin_convertvector(rounded, bytes);
    memcpy(codes + i, &narrow, sizeof narrow);
    parts[i / 16] += rounded;
  }
  const int32_t first = -sum_ints(parts[0]), sum = first - sum_ints(parts[1]);
  const float scaled_sum = scale * (float)sum;
  for (int i = 0; i < UNIT_INPUTS / 4; i++) memcpy(&unit[input_place(num_rows, nth, i)], codes + 4 * i, 4);
  memcpy(&unit[INT8_SCALE * num_rows + nth], &scale, sizeof scale);
  memcpy(&unit[INT8_SUM * num_rows + nth], &sum, sizeof sum);
  memcpy(&unit[INT8_FIRST_SUM * num_rows + nth], &first, sizeof first);
  memcpy(&unit[INT8_SCALED_SUM * num_rows + nth], &scaled_sum, sizeof scaled_sum);
}

// unit: the group's first unit, in which the row is the `nth`.
INLINE void prepare_int8(const float* x, int64_t in_size, uint32_t* unit, int64_t nth, int64_t num_rows) {
  for (int64_t first = 0; first < in_size; first += UNIT_INPUTS, unit += INT8_WORDS * num_rows) {
    float padded[UNIT_INPUTS] = {0};
    const int64_t num = in_size - first;
    const float* values = x + first;
    if (num < UNIT_INPUTS) values = memcpy(padded, values, sizeof(float) * (size_t)num);
    prepare_unit(values, unit, nth, num_rows);
  }
}

// x: [in_size], the values of the row. prepared: the buffer of all rows.
INLINE void prepare_row(int64_t kind, const row_groups* groups, int64_t row, const float* x, int64_t in_size,
                        void* prepared) {
  const row_group group = group_of_row(groups, row);
  char* target = (char*)prepared + group.start * prepared_row_bytes(kind, in_size);
  const int64_t nth = row - group.start;
  if (kind == ELEMENT_INT8) {
    prepare_int8(x, in_size, (uint32_t*)target, nth, group.num_rows);
    return;
  }
#if defined(HAS_BFLOAT16_DOTS)
  if (kind == ELEMENT_BFLOAT16) {
    prepare_bfloat16(x, in_size, (uint32_t*)target + nth, group.num_rows);
    return;
  }
#endif
  prepare_floats(x, in_size, kind == ELEMENT_BFLOAT16, (float*)target + nth, group.num_rows);
}

// x: [num_rows, in_size]. All threads of a parallel region call this; they synchronize at its end.
static inline void prepare_rows(int64_t kind, const row_groups* groups, const float* x, int64_t in_size, void* prepared) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < groups->num_rows; row++)
    prepare_row(kind, groups, row, x + row * in_size, in_size, prepared);
}
