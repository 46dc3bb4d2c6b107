// Every kernel for every element type that it is needed for. What they compute is specified by kernels/reference.py.
#include "vector.h"

#define JOIN_(name, type) name##_##type
#define JOIN(name, type) JOIN_(name, type)
#define NAME(name) JOIN(name, ELEMENT_NAME)
// The same of what a cache holds, and of a function over both types.
#define HELD(name) JOIN(name, CACHE_NAME)
#define PAGED(name) JOIN(NAME(name), CACHE_NAME)

// A step's rows over one layer's paged cache; the same for all its layers. Strides count elements. `paged.py` mirrors
// this structure.
typedef struct {
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_rows, max_blocks]
  const int64_t* slot_mapping;     // [num_tokens]
  const float* alibi_slopes;       // [num_heads], or NULL
  const float* sinks;              // [num_heads], or NULL
  int64_t num_tokens, num_rows, max_blocks, num_heads, num_kv_heads, head_dim, block_size;
  int64_t key_block_stride, key_position_stride, key_head_stride;
  int64_t value_block_stride, value_position_stride, value_head_stride;
  int64_t query_token_stride, fresh_key_token_stride, fresh_value_token_stride;
  int64_t window, num_threads;
  float scale, softcap;
} attention_step;

enum {
  LINE = 64,  // bytes
  MAX_HEAD_DIM = 256,
  TILE_ROWS = 64,        // (query, head) pairs that attend together: keys are loaded once for all of them
  TILE_POSITIONS = 64,   // scored at once
  SPAN_POSITIONS = 512,  // summed up by themselves: whole tiles
  DIRECT_ROWS = 8,       // up to so many rows, packing the keys costs more than it saves
  LONG_CONTEXT = 2048,   // positions from which on a row is split rather than its KV heads
  TASKS_PER_THREAD = 4,  // wanted before contexts are split no further
};

// Elements below which a second thread costs more than it saves.
#define MIN_PARALLEL_ELEMENTS 32768

// What a cache holds; `paged.py` mirrors it.
enum { HELD_FLOAT, HELD_BFLOAT16, HELD_FLOAT16, HELD_FLOAT8, HELD_INT8 };

#include "tasks.h"

#include "rows.h"

#include "activations.h"

#include "work.h"

#include "softmax.h"

// Whether queries are scored in pairs of bfloat16.
#define IN_PAIRS 0

#define ELEMENT float
#define ELEMENT_NAME float
#include "pages.h"
#include "fused.h"
#include "linear.h"
#define CACHE float
#define CACHE_NAME float
#include "attention.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT bfloat16
#define ELEMENT_NAME bfloat16
#define IS_BFLOAT16 1
#include "pages.h"
#include "fused.h"
#include "linear.h"
#undef IS_BFLOAT16
#define CACHE bfloat16
#define CACHE_NAME bfloat16
#undef IN_PAIRS
#define IN_PAIRS HAS_PAIRS
#include "attention.h"
#undef IN_PAIRS
#define IN_PAIRS 0
#undef ELEMENT
#undef ELEMENT_NAME

// What weights and caches may hold, and nothing is computed in.
#define ELEMENT float16
#define ELEMENT_NAME float16
#include "pages.h"
#include "linear.h"
#undef ELEMENT
#undef ELEMENT_NAME

// Queries of float32 over a cache of half the size.
#define ELEMENT float
#define ELEMENT_NAME float
#define CACHE bfloat16
#define CACHE_NAME bfloat16
#include "attention.h"
#define CACHE float16
#define CACHE_NAME float16
#include "attention.h"

// Over a cache of 8 bits, queries of both types.
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT float8
#define ELEMENT_NAME float8
#include "pages.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT int8
#define ELEMENT_NAME int8
#include "pages.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT float
#define ELEMENT_NAME float
#define CACHE float8
#define CACHE_NAME float8
#include "attention.h"
#define CACHE int8
#define CACHE_NAME int8
#define IS_SCALED 1
#include "attention.h"
#undef IS_SCALED
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT bfloat16
#define ELEMENT_NAME bfloat16
#define CACHE float8
#define CACHE_NAME float8
#include "attention.h"
#define CACHE int8
#define CACHE_NAME int8
#define IS_SCALED 1
#include "attention.h"
#undef IS_SCALED

#include "bfloat16.h"

#include "integers.h"

#include "float8.h"

#include "product.h"
#include "experts.h"
#include "quantize.h"

#include "decoder.h"

#include "sampler.h"

#include "batch.h"

const char* variant(void) { return VARIANT; }
