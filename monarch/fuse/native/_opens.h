/* The open inodes: what each is bound to, and how many opens share it.
 *
 * All opens of an inode share the first one's binding until the last is released: the kernel
 * demands it of passthrough, and so readers see one version. An inode whose open Python decided is
 * counted here too, so that the two never bind it differently at once.
 *
 * Entries lie in chunks that never move, so a read finds its own by the number in its file handle,
 * without a lock; the kernel lets no handle go while it reads through it.
 *
 * A file that is written is the exception: its descriptor may be taken away while it is open, so
 * whoever reads or writes through it has a share of it, and who takes it away waits for them. What
 * the inode was bound to before stays until the end, for those who still read it.
 */
#ifndef MONARCH_OPENS_H
#define MONARCH_OPENS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "_fetch.h"

struct datapath;
struct pending;

enum open_kind {
    OPEN_SETTLING,    /* somebody is finding out; others wait */
    OPEN_PYTHON,      /* pyfuse3 answers its reads */
    OPEN_RELAY,       /* we read ``fd``, or the copy by its name if that is -1 */
    OPEN_PASSTHROUGH, /* the kernel reads ``backing_id`` */
    OPEN_CONTENT,     /* we have all its bytes */
    OPEN_WRITTEN,     /* we read and write ``written``, or pyfuse3 does if there is none */
};

/* Requests in a list, one after another. */
struct waiters {
    struct pending *first, *last;
};

/* A file that is read and written. */
struct written {
    struct opens *opens;
    struct opens_stripe *stripe; /* whose lock the users are counted under */
    int fd;
    uint8_t tier;
    uint32_t users; /* the entry it is of, and the reads and writes that are under way */
};

struct open_inode {
    uint64_t ino;    /* 0: free; atomic */
    uint64_t size;   /* bytes that the file must have */
    int64_t reached; /* how far a reader has gone through from the start; atomic */
    struct open_inode *next;
    struct content *content; /* atomic */
    uint32_t slot;
    uint32_t users; /* opens not released yet, those under way included, and Python if it holds */
    uint32_t python_handles; /* of these, answered with a handle of Python's own */
    int32_t backing_id;
    int fd;        /* atomic */
    uint8_t kind;  /* atomic */
    uint8_t tier;  /* 0: the source */
    bool bound;    /* Python decided and wants to hear of the release; atomic */
    bool outdated; /* the source has another version: Python wants to hear of the last release */
    bool held;     /* Python has yet to say that nobody writes it any more */
    uint32_t creating; /* of the users, those whose creation Python has yet to answer */
    struct written *written;
    struct written *leaving;     /* taken away, and somebody still uses it */
    struct waiters waiters;      /* for it to be settled; _waiting.c's, under its lock */
    uint64_t changes;            /* made through it since Python bound it */
    uint64_t lowest;             /* offset that was changed since Python asked; UINT64_MAX: none */
    uint64_t run_start, run_end; /* what was written one after another, and not told of yet */
};

enum { OPENS_STRIPES = 16, OPENS_BUCKETS = 256, OPENS_CHUNK = 256, OPENS_CHUNKS = 1024 };
enum { OPENS_RUN_BYTES = 8 << 20 };

struct opens_stripe {
    pthread_mutex_t lock;
    pthread_cond_t unused; /* a written file has no more users than its entry */
    struct open_inode *buckets[OPENS_BUCKETS];
    struct open_inode *free;
    struct open_inode *chunks[OPENS_CHUNKS]; /* atomic */
    uint32_t count;
};

struct opens {
    struct opens_stripe stripes[OPENS_STRIPES];
    int64_t users;       /* opens not released, Python's included; atomic */
    int64_t backing_ids; /* registered with the kernel; atomic */
    /* Closes a descriptor of the source, which may take as long as the source likes. */
    void (*close_later)(struct datapath *dp, int fd);
    struct datapath *dp;
};

/* What the last release leaves to be closed: -1 and 0 stand for nothing. */
struct open_remains {
    int fd;
    uint8_t tier; /* of fd; 0: closing it may wait for the source */
    int32_t backing_id;
    bool outdated;
    struct content *content;
    struct written *written;
};

bool opens_prepare(struct opens *opens, struct datapath *dp,
                   void (*close_later)(struct datapath *dp, int fd));
void opens_free(struct opens *opens);

/* One more open of ``ino``; with ``*fresh`` the caller settles the entry, else it may have to wait
 * until that is done. NULL if there is no room. */
struct open_inode *opens_take(struct opens *opens, uint64_t ino, bool *fresh);
/* The bytes of an entry of ``ino`` that has them, with one more user; NULL if it is none. */
struct content *opens_content(struct opens *opens, struct open_inode *entry, uint64_t ino);
/* One more for an entry that the caller has a share of. */
void opens_hold(struct opens *opens, struct open_inode *entry);
/* False if Python has bound it meanwhile, to be written: then what it should be bound to stays the
 * caller's. */
bool opens_settle(struct opens *opens, struct open_inode *entry, enum open_kind kind, int fd,
                  int32_t backing_id, uint8_t tier, uint64_t size);
/* The same with all the bytes, of which the entry becomes a user. */
bool opens_settle_content(struct opens *opens, struct open_inode *entry, struct content *content);
/* The entry that a handle names, if it is of that inode; takes no lock. */
struct open_inode *opens_at(struct opens *opens, uint32_t slot, uint64_t ino);
/* Binds an inode that Python opens. False if it has readers that must stay with Python. The kind
 * and what is bound are the caller's until then, and the entry's after. */
bool opens_bind(struct opens *opens, uint64_t ino, enum open_kind kind, int fd, int32_t backing_id,
                uint8_t tier, uint64_t size);
/* The file behind an inode that Python bound has ``size`` bytes by now. False if it is not bound.
 */
bool opens_resize(struct opens *opens, uint64_t ino, uint64_t size);
/* Have the last release told; false if the inode is not open with a copy of a tier. */
bool opens_outdate(struct opens *opens, uint64_t ino);
/* Whether opens_bind would be of use now. */
bool opens_can_bind(struct opens *opens, uint64_t ino);
/* Python's answer to an open goes out: true if it is bound, and can be written if that is wanted,
 * else one more plain handle. */
bool opens_answered(struct opens *opens, struct open_inode *entry, bool writes);
/* One open less. False if the inode is not open at all. */
bool opens_drop(struct opens *opens, uint64_t ino, bool by_python, struct open_remains *to_close);
/* Binds an open inode to a file that is written, until opens_release_written; ``create``: also one
 * that is not open yet, with one more user for opens_created. NULL if it cannot be. ``fd`` is the
 * entry's then, or closed if the inode was bound before. */
struct open_inode *opens_bind_written(struct opens *opens, uint64_t ino, int fd, uint8_t tier,
                                      bool create);
/* Python has counted the changes and looks no more; creations that it has yet to answer fail. Those
 * who still read it go on. */
void opens_release_written(struct opens *opens, uint64_t ino, struct open_remains *to_close);
/* The entry that Python has bound for a creation that it answers now; NULL if it has not. */
struct open_inode *opens_created(struct opens *opens, uint64_t ino);
/* A share of a written inode's file; NULL if there is none now. */
struct written *opens_use(struct opens *opens, struct open_inode *entry, uint64_t ino);
void opens_unuse(struct written *file);
/* Bytes from ``offset`` on are about to be changed. Who counts the change tells it once more: what
 * was asked for in between may be older than the change. */
void opens_changing(struct opens *opens, struct open_inode *entry, uint64_t ino, uint64_t offset);
/* Counts a change of the file from ``offset`` on. */
void opens_changed(struct opens *opens, struct open_inode *entry, uint64_t ino, uint64_t offset);
/* Counts a write. Once many bytes were written one after another, up to the end of this write, they
 * are told, and the next are counted anew; else 0. */
uint64_t opens_wrote(struct opens *opens, struct open_inode *entry, uint64_t ino, uint64_t offset,
                     uint64_t size);
/* Takes the file away and waits until nobody uses it; false if the inode is not bound so. */
bool opens_unbind(struct opens *opens, uint64_t ino);
/* Gives it another one; false if it is not bound so, or has one. ``fd`` is the entry's then. */
bool opens_rebind(struct opens *opens, uint64_t ino, int fd, uint8_t tier);
/* The changes made since it was bound. */
uint64_t opens_changes(struct opens *opens, uint64_t ino);
/* The lowest offset that was changed since it was bound, or since this was asked with ``forget``;
 * UINT64_MAX if none was. */
uint64_t opens_lowest(struct opens *opens, uint64_t ino, bool forget);
/* Whether a process has it open, or is about to. */
bool opens_is_open(struct opens *opens, uint64_t ino);
/* Whether the kernel reads it by itself. */
bool opens_is_passed(struct opens *opens, uint64_t ino);
/* How far a reader has gone through an open file from its start, in bytes. */
int64_t opens_reached(struct opens *opens, uint64_t ino);
/* Takes out whatever is left, one entry a call; false at the end. */
bool opens_pop(struct opens *opens, struct open_remains *to_close);

#endif
