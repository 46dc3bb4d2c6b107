// The parts of attention that are float32 for every cache type: scores from packed keys, weights from scores, and
// merging spans. Every row is computed by itself, so that its result is bitwise independent of other rows.

#include "softmax.h"

INLINE floats splat_word(const float* p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return (floats)(word - (ints){0});
}

// The number of lanes that fit into the registers at once.
#if defined(HAS_AVX512)
#define LANES_AT_ONCE 2
#else
#define LANES_AT_ONCE 1
#endif

// Sums over the words of some lanes. A query's words are stored in vectors, and lane i is word i of each vector.
INLINE void score_lanes(const int R, const int in_pairs, const tile* t, const float* queries, const float* packed,
                        const int* lanes, floats sums[LANES_AT_ONCE][6][2]) {
#pragma GCC unroll 2
  for (int i = 0; i < LANES_AT_ONCE; i++)
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) sums[i][r][0] = sums[i][r][1] = splat(0.0f);
  for (int64_t d = 0; d < t->width; d += LANES)
#pragma GCC unroll 2
    for (int i = 0; i < LANES_AT_ONCE; i++) {
      const float* words = packed + (d + lanes[i]) * TILE_POSITIONS;
      const floats a = load_float(words), b = load_float(words + LANES);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const floats q = splat_word(queries + r * t->stride + d + lanes[i]);
        sums[i][r][0] = add_words(in_pairs, q, a, sums[i][r][0]);
        sums[i][r][1] = add_words(in_pairs, q, b, sums[i][r][1]);
      }
    }
}

// Returns the lane of the nth leaf of the tree that sums up lanes: n with its bits reversed.
INLINE int nth_lane(int n) {
  int lane = 0;
#pragma GCC unroll 4
  for (int size = LANES / 2, bit = 1; size > 0; size /= 2, bit *= 2) lane += n & bit ? size : 0;
  return lane;
}

INLINE void add_scores(const int R, floats sums[6][2], floats more[6][2]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    sums[r][0] += more[r][0];
    sums[r][1] += more[r][1];
  }
}

// Scores R rows against two vectors of positions. Words are added in the same order as in `score_positions`, where each
// vector lane has its own sum. So the words of one lane are added first, and then the lanes' sums by the tree of
// `sum_lanes`. The tree is traversed depth first, so that only one sum per level is pending.
INLINE void score_packed_rows(const int R, const int in_pairs, const tile* t, int row, const float* packed, int j) {
  const float* queries = t->queries + row * t->stride;
  floats pending[4][6][2], sums[LANES_AT_ONCE][6][2];
#pragma GCC unroll 8
  for (int n = 0; n < LANES; n += LANES_AT_ONCE) {
    const int lanes[2] = {nth_lane(n), nth_lane(n + 1)};
    score_lanes(R, in_pairs, t, queries, packed + j, lanes, sums);
    if (LANES_AT_ONCE > 1) add_scores(R, sums[0], sums[LANES_AT_ONCE - 1]);
    int level = 0;
#pragma GCC unroll 4
    for (int at = n / LANES_AT_ONCE; at & 1; at /= 2) add_scores(R, sums[0], pending[level++]);
    if (n + LANES_AT_ONCE < LANES) memcpy(pending[level], sums[0], sizeof sums[0]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    store_float(t->scores + (row + r) * TILE_POSITIONS + j, sums[0][r][0]);
    store_float(t->scores + (row + r) * TILE_POSITIONS + j + LANES, sums[0][r][1]);
  }
}

// scores = queries . packed, for whole pairs of vectors.
INLINE void score_packed_tile(const int in_pairs, const tile* t, const float* packed) {
#define SCORE(R) case R: score_packed_rows(R, in_pairs, t, row, packed, j); break;
  for (int row = 0; row < t->num_rows; row += 6)
    for (int j = t->begin / (2 * LANES) * (2 * LANES); j < t->end; j += 2 * LANES)
      switch (t->num_rows - row) {
        SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5)
        default: score_packed_rows(6, in_pairs, t, row, packed, j);
      }
#undef SCORE
}

SHARED void score_packed(const tile* t, const float* packed) { score_packed_tile(0, t, packed); }
#if HAS_PAIRS
SHARED void score_packed_pairs(const tile* t, const float* packed) { score_packed_tile(1, t, packed); }
#endif

// The transformation of one (query, head) pair's dot products into scores.
typedef struct {
  float scale, softcap, slope;
  int64_t distance;  // distance from the tile's first position to the query
} shape;

INLINE floats shape_scores(const shape* s, floats products, floats offsets) {
  floats scores = products * splat(s->scale);
  if (s->softcap > 0.0f) scores = splat(s->softcap) * hyperbolic_tangent(scores / splat(s->softcap));
  if (s->slope != 0.0f) scores = multiply_add(splat(-s->slope), splat((float)s->distance) - offsets, scores);
  return scores;
}

INLINE floats count_lanes(int first) {
  floats lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = (float)(first + i);
  return lanes;
}

// Converts one row's dot products to softmax weights relative to the row's maximum so far, and rescales the previous
// sums. At least one position of the tile is visible to the row. Scores of positions that are not visible are ignored.
INLINE void weigh_row(tile* t, int m, const shape* s) {
  float* scores = t->scores + m * TILE_POSITIONS;
  const int first = t->begins[m] / LANES * LANES, end = t->ends[m];
  const floats begin_lane = splat((float)t->begins[m]), end_lane = splat((float)end);
  const float before = t->sums.maxima[m];
  floats largest = splat(before), offsets = count_lanes(first);
  for (int j = first; j < end; j += LANES, offsets += splat((float)LANES)) {
    floats seen = load_float(scores + j);
    if (t->scales) seen *= load_float(t->scales + j);
    seen = shape_scores(s, seen, offsets);
    if (j < t->begins[m] || j + LANES > end)
      seen = choose((offsets >= begin_lane) & (offsets < end_lane), seen, splat(-INFINITY));
    largest = larger(largest, seen);
    store_float(scores + j, seen);
  }
  const float maximum = largest_lane(largest);
  // A finite base if all scores are -infinity: the weights are then 0, not NaN.
  const floats base = splat(maximum == -INFINITY ? 0.0f : maximum);
  floats total = splat(0.0f);
  for (int j = first; j < end; j += LANES) {
    const floats weight = exponential(load_float(scores + j) - base);
    total += weight;
    store_float(scores + j, t->scales ? weight * load_float(t->scales + TILE_POSITIONS + j) : weight);
  }
  t->sums.maxima[m] = maximum;
  if (before == maximum || before == -INFINITY) {
    t->sums.totals[m] += sum_lanes(total);
    return;
  }
  const floats factor = exponential(splat(before) - base);
  t->sums.totals[m] = multiply_add(splat(t->sums.totals[m]), factor, splat(sum_lanes(total)))[0];
  float* sums = t->sums.sums + m * t->stride;
  for (int64_t d = 0; d < t->stride; d += LANES) store_float(sums + d, load_float(sums + d) * factor);
}

// Finds the positions of a tile that each row sees. `first` is the first position of the tile, and all positions of a
// tile belong to the same block of a block pattern. Returns whether any row sees a position.
SHARED int find_seen(const attention_step* step, const item* work, tile* t, int64_t first) {
  int is_any_seen = 0;
  for (int m = 0; m < t->num_rows; m++) {
    const int64_t position = t->positions[m];
    const int64_t begin = first_visible(step, position) - first, end = last_visible(step, work->row, position) + 1 - first;
    t->begins[m] = begin > t->begin ? (int32_t)(begin < TILE_POSITIONS ? begin : TILE_POSITIONS) : t->begin;
    t->ends[m] = end < t->end ? (int32_t)(end > 0 ? end : 0) : t->end;
    if (!sees_block(&step->pattern, position, t->heads[m], first)) t->ends[m] = t->begins[m];
    is_any_seen |= t->begins[m] < t->ends[m];
  }
  return is_any_seen;
}

// `first`: the first position of the tile.
SHARED void weigh_scores(const attention_step* step, tile* t, int64_t first) {
  shape s = {.scale = step->scale, .softcap = step->softcap};
  for (int m = 0; m < t->num_rows; m++) {
    if (t->begins[m] >= t->ends[m]) continue;
    s.slope = t->slopes[m];
    s.distance = t->positions[m] - first;
    weigh_row(t, m, &s);
  }
}

// Adds the state of a later span to the merged state of the row's earlier spans.
INLINE void merge_row(const state* merged, const state* span, int m, int64_t stride) {
  const float before = merged->maxima[m], maximum = span->maxima[m] > before ? span->maxima[m] : before;
  const floats base = splat(maximum == -INFINITY ? 0.0f : maximum);
  const floats factor = exponential(splat(before) - base), share = exponential(splat(span->maxima[m]) - base);
  float* sums = merged->sums + m * stride;
  const float* added = span->sums + m * stride;
  merged->maxima[m] = maximum;
  merged->totals[m] = multiply_add(share, splat(span->totals[m]), splat(merged->totals[m]) * factor)[0];
  for (int64_t d = 0; d < stride; d += LANES)
    store_float(sums + d, multiply_add(share, load_float(added + d), load_float(sums + d) * factor));
}

// Merges the span that begins at position `begin` into the state of the preceding spans. The first span that a row sees
// is copied. A span in which a row sees no position is skipped.
SHARED void merge_span(const attention_step* step, const item* work, int64_t begin, const state* span,
                       const state* merged) {
  const int64_t stride = padded(step->head_dim), end = begin + SPAN_POSITIONS;
  for (int m = 0; m < work->num_pairs * work->num_kv_heads; m++) {
    const int64_t position = query_position(step, work->row, work->first_pair + m % work->num_pairs);
    const int64_t first = first_visible(step, position);
    if (last_visible(step, work->row, position) < begin || first >= end) continue;
    if (first < begin) {
      merge_row(merged, span, m, stride);
    } else {
      merged->maxima[m] = span->maxima[m];
      merged->totals[m] = span->totals[m];
      memcpy(merged->sums + m * stride, span->sums + m * stride, sizeof(float) * (size_t)stride);
    }
  }
}
