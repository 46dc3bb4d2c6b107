// Attention over caches of the two larger sizes. Queries of float32 may have a cache of half the size.
#include "softmax.h"

// Whether queries are scored in pairs of bfloat16.
#define IN_PAIRS 0

#define ELEMENT float
#define ELEMENT_NAME float
#include "pages.h"
#define CACHE float
#define CACHE_NAME float
#include "attention.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT bfloat16
#define ELEMENT_NAME bfloat16
#define IS_BFLOAT16 1
#include "pages.h"
#define CACHE bfloat16
#define CACHE_NAME bfloat16
#undef IN_PAIRS
#define IN_PAIRS HAS_PAIRS
#include "attention.h"
#undef IN_PAIRS
#define IN_PAIRS 0
#undef IS_BFLOAT16
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT float16
#define ELEMENT_NAME float16
#include "pages.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT float
#define ELEMENT_NAME float
#define CACHE bfloat16
#define CACHE_NAME bfloat16
#include "attention.h"
#define CACHE float16
#define CACHE_NAME float16
#include "attention.h"
#undef ELEMENT
#undef ELEMENT_NAME
