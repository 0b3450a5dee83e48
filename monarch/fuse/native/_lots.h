/* Writes many small copies into a tier in one call. */
#ifndef MONARCH_LOTS_H
#define MONARCH_LOTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* write_copies(root, directory, seals, rows, contents, terms, term): writes each buffer of the
 * tuple ``contents`` to a stage beneath ``root``, the tier's own directory, seals it as the version
 * in its row if ``seals``, and makes it the copy beneath ``directory``. ``rows`` has for each the
 * inode number and the version, in 40 bytes. Returns an error number for each, 0 for none, as
 * 32-bit numbers in bytes; a copy with an error leaves no file. A copy is not begun, and gets
 * ECANCELED, when the 64-bit number in ``terms`` is no longer ``term``. Waits for the file system
 * without the interpreter's lock. */
PyObject *write_copies(PyObject *module, PyObject *args);

#endif
