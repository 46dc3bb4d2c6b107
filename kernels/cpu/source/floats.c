// Matmuls with weights of floats.
#include "common.h"
#include "tasks.h"
#include "rows.h"
#include "activations.h"

#define TYPES FLOATS
#define EACH "linear_runs.h"
#include "each_type.h"

#include "bfloat16.h"
#include "bfloat16_runs.h"
#include "float8.h"
#include "float8_runs.h"
