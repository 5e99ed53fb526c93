/* Runs a network once and prints the bits of its scores. NETWORK and BIG come from the command line; pixels.h is one image,
 * as an initializer. */
#include "board.h"

#define QUOTE_(x) #x
#define QUOTE(x) QUOTE_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#include QUOTE(NETWORK.h)

static const uint8_t pixels[] = {
#include "pixels.h"
};
static uint64_t arena[JOIN(BIG, _ARENA_BYTES) / 8 + 1];
static float scores[JOIN(BIG, _SCORES)];

#ifdef LAYERS
static uint32_t done[LAYERS];
void after_layer(int layer) { done[layer] = board_ticks(); }
#endif

int main(void) {
  uint32_t ticks, bits;
  int i, code;
  board_paint_stack();
  board_start_timer();
  code = JOIN(NETWORK, _run)(pixels, scores, arena);
  ticks = board_ticks();
  board_print("stack ");
  board_print_number(board_stack_bytes());
  board_print("\nticks ");
  board_print_number(ticks);
#ifdef LAYERS
  for (i = 0; i < LAYERS; i++) {
    board_print("\nlayer ");
    board_print_number(done[i]);
  }
#endif
  for (i = 0; i < (int)JOIN(BIG, _SCORES); i++) {
    union {
      float number;
      uint32_t bits;
    } score;
    score.number = scores[i];
    bits = score.bits;
    board_print("\nscore ");
    board_print_number(bits);
  }
  board_print("\n");
  return code;
}
