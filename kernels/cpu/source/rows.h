// The description of a matmul, the grouping of its rows, and the storing of its results.

enum {
  PANEL = 2 * LANES,  // outputs computed together, in two vectors
  RUN = 256,          // inputs summed up one after the other; longer sums have larger rounding errors
  INTEGER_RUN = 1024, // the same for sums over groups of integers, which are exact
};
// As many rows as leave registers for two vectors of weights and one vector of activations.
#if defined(HAS_AVX512)
#define GROUP_ROWS 12
#else
#define GROUP_ROWS 6
#endif

enum {
  PANELS_PER_TASK = 4,  // or 1, for a matmul of several rows with fewer than FEW_PANELS panels
  FEW_PANELS = 16,
  PANELS_PER_EXPERT_TASK = 8,  // larger, because there are many tasks
  AHEAD = 2,       // distance in panels between the computed panel and the prefetched panel
  MIN_TILE_ROWS = 6,  // rows of a group that tiles multiply faster than vectors do
  UNROLLED = 4,    // units of inputs multiplied in one turn of the loop
  MAX_GROUPS = 8,  // row groups that share a panel's run while it is in the cache
};

// The first `num_larger` groups have size + 1 rows, the others `size` rows.
typedef struct {
  int64_t num_rows, num_groups, size, num_larger;
} row_groups;

typedef struct {
  int64_t start, num_rows;
} row_group;

// totals, [rows, outputs], += the dot products of a run of `num` units. `weights`: of the first panel; further panels
// follow at a distance of `panel_bytes`. Meanwhile other weights are prefetched, `stride` bytes in each turn, beginning
// at `ahead`. Without prefetching, a core would alternate between reading and computing.
typedef void (*run_function)(const linear_layer* layer, const char* weights, int64_t panel_bytes, const char* x,
                             int64_t num, const char* ahead, int64_t stride, float* totals);

// The way in which weights of one element type are multiplied with one kind of activations. A unit is a number of
// inputs that are stored together.
typedef struct {
  int64_t unit;              // number of inputs
  int64_t weight_bytes;      // of a unit in a panel
  int64_t row_bytes;         // of a unit in a row of prepared activations
  int64_t run;               // number of units summed up one after the other
  int64_t turn;              // units multiplied in one turn of the loop
  int uses_tiles;            // whether several rows are multiplied in the tiles of AMX, if the processor has them
  // [GROUP_ROWS + 1]: entry n is for n rows and one panel; entry 0 is for one row and four panels
  const run_function* runs;
} arithmetic;

// One matmul of a step.
typedef struct {
  const linear_layer* layer;
  arithmetic by;
  const row_groups* groups;
  const void* x;       // prepared (activations.h)
  float* y;            // [num_rows, out_size]; if gated, [num_rows, out_size / 2]
  int64_t num_panels;  // panels of all outputs; if gated, panels of the gates
  int64_t panels_per_task;
  int is_gated;        // the outputs are gates and the same number of ups, in whole panels, and y = silu(gate) * up
  const int32_t* places;  // [num_rows]: the row of y for each row of x; NULL: the same row
} product;

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE int64_t place_of(const product* p, int64_t row) { return p->places ? p->places[row] : row; }

// Requests large pages, so that sequential reads need fewer pages. The request is only a hint and may be ignored.
INLINE void use_large_pages(void* memory, int64_t size) {
#if defined(__linux__)
  const uintptr_t page = 4096, first = ((uintptr_t)memory + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)memory + (uintptr_t)size) / page * page;
  if (end > first) madvise((void*)first, end - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)size;
#endif
}

INLINE row_groups group_rows(int64_t num_rows) {
  const int64_t num_groups = (num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
  if (num_groups == 0) return (row_groups){0};
  return (row_groups){num_rows, num_groups, num_rows / num_groups, num_rows % num_groups};
}

INLINE row_group nth_group(const row_groups* groups, int64_t index) {
  const int64_t num_before = index < groups->num_larger ? index : groups->num_larger;
  return (row_group){index * groups->size + num_before, groups->size + (index < groups->num_larger)};
}

// The available sizes of runs, as MULTIPLY(rows, panels).
#if GROUP_ROWS > 6
#define EVERY_RUN(MULTIPLY) \
  MULTIPLY(1, 1) MULTIPLY(2, 1) MULTIPLY(3, 1) MULTIPLY(4, 1) MULTIPLY(5, 1) MULTIPLY(6, 1) MULTIPLY(7, 1) \
  MULTIPLY(8, 1) MULTIPLY(9, 1) MULTIPLY(10, 1) MULTIPLY(11, 1) MULTIPLY(12, 1) MULTIPLY(1, 4)
#else
#define EVERY_RUN(MULTIPLY) \
  MULTIPLY(1, 1) MULTIPLY(2, 1) MULTIPLY(3, 1) MULTIPLY(4, 1) MULTIPLY(5, 1) MULTIPLY(6, 1) MULTIPLY(1, 4)
#define LIST_OF_RUNS(name) {NULL, name##_1x1, name##_2x1, name##_3x1, name##_4x1, name##_5x1, name##_6x1}
#endif

INLINE void clear_sums(const int num_rows, const int num_vectors, floats (*sums)[8]) {
#pragma GCC unroll 12
  for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < num_vectors; v++) sums[r][v] = splat(0.0f);
}

// totals: [num_rows, num_vectors * LANES]
INLINE void add_sums(const int num_rows, const int num_vectors, floats (*sums)[8], float* totals) {
#pragma GCC unroll 12
  for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < num_vectors; v++) {
      float* total = totals + (r * num_vectors + v) * LANES;
      store_float(total, load_float(total) + sums[r][v]);
    }
}

// y[row] = outputs + bias for `num_rows` rows from `row` on. outputs: [num_rows, num], beginning with output `first`;
// values after the layer's last output are ignored.
INLINE void store_outputs(const product* p, int64_t row, int64_t num_rows, int64_t first, const int num,
                          const float* outputs) {
  const int64_t size = p->layer->out_size;
  const float* bias = p->layer->bias;
  for (int64_t r = 0; r < num_rows; r++)
#pragma GCC unroll 8
    for (int j = 0; j < num; j += LANES) {
      const int64_t output = first + j;
      float* y = p->y + place_of(p, row + r) * size;
      const floats sums = load_float(outputs + r * num + j);
      if (output + LANES <= size)
        store_float(y + output, bias ? sums + load_float(bias + output) : sums);
      else
        for (int64_t i = output; i < size; i++) y[i] = sums[i - output] + (bias ? bias[i] : 0.0f);
    }
}

// y[row] = silu(gates) * ups for `num_rows` rows from `row` on. gates, ups: [num_rows, num], like `outputs` above.
INLINE void store_gated(const product* p, int64_t row, int64_t num_rows, int64_t first, const int num,
                        const float* gates, const float* ups) {
  const int64_t size = p->layer->out_size / 2;
  const float* bias = p->layer->bias;
  for (int64_t r = 0; r < num_rows; r++)
    for (int j = 0; j < num; j += LANES) {
      floats gate = load_float(gates + r * num + j), up = load_float(ups + r * num + j);
      if (bias) {
        gate += load_float(bias + first + j);
        up += load_float(bias + size + first + j);
      }
      store_float(p->y + place_of(p, row + r) * size + first + j, gate / (splat(1.0f) + exponential(-gate)) * up);
    }
}

// Stores the results of a matmul. `ups`: the second half of the outputs, if the matmul is gated.
INLINE void store_products(const product* p, int64_t row, int64_t num_rows, int64_t first, const int num,
                           const float* outputs, const float* ups) {
  if (p->is_gated)
    store_gated(p, row, num_rows, first, num, outputs, ups);
  else
    store_outputs(p, row, num_rows, first, num, outputs);
}
