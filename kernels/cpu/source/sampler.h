// Sampling for all rows of a step in one call. Specification: kernels/sampling.py, `sample`.
//
// A row draws the token with the highest scaled logit + noise among the tokens that its filters keep. Nothing is
// sorted. The best token of all is found first, and then checked against the filters. If the filters drop it, they drop
// every token with a lower logit too, and the best of the tokens above it is checked next.
//
// If a draw depends on how a logarithm or a sum is rounded, the row is left to the caller, which follows the
// specification exactly. The tokens are therefore the same in both implementations.
#pragma once

#include "abi.h"
#include "vector.h"

// Returns a bit for each lane of a mask, the first lane in the lowest bit.
INLINE uint32_t lane_bits(ints mask) {
#if defined(HAS_AVX512)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(HAS_AVX2)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__x86_64__)
  return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}

INLINE int64_t padded_vocab_size(int64_t vocab_size) { return (vocab_size + 15) / 16 * 16; }

// Noise: see kernels/noise.py

#define FMIX32(x) \
  x ^= x >> 16;     \
  x *= 0x85EBCA6Bu; \
  x ^= x >> 13;     \
  x *= 0xC2B2AE35u; \
  x ^= x >> 16
#define TOKEN_MULTIPLIER 0x9E3779B1u

INLINE uint32_t fmix32(uint32_t x) {
  FMIX32(x);
  return x;
}

static uint32_t noise_key(uint64_t seed, uint32_t sample_index, uint32_t position) {
  const uint32_t key = fmix32(fmix32(position ^ 0x9E3779B9u) ^ sample_index);
  return fmix32(fmix32(key ^ (uint32_t)(seed >> 32)) ^ (uint32_t)seed);
}

static double noise_of(uint32_t key, int64_t token_id) {
  const uint32_t hash = fmix32(key ^ (uint32_t)token_id * TOKEN_MULTIPLIER);
  return -log(-log(((hash >> 9) + 0.5) * 0x1p-23));
}

// Returns an upper bound of the noise of tokens, computed without logarithms: -log(-log u) <= -log(1 - u), and the bits
// of a float, read as an integer, are a lower bound of its binary logarithm.
INLINE floats noise_bound(uint32_t key, words token_ids) {
  words hash = key ^ token_ids * TOKEN_MULTIPLIER;
  FMIX32(hash);
  const floats rest = splat(8388607.5f) - __builtin_convertvector((ints)(hash >> 9), floats);  // (1 - u) 2^23, exactly
  const floats bits = __builtin_convertvector((ints)rest, floats);
  return splat(103.97218f) - bits * splat(8.2629582e-8f);  // ln 2 (150 - bits 2^-23), and 1e-4 for rounding
}

// Maximum

// Returns the index of the highest of n values, the first of equals; -1 if a value is NaN.
static int64_t find_highest(const float* x, int64_t n) {
  float highest = -INFINITY;
  int64_t i = 0;
  floats best = splat(-INFINITY);
  ints is_nan = {0};
  for (; i + LANES <= n; i += LANES) {
    const floats v = load_float(x + i);
    is_nan |= v != v;
    best = choose(v > best, v, best);
  }
  if (lane_bits(is_nan)) return -1;
  highest = largest_lane(best);
  for (; i < n; i++) {
    if (x[i] != x[i]) return -1;
    if (x[i] > highest) highest = x[i];
  }
  for (i = 0; i + LANES <= n; i += LANES) {
    const uint32_t bits = lane_bits(load_float(x + i) == splat(highest));
    if (bits) return i + __builtin_ctz(bits);
  }
  while (x[i] != highest) i++;
  return i;
}

// Edits of the logits

static const uint32_t* mask_of(const sampling_step* step, int64_t row) {
  if (!step->masks || step->mask_lines[row] < 0) return NULL;
  return step->masks + step->mask_lines[row] * step->mask_stride;
}

INLINE int is_allowed(const uint32_t* mask, int64_t token) { return !mask || mask[token / 32] >> token % 32 & 1; }

// Sets the logits of tokens that a mask does not allow to -infinity.
static void apply_mask(const uint32_t* mask, float* logits, int64_t vocab_size) {
  words lane_bit;
  for (int i = 0; i < LANES; i++) lane_bit[i] = 1u << i;
  int64_t i = 0;
  for (; i + LANES <= vocab_size; i += LANES) {
    const uint32_t bits = mask[i / 32] >> i % 32;
    const words is_in = (words)((((words){0} + bits) & lane_bit) != 0);
    store_float(logits + i, choose((ints)is_in, load_float(logits + i), splat(-INFINITY)));
  }
  for (; i < vocab_size; i++)
    if (!is_allowed(mask, i)) logits[i] = -INFINITY;
}

static void add_biases(const sampling_step* step, int64_t row, float* logits) {
  const uint32_t* mask = mask_of(step, row);
  const int32_t* ids = step->bias_token_ids + row * step->max_biases;
  const float* values = step->bias_values + row * step->max_biases;
  for (int64_t i = 0; i < step->max_biases; i++)
    if (ids[i] >= 0 && is_allowed(mask, ids[i])) logits[ids[i]] += values[i];
  for (int64_t i = 0; i < step->max_biases; i++)  // an infinite bias must not turn differences into NaN
    if (ids[i] >= 0 && logits[ids[i]] > __FLT_MAX__) logits[ids[i]] = __FLT_MAX__;
}

static void suppress(const sampling_step* step, int64_t row, float* logits) {
  const int32_t* ids = step->stop_token_ids + row * step->max_stops;
  for (int64_t i = 0; i < step->max_stops; i++)
    if (ids[i] >= 0 && ids[i] < step->vocab_size) logits[ids[i]] = -INFINITY;
}

// Applies the repetition penalty over prompt and output, and presence and frequency penalties over the output. `counts`
// [vocab_size] is scratch memory.
static void penalize(const sampling_step* step, int64_t row, int64_t entry, float* logits, int32_t* counts) {
  const int64_t slot = step->slots[entry], num_tokens = step->num_tokens[row];
  const int32_t* tokens = step->history + slot * step->history_stride;
  const float repetition = step->repetition_penalty[entry];
  const double presence = step->presence_penalty[entry], frequency = step->frequency_penalty[entry];
  for (int64_t i = 0; i < num_tokens; i++) counts[tokens[i]] = 0;
  for (int64_t i = step->num_prompt_tokens[slot]; i < num_tokens; i++) counts[tokens[i]]++;
  for (int64_t i = 0; i < num_tokens; i++) {
    const int32_t token = tokens[i], count = counts[token];
    if (count < 0) continue;
    counts[token] = -1;
    const float x = logits[token];
    // volatile, so that it is rounded before the subtraction
    volatile float repeated = x > 0 ? x / repetition : x * repetition;
    logits[token] = repeated - (float)(count ? presence + frequency * count : 0.0);
  }
}

// Returns whether the row has any edits.
static int edit(const sampling_step* step, int64_t row, int64_t entry, float* logits, int32_t* counts) {
  const int is_suppressed = step->stop_token_ids && step->num_tokens[row] < step->min_num_tokens[row];
  const int is_penalized = step->history && step->slots[entry] >= 0;
  const uint32_t* mask = mask_of(step, row);
  if (mask) apply_mask(mask, logits, step->vocab_size);
  if (step->bias_token_ids) add_biases(step, row, logits);
  if (is_suppressed) suppress(step, row, logits);
  if (is_penalized) penalize(step, row, entry, logits, counts);
  return mask || step->bias_token_ids || is_suppressed || is_penalized;
}

// Draws

// A superset of the tokens that a row may draw, initially all tokens. After `num` entries, values are -infinity up to
// the end of a vector.
typedef struct {
  float* values;  // scaled logits; the highest is 0
  int32_t* ids;   // ascending
  int64_t num;
  int has_ids;  // otherwise the position of a token is its id
} candidates;

// Drops candidates below `lowest`.
static void drop_below(candidates* c, float lowest) {
  int64_t num = 0;
  for (int64_t i = 0; i < c->num; i += LANES)
    for (uint32_t bits = lane_bits(load_float(c->values + i) >= splat(lowest)); bits; bits &= bits - 1) {
      const int64_t from = i + __builtin_ctz(bits);
      if (from >= c->num) break;
      c->values[num] = c->values[from];
      c->ids[num++] = c->has_ids ? c->ids[from] : (int32_t)from;
    }
  c->num = num, c->has_ids = 1;
  for (; num % LANES; num++) c->values[num] = -INFINITY, c->ids[num] = 0;
}

// Returns the distance of a value from 0, as an integer that increases with the distance.
INLINE ints depth(floats values) { return (ints)values & 0x7fffffff; }

INLINE float value_at(int32_t depth) {
  const int32_t bits = depth | INT32_MIN;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static int64_t count_to_depth(const candidates* c, int32_t deepest) {
  int64_t count = 0;
  for (int64_t i = 0; i < c->num;) {
    ints counts = {0};
    const int64_t end = i + 65536 * LANES < c->num ? i + 65536 * LANES : c->num;
    for (; i < end; i += LANES) counts -= depth(load_float(c->values + i)) <= deepest;
    for (int lane = 0; lane < LANES; lane++) count += counts[lane];
  }
  return count;
}

// Keeps the k highest candidates and all candidates equal to the last of them. Returns the number of candidates beyond
// k.
static int64_t keep_highest(candidates* c, int64_t k) {
  // invariant: fewer than k values are at `above` or nearer to 0, at least k at `deepest` or nearer
  int32_t above = -1, deepest = 0x7f800000;
  while (deepest - above > 1) {
    const int32_t middle = above + (deepest - above) / 2;
    const int64_t count = count_to_depth(c, middle);
    if (count < k) {
      above = middle;
      continue;
    }
    deepest = middle;
    if (count == k) break;
    if (count * 8 < c->num) drop_below(c, value_at(deepest));
  }
  drop_below(c, value_at(deepest));
  return c->num - k;
}

// Sums of e^value over the candidates above `bound`, and over all candidates. Short float32 sums are added in float64.
typedef struct {
  double above, all;
} masses;

static masses weigh(const candidates* c, float bound) {
  masses sum = {0, 0};
  for (int64_t i = 0; i < c->num;) {
    floats above = {0}, all = {0};
    const int64_t end = i + 16 * LANES < c->num ? i + 16 * LANES : c->num;
    for (; i < end; i += LANES) {
      const floats v = load_float(c->values + i), mass = exponential(v);
      all += mass;
      above += choose(v > splat(bound), mass, splat(0.0f));
    }
    sum.above += sum_lanes(above);
    sum.all += sum_lanes(all);
  }
  return sum;
}

typedef struct {
  double score, second;  // of the best and the second-best candidate
  int64_t position;
} contest;

// Far larger than the rounding error of a score in float32, and of a sum of probabilities relative to its total.
#define SCORE_SLACK 1e-5
#define MASS_SLACK 4e-6
// The same for the logarithm of min-p.
#define LOG_SLACK 4e-7

// Finds the best score among candidates of at least `lowest`. A score is computed only if its cheap upper bound reaches
// the best score so far. Initially that is `known`, a score that one of the candidates reaches.
static contest find_best(const candidates* c, uint32_t key, float lowest, double known) {
  contest found = {-INFINITY, -INFINITY, -1};
  float limit = (float)(known - 2 * SCORE_SLACK);
  words lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = (uint32_t)i;
  for (int64_t i = 0; i < c->num; i += LANES) {
    const floats v = load_float(c->values + i);
    words ids = lanes + (uint32_t)i;
    if (c->has_ids) memcpy(&ids, c->ids + i, sizeof ids);
    const floats bound = v + noise_bound(key, ids);
    for (uint32_t bits = lane_bits((bound > splat(limit)) & (v >= splat(lowest))); bits; bits &= bits - 1) {
      const int64_t position = i + __builtin_ctz(bits);
      const double score = c->values[position] + noise_of(key, c->has_ids ? c->ids[position] : position);
      if (score > found.score) {
        found.second = found.score;
        found.score = score, found.position = position;
        if (score - 2 * SCORE_SLACK > limit) limit = (float)(score - 2 * SCORE_SLACK);
      } else if (score > found.second) {
        found.second = score;
      }
    }
  }
  return found;
}

// Draws a token. `highest`: the id of the candidate with the highest logit. Returns -1 if the result depends on
// rounding.
static int64_t draw(candidates* c, int64_t highest, uint32_t key, int64_t top_k, float top_p, float min_p) {
  double total = 0.0;
  const int64_t num_ties = top_k > 0 && top_k < c->num ? keep_highest(c, top_k) : 0;
  if (top_p < 1.0f) {
    total = weigh(c, 0.0f).all;
    if (num_ties) {
      float last = 0.0f;
      for (int64_t i = 0; i < c->num; i++) last = c->values[i] < last ? c->values[i] : last;
      total -= num_ties * exp(last);
    }
  }
  const double log_min_p = min_p > 0.0f ? log(min_p) : -INFINITY;
  float lowest = min_p > 0.0f ? (float)(log_min_p * (1 + LOG_SLACK)) : -INFINITY;
  const double known = noise_of(key, highest);
  for (;;) {
    const contest best = find_best(c, key, lowest, known);
    if (best.position < 0) return -1;  // impossible, unless min-p is above 1, which is not supported
    const float value = c->values[best.position];
    if (top_p < 1.0f && value < 0.0f) {
      const double excess = weigh(c, value).above - top_p * total;
      if (excess > MASS_SLACK * total) {
        lowest = nextafterf(value, 0.0f);
        drop_below(c, lowest);
        continue;
      }
      if (excess > -MASS_SLACK * total) return -1;
    }
    if (value < log_min_p * (1 - LOG_SLACK) || best.score - best.second < SCORE_SLACK) return -1;
    return c->has_ids ? c->ids[best.position] : best.position;
  }
}

// Computes the scaled logits. Returns 0 if one of them is NaN.
static int scale(candidates* c, const float* logits, int64_t vocab_size, float highest, float temperature) {
  ints is_nan = {0};
  int64_t i = 0;
  for (; i + LANES <= vocab_size; i += LANES) {
    const floats v = (load_float(logits + i) - splat(highest)) / splat(temperature);
    is_nan |= v != v;
    store_float(c->values + i, v);
  }
  int is_scalar_nan = 0;
  for (; i < vocab_size; i++) {
    c->values[i] = (logits[i] - highest) / temperature;
    is_scalar_nan |= c->values[i] != c->values[i];
  }
  for (; i % LANES; i++) c->values[i] = -INFINITY;
  c->num = vocab_size, c->has_ids = 0;
  return !lane_bits(is_nan) && !is_scalar_nan;
}

static void sample_row(const sampling_step* step, int64_t row, float* scratch) {
  const int64_t vocab_size = step->vocab_size, entry = step->entries ? step->entries[row] : row;
  float* logits = step->logits + row * step->logits_stride;
  candidates c = {.values = scratch, .ids = (int32_t*)(scratch + padded_vocab_size(vocab_size))};
  int64_t token = step->highest ? step->highest[row] : find_highest(logits, vocab_size);
  step->token_ids[row] = 0;
  step->statuses[row] = ROW_NAN;
  if (token < 0) return;
  if (edit(step, row, entry, logits, c.ids)) token = find_highest(logits, vocab_size);
  step->statuses[row] = ROW_OPEN;
  if (token < 0) return;
  const float temperature = step->temperature[entry];
  if (temperature != 0.0f) {
    if (!scale(&c, logits, vocab_size, logits[token], temperature)) return;
    const uint32_t key = noise_key((uint64_t)step->seeds[entry], (uint32_t)step->sample_indexes[entry],
                                   (uint32_t)step->num_tokens[row]);
    token = draw(&c, token, key, step->top_k[entry], step->top_p[entry], step->min_p[entry]);
    if (token < 0) return;
  }
  step->token_ids[row] = token;
  step->statuses[row] = ROW_CHOSEN;
}

int64_t sample(const sampling_step* step) {
  const int64_t scratch_size = 2 * padded_vocab_size(step->vocab_size);
  const int is_shared = step->num_rows > 1 && step->num_rows * step->vocab_size >= MIN_PARALLEL_ELEMENTS;
#pragma omp parallel for schedule(dynamic) num_threads(step->num_threads) if (is_shared)
  for (int64_t row = 0; row < step->num_rows; row++)
    sample_row(step, row, step->scratch + omp_get_thread_num() * scratch_size);
  return DONE;
}

int64_t sampling_scratch_size(int64_t vocab_size) { return 2 * padded_vocab_size(vocab_size); }
