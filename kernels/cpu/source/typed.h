// Exported functions that select the implementation for an element type.

int64_t add_rms_norm(int64_t element, void* x, const void* update, const void* weight, void* output, int64_t num_tokens,
                     int64_t size, float eps, int64_t num_threads) {
  switch (element) {
    case ELEMENT_FLOAT32: add_rms_norm_float(x, update, weight, output, num_tokens, size, eps, num_threads); break;
    case ELEMENT_BFLOAT16: add_rms_norm_bfloat16(x, update, weight, output, num_tokens, size, eps, num_threads); break;
    default: return NO_KERNEL;
  }
  return DONE;
}

int64_t silu_mul(int64_t element, const void* gate_up, void* output, int64_t num_tokens, int64_t size,
                 int64_t num_threads) {
  switch (element) {
    case ELEMENT_FLOAT32: silu_mul_float(gate_up, output, num_tokens, size, num_threads); break;
    case ELEMENT_BFLOAT16: silu_mul_bfloat16(gate_up, output, num_tokens, size, num_threads); break;
    default: return NO_KERNEL;
  }
  return DONE;
}

int64_t norm_rope(int64_t element, void* heads, const void* query_weight, const void* key_weight, const void* cos,
                  const void* sin, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                  float eps, int64_t rotates_first, int64_t num_threads) {
  switch (element) {
    case ELEMENT_FLOAT32:
      norm_rope_float(heads, query_weight, key_weight, cos, sin, num_tokens, num_heads, num_kv_heads, head_dim, eps,
                      rotates_first, num_threads);
      break;
    case ELEMENT_BFLOAT16:
      norm_rope_bfloat16(heads, query_weight, key_weight, cos, sin, num_tokens, num_heads, num_kv_heads, head_dim, eps,
                         rotates_first, num_threads);
      break;
    default: return NO_KERNEL;
  }
  return DONE;
}

int64_t pack_linear(const linear_layer* layer, const held_weight* weight, void* panels, int64_t num_threads) {
  const int64_t in_size = layer->in_size, out_size = layer->out_size;
  switch (layer->element) {
    case ELEMENT_FLOAT32: pack_linear_float(weight->values, panels, in_size, out_size, num_threads); break;
    case ELEMENT_BFLOAT16: pack_linear_bfloat16(weight->values, panels, in_size, out_size, num_threads); break;
    case ELEMENT_FLOAT16: pack_linear_float16(weight->values, panels, in_size, out_size, num_threads); break;
    case ELEMENT_FLOAT8_E4M3FN: pack_float8(layer, weight, panels, num_threads); break;
    default: pack_quantized(layer, weight, panels, num_threads);
  }
  return DONE;
}

typedef int64_t (*attend_function)(const attention_step*, const void*, const void*, const void*, void*, void*, void*);
#define DECLARE(queries, cache) \
  SHARED int64_t attend_##queries##_##cache(const attention_step*, const void*, const void*, const void*, void*, void*, \
                                            void*);
DECLARE(float, float) DECLARE(float, bfloat16) DECLARE(float, float16) DECLARE(float, float8) DECLARE(float, int8)
DECLARE(bfloat16, bfloat16) DECLARE(bfloat16, float8) DECLARE(bfloat16, int8)
#undef DECLARE

int64_t attend(int64_t element, int64_t cache_element, const attention_step* step, const void* query, const void* key,
               const void* value, void* key_cache, void* value_cache, void* output) {
  // Indexed by the element types of queries and cache.
  static const attend_function FUNCTIONS[2][ELEMENT_INT8 + 1] = {
      [ELEMENT_FLOAT32] = {[ELEMENT_FLOAT32] = attend_float_float,
                           [ELEMENT_BFLOAT16] = attend_float_bfloat16,
                           [ELEMENT_FLOAT16] = attend_float_float16,
                           [ELEMENT_FLOAT8_E4M3FN] = attend_float_float8,
                           [ELEMENT_INT8] = attend_float_int8},
      [ELEMENT_BFLOAT16] = {[ELEMENT_BFLOAT16] = attend_bfloat16_bfloat16,
                            [ELEMENT_FLOAT8_E4M3FN] = attend_bfloat16_float8,
                            [ELEMENT_INT8] = attend_bfloat16_int8}};
  const int is_listed = element <= ELEMENT_BFLOAT16 && cache_element <= ELEMENT_INT8;
  const attend_function run = is_listed ? FUNCTIONS[element][cache_element] : NULL;
  return run ? run(step, query, key, value, key_cache, value_cache, output) : NO_KERNEL;
}
