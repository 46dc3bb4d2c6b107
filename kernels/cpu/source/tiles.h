// Matmuls of MIN_TILE_ROWS and more rows of int8 activations in the tile registers of AMX. The sums over a group are
// integers and exact, so that the results have the bits of the vectors' results.
//
// A group of rows is a tile A, [rows, inputs of a group], and the codes of LANES outputs are a tile B, [a fourth of these
// inputs, LANES, 4], the layout of codes of 8 bits. Other codes are first widened.

// Numbers of the tile registers.
#define ROWS "0"
#define FIRST_CODES "1"
#define SECOND_CODES "2"
#define FIRST_DOTS "3"
#define SECOND_DOTS "4"

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t num_rows[16];
} tile_shapes;

// Sets the shapes of the tile registers, for groups of up to `num_rows` rows.
INLINE void shape_tiles(const linear_layer* layer, int64_t num_rows) {
  const uint8_t rows = (uint8_t)num_rows, steps = (uint8_t)(layer->group_size / 4);
  const tile_shapes shapes = {.palette = 1,
                              .row_bytes = {4 * steps, 4 * LANES, 4 * LANES, 4 * LANES, 4 * LANES},
                              .num_rows = {rows, steps, steps, rows, rows}};
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}

INLINE void release_tiles(void) { __asm__ volatile("tilerelease"); }

#define LOAD_TILE(tile, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, to, stride) \
  __asm__ volatile("tilestored %%tmm" tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define MULTIPLY_TILES(sums, rows, codes) \
  __asm__ volatile("tilezero %%tmm" sums "\n\ttdpbssd %%tmm" codes ", %%tmm" rows ", %%tmm" sums : :)

// The integer sums of a group of inputs, by vector of outputs and row.
typedef int32_t group_dots[2][GROUP_ROWS][LANES] __attribute__((aligned(64)));

// Loads the codes of one step for a vector of outputs, as signed numbers.
INLINE words load_signed_codes(const int coding, const code_tile* t, const char* of_vector, int step) {
  const words codes = load_codes(coding, of_vector, step, t->table);
  if (coding == CODES_OF_TABLE) return codes;
  const int offset = coding == CODES_OF_6 ? 32 : 8;
  return (words)_mm512_sub_epi8((__m512i)codes, _mm512_set1_epi8((char)(t->mask & offset)));
}

// A unit of a panel, and its codes in 8 bits, by vector of outputs and step.
typedef struct {
  const char *unit, *factors;
  words widened[2 * STEPS];
} held_unit;

// The stages of a run handle different units at a time: codes are widened, then multiplied, then their sums are scaled.
// A stage would otherwise wait until the stores of the stage before have reached the cache.
enum { MULTIPLIED_AHEAD = 2, WIDENED_AHEAD = 4 };

// Finds a unit of a panel, and widens its codes, if they have fewer than 8 bits.
INLINE void hold_unit(const int coding, const code_tile* t, const char* weights, int64_t index, held_unit* held) {
  const int64_t bytes = unit_bytes(t->layer, bits_of(coding)), of_factors = factor_bytes(t->layer);
  held->factors = weights + index / BLOCK_UNITS * (BLOCK_UNITS * bytes + of_factors);
  held->unit = held->factors + of_factors + index % BLOCK_UNITS * bytes;
  if (coding == CODES_OF_8) return;
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++)
#pragma GCC unroll 8
    for (int step = 0; step < STEPS; step++)
      held->widened[v * STEPS + step] = load_signed_codes(coding, t, held->unit + v * unit_code_bytes(bits_of(coding)) / 2, step);
}

// Sets `dots` to the sums of the `nth` group of a unit. codes: of the unit, in 8 bits.
INLINE void multiply_group_in_tiles(const int is_whole, const int nth, const char* codes, const uint32_t* x,
                                    group_dots dots) {
  const int64_t size = sizeof(words), num_steps = is_whole ? STEPS : STEPS / 2;
  const char* of_group = codes + nth * num_steps * size;
  LOAD_TILE(ROWS, x + nth * num_steps, UNIT_INPUTS);
  LOAD_TILE(FIRST_CODES, of_group, size);
  MULTIPLY_TILES(FIRST_DOTS, ROWS, FIRST_CODES);
  LOAD_TILE(SECOND_CODES, of_group + STEPS * size, size);
  MULTIPLY_TILES(SECOND_DOTS, ROWS, SECOND_CODES);
  STORE_TILE(FIRST_DOTS, dots[0], size);
  STORE_TILE(SECOND_DOTS, dots[1], size);
}

// dots -= the sums of the activations of a group times the zero points.
INLINE void take_zeros_off_tiles(const int is_whole, const int nth, const int R, const int8* zeros, const uint32_t* x,
                                 group_dots dots) {
  for (int v = 0; v < 2; v++) {
    const ints zero = load_zeros(zeros + v * LANES);
    for (int r = 0; r < R; r++) {
      const ints sum = (ints)load_words(dots[v][r]) + group_sum(is_whole, nth, R, x + r) * zero;
      memcpy(dots[v][r], &sum, sizeof sum);
    }
  }
}

// sums: [R, 2] += the results of the `nth` group of a unit, like `scale_dots`. The sums fit into the registers if the
// compiler loads everything else where it is used.
INLINE void scale_group(const int is_whole, const int nth, const int R, const code_tile* t, const char* scales,
                        const uint32_t* inputs, group_dots dots, floats (*sums)[8]) {
  const linear_layer* layer = t->layer;
  const int64_t num = is_whole ? PANEL : 2 * PANEL, size = scale_bytes(layer);
  const char* zeros = scales + num * size * (1 + layer->has_minima) + nth * PANEL;
  if (layer->has_zeros) take_zeros_off_tiles(is_whole, nth, R, (const int8*)zeros, inputs, dots);
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    const floats scale = load_scales(layer, scales + nth * PANEL * size, v * LANES, (const float16*)t->factors + v * LANES);
    const uint32_t* x = branch_of(inputs);
    const char* of_vector = branch_of(dots[v]);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const ints sum = (ints)load_words(of_vector + r * (int64_t)sizeof(words));
      sums[r][v] = multiply_add(__builtin_convertvector(sum, floats) * float_of(x + INT8_SCALE * R + r), scale, sums[r][v]);
    }
  }
  if (layer->has_minima) take_minima_off(is_whole, nth, R, 2, t, scales + (num + nth * PANEL) * size, inputs, sums);
}

INLINE void multiply_units_in_tiles(const int coding, const int is_whole, const int R, const linear_layer* layer,
                                    const char* weights, const uint32_t* x, int64_t num, const char* ahead,
                                    int64_t stride, float* totals) {
  code_tile t = tile_of(coding, layer, 0, 0);
  held_unit units[WIDENED_AHEAD];
  group_dots dots[MULTIPLIED_AHEAD][2];
  floats sums[GROUP_ROWS][8];
  clear_sums(R, 2, sums);
  for (int64_t i = -WIDENED_AHEAD; i < num; i++) {
    group_dots* of_unit = dots[(i + WIDENED_AHEAD) % MULTIPLIED_AHEAD];
    if (i >= 0) {
      for (int64_t line = 0; line < stride; line += LINE) __builtin_prefetch(ahead + i * stride + line, 0, 2);
      const char* scales = units[i % WIDENED_AHEAD].unit + unit_code_bytes(bits_of(coding));
      t.factors = units[i % WIDENED_AHEAD].factors;
      scale_group(is_whole, 0, R, &t, scales, x + i * INT8_WORDS * R, of_unit[0], sums);
      if (!is_whole) scale_group(0, 1, R, &t, scales, x + i * INT8_WORDS * R, of_unit[1], sums);
    }
    const int64_t next = i + MULTIPLIED_AHEAD;
    if (next >= 0 && next < num) {
      const held_unit* held = &units[next % WIDENED_AHEAD];
      const char* codes = coding == CODES_OF_8 ? held->unit : (const char*)held->widened;
      multiply_group_in_tiles(is_whole, 0, codes, x + next * INT8_WORDS * R, of_unit[0]);
      if (!is_whole) multiply_group_in_tiles(0, 1, codes, x + next * INT8_WORDS * R, of_unit[1]);
    }
    const int64_t later = i + WIDENED_AHEAD;
    if (later < num) hold_unit(coding, &t, weights, later, &units[later % WIDENED_AHEAD]);
  }
  add_sums(R, 2, sums, totals);
}

// A `run_function` of R rows and one panel.
INLINE void multiply_in_tiles(const int coding, const int R, const linear_layer* layer, const char* weights,
                              const uint32_t* x, int64_t num, const char* ahead, int64_t stride, float* totals) {
  if (layer->group_size == UNIT_INPUTS)
    multiply_units_in_tiles(coding, 1, R, layer, weights, x, num, ahead, stride, totals);
  else
    multiply_units_in_tiles(coding, 0, R, layer, weights, x, num, ahead, stride, totals);
}
