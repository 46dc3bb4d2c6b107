// All kernels for all element types that they support, except the matmul loops and attention, which have *.c files of
// their own. kernels/reference.py specifies the results.
#include "common.h"
#include "tasks.h"
#include "rows.h"
#include "activations.h"
#include "work.h"

#define TYPES COMPUTED
#define EACH "fused.h"
#include "each_type.h"

#define TYPES FLOATS
#define EACH "linear_panels.h"
#include "each_type.h"

#include "bfloat16.h"

#include "integers.h"
#include "integer_panels.h"

#include "float8.h"
#include "float8_panels.h"

#include "product.h"
#include "experts.h"
#include "quantize.h"

#include "plan.h"
#include "states.h"
#include "decoder.h"

#include "sampler.h"

#include "batch.h"

#include "typed.h"

const char* variant(void) { return VARIANT; }
