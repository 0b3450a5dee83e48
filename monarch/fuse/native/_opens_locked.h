/* The entries of open inodes and their locks, for _opens.c and _opens_written.c only. */
#ifndef MONARCH_OPENS_LOCKED_H
#define MONARCH_OPENS_LOCKED_H

#include "_opens.h"

static inline struct opens_stripe *stripe_of(struct opens *opens, uint64_t ino) {
    return &opens->stripes[ino % OPENS_STRIPES];
}

/* An entry keeps its place; it may be used for one inode after another. */
static inline struct opens_stripe *stripe_with(struct opens *opens,
                                               const struct open_inode *entry) {
    return &opens->stripes[entry->slot % OPENS_STRIPES];
}

static inline struct open_inode **bucket_of(struct opens_stripe *stripe, uint64_t ino) {
    return &stripe->buckets[ino / OPENS_STRIPES % OPENS_BUCKETS];
}

static inline struct open_inode *find(struct opens_stripe *stripe, uint64_t ino) {
    struct open_inode *entry = *bucket_of(stripe, ino);
    while (entry && entry->ino != ino)
        entry = entry->next;
    return entry;
}

static inline void lock(struct opens_stripe *stripe) { pthread_mutex_lock(&stripe->lock); }

static inline void unlock(struct opens_stripe *stripe) { pthread_mutex_unlock(&stripe->lock); }

/* Locks the stripe of ``ino``; returns its entry, NULL if it has none. */
static inline struct open_inode *locked(struct opens *opens, uint64_t ino) {
    lock(stripe_of(opens, ino));
    return find(stripe_of(opens, ino), ino);
}

/* A file that is written, with one user; NULL without memory. */
struct written *written_new(struct opens *opens, struct opens_stripe *stripe, int fd, uint8_t tier);

#endif
