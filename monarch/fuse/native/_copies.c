/* Copies in the tiers: which one may be used, and whether an open file is what was committed. */
#include "_requests.h"

#include <sys/stat.h>

#include "_seal.h"

/* Opens the copy of ``ino`` in a tier, by the name that tiers/tier.py gives it. */
int copies_open(struct datapath *dp, uint8_t tier, uint64_t ino) {
    return open_numbered(dp->tiers[tier].directory, ino);
}

/* The tier with a usable copy, 0 if there is none, and the version of the copy. */
uint8_t copies_tier(struct datapath *dp, uint64_t ino, struct identity *version) {
    if (ino < 1 || ino > dp->names.entries)
        return 0;
    uint8_t tier = LOAD(dp->residency[ino]);
    if (tier == 0 || tier >= MAX_TIERS || dp->tiers[tier].directory < 0 ||
        LOAD(dp->tiers[tier].shunned))
        return 0;
    if (LOAD(dp->marks[ino]) & dp->unusable)
        return 0;
    return names_version(&dp->names, ino, version) == NAMES_YES ? tier : 0;
}

/* Whether the copy of ``ino`` is the committed one of that version: its modification time is its
 * seal (tiers/contents.py). Other copies go to Python, which compares digests. */
bool copies_is_sealed(const struct tier *tier, int fd, uint64_t ino,
                      const struct identity *version) {
    struct stat status;
    if (fstat(fd, &status) || (uint64_t)status.st_size != version->size || !S_ISREG(status.st_mode))
        return false;
    struct timespec seal =
        seal_of(ino, version->size, version->mtime_ns, version->ctime_ns, version->source_ino);
    return !tier->seals ||
           (status.st_mtim.tv_sec == seal.tv_sec && status.st_mtim.tv_nsec == seal.tv_nsec);
}

bool copies_is_current(struct datapath *dp, uint64_t ino, uint8_t tier,
                       const struct identity *version) {
    struct identity now;
    return copies_tier(dp, ino, &now) == tier && now.size == version->size &&
           now.source_ino == version->source_ino && now.mtime_ns == version->mtime_ns &&
           now.ctime_ns == version->ctime_ns;
}
