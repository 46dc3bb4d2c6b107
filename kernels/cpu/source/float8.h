// Matrix products of bfloat16 activations with weights of float8 (e4m3) that have a scale for each output and `group_size`
// inputs, a *unit*. Every float8 is a bfloat16, and the product of two bfloat16 a float32. A unit's products are summed
// up as those over weights of bfloat16 are (bfloat16.h), and the sum, times the scale, is added to the total, unit by
// unit.
//
// A panel holds units: a byte for each weight, then the scales of PANEL outputs. Bytes lie as [group_size, PANEL]; for
// `vdpbf16ps` as [group_size / 2, LANES, 2, 2]: of a pair of inputs of an output in the first vector, and of that in the
// second one, first inputs and second ones.

enum { FLOAT8_RUN = 512 };  // inputs of a panel that are multiplied with all rows while they are near

INLINE int64_t float8_unit_bytes(const linear_layer* layer) {
  return PANEL * (layer->group_size + (int64_t)sizeof(float));
}

#if defined(HAS_BFLOAT16_DOTS)
enum { FLOAT8_ROW_BYTES = sizeof(uint32_t) / 2 };  // of an input of a prepared row

INLINE int64_t float8_place(int64_t output, int64_t input) {
  return input / 2 * 2 * PANEL + output % LANES * 4 + input % 2 * 2 + output / LANES;
}
#else
enum { FLOAT8_ROW_BYTES = sizeof(float) };

INLINE int64_t float8_place(int64_t output, int64_t input) { return input * PANEL + output; }
#endif

extern SHARED const run_function FLOAT8_RUNS[];  // float8_runs.h

INLINE arithmetic float8_arithmetic(const linear_layer* layer) {
  return (arithmetic){.unit = layer->group_size,
                      .weight_bytes = float8_unit_bytes(layer),
                      .row_bytes = layer->group_size * FLOAT8_ROW_BYTES,
                      .run = FLOAT8_RUN / layer->group_size,
                      .turn = 1,
                      .runs = FLOAT8_RUNS};
}
