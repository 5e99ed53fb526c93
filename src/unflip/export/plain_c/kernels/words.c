/* 32 bits, or 128 with Helium (Cortex-M55, M85). */
#if defined(__ARM_FEATURE_MVE)
typedef uint32x4_t u_word;
#define U_LANES 4
U_INLINE u_word u_load(const uint8_t *from) { return vreinterpretq_u32_u8(vldrbq_u8(from)); }
U_INLINE u_word u_none(void) { return vdupq_n_u32(0); }
U_INLINE u_word u_xor(u_word a, u_word b) { return veorq_u32(a, b); }
U_INLINE u_word u_and(u_word a, u_word b) { return vandq_u32(a, b); }
U_INLINE u_word u_or(u_word a, u_word b) { return vorrq_u32(a, b); }
#else
typedef uint32_t u_word;
#define U_LANES 1
U_INLINE u_word u_load(const uint8_t *from) {
  u_word w;
  u_copy(&w, from, sizeof w);
  return w;
}
U_INLINE u_word u_none(void) { return 0; }
U_INLINE u_word u_xor(u_word a, u_word b) { return a ^ b; }
U_INLINE u_word u_and(u_word a, u_word b) { return a & b; }
U_INLINE u_word u_or(u_word a, u_word b) { return a | b; }
#endif
#define U_BITS (32 * U_LANES)

/* Carry-save adder: a + b + c = *sum + 2 * carry, bit by bit. */
U_INLINE u_word u_carry(u_word *sum, u_word b, u_word c) {
  const u_word a = *sum, half = u_xor(a, b);
  *sum = u_xor(half, c);
  return u_or(u_and(a, b), u_and(half, c));
}

U_INLINE uint32_t u_word_at(const uint8_t *from) {
  uint32_t w;
  u_copy(&w, from, sizeof w);
  return w;
}

#if defined(__riscv_zbb) || defined(__POPCNT__) || defined(__aarch64__)
#define U_POPCOUNT 1 /* the CPU counts bits */
#endif

U_INLINE int u_ones(uint32_t x) {
#if defined(U_POPCOUNT)
  return __builtin_popcount(x);
#else
  x = x - (x >> 1 & 0x55555555u);
  x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0fu;
  return (int)(x * 0x01010101u >> 24);
#endif
}

/* The position of the lowest 1; x is not 0. */
U_INLINE int u_lowest(uint32_t x) {
#if defined(__riscv_zbb) || defined(__ARM_FEATURE_CLZ) || defined(__x86_64__) || defined(__aarch64__)
  return __builtin_ctz(x);
#else
  return u_ones((x & (0u - x)) - 1);
#endif
}

/* Coefficient * number, one summand of a sum. The number is the sum over planes of multiple * (2 A - P), plus
 * signs_times * (sum of the signs inside the image). A term of the window has multiples of P instead, plus signs_times *
 * (number of places inside the image). */
struct u_term {
  const float *scale; /* per filter */
  uint8_t base, first_plane, planes, of_window;
  int32_t signs_times;
};
