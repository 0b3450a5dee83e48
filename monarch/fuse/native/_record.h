/* The record of a snapshot's entry (namespace/schema.py). */
#ifndef MONARCH_RECORD_H
#define MONARCH_RECORD_H

#include <stdint.h>

enum { RECORD_BYTES = 64 };

struct record {
    uint32_t parent, mode, uid, gid, nlink, flags;
    uint64_t size, mtime_ns, ctime_ns, source_ino, extra;
};
_Static_assert(sizeof(struct record) == RECORD_BYTES, "record");

/* A time as it is stored and compared; times after the year 2262 become the last one. */
static inline int64_t kept_ns(int64_t seconds, int64_t nanoseconds) {
    int64_t ns;
    if (__builtin_mul_overflow(seconds, (int64_t)1000000000, &ns) ||
        __builtin_add_overflow(ns, nanoseconds, &ns))
        ns = seconds < 0 ? INT64_MIN : INT64_MAX;
    return ns;
}

/* splitmix64, as in posix/buckets.py. */
static inline uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

#endif
