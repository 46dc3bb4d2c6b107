// What all units of translation have in common. Each *.c file is one: compilers work on several side by side.
#pragma once

#include "abi.h"
#include "vector.h"

// Of what another unit defines: no name of the library's own.
#define SHARED __attribute__((visibility("hidden")))

#define JOIN_(name, type) name##_##type
#define JOIN(name, type) JOIN_(name, type)
#define NAME(name) JOIN(name, ELEMENT)
// The same of what a cache holds, and of a function over both types.
#define HELD(name) JOIN(name, CACHE)
#define PAGED(name) JOIN(NAME(name), CACHE)

enum {
  LINE = 64,  // bytes
  TILE_ROWS = 64,        // (query, head) pairs that attend together: keys are loaded once for all of them
  TILE_POSITIONS = 64,   // scored at once
  SPAN_POSITIONS = 512,  // summed up by themselves: whole tiles
  DIRECT_ROWS = 8,       // up to so many rows, packing the keys costs more than it saves
  LONG_CONTEXT = 2048,   // positions from which on a row is split rather than its KV heads
  TASKS_PER_THREAD = 4,  // wanted before contexts are split no further
};

// Elements below which a second thread costs more than it saves.
#define MIN_PARALLEL_ELEMENTS 32768
