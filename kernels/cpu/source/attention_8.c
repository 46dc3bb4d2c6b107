// Attention over caches of 8 bits, queries of both types.
#include "softmax.h"

// Whether queries are scored in pairs of bfloat16.
#define IN_PAIRS 0

#define ELEMENT float8
#define ELEMENT_NAME float8
#include "pages.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT int8
#define ELEMENT_NAME int8
#include "pages.h"
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT float
#define ELEMENT_NAME float
#define CACHE float8
#define CACHE_NAME float8
#include "attention.h"
#define IS_SCALED 1
#define CACHE int8
#define CACHE_NAME int8
#include "attention.h"
#undef IS_SCALED
#undef ELEMENT
#undef ELEMENT_NAME

#define ELEMENT bfloat16
#define ELEMENT_NAME bfloat16
#define CACHE float8
#define CACHE_NAME float8
#include "attention.h"
#define IS_SCALED 1
#define CACHE int8
#define CACHE_NAME int8
#include "attention.h"
#undef IS_SCALED
#undef ELEMENT
#undef ELEMENT_NAME
