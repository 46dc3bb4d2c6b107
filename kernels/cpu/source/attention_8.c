// Attention over caches of 8-bit elements, for queries of both element types.
#include "softmax.h"

#define TYPES EIGHT_BITS
#define EACH "pages.h"
#include "each_type.h"

#define CACHE float8
#define TYPES COMPUTED
#define EACH "attention.h"
#include "each_type.h"
#undef CACHE

#define CACHE int8
#define TYPES COMPUTED
#define EACH "attention.h"
#include "each_type.h"
#undef CACHE
