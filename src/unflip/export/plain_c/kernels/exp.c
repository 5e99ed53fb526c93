/* Exponential and logarithm in double precision, in the runtime's order of operations (native/src/engine/exp_log.h). */
#define U_LN2_HIGH 0x1.62e42feep-1
#define U_LN2_LOW 0x1.a39ef35793c76p-33

/* 2^n, -1022 <= n <= 1023. */
U_INLINE double u_power_of_two(int n) {
  const uint64_t bits = (uint64_t)(n + 1023) << 52;
  double power;
  u_copy(&power, &bits, sizeof power);
  return power;
}

/* e^x for x <= 0; below e^-200 it is 0. NaN gives NaN. */
U_UNUSED static double u_exp_below_zero(double x) {
  double r, sum = 1;
  int n, k;
  if (x < -200) return 0;
  if (!(x <= 0)) return x;
  n = (int)(x * 1.4426950408889634 - 0.5);
  r = (x - (double)n * U_LN2_HIGH) - (double)n * U_LN2_LOW;
  for (k = 14; k > 0; k--) sum = 1 + r * sum / k;
  return sum * u_power_of_two(n);
}

/* ln(x) for a finite x >= 1. */
U_UNUSED static double u_log_above_one(double x) {
  double m, s, square, sum = 0;
  uint64_t bits;
  int n, k;
  if (!(x >= 1) || x > 1e300) return x;
  u_copy(&bits, &x, sizeof bits);
  n = (int)(bits >> 52) - 1023;
  m = x * u_power_of_two(-n);
  if (m > 1.4142135623730951) m *= 0.5, n++;
  s = (m - 1) / (m + 1);
  square = s * s;
  for (k = 25; k > 0; k -= 2) sum = 1.0 / k + square * sum;
  return (double)n * U_LN2_HIGH + (2 * s * sum + (double)n * U_LN2_LOW);
}

/* The largest of `count` numbers, `step` apart. */
U_UNUSED static float u_largest(const float *from, int count, int step) {
  float largest = *from;
  int i;
  for (i = 1; i < count; i++)
    if (largest < from[i * step]) largest = from[i * step];
  return largest;
}
