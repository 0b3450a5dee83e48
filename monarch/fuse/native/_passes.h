/* Counts many opens at once in a pass over files. */
#ifndef MONARCH_PASSES_H
#define MONARCH_PASSES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* count_opens(opens, at, keep, first, seen, mark, run, window, new, counts): counts ``opens``,
 * inode numbers of 32 bits, from the index ``at`` on. Returns the index of the next one: a pass may
 * be over, ``new`` may be full, a window may be complete and be one of the last ``keep`` opens, or
 * all are counted. telemetry/passes.py describes the other arguments. */
PyObject *count_opens(PyObject *module, PyObject *args);

#endif
