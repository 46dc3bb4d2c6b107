// Attention over caches of 16-bit and 32-bit elements. float32 queries may have a cache of 16-bit elements.
#include "softmax.h"

#define TYPES FLOATS
#define EACH "pages.h"
#include "each_type.h"

#define CACHE float
#define TYPES OF_FLOAT
#define EACH "attention.h"
#include "each_type.h"
#undef CACHE

#define CACHE bfloat16
#define TYPES COMPUTED
#define EACH "attention.h"
#include "each_type.h"
#undef CACHE

#define CACHE float16
#define TYPES OF_FLOAT
#define EACH "attention.h"
#include "each_type.h"
#undef CACHE
