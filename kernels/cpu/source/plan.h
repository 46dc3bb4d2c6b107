// Checks a decoder's operations, and computes the widths of its buffers. A buffer has the width that was last written.
// While operations are planned, `widths` are the current widths of the buffers. All tensors are contiguous.
#include <stdarg.h>
#include <stdio.h>

// For a buffer of routes: the number of experts chosen per token, and the total number of experts.
typedef struct {
  int64_t num_chosen, num_experts;
} routed;

// Records why the operations are invalid. Only the first reason is kept.
__attribute__((format(printf, 2, 3))) static void refuse(decoder* m, const char* format, ...) {
  va_list values;
  if (m->misfit[0]) return;
  va_start(values, format);
  vsnprintf(m->misfit, sizeof m->misfit, format, values);
  va_end(values);
}

#define LONG(value) ((long long)(value))

static const char* name_of_element(int64_t element) {
  static const char* const NAMES[] = {[ELEMENT_FLOAT32] = "float32",       [ELEMENT_BFLOAT16] = "bfloat16",
                                      [ELEMENT_FLOAT16] = "float16",       [ELEMENT_FLOAT8_E4M3FN] = "float8_e4m3fn",
                                      [ELEMENT_INT8] = "int8",             [ELEMENT_INT4] = "int4",
                                      [ELEMENT_FLOAT8_E8M0FNU] = "float8_e8m0fnu", [ELEMENT_INT6] = "int6"};
  return NAMES[element];
}

static void describe_shape(int64_t num_rows, int64_t width, char text[64]) {
  if (num_rows == 1)
    snprintf(text, 64, "(%lld,)", LONG(width));
  else
    snprintf(text, 64, "(%lld, %lld)", LONG(num_rows), LONG(width));
}

static void refuse_tensor(decoder* m, const char* name, const tensor* t, int64_t num_rows, int64_t width) {
  char found[64], wanted[64];
  describe_shape(t->num_rows, t->width, found);
  describe_shape(num_rows, width, wanted);
  refuse(m, "%s is torch.%s %s; it must be torch.float32 %s", name, name_of_element(t->element), found, wanted);
}

// Checks an optional tensor, which must be float32 [width].
static void check_row(decoder* m, const char* name, const tensor* t, int64_t width) {
  if (t->values && (t->element != ELEMENT_FLOAT32 || t->num_rows != 1 || t->width != width))
    refuse_tensor(m, name, t, 1, width);
}

// Checks an optional tensor, which must be float32 [num_rows, width].
static void check_table(decoder* m, const char* name, const tensor* t, int64_t num_rows, int64_t width) {
  if (t->values && (t->element != ELEMENT_FLOAT32 || t->num_rows != num_rows || t->width != width))
    refuse_tensor(m, name, t, num_rows, width);
}

// Returns the width of a buffer that an operation reads. `width`: the required width, or 0.
static int64_t read_buffer(decoder* m, int64_t buffer, int64_t width) {
  const int64_t found = m->widths[buffer];
  const char* name = m->names[buffer];
  if (!found)
    refuse(m, "buffer %s is not written; something is read from it", name);
  else if (width && width != found)
    refuse(m, "buffer %s is %lld; %lld is read from it", name, LONG(found), LONG(width));
  return found;
}

static int64_t plan_embed(decoder* m, const operation* o) {
  const int64_t width = o->linear ? o->linear->in_size : o->table.width;
  if (o->positions.values && o->positions.width != width)
    refuse(m, "positions are %lld wide and tokens %lld", LONG(o->positions.width), LONG(width));
  if (o->table.element > ELEMENT_FLOAT16 || o->positions.element > ELEMENT_FLOAT16)
    refuse(m, "a table of torch.%s has no rows of floats",
           name_of_element(o->table.element > ELEMENT_FLOAT16 ? o->table.element : o->positions.element));
  return width;
}

static int64_t plan_projections(decoder* m, const operation* o) {
  const int64_t width = read_buffer(m, o->input, 0), first = o->query_norm.width, second = o->key_norm.width;
  check_row(m, "query_norm", &o->query_norm, first);
  check_row(m, "key_norm", &o->key_norm, second);
  if (o->head_dim && (first % o->head_dim || second % o->head_dim))
    refuse(m, "parts of %lld and %lld are not whole heads of %lld", LONG(first), LONG(second), LONG(o->head_dim));
  if (first + second > width)
    refuse(m, "parts of %lld and %lld are normalized of %lld values", LONG(first), LONG(second), LONG(width));
  return width;
}

static int64_t plan_activation(decoder* m, const operation* o) {
  const int64_t width = read_buffer(m, o->input, 0) / (1 + o->is_gated);
  if (width % o->num_parts)
    refuse(m, "buffer %s does not have %lld parts of one width", m->names[o->input], LONG(o->num_parts));
  check_row(m, "parameters", &o->parameters, 4);
  if (o->function == FUNCTION_XIELU && (o->is_gated || !o->parameters.values))
    refuse(m, "xielu needs four parameters and no gate");
  return width;
}

// Returns the width of the routes: an id and a weight for each expert of a token.
static int64_t plan_routes(decoder* m, operation* o, routed* found) {
  expert_routing* c = &o->routing;
  c->num_experts = read_buffer(m, o->input, 0);
  c->correction = o->correction.values;
  if (c->num_chosen < 1 || c->num_chosen > c->num_experts || c->num_experts > MAX_EXPERTS)
    refuse(m, "%lld of %lld experts cannot be chosen; 1 to %d can", LONG(c->num_chosen), LONG(c->num_experts), MAX_EXPERTS);
  if (c->num_groups < 1 || c->num_experts % c->num_groups || c->num_chosen_groups < 1 || c->num_chosen_groups > c->num_groups)
    refuse(m, "%lld of %lld groups of %lld experts cannot be chosen", LONG(c->num_chosen_groups), LONG(c->num_groups),
           LONG(c->num_experts));
  check_row(m, "correction", &o->correction, c->num_experts);
  found[o->output] = (routed){c->num_chosen, c->num_experts};
  return 2 * c->num_chosen;
}

// Returns the output width of MULTIPLY_ROUTED and COMBINE_EXPERTS.
static int64_t plan_slots(decoder* m, operation* o, const routed* found) {
  const int64_t width = read_buffer(m, o->input, 0), num_chosen = found[o->routes].num_chosen;
  const char* input = m->names[o->input];
  o->routing.num_chosen = num_chosen;
  o->routing.num_experts = found[o->routes].num_experts;
  if (!num_chosen) {
    refuse(m, "buffer %s is read as routes, which nothing has written to it", m->names[o->routes]);
    return 0;
  }
  if (o->kind == OPERATION_COMBINE_EXPERTS) {
    if (width % num_chosen) refuse(m, "buffer %s is %lld wide: not %lld slots of one width", input, LONG(width), LONG(num_chosen));
    return width / num_chosen;
  }
  if (o->num_linears != o->routing.num_experts)
    refuse(m, "there are %lld weights of %lld experts", LONG(o->num_linears), LONG(o->routing.num_experts));
  if (width != o->linear->in_size && width != num_chosen * o->linear->in_size)
    refuse(m, "buffer %s is %lld wide; %lld inputs are read of each slot", input, LONG(width), LONG(o->linear->in_size));
  return num_chosen * (o->linear->out_size / (1 + o->is_gated));
}

static int64_t plan_heads(decoder* m, const operation* o) {
  const int64_t width = read_buffer(m, o->input, 0), size = o->head_dim;
  const int64_t wanted = (o->num_heads + 2 * o->num_kv_heads) * size;
  if (width != wanted)
    refuse(m, "heads are %lld wide; %lld query heads and %lld KV heads of %lld need %lld", LONG(width),
           LONG(o->num_heads), LONG(o->num_kv_heads), LONG(size), LONG(wanted));
  check_row(m, "query_norm", &o->query_norm, size);
  check_row(m, "key_norm", &o->key_norm, size);
  check_table(m, "cosines", &o->rope[0], o->num_positions, size);
  check_table(m, "sines", &o->rope[1], o->num_positions, size);
  check_row(m, "growth", &o->growth, o->num_positions);
  return o->num_heads * size;
}

static int64_t plan_sums(decoder* m, const operation* o) {
  const int64_t width = read_buffer(m, o->input, 0);
  if (!m->all_reduce)
    refuse(m, "ranks are to sum up widths of %lld, and there are none", LONG(width));
  else if (m->exchanged_width && m->exchanged_width != width)
    refuse(m, "ranks are to sum up widths of %lld and %lld; one can be", LONG(m->exchanged_width), LONG(width));
  m->exchanged_width = width;
  return width;
}

// Reserves the next `num` values of a state for an operation.
static void reserve_state(decoder* m, operation* o, int64_t num) {
  o->state_offset = m->state_size;
  m->state_size += num;
}

static int64_t plan_convolution(decoder* m, operation* o) {
  const int64_t num_parts = o->is_gated ? 3 : 1, in_width = read_buffer(m, o->input, 0), width = in_width / num_parts;
  if (o->kernel_size < 2 || o->kernel_size > MAX_KERNEL_SIZE)
    refuse(m, "a convolution has a kernel of %lld inputs; 2 to %d are supported", LONG(o->kernel_size), MAX_KERNEL_SIZE);
  if (in_width % num_parts)
    refuse(m, "buffer %s is %lld wide: not %lld parts of one width", m->names[o->input], LONG(in_width), LONG(num_parts));
  check_table(m, "weight", &o->weight, o->kernel_size, width);
  check_row(m, "bias", &o->bias, width);
  reserve_state(m, o, width * (o->kernel_size - 1));
  return width;
}

static int64_t plan_delta_rule(decoder* m, operation* o) {
  const int64_t width = o->num_heads * o->value_dim;
  if (o->key_dim < 1 || o->key_dim > MAX_HEAD_DIM || o->num_key_heads < 1 || o->num_heads % o->num_key_heads)
    refuse(m, "%lld value heads cannot share %lld key heads of %lld; the size is at most %d", LONG(o->num_heads),
           LONG(o->num_key_heads), LONG(o->key_dim), MAX_HEAD_DIM);
  read_buffer(m, o->input, 2 * o->num_key_heads * o->key_dim + width);
  read_buffer(m, o->gate, 2 * o->num_heads);
  check_row(m, "decay", &o->decay, o->num_heads);
  check_row(m, "bias", &o->bias, o->num_heads);
  reserve_state(m, o, width * o->key_dim);
  return width;
}

static int64_t plan_gated_norm(decoder* m, const operation* o) {
  const int64_t width = read_buffer(m, o->input, 0), size = o->weight.width;
  check_row(m, "weight", &o->weight, size);
  if (!size || width % size)
    refuse(m, "buffer %s is %lld wide: not whole heads of %lld", m->names[o->input], LONG(width), LONG(size));
  return read_buffer(m, o->gate, width);
}

// Returns the width of the operation's output.
static int64_t plan_operation(decoder* m, operation* o, routed* found) {
  int64_t width;
  switch (o->kind) {
    case OPERATION_EMBED: return plan_embed(m, o);
    case OPERATION_ADD: return read_buffer(m, o->update, read_buffer(m, o->input, 0));
    case OPERATION_NORMALIZE:
      width = read_buffer(m, o->input, 0);
      check_row(m, "weight", &o->weight, width);
      check_row(m, "bias", &o->bias, width);
      if (o->update) read_buffer(m, o->update, width);
      return width;
    case OPERATION_NORMALIZE_PROJECTIONS: return plan_projections(m, o);
    case OPERATION_MULTIPLY:
      read_buffer(m, o->input, o->linear->in_size);
      return o->linear->out_size / (1 + o->is_gated);
    case OPERATION_ACTIVATE: return plan_activation(m, o);
    case OPERATION_ROUTE_TOP_K: return plan_routes(m, o, found);
    case OPERATION_MULTIPLY_ROUTED:
    case OPERATION_COMBINE_EXPERTS: return plan_slots(m, o, found);
    case OPERATION_GATE:
      width = read_buffer(m, o->input, 0);
      read_buffer(m, o->gate, m->widths[o->gate] == 1 ? 1 : width);
      return width;
    case OPERATION_QK_NORM_ROPE_STORE: return plan_heads(m, o);
    case OPERATION_ATTEND_PAGED:
      check_row(m, "sinks", &o->sinks, o->num_heads);
      return read_buffer(m, o->input, o->num_heads * o->head_dim);
    case OPERATION_CONVOLVE: return plan_convolution(m, o);
    case OPERATION_DELTA_RULE: return plan_delta_rule(m, o);
    case OPERATION_NORMALIZE_GATED: return plan_gated_norm(m, o);
    case OPERATION_LM_HEAD: return read_buffer(m, o->input, o->linear->in_size);
    case OPERATION_ALL_REDUCE: return plan_sums(m, o);
    default: return read_buffer(m, o->input, 0);
  }
}

int64_t plan_decoder(decoder* m) {
  routed found[MAX_BUFFERS] = {{0}};
  int64_t largest[MAX_BUFFERS] = {0};
  for (int64_t op = 0; op < m->num_operations && !m->misfit[0]; op++) {
    operation* o = &m->operations[op];
    o->width = plan_operation(m, o, found);
    o->in_width = m->widths[o->input];
    o->gate_width = m->widths[o->gate];
    if (!o->output) continue;
    m->widths[o->output] = o->width;
    if (o->width > largest[o->output]) largest[o->output] = o->width;
  }
  memcpy(m->widths, largest, sizeof(int64_t) * (size_t)m->num_buffers);
  return DONE;
}
