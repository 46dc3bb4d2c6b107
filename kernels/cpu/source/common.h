// What all units of translation have in common. Each *.c file is one: compilers work on several side by side.
#pragma once

#include "vector.h"

// Of what another unit defines: no name of the library's own.
#define SHARED __attribute__((visibility("hidden")))

#define JOIN_(name, type) name##_##type
#define JOIN(name, type) JOIN_(name, type)
#define NAME(name) JOIN(name, ELEMENT)
// The same of what a cache holds, and of a function over both types.
#define HELD(name) JOIN(name, CACHE)
#define PAGED(name) JOIN(NAME(name), CACHE)

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
