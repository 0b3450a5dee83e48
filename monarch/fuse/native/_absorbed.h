/* Files that were written and that nobody has open to write: Python tells which object has the
 * bytes of each, and readers open it without asking. What Python has taken back is opened by nobody
 * from then on; who has opened it before goes on reading. */
#ifndef MONARCH_ABSORBED_H
#define MONARCH_ABSORBED_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct absorbed {
    pthread_mutex_t lock;
    int directory; /* of the objects; -1: there are none */
    uint8_t tier;  /* which has them */
    uint64_t *keys, *objects;
    size_t room, used; /* places in all, and those that are or were taken */
    size_t count;
};

bool absorbed_prepare(struct absorbed *absorbed);
void absorbed_free(struct absorbed *absorbed);
/* The object of an inode is that from now on; false without memory for it. */
bool absorbed_put(struct absorbed *absorbed, uint64_t ino, uint64_t object);
void absorbed_forget(struct absorbed *absorbed, uint64_t ino);
/* A descriptor to read an inode's object, and its size; -1 if Python must open it. */
int absorbed_open(struct absorbed *absorbed, uint64_t ino, uint64_t *size);

#endif
