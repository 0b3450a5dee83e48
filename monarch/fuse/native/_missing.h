/* Names that are missing in directories in which names were made through the mount.
 *
 * Python tells of each name that it gives or takes beside those of the snapshot, before it answers
 * the request that does so; kept of each are 32 bits of a hash. Two names may share them, so a name
 * whose bits are here may be missing, but one whose bits are not is. And Python says of which
 * directories readers may answer so, and for how long.
 *
 * Of these directories it tells the attributes as well: the kernel asks for them after each name
 * that was made or removed there. */
#ifndef MONARCH_MISSING_H
#define MONARCH_MISSING_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_wire.h"

/* So many tables, by the hash, so that none takes long to grow; so many directories, in sets. */
enum { MISSING_SHARDS = 64, MISSING_SETS = 256, MISSING_WAYS = 4 };

struct missing_names {
    uint32_t *keys;
    size_t room, used; /* places in all, and those that are or were taken */
    size_t count;
};

struct missing_directory {
    uint64_t ino, until_ns;
    uint32_t valid_s; /* how long the kernel may know a name to be missing */
    struct attr attr; /* without an inode number: Python is asked */
};

struct missing {
    pthread_mutex_t lock;
    bool lost; /* there was no memory for a name: nothing is told any more */
    struct missing_names names[MISSING_SHARDS];
    struct missing_directory directories[MISSING_SETS][MISSING_WAYS];
};

bool missing_prepare(struct missing *missing);
void missing_free(struct missing *missing);
/* A name is given, as often as it is taken. */
void missing_given(struct missing *missing, uint64_t parent, const char *name, size_t length);
void missing_taken(struct missing *missing, uint64_t parent, const char *name, size_t length);
/* Readers may tell of a directory until then that a name is missing. */
void missing_open(struct missing *missing, uint64_t directory, uint32_t valid_s, uint64_t now_ns,
                  uint64_t until_ns);
void missing_close(struct missing *missing, uint64_t directory);
/* Whether a name that the snapshot has not is missing, and for how long the kernel may know it. */
bool missing_tells(struct missing *missing, uint64_t parent, const char *name, size_t length,
                   uint64_t now_ns, uint32_t *valid_s);

/* The attributes of a directory from now on; those of one that has no place are not kept. */
void missing_told(struct missing *missing, const struct attr *attr);
/* What was told of an inode does not hold any more. */
void missing_changed(struct missing *missing, uint64_t ino);
bool missing_attributes(struct missing *missing, uint64_t ino, struct attr *attr);

#endif
