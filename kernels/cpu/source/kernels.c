// Every kernel for every element type that it is needed for, but the products of panels and attention, which have units
// of their own. What they compute is specified by kernels/reference.py.
#include "common.h"
#include "tasks.h"
#include "rows.h"
#include "activations.h"
#include "work.h"

#define ELEMENT float
#define ELEMENT_NAME float
#include "fused.h"
#include "linear.h"
#include "linear_panels.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT bfloat16
#define ELEMENT_NAME bfloat16
#define IS_BFLOAT16 1
#include "fused.h"
#include "linear.h"
#include "linear_panels.h"
#undef IS_BFLOAT16
#undef ELEMENT
#undef ELEMENT_NAME

// What weights may hold, and nothing is computed in.
#define ELEMENT float16
#define ELEMENT_NAME float16
#include "linear.h"
#include "linear_panels.h"
#undef ELEMENT
#undef ELEMENT_NAME

#include "bfloat16.h"

#include "integers.h"
#include "integer_panels.h"

#include "float8.h"
#include "float8_panels.h"

#include "product.h"
#include "experts.h"
#include "quantize.h"

#include "decoder.h"

#include "sampler.h"

#include "batch.h"

const char* variant(void) { return VARIANT; }
