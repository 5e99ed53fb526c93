/* Start of a Cortex-M: vectors, memory, FPU, then main. Output and exit use semihosting. */
#include "board.h"

extern uint32_t data_start, data_end, data_from, bss_start, bss_end, stack_low, stack_top;
int main(void);
void reset(void);

static void stop(void) {
  board_print("fault\n");
  board_exit(1);
}

__attribute__((section(".vectors"), used)) static const void *const vectors[16] = {
    &stack_top, (const void *)reset, (const void *)stop, (const void *)stop, (const void *)stop, (const void *)stop,
    (const void *)stop, 0, 0, 0, 0, (const void *)stop, (const void *)stop, 0, (const void *)stop, (const void *)stop};

void reset(void) {
  uint32_t *from = &data_from, *to = &data_start;
  *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* CPACR: the FPU, and Helium, if there are any */
  __asm__ volatile("dsb\n isb" ::: "memory");
  while (to < &data_end) *to++ = *from++;
  for (to = &bss_start; to < &bss_end; to++) *to = 0;
  board_exit(main());
}

static int call_host(int operation, const void *argument) {
  register int r0 __asm__("r0") = operation;
  register const void *r1 __asm__("r1") = argument;
  __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
  return r0;
}

void board_print(const char *text) { call_host(0x04, text); }

void board_print_number(uint32_t number) {
  char digits[11], *at = digits + 10;
  *at = 0;
  do *--at = (char)('0' + number % 10);
  while (number /= 10);
  board_print(at);
}

void board_exit(int code) {
  uint32_t block[2];
  block[0] = 0x20026; /* the application ended */
  block[1] = (uint32_t)code;
  call_host(0x20, block);
  for (;;) {
  }
}

#define SYSTICK ((volatile uint32_t *)0xE000E010)

void board_start_timer(void) {
  SYSTICK[1] = 0xFFFFFF;
  SYSTICK[2] = 0;
  SYSTICK[0] = 5;
}

uint32_t board_ticks(void) { return 0xFFFFFF - SYSTICK[2]; }

#define PAINT 0x5EED5EEDu

void board_paint_stack(void) {
  uint32_t here, *p;
  for (p = &stack_low; p < &here - 16; p++) *(volatile uint32_t *)p = PAINT;
}

uint32_t board_stack_bytes(void) {
  const uint32_t *p = &stack_low;
  while (p < &stack_top && *p == PAINT) p++;
  return (uint32_t)((const uint8_t *)&stack_top - (const uint8_t *)p);
}

void *memcpy(void *to, const void *from, size_t count) {
  uint8_t *t = to;
  const uint8_t *f = from;
  while (count >= 4 && !(((uintptr_t)t | (uintptr_t)f) & 3)) {
    *(uint32_t *)(void *)t = *(const uint32_t *)(const void *)f;
    t += 4, f += 4, count -= 4;
  }
  while (count--) *t++ = *f++;
  return to;
}

void *memset(void *to, int byte, size_t count) { /* exported networks do not need it; other code may */
  uint8_t *t = to;
  while (count--) *t++ = (uint8_t)byte;
  return to;
}
