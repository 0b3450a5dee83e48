/* Fetches a small file from the source as a whole, and compares it with the snapshot. The bytes are
 * shared by the waiting reader, by other processes that open the file meanwhile, and by the copy
 * that Python makes of it. The last user frees them. */
#ifndef MONARCH_FETCH_H
#define MONARCH_FETCH_H

#include <stdbool.h>
#include <stdint.h>

#include "_caller.h"
#include "_names.h"

struct content {
    int64_t users; /* atomic */
    int64_t *held; /* the bytes of all contents; atomic */
    uint64_t size;
    uint8_t bytes[];
};

/* The cost of a fetch: the calls that reached the source, and the bytes read. */
struct fetch_cost {
    unsigned opens, reads;
    uint64_t bytes;
};

/* The bytes of ``path`` beneath ``root``, if the file is the expected version. NULL if it is not,
 * or after any failure: then Python tries again and finds the reason. Opened with the rights of
 * ``caller``, or with the daemon's if that is NULL. Waits for the source. */
struct content *fetch(int root, const char *path, const struct identity *identity, int64_t *held,
                      const struct caller *caller, struct fetch_cost *cost);
/* Memory for ``size`` bytes, with one user; NULL if there is none. */
struct content *content_new(uint64_t size, int64_t *held);
/* Reads all bytes from ``offset`` of a file on; false if there are fewer, or on failure. */
bool content_read(struct content *content, int fd, uint64_t offset, struct fetch_cost *cost);
struct content *content_retain(struct content *content);
void content_release(struct content *content);

#endif
