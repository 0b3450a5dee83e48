/* Names and attributes, answered from the mapped blocks of the snapshot (namespace/schema.py).
 *
 * Blocks are published one by one, each after Python has verified its checksum. What a block that
 * was not published would tell, and what the marks say is no longer as the snapshot has it, is
 * Python's to answer: NAMES_ASK. Nothing here waits, allocates or locks.
 */
#ifndef MONARCH_NAMES_H
#define MONARCH_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_wire.h"

enum names_table { NAMES_INODES, NAMES_NAMES, NAMES_CHILDREN, NAMES_TABLES };
/* NAMES_OTHERS: the snapshot has no such name, and others may have. */
enum names_answer { NAMES_YES, NAMES_NONE, NAMES_ASK, NAMES_OTHERS };

struct names_block {
    const uint8_t *bytes; /* set last, atomically */
    size_t size;
};

/* The access control lists of entries, as they are told to the kernel but for the mode bits
 * (acl.py).
 * ``inherited``: the default list of a directory. */
struct names_acls {
    const char *access, *inherited;
    size_t access_size, inherited_size;
};

struct names {
    uint64_t entries;
    const uint8_t *marks; /* a byte for each inode, shared with Python */
    uint8_t differs;      /* the mark of an inode that is not as the snapshot tells */
    bool ask_xattrs;      /* files may have attributes that users have set */
    bool ask;             /* others may make names: what is missing, and listings, are not told */
    size_t blocks[NAMES_TABLES];
    struct names_block *table[NAMES_TABLES];
    size_t acl_count; /* 0: the kernel does not decide with lists */
    struct names_acls *acls;
};

/* What a file at the source must still be for the snapshot to be right about it. */
struct identity {
    uint64_t size, source_ino;
    int64_t mtime_ns, ctime_ns;
};

/* False if there is no memory. */
bool names_prepare(struct names *names, uint64_t entries, uint64_t directories);
void names_free(struct names *names);
/* False for a block that the table cannot have. */
bool names_publish(struct names *names, unsigned table, size_t number, const uint8_t *bytes,
                   size_t size);

/* Whether the inode is one of the snapshot's, and as it tells. */
bool names_tells(const struct names *names, uint64_t ino);
/* The version of a regular file; NAMES_NONE for anything else. */
enum names_answer names_version(const struct names *names, uint64_t ino, struct identity *identity);
/* The same, and where the source has it, relative to its root; NAMES_ASK for a path too long. */
enum names_answer names_file(const struct names *names, uint64_t ino, struct identity *identity,
                             char *path, size_t room);
/* The access control lists of an entry and its mode; NAMES_NONE if it has none. */
enum names_answer names_acls(const struct names *names, uint64_t ino,
                             const struct names_acls **acls, uint32_t *mode);
/* Fill in the times, in ns since the epoch, and the size of a block. */
void names_times(struct attr *attr, int64_t atime_ns, int64_t mtime_ns, int64_t ctime_ns);
enum names_answer names_attributes(const struct names *names, uint64_t ino, struct attr *attr);
/* Of a directory that is not as the snapshot tells, NAMES_ASK or, if it has not got the name,
 * NAMES_OTHERS; so, too, of any directory where names may be made. */
enum names_answer names_lookup(const struct names *names, uint64_t parent, const char *name,
                               size_t length, struct entry_out *entry);
/* Every listing begins with "." and "..". */
enum { NAMES_DOTS = 2 };
/* Fills ``buffer`` with entries from the index ``offset`` on, as READDIRPLUS (``plus``) or READDIR;
 * ``*used`` is what they take, 0 at the end. */
enum names_answer names_list(const struct names *names, uint64_t ino, uint64_t offset, bool plus,
                             uint8_t *buffer, size_t size, size_t *used);

/* How long the kernel may keep names and attributes, in seconds; they change only as we tell. */
#define NAMES_VALID_S 86400

#endif
