/* The seal of a copy: the modification time that shows its version (tiers/contents.py). */
#ifndef MONARCH_SEAL_H
#define MONARCH_SEAL_H

#include <stdint.h>
#include <time.h>

#include "_record.h"

static inline struct timespec seal_of(uint64_t ino, uint64_t size, int64_t mtime_ns,
                                      int64_t ctime_ns, uint64_t source_ino) {
    uint64_t seal = mixed(ino ^ size);
    seal = mixed(seal ^ (uint64_t)mtime_ns);
    seal = mixed(seal ^ (uint64_t)ctime_ns);
    seal = mixed(seal ^ source_ino);
    return (struct timespec){
        .tv_sec = (time_t)(seal >> 34),
        .tv_nsec = (long)((seal & 0x3ffffffff) % 1000000000),
    };
}

#endif
