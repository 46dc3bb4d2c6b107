// The interface between the library and its callers. Python parses this file and fills in structures by member name.
#pragma once

#include <stdint.h>

// Element types, under torch's names, and codes of 4 and 6 bits.
typedef enum {
  ELEMENT_FLOAT32, ELEMENT_BFLOAT16, ELEMENT_FLOAT16, ELEMENT_FLOAT8_E4M3FN, ELEMENT_INT8, ELEMENT_INT4,
  ELEMENT_FLOAT8_E8M0FNU,  // powers of two and 0, stored as exponents
  ELEMENT_INT6
} element_type;

enum {
  MAX_HEAD_DIM = 512, MAX_EXPERTS = 1024, MAX_BUFFERS = 32, MAX_KERNEL_SIZE = 16,
  TILE_POSITIONS = 64  // positions scored at once; the size of the blocks of a block pattern is a multiple
};

// Return values of functions that can fail.
enum { DONE, NO_MEMORY, NO_KERNEL, LOST_RANKS };

// A contiguous tensor of two dimensions, or of one dimension, which counts as one row.
typedef struct {
  const void* values;  // NULL: the tensor is absent
  int64_t element, num_rows, width;
} tensor;

// See `BlockPattern` in operations.py. A block size of 0: queries attend to all blocks.
typedef struct {
  int64_t block_size, num_local, stride, first, head_step;
} block_pattern;

// A step's rows over one layer's paged cache. Strides count elements. In `decode`, the members that describe the rows
// come with the step and the others with the operations (see `of_layer`). The block tables and slots of further layer
// groups follow those of the first.
typedef struct {
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_rows, max_blocks]
  const int64_t* slot_mapping;     // [num_tokens]
  const float* alibi_slopes;       // [num_heads], or NULL
  const float* sinks;              // [num_heads], or NULL
  int64_t num_tokens, num_rows, max_blocks, num_heads, num_kv_heads, head_dim, block_size;
  int64_t key_strides[3], value_strides[3];  // of a block, a position and a head
  int64_t query_token_stride, fresh_key_token_stride, fresh_value_token_stride;
  int64_t window, num_threads;
  int64_t is_bidirectional;  // queries also see later positions of their row, with a window as many as before them
  float scale, softcap;
  block_pattern pattern;
} attention_step;

// The weight and bias of y = x W^T + b.
typedef struct {
  const void* panels;  // packed weights of an element type
  const float* bias;   // [out_size], or NULL
  int64_t in_size, out_size;
  int64_t element;     // of the weights
  int64_t activation;  // the element type to which the input is rounded
  // number of inputs that share a scale: 16 or 32 for codes; for float8 a multiple of 16 that divides in_size
  int64_t group_size;
  // The following members are used for codes only.
  int64_t scale_element;  // of scales and minima: ELEMENT_INT8, multiplied by factors, or a float type
  int64_t has_minima;
  int64_t has_zeros;
  // Values of the 4-bit codes; a matmul is fastest if they count upwards from -8 or 0. 6-bit codes count upwards from
  // the first value, -32 or 0.
  int8_t table[16];
} linear_layer;

// A weight as a loader provides it: `StoredWeight` of weight.py. A weight of 16-bit or 32-bit floats has `values` only.
typedef struct {
  const void* values;           // [out_size, in_size]
  const float* scale;           // [out_size, ceil(in_size / group_size)], or NULL
  const float* minimum;         // shaped like `scale`, or NULL
  const int8_t* zero;           // shaped like `scale`, or NULL
  const float* scale_factor;    // [out_size, in_size / 256], or NULL
  const float* minimum_factor;  // shaped like `scale_factor`, or NULL
  int64_t group_size;           // a multiple of the layer's group_size, or in_size
} held_weight;

typedef enum { SCORING_SOFTMAX, SCORING_SIGMOID, SCORING_SPARSE_MIXER } scoring_function;  // turns logits into scores

typedef struct {
  int64_t num_experts, num_chosen;
  scoring_function scoring;
  int64_t renormalizes;  // whether weights are divided by their sum
  int64_t num_groups, num_chosen_groups;
  float factor;             // multiplies the final weights
  float jitter;             // of SPARSE_MIXER
  // [num_experts], added to the scores when experts are chosen, but not to their weights; or NULL
  const float* correction;
} expert_routing;

typedef enum {
  OPERATION_EMBED, OPERATION_ADD, OPERATION_NORMALIZE, OPERATION_NORMALIZE_PROJECTIONS, OPERATION_MULTIPLY,
  OPERATION_ACTIVATE, OPERATION_ROUTE_TOP_K, OPERATION_MULTIPLY_ROUTED, OPERATION_COMBINE_EXPERTS, OPERATION_GATE,
  OPERATION_QK_NORM_ROPE_STORE, OPERATION_ATTEND_PAGED, OPERATION_LM_HEAD, OPERATION_ALL_REDUCE, OPERATION_CLIP,
  OPERATION_CONVOLVE, OPERATION_DELTA_RULE, OPERATION_NORMALIZE_GATED
} operation_kind;

typedef enum {
  FUNCTION_SILU, FUNCTION_GELU, FUNCTION_GELU_TANH, FUNCTION_RELU, FUNCTION_RELU2, FUNCTION_CLAMPED_SWIGLU, FUNCTION_XIELU
} activation_function;

// An operation of a decoder; decoder_kernel.py fills in its members by name. Each kind uses some of the members.
typedef struct {
  operation_kind kind;
  int64_t input, output, update, routes, gate;  // buffer numbers; 0: absent
  // ADD: input += update * factor. NORMALIZE: the same if there is an update, then output = (input - mean) / deviation
  // * weight + bias, with float32 [width] weight and bias. Without `is_centered` the mean counts as 0.
  tensor weight, bias;
  int64_t is_centered;
  // factor: multiplies the update of ADD, the table's rows of EMBED, and the logits of LM_HEAD. softcap: unless it is
  // 0, the logits of LM_HEAD are then bounded to softcap * tanh(logit / softcap). CLIP: output = input, clipped to
  // [-limit, limit].
  float eps, factor, softcap, limit;
  // EMBED uses this layer if there is no table. MULTIPLY: output = input W^T + b. If gated, output = silu of the first
  // half of that times the second half. LM_HEAD: the head. MULTIPLY_ROUTED: [num_linears], a layer for each expert; the
  // input has a row per token or per slot, and `routes` names the experts.
  const linear_layer* linear;
  int64_t num_linears;
  int64_t is_gated;
  // ACTIVATE: for each part of the input, output = function(part), or if gated, function(first half) * second half.
  // CLAMPED_SWIGLU clips gates to at most `limit`, and ups to [-limit, limit]; its sigmoid is computed of gate * alpha.
  // XIELU is not gated, and has float32 [4] parameters: alpha_p, alpha_n, beta and eps.
  int64_t num_parts;
  activation_function function;
  float alpha;
  tensor parameters;
  // ROUTE_TOP_K: the input contains the logits of a router. `plan_decoder` copies part of the routing to
  // MULTIPLY_ROUTED and COMBINE_EXPERTS.
  expert_routing routing;
  tensor correction;  // [num_experts] float32
  // EMBED: output = table[token] * factor + positions[position]. Both are [any, width], 16-bit or 32-bit floats;
  // positions are optional.
  tensor table, positions;
  // QK_NORM_ROPE_STORE: the input contains heads [num_heads + 2 * num_kv_heads, head_dim]: queries, keys and values.
  // Queries and keys are normalized if they have a norm weight [head_dim]. They are then rotated if the rope's cosines
  // and sines [num_positions, head_dim] are present; with `rotates_first`, they are rotated before they are normalized.
  // Queries are multiplied by the growth at their position if `growth` [num_positions] is present, and become the
  // output. Keys and values are stored in the cache.
  int64_t layer;
  int64_t num_heads, num_kv_heads, head_dim, num_positions;
  tensor query_norm, key_norm, rope[2], growth;
  int64_t rotates_first;
  // NORMALIZE_PROJECTIONS: output = input, except that two leading parts are normalized, each by its own mean square.
  // Their widths are the widths of `query_norm` and `key_norm`. With `head_dim`, each head gets a layer norm instead.
  tensor sinks;  // ATTEND_PAGED, which reads the stored keys and values: [num_heads] float32
  void *key_cache, *value_cache;
  // QK_NORM_ROPE_STORE and ATTEND_PAGED use the block tables and slots of this group, and the heads, the strides and the
  // scoring of this step.
  int64_t layer_group;
  const attention_step* attention;
  // CONVOLVE: weight [kernel_size, width] and an optional bias [width]; if gated, the input has three parts.
  // DELTA_RULE: bias and decay [num_heads]. NORMALIZE_GATED: weight [head_dim]. See operations.py.
  int64_t kernel_size, num_key_heads, key_dim, value_dim;
  tensor decay;
  int64_t state_offset;  // of the operation's first value in a state, set by `plan_decoder`
  int64_t in_width, width, gate_width;  // of the input, the output and the gate, set by `plan_decoder`; 0: absent
} operation;

typedef struct {
  operation* operations;
  int64_t num_operations;
  int64_t num_buffers;         // including buffer 0, which stands for an absent buffer
  const char* const* names;    // [num_buffers]
  int64_t* widths;             // [num_buffers], the largest; `plan_decoder` sets this member and the following ones
  int64_t state_size;              // number of values of a state; 0: no operation has states
  int64_t exchanged_width;         // width of the tensor that all-reduces sum; 0: there is no all-reduce
  char misfit[256];                // the reason why the operations are invalid, or empty
  int64_t cache_element;
  // Sums the step's `exchanged` over all ranks, in place. It is called on the thread that called `decode`. Returns a
  // value other than 0 if the all-reduce failed. NULL if there is only one rank.
  int64_t (*all_reduce)(void);
} decoder;

// The states of a step's rows: `StateRows` of states.py.
typedef struct {
  float* states;  // [any, state_size]
  const int32_t* query_start_loc;             // [num_rows + 1]
  const int32_t* reads;                       // [num_rows]
  const int32_t* save_start_loc;              // [num_rows + 1]
  const int32_t *save_counts, *save_states;   // [number of saves]
  int64_t num_rows, state_size;
} state_rows;

// The parts of a step whose durations are measured.
typedef enum { PART_NORMS, PART_PRODUCTS, PART_ROTARY, PART_ATTENTION, PART_HEAD, PART_RANKS, NUM_PARTS } step_part;

// The inputs of a step, and its outputs other than keys and values.
typedef struct {
  const int64_t *token_ids, *positions;  // [num_tokens]
  const int64_t* logit_rows;             // [num_logits]: indexes of the tokens whose logits are computed
  int64_t num_logits;                    // at most num_tokens
  float* hidden;                         // [num_tokens, width]: the input of LM_HEAD
  float* logits;                         // [num_logits, out_size of the head]
  // [num_logits]: index of the highest logit, the first of equals; -1: a logit is NaN
  int64_t* highest;
  float* exchanged;                      // [num_tokens, exchanged_width]; NULL: there is no all-reduce
  int64_t times[6];                      // duration of each part, nanoseconds
  const state_rows* states;              // NULL: no operation has states
} decoder_step;

// open: the caller chooses the token, from logits that have already been edited
enum { ROW_CHOSEN, ROW_NAN, ROW_OPEN };

// Columns have an entry for each row. If `entries` is not NULL, row i uses entry entries[i] of the columns, otherwise
// entry i.
typedef struct {
  float* logits;           // [num_rows, vocab_size], rows logits_stride apart; rows with edits are overwritten
  const int64_t* entries;  // [num_rows], or NULL
  const int64_t* highest;  // [num_rows], index of the highest unedited logit, -1 if a logit is NaN; or NULL
  const float *temperature, *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int32_t *top_k, *sample_indexes, *slots;
  const int64_t* seeds;
  const int64_t* num_tokens;          // [num_rows]
  const int32_t* bias_token_ids;      // [num_rows, max_biases]
  const float* bias_values;           // [num_rows, max_biases]
  const int32_t* stop_token_ids;      // [num_rows, max_stops]
  const int32_t* min_num_tokens;      // [num_rows]
  const uint32_t* masks;              // [number of masks, mask_stride]: a bit for each token, 1 if allowed; or NULL
  const int32_t* mask_lines;          // [num_rows], -1: all tokens
  const int32_t* history;             // [num_slots, history_stride]: the tokens of rows with penalties; or NULL
  const int64_t* num_prompt_tokens;   // [num_slots]
  int64_t num_rows, vocab_size, logits_stride, max_biases, max_stops, mask_stride, history_stride, num_threads;
  float* scratch;      // [num_threads, sampling_scratch_size(vocab_size)]
  int64_t* token_ids;  // [num_rows] out; 0 if no token was chosen
  uint8_t* statuses;   // [num_rows] out
} sampling_step;

// The new tokens of a step, concatenated row by row, copied from a table of rows.
typedef struct {
  // of slot 0; the next slots follow at the strides, and the block tables of the next layer group after all slots
  const int32_t *token_ids, *block_tables;
  int64_t token_stride, block_stride, block_size, num_slots, num_groups;
  int64_t num_rows, num_tokens, max_blocks;
  const int64_t *slots, *starts, *num_new_tokens;  // [num_rows]
  const _Bool* samples;                            // [num_rows]
  int64_t *flat_token_ids, *positions, *slot_mapping;  // [num_tokens], [num_tokens], [num_groups, num_tokens]
  // [num_rows]; the first entries are written, one for each sampling row
  int64_t* sampling_indices;
  // [num_rows + 1], [num_rows], [num_groups, num_rows, max_blocks]
  int32_t *query_start_loc, *seq_lens, *flat_tables;
} table_batch;

// Returns the name of the instruction set that the library is compiled for.
const char* variant(void);

// Returns the size of a type of this file, by name, as the library was compiled; 0: unknown name.
int64_t size_of(const char* name);

// x += update unless update is NULL; output = norm(x). All are [num_tokens, size], FLOAT32 or BFLOAT16.
int64_t add_rms_norm(int64_t element, void* x, const void* update, const void* weight, void* output, int64_t num_tokens,
                     int64_t size, float eps, int64_t num_threads);
// gate_up: [num_tokens, 2 * size], output: [num_tokens, size], FLOAT32 or BFLOAT16.
int64_t silu_mul(int64_t element, const void* gate_up, void* output, int64_t num_tokens, int64_t size,
                 int64_t num_threads);
// heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries, keys and values. Queries and keys are
// normalized if they have a weight, then rotated, in place; with `rotates_first`, they are rotated, then normalized.
// cos, sin: [num_tokens, head_dim]. All are FLOAT32 or BFLOAT16.
int64_t norm_rope(int64_t element, void* heads, const void* query_weight, const void* key_weight, const void* cos,
                  const void* sin, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                  float eps, int64_t rotates_first, int64_t num_threads);
// Stores a step's keys and values, then computes attention. output: [num_tokens, num_heads, head_dim], of the queries'
// element type: FLOAT32 with any cache, or BFLOAT16 with a cache of BFLOAT16 or 8 bits.
int64_t attend(int64_t element, int64_t cache_element, const attention_step* step, const void* query, const void* key,
               const void* value, void* key_cache, void* value_cache, void* output);

// Returns the size of the packed weight in bytes. The layer's panels need not exist yet.
int64_t packed_bytes(const linear_layer* layer);
// Packs a weight. Padding of the last panel and unit is 0. The layer's own panels are not read.
int64_t pack_linear(const linear_layer* layer, const held_weight* weight, void* panels, int64_t num_threads);
// Finds a table that contains all distinct codes, in ascending order. The table counts upwards from -8 or 0 if such a
// table contains all codes, because the kernels then need no lookup. Returns the bits per code: 4; 6 if there are more
// than 16 distinct codes, from table[0], -32 or 0, to 63 more; else 8.
int64_t find_codes(const int8_t* codes, int64_t num, int8_t table[16], int64_t num_threads);
// Quantises values to codes of 8 or 6 bits and unrounded scales. A group whose scale is not finite gets no codes.
int64_t quantize(const float* values, int64_t num_groups, int64_t bits, int8_t* codes, float* scale,
                 int64_t num_threads);
// Finds unrounded scales and minima for codes of 4 bits. A group that is not finite gets a scale that is not.
// importance: of each input of a row, or NULL.
int64_t search_scales(const float* values, int64_t num_groups, const float* importance, int64_t groups_of_row,
                      float* scale, float* minimum, int64_t num_threads);
// Rounds values to the nearest codes of 4 bits.
int64_t round_codes(const float* values, int64_t num_groups, const float* scale, const float* minimum, int8_t* codes,
                    int64_t num_threads);
// output: [num_indexes, in_size]
int64_t lookup_rows(const linear_layer* layer, const int64_t* indexes, float* output, int64_t num_indexes);
// x: [num_rows, in_size], y: [num_rows, out_size].
int64_t linear(const linear_layer* layer, const float* x, float* y, int64_t num_rows, int64_t num_threads);
// x: [num_tokens * rows_of_token, in_size], a row per token (rows_of_token is 1) or per slot. ids: [num_tokens,
// num_chosen], ascending for each token. y: [num_tokens * num_chosen, out_size].
int64_t multiply_experts(const linear_layer* layers, int64_t num_experts, const int64_t* ids, const float* x,
                         int64_t rows_of_token, float* y, int64_t num_tokens, int64_t num_chosen, int64_t num_threads);
// Returns whether a matmul with this layer can also gate the second half of its outputs by the first half.
int64_t is_gateable(const linear_layer* layer);

// Computes the members of `model` that depend on its operations. If the operations are invalid, sets `misfit`.
int64_t plan_decoder(decoder* model);
int64_t decode(const decoder* model, const attention_step* step, decoder_step* tokens);

int64_t sampling_scratch_size(int64_t vocab_size);
int64_t sample(const sampling_step* step);

// Returns the number of sampling rows.
int64_t flatten_rows(const table_batch* batch);
