/* XXH3 with 64 and with 128 bits, seed 0 and the default secret, after its specification
 * (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Numbers are little-endian. */
#include "_xxh3.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { STRIPE = 64, LANES = 8, SECRET = 192, BLOCK_STRIPES = (SECRET - STRIPE) / 8 };
enum { BLOCK = STRIPE * BLOCK_STRIPES };

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define PRIME32_1 0x9e3779b1u
#define PRIME32_2 0x85ebca77u
#define PRIME32_3 0xc2b2ae3du
#define PRIME64_1 0x9e3779b185ebca87u
#define PRIME64_2 0xc2b2ae3d27d4eb4fu
#define PRIME64_3 0x165667b19e3779f9u
#define PRIME64_4 0x85ebca77c2b2ae63u
#define PRIME64_5 0x27d4eb2f165667c5u
#define PRIME_MX1 0x165667919e3779f9u
#define PRIME_MX2 0x9fb21c651e98df25u

static uint32_t u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t u64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

/* The two halves of a product of 128 bits, XORed. */
static uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    return hash ^ hash >> 32;
}

static uint64_t avalanche_of_xxh64(uint64_t hash) {
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

/* An input of 1 to 3 bytes, and their number. */
static uint32_t combined_upto3(const uint8_t *data, size_t size) {
    return (uint32_t)data[0] << 16 | (uint32_t)data[size >> 1] << 24 | data[size - 1] |
           (uint32_t)size << 8;
}

static uint64_t mixed16(const uint8_t *data, const uint8_t *key) {
    return folded(u64(data) ^ u64(key), u64(data + 8) ^ u64(key + 8));
}

static uint64_t upto16(const uint8_t *data, size_t size) {
    uint64_t hash;
    if (size > 8) {
        uint64_t low = u64(data) ^ u64(secret + 24) ^ u64(secret + 32);
        uint64_t high = u64(data + size - 8) ^ u64(secret + 40) ^ u64(secret + 48);
        return avalanche(size + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (size >= 4) {
        hash = (uint64_t)u32(data) << 32 | u32(data + size - 4);
        hash ^= u64(secret + 8) ^ u64(secret + 16);
        hash = (hash ^ rotated(hash, 49) ^ rotated(hash, 24)) * PRIME_MX2;
        hash = (hash ^ ((hash >> 35) + size)) * PRIME_MX2;
        return hash ^ hash >> 28;
    }
    hash = u64(secret + 56) ^ u64(secret + 64);
    if (size)
        hash = combined_upto3(data, size) ^ (uint64_t)(u32(secret) ^ u32(secret + 4));
    return avalanche_of_xxh64(hash);
}

static uint64_t upto240(const uint8_t *data, size_t size) {
    uint64_t hash = size * PRIME64_1;
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;)
            hash += mixed16(data + 16 * i, secret + 32 * i) +
                    mixed16(data + size - 16 * (i + 1), secret + 32 * i + 16);
        return avalanche(hash);
    }
    for (size_t i = 0; i < 8; i++)
        hash += mixed16(data + 16 * i, secret + 16 * i);
    hash = avalanche(hash);
    for (size_t i = 8; i < size / 16; i++)
        hash += mixed16(data + 16 * i, secret + 16 * (i - 8) + 3);
    return avalanche(hash + mixed16(data + size - 16, secret + 136 - 17));
}

/* Adds stripes to the lanes, the first one with the first key of a block. */
#ifdef __SSE2__
static void accumulate(uint64_t *lanes, const uint8_t *data, size_t stripes, const uint8_t *key) {
    __m128i sums[LANES / 2];
    memcpy(sums, lanes, sizeof sums);
    for (; stripes; stripes--, data += STRIPE, key += 8)
#pragma GCC unroll 4
        for (int i = 0; i < LANES / 2; i++) {
            __m128i values = _mm_loadu_si128((const __m128i *)data + i),
                    keyed = _mm_xor_si128(values, _mm_loadu_si128((const __m128i *)key + i)),
                    products = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
            values = _mm_shuffle_epi32(values, _MM_SHUFFLE(1, 0, 3, 2));
            sums[i] = _mm_add_epi64(sums[i], _mm_add_epi64(values, products));
        }
    memcpy(lanes, sums, sizeof sums);
}
#else
static void accumulate(uint64_t *lanes, const uint8_t *data, size_t stripes, const uint8_t *key) {
    for (; stripes; stripes--, data += STRIPE, key += 8)
        for (int i = 0; i < LANES; i++) {
            uint64_t value = u64(data + 8 * i), keyed = value ^ u64(key + 8 * i);
            lanes[i ^ 1] += value;
            lanes[i] += (keyed & 0xffffffff) * (keyed >> 32);
        }
}
#endif

static void scramble(uint64_t *lanes) {
    for (int i = 0; i < LANES; i++)
        lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ u64(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
}

/* The lanes after all bytes of an input of more than 240 bytes. */
static void fill(uint64_t *lanes, const uint8_t *data, size_t size) {
    static const uint64_t begin[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                          PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(lanes, begin, sizeof begin);
    const uint8_t *last = data + size - STRIPE;
    size_t stripes = (size - 1) / STRIPE;
    for (; stripes >= BLOCK_STRIPES; stripes -= BLOCK_STRIPES, data += BLOCK) {
        accumulate(lanes, data, BLOCK_STRIPES, secret);
        scramble(lanes);
    }
    accumulate(lanes, data, stripes, secret);
    accumulate(lanes, last, 1, secret + SECRET - STRIPE - 7);
}

static uint64_t merged(const uint64_t *lanes, const uint8_t *key, uint64_t hash) {
    for (int i = 0; i < LANES; i += 2)
        hash += folded(lanes[i] ^ u64(key + 8 * i), lanes[i + 1] ^ u64(key + 8 * i + 8));
    return avalanche(hash);
}

uint64_t xxh3(const uint8_t *data, size_t size) {
    uint64_t lanes[LANES];
    if (size <= 16)
        return upto16(data, size);
    if (size <= 240)
        return upto240(data, size);
    fill(lanes, data, size);
    return merged(lanes, secret + 11, size * PRIME64_1);
}

/* -- the upper half of 128 bits ---------------------------------------------------------------- */

static uint64_t high_upto16(const uint8_t *data, size_t size) {
    if (size > 8) {
        uint64_t low = u64(data), high = u64(data + size - 8);
        unsigned __int128 product =
            (unsigned __int128)(low ^ high ^ u64(secret + 32) ^ u64(secret + 40)) * PRIME64_1;
        high ^= u64(secret + 48) ^ u64(secret + 56);
        low = (uint64_t)product + ((uint64_t)(size - 1) << 54);
        high = (uint64_t)(product >> 64) + high + (high & 0xffffffff) * (PRIME32_2 - 1);
        product = (unsigned __int128)(low ^ __builtin_bswap64(high)) * PRIME64_2;
        return avalanche((uint64_t)(product >> 64) + high * PRIME64_2);
    }
    if (size >= 4) {
        uint64_t keyed = u32(data) | (uint64_t)u32(data + size - 4) << 32;
        keyed ^= u64(secret + 16) ^ u64(secret + 24);
        unsigned __int128 product = (unsigned __int128)keyed * (PRIME64_1 + (size << 2));
        return avalanche((uint64_t)(product >> 64) + ((uint64_t)product << 1));
    }
    if (size == 0)
        return avalanche_of_xxh64(u64(secret + 80) ^ u64(secret + 88));
    uint32_t combined = __builtin_bswap32(combined_upto3(data, size));
    return avalanche_of_xxh64((uint64_t)(combined << 13 | combined >> 19) ^
                              (uint64_t)(u32(secret + 8) ^ u32(secret + 12)));
}

/* Adds two times 16 bytes to the two sums. */
static void mix32(uint64_t *sums, const uint8_t *first, const uint8_t *second, const uint8_t *key) {
    sums[0] = (sums[0] + mixed16(first, key)) ^ (u64(second) + u64(second + 8));
    sums[1] = (sums[1] + mixed16(second, key + 16)) ^ (u64(first) + u64(first + 8));
}

static uint64_t high_upto240(const uint8_t *data, size_t size) {
    uint64_t sums[2] = {size * PRIME64_1, 0};
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;)
            mix32(sums, data + 16 * i, data + size - 16 * (i + 1), secret + 32 * i);
    } else {
        for (size_t at = 0; at < 128; at += 32)
            mix32(sums, data + at, data + at + 16, secret + at);
        sums[0] = avalanche(sums[0]);
        sums[1] = avalanche(sums[1]);
        for (size_t at = 128; at + 32 <= size; at += 32)
            mix32(sums, data + at, data + at + 16, secret + at - 128 + 3);
        mix32(sums, data + size - 16, data + size - 32, secret + 136 - 17 - 16);
    }
    return 0 - avalanche(sums[0] * PRIME64_1 + sums[1] * PRIME64_4 + size * PRIME64_2);
}

uint64_t xxh3_high(const uint8_t *data, size_t size) {
    uint64_t lanes[LANES];
    if (size <= 16)
        return high_upto16(data, size);
    if (size <= 240)
        return high_upto240(data, size);
    fill(lanes, data, size);
    return merged(lanes, secret + SECRET - STRIPE - 11, ~(size * PRIME64_2));
}
