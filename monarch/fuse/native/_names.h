/* Names and attributes, answered from the mapped blocks of the snapshot (namespace/schema.py).
 * Blocks are published one by one, after Python has verified the checksum of each. NAMES_ASK means
 * that Python must answer: the block is not published, or the marks say that the entry differs from
 * the snapshot. Nothing here waits, allocates or locks. */
#ifndef MONARCH_NAMES_H
#define MONARCH_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "_wire.h"

enum names_table { NAMES_INODES, NAMES_NAMES, NAMES_CHILDREN, NAMES_TABLES };
/* NAMES_OTHERS: the snapshot does not have the name, but it may exist. */
enum names_answer { NAMES_YES, NAMES_NONE, NAMES_ASK, NAMES_OTHERS };

struct names_block {
    const uint8_t *bytes; /* set last, atomically */
    size_t size;
};

/* The access control lists of entries in the kernel's format, without the mode bits (acl.py).
 * ``inherited`` is the default list of a directory. */
struct names_acls {
    const char *access, *inherited;
    size_t access_size, inherited_size;
};

struct names {
    uint64_t entries;
    const uint8_t *marks; /* a byte for each inode, shared with Python */
    uint8_t differs;      /* the mark of an inode that differs from the snapshot */
    int ask_xattrs;       /* files may have attributes that users have set */
    int ask; /* others may create names: missing names and listings are not answered here */
    size_t blocks[NAMES_TABLES];
    struct names_block *table[NAMES_TABLES];
    size_t acl_count; /* 0: the kernel does not use access control lists */
    struct names_acls *acls;
};

/* The properties by which a file at the source is the version in the snapshot. */
struct identity {
    uint64_t size, source_ino;
    int64_t mtime_ns, ctime_ns;
};

/* False without memory. */
bool names_prepare(struct names *names, uint64_t entries, uint64_t directories);
void names_free(struct names *names);
/* False for a block that the table cannot have. */
bool names_publish(struct names *names, unsigned table, size_t number, const uint8_t *bytes,
                   size_t size);

/* Whether the inode is in the snapshot and does not differ from it. */
bool names_is_current(const struct names *names, uint64_t ino);
/* The version of a regular file; NAMES_NONE for any other entry. */
enum names_answer names_version(const struct names *names, uint64_t ino, struct identity *identity);
/* The version, and the path at the source, relative to its root; NAMES_ASK if the path is too
 * long. */
enum names_answer names_file(const struct names *names, uint64_t ino, struct identity *identity,
                             char *path, size_t room);
/* The access control lists of an entry and its mode; NAMES_NONE if it has none. */
enum names_answer names_acls(const struct names *names, uint64_t ino,
                             const struct names_acls **acls, uint32_t *mode);
/* Fills in the times, in ns since the epoch, and the block size. */
void names_times(struct attr *attr, int64_t atime_ns, int64_t mtime_ns, int64_t ctime_ns);
enum names_answer names_attributes(const struct names *names, uint64_t ino, struct attr *attr);
/* The inode number of a child in the snapshot; 0 if it has none, or the block is not published. */
uint64_t names_child(const struct names *names, uint64_t parent, const char *name, size_t length);
/* Looks a name up. For a directory that differs from the snapshot, or may get names, the answer is
 * NAMES_ASK or, if the snapshot does not have the name, NAMES_OTHERS. */
enum names_answer names_lookup(const struct names *names, uint64_t parent, const char *name,
                               size_t length, struct entry_out *entry);
/* Every listing begins with "." and "..". */
enum { NAMES_DOTS = 2 };
/* Fills ``buffer`` with entries from the index ``offset`` on, as READDIRPLUS (``plus``) or READDIR;
 * ``*used`` is the length of the answer in bytes, 0 at the end. */
enum names_answer names_list(const struct names *names, uint64_t ino, uint64_t offset, bool plus,
                             uint8_t *buffer, size_t size, size_t *used);

/* How long the kernel may keep names and attributes, in seconds: changes are notified to it. */
#define NAMES_VALID_S 86400

#endif
