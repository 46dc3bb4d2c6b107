// Products with weights of floats.
#include "common.h"
#include "tasks.h"
#include "rows.h"
#include "activations.h"

#define ELEMENT float
#define ELEMENT_NAME float
#include "linear.h"
#include "linear_runs.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT bfloat16
#define ELEMENT_NAME bfloat16
#define IS_BFLOAT16 1
#include "linear.h"
#include "linear_runs.h"
#undef IS_BFLOAT16
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT float16
#define ELEMENT_NAME float16
#include "linear.h"
#include "linear_runs.h"
#undef ELEMENT
#undef ELEMENT_NAME

#include "bfloat16.h"
#include "bfloat16_runs.h"
#include "float8.h"
#include "float8_runs.h"
