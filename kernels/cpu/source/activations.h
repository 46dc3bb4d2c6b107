// Activations as the matrix products read them: *prepared*, in groups of rows that are multiplied together, a group's rows
// interleaved. A row is prepared by itself: what it becomes depends on no other row.
//
// ACTIVATION_FLOAT: float32; group g holds [in_size, rows of g]. A single row is its own group and lies as it was.

enum { ACTIVATION_FLOAT, ACTIVATION_BFLOAT16, ACTIVATION_INT8 };

// What a layer's product reads.
INLINE int activation_kind(const linear_layer* layer) {
  (void)layer;
  return ACTIVATION_FLOAT;
}

// Of all rows together.
INLINE int64_t prepared_bytes(int kind, int64_t num_rows, int64_t in_size) {
  (void)kind;
  return num_rows * in_size * (int64_t)sizeof(float);
}

// x: [in_size], the row's own values. prepared: of all rows.
INLINE void prepare_row(int kind, const row_groups* groups, int64_t row, const float* x, int64_t in_size,
                        void* prepared) {
  int64_t stride;
  float* target = (float*)prepared + row_place(groups, row, in_size, &stride);
  (void)kind;
  for (int64_t i = 0; i < in_size; i++) target[i * stride] = x[i];
}

// x: [num_rows, in_size]. Called by all threads of a region, which meet at its end.
static void prepare_rows(int kind, const row_groups* groups, const float* x, int64_t in_size, void* prepared) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < groups->num_rows; row++)
    prepare_row(kind, groups, row, x + row * in_size, in_size, prepared);
}
