#include "_parallel.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A piece that takes longer than this, in nanoseconds, has waited for a server:
 * one more thread then waits beside it. */
#define LATE_NS 500000

/* The calling thread runs the signal handlers of Python after this time, in
 * nanoseconds. */
#define SIGNALS_NS 100000000

/* The calling thread waits for the last pieces without sleeping for this time,
 * in nanoseconds. */
#define AWAKE_NS 20000

/* A thread that has done its pieces stays awake for this share of their time,
 * and so many nanoseconds at most: a call that follows at once then need not
 * start one. */
#define STAY_SHARE 8
#define STAY_NS 100000

#define MOST_THREADS 256

/* For each thread that exists or is being started the work that is offered to
 * it, or whether it waits for some or is busy. */
enum { NO_THREAD, WAITING, BUSY };
static _Atomic uintptr_t threads[MOST_THREADS];

static void start_thread(struct parallel *work);

static int64_t now_ns(void) {
  struct timespec now;

  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Does the next piece, and starts a thread if that is late; false if none is
 * left. ``since`` is the time when the last piece was done. */
static bool do_next(struct parallel *work, int64_t *since) {
  size_t index = atomic_fetch_add(&work->next, 1);
  bool may_help;
  int64_t now;

  if (index >= work->count)
    return false;
  may_help = work->piece(work->of, index);
  now = now_ns();
  if (may_help && now - *since > LATE_NS) {
    atomic_fetch_add(&work->late, 1);
    if (atomic_load(&work->next) < work->count)
      start_thread(work);
  }
  *since = now;
  return true;
}

static void futex(_Atomic uint32_t *word, int operation, uint32_t value) {
  syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL,
          0);
}

/* A thread will not use ``work`` any more. The memory may be gone before the
 * call of the kernel, which does not use it. */
static void leave(struct parallel *work) {
  _Atomic uint32_t *running = &work->running;

  if (atomic_fetch_sub(running, 1) == 1)
    futex(running, FUTEX_WAKE, 1);
}

/* Puts ``value`` in the place of the first thread with the value ``before``;
 * NULL if there is none. */
static _Atomic uintptr_t *put(uintptr_t value, uintptr_t before) {
  int number;

  for (number = 0; number < MOST_THREADS; number++) {
    uintptr_t found = before;

    if (atomic_load(&threads[number]) == before &&
        atomic_compare_exchange_strong(&threads[number], &found, value))
      return &threads[number];
  }
  return NULL;
}

/* The next work of a thread; NULL, and the thread must end, if there is none
 * for ``stay_ns``. */
static struct parallel *next_work(_Atomic uintptr_t *thread, int64_t stay_ns) {
  int64_t until = now_ns() + stay_ns;

  for (;;) {
    uintptr_t found = atomic_load(thread);

    if (found != WAITING) {
      if (atomic_compare_exchange_strong(thread, &found, BUSY))
        return (struct parallel *)found;
    } else if (now_ns() >= until &&
               atomic_compare_exchange_strong(thread, &found, NO_THREAD))
      return NULL;
  }
}

static void *run_thread(void *arg) {
  _Atomic uintptr_t *thread = arg;
  struct parallel *work;
  int64_t stay_ns = 0;

  while ((work = next_work(thread, stay_ns))) {
    int64_t begin = now_ns(), since = begin;

    while (do_next(work, &since))
      ;
    leave(work);
    stay_ns = (since - begin) / STAY_SHARE;
    if (stay_ns > STAY_NS)
      stay_ns = STAY_NS;
    atomic_store(thread, WAITING);
  }
  return NULL;
}

/* Whether the thread could be started. Signals are for the threads of the
 * interpreter; the new thread inherits the mask. */
static bool create(_Atomic uintptr_t *thread) {
  pthread_attr_t detached;
  sigset_t all, before;
  pthread_t number;
  bool is_created;

  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  is_created = pthread_create(&number, &detached, run_thread, thread) == 0;
  pthread_attr_destroy(&detached);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return is_created;
}

/* Offers the work to one more thread, unless all are running. Without memory
 * for it there are fewer threads. */
static void start_thread(struct parallel *work) {
  _Atomic uintptr_t *thread;
  uintptr_t left;

  if (atomic_fetch_sub(&work->left, 1) <= 0)
    return;
  atomic_fetch_add(&work->running, 1);
  if (put((uintptr_t)work, WAITING))
    return;
  thread = put((uintptr_t)work, NO_THREAD);
  if (thread && create(thread))
    return;
  left = thread ? atomic_exchange(thread, NO_THREAD) : (uintptr_t)work;
  if (left > BUSY)
    leave((struct parallel *)left);
}

/* Waits until no other thread uses ``work``, of which no piece is left. */
static void wait_for_threads(struct parallel *work) {
  int64_t until = now_ns() + AWAKE_NS;
  uint32_t running;

  while (put(WAITING, (uintptr_t)work))
    leave(work);
  while ((running = atomic_load(&work->running)) != 0)
    if (now_ns() > until)
      futex(&work->running, FUTEX_WAIT, running);
}

/* In a forked process, which has none of the threads. */
static void forget(void) {
  int number;

  for (number = 0; number < MOST_THREADS; number++)
    atomic_store(&threads[number], NO_THREAD);
}

bool parallel_prepare(void) { return pthread_atfork(NULL, NULL, forget) == 0; }

/* Runs the handlers of the signals that have come. If one raises an exception,
 * no further piece is begun. */
static void run_signal_handlers(struct parallel *work) {
  PyEval_RestoreThread(work->state);
  if (PyErr_CheckSignals() != 0) {
    work->raised = true;
    atomic_store(&work->next, work->count);
  }
  work->state = PyEval_SaveThread();
}

static void run_all(struct parallel *work, int least) {
  int64_t since = now_ns(), checked = since;
  int number;

  for (number = 1; number < least && (size_t)number < work->count; number++)
    start_thread(work);
  while (!work->raised && do_next(work, &since))
    if (since - checked > SIGNALS_NS) {
      run_signal_handlers(work);
      checked = now_ns();
    }
  wait_for_threads(work);
}

bool parallel_run(struct parallel *work, int least, int most) {
  atomic_init(&work->left, most - 1 < MOST_THREADS ? most - 1 : MOST_THREADS);
  work->state = PyEval_SaveThread();
  run_all(work, least);
  PyEval_RestoreThread(work->state);
  return !work->raised;
}
