// Rounds floats to codes with a scale for each group: in 8 bits as ggml does for Q8_0, in 6 bits, and in 4 bits with a
// minimum. `pagewire.kernels.quantized` specifies every bit.
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

// Returns the scale. Its sign is chosen so that the first value with the largest absolute value gets the code -32.
static float quantize_6(const float* values, int8_t* codes) {
  float scaled[QUANTIZED_GROUP];
  const float highest = highest_size(values);
  if (!(highest <= FLT_MAX)) return highest;
  int furthest = 0;
  while (fabsf(values[furthest]) != highest) furthest++;
  const float scale = values[furthest] / -32.0f;
  divide_group(values, scale, scaled);
  for (int i = 0; i < QUANTIZED_GROUP; i++) {
    const float code = rintf(scaled[i]);
    codes[i] = (int8_t)(code < 31.0f ? code : 31.0f);
  }
  return scale;
}

int64_t quantize(const float* values, int64_t num_groups, int64_t bits, int8_t* codes, float* scale,
                 int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t group = 0; group < num_groups; group++) {
    const int64_t start = group * QUANTIZED_GROUP;
    scale[group] = bits == 8 ? quantize_8(values + start, codes + start) : quantize_6(values + start, codes + start);
  }
  return DONE;
}

enum { SUM_PARTS = 8 };  // parts of a sum, which vectors can hold

// Sums over a group of weights w, values x and codes l. Each is exact but for its additions, because the products of
// the terms are exact in float64. Fused additions therefore give the same bits.
typedef struct {
  double w, wx, wl, wll, wlx;
} fit_sums;

INLINE double sum_of_parts(const double* parts) {
  double sums[SUM_PARTS / 2];
  for (int i = 0; i < 4; i++) sums[i] = parts[i] + parts[i + 4];
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Sets `codes` to the values above `lowest`, multiplied by `inverse` and rounded.
INLINE void scaled_codes(const float* values, float lowest, float inverse, float* codes) {
  for (int i = 0; i < QUANTIZED_GROUP; i++) {
    const float code = rintf((values[i] - lowest) * inverse);
    codes[i] = code < 15.0f ? code : 15.0f;
  }
}

INLINE void sum_codes(const float* weights, const float* values, const float* codes, fit_sums* sums) {
  double wl[SUM_PARTS] = {0}, wll[SUM_PARTS] = {0}, wlx[SUM_PARTS] = {0};
  for (int i = 0; i < QUANTIZED_GROUP; i += SUM_PARTS)
    for (int j = 0; j < SUM_PARTS; j++) {
      const double code = codes[i + j], weighted = (double)weights[i + j] * code;
      wl[j] += weighted;
      wll[j] += weighted * code;
      wlx[j] += weighted * (double)values[i + j];
    }
  sums->wl = sum_of_parts(wl);
  sums->wll = sum_of_parts(wll);
  sums->wlx = sum_of_parts(wlx);
}

// Finds the scale and offset with the least weighted square error for given codes. The offset is not positive. Returns
// by how much they reduce the error of zeros.
INLINE double fit_codes(const fit_sums* s, double* scale, double* offset) {
  const double terms[] = {s->w * s->wll, s->wl * s->wl, s->w * s->wlx, s->wx * s->wl, s->wll * s->wx, s->wl * s->wlx};
  STORE_AND_FORGET(terms);
  const double determinant = terms[0] - terms[1];
  *scale = (terms[2] - terms[3]) / determinant;
  *offset = (terms[4] - terms[5]) / determinant;
  // All codes are equal if the determinant is 0.
  if (!(determinant > terms[0] * 1e-9) || *offset > 0) {
    *scale = s->wll > 0 ? s->wlx / s->wll : 0;
    *offset = s->wll > 0 || s->w == 0 ? 0 : s->wx / s->w;
  }
  const double gains[] = {*scale * s->wlx, *offset * s->wx};
  STORE_AND_FORGET(gains);
  return gains[0] + gains[1];
}

// Sets the weights of values in a fit, and their sums. Larger values count more, and those of important inputs, if
// `importance` is not NULL.
INLINE void weigh_values(const float* values, const float* importance, float* weights, fit_sums* sums) {
  double squares[SUM_PARTS] = {0}, w[SUM_PARTS] = {0}, wx[SUM_PARTS] = {0};
  for (int i = 0; i < QUANTIZED_GROUP; i += SUM_PARTS)
    for (int j = 0; j < SUM_PARTS; j++) squares[j] += (double)values[i + j] * (double)values[i + j];
  const float size = (float)sqrt(sum_of_parts(squares) / QUANTIZED_GROUP);
  for (int i = 0; i < QUANTIZED_GROUP; i++) weights[i] = size + fabsf(values[i]);
  for (int i = 0; importance && i < QUANTIZED_GROUP; i++) weights[i] *= importance[i];
  for (int i = 0; i < QUANTIZED_GROUP; i += SUM_PARTS)
    for (int j = 0; j < SUM_PARTS; j++) {
      w[j] += weights[i + j];
      wx[j] += (double)weights[i + j] * (double)values[i + j];
    }
  sums->w = sum_of_parts(w);
  sums->wx = sum_of_parts(wx);
}

static void search_group(const float* values, const float* importance, float* scale, float* minimum) {
  const float size = highest_size(values);
  *scale = size;
  *minimum = 0;
  if (!(size <= FLT_MAX)) return;
  float weights[QUANTIZED_GROUP], codes[QUANTIZED_GROUP], lowest = 0, highest = values[0];
  for (int i = 0; i < QUANTIZED_GROUP; i++) {
    lowest = values[i] < lowest ? values[i] : lowest;
    highest = values[i] > highest ? values[i] : highest;
  }
  fit_sums sums;
  weigh_values(values, importance, weights, &sums);
  double best = -INFINITY;
  for (int tenths = 140; tenths <= 160; tenths++) {
    const float inverse = (float)tenths / 10.0f / (highest - lowest);
    scaled_codes(values, lowest, fabsf(inverse) <= FLT_MAX ? inverse : 0.0f, codes);
    sum_codes(weights, values, codes, &sums);
    double found, offset;
    const double gain = fit_codes(&sums, &found, &offset);
    if (!(gain > best)) continue;
    best = gain;
    *scale = (float)found;
    *minimum = (float)(0.0 - offset);
  }
}

int64_t search_scales(const float* values, int64_t num_groups, const float* importance, int64_t groups_of_row,
                      float* scale, float* minimum, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t group = 0; group < num_groups; group++)
    search_group(values + group * QUANTIZED_GROUP,
                 importance ? importance + group % groups_of_row * QUANTIZED_GROUP : NULL, scale + group, minimum + group);
  return DONE;
}

int64_t round_codes(const float* values, int64_t num_groups, const float* scale, const float* minimum, int8_t* codes,
                    int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
  for (int64_t group = 0; group < num_groups; group++)
    for (int i = 0; i < QUANTIZED_GROUP; i++) {
      const int64_t place = group * QUANTIZED_GROUP + i;
      const float code = scale[group] ? rintf((values[place] + minimum[group]) / scale[group]) : 0.0f;
      codes[place] = (int8_t)(code < 0.0f ? 0.0f : code < 15.0f ? code : 15.0f);
    }
  return DONE;
}
