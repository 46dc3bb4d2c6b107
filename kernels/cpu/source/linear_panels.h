// Packing weights of one element type into panels, and reading rows of packed weights.
#include "linear.h"

// weight: [out_size, in_size]. Padding of the last panel and unit is 0.
static void NAME(pack_linear)(const ELEMENT* weight, ELEMENT* panels, int64_t in_size, int64_t out_size, int64_t num_threads) {
  const ELEMENT zero = NAME(from_value)(0.0f);
  const int64_t padded_size = NAME(padded_size)(in_size);
  use_large_pages(panels, ceil_div(out_size, PANEL) * PANEL * padded_size * (int64_t)sizeof(ELEMENT));
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t first = 0; first < out_size; first += PANEL) {
    ELEMENT* panel = panels + first * padded_size;
    for (int64_t j = 0; j < PANEL; j++) {
      const ELEMENT* row = first + j < out_size ? weight + (first + j) * in_size : NULL;
      for (int64_t i = 0; i < padded_size; i++) panel[NAME(panel_place)(j, i)] = row && i < in_size ? row[i] : zero;
    }
  }
}

// Reads rows of packed weights, for embeddings: output[i] = weight[indexes[i]], in float32.
static void NAME(lookup_rows)(const ELEMENT* panels, const int64_t* indexes, float* output, int64_t num_indexes,
                            int64_t in_size) {
  for (int64_t n = 0; n < num_indexes; n++) {
    const ELEMENT* panel = panels + indexes[n] / PANEL * PANEL * NAME(padded_size)(in_size);
    for (int64_t i = 0; i < in_size; i++)
      output[n * in_size + i] = NAME(value)(panel[NAME(panel_place)(indexes[n] % PANEL, i)]);
  }
}

// output = values, as float32.
INLINE void NAME(widen)(const ELEMENT* values, float* output, int64_t size) {
  for (int64_t i = 0; i < size; i++) output[i] = NAME(value)(values[i]);
}
