/* An int8 network of the shape of MLPerf Tiny's ResNet-8, to compare instructions with. Weights are random. */
#ifndef INT8_H
#define INT8_H
#include <stdint.h>

#define INT8_CHANNELS 3
#define INT8_HEIGHT 32
#define INT8_WIDTH 32
#define INT8_SCORES 10
#define INT8_ARENA_BYTES (3 * 16384 + 2 * 2 * 576)

int int8_run(const uint8_t *pixels, float *scores, void *arena);
#endif
