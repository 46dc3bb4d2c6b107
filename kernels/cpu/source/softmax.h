// The parts of attention that are float32 for every cache type: see softmax.c.
#pragma once

#include "common.h"
#include "tasks.h"
#include "work.h"

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t ints4 __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints4){__VA_ARGS__})
#endif

// Whether the processor can add products of bfloat16 pairs.
#if defined(HAS_BFLOAT16_DOTS)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

// Returns sums + a * b. A word is one float32 value, or with `in_pairs` two bfloat16 values.
INLINE floats add_words(const int in_pairs, floats a, floats b, floats sums) {
#if HAS_PAIRS
  if (in_pairs) return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#endif
  (void)in_pairs;
  return multiply_add(a, b, sums);
}

// scores = queries . packed, for whole pairs of vectors.
SHARED void score_packed(const tile* t, const float* packed);
SHARED void score_packed_pairs(const tile* t, const float* packed);
SHARED int find_seen(const attention_step* step, const item* work, tile* t, int64_t first);
SHARED void weigh_scores(const attention_step* step, tile* t, int64_t first);
SHARED void merge_span(const attention_step* step, const item* work, int64_t begin, const state* span,
                       const state* merged);

// Returns the sum of a row's weights plus the weight of its head's sink. The sink is added only here, after all spans,
// so the order in which the spans were summed does not matter.
static float total_weight(const attention_step* step, const state* all, int m, int64_t head) {
  const float maximum = all->maxima[m];
  if (!step->sinks) return all->totals[m];
  if (maximum == -INFINITY) return 1.0f;  // all values have weight 0
  return all->totals[m] + exponential(splat(step->sinks[head] - maximum))[0];
}
