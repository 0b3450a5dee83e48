/* Fetches small files of a pack: extents of its chunks, each compared with the digest in the index.
 * Python opens the chunks and lends their descriptors. */
#ifndef MONARCH_PACK_H
#define MONARCH_PACK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "_fetch.h"

struct datapath;

/* An open chunk, and those who use its descriptor. */
struct pack_chunk {
    int fd;
    uint32_t users;
};

/* The extents by the numbers of records, which are the inode numbers at the source. */
struct pack {
    /* Closes a descriptor of the source without waiting for it; NULL: it may wait. */
    void (*close_later)(struct datapath *dp, int fd);
    struct datapath *dp;
    uint64_t records; /* 0: the source is no pack */
    uint32_t chunks;
    const uint32_t *chunk;
    const uint64_t *offset, *digest;
    pthread_mutex_t lock;
    struct pack_chunk **open; /* by chunk; NULL: not lent */
};

/* False without memory. The arrays must stay. */
bool pack_prepare(struct pack *pack, uint64_t records, uint32_t chunks, const uint32_t *chunk,
                  const uint64_t *offset, const uint64_t *digest);
void pack_free(struct pack *pack);
/* Lends ``fd``, which then belongs to the pack, until pack_take_back. Replaces another one. False
 * without memory, or if there is no such chunk: then it still belongs to the caller. */
bool pack_lend(struct pack *pack, uint32_t chunk, int fd);
/* The descriptor is closed after its last use. Does not wait for the source. */
void pack_take_back(struct pack *pack, uint32_t chunk);
/* The bytes of a file, as fetch; NULL also if its chunk was not lent, or its bytes are damaged. */
struct content *pack_fetch(struct pack *pack, const struct identity *identity, int64_t *held,
                           struct fetch_cost *cost);
/* Whether pack_fetch may find the bytes of a file. */
bool pack_may_fetch(struct pack *pack, const struct identity *identity);

#endif
