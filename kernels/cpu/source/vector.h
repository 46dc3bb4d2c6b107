// Vectors of floats, based on the compiler's vector extensions and as wide as the registers, and conversions of the
// element types that memory contains. Arithmetic is always in float32. Compiler options that assume finite values are
// forbidden, because every function here must propagate NaN.
#pragma once

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HAS_AVX512 1
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_AVX2 1
#define LANES 8
#else
#define LANES 4
#endif

#if defined(HAS_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define HAS_BFLOAT16_DOTS 1
#endif

#if defined(HAS_BFLOAT16_DOTS) && (defined(__AMX_INT8__) || defined(__AMXINT8__))
#define VARIANT "amx_int8"
#define HAS_TILES 1
#elif defined(HAS_BFLOAT16_DOTS)
#define VARIANT "avx512_bf16"
#elif defined(HAS_AVX512)
#define VARIANT "avx512"
#elif defined(HAS_AVX2)
#define VARIANT "avx2"
#elif defined(__ARM_FEATURE_DOTPROD)
#define VARIANT "dotprod"
#else
#define VARIANT "portable"
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef float floats4 __attribute__((vector_size(16)));
typedef uint16_t bfloat16;
typedef struct {
  uint16_t bits;
} float16;

// Lanes are always summed by the same tree: the upper half is added to the lower half until one lane is left.

#if defined(__x86_64__)
INLINE __m128 sum_to_four_lanes(floats v) {
#if defined(HAS_AVX512)
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
#elif defined(HAS_AVX2)
  return _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  return (__m128)v;
#endif
}
#endif

INLINE floats splat(float x) { return x - (floats){0}; }
INLINE floats choose(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }
// Returns b if either value is NaN. A caller that must propagate NaN has to test for it separately.
INLINE floats larger(floats a, floats b) { return choose(a > b, a, b); }

// a * b + c, rounded once if the processor supports it. Used where several implementations must give the same bits.
INLINE floats multiply_add(floats a, floats b, floats c) {
#if defined(HAS_AVX512)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(HAS_AVX2)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Stores without reading the cache lines of the target first, if the processor can. The target is aligned to a vector.
// `finish_stores` must follow before another thread reads it.
INLINE void store_past_caches(float* target, floats v) {
#if defined(HAS_AVX512)
  _mm512_stream_ps(target, (__m512)v);
#elif defined(HAS_AVX2)
  _mm256_stream_ps(target, (__m256)v);
#else
  memcpy(target, &v, sizeof v);
#endif
}

INLINE void finish_stores(void) {
#if defined(HAS_AVX512) || defined(HAS_AVX2)
  _mm_sfence();
#endif
}

INLINE int32_t largest_int(ints v) {
#if defined(HAS_AVX512)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__aarch64__)
  return vmaxvq_s32((int32x4_t)v);
#else
  int32_t largest = v[0];
  for (int i = 1; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

INLINE int32_t sum_ints(ints v) {
#if defined(HAS_AVX512)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__aarch64__)
  return vaddvq_s32((int32x4_t)v);
#else
  int32_t sum = v[0];
  for (int i = 1; i < LANES; i++) sum += v[i];
  return sum;
#endif
}

// Rounds to the nearest integer, halves to even. The results must fit.
INLINE ints round_to_ints(floats v) {
#if defined(HAS_AVX512)
  return (ints)_mm512_cvtps_epi32((__m512)v);
#elif defined(HAS_AVX2)
  return (ints)_mm256_cvtps_epi32((__m256)v);
#elif defined(__aarch64__)
  return (ints)vcvtnq_s32_f32((float32x4_t)v);
#else
  ints rounded;
  for (int i = 0; i < LANES; i++) rounded[i] = (int32_t)lrintf(v[i]);
  return rounded;
#endif
}

INLINE float sum_lanes(floats v) {
#if defined(__x86_64__)
  __m128 s = sum_to_four_lanes(v);
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, _MM_SHUFFLE(1, 1, 1, 1))));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Computes sum_lanes of four vectors.
INLINE floats4 sum_lanes_of_four(floats a, floats b, floats c, floats d) {
#if defined(__x86_64__)
  const __m128 s = sum_to_four_lanes(a), t = sum_to_four_lanes(b);
  const __m128 u = sum_to_four_lanes(c), v = sum_to_four_lanes(d);
  const __m128 low = _mm_add_ps(_mm_movelh_ps(s, t), _mm_movehl_ps(t, s));
  const __m128 high = _mm_add_ps(_mm_movelh_ps(u, v), _mm_movehl_ps(v, u));
  return (floats4)_mm_add_ps(_mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)),
                             _mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
#else
  return (floats4){sum_lanes(a), sum_lanes(b), sum_lanes(c), sum_lanes(d)};
#endif
}

INLINE float largest_lane(floats v) {
#if defined(__x86_64__)
#if defined(HAS_AVX512)
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(HAS_AVX2)
  const __m256 half = (__m256)v;
#endif
#if LANES > 4
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
  __m128 m = (__m128)v;
#endif
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, _MM_SHUFFLE(1, 1, 1, 1))));
#else
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
#endif
}

// e^x to 2 units in the last place (the polynomial of Cephes' expf, S. Moshier); 0 below -87.3, 2.4e38 above 88.3.
INLINE floats exponential(floats x) {
  const ints is_low = x < splat(-87.3f);
  x = choose(x > splat(88.3f), splat(88.3f), x);
  x = choose(is_low, splat(-87.3f), x);
  const floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const floats shifted = x * splat(1.44269504088896341f) + magic;
  const floats n = shifted - magic;
  floats r = x - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  floats p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const words power = ((words)shifted - (words)magic + 127u) << 23;
  return choose(is_low, splat(0.0f), p * (floats)power);
}

// tanh x (Cephes' tanhf).
INLINE floats hyperbolic_tangent(floats x) {
  const floats size = (floats)((ints)x & 0x7fffffff);
  const floats square = x * x;
  floats p = splat(-5.70498872745e-3f);
  p = p * square + splat(2.06390887954e-2f);
  p = p * square + splat(-5.37397155531e-2f);
  p = p * square + splat(1.33314422036e-1f);
  p = p * square + splat(-3.33332819422e-1f);
  const floats small = p * square * x + x;
  const floats large = splat(1.0f) - splat(2.0f) / (exponential(size + size) + splat(1.0f));
  const floats signed_large = (floats)((ints)large | ((ints)x & (ints)splat(-0.0f)));
  return choose(size < splat(0.625f), small, signed_large);
}

// log(1 + e^x)
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// erf x to 4 units in the last place (the rational function of Eigen's generic_fast_erf); about +-1 beyond +-4.
INLINE floats error_function(floats x) {
  x = choose(x > splat(4.0f), splat(4.0f), x);
  x = choose(x < splat(-4.0f), splat(-4.0f), x);
  const floats square = x * x;
  floats p = splat(-2.72614225801306e-10f);
  p = p * square + splat(2.77068142495902e-08f);
  p = p * square + splat(-2.10102402082508e-06f);
  p = p * square + splat(-5.69250639462346e-05f);
  p = p * square + splat(-7.34990630326855e-04f);
  p = p * square + splat(-2.95459980854025e-03f);
  p = p * square + splat(-1.60960333262415e-02f);
  floats q = splat(-1.45660718464996e-05f);
  q = q * square + splat(-2.13374055278905e-04f);
  q = q * square + splat(-1.68282697438203e-03f);
  q = q * square + splat(-7.37332916720468e-03f);
  q = q * square + splat(-1.42647390514189e-02f);
  return x * p / q;
}

// float32

INLINE floats load_float(const float* p) {
  floats v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE floats4 load4_float(const float* p) {
  floats4 v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store_float(float* p, floats v) { memcpy(p, &v, sizeof v); }
// Loads the first `num` lanes, at most all; the others are 0.
INLINE floats load_some(const float* p, int64_t num) {
  if (num >= LANES) return load_float(p);
  float part[LANES] = {0};
  if (num > 0) memcpy(part, p, sizeof(float) * (size_t)num);
  return load_float(part);
}
INLINE void store_some(float* p, floats v, int64_t num) {
  if (num >= LANES)
    store_float(p, v);
  else if (num > 0)
    memcpy(p, &v, sizeof(float) * (size_t)num);
}
INLINE float value_float(float x) { return x; }
INLINE float from_value_float(float x) { return x; }

// bfloat16: the upper half of a float32, rounded to even

INLINE floats load_bfloat16(const bfloat16* p) {
#if defined(HAS_AVX512)
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(HAS_AVX2)
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  halves h;
  memcpy(&h, p, sizeof h);
  return (floats)(__builtin_convertvector(h, words) << 16);
#endif
}
INLINE void store_bfloat16(bfloat16* p, floats v) {
  const words bits = (words)v;
  const words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const words is_nan = (words)(v != v);
  const halves h = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), halves);
  memcpy(p, &h, sizeof h);
}
INLINE float value_bfloat16(bfloat16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
INLINE bfloat16 from_value_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return x != x ? 0x7fc0 : (bfloat16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
INLINE floats4 load4_bfloat16(const bfloat16* p) {
  return (floats4){value_bfloat16(p[0]), value_bfloat16(p[1]), value_bfloat16(p[2]), value_bfloat16(p[3])};
}

// float16: converted by the processor if possible, otherwise by bit operations

INLINE float value_float16(float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  __fp16 half;
  memcpy(&half, &x, sizeof half);
  return half;
#else
  const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, size = x.bits & 0x7fff;
  if (size < 0x0400) {  // subnormal or zero: a multiple of 2^-24
    const float f = (float)size * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  const uint32_t bits = sign | (size >= 0x7c00 ? 0x7f800000u | (size << 13) : (size << 13) + (112u << 23));
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
#endif
}
INLINE float16 from_value_float16(float x) {
#if defined(__F16C__)
  return (float16){(uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)};
#elif defined(__aarch64__)
  const __fp16 half = (__fp16)x;
  float16 rounded;
  memcpy(&rounded, &half, sizeof rounded);
  return rounded;
#else
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (float16){(uint16_t)(sign | 0x7e00)};
  if (bits >= 0x477ff000) return (float16){(uint16_t)(sign | 0x7c00)};
  if (bits < 0x38800000) {  // adding 0.5 leaves the multiple of 2^-24, rounded to even, in the low bits
    float f;
    memcpy(&f, &bits, sizeof f);
    f += 0.5f;
    memcpy(&bits, &f, sizeof bits);
    return (float16){(uint16_t)(sign | (bits - 0x3f000000))};
  }
  bits += 0xfffu + ((bits >> 13) & 1u);
  return (float16){(uint16_t)(sign | ((bits - (112u << 23)) >> 13))};
#endif
}
INLINE floats load_float16(const float16* p) {
#if defined(HAS_AVX512)
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(HAS_AVX2)
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  return (floats){value_float16(p[0]), value_float16(p[1]), value_float16(p[2]), value_float16(p[3])};
#endif
}
INLINE floats4 load4_float16(const float16* p) {
  return (floats4){value_float16(p[0]), value_float16(p[1]), value_float16(p[2]), value_float16(p[3])};
}
INLINE void store_float16(float16* p, floats v) {
#if defined(HAS_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HAS_AVX2)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  for (int i = 0; i < LANES; i++) p[i] = from_value_float16(v[i]);
#endif
}

// 8-bit types, used in caches only. Both are widened exactly.

typedef uint8_t octets __attribute__((vector_size(LANES)));
typedef struct {
  uint8_t bits;
} float8;
typedef int8_t int8;

// float8: e4m3 (https://arxiv.org/abs/2209.05433), 4 bits of exponent and 3 of mantissa; no infinity, and one NaN

INLINE floats widen_float8(words x) {
  const words size = (x & 0x7fu) << 20, sign = (x & 0x80u) << 24;
  const floats small = (floats)(size + (121u << 23)) - splat(0.015625f);  // multiples of 2^-9
  const floats value = choose((ints)(size < (8u << 20)), small, (floats)(size + (120u << 23)));
  return (floats)((words)choose((ints)(size == (0x7fu << 20)), splat(NAN), value) | sign);
}
INLINE floats load_float8(const float8* p) {
#if defined(HAS_AVX512)
  return widen_float8((words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(HAS_AVX2)
  return widen_float8((words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  octets b;
  memcpy(&b, p, sizeof b);
  return widen_float8(__builtin_convertvector(b, words));
#endif
}
INLINE float value_float8(float8 x) { return widen_float8(x.bits - (words){0})[0]; }
INLINE floats4 load4_float8(const float8* p) {
  words x = {p[0].bits, p[1].bits, p[2].bits, p[3].bits};
  const floats v = widen_float8(x);
  return (floats4){v[0], v[1], v[2], v[3]};
}
// Rounds to nearest, halves to even. Values beyond 448 become 448.
INLINE words round_to_float8(floats v) {
  const words sign = (words)v >> 24 & 0x80u;
  const floats size = (floats)((words)v & 0x7fffffffu);
  const floats bounded = choose(size > splat(448.0f), splat(448.0f), size);
  const words bits = (words)bounded;
  const words small = (words)(bounded + splat(16384.0f)) - (words)splat(16384.0f);  // in multiples of 2^-9
  const words normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
  const words rounded = (words)choose(bounded < splat(0.015625f), (floats)small, (floats)normal);
  return (words)choose(v != v, (floats)(0x7fu + (words){0}), (floats)rounded) | sign;
}
INLINE void store_float8(float8* p, floats v) {
  const octets b = __builtin_convertvector(round_to_float8(v), octets);
  memcpy(p, &b, sizeof b);
}
INLINE float8 from_value_float8(float x) { return (float8){(uint8_t)round_to_float8(splat(x))[0]}; }

// int8

INLINE floats load_int8(const int8* p) {
#if defined(HAS_AVX512)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(HAS_AVX2)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  return (floats){p[0], p[1], p[2], p[3]};
#endif
}
INLINE float value_int8(int8 x) { return x; }
INLINE floats4 load4_int8(const int8* p) { return (floats4){p[0], p[1], p[2], p[3]}; }
