/* Reads the attributes of a directory's entries for the scan of a source. */
#ifndef MONARCH_LOOK_H
#define MONARCH_LOOK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* look(directory, names, parent, without): for the tuple ``names`` of entries of an open directory
 * returns a bytearray with a record of each (namespace/schema.py), zeros for an entry without a
 * record, and a list of (place, error, device, closed, access, inherited) for each entry that is
 * not just a file with one name. ``error`` is why there is no record, ``closed`` why the entry's
 * access control list cannot be read; each is an errno or 0. ``access`` and ``inherited`` are its
 * access control list and its default list. They are not requested on the device ``without``, which
 * does not support lists. A symbolic link is not followed. Waits for the file system without the
 * interpreter's lock. */
PyObject *look(PyObject *module, PyObject *args);

#endif
