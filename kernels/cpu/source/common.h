// Definitions that all *.c files share. Each *.c file is compiled separately, so several compilers can run in parallel.
#pragma once

#include "abi.h"
#include "vector.h"

// Marks a symbol that several *.c files use but the library does not export.
#define SHARED __attribute__((visibility("hidden")))

#define JOIN_(name, type) name##_##type
#define JOIN(name, type) JOIN_(name, type)
#define NAME(name) JOIN(name, ELEMENT)
// Names by the element type of a cache, and names by both element types.
#define HELD(name) JOIN(name, CACHE)
#define PAGED(name) JOIN(NAME(name), CACHE)

enum {
  LINE = 64,  // bytes
  TILE_ROWS = 64,        // (query, head) pairs computed together: see `tile_rows`
  SPAN_POSITIONS = 512,  // positions accumulated separately: a multiple of TILE_POSITIONS
  DIRECT_ROWS = 8,       // up to this number of rows, packing the keys costs more than it saves
  // from this number of positions on, the positions of a row are divided, rather than its KV heads
  LONG_CONTEXT = 2048,
  TASKS_PER_THREAD = 4,  // target; with this many tasks, contexts are not split further
};

// Below this number of elements, a second thread costs more than it saves.
#define MIN_PARALLEL_ELEMENTS 32768
