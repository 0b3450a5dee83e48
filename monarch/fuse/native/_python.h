/* The type that Python sees, and its methods that are not in _python.c. */
#ifndef MONARCH_PYTHON_H
#define MONARCH_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include "_requests.h"
#include <Python.h>

typedef struct {
    PyObject_HEAD struct datapath *dp;
    Py_buffer residency, marks;
    PyObject *blocks; /* a list of the objects that hold the published blocks */
    PyObject *acls;   /* the tuple of the pairs to which names.acls points */
} Datapath;

/* -- _python.c -------------------------------------------------------------------------------- */

PyObject *python_error(int error);
PyObject *value_error(const char *what);
/* Converters of PyArg_ParseTuple to an int: the number of a tier, and that of a tier or 0, the
 * source. */
int to_tier(PyObject *given, void *number);
int to_place(PyObject *given, void *number);
/* The same to a struct attr, from a tuple of inode, mode, links, user, group, device, size, blocks,
 * and the times of access, modification and change in ns. */
int to_attr(PyObject *given, void *attr);
/* Fetched bytes as a memoryview, which is a user of them; None for NULL. */
PyObject *view_of(Datapath *self, struct content *content);

/* -- _python_packs.c --------------------------------------------------------------------------- */

/* The contents of an array with elements of ``size`` bytes, which stay as long as the datapath;
 * NULL with an exception set. */
void *array_of(Datapath *self, PyObject *given, Py_ssize_t size, bool writable, Py_ssize_t *count);

/* -- _python_files.c, _python_direct.c, _python_packs.c, _python_peers.c, _python_watched.c ---- */

/* Each method there, and how it takes its arguments. */
#define OTHER_METHODS(X)                                                                           \
    X(set_objects, METH_VARARGS), X(know_object, METH_VARARGS), X(forget_object, METH_O),          \
        X(name_given, METH_VARARGS), X(name_taken, METH_VARARGS), X(serve_missing, METH_VARARGS),  \
        X(serve_attributes, METH_O), X(forget_attributes, METH_O), X(bind, METH_VARARGS),          \
        X(bind_part, METH_VARARGS), X(drop_part, METH_O), X(watch, METH_VARARGS),                  \
        X(end_binding, METH_O), X(bind_written, METH_VARARGS), X(unbind, METH_VARARGS),            \
        X(rebind, METH_VARARGS), X(release_written, METH_VARARGS), X(written, METH_O),             \
        X(lowest, METH_VARARGS), X(is_open, METH_O), X(is_passed, METH_O), X(outdate, METH_O),     \
        X(answer, METH_VARARGS), X(reader, METH_VARARGS), X(store, METH_VARARGS),                  \
        X(taken, METH_O), X(reached, METH_O), X(was_given, METH_O), X(take_over, METH_NOARGS),     \
        X(requests, METH_NOARGS), X(requests_so_far, METH_NOARGS), X(refused_hints, METH_NOARGS),  \
        X(answer_error, METH_VARARGS), X(answer_ioctl, METH_VARARGS),                              \
        X(answer_missing, METH_VARARGS), X(answer_attributes, METH_VARARGS),                       \
        X(know_set_id, METH_VARARGS), X(opened, METH_VARARGS), X(set_pack, METH_VARARGS),          \
        X(lend, METH_VARARGS), X(take_back, METH_O), X(keep, METH_VARARGS), X(unkeep, METH_O),     \
        X(keep_unread, METH_VARARGS), X(set_peers, METH_VARARGS),                                  \
        X(keep_connection, METH_VARARGS), X(take_connection, METH_O), X(drop_connections, METH_O), \
        X(received, METH_VARARGS)

#define DECLARED(name, how) *datapath_##name(Datapath *self, PyObject *args)
PyObject OTHER_METHODS(DECLARED);

#endif
