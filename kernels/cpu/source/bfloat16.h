// Matmuls of bfloat16 weights with bfloat16 activations: see bfloat16_runs.h.

#if defined(HAS_BFLOAT16_DOTS)
extern SHARED const run_function PAIR_RUNS[];

INLINE arithmetic pair_arithmetic(void) {
  return (arithmetic){.unit = 2,
                      .weight_bytes = 2 * (int64_t)sizeof(words),
                      .row_bytes = (int64_t)sizeof(uint32_t),
                      .run = RUN / 2,
                      .turn = UNROLLED,
                      .runs = PAIR_RUNS};
}
#endif
