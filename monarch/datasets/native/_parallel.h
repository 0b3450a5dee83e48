/* Many pieces of work, done by the calling thread of Python and by threads that
 * do not need the interpreter. A thread ends soon after its work. */
#ifndef MONARCH_PARALLEL_H
#define MONARCH_PARALLEL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct parallel {
  /* Set by the caller: does piece ``index``, in any thread. Returns whether one
   * more thread is of use if it was late. */
  bool (*piece)(void *of, size_t index);
  void *of;
  size_t count;
  /* The pieces that have taken so long that they have waited for a server. */
  atomic_size_t late;

  atomic_size_t next;
  /* The threads besides the caller: those that it may still have, and those
   * that use this structure or may begin to. */
  atomic_int left;
  _Atomic uint32_t running;
  /* Only of the calling thread: its state while it does not hold the
   * interpreter, and whether a signal handler has raised an exception. */
  PyThreadState *state;
  bool raised;
};

/* Does all pieces, and releases the interpreter meanwhile. ``least`` threads
 * begin at once, and a piece that is late starts one more, up to ``most``. What
 * the caller does not set must be 0. Returns false with the exception of a
 * signal handler; then pieces may be left undone. */
bool parallel_run(struct parallel *work, int least, int most);

/* Must be called before. Returns false without memory. */
bool parallel_prepare(void);

#endif
