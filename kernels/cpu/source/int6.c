#define CODING CODES_OF_6
#define RUNS INT6_RUNS
#include "integer_runs.h"
