// What attention does in float32 whatever the cache holds: scores from packed keys, and weights from scores.

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t ints4 __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints4){__VA_ARGS__})
#endif

INLINE void score_packed_rows(const int R, const tile* t, int row, const float* packed) {
  const float* queries = t->queries + row * t->stride;
  for (int j = 0; j < t->num_positions; j += 2 * LANES) {
    floats sums[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = splat(0.0f);
    for (int64_t d = 0; d < t->head_dim; d++) {
      const floats a = load_float(packed + d * TILE_POSITIONS + j);
      const floats b = load_float(packed + d * TILE_POSITIONS + j + LANES);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const floats q = splat(queries[r * t->stride + d]);
        sums[r][0] += q * a;
        sums[r][1] += q * b;
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      store_float(t->scores + (row + r) * TILE_POSITIONS + j, sums[r][0]);
      store_float(t->scores + (row + r) * TILE_POSITIONS + j + LANES, sums[r][1]);
    }
  }
}

// scores = queries . packed, for positions up to a multiple of two vectors.
static void score_packed(const tile* t, const float* packed) {
#define SCORE(R) case R: score_packed_rows(R, t, row, packed); break;
  for (int row = 0; row < t->num_rows; row += 6)
    switch (t->num_rows - row) {
      SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5)
      default: score_packed_rows(6, t, row, packed);
    }
#undef SCORE
}

// Caps and biases one pair's scores. `distance`: of the tile's first position to the query.
INLINE void shape_scores(const attention_step* step, float* scores, int size, float slope, int64_t distance) {
  float offsets[LANES];
  for (int i = 0; i < LANES; i++) offsets[i] = (float)i;
  for (int j = 0; j < size; j += LANES) {
    floats s = load_float(scores + j);
    if (step->softcap > 0.0f) s = splat(step->softcap) * hyperbolic_tangent(s / splat(step->softcap));
    if (slope != 0.0f) s -= splat(slope) * (splat((float)(distance - j)) - load_float(offsets));
    store_float(scores + j, s);
  }
}

// Turns one pair's scores into weights relative to its maximum so far, and rescales what was summed before.
// Positions from `begin` to `end` of the tile are visible, at least one.
INLINE void weigh_row(tile* t, int m, int begin, int end) {
  float* scores = t->scores + m * TILE_POSITIONS;
  const int size = (t->num_positions + LANES - 1) / LANES * LANES;
  for (int j = 0; j < begin; j++) scores[j] = -INFINITY;
  for (int j = end; j < size; j++) scores[j] = -INFINITY;
  floats largest = splat(t->maxima[m]);
  for (int j = 0; j < size; j += LANES) largest = larger(largest, load_float(scores + j));
  const float maximum = largest_lane(largest);
  // A finite base where all scores are -inf: their weights are 0 then, not NaN.
  const float base = maximum == -INFINITY ? 0.0f : maximum;
  floats total = splat(0.0f);
  for (int j = 0; j < size; j += LANES) {
    const floats weight = exponential(load_float(scores + j) - splat(base));
    total += weight;
    store_float(scores + j, weight);
  }
  const float factor = t->maxima[m] == maximum ? 1.0f : expf(t->maxima[m] - base);
  t->totals[m] = t->totals[m] * factor + sum_lanes(total);
  t->maxima[m] = maximum;
  if (factor != 1.0f) {
    float* sums = t->sums + m * t->stride;
    for (int64_t d = 0; d < t->stride; d += LANES) store_float(sums + d, load_float(sums + d) * splat(factor));
  }
}

// `first`: the position that the tile's scores begin with.
static void weigh_scores(const attention_step* step, const item* work, tile* t, int64_t first) {
  const int64_t group = step->num_heads / step->num_kv_heads;
  for (int m = 0; m < t->num_rows; m++) {
    const int64_t pair = work->first_pair + m;
    const int64_t position = query_position(step, work->row, pair);
    const int64_t begin = first_visible(step, position) - first, end = position + 1 - first;
    float* scores = t->scores + m * TILE_POSITIONS;
    if (end <= 0 || begin >= t->num_positions) {
      memset(scores, 0, sizeof(float) * TILE_POSITIONS);
      continue;
    }
    const float slope = step->alibi_slopes ? step->alibi_slopes[t->kv_head * group + pair % group] : 0.0f;
    if (step->softcap > 0.0f || slope != 0.0f)
      shape_scores(step, scores, t->num_positions, slope, position - first);
    weigh_row(t, m, begin > 0 ? (int)begin : 0, end < t->num_positions ? (int)end : t->num_positions);
  }
}
