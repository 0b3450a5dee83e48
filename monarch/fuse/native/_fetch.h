/* Fetching a small file from the source, whole, and comparing it with what the snapshot tells.
 *
 * What was fetched is shared by the reader who waits for it, by others who open the file meanwhile
 * and by the copy that Python then makes of it; the last of them frees it.
 */
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

/* How a fetch went, for the books: the calls that reached the source, and the bytes they brought.
 */
struct fetch_cost {
    unsigned opens, reads;
    uint64_t bytes;
};

/* The bytes of ``path`` beneath ``root``, if it is that very version; NULL if it is not, or with
 * any failure: then Python asks again and finds out why. Opened with the rights of ``caller``, or,
 * if that is NULL, with the daemon's. Waits for the source. */
struct content *fetch(int root, const char *path, const struct identity *identity, int64_t *held,
                      const struct caller *caller, struct fetch_cost *cost);
struct content *content_retain(struct content *content);
void content_release(struct content *content);

#endif
