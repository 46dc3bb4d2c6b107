// What the library and its callers share: Python reads this very file, and fills structures in by the names of members.
#pragma once

#include <stdint.h>

// What elements are, by torch's names of them; and codes of 4 bits.
typedef enum {
  ELEMENT_FLOAT32, ELEMENT_BFLOAT16, ELEMENT_FLOAT16, ELEMENT_FLOAT8_E4M3FN, ELEMENT_INT8, ELEMENT_INT4,
  ELEMENT_FLOAT8_E8M0FNU  // powers of two, and 0, by their exponents
} element_type;

enum { MAX_HEAD_DIM = 256, MAX_EXPERTS = 1024, MAX_BUFFERS = 32 };

// What functions return that may fail.
enum { DONE, NO_MEMORY, NO_KERNEL, LOST_RANKS };

// A dense tensor of two dimensions, or of one, which is a row.
typedef struct {
  const void* values;  // NULL: there is none
  int64_t element, num_rows, width;
} tensor;

// A step's rows over one layer's paged cache; the same for all its layers. Strides count elements.
typedef struct {
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_rows, max_blocks]
  const int64_t* slot_mapping;     // [num_tokens]
  const float* alibi_slopes;       // [num_heads], or NULL
  const float* sinks;              // [num_heads], or NULL
  int64_t num_tokens, num_rows, max_blocks, num_heads, num_kv_heads, head_dim, block_size;
  int64_t key_strides[3], value_strides[3];  // of a block, a position, a head
  int64_t query_token_stride, fresh_key_token_stride, fresh_value_token_stride;
  int64_t window, num_threads;
  float scale, softcap;
} attention_step;

// y = x W^T + b.
typedef struct {
  const void* panels;  // packed weights of an element type
  const float* bias;   // [out_size], or NULL
  int64_t in_size, out_size;
  int64_t element;     // of the weights
  int64_t activation;  // the element that the product reads
  int64_t group_size;  // of inputs that share a scale: 16 or 32; of floats of 8 bits a multiple of 16 that divides in_size
  // Of codes alone.
  int64_t scale_element;  // of scales and minima: ELEMENT_INT8, which have factors, or floats
  int64_t has_minima;
  int64_t has_zeros;
  int8_t table[16];  // what 4 bits stand for; products are fastest where that counts upwards from -8 or 0
} linear_layer;

// A weight as a loader gives it: `HeldWeight` of weight.py. Of floats of 16 or 32 bits there are values alone.
typedef struct {
  const void* values;           // [out_size, in_size]
  const float* scale;           // [out_size, ceil(in_size / group_size)]
  const float* minimum;         // the same, or NULL
  const int8_t* zero;           // the same, or NULL
  const float* scale_factor;    // [out_size, in_size / 256], or NULL
  const float* minimum_factor;  // the same, or NULL
  int64_t group_size;           // a multiple of the layer's, or in_size
} held_weight;

typedef enum { SCORING_SOFTMAX, SCORING_SIGMOID } scoring_function;  // what logits become

typedef struct {
  int64_t num_experts, num_chosen;
  scoring_function scoring;
  int64_t renormalizes;  // weights are divided by their sum
  int64_t num_groups, num_chosen_groups;
  float factor;             // of the weights, in the end
  const float* correction;  // [num_experts], added to scores for the routing alone; or NULL
} expert_routing;

typedef enum {
  OPERATION_EMBED, OPERATION_ADD, OPERATION_NORMALIZE, OPERATION_NORMALIZE_PROJECTIONS, OPERATION_MULTIPLY,
  OPERATION_ACTIVATE, OPERATION_ROUTE_TOP_K, OPERATION_MULTIPLY_ROUTED, OPERATION_COMBINE_EXPERTS, OPERATION_GATE,
  OPERATION_QK_NORM_ROPE_STORE, OPERATION_ATTEND_PAGED, OPERATION_LM_HEAD, OPERATION_ALL_REDUCE, OPERATION_CLIP
} operation_kind;

typedef enum { FUNCTION_SILU, FUNCTION_GELU, FUNCTION_GELU_TANH, FUNCTION_RELU, FUNCTION_CLAMPED_SWIGLU } activation_function;

// What decoder_kernel.py says of an operation, by the names that it has there. Each kind uses some of it.
typedef struct {
  operation_kind kind;
  int64_t input, output, update, routes, gate;  // buffers; 0: none
  // ADD: input += update * factor. NORMALIZE: that, where there is an update, then output = (input - mean) / deviation *
  // weight + bias, float32 [width]; without `is_centered` the mean counts as 0.
  tensor weight, bias;
  int64_t is_centered;
  // Factor: of the update; of the table's rows of EMBED; of the logits of LM_HEAD, which are then bounded to softcap *
  // tanh(logit / softcap), unless that is 0. CLIP: output = input, bounded to the limit on both sides.
  float eps, factor, softcap, limit;
  // EMBED, where there is no table. MULTIPLY: output = input W^T + b, or, gated, silu of its first half times its second.
  // LM_HEAD: the head. [num_linears] of MULTIPLY_ROUTED: output = products of the input, of tokens or slots, by `routes`.
  const linear_layer* linear;
  int64_t num_linears;
  int64_t is_gated;
  // ACTIVATE: output = function(input), or, gated, that of its first half times its second, of each part of the input.
  // CLAMPED_SWIGLU is of gates up to the limit, and ups up to it on both sides; its sigmoid is of gates times alpha.
  int64_t num_parts;
  activation_function function;
  float alpha;
  // ROUTE_TOP_K: of the input, a router's logits; `plan_decoder` tells MULTIPLY_ROUTED and COMBINE_EXPERTS a part of it.
  expert_routing routing;
  tensor correction;  // [num_experts] float32
  // EMBED: output = table[token] * factor + positions[position], both [any, width] of floats of 16 or 32 bits; there may be
  // no positions.
  tensor table, positions;
  // QK_NORM_ROPE_STORE: of heads [num_heads + 2 * num_kv_heads, head_dim], queries, keys and values, the queries and keys
  // are normalized where there is a weight, [head_dim], and turned by cosines and sines of the rope, [num_positions,
  // head_dim], where there are any; queries, times the growth at their position, [num_positions], where there is any, are
  // the output, keys and values are stored.
  int64_t layer, head_dim;
  int64_t num_heads, num_positions;
  tensor query_norm, key_norm, rope[2], growth;
  // NORMALIZE_PROJECTIONS: output = input, of which the first values and those behind them, as many as `query_norm` and
  // `key_norm` have, are each normalized by their own mean square.
  tensor sinks;  // ATTEND_PAGED, over what is stored: [num_heads] float32
  void *key_cache, *value_cache;
  int64_t window;  // positions that a query attends to, its own included; 0: all up to its own
} operation;

typedef struct {
  operation* operations;
  int64_t num_operations;
  int64_t num_buffers;         // with the one that is none
  const char* const* names;    // [num_buffers]
  int64_t* widths;             // [num_buffers], found by `plan_decoder`, as what follows
  int64_t head_dim, num_heads, num_kv_heads;  // of all that are turned; 0: there are none
  int64_t exchanged_width;         // of what ranks sum up; 0: nothing
  char misfit[256];                // why it is none
  int64_t cache_element;
  // It sums `exchanged` of the step up, in place, and is called on the thread that the step was; not 0 if that failed.
  // NULL where there is one rank.
  int64_t (*all_reduce)(void);
} decoder;

// Which of a step's parts takes how long.
typedef enum { PART_NORMS, PART_PRODUCTS, PART_ROTARY, PART_ATTENTION, PART_HEAD, PART_RANKS, NUM_PARTS } step_part;

// What a step is given and, beside keys and values, computes.
typedef struct {
  const int64_t *token_ids, *positions;  // [num_tokens]
  const int64_t* logit_rows;             // [num_logits]: which tokens have logits
  int64_t num_logits;                    // at most num_tokens
  float* hidden;                         // [num_tokens, width]: what LM_HEAD reads
  float* logits;                         // [num_logits, out_size of the head]
  int64_t* highest;                      // [num_logits]: which logit is, the first of equals; -1: there is a NaN
  float* exchanged;                      // [num_tokens, exchanged_width]; NULL: there is none
  int64_t times[6];                      // of parts, nanoseconds
} decoder_step;

enum { ROW_CHOSEN, ROW_NAN, ROW_OPEN };  // open: the caller chooses, from logits that are edited already

// Columns have an entry for each row: its own, or where there are `entries` the one that these name.
typedef struct {
  float* logits;           // [num_rows, vocab_size], rows logits_stride apart; those of rows with edits are overwritten
  const int64_t* entries;  // [num_rows], or NULL
  const int64_t* highest;  // [num_rows] of the logits as they come, -1 where one is NaN; or NULL
  const float *temperature, *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int32_t *top_k, *sample_indexes, *slots;
  const int64_t* seeds;
  const int64_t* num_tokens;          // [num_rows]
  const int32_t* bias_token_ids;      // [num_rows, max_biases]
  const float* bias_values;           // [num_rows, max_biases]
  const int32_t* stop_token_ids;      // [num_rows, max_stops]
  const int32_t* min_num_tokens;      // [num_rows]
  const uint32_t* masks;              // [number of lines, mask_stride]: a bit for each token, 1 if allowed; or NULL
  const int32_t* mask_lines;          // [num_rows], -1: all tokens
  const int32_t* history;             // [num_slots, history_stride]: the tokens of rows with penalties; or NULL
  const int64_t* num_prompt_tokens;   // [num_slots]
  int64_t num_rows, vocab_size, logits_stride, max_biases, max_stops, mask_stride, history_stride, num_threads;
  float* scratch;      // [num_threads, sampling_scratch_size(vocab_size)]
  int64_t* token_ids;  // [num_rows] out; 0 where the row is not chosen
  uint8_t* statuses;   // [num_rows] out
} sampling_step;

// A step's new tokens one row after the other, taken from a table of rows.
typedef struct {
  const int32_t *token_ids, *block_tables;  // of slot 0; the next slots' follow at these distances
  int64_t token_stride, block_stride, block_size;
  int64_t num_rows, max_blocks;
  const int64_t *slots, *starts, *num_new_tokens;  // [num_rows]
  const _Bool* samples;                            // [num_rows]
  int64_t *flat_token_ids, *positions, *slot_mapping;  // [num_tokens]
  int64_t* sampling_indices;                           // [num_rows], as many as there are
  int32_t *query_start_loc, *seq_lens, *flat_tables;   // [num_rows + 1], [num_rows], [num_rows, max_blocks]
} table_batch;

// The instruction set that the library is compiled for.
const char* variant(void);

// Of a type in this file, by name, as the library has it; 0: it has none.
int64_t size_of(const char* name);

// x += update where there is one; output = norm(x). All [num_tokens, size], of FLOAT32 or BFLOAT16.
int64_t add_rms_norm(int64_t element, void* x, const void* update, const void* weight, void* output, int64_t num_tokens,
                     int64_t size, float eps, int64_t num_threads);
// gate_up: [num_tokens, 2 * size], output: [num_tokens, size], of FLOAT32 or BFLOAT16.
int64_t silu_mul(int64_t element, const void* gate_up, void* output, int64_t num_tokens, int64_t size,
                 int64_t num_threads);
// heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries, keys and values. Queries and keys are normalized
// where there is a weight, then rotated, in place. cos, sin: [num_tokens, head_dim]. All of FLOAT32 or BFLOAT16.
int64_t norm_rope(int64_t element, void* heads, const void* query_weight, const void* key_weight, const void* cos,
                  const void* sin, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                  float eps, int64_t num_threads);
// Stores a step's keys and values, then attends to them. output: [num_tokens, num_heads, head_dim], of the queries'
// element: FLOAT32 over any cache, or BFLOAT16 over one of the same or of 8 bits.
int64_t attend(int64_t element, int64_t cache_element, const attention_step* step, const void* query, const void* key,
               const void* value, void* key_cache, void* value_cache, void* output);

// Of packed weights, whose panels are not there yet.
int64_t packed_bytes(const linear_layer* layer);
// What is missing of the last panel and unit is 0. The layer's own panels are not looked at.
int64_t pack_linear(const linear_layer* layer, const held_weight* weight, void* panels, int64_t num_threads);
// A table that holds the different codes in ascending order, and counts upwards from -8 or 0 if such a one can hold them,
// which needs no looking up. Returns how many bits a code takes: 4, or, where there are more of them than 16, 8.
int64_t find_codes(const int8_t* codes, int64_t num, int8_t table[16], int64_t num_threads);
// Scales as they are before they are rounded. A group whose scale is no finite number gets no codes.
int64_t quantize(const float* values, int64_t num_groups, int64_t bits, int8_t* codes, float* scale,
                 int64_t num_threads);
// output: [num_indexes, in_size]
int64_t take_rows(const linear_layer* layer, const int64_t* indexes, float* output, int64_t num_indexes);
// x: [num_rows, in_size], y: [num_rows, out_size].
int64_t linear(const linear_layer* layer, const float* x, float* y, int64_t num_rows, int64_t num_threads);
// x: [num_tokens * rows_of_token, in_size], of tokens (rows_of_token is 1) or slots; ids: [num_tokens, num_chosen], those
// of a token rising; y: [num_tokens * num_chosen, out_size].
int64_t multiply_experts(const linear_layer* layers, int64_t num_experts, const int64_t* ids, const float* x,
                         int64_t rows_of_token, float* y, int64_t num_tokens, int64_t num_chosen, int64_t num_threads);
// Whether a layer's first half of outputs can gate the second within the product.
int64_t is_gateable(const linear_layer* layer);

// Finds what follows from the operations, or says why nothing does, by `misfit`.
int64_t plan_decoder(decoder* model);
int64_t decode(const decoder* model, const attention_step* step, decoder_step* tokens);

int64_t sampling_scratch_size(int64_t vocab_size);
int64_t sample(const sampling_step* step);

// Returns how many rows sample.
int64_t flatten_rows(const table_batch* batch);
