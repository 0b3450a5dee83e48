/* Writes many small copies into a tier in one call, without the interpreter (tiers/lots.py). */

#include "_lots.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_seal.h"

/* A copy to be made, as tiers/lots.py packs it. */
struct row {
    uint64_t ino, size;
    int64_t mtime_ns, ctime_ns;
    uint64_t source_ino;
};
_Static_assert(sizeof(struct row) == 40, "row");

/* The tier's own directory, and the one of its copies. */
struct place {
    int root, directory;
    bool seals;
    /* The lot ends when this number differs from ``term``. */
    const uint64_t *terms;
    uint64_t term;
};

/* The number of an error; 0 for none. */
static int write_all(int fd, const Py_buffer *content) {
    const char *bytes = content->buf;
    Py_ssize_t done = 0;
    while (done < content->len) {
        ssize_t count = pwrite(fd, bytes + done, (size_t)(content->len - done), done);
        if (count < 0 && errno != EINTR)
            return errno;
        if (count == 0)
            return EIO;
        done += count > 0 ? count : 0;
    }
    return 0;
}

static int fill(const struct place *place, int fd, const struct row *row,
                const Py_buffer *content) {
    struct stat status;
    if (fstat(fd, &status))
        return errno;
    if (!S_ISREG(status.st_mode))
        return EINVAL;
    int error = write_all(fd, content);
    if (error || !place->seals)
        return error;
    /* The access time is now, as in tiers/contents.py. */
    struct timespec times[] = {
        {.tv_nsec = UTIME_NOW},
        seal_of(row->ino, row->size, row->mtime_ns, row->ctime_ns, row->source_ino),
    };
    return futimens(fd, times) ? errno : 0;
}

/* Gives a stage the name of a copy, as copy_name of tiers/contents.py does. */
static int move_in(const struct place *place, const char *stage, uint64_t ino) {
    char name[32], *slash;
    snprintf(name, sizeof name, "%02x/%llu", (unsigned)(ino & 0xff), (unsigned long long)ino);
    if (renameat(place->root, stage, place->directory, name) == 0)
        return 0;
    if (errno != ENOENT)
        return errno;
    slash = name + 2;
    *slash = 0;
    if (mkdirat(place->directory, name, 0700) && errno != EEXIST)
        return errno;
    *slash = '/';
    return renameat(place->root, stage, place->directory, name) ? errno : 0;
}

static int write_copy(const struct place *place, const struct row *row, const Py_buffer *content) {
    char stage[40];
    if (__atomic_load_n(place->terms, __ATOMIC_RELAXED) != place->term)
        return ECANCELED;
    snprintf(stage, sizeof stage, "stage/%llu.part", (unsigned long long)row->ino);
    int flags = O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = openat(place->root, stage, flags, 0600);
    if (fd < 0)
        return errno;
    int error = fill(place, fd, row, content);
    /* Some file systems report only here that they have no space for the bytes. */
    if (close(fd) && !error)
        error = errno;
    if (!error)
        error = move_in(place, stage, row->ino);
    if (error)
        unlinkat(place->root, stage, 0);
    return error;
}

/* Takes the buffers of ``contents``; returns how many, fewer with an exception set. */
static Py_ssize_t take_buffers(PyObject *contents, Py_buffer *buffers, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(contents, i), &buffers[i], PyBUF_SIMPLE))
            return i;
    }
    return count;
}

PyObject *write_copies(PyObject *module, PyObject *args) {
    struct place place;
    Py_buffer rows, terms;
    PyObject *contents, *result = NULL;
    int seals;
    unsigned long long term;
    (void)module;
    if (!PyArg_ParseTuple(args, "iipy*O!y*K", &place.root, &place.directory, &seals, &rows,
                          &PyTuple_Type, &contents, &terms, &term))
        return NULL;
    place.seals = seals;
    place.terms = terms.buf;
    place.term = term;
    Py_ssize_t count = PyTuple_GET_SIZE(contents), taken = 0;
    Py_buffer *buffers = calloc((size_t)count + 1, sizeof *buffers);
    if (!buffers) {
        PyErr_NoMemory();
    } else if (rows.len != count * (Py_ssize_t)sizeof(struct row) || terms.len != 8) {
        PyErr_SetString(PyExc_ValueError, "not a row for each content, or no number of a term");
    } else if ((taken = take_buffers(contents, buffers, count)) == count) {
        result = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int32_t));
    }
    if (result) {
        int32_t *errors = (int32_t *)PyBytes_AS_STRING(result);
        const struct row *row = rows.buf;
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t i = 0; i < count; i++)
            errors[i] = write_copy(&place, &row[i], &buffers[i]);
        Py_END_ALLOW_THREADS;
    }
    for (Py_ssize_t i = 0; i < taken; i++)
        PyBuffer_Release(&buffers[i]);
    free(buffers);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&terms);
    return result;
}
