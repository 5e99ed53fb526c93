/* An application that uses the module: classifies one image and prints the class. */
#include <zephyr/kernel.h>
#include <zephyr/sys/printk.h>

#include "network.h"

static uint8_t pixels[NETWORK_HEIGHT * NETWORK_WIDTH * NETWORK_CHANNELS];
static uint64_t arena[(NETWORK_ARENA_BYTES + 7) / 8];
static float scores[NETWORK_SCORES];

int main(void) {
  const int64_t start = k_uptime_get();
  int best = 0, i;
  if (network_run(pixels, scores, arena)) {
    printk("a pointer is null or the arena is not aligned\n");
    return 1;
  }
  for (i = 1; i < NETWORK_SCORES; i++)
    if (scores[i] > scores[best]) best = i;
  printk("class %d, ms %lld\n", best, (long long)(k_uptime_get() - start));
  return 0;
}
