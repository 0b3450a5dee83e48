/* An entry of a snapshot, as it is kept there (namespace/schema.py). */
#ifndef MONARCH_RECORD_H
#define MONARCH_RECORD_H

#include <stdint.h>

enum { RECORD_BYTES = 64 };

struct record {
    uint32_t parent, mode, uid, gid, nlink, flags;
    uint64_t size, mtime_ns, ctime_ns, source_ino, extra;
};
_Static_assert(sizeof(struct record) == RECORD_BYTES, "record");

#endif
