/* The copies of a mount's files in its tiers (copies.py). */
#ifndef MONARCH_COPIES_H
#define MONARCH_COPIES_H

#include <stddef.h>
#include <stdint.h>

/* copies.py has the same numbers. ``directories`` has for each place of a
 * record the descriptor of the directory of a tier, or -1. */
struct copies {
  int64_t device;   /* of the mount */
  int64_t has_acls; /* whether its files may have access control lists */
  int64_t term;     /* of the records that need no check */
  int64_t records;  /* a descriptor */
  int64_t directories[];
};

/* Opens the copy of the file ``name`` beneath ``directory`` if the caller may
 * read the file, and the copy is of its present version; ``*size`` is then
 * their size. -1 if the file must be opened itself. ``count`` is the number of
 * directories. */
int copy_open(const struct copies *copies, size_t count, int directory,
              const char *name, int64_t *size);

#endif
