/* Files that are written: their users, and what was changed. */
#include "_opens_locked.h"

#include <stdlib.h>
#include <unistd.h>

struct written *written_new(struct opens *opens, struct opens_stripe *stripe, int fd,
                            uint8_t tier) {
    struct written *file = malloc(sizeof *file);
    if (file)
        *file =
            (struct written){.opens = opens, .stripe = stripe, .fd = fd, .tier = tier, .users = 1};
    return file;
}

static void written_free(struct written *file) {
    if (file->tier == 0)
        file->opens->close_later(file->opens->dp, file->fd);
    else
        close(file->fd);
    free(file);
}

struct written *opens_use(struct opens *opens, struct open_inode *entry, uint64_t ino) {
    lock(stripe_with(opens, entry));
    struct written *file = entry->ino == ino ? entry->written : NULL;
    if (file)
        file->users++;
    unlock(stripe_with(opens, entry));
    return file;
}

void opens_unuse(struct written *file) {
    struct opens_stripe *stripe = file->stripe;
    lock(stripe);
    uint32_t users = --file->users;
    if (users == 1)
        pthread_cond_broadcast(&stripe->unused);
    unlock(stripe);
    if (users == 0)
        written_free(file);
}

/* The stripe's lock must be held. */
static void lower(struct open_inode *entry, uint64_t offset) {
    if (offset < entry->lowest)
        entry->lowest = offset;
}

void opens_changing(struct opens *opens, struct open_inode *entry, uint64_t ino, uint64_t offset) {
    lock(stripe_with(opens, entry));
    if (entry->ino == ino)
        lower(entry, offset);
    unlock(stripe_with(opens, entry));
}

uint64_t opens_wrote(struct opens *opens, struct open_inode *entry, uint64_t ino, uint64_t offset,
                     uint64_t size) {
    uint64_t run = 0;
    lock(stripe_with(opens, entry));
    if (entry->ino == ino) {
        entry->changes++;
        lower(entry, offset);
    }
    if (entry->ino == ino && size) {
        if (offset != entry->run_end)
            entry->run_start = offset;
        entry->run_end = offset + size;
        run = entry->run_end - entry->run_start;
        if (run >= OPENS_RUN_BYTES)
            entry->run_start = entry->run_end;
        else
            run = 0;
    }
    unlock(stripe_with(opens, entry));
    return run;
}

bool opens_unbind(struct opens *opens, uint64_t ino) {
    struct opens_stripe *stripe = stripe_of(opens, ino);
    struct written *file = NULL;
    lock(stripe);
    struct open_inode *entry = find(stripe, ino);
    bool bound = entry && entry->held;
    if (bound && entry->written) {
        file = entry->leaving = entry->written;
        entry->written = NULL;
        while (file->users > 1)
            pthread_cond_wait(&stripe->unused, &stripe->lock);
        if (entry->leaving == file)
            entry->leaving = NULL;
        pthread_cond_broadcast(&stripe->unused);
    } else {
        /* Another thread has unbound the file, and writes to it may still be running. */
        while ((entry = find(stripe, ino)) && entry->held && entry->leaving)
            pthread_cond_wait(&stripe->unused, &stripe->lock);
    }
    unlock(stripe);
    if (file)
        written_free(file);
    return bound;
}

bool opens_rebind(struct opens *opens, uint64_t ino, int fd, uint8_t tier) {
    struct opens_stripe *stripe = stripe_of(opens, ino);
    struct written *file = written_new(opens, stripe, fd, tier);
    if (!file)
        return false;
    lock(stripe);
    struct open_inode *entry = find(stripe, ino);
    bool can = entry && entry->held && !entry->written;
    if (can)
        entry->written = file;
    unlock(stripe);
    if (!can)
        free(file);
    return can;
}

void opens_know_set_id(struct opens *opens, uint64_t ino, bool has_set_id) {
    struct open_inode *entry = locked(opens, ino);
    if (entry)
        __atomic_store_n(&entry->has_set_id, has_set_id, __ATOMIC_RELEASE);
    unlock(stripe_of(opens, ino));
}

uint64_t opens_lowest(struct opens *opens, uint64_t ino, bool forget) {
    struct open_inode *entry = locked(opens, ino);
    uint64_t lowest = entry && entry->held ? entry->lowest : UINT64_MAX;
    if (entry && entry->held && forget)
        entry->lowest = UINT64_MAX;
    unlock(stripe_of(opens, ino));
    return lowest;
}
