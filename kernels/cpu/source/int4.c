#define CODING CODES_OF_4
#define RUNS INT4_RUNS
#include "integer_runs.h"
