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
/* Converters of PyArg_ParseTuple to an int: the number of a tier, and that of a tier or 0, the
 * source. */
int to_tier(PyObject *given, void *number);
int to_place(PyObject *given, void *number);

/* -- _python_files.c --------------------------------------------------------------------------- */

PyObject *datapath_set_objects(Datapath *self, PyObject *args);
PyObject *datapath_know_object(Datapath *self, PyObject *args);
PyObject *datapath_forget_object(Datapath *self, PyObject *number);
PyObject *datapath_name_given(Datapath *self, PyObject *args);
PyObject *datapath_name_taken(Datapath *self, PyObject *args);
PyObject *datapath_tell_missing(Datapath *self, PyObject *args);
PyObject *datapath_tell_attributes(Datapath *self, PyObject *args);
PyObject *datapath_forget_attributes(Datapath *self, PyObject *number);
PyObject *datapath_bind(Datapath *self, PyObject *args);
PyObject *datapath_bind_written(Datapath *self, PyObject *args);
PyObject *datapath_unbind(Datapath *self, PyObject *args);
PyObject *datapath_rebind(Datapath *self, PyObject *args);
PyObject *datapath_release_written(Datapath *self, PyObject *args);
PyObject *datapath_written(Datapath *self, PyObject *number);
PyObject *datapath_lowest(Datapath *self, PyObject *args);
PyObject *datapath_is_open(Datapath *self, PyObject *number);
PyObject *datapath_is_passed(Datapath *self, PyObject *number);
PyObject *datapath_outdate(Datapath *self, PyObject *number);
PyObject *datapath_answer(Datapath *self, PyObject *args);
PyObject *datapath_store(Datapath *self, PyObject *args);
PyObject *datapath_taken(Datapath *self, PyObject *number);
PyObject *datapath_reached(Datapath *self, PyObject *number);
PyObject *datapath_was_given(Datapath *self, PyObject *number);

/* -- _python_direct.c -------------------------------------------------------------------------- */

PyObject *datapath_take_over(Datapath *self, PyObject *ignored);
PyObject *datapath_requests(Datapath *self, PyObject *ignored);
PyObject *datapath_requests_so_far(Datapath *self, PyObject *ignored);
PyObject *datapath_answer_error(Datapath *self, PyObject *args);
PyObject *datapath_answer_missing(Datapath *self, PyObject *args);
PyObject *datapath_answer_attributes(Datapath *self, PyObject *args);

#endif
