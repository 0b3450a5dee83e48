/* XXH3 with seed 0, by which bytes from a pack or from another node are compared. */
#ifndef MONARCH_XXH3_H
#define MONARCH_XXH3_H

#include <stddef.h>
#include <stdint.h>

uint64_t xxh3(const uint8_t *data, size_t size);
/* The upper 64 bits of XXH3 with 128 bits. */
uint64_t xxh3_high(const uint8_t *data, size_t size);

#endif
