// Activations as the matrix products read them: float32, in groups of rows that are multiplied together, a group's rows
// interleaved: group g holds [in_size, rows of g]. A single row is its own group and lies as it was.

enum {
  PANEL = 2 * LANES,  // outputs that are computed together, in two vectors
  RUN = 256,          // inputs that are summed up one after the other: longer sums round off more
};
// As many rows as leave registers for two vectors of weights and one of activations.
#if defined(HAS_AVX512)
#define GROUP_ROWS 12
#else
#define GROUP_ROWS 6
#endif

// y = x W^T + b. `linear.py` mirrors this structure.
typedef struct {
  const void* panels;  // packed weights of an element type
  const float* bias;   // [out_size], or NULL
  int64_t in_size, out_size;
  int64_t element;  // which type: ELEMENT_FLOAT and so on
} linear_layer;

enum { ELEMENT_FLOAT, ELEMENT_BFLOAT16, ELEMENT_FLOAT16 };

// The first `num_larger` groups have size + 1 rows, the others `size`.
typedef struct {
  int64_t num_rows, num_groups, size, num_larger;
} row_groups;

typedef struct {
  int64_t start, num_rows;
} row_group;

INLINE row_groups group_rows(int64_t num_rows) {
  const int64_t num_groups = (num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
  if (num_groups == 0) return (row_groups){0};
  return (row_groups){num_rows, num_groups, num_rows / num_groups, num_rows % num_groups};
}

INLINE row_group nth_group(const row_groups* groups, int64_t index) {
  const int64_t num_before = index < groups->num_larger ? index : groups->num_larger;
  return (row_group){index * groups->size + num_before, groups->size + (index < groups->num_larger)};
}

// Where a row's first value lies; the next ones follow at a distance of *stride.
INLINE int64_t row_place(const row_groups* groups, int64_t row, int64_t in_size, int64_t* stride) {
  const int64_t num_in_larger = groups->num_larger * (groups->size + 1);
  const int64_t index = row < num_in_larger ? row / (groups->size + 1)
                                            : groups->num_larger + (row - num_in_larger) / groups->size;
  const row_group group = nth_group(groups, index);
  *stride = group.num_rows;
  return group.start * in_size + row - group.start;
}

INLINE void interleave_row(const row_groups* groups, int64_t row, const float* x, int64_t in_size, float* interleaved) {
  int64_t stride;
  float* target = interleaved + row_place(groups, row, in_size, &stride);
  for (int64_t i = 0; i < in_size; i++) target[i * stride] = x[i];
}

// x: [num_rows, in_size]. Called by all threads of a region, which meet at its end.
static void interleave_rows(const row_groups* groups, const float* x, int64_t in_size, float* interleaved) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < groups->num_rows; row++)
    interleave_row(groups, row, x + row * in_size, in_size, interleaved);
}

// y[first...] of one row = sums + bias, cut off at the last output.
INLINE void store_outputs(const linear_layer* layer, float* y, int64_t first, floats sums) {
  if (first + LANES <= layer->out_size) {
    store_float(y + first, layer->bias ? sums + load_float(layer->bias + first) : sums);
  } else {
    for (int64_t i = first; i < layer->out_size; i++) y[i] = sums[i - first] + (layer->bias ? layer->bias[i] : 0.0f);
  }
}
