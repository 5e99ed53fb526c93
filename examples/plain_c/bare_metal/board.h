#ifndef BOARD_H
#define BOARD_H
#include <stddef.h>
#include <stdint.h>

void board_print(const char *text);
void board_print_number(uint32_t number);
void board_exit(int code);
void board_start_timer(void);
uint32_t board_ticks(void);       /* since then; 24 bits. In qemu with -icount shift=0 a tick is 40 instructions */
void board_paint_stack(void);
uint32_t board_stack_bytes(void); /* the most that was used since painting */
#endif
