// The sizes of the types of abi.h. A caller that has parsed abi.h compares them with its own.
#include "abi.h"

#include <string.h>

int64_t size_of(const char* name) {
  static const struct {
    const char* name;
    size_t size;
  } TYPES[] = {
      {"element_type", sizeof(element_type)},
      {"tensor", sizeof(tensor)},
      {"block_pattern", sizeof(block_pattern)},
      {"attention_step", sizeof(attention_step)},
      {"linear_layer", sizeof(linear_layer)},
      {"held_weight", sizeof(held_weight)},
      {"scoring_function", sizeof(scoring_function)},
      {"expert_routing", sizeof(expert_routing)},
      {"operation_kind", sizeof(operation_kind)},
      {"activation_function", sizeof(activation_function)},
      {"operation", sizeof(operation)},
      {"decoder", sizeof(decoder)},
      {"state_rows", sizeof(state_rows)},
      {"step_part", sizeof(step_part)},
      {"decoder_step", sizeof(decoder_step)},
      {"sampling_step", sizeof(sampling_step)},
      {"table_batch", sizeof(table_batch)},
  };
  for (size_t i = 0; i < sizeof TYPES / sizeof TYPES[0]; i++)
    if (!strcmp(TYPES[i].name, name)) return (int64_t)TYPES[i].size;
  return 0;
}
