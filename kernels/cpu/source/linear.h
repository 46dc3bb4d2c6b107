// Matmuls of float32 activations with weights of one element type, accumulated in float32. They use the register tiles
// of BLIS (Van Zee and van de Geijn, 2015, https://doi.org/10.1145/2764454), over weights that are packed once.
//
// Weights [out_size, in_size] are packed in panels of PANEL outputs: [ceil(out_size / PANEL), in_size, PANEL]. bfloat16
// weights are packed in pairs of inputs, [ceil(out_size / PANEL), ceil(in_size / 2), PANEL, 2]. This is the layout that
// `vdpbf16ps` reads, and a shift and a mask widen it to float32.

#define IS_PAIRED_bfloat16 1

#if NAME(IS_PAIRED)
enum { NAME(UNIT) = 2 };
#else
enum { NAME(UNIT) = 1 };
#endif

// Returns the index of the weight of `output` and `input` in a panel.
INLINE int64_t NAME(panel_place)(int64_t output, int64_t input) {
  return (input / NAME(UNIT) * PANEL + output) * NAME(UNIT) + input % NAME(UNIT);
}

INLINE int64_t NAME(padded_size)(int64_t in_size) { return ceil_div(in_size, NAME(UNIT)) * NAME(UNIT); }

// Loads the weights of LANES outputs from `output` on.
INLINE floats NAME(load_weights)(const ELEMENT* panel, int64_t output, int64_t input) {
#if NAME(IS_PAIRED)
  words pairs;
  memcpy(&pairs, panel + NAME(panel_place)(output, input / 2 * 2), sizeof pairs);
  return (floats)(input % 2 ? pairs & 0xffff0000u : pairs << 16);
#else
  return NAME(load)(panel + NAME(panel_place)(output, input));
#endif
}

extern SHARED const run_function NAME(RUNS)[];  // linear_runs.h

INLINE arithmetic NAME(arithmetic)(void) {
  return (arithmetic){.unit = NAME(UNIT),
                      .weight_bytes = NAME(UNIT) * PANEL * (int64_t)sizeof(ELEMENT),
                      .row_bytes = NAME(UNIT) * (int64_t)sizeof(float),
                      .run = RUN / NAME(UNIT),
                      .turn = UNROLLED / NAME(UNIT),
                      .runs = NAME(RUNS)};
}
