/* XXH3 with 64 bits and seed 0, by which the bytes of a pack are compared with its index. */
#ifndef MONARCH_XXH3_H
#define MONARCH_XXH3_H

#include <stddef.h>
#include <stdint.h>

uint64_t xxh3(const uint8_t *data, size_t size);

#endif
