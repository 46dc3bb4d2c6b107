// Activations as the matrix products read them: *prepared*, in groups of rows that are multiplied together, a group's rows
// interleaved. A row is prepared by itself: what it becomes depends on no other row. A row's inputs are padded with zeros.
//
// ELEMENT_FLOAT32: float32; group g holds [in_size, rows of g].
// ELEMENT_BFLOAT16: rounded to bfloat16; group g holds [in_size / 2, rows of g, 2]. Where the processor does not
// multiply bfloat16, the rounded values lie in float32, as of ELEMENT_FLOAT32.
// ELEMENT_INT8: int8 with a scale per unit of 32 inputs; group g holds [in_size / 32, INT8_WORDS, rows of g].

// What a row has of a unit, in words: its inputs, four in each; the scale; with the other sign, the integer sums of all
// inputs and of the first half; and that of all times the scale, as minima are multiplied with it.
enum { UNIT_INPUTS = 32, INT8_SCALE = 8, INT8_SUM, INT8_FIRST_SUM, INT8_SCALED_SUM, INT8_WORDS };

// Of a row.
INLINE int64_t prepared_row_bytes(int64_t kind, int64_t in_size) {
  if (kind == ELEMENT_INT8) return ceil_div(in_size, UNIT_INPUTS) * INT8_WORDS * 4;
#if defined(HAS_BFLOAT16_DOTS)
  if (kind == ELEMENT_BFLOAT16) return ceil_div(in_size, 2) * 4;
#endif
  (void)kind;
  return ceil_div(in_size, 2) * 2 * (int64_t)sizeof(float);
}

// Of all rows together.
INLINE int64_t prepared_bytes(int64_t kind, int64_t num_rows, int64_t in_size) {
  return num_rows * prepared_row_bytes(kind, in_size);
}

// The group of a row, and which of its rows it is.
INLINE row_group group_of_row(const row_groups* groups, int64_t row) {
  const int64_t num_in_larger = groups->num_larger * (groups->size + 1);
  return nth_group(groups, row < num_in_larger ? row / (groups->size + 1)
                                               : groups->num_larger + (row - num_in_larger) / groups->size);
}

// x: [in_size]; target: the first of the row's values, the next ones at a distance of `stride`.
INLINE void prepare_floats(const float* x, int64_t in_size, int is_rounded, float* target, int64_t stride) {
  for (int64_t i = 0; i < in_size; i++)
    target[i * stride] = is_rounded ? value_bfloat16(from_value_bfloat16(x[i])) : x[i];
  if (in_size % 2) target[in_size * stride] = 0.0f;
}

// The same in pairs.
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

// The factor that takes a unit's inputs to integers up to 127, and back, which is the scale: that of the largest. Both are
// 0 where all are next to 0; where one is not finite, the scale is NaN.
INLINE float scale_unit(const float* x, float* scale) {
  ints largest = {0};
  for (int i = 0; i < UNIT_INPUTS; i += LANES) {
    const ints bits = (ints)load_float(x + i) & 0x7fffffff;  // in the order of sizes
    const ints is_larger = bits > largest;
    largest = (bits & is_larger) | (largest & ~is_larger);
  }
  const int32_t bits = largest_int(largest);
  float value;
  memcpy(&value, &bits, sizeof value);
  *scale = bits >= 0x7f800000 ? NAN : value > 1e-30f ? value / 127.0f : 0.0f;
  return bits < 0x7f800000 && value > 1e-30f ? 127.0f / value : 0.0f;
}

// x: [UNIT_INPUTS], finite or not.
INLINE void prepare_unit(const float* x, uint32_t* target, int64_t stride) {
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
  for (int i = 0; i < UNIT_INPUTS / 4; i++) memcpy(&target[i * stride], codes + 4 * i, 4);
  memcpy(&target[INT8_SCALE * stride], &scale, sizeof scale);
  memcpy(&target[INT8_SUM * stride], &sum, sizeof sum);
  memcpy(&target[INT8_FIRST_SUM * stride], &first, sizeof first);
  memcpy(&target[INT8_SCALED_SUM * stride], &scaled_sum, sizeof scaled_sum);
}

INLINE void prepare_int8(const float* x, int64_t in_size, uint32_t* target, int64_t stride) {
  for (int64_t first = 0; first < in_size; first += UNIT_INPUTS, target += INT8_WORDS * stride) {
    float padded[UNIT_INPUTS] = {0};
    const int64_t num = in_size - first;
    const float* values = x + first;
    if (num < UNIT_INPUTS) values = memcpy(padded, values, sizeof(float) * (size_t)num);
    prepare_unit(values, target, stride);
  }
}

// x: [in_size], the row's own values. prepared: of all rows.
INLINE void prepare_row(int64_t kind, const row_groups* groups, int64_t row, const float* x, int64_t in_size,
                        void* prepared) {
  const row_group group = group_of_row(groups, row);
  char* target = (char*)prepared + group.start * prepared_row_bytes(kind, in_size);
  const int64_t nth = row - group.start;
  if (kind == ELEMENT_INT8) {
    prepare_int8(x, in_size, (uint32_t*)target + nth, group.num_rows);
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

// x: [num_rows, in_size]. Called by all threads of a region, which meet at its end.
static inline void prepare_rows(int64_t kind, const row_groups* groups, const float* x, int64_t in_size, void* prepared) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < groups->num_rows; row++)
    prepare_row(kind, groups, row, x + row * in_size, in_size, prepared);
}
