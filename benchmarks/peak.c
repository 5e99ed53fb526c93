/* How many float32 multiply-adds one core does a second when nothing else limits it: 24 chains of fused multiply-adds in
   registers. Compiled by benchmarks/inference.py with -O2 -march=native. */
#include <time.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX512F__)
#define CHAINS 24
#else
#define CHAINS 12 /* of 16 registers */
#endif

typedef float vector __attribute__((vector_size(LANES * 4)));

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* The compiler keeps acc[] in registers only because every index is known once the inner loop is unrolled. */
#pragma GCC push_options
#pragma GCC optimize("unroll-loops")
static void work(vector* sums, long rounds) {
  vector acc[CHAINS], a, b;
  for (int k = 0; k < LANES; k++) a[k] = 0.9f, b[k] = 0.1f;
  for (int c = 0; c < CHAINS; c++) acc[c] = a * (float)c;
  for (long i = 0; i < rounds; i++) {
#pragma GCC unroll 24
    for (int c = 0; c < CHAINS; c++) acc[c] = acc[c] * a + b;
  }
  for (int c = 0; c < CHAINS; c++) *sums += acc[c];
}
#pragma GCC pop_options

/* Billions of multiply-adds a second, the best of several short samples. */
double fma_peak(double seconds, float* sink) {
  double end = now() + seconds, best = 0;
  vector sums = {0};
  const long rounds = 200000;
  do {
    double start = now();
    work(&sums, rounds);
    double rate = (double)rounds * CHAINS * LANES / (now() - start) * 1e-9;
    if (rate > best) best = rate;
  } while (now() < end);
  *sink = sums[0];
  return best;
}
