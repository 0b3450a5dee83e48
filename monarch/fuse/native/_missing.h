/* Names that are missing in directories in which names were made through the mount. Python reports
 * each name that it adds or removes beside those of the snapshot, before it answers the request. Of
 * each name 32 bits of a hash are kept. Two names may share these bits: so a name with known bits
 * may still be missing, but a name without them certainly is. Python also sets in which directories
 * readers may answer so, and until when. Of these directories it sets the attributes as well: the
 * kernel requests them after each change of names. */
#ifndef MONARCH_MISSING_H
#define MONARCH_MISSING_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_wire.h"

/* The number of tables, chosen by the hash, so that none takes long to grow; and of directories, in
 * sets. */
enum { MISSING_SHARDS = 64, MISSING_SETS = 256, MISSING_WAYS = 4 };

struct missing_names {
    uint32_t *keys;
    size_t room, used; /* all places, and those that are or were in use */
    size_t count;
};

struct missing_directory {
    uint64_t ino, until_ns;
    uint32_t valid_s; /* how long the kernel may remember a missing name */
    struct attr attr; /* without an inode number: Python is asked */
};

struct missing {
    pthread_mutex_t lock;
    bool lost; /* there was no memory for a name: readers answer nothing any more */
    struct missing_names names[MISSING_SHARDS];
    struct missing_directory directories[MISSING_SETS][MISSING_WAYS];
};

bool missing_prepare(struct missing *missing);
void missing_free(struct missing *missing);
/* Adds a name; it must be removed as often as it was added. */
void missing_given(struct missing *missing, uint64_t parent, const char *name, size_t length);
void missing_taken(struct missing *missing, uint64_t parent, const char *name, size_t length);
/* Lets readers answer for missing names of a directory until ``until_ns``. */
void missing_open(struct missing *missing, uint64_t directory, uint32_t valid_s, uint64_t now_ns,
                  uint64_t until_ns);
void missing_close(struct missing *missing, uint64_t directory);
/* Whether a name that is not in the snapshot is missing, and how long the kernel may remember
 * that. */
bool missing_is_certain(struct missing *missing, uint64_t parent, const char *name, size_t length,
                        uint64_t now_ns, uint32_t *valid_s);

/* Sets the attributes of a directory; ignored if the directory has no entry. */
void missing_set_attributes(struct missing *missing, const struct attr *attr);
/* Removes the attributes of an inode: they have changed. */
void missing_changed(struct missing *missing, uint64_t ino);
bool missing_attributes(struct missing *missing, uint64_t ino, struct attr *attr);

#endif
