#include "_pack.h"

#include <stdlib.h>
#include <unistd.h>

#include "_xxh3.h"

bool pack_prepare(struct pack *pack, uint64_t records, uint32_t chunks, const uint32_t *chunk,
                  const uint64_t *offset, const uint64_t *digest) {
    pack->open = calloc(chunks + 1ul, sizeof(struct pack_chunk *));
    if (!pack->open || pthread_mutex_init(&pack->lock, NULL))
        return false;
    pack->chunks = chunks;
    pack->chunk = chunk;
    pack->offset = offset;
    pack->digest = digest;
    pack->records = records;
    return true;
}

static void leave(struct pack *pack, struct pack_chunk *used) {
    pthread_mutex_lock(&pack->lock);
    bool last = --used->users == 0;
    pthread_mutex_unlock(&pack->lock);
    if (!last)
        return;
    if (pack->close_later)
        pack->close_later(pack->dp, used->fd);
    else
        close(used->fd);
    free(used);
}

static struct pack_chunk *replaced(struct pack *pack, uint32_t chunk, struct pack_chunk *by) {
    pthread_mutex_lock(&pack->lock);
    struct pack_chunk *before = pack->open[chunk];
    pack->open[chunk] = by;
    pthread_mutex_unlock(&pack->lock);
    return before;
}

void pack_take_back(struct pack *pack, uint32_t chunk) {
    struct pack_chunk *before = chunk < pack->chunks ? replaced(pack, chunk, NULL) : NULL;
    if (before)
        leave(pack, before);
}

bool pack_lend(struct pack *pack, uint32_t chunk, int fd) {
    struct pack_chunk *lent = chunk < pack->chunks ? malloc(sizeof *lent) : NULL;
    if (!lent)
        return false;
    *lent = (struct pack_chunk){.fd = fd, .users = 1};
    struct pack_chunk *before = replaced(pack, chunk, lent);
    if (before)
        leave(pack, before);
    return true;
}

void pack_free(struct pack *pack) {
    pack->close_later = NULL;
    for (uint32_t chunk = 0; chunk < pack->chunks; chunk++)
        pack_take_back(pack, chunk);
    free(pack->open);
    if (pack->records)
        pthread_mutex_destroy(&pack->lock);
}

/* The chunk of a file; the number of chunks for one that is in none. */
static uint32_t chunk_of(const struct pack *pack, const struct identity *identity) {
    uint32_t chunk =
        identity->source_ino < pack->records ? pack->chunk[identity->source_ino] : pack->chunks;
    return chunk < pack->chunks ? chunk : pack->chunks;
}

bool pack_may_fetch(struct pack *pack, const struct identity *identity) {
    uint32_t chunk = chunk_of(pack, identity);
    return chunk < pack->chunks && identity->size &&
           __atomic_load_n(&pack->open[chunk], __ATOMIC_ACQUIRE);
}

struct content *pack_fetch(struct pack *pack, const struct identity *identity, int64_t *held,
                           struct fetch_cost *cost) {
    *cost = (struct fetch_cost){0};
    uint32_t chunk = chunk_of(pack, identity);
    if (chunk >= pack->chunks)
        return NULL;
    pthread_mutex_lock(&pack->lock);
    struct pack_chunk *used = pack->open[chunk];
    if (used)
        used->users++;
    pthread_mutex_unlock(&pack->lock);
    if (!used)
        return NULL;
    uint64_t number = identity->source_ino;
    struct content *content = content_new(identity->size, held);
    bool right = content && content_read(content, used->fd, pack->offset[number], cost) &&
                 xxh3(content->bytes, content->size) == pack->digest[number];
    leave(pack, used);
    if (right)
        return content;
    content_release(content);
    return NULL;
}
