#define CODING CODES_OF_8
#define RUNS INT8_RUNS
#include "integer_runs.h"
