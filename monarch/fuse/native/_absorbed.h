/* The objects of written files that no process has open for writing. Python sets the object of each
 * such file, and readers open it without Python. When Python has removed an entry, no reader opens
 * the object any more; existing opens continue to read it. */
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
    struct absorbed_object {
        uint64_t ino, number;
    } *objects;
    size_t room, used; /* all places, and those that are or were in use */
    size_t count;
};

/* Opens the file of a number beneath the directory of copies or of objects, for reading; -1 on
 * failure. */
int open_numbered(int directory, uint64_t number);

bool absorbed_prepare(struct absorbed *absorbed);
void absorbed_free(struct absorbed *absorbed);
/* Sets the object of an inode; false without memory for it. */
bool absorbed_put(struct absorbed *absorbed, uint64_t ino, uint64_t object);
void absorbed_forget(struct absorbed *absorbed, uint64_t ino);
/* Opens an inode's object: returns a descriptor to read it, and its size; -1 if Python must open
 * it. */
int absorbed_open(struct absorbed *absorbed, uint64_t ino, uint64_t *size);

#endif
