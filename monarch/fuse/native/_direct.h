/* Requests that Python answers on its event loop without pyfuse3. The queue does not parse them
 * further than to see that they are whole. */
#ifndef MONARCH_DIRECT_H
#define MONARCH_DIRECT_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_wire.h"

/* A request in the queue. Its ``unique`` is the number of the pending table. */
struct direct_request {
    struct direct_request *next;
    union {
        struct in_header header;
        uint8_t bytes[1];
    } message;
};

/* The hints that the full queue has refused, and the process that sent the last of them. */
struct refused_hints {
    uint64_t count;
    uint32_t uid, pid;
};

struct direct {
    pthread_mutex_t lock;
    struct direct_request *first, **end;
    uint64_t count; /* of the requests so far; atomic */
    int hints;      /* those in the queue */
    struct refused_hints refused;
    int wake; /* an eventfd, readable while requests are in the queue; -1: not in use; atomic */
};

bool direct_prepare(struct direct *direct);
/* Begins to take requests; returns the eventfd, which belongs to ``direct``, or -1 and errno. */
int direct_begin(struct direct *direct);
/* Whether the queue has room for one more hint: each is much larger than any other request. One for
 * which it has none is counted as refused. */
bool direct_takes_hint(struct direct *direct, const struct in_header *request);
/* Those that were refused since the last call. */
struct refused_hints direct_refused(struct direct *direct);
/* Puts a copy of a request into the queue; false if pyfuse3 must answer it. */
bool direct_put(struct direct *direct, const struct in_header *request);
/* Takes all requests out of the queue, in their order; the caller frees each. */
struct direct_request *direct_take(struct direct *direct);
void direct_free(struct direct *direct);

#endif
