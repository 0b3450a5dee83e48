#include "_opens_locked.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool opens_prepare(struct opens *opens, struct datapath *dp,
                   void (*close_later)(struct datapath *dp, int fd)) {
    opens->dp = dp;
    opens->close_later = close_later;
    for (int i = 0; i < OPENS_STRIPES; i++)
        if (pthread_mutex_init(&opens->stripes[i].lock, NULL) ||
            pthread_cond_init(&opens->stripes[i].unused, NULL))
            return false;
    return true;
}

void opens_free(struct opens *opens) {
    for (int i = 0; i < OPENS_STRIPES; i++) {
        for (int chunk = 0; chunk < OPENS_CHUNKS; chunk++)
            free(opens->stripes[i].chunks[chunk]);
        pthread_mutex_destroy(&opens->stripes[i].lock);
        pthread_cond_destroy(&opens->stripes[i].unused);
    }
}

/* Takes a free entry; the stripe's lock must be held. A new chunk is needed once in 256 * 16 open
 * inodes. */
static struct open_inode *allocate(struct opens *opens, struct opens_stripe *stripe) {
    struct open_inode *entry = stripe->free;
    if (entry) {
        stripe->free = entry->next;
        return entry;
    }
    uint32_t local = stripe->count, chunk = local / OPENS_CHUNK;
    if (chunk >= OPENS_CHUNKS)
        return NULL;
    if (!stripe->chunks[chunk]) {
        struct open_inode *fresh = calloc(OPENS_CHUNK, sizeof *fresh);
        if (!fresh)
            return NULL;
        __atomic_store_n(&stripe->chunks[chunk], fresh, __ATOMIC_RELEASE);
    }
    stripe->count++;
    entry = &stripe->chunks[chunk][local % OPENS_CHUNK];
    entry->slot = local * OPENS_STRIPES + (uint32_t)(stripe - opens->stripes);
    return entry;
}

/* Adds a user to the entry of ``ino``, which is made if it does not exist; the stripe's lock must
 * be held. */
static struct open_inode *take(struct opens *opens, struct opens_stripe *stripe, uint64_t ino,
                               bool *fresh) {
    *fresh = false;
    struct open_inode *entry = find(stripe, ino);
    if (entry) {
        entry->users++;
    } else if ((entry = allocate(opens, stripe))) {
        struct open_inode **bucket = bucket_of(stripe, ino);
        *fresh = true;
        entry->next = *bucket;
        *bucket = entry;
        entry->users = 1;
        entry->python_handles = entry->creating = entry->asking = 0;
        entry->outdated = entry->held = entry->kept = false;
        entry->unread = entry->unread_before = 0;
        entry->backing_id = 0;
        entry->leaving = NULL;
        __atomic_store_n(&entry->bound, false, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->has_set_id, false, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->tier, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->reached, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->watched_from, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->part_tier, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->part, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->fd, -1, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->kind, OPEN_SETTLING, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->ino, ino, __ATOMIC_RELEASE);
    }
    if (entry)
        __atomic_add_fetch(&opens->users, 1, __ATOMIC_RELAXED);
    return entry;
}

struct open_inode *opens_take(struct opens *opens, uint64_t ino, bool *fresh) {
    struct opens_stripe *stripe = stripe_of(opens, ino);
    lock(stripe);
    struct open_inode *entry = take(opens, stripe, ino, fresh);
    unlock(stripe);
    return entry;
}

void opens_hold(struct opens *opens, struct open_inode *entry) {
    lock(stripe_with(opens, entry));
    entry->users++;
    unlock(stripe_with(opens, entry));
    __atomic_add_fetch(&opens->users, 1, __ATOMIC_RELAXED);
}

void opens_ask(struct opens *opens, struct open_inode *entry, int change) {
    lock(stripe_with(opens, entry));
    entry->asking += (uint32_t)change;
    unlock(stripe_with(opens, entry));
}

static void settle(struct open_inode *entry, enum open_kind kind, int fd, int32_t backing_id,
                   uint8_t tier, uint64_t size) {
    entry->backing_id = backing_id;
    __atomic_store_n(&entry->tier, tier, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->size, size, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->fd, fd, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->kind, kind, __ATOMIC_RELEASE);
}

bool opens_settle(struct opens *opens, struct open_inode *entry, enum open_kind kind, int fd,
                  int32_t backing_id, uint8_t tier, uint64_t size) {
    lock(stripe_with(opens, entry));
    bool open = entry->kind == OPEN_SETTLING;
    if (open)
        settle(entry, kind, fd, backing_id, tier, size);
    unlock(stripe_with(opens, entry));
    return open;
}

bool opens_settle_content(struct opens *opens, struct open_inode *entry, struct content *content) {
    lock(stripe_with(opens, entry));
    bool open = entry->kind == OPEN_SETTLING;
    if (open) {
        __atomic_store_n(&entry->content, content, __ATOMIC_RELEASE);
        settle(entry, OPEN_CONTENT, -1, 0, 0, content->size);
    }
    unlock(stripe_with(opens, entry));
    return open;
}

struct content *opens_content(struct opens *opens, struct open_inode *entry, uint64_t ino) {
    lock(stripe_with(opens, entry));
    bool has = entry->ino == ino && entry->kind == OPEN_CONTENT && entry->content;
    struct content *content = has ? content_retain(entry->content) : NULL;
    unlock(stripe_with(opens, entry));
    return content;
}

bool opens_keep(struct opens *opens, uint64_t ino, struct content *content, uint64_t unread) {
    struct opens_stripe *stripe = stripe_of(opens, ino);
    bool fresh = false;
    lock(stripe);
    struct open_inode *entry = find(stripe, ino) ? NULL : take(opens, stripe, ino, &fresh);
    if (entry) {
        entry->kept = !unread;
        entry->unread = unread;
        __atomic_store_n(&entry->content, content_retain(content), __ATOMIC_RELEASE);
        settle(entry, OPEN_CONTENT, -1, 0, 0, content->size);
    }
    unlock(stripe);
    if (entry)
        __atomic_sub_fetch(&opens->users, 1, __ATOMIC_RELAXED);
    return entry;
}

struct open_inode *opens_at(struct opens *opens, uint32_t slot, uint64_t ino) {
    struct opens_stripe *stripe = &opens->stripes[slot % OPENS_STRIPES];
    uint32_t local = slot / OPENS_STRIPES;
    if (local / OPENS_CHUNK >= OPENS_CHUNKS)
        return NULL;
    struct open_inode *chunk =
        __atomic_load_n(&stripe->chunks[local / OPENS_CHUNK], __ATOMIC_ACQUIRE);
    if (!chunk)
        return NULL;
    struct open_inode *entry = &chunk[local % OPENS_CHUNK];
    return __atomic_load_n(&entry->ino, __ATOMIC_ACQUIRE) == ino ? entry : NULL;
}

static bool can_bind(const struct open_inode *entry) {
    return entry && entry->kind == OPEN_PYTHON && entry->python_handles == 0;
}

bool opens_bind(struct opens *opens, uint64_t ino, enum open_kind kind, int fd, int32_t backing_id,
                uint8_t tier, uint64_t size) {
    struct open_inode *entry = locked(opens, ino);
    bool can = can_bind(entry);
    if (can) {
        __atomic_store_n(&entry->bound, true, __ATOMIC_RELEASE);
        settle(entry, kind, fd, backing_id, tier, size);
    }
    unlock(stripe_of(opens, ino));
    return can;
}

bool opens_resize(struct opens *opens, uint64_t ino, uint64_t size) {
    struct open_inode *entry = locked(opens, ino);
    bool written = entry && entry->kind == OPEN_WRITTEN;
    bool bound = entry && (written ? entry->held : entry->bound);
    if (bound && !written)
        __atomic_store_n(&entry->size, size, __ATOMIC_RELAXED);
    unlock(stripe_of(opens, ino));
    return bound;
}

bool opens_needs_python(struct opens *opens, struct open_inode *entry) {
    lock(stripe_with(opens, entry));
    bool needs = entry->kind == OPEN_PYTHON || entry->bound;
    unlock(stripe_with(opens, entry));
    return needs;
}

void opens_end_binding(struct opens *opens, uint64_t ino, struct open_remains *to_close) {
    *to_close = (struct open_remains){.fd = -1};
    struct open_inode *entry = locked(opens, ino);
    if (entry && entry->bound && !entry->held &&
        (entry->kind == OPEN_RELAY || entry->kind == OPEN_PASSTHROUGH)) {
        to_close->fd = entry->fd;
        to_close->part = entry->part;
        to_close->tier = entry->tier;
        to_close->backing_id = entry->backing_id;
        __atomic_store_n(&entry->part_tier, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->part, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->watched_from, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->reached, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->bound, false, __ATOMIC_RELEASE);
        settle(entry, OPEN_PYTHON, -1, 0, 0, 0);
    }
    unlock(stripe_of(opens, ino));
}

bool opens_bind_part(struct opens *opens, uint64_t ino, int fd, uint8_t tier, uint64_t size,
                     bool *spare) {
    struct open_inode *entry = locked(opens, ino);
    bool can = can_bind(entry);
    if (can) {
        __atomic_store_n(&entry->bound, true, __ATOMIC_RELEASE);
        settle(entry, OPEN_RELAY, -1, 0, 0, size);
    } else {
        can = entry && entry->bound && entry->kind == OPEN_RELAY;
    }
    *spare = can && entry->part;
    if (can && !entry->part) {
        __atomic_store_n(&entry->part_size, size, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->part, fd + 1, __ATOMIC_RELAXED);
        __atomic_store_n(&entry->part_tier, tier, __ATOMIC_RELEASE);
    }
    unlock(stripe_of(opens, ino));
    return can;
}

void opens_drop_part(struct opens *opens, uint64_t ino) {
    struct open_inode *entry = locked(opens, ino);
    if (entry)
        __atomic_store_n(&entry->part_tier, 0, __ATOMIC_RELEASE);
    unlock(stripe_of(opens, ino));
}

void opens_watch(struct opens *opens, uint64_t ino, uint64_t offset) {
    struct open_inode *entry = locked(opens, ino);
    if (entry && entry->bound)
        __atomic_store_n(&entry->watched_from, offset, __ATOMIC_RELEASE);
    unlock(stripe_of(opens, ino));
}

bool opens_outdate(struct opens *opens, uint64_t ino) {
    struct open_inode *entry = locked(opens, ino);
    /* An entry that is being settled may become such a copy. It is marked without waiting, since
     * settling may wait for the source. */
    bool held =
        entry && (entry->tier > 0 || entry->kind == OPEN_CONTENT || entry->kind == OPEN_SETTLING);
    if (held)
        entry->outdated = true;
    unlock(stripe_of(opens, ino));
    return held;
}

bool opens_answered(struct opens *opens, struct open_inode *entry, bool writes) {
    struct opens_stripe *stripe = stripe_with(opens, entry);
    lock(stripe);
    bool written = entry->kind == OPEN_WRITTEN;
    bool bound = entry->bound && (written ? entry->held : !writes);
    if (!bound)
        entry->python_handles++;
    unlock(stripe);
    return bound;
}

/* Moves an entry from its bucket to the free ones; the stripe's lock must be held. */
static void forget(struct opens_stripe *stripe, struct open_inode *entry,
                   struct open_remains *to_close) {
    struct open_inode **link = bucket_of(stripe, entry->ino);
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
    *to_close = (struct open_remains){
        .fd = entry->fd,
        .part = entry->part,
        .tier = entry->tier,
        .backing_id = entry->backing_id,
        .outdated = entry->outdated,
        .content = entry->content,
        .written = entry->written,
    };
    entry->written = NULL;
    __atomic_store_n(&entry->content, NULL, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->fd, -1, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->part, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->ino, 0, __ATOMIC_RELEASE);
    entry->next = stripe->free;
    stripe->free = entry;
}

/* The last reader of a copy that the kernel reads is gone. The users of its entry only wait to
 * write the file, and the kernel allows no other mode meanwhile. The stripe's lock must be held. */
static void leave_copy(struct open_inode *entry, struct open_remains *to_close) {
    *to_close = (struct open_remains){.fd = entry->fd,
                                      .tier = entry->tier,
                                      .backing_id = entry->backing_id,
                                      .outdated = entry->outdated};
    entry->outdated = false;
    settle(entry, OPEN_PYTHON, -1, 0, 0, 0);
}

/* The users of an entry that are no opens, for its bytes. */
static uint32_t own_users(const struct open_inode *entry) {
    return (uint32_t)entry->kept + (entry->unread > 0);
}

bool opens_drop(struct opens *opens, uint64_t ino, bool by_python, struct open_remains *to_close) {
    struct opens_stripe *stripe = stripe_of(opens, ino);
    *to_close = (struct open_remains){.fd = -1};
    lock(stripe);
    struct open_inode *entry = find(stripe, ino);
    bool known = entry && entry->users > (uint32_t)entry->held + own_users(entry) &&
                 (!by_python || entry->python_handles);
    if (known) {
        if (by_python)
            entry->python_handles--;
        if (--entry->users == 0)
            forget(stripe, entry, to_close);
        else if (entry->users == entry->asking && entry->kind == OPEN_PASSTHROUGH && !entry->bound)
            leave_copy(entry, to_close);
    }
    unlock(stripe);
    if (known)
        __atomic_sub_fetch(&opens->users, 1, __ATOMIC_RELAXED);
    return known;
}

void opens_unkeep(struct opens *opens, uint64_t ino, struct open_remains *to_close) {
    struct opens_stripe *stripe = stripe_of(opens, ino);
    *to_close = (struct open_remains){.fd = -1};
    lock(stripe);
    struct open_inode *entry = find(stripe, ino);
    if (entry && entry->kept) {
        entry->kept = false;
        if (--entry->users == 0)
            forget(stripe, entry, to_close);
    }
    unlock(stripe);
}

bool opens_count_read(struct opens *opens, struct open_inode *entry, uint64_t ino,
                      uint64_t nbytes) {
    bool begins = false;
    lock(stripe_with(opens, entry));
    if (entry->ino == ino && entry->unread) {
        entry->unread -= nbytes < entry->unread ? nbytes : entry->unread;
        /* The caller uses the entry, too. */
        entry->users -= !entry->unread;
    } else if (entry->ino == ino && entry->content && nbytes < entry->content->size) {
        entry->unread = entry->unread_before = entry->content->size - nbytes;
        entry->users++;
        begins = true;
    }
    unlock(stripe_with(opens, entry));
    return begins;
}

bool opens_end_reading(struct opens *opens, uint64_t ino, bool now, struct open_remains *to_close) {
    *to_close = (struct open_remains){.fd = -1};
    struct open_inode *entry = locked(opens, ino);
    bool is_read = entry && entry->unread;
    bool goes_on = is_read && !now && entry->unread != entry->unread_before;
    if (goes_on) {
        entry->unread_before = entry->unread;
    } else if (is_read) {
        entry->unread = 0;
        if (--entry->users == 0)
            forget(stripe_of(opens, ino), entry, to_close);
    }
    unlock(stripe_of(opens, ino));
    return goes_on;
}

struct open_inode *opens_bind_written(struct opens *opens, uint64_t ino, int fd, uint8_t tier,
                                      bool create, uint32_t writer) {
    struct opens_stripe *stripe = stripe_of(opens, ino);
    struct content *content = NULL;
    struct written *file = written_new(opens, stripe, fd, tier), *spare = file;
    bool fresh;
    if (!file)
        return NULL;
    lock(stripe);
    struct open_inode *entry = find(stripe, ino);
    /* While the kernel reads an inode by passthrough, it allows no other mode of open. */
    if (entry ? entry->kind == OPEN_PASSTHROUGH : !create)
        entry = NULL;
    else if (create && (entry = take(opens, stripe, ino, &fresh)))
        entry->creating++;
    if (entry)
        __atomic_store_n(&entry->writer, writer, __ATOMIC_RELEASE);
    if (entry && !entry->held) {
        spare = entry->written;
        content = entry->content;
        __atomic_store_n(&entry->content, NULL, __ATOMIC_RELEASE);
        entry->written = file;
        entry->changes = entry->run_start = entry->run_end = 0;
        entry->lowest = UINT64_MAX;
        entry->held = true;
        entry->users++;
        __atomic_store_n(&entry->bound, true, __ATOMIC_RELEASE);
        __atomic_store_n(&entry->kind, OPEN_WRITTEN, __ATOMIC_RELEASE);
    }
    unlock(stripe);
    content_release(content);
    if (entry && spare)
        opens_unuse(spare);
    else if (!entry)
        free(file);
    return entry;
}

void opens_release_written(struct opens *opens, uint64_t ino, struct open_remains *to_close) {
    struct opens_stripe *stripe = stripe_of(opens, ino);
    *to_close = (struct open_remains){.fd = -1};
    lock(stripe);
    struct open_inode *entry = find(stripe, ino);
    if (entry && entry->held) {
        /* Unanswered creations of this inode have failed. */
        __atomic_sub_fetch(&opens->users, entry->creating, __ATOMIC_RELAXED);
        entry->users -= entry->creating + 1;
        entry->creating = 0;
        entry->held = false;
        if (entry->users == 0)
            forget(stripe, entry, to_close);
    }
    unlock(stripe);
}

struct open_inode *opens_created(struct opens *opens, uint64_t ino) {
    struct open_inode *entry = locked(opens, ino);
    if (entry && entry->creating)
        entry->creating--;
    else
        entry = NULL;
    unlock(stripe_of(opens, ino));
    return entry;
}

/* ``result`` is evaluated for ``entry``, that of ``ino`` or NULL, with its stripe locked. */
#define QUESTION(type, name, result)                                                               \
    type opens_##name(struct opens *opens, uint64_t ino) {                                         \
        struct open_inode *entry = locked(opens, ino);                                             \
        type found = (result);                                                                     \
        unlock(stripe_of(opens, ino));                                                             \
        return found;                                                                              \
    }

QUESTION(bool, can_bind, can_bind(entry))
QUESTION(bool, is_open, entry && entry->users > own_users(entry))
QUESTION(bool, is_passed, entry && entry->kind == OPEN_PASSTHROUGH)
QUESTION(uint64_t, changes, entry && entry->held ? entry->changes : 0)
QUESTION(int64_t, reached, entry ? __atomic_load_n(&entry->reached, __ATOMIC_RELAXED) : 0)

bool opens_pop(struct opens *opens, struct open_remains *to_close) {
    for (int i = 0; i < OPENS_STRIPES; i++) {
        struct opens_stripe *stripe = &opens->stripes[i];
        for (int bucket = 0; bucket < OPENS_BUCKETS; bucket++) {
            if (stripe->buckets[bucket]) {
                forget(stripe, stripe->buckets[bucket], to_close);
                return true;
            }
        }
    }
    return false;
}
