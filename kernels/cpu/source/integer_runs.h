// The matmul loops of integers.h for one CODING, which form its table RUNS. Half of all machine code is generated here.
#include "common.h"
#include "tasks.h"
#include "rows.h"
#include "activations.h"
#include "integers.h"

#define MULTIPLY(R, C) \
  static void multiply_##R##x##C(const linear_layer* layer, const char* weights, int64_t panel_bytes, const char* x, \
                                 int64_t num, const char* ahead, int64_t stride, float* totals) { \
    multiply_codes(CODING, R, C, layer, weights, panel_bytes, (const uint32_t*)x, num, ahead, stride, totals); \
  }
EVERY_RUN(MULTIPLY)
#undef MULTIPLY

#define ENTRY(R, C) [C == 1 ? R : 0] = multiply_##R##x##C,
SHARED const run_function RUNS[] = {EVERY_RUN(ENTRY)};
#undef ENTRY
