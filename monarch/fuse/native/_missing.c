#include "_missing.h"

#include <stdlib.h>
#include <string.h>

#include "_record.h"

/* The values of a key in a place without a name: never used, or its name was removed. */
enum { FREE = 0, GONE = 1, FIRST_NAME = 2, FIRST_ROOM = 16 };

struct hash {
    size_t shard;
    uint32_t key;
};

bool missing_prepare(struct missing *missing) {
    return pthread_mutex_init(&missing->lock, NULL) == 0;
}

void missing_free(struct missing *missing) {
    for (size_t i = 0; i < MISSING_SHARDS; i++)
        free(missing->names[i].keys);
    pthread_mutex_destroy(&missing->lock);
}

static struct hash hash_of(uint64_t parent, const char *name, size_t length) {
    uint64_t hash = mixed(parent ^ (uint64_t)length << 48);
    for (size_t at = 0; at < length; at += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, name + at, length - at < sizeof word ? length - at : sizeof word);
        hash = mixed(hash ^ word);
    }
    uint32_t key = (uint32_t)hash;
    return (struct hash){hash >> 32 & (MISSING_SHARDS - 1), key < FIRST_NAME ? FIRST_NAME : key};
}

static void insert(uint32_t *keys, size_t room, uint32_t key) {
    size_t place = key & (room - 1);
    while (keys[place] != FREE)
        place = (place + 1) & (room - 1);
    keys[place] = key;
}

/* The place of a key; ``room`` if it has none. */
static size_t place_of(const struct missing_names *names, uint32_t key) {
    if (!names->count)
        return names->room;
    size_t place = key & (names->room - 1);
    while (names->keys[place] != key) {
        if (names->keys[place] == FREE)
            return names->room;
        place = (place + 1) & (names->room - 1);
    }
    return place;
}

/* Makes room for one more name, with at least a quarter of the table free. */
static bool grow(struct missing_names *names) {
    if (4 * (names->used + 1) <= 3 * names->room)
        return true;
    size_t room = FIRST_ROOM;
    while (room < 2 * (names->count + 1))
        room *= 2;
    uint32_t *keys = calloc(room, sizeof *keys);
    if (!keys)
        return false;
    for (size_t i = 0; i < names->room; i++)
        if (names->keys[i] >= FIRST_NAME)
            insert(keys, room, names->keys[i]);
    free(names->keys);
    *names = (struct missing_names){keys, room, names->count, names->count};
    return true;
}

void missing_given(struct missing *missing, uint64_t parent, const char *name, size_t length) {
    struct hash hash = hash_of(parent, name, length);
    struct missing_names *names = &missing->names[hash.shard];
    pthread_mutex_lock(&missing->lock);
    if (!grow(names)) {
        missing->lost = true;
    } else {
        insert(names->keys, names->room, hash.key);
        names->used++;
        names->count++;
    }
    pthread_mutex_unlock(&missing->lock);
}

void missing_taken(struct missing *missing, uint64_t parent, const char *name, size_t length) {
    struct hash hash = hash_of(parent, name, length);
    struct missing_names *names = &missing->names[hash.shard];
    pthread_mutex_lock(&missing->lock);
    size_t place = place_of(names, hash.key);
    if (place < names->room) {
        names->keys[place] = GONE;
        names->count--;
    }
    pthread_mutex_unlock(&missing->lock);
}

static struct missing_directory *set_of(struct missing *missing, uint64_t directory) {
    return missing->directories[mixed(directory) & (MISSING_SETS - 1)];
}

/* The entry of a directory; NULL if it has none. */
static struct missing_directory *directory_of(struct missing *missing, uint64_t ino) {
    struct missing_directory *set = set_of(missing, ino);
    for (struct missing_directory *one = set; one < set + MISSING_WAYS; one++)
        if (one->ino == ino)
            return one;
    return NULL;
}

void missing_open(struct missing *missing, uint64_t directory, uint32_t valid_s, uint64_t now_ns,
                  uint64_t until_ns) {
    pthread_mutex_lock(&missing->lock);
    struct missing_directory *set = set_of(missing, directory);
    struct missing_directory *chosen = directory_of(missing, directory);
    for (struct missing_directory *one = set; !chosen && one < set + MISSING_WAYS; one++)
        if (one->until_ns <= now_ns)
            chosen = one;
    /* An entry that readers still use is not replaced: two directories would displace each
     * other. */
    if (chosen) {
        if (chosen->ino != directory)
            *chosen = (struct missing_directory){.ino = directory};
        chosen->until_ns = until_ns;
        chosen->valid_s = valid_s;
    }
    pthread_mutex_unlock(&missing->lock);
}

void missing_close(struct missing *missing, uint64_t directory) {
    pthread_mutex_lock(&missing->lock);
    struct missing_directory *place = directory_of(missing, directory);
    if (place)
        *place = (struct missing_directory){0};
    pthread_mutex_unlock(&missing->lock);
}

bool missing_is_certain(struct missing *missing, uint64_t parent, const char *name, size_t length,
                        uint64_t now_ns, uint32_t *valid_s) {
    bool is_missing = false;
    struct hash hash = hash_of(parent, name, length);
    const struct missing_names *names = &missing->names[hash.shard];
    pthread_mutex_lock(&missing->lock);
    const struct missing_directory *directory = directory_of(missing, parent);
    if (directory && directory->until_ns > now_ns && !missing->lost) {
        *valid_s = directory->valid_s;
        is_missing = place_of(names, hash.key) == names->room;
    }
    pthread_mutex_unlock(&missing->lock);
    return is_missing;
}

void missing_set_attributes(struct missing *missing, const struct attr *attr) {
    pthread_mutex_lock(&missing->lock);
    struct missing_directory *directory = directory_of(missing, attr->ino);
    if (directory)
        directory->attr = *attr;
    pthread_mutex_unlock(&missing->lock);
}

void missing_changed(struct missing *missing, uint64_t ino) {
    pthread_mutex_lock(&missing->lock);
    struct missing_directory *directory = directory_of(missing, ino);
    if (directory)
        directory->attr = (struct attr){0};
    pthread_mutex_unlock(&missing->lock);
}

bool missing_attributes(struct missing *missing, uint64_t ino, struct attr *attr) {
    pthread_mutex_lock(&missing->lock);
    struct missing_directory *directory = directory_of(missing, ino);
    bool is_known = directory && directory->attr.ino;
    if (is_known)
        *attr = directory->attr;
    pthread_mutex_unlock(&missing->lock);
    return is_known;
}
