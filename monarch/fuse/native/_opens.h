/* The open inodes: the binding of each, and the number of its opens. All opens of an inode share
 * the binding of the first one until the last release: passthrough requires that, and all readers
 * then see one version. An inode whose open Python decided is counted here too, so that the two
 * never bind it differently at once.
 *
 * Entries lie in chunks that never move. So a read finds its entry by the number in the file
 * handle, without a lock; the kernel releases no handle while a read uses it. A file that is being
 * written is the exception: its descriptor may be closed while it is open. So each read or write
 * through it counts as a user of the descriptor, and the thread that unbinds it waits for them. The
 * former binding of the inode stays until the end, for readers that still use it. */
#ifndef MONARCH_OPENS_H
#define MONARCH_OPENS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "_fetch.h"

struct datapath;
struct pending;

enum open_kind {
    OPEN_SETTLING,    /* a request is settling the entry; others wait */
    OPEN_PYTHON,      /* pyfuse3 answers its reads */
    OPEN_RELAY,       /* read through ``fd``, or the copy by its name if that is -1 */
    OPEN_PASSTHROUGH, /* the kernel reads ``backing_id`` */
    OPEN_CONTENT,     /* all its bytes are in memory */
    OPEN_WRITTEN,     /* read and written through ``written``, or by pyfuse3 if that is NULL */
};

/* A list of requests, in order. */
struct waiters {
    struct pending *first, *last;
};

/* A file that is read and written. */
struct written {
    struct opens *opens;
    struct opens_stripe *stripe; /* the stripe with the lock for ``users`` */
    int fd;
    uint8_t tier;
    uint32_t users; /* the entry, and the running reads and writes */
};

struct open_inode {
    uint64_t ino;    /* 0: free; atomic */
    uint64_t size;   /* the size that the file must have */
    int64_t reached; /* the position of a reader that reads from the start; atomic */
    struct open_inode *next;
    struct content *content; /* atomic */
    uint32_t slot;
    uint32_t users; /* opens without a release, including unanswered ones, Python if ``held`` or
                       ``kept``, and the reads to come if ``unread`` */
    uint32_t python_handles; /* those of them with a plain handle of pyfuse3 */
    int32_t backing_id;
    int fd;                /* atomic */
    int part;              /* the descriptor of its partial copy plus 1, 0 if it has none; atomic */
    uint64_t part_size;    /* the size of the whole file; atomic */
    uint64_t watched_from; /* Python decides on reads from this offset on; 0: not; atomic */
    uint8_t part_tier;     /* 0: the partial copy must not be used any more; atomic */
    uint8_t kind;          /* atomic */
    uint8_t tier;          /* 0: the source */
    bool bound;            /* Python decided the open and gets the release; atomic */
    bool outdated;   /* the source has another version: Python gets an event of the last release */
    bool held;       /* Python has not released the written file yet */
    bool kept;       /* Python has given the bytes, before any open; it is one of the users */
    bool has_set_id; /* the mode may have set-ID bits that a user's write removes; atomic */
    uint32_t creating; /* those of the users with a creation that Python has not answered yet */
    uint32_t asking;   /* those of them with an open for writing that Python has not answered yet */
    struct written *written;
    struct written *leaving; /* unbound, but still used */
    uint32_t writer;         /* the user with whose rights it is written, or root; atomic */
    struct waiters waiters;  /* requests that wait until it is settled; under _waiting.c's lock */
    uint64_t changes;        /* changes since Python bound it */
    uint64_t lowest;         /* lowest offset changed since Python's last query; UINT64_MAX: none */
    uint64_t run_start, run_end; /* the range of consecutive writes that were not reported yet */
    uint64_t unread; /* of ``content``, for reads without an open: until they have these bytes */
    uint64_t unread_before; /* the same at the last call of opens_end_reading */
};

enum { OPENS_STRIPES = 16, OPENS_BUCKETS = 256, OPENS_CHUNK = 256, OPENS_CHUNKS = 1024 };
enum { OPENS_RUN_BYTES = 8 << 20 };

struct opens_stripe {
    pthread_mutex_t lock;
    pthread_cond_t unused; /* a written file is used by its entry only */
    struct open_inode *buckets[OPENS_BUCKETS];
    struct open_inode *free;
    struct open_inode *chunks[OPENS_CHUNKS]; /* atomic */
    uint32_t count;
};

struct opens {
    struct opens_stripe stripes[OPENS_STRIPES];
    int64_t users;       /* opens without a release, including Python's; atomic */
    int64_t backing_ids; /* registered with the kernel; atomic */
    /* Closes a descriptor of the source, without a limit of time. */
    void (*close_later)(struct datapath *dp, int fd);
    struct datapath *dp;
};

/* The descriptors to be closed after the last release: -1 and 0 if there is none. */
struct open_remains {
    int fd;
    int part;     /* plus 1, as in struct open_inode */
    uint8_t tier; /* of ``fd``; 0: closing it may wait for the source */
    int32_t backing_id;
    bool outdated;
    struct content *content;
    struct written *written;
};

bool opens_prepare(struct opens *opens, struct datapath *dp,
                   void (*close_later)(struct datapath *dp, int fd));
void opens_free(struct opens *opens);

/* Adds an open of ``ino``. With ``*fresh`` the caller must settle the entry; otherwise it may have
 * to wait until that is done. NULL without memory. */
struct open_inode *opens_take(struct opens *opens, uint64_t ino, bool *fresh);
/* The bytes of an entry of ``ino``, with one more user; NULL if it has none. */
struct content *opens_content(struct opens *opens, struct open_inode *entry, uint64_t ino);
/* A user of an entry asks Python to open it for writing (1), or has its answer (-1). */
void opens_ask(struct opens *opens, struct open_inode *entry, int change);
/* Adds a user to an entry that the caller uses already. */
void opens_hold(struct opens *opens, struct open_inode *entry);
/* Settles an entry. False if Python has bound it for writing meanwhile: then the descriptor and the
 * backing number still belong to the caller. */
bool opens_settle(struct opens *opens, struct open_inode *entry, enum open_kind kind, int fd,
                  int32_t backing_id, uint8_t tier, uint64_t size);
/* Settles an entry by all its bytes; the entry becomes a user of them. */
bool opens_settle_content(struct opens *opens, struct open_inode *entry, struct content *content);
/* Keeps the bytes of an inode that is not open, for opens to come, until opens_unkeep; the entry
 * becomes a user of them. With ``unread`` they are kept for reads to come, as by opens_count_read.
 * False if the inode is open, or without memory. */
bool opens_keep(struct opens *opens, uint64_t ino, struct content *content, uint64_t unread);
/* Ends opens_keep. Existing opens keep the bytes. */
void opens_unkeep(struct opens *opens, uint64_t ino, struct open_remains *to_close);
/* Counts ``nbytes`` that a read without an open gets from the bytes of an entry, which the caller
 * uses: they are kept until all were read, or until opens_end_reading. Returns whether this begins
 * with the call. */
bool opens_count_read(struct opens *opens, struct open_inode *entry, uint64_t ino, uint64_t nbytes);
/* Returns true if bytes of an inode are kept for reads to come, and some were read since the last
 * call; otherwise they are kept no more. ``now``: in any case. */
bool opens_end_reading(struct opens *opens, uint64_t ino, bool now, struct open_remains *to_close);
/* The entry of a handle, if it is that of the inode; takes no lock. */
struct open_inode *opens_at(struct opens *opens, uint32_t slot, uint64_t ino);
/* Binds an inode that Python opens. False if it has readers that must stay with Python. If true,
 * the descriptor and the backing number belong to the entry. */
bool opens_bind(struct opens *opens, uint64_t ino, enum open_kind kind, int fd, int32_t backing_id,
                uint8_t tier, uint64_t size);
/* Sets the ``size`` of the file of an inode that Python bound. False if it is not bound. */
bool opens_resize(struct opens *opens, uint64_t ino, uint64_t size);
/* Whether Python must answer an open that uses the entry. */
bool opens_needs_python(struct opens *opens, struct open_inode *entry);
/* Ends the binding of an inode that Python has bound for reading, after Python has closed its own.
 * Its remaining opens are not answered yet, and are bound anew. */
void opens_end_binding(struct opens *opens, uint64_t ino, struct open_remains *to_close);
/* Lets reads of an inode that Python opens, or has bound, be answered from a partial copy of a file
 * of ``size`` bytes. If true, ``fd`` belongs to the entry, or ``*spare`` is set. */
bool opens_bind_part(struct opens *opens, uint64_t ino, int fd, uint8_t tier, uint64_t size,
                     bool *spare);
/* Reads of the inode are not answered from its partial copy any more. */
void opens_drop_part(struct opens *opens, uint64_t ino);
/* Sends reads of a bound inode that end behind ``offset`` to Python; 0 ends this. */
void opens_watch(struct opens *opens, uint64_t ino, uint64_t offset);
/* Makes the last release an event; false if the inode is not open with a copy in a tier. */
bool opens_outdate(struct opens *opens, uint64_t ino);
/* Whether opens_bind can succeed now. */
bool opens_can_bind(struct opens *opens, uint64_t ino);
/* Called with Python's answer to an open: returns whether the inode is bound, and for writing if
 * the open writes; otherwise the open counts as one with a plain handle. */
bool opens_answered(struct opens *opens, struct open_inode *entry, bool writes);
/* Removes an open. False if the inode is not open. */
bool opens_drop(struct opens *opens, uint64_t ino, bool by_python, struct open_remains *to_close);
/* Binds an open inode to a file that is written, until opens_release_written. With ``create`` the
 * inode need not be open yet and gets one more user, for opens_created. NULL on failure. Otherwise
 * ``fd`` belongs to the entry, or is closed if the inode was bound before. It is written with the
 * rights of ``writer`` from now on; 0: with those of the process that writes. */
struct open_inode *opens_bind_written(struct opens *opens, uint64_t ino, int fd, uint8_t tier,
                                      bool create, uint32_t writer);
/* Ends the binding of a written inode, after Python's last query of its changes. Creations that
 * Python has not answered yet fail. Existing readers continue. */
void opens_release_written(struct opens *opens, uint64_t ino, struct open_remains *to_close);
/* The entry that Python has bound for the creation that it answers now; NULL if there is none. */
struct open_inode *opens_created(struct opens *opens, uint64_t ino);
/* The file of a written inode, with one more user; NULL if it is not bound now. */
struct written *opens_use(struct opens *opens, struct open_inode *entry, uint64_t ino);
void opens_unuse(struct written *file);
/* Records that bytes from ``offset`` on will be changed. opens_wrote records it again: a query in
 * between may be answered before the change. */
void opens_changing(struct opens *opens, struct open_inode *entry, uint64_t ino, uint64_t offset);
/* Counts a write, or with a ``size`` of 0 another change from ``offset`` on. Returns the length of
 * a long range of consecutive writes that ends with this one, and begins a new range; else 0. */
uint64_t opens_wrote(struct opens *opens, struct open_inode *entry, uint64_t ino, uint64_t offset,
                     uint64_t size);
/* Unbinds the file and waits for its users; false if the inode is not bound for writing. */
bool opens_unbind(struct opens *opens, uint64_t ino);
/* Binds another descriptor after opens_unbind; false if the inode is not bound for writing, or not
 * unbound. If true, ``fd`` belongs to the entry. */
bool opens_rebind(struct opens *opens, uint64_t ino, int fd, uint8_t tier);
/* Records whether the mode of an open inode may have set-ID bits. */
void opens_know_set_id(struct opens *opens, uint64_t ino, bool has_set_id);
/* The number of changes since the inode was bound. */
uint64_t opens_changes(struct opens *opens, uint64_t ino);
/* The lowest offset that was changed since the inode was bound, or since the last call with
 * ``forget``; UINT64_MAX if there is none. */
uint64_t opens_lowest(struct opens *opens, uint64_t ino, bool forget);
/* Whether a process has the inode open, or is opening it. */
bool opens_is_open(struct opens *opens, uint64_t ino);
/* Whether the kernel reads the inode by passthrough. */
bool opens_is_passed(struct opens *opens, uint64_t ino);
/* The position, in bytes, of a reader that reads an open file from its start. */
int64_t opens_reached(struct opens *opens, uint64_t ino);
/* Removes a remaining entry; false if there is none. */
bool opens_pop(struct opens *opens, struct open_remains *to_close);

#endif
