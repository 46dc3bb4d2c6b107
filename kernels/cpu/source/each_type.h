// Includes the file EACH once for each type in TYPES, with ELEMENT defined as that type. Undefines all three macros.
#define OF_FLOAT 1
#define OF_BFLOAT16 2
#define OF_FLOAT16 4
#define OF_FLOAT8 8
#define OF_INT8 16
// The types that computations use, and the further types of weights and caches.
#define COMPUTED (OF_FLOAT | OF_BFLOAT16)
#define FLOATS (COMPUTED | OF_FLOAT16)
#define EIGHT_BITS (OF_FLOAT8 | OF_INT8)

#if TYPES & OF_FLOAT
#define ELEMENT float
#include EACH
#undef ELEMENT
#endif

#if TYPES & OF_BFLOAT16
#define ELEMENT bfloat16
#include EACH
#undef ELEMENT
#endif

#if TYPES & OF_FLOAT16
#define ELEMENT float16
#include EACH
#undef ELEMENT
#endif

#if TYPES & OF_FLOAT8
#define ELEMENT float8
#include EACH
#undef ELEMENT
#endif

#if TYPES & OF_INT8
#define ELEMENT int8
#include EACH
#undef ELEMENT
#endif

#undef TYPES
#undef EACH
