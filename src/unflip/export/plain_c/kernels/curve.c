/* Activations, computed from one exponential (the polynomial of Cephes' expf): e^x for x clamped to -87 .. 88. */
static float u_exp(float x) {
  float shifted, n, r, p;
  x = x > -87.f ? x : -87.f;
  x = x < 88.f ? x : 88.f;
  shifted = x * 1.44269504f + 12582912.f;
  n = shifted - 12582912.f;
  r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return (p * r * r + r + 1.f) * u_float_of((uint32_t)((int32_t)n + 127) << 23);
}

/* x * factor, or -0 for x below `least`, where PyTorch's factor is 0. */
U_INLINE float u_scaled(float x, float factor, float least) { return x * (x < least ? 0.f : factor); }

U_INLINE float u_abs(float x) { return x < 0 ? -x : x; }

U_INLINE float u_sigmoid(float x) { return 1.f / (1.f + u_exp(-x)); }

U_INLINE float u_tanh(float x) {
  const float s = x * x;
  const float near = x + x * s * (-1.f / 3 + s * (2.f / 15 + s * (-17.f / 315 + s * (62.f / 2835))));
  const float far = 1.f - 2.f / (u_exp(2.f * u_abs(x)) + 1.f);
  return u_abs(x) < 0.25f ? near : x < 0 ? -far : far;
}

U_INLINE float u_silu(float x) { return u_scaled(x, u_sigmoid(x), -88.722f); }

U_INLINE float u_gelu(float x) {
  const float z = u_abs(x) * 0.70710678f, t = 1.f / (1.f + 0.3275911f * z);
  float p = 1.061405429f, tail;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  tail = 0.5f * p * t * u_exp(-z * z);
  return u_scaled(x, x < 0 ? tail : 1.f - tail, -5.52f);
}

U_INLINE float u_gelu_tanh(float x) {
  return u_scaled(x, u_sigmoid(1.59576912f * (x + 0.044715f * x * x * x)), -5.06137f);
}

U_INLINE float u_elu(float x) {
  const float below = u_tanh(0.5f * x) * (u_exp(x) + 1.f);
  return x > 0 ? x : below;
}

U_INLINE float u_mish(float x) {
  const float e = u_exp(x < 20.f ? x : 20.f), n = e * (e + 2.f);
  return u_scaled(x, n / (n + 2.f), -102.87f);
}
