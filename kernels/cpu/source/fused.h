// The operations between the matmuls of a decoder layer, for one element type. Every intermediate result that torch
// would store is rounded to the element type here too.

INLINE floats NAME(rounded)(floats v) {
  ELEMENT stored[LANES];
  NAME(store)(stored, v);
  return NAME(load)(stored);
}

INLINE float NAME(rounded_value)(float x) { return NAME(value)(NAME(from_value)(x)); }

// 1 / sqrt(mean(x^2) + eps)
INLINE float NAME(inverse_rms)(const ELEMENT* x, int64_t size, float eps) {
  floats sums[2] = {splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    const floats a = NAME(load)(x + i), b = NAME(load)(x + i + LANES);
    sums[0] += a * a;
    sums[1] += b * b;
  }
  float sum = sum_lanes(sums[0] + sums[1]);
  for (; i < size; i++) sum += NAME(value)(x[i]) * NAME(value)(x[i]);
  return 1.0f / sqrtf(sum / (float)size + eps);
}

// output = x / rms(x), rounded, times weight; output may be x.
INLINE void NAME(normalize)(const ELEMENT* x, const ELEMENT* weight, ELEMENT* output, int64_t size, float eps) {
  const float factor = NAME(inverse_rms)(x, size, eps);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    NAME(store)(output + i, NAME(rounded)(NAME(load)(x + i) * splat(factor)) * NAME(load)(weight + i));
  for (; i < size; i++)
    output[i] = NAME(from_value)(NAME(rounded_value)(NAME(value)(x[i]) * factor) * NAME(value)(weight[i]));
}

INLINE void NAME(add)(ELEMENT* x, const ELEMENT* update, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) NAME(store)(x + i, NAME(load)(x + i) + NAME(load)(update + i));
  for (; i < size; i++) x[i] = NAME(from_value)(NAME(value)(x[i]) + NAME(value)(update[i]));
}

// x, update, output: [num_tokens, size]. x += update unless update is NULL; output = norm(x).
static void NAME(add_rms_norm)(ELEMENT* x, const ELEMENT* update, const ELEMENT* weight, ELEMENT* output, int64_t num_tokens,
                        int64_t size, float eps, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 && num_tokens * size >= MIN_PARALLEL_ELEMENTS)
  for (int64_t token = 0; token < num_tokens; token++) {
    if (update) NAME(add)(x + token * size, update + token * size, size);
    NAME(normalize)(x + token * size, weight, output + token * size, size, eps);
  }
}

// output = silu(gates) * ups; output may be gates.
INLINE void NAME(silu_mul_token)(const ELEMENT* gates, const ELEMENT* ups, ELEMENT* output, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const floats gate = NAME(load)(gates + i);
    const floats silu = NAME(rounded)(gate / (splat(1.0f) + exponential(-gate)));
    NAME(store)(output + i, silu * NAME(load)(ups + i));
  }
  for (; i < size; i++) {
    const float gate = NAME(value)(gates[i]);
    const float silu = NAME(rounded_value)(gate / (1.0f + expf(-gate)));
    output[i] = NAME(from_value)(silu * NAME(value)(ups[i]));
  }
}

// gate_up: [num_tokens, 2 * size], output: [num_tokens, size]
static void NAME(silu_mul)(const ELEMENT* gate_up, ELEMENT* output, int64_t num_tokens, int64_t size, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 && num_tokens * size >= MIN_PARALLEL_ELEMENTS)
  for (int64_t token = 0; token < num_tokens; token++) {
    const ELEMENT* gates = gate_up + token * 2 * size;
    NAME(silu_mul_token)(gates, gates + size, output + token * size, size);
  }
}

// Rotates the pairs (x[i], x[i + size / 2]) in place. The first half of the sines is negated.
INLINE void NAME(rotate)(ELEMENT* x, const ELEMENT* cos, const ELEMENT* sin, int64_t size) {
  const int64_t half = size / 2;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const floats low = NAME(load)(x + i), high = NAME(load)(x + half + i);
    NAME(store)(x + i, NAME(rounded)(low * NAME(load)(cos + i)) + high * NAME(load)(sin + i));
    NAME(store)(x + half + i, NAME(rounded)(high * NAME(load)(cos + half + i)) + low * NAME(load)(sin + half + i));
  }
  for (; i < half; i++) {
    const float low = NAME(value)(x[i]), high = NAME(value)(x[half + i]);
    x[i] = NAME(from_value)(NAME(rounded_value)(low * NAME(value)(cos[i])) + high * NAME(value)(sin[i]));
    x[half + i] = NAME(from_value)(NAME(rounded_value)(high * NAME(value)(cos[half + i])) +
                                   low * NAME(value)(sin[half + i]));
  }
}

// heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries, keys and values. Queries and keys are
// normalized if they have a weight, then rotated, in place; or the other way round. cos, sin: [num_tokens, head_dim].
static void NAME(norm_rope)(ELEMENT* heads, const ELEMENT* query_weight, const ELEMENT* key_weight, const ELEMENT* cos,
                     const ELEMENT* sin, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                     float eps, int64_t rotates_first, int64_t num_threads) {
  const int64_t token_stride = (num_heads + 2 * num_kv_heads) * head_dim;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 && num_tokens * token_stride >= MIN_PARALLEL_ELEMENTS)
  for (int64_t token = 0; token < num_tokens; token++)
    for (int64_t head = 0; head < num_heads + num_kv_heads; head++) {
      ELEMENT* x = heads + token * token_stride + head * head_dim;
      const ELEMENT* weight = head < num_heads ? query_weight : key_weight;
      if (weight && !rotates_first) NAME(normalize)(x, weight, x, head_dim, eps);
      NAME(rotate)(x, cos + token * head_dim, sin + token * head_dim, head_dim);
      if (weight && rotates_first) NAME(normalize)(x, weight, x, head_dim, eps);
    }
}
