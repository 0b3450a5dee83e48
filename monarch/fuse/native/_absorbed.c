#include "_absorbed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* The values of ``ino`` in a place without an entry: never used, or its entry was removed. */
enum { FREE = 0, GONE = 1, FIRST_ROOM = 64 };

bool absorbed_prepare(struct absorbed *absorbed) {
    return pthread_mutex_init(&absorbed->lock, NULL) == 0;
}

void absorbed_free(struct absorbed *absorbed) {
    if (absorbed->directory >= 0)
        close(absorbed->directory);
    free(absorbed->objects);
    pthread_mutex_destroy(&absorbed->lock);
}

/* The place of an inode, or the free place for it. The lock must be held, and one place be free. */
static struct absorbed_object *place_of(const struct absorbed *absorbed, uint64_t ino) {
    /* Consecutive inode numbers are spread over the table. */
    size_t place = (size_t)(ino * 0x9e3779b97f4a7c15 >> 20) & (absorbed->room - 1);
    while (absorbed->objects[place].ino != FREE && absorbed->objects[place].ino != ino)
        place = (place + 1) & (absorbed->room - 1);
    return &absorbed->objects[place];
}

/* Makes room for one more entry, with at least a third of the table free. The lock must be held. */
static bool grow(struct absorbed *absorbed) {
    if (3 * (absorbed->used + 1) <= 2 * absorbed->room)
        return true;
    struct absorbed grown = *absorbed;
    grown.room = FIRST_ROOM;
    while (grown.room < 3 * (absorbed->count + 1))
        grown.room *= 2;
    grown.objects = calloc(grown.room, sizeof *grown.objects);
    if (!grown.objects)
        return false;
    for (size_t i = 0; i < absorbed->room; i++)
        if (absorbed->objects[i].ino > GONE)
            *place_of(&grown, absorbed->objects[i].ino) = absorbed->objects[i];
    free(absorbed->objects);
    absorbed->objects = grown.objects;
    absorbed->room = grown.room;
    absorbed->used = absorbed->count;
    return true;
}

bool absorbed_put(struct absorbed *absorbed, uint64_t ino, uint64_t object) {
    pthread_mutex_lock(&absorbed->lock);
    bool kept = grow(absorbed);
    if (kept) {
        struct absorbed_object *place = place_of(absorbed, ino);
        absorbed->used += place->ino == FREE;
        absorbed->count += place->ino == FREE;
        *place = (struct absorbed_object){ino, object};
    }
    pthread_mutex_unlock(&absorbed->lock);
    return kept;
}

void absorbed_forget(struct absorbed *absorbed, uint64_t ino) {
    pthread_mutex_lock(&absorbed->lock);
    if (absorbed->room) {
        struct absorbed_object *place = place_of(absorbed, ino);
        if (place->ino == ino) {
            place->ino = GONE;
            absorbed->count--;
        }
    }
    pthread_mutex_unlock(&absorbed->lock);
}

/* A size of 0: Python has set no object for the inode. */
static uint64_t object_of(struct absorbed *absorbed, uint64_t ino) {
    uint64_t object = 0;
    pthread_mutex_lock(&absorbed->lock);
    if (absorbed->count) {
        const struct absorbed_object *place = place_of(absorbed, ino);
        object = place->ino == ino ? place->number : 0;
    }
    pthread_mutex_unlock(&absorbed->lock);
    return object;
}

int open_numbered(int directory, uint64_t number) {
    char name[32];
    snprintf(name, sizeof name, "%02x/%llu", (unsigned)(number & 0xff), (unsigned long long)number);
    /* Updating the access time would cost every small read. O_NONBLOCK: another program may have
     * put a fifo in the place of a copy. */
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = openat(directory, name, flags | O_NOATIME);
    return fd < 0 && errno == EPERM ? openat(directory, name, flags) : fd;
}

int absorbed_open(struct absorbed *absorbed, uint64_t ino, uint64_t *size) {
    uint64_t object = object_of(absorbed, ino);
    if (!object)
        return -1;
    int fd = open_numbered(absorbed->directory, object);
    struct stat status;
    /* Checked again: Python may have removed the entry before the object was open. */
    if (fd >= 0 &&
        (fstat(fd, &status) || !S_ISREG(status.st_mode) || object_of(absorbed, ino) != object)) {
        close(fd);
        return -1;
    }
    if (fd >= 0)
        *size = (uint64_t)status.st_size;
    return fd;
}
