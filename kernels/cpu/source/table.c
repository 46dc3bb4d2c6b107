#define CODING CODES_OF_TABLE
#define RUNS TABLE_RUNS
#include "integer_runs.h"
