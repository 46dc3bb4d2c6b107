// Rounds floats to codes with a scale for each group, as ggml does: Q8_0 in 8 bits, Q4_0 in 4.
#include <float.h>

enum { QUANTIZED_GROUP = 32 };

// Forces the array to be stored and read again. Otherwise a multiplication in it could be fused with an addition, and
// the result would be rounded only once.
#define STORE_AND_FORGET(array) __asm__ volatile("" : : "r"(array) : "memory")

// Returns the largest absolute value of a group, or NaN if it contains NaN. The bits of absolute values are ordered
// like the values, with NaN highest.
INLINE float highest_size(const float* values) {
  int32_t bits[QUANTIZED_GROUP], highest = 0;
  memcpy(bits, values, sizeof(bits));
  for (int i = 0; i < QUANTIZED_GROUP; i++) {
    const int32_t size = bits[i] & INT32_MAX;
    highest = size > highest ? size : highest;
  }
  float size;
  memcpy(&size, &highest, sizeof(size));
  return size;
}

// Divides the values by the scale. The result is 0 if the scale is too small to divide by.
INLINE void divide_group(const float* values, float scale, float* scaled) {
  const float inverse = 1.0f / scale, factor = fabsf(inverse) <= FLT_MAX ? inverse : 0.0f;
  for (int i = 0; i < QUANTIZED_GROUP; i++) scaled[i] = values[i] * factor;
  STORE_AND_FORGET(scaled);
}

// Returns the scale. Values are rounded to the nearest code, and halves are rounded away from 0.
static float quantize_8(const float* values, int8_t* codes) {
  float scaled[QUANTIZED_GROUP];
  const float scale = highest_size(values) / 127.0f;
  if (!(scale <= FLT_MAX)) return scale;
  divide_group(values, scale, scaled);
  for (int i = 0; i < QUANTIZED_GROUP; i++) {
    const int32_t whole = (int32_t)scaled[i];
    codes[i] = (int8_t)(whole + (int32_t)(2.0f * (scaled[i] - (float)whole)));
  }
  return scale;
}

// Returns the scale. Its sign is chosen so that the first value with the largest absolute value gets the code -8.
static float quantize_4(const float* values, int8_t* codes) {
  float scaled[QUANTIZED_GROUP];
  const float highest = highest_size(values);
  if (!(highest <= FLT_MAX)) return highest;
  int furthest = 0;
  while (fabsf(values[furthest]) != highest) furthest++;
  const float scale = values[furthest] / -8.0f;
  divide_group(values, scale, scaled);
  for (int i = 0; i < QUANTIZED_GROUP; i++) {
    const int32_t code = (int32_t)(scaled[i] + 8.5f);
    codes[i] = (int8_t)((code < 15 ? code : 15) - 8);
  }
  return scale;
}

int64_t quantize(const float* values, int64_t num_groups, int64_t bits, int8_t* codes, float* scale,
                 int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t group = 0; group < num_groups; group++) {
    const int64_t start = group * QUANTIZED_GROUP;
    scale[group] = bits == 8 ? quantize_8(values + start, codes + start) : quantize_4(values + start, codes + start);
  }
  return DONE;
}
