/* Fetches small files from the tiers of other nodes, by one HTTP request each. Python opens the
 * connections, at which the nodes have proved that they are members of the job; it says which
 * member is asked for a file, and decides whatever a member does not answer with the right
 * bytes. */
#ifndef MONARCH_PEERS_H
#define MONARCH_PEERS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "_fetch.h"

/* Values of ``givers`` instead of a member: why the last request for the file had no bytes. */
enum { GIVER_NONE = 0, GIVER_NOT_KEPT = 0xfffe, GIVER_SLOW = 0xffff };

enum { PEERS_LATENCIES = 64, PEERS_IDLE = 64, PEERS_IDLE_ALL = 1024, PEERS_REQUEST = 1024 };

/* A connection without a request. */
struct connection {
    struct connection *next;
    int fd;
    /* The limit of each wait, and the bytes that end one, as the kernel knows them. */
    uint32_t limit_us, wakes_at;
};

/* What was received from a member since Python asked last. ``late_us``: the time for which its
 * answers were late. Of requests at the same time each moment counts once. */
struct received {
    uint64_t files, bytes, slow, late_us;
    uint32_t latencies_us[PEERS_LATENCIES], latencies;
};

struct member {
    char *before, *after; /* the request, around the name of the file */
    pthread_mutex_t lock;
    struct connection *idle; /* the last used one first */
    uint32_t idle_count;     /* atomic */
    uint32_t drops;          /* how often its connections were dropped; atomic */
    uint32_t limit_us;       /* of each wait for it; atomic */
    uint64_t fair_us;        /* what each MiB of an answer may take without being late; atomic */
    uint64_t late_to_us;     /* the end of the last late request */
    struct received received;
};

struct peers {
    uint64_t entries; /* 0: there are no other nodes */
    uint32_t count, prepared;
    bool gives_bytes; /* Python gets the bytes of each file, not only where a copy is forced */
    /* By inode number. One more than the member that is asked for the file, or one of the values
     * above; and the digest of its bytes, 0: the member knows it. Python writes them, too;
     * atomic. */
    uint16_t *givers;
    uint64_t *digests;
    struct member *members;
    int32_t idle_all; /* atomic */
};

/* False without memory. The arrays must stay, with ``entries`` + 1 elements. */
bool peers_prepare(struct peers *peers, uint64_t entries, uint32_t count, uint16_t *givers,
                   uint64_t *digests);
/* Sets the request for the files of a member; false without memory, or if it is too long. */
bool peers_set_request(struct peers *peers, uint32_t member, const char *before, const char *after);
void peers_free(struct peers *peers);
/* Keeps a connection with this limit of its waits, which becomes that of the member. False if it is
 * not needed: then it still belongs to the caller. */
bool peers_keep(struct peers *peers, uint32_t member, int fd, uint32_t limit_us);
/* A connection, which then belongs to the caller; -1 if there is none. */
int peers_take(struct peers *peers, uint32_t member, uint32_t *limit_us);
/* Closes the connections without a request, and those with one after it. */
void peers_drop(struct peers *peers, uint32_t member);
/* What was received from a member since the last call; sets the limit of each wait for it, and the
 * fair time for each MiB. */
void peers_received(struct peers *peers, uint32_t member, uint32_t limit_us, uint64_t fair_us,
                    struct received *received);
/* Whether peers_fetch may find the bytes of a file. */
bool peers_may_fetch(struct peers *peers, uint64_t ino, uint64_t size);
/* The bytes of a file, as fetch; NULL if Python must handle it. */
struct content *peers_fetch(struct peers *peers, uint64_t ino, uint64_t size, int64_t *held);

#endif
