/* Extended attributes of the source; what the scan of a source needs beside what Python has. */
#ifndef MONARCH_XATTRS_H
#define MONARCH_XATTRS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* read_xattrs(directory, names, attribute): a list of (index, value) for each of the tuple
 * ``names`` in the directory that has the attribute, and of (index, errno) for each that could not
 * be asked. A symbolic link is not followed. Waits for the file system without the interpreter's
 * lock. */
PyObject *read_xattrs(PyObject *module, PyObject *args);

#endif
