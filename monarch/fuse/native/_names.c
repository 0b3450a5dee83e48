#include "_names.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "_record.h"

enum { SHIFT = 12, BLOCK = 1 << SHIFT, MASK = BLOCK - 1 };
enum { ALIAS = 1, UNREADABLE = 2, ACL_SHIFT = 8 };

struct text {
    const uint8_t *bytes;
    size_t length;
};

/* The state of a listing that is being filled. */
struct listing {
    uint8_t *buffer;
    size_t size, used;
    bool plus;
};

static uint32_t u32_at(const uint8_t *bytes) {
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return le32toh(value);
}

bool names_prepare(struct names *names, uint64_t entries, uint64_t directories) {
    names->entries = entries;
    names->blocks[NAMES_INODES] = names->blocks[NAMES_NAMES] = (entries + MASK) >> SHIFT;
    names->blocks[NAMES_CHILDREN] = (directories + MASK) >> SHIFT;
    for (int table = 0; table < NAMES_TABLES; table++) {
        names->table[table] = calloc(names->blocks[table] + 1, sizeof(struct names_block));
        if (!names->table[table])
            return false;
    }
    return true;
}

void names_free(struct names *names) {
    for (int table = 0; table < NAMES_TABLES; table++)
        free(names->table[table]);
    free(names->acls);
}

bool names_publish(struct names *names, unsigned table, size_t number, const uint8_t *bytes,
                   size_t size) {
    if (table >= NAMES_TABLES || number >= names->blocks[table])
        return false;
    struct names_block *block = &names->table[table][number];
    block->size = size;
    __atomic_store_n(&block->bytes, bytes, __ATOMIC_RELEASE);
    return true;
}

static const uint8_t *block_at(const struct names *names, enum names_table table, uint64_t number,
                               size_t *size) {
    if (number >= names->blocks[table])
        return NULL;
    const struct names_block *block = &names->table[table][number];
    const uint8_t *bytes = __atomic_load_n(&block->bytes, __ATOMIC_ACQUIRE);
    *size = bytes ? block->size : 0;
    return bytes;
}

static bool differs(const struct names *names, uint64_t ino) {
    return __atomic_load_n(&names->marks[ino], __ATOMIC_ACQUIRE) & names->differs;
}

static bool record_at(const struct names *names, uint64_t slot, struct record *record) {
    if (slot < 1 || slot > names->entries)
        return false;
    size_t size, at = ((slot - 1) & MASK) * RECORD_BYTES;
    const uint8_t *block = block_at(names, NAMES_INODES, (slot - 1) >> SHIFT, &size);
    if (!block || at + RECORD_BYTES > size)
        return false;
    memcpy(record, block + at, RECORD_BYTES);
#if __BYTE_ORDER != __LITTLE_ENDIAN
#error "the records of a snapshot are little-endian; write the conversion before building here"
#endif
    return true;
}

static bool name_at(const struct names *names, uint64_t slot, struct text *name) {
    size_t size, at = ((slot - 1) & MASK) * 4;
    const uint8_t *block = block_at(names, NAMES_NAMES, (slot - 1) >> SHIFT, &size);
    if (!block || at + 8 > size)
        return false;
    uint32_t start = u32_at(block + at), stop = u32_at(block + at + 4);
    if (start > stop || stop > size)
        return false;
    *name = (struct text){block + start, stop - start};
    return true;
}

/* The record at a place of the table; for an alias, the record of the file's first name. */
static bool resolved(const struct names *names, uint64_t slot, uint64_t *ino,
                     struct record *record) {
    if (!record_at(names, slot, record))
        return false;
    *ino = slot;
    if (record->flags & ALIAS) {
        *ino = record->extra;
        return record_at(names, *ino, record);
    }
    return true;
}

static bool children_of(const struct names *names, uint64_t ino, uint64_t *first, uint64_t *end) {
    struct record record;
    if (!record_at(names, ino, &record))
        return false;
    *first = *end = 1;
    if (!S_ISDIR(record.mode))
        return true;
    /* Python marked the entry: the snapshot may be wrong. */
    if (record.flags & UNREADABLE)
        return false;
    size_t size, at = (record.extra & MASK) * 4;
    const uint8_t *block = block_at(names, NAMES_CHILDREN, record.extra >> SHIFT, &size);
    if (!block || at + 8 > size)
        return false;
    *first = u32_at(block + at);
    *end = u32_at(block + at + 4);
    return *first >= 1 && *first <= *end && *end <= names->entries + 1;
}

/* Times before 1970 are negative; their nanoseconds are positive all the same. */
static void split(int64_t ns, uint64_t *seconds, uint32_t *rest) {
    *rest = (uint32_t)((ns % 1000000000 + 1000000000) % 1000000000);
    *seconds = (uint64_t)((ns - *rest) / 1000000000);
}

void names_times(struct attr *attr, int64_t atime_ns, int64_t mtime_ns, int64_t ctime_ns) {
    attr->blksize = 4096;
    split(atime_ns, &attr->atime, &attr->atimensec);
    split(mtime_ns, &attr->mtime, &attr->mtimensec);
    split(ctime_ns, &attr->ctime, &attr->ctimensec);
}

static void fill(struct attr *attr, uint64_t ino, const struct record *record) {
    *attr = (struct attr){
        .ino = ino,
        .size = record->size,
        .mode = record->mode,
        .nlink = record->nlink,
        .uid = record->uid,
        .gid = record->gid,
    };
    int64_t mtime_ns = (int64_t)record->mtime_ns;
    names_times(attr, mtime_ns, mtime_ns, (int64_t)record->ctime_ns);
    if (S_ISREG(record->mode))
        attr->blocks = record->extra;
    else if (S_ISDIR(record->mode))
        attr->blocks = (record->size + 511) / 512;
    else if (S_ISCHR(record->mode) || S_ISBLK(record->mode))
        attr->rdev = (uint32_t)record->extra;
}

static void fill_entry(struct entry_out *entry, uint64_t ino, const struct record *record) {
    memset(entry, 0, sizeof *entry);
    entry->nodeid = ino;
    entry->entry_valid = entry->attr_valid = NAMES_VALID_S;
    fill(&entry->attr, ino, record);
}

bool names_is_current(const struct names *names, uint64_t ino) {
    return ino >= 1 && ino <= names->entries && !differs(names, ino);
}

enum names_answer names_version(const struct names *names, uint64_t ino,
                                struct identity *identity) {
    struct record record;
    if (!record_at(names, ino, &record) || differs(names, ino))
        return NAMES_ASK;
    *identity = (struct identity){record.size, record.source_ino, (int64_t)record.mtime_ns,
                                  (int64_t)record.ctime_ns};
    return S_ISREG(record.mode) && !(record.flags & ALIAS) ? NAMES_YES : NAMES_NONE;
}

/* The path is written backwards: first the name, then the names of the directories. */
static const char *path_of(const struct names *names, uint64_t ino, char *buffer, size_t room) {
    char *at = buffer + room - 1;
    *at = 0;
    while (ino != 1) {
        struct record record;
        struct text name;
        if (!record_at(names, ino, &record) || !name_at(names, ino, &name) || name.length == 0 ||
            (size_t)(at - buffer) < name.length + 1)
            return NULL;
        if (*at)
            *--at = '/';
        at -= name.length;
        memcpy(at, name.bytes, name.length);
        ino = record.parent;
    }
    return at;
}

enum names_answer names_file(const struct names *names, uint64_t ino, struct identity *identity,
                             char *path, size_t room) {
    if (names_version(names, ino, identity) != NAMES_YES)
        return NAMES_ASK;
    char buffer[4096];
    const char *found = path_of(names, ino, buffer, sizeof buffer);
    size_t length = found ? strlen(found) : room;
    if (length >= room)
        return NAMES_ASK;
    memcpy(path, found, length + 1);
    return NAMES_YES;
}

enum names_answer names_acls(const struct names *names, uint64_t ino,
                             const struct names_acls **acls, uint32_t *mode) {
    struct record record;
    if (!record_at(names, ino, &record) || differs(names, ino) || record.flags & ALIAS)
        return NAMES_ASK;
    uint32_t number = record.flags >> ACL_SHIFT;
    if (number > names->acl_count)
        return NAMES_ASK;
    if (number == 0)
        return NAMES_NONE;
    *acls = &names->acls[number - 1];
    *mode = record.mode;
    return NAMES_YES;
}

enum names_answer names_attributes(const struct names *names, uint64_t ino, struct attr *attr) {
    struct record record;
    if (!record_at(names, ino, &record) || differs(names, ino) || record.flags & ALIAS)
        return NAMES_ASK;
    fill(attr, ino, &record);
    return NAMES_YES;
}

static int compare(struct text a, const char *bytes, size_t length) {
    int order = memcmp(a.bytes, bytes, a.length < length ? a.length : length);
    if (order)
        return order;
    return (a.length > length) - (a.length < length);
}

/* Finds the place of a child in the table; NAMES_ASK if a block is not published. */
static enum names_answer slot_of(const struct names *names, uint64_t parent, const char *name,
                                 size_t length, uint64_t *slot) {
    uint64_t low, high;
    if (!children_of(names, parent, &low, &high))
        return NAMES_ASK;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        struct text found;
        if (!name_at(names, middle, &found))
            return NAMES_ASK;
        int order = compare(found, name, length);
        if (order == 0) {
            *slot = middle;
            return NAMES_YES;
        }
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NAMES_NONE;
}

uint64_t names_child(const struct names *names, uint64_t parent, const char *name, size_t length) {
    uint64_t slot, ino;
    struct record record;
    if (slot_of(names, parent, name, length, &slot) != NAMES_YES ||
        !resolved(names, slot, &ino, &record))
        return 0;
    return ino;
}

enum names_answer names_lookup(const struct names *names, uint64_t parent, const char *name,
                               size_t length, struct entry_out *entry) {
    /* The inode was created through the mount. */
    if (parent > names->entries)
        return NAMES_OTHERS;
    uint64_t slot, ino;
    enum names_answer found = slot_of(names, parent, name, length, &slot);
    if (found == NAMES_ASK)
        return NAMES_ASK;
    bool changed = differs(names, parent);
    if (found == NAMES_YES) {
        struct record record;
        if (changed || !resolved(names, slot, &ino, &record) || differs(names, ino))
            return NAMES_ASK;
        fill_entry(entry, ino, &record);
        return NAMES_YES;
    }
    if (names->ask || changed)
        return NAMES_OTHERS;
    /* An entry without an inode number: the kernel caches that the name does not exist. */
    memset(entry, 0, sizeof *entry);
    entry->entry_valid = NAMES_VALID_S;
    return NAMES_NONE;
}

/* Adds one entry to a listing; false if there is no room for it. ``record`` is NULL for "." and
 * "..", of which the kernel takes no attributes. */
static bool add_entry(struct listing *list, uint64_t ino, uint64_t next, const char *name,
                      size_t name_length, const struct record *record) {
    size_t head = list->plus ? sizeof(struct direntplus_out) : sizeof(struct dirent_out);
    size_t length = (head + name_length + 7) & ~(size_t)7;
    if (length > list->size - list->used)
        return false;
    uint32_t type = (record ? record->mode & S_IFMT : S_IFDIR) >> 12;
    struct direntplus_out out = {.dirent = {ino, next, (uint32_t)name_length, type}};
    uint8_t *at = list->buffer + list->used;
    memset(at + length - 8, 0, 8);
    if (list->plus) {
        if (record)
            fill_entry(&out.entry, ino, record);
        memcpy(at, &out, sizeof out);
    } else {
        memcpy(at, &out.dirent, sizeof out.dirent);
    }
    memcpy(at + head, name, name_length);
    list->used += length;
    return true;
}

enum names_answer names_list(const struct names *names, uint64_t ino, uint64_t offset, bool plus,
                             uint8_t *buffer, size_t size, size_t *used) {
    uint64_t first, end;
    struct record directory;
    *used = 0;
    if (!children_of(names, ino, &first, &end) || differs(names, ino) ||
        !record_at(names, ino, &directory) || (names->ask && offset == 0))
        return NAMES_ASK;
    struct listing list = {buffer, size, 0, plus};
    uint64_t own[NAMES_DOTS] = {ino, directory.parent}, count = end - first + NAMES_DOTS;
    for (uint64_t index = offset; index < count; index++) {
        if (index < NAMES_DOTS) {
            if (!add_entry(&list, own[index], index + 1, "..", index + 1, NULL))
                break;
            continue;
        }
        uint64_t found, place = first + index - NAMES_DOTS;
        struct record record;
        struct text name;
        if (!name_at(names, place, &name) || !resolved(names, place, &found, &record) ||
            differs(names, found)) {
            /* Python continues from here when the kernel requests the rest. */
            *used = list.used;
            return list.used ? NAMES_YES : NAMES_ASK;
        }
        if (!add_entry(&list, found, index + 1, (const char *)name.bytes, name.length, &record))
            break;
    }
    *used = list.used;
    return NAMES_YES;
}
