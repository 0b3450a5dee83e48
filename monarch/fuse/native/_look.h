/* What the scan of a source asks for each entry of a directory. */
#ifndef MONARCH_LOOK_H
#define MONARCH_LOOK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* look(directory, names, parent, without) for the tuple ``names`` of entries of an open directory:
 * a bytearray with a record for each (namespace/schema.py), zeros where there is none, and a list
 * of (place, error, device, closed, access, inherited) for each entry that is not just a file with
 * one name. ``error`` is why there is no record, ``closed`` why the entry's access control list
 * cannot be read, each an errno or 0. ``access`` and ``inherited`` are its lists, the second one
 * what is made in a directory. They are not asked for on the device ``without``, which knows no
 * lists. A symbolic link is not followed. Waits for the file system without the interpreter's lock.
 */
PyObject *look(PyObject *module, PyObject *args);

#endif
