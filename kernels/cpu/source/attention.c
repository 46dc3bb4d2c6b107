// Attention over caches of the two larger sizes. Queries of float32 may have a cache of half the size.
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
