// Matmuls of bfloat16 activations with float8 weights (e4m3). Each output has a scale for every `group_size` inputs, a
// *unit*. Every float8 value is representable in bfloat16, and the product of two bfloat16 numbers in float32. The
// products of a unit are summed in the same way as for bfloat16 weights (bfloat16.h). The sum times the scale is added
// to the total, unit by unit.
//
// A panel consists of units: a byte for each weight, then the scales of PANEL outputs. The bytes are [group_size,
// PANEL]. For `vdpbf16ps` they are [group_size / 2, LANES, 2, 2]: for each pair of inputs and each lane, the first
// inputs of the outputs in the first and second vector, then their second inputs.

// number of inputs of a panel that are multiplied with all rows while they are in the nearest cache
enum { FLOAT8_RUN = 512 };

INLINE int64_t float8_unit_bytes(const linear_layer* layer) {
  return PANEL * (layer->group_size + (int64_t)sizeof(float));
}

#if defined(HAS_BFLOAT16_DOTS)
enum { FLOAT8_ROW_BYTES = sizeof(uint32_t) / 2 };  // bytes of one input of a prepared row

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
