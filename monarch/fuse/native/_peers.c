#include "_peers.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "_xxh3.h"

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_ACQUIRE)
#define STORE(x, v) __atomic_store_n(&(x), (v), __ATOMIC_RELEASE)

enum { HEAD = 4096, PIECE = 1 << 20, NAME = 32 };
/* An answer of up to so many bytes is waited for as a whole, at most so long. Of a larger one the
 * first bytes are read while the others come. */
enum { MOST_GATHERED = 256 << 10, GATHER_US = 500 };
/* The same if the digest of the file is known: the member has given it before, and hardly ever
 * lacks it now. A wait shorter than a tick of the kernel's clock sets the timer of the processor
 * anew, before and after it, which is slow in a virtual machine. */
enum { GATHER_KNOWN_US = 5000 };

static uint64_t now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

/* -- connections ------------------------------------------------------------------------------- */

bool peers_prepare(struct peers *peers, uint64_t entries, uint32_t count, uint16_t *givers,
                   uint64_t *digests) {
    peers->members = calloc(count + 1ul, sizeof *peers->members);
    if (!peers->members)
        return false;
    for (; peers->prepared < count; peers->prepared++) {
        struct member *member = &peers->members[peers->prepared];
        /* Nothing is late before Python has said when. */
        member->fair_us = UINT32_MAX;
        if (pthread_mutex_init(&member->lock, NULL))
            return false;
    }
    peers->count = count;
    peers->givers = givers;
    peers->digests = digests;
    peers->entries = entries;
    return true;
}

bool peers_set_request(struct peers *peers, uint32_t member, const char *before,
                       const char *after) {
    if (member >= peers->count || peers->members[member].before ||
        strlen(before) + strlen(after) + NAME > PEERS_REQUEST)
        return false;
    struct member *to = &peers->members[member];
    to->before = strdup(before);
    to->after = strdup(after);
    return to->before && to->after;
}

void peers_free(struct peers *peers) {
    for (uint32_t i = 0; i < peers->prepared; i++) {
        peers_drop(peers, i);
        free(peers->members[i].before);
        free(peers->members[i].after);
        pthread_mutex_destroy(&peers->members[i].lock);
    }
    free(peers->members);
}

/* As peers_keep, of a connection that was taken before the connections were dropped for the
 * ``drops``th time. */
static bool keep(struct peers *peers, struct member *member, struct connection *used,
                 uint32_t drops) {
    pthread_mutex_lock(&member->lock);
    bool kept = member->drops == drops && member->idle_count < PEERS_IDLE &&
                LOAD(peers->idle_all) < PEERS_IDLE_ALL;
    if (kept) {
        used->next = member->idle;
        member->idle = used;
        STORE(member->idle_count, member->idle_count + 1);
        __atomic_add_fetch(&peers->idle_all, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&member->lock);
    return kept;
}

static struct connection *take(struct peers *peers, struct member *member, uint32_t *drops) {
    pthread_mutex_lock(&member->lock);
    struct connection *found = member->idle;
    *drops = member->drops;
    if (found) {
        member->idle = found->next;
        STORE(member->idle_count, member->idle_count - 1);
        __atomic_sub_fetch(&peers->idle_all, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&member->lock);
    return found;
}

bool peers_keep(struct peers *peers, uint32_t member, int fd, uint32_t limit_us) {
    struct connection *made = member < peers->count ? malloc(sizeof *made) : NULL;
    if (!made)
        return false;
    struct member *of = &peers->members[member];
    *made = (struct connection){.fd = fd, .limit_us = limit_us, .wakes_at = 1};
    STORE(of->limit_us, limit_us);
    if (keep(peers, of, made, LOAD(of->drops)))
        return true;
    free(made);
    return false;
}

/* Sets how many bytes wake a thread that waits for them. Bytes that were read do not count: before
 * a thread waits for the rest of an answer, each byte must wake it. */
static void wake_at(struct connection *connection, uint32_t bytes) {
    int value = (int)bytes;
    if (connection->wakes_at != bytes)
        setsockopt(connection->fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
    connection->wakes_at = bytes;
}

int peers_take(struct peers *peers, uint32_t member, uint32_t *limit_us) {
    uint32_t drops;
    struct connection *found =
        member < peers->count ? take(peers, &peers->members[member], &drops) : NULL;
    if (!found)
        return -1;
    int fd = found->fd;
    wake_at(found, 1);
    *limit_us = found->limit_us;
    free(found);
    return fd;
}

static void end(struct connection *connection) {
    close(connection->fd);
    free(connection);
}

void peers_drop(struct peers *peers, uint32_t member) {
    if (member >= peers->prepared)
        return;
    struct member *of = &peers->members[member];
    pthread_mutex_lock(&of->lock);
    struct connection *first = of->idle;
    of->idle = NULL;
    __atomic_sub_fetch(&peers->idle_all, (int32_t)of->idle_count, __ATOMIC_RELAXED);
    STORE(of->idle_count, 0);
    STORE(of->drops, of->drops + 1);
    pthread_mutex_unlock(&of->lock);
    while (first) {
        struct connection *next = first->next;
        end(first);
        first = next;
    }
}

/* -- answers ----------------------------------------------------------------------------------- */

enum outcome {
    ANSWERED, /* with bytes of the right number */
    CLOSED,   /* before the answer */
    SLOW,
    NOT_KEPT,
    OTHER, /* Python must ask again */
};

static enum outcome failed(void) {
    if (errno == EPIPE || errno == ECONNRESET)
        return CLOSED;
    return errno == EAGAIN || errno == EWOULDBLOCK ? SLOW : OTHER;
}

/* Sets the limit of each wait in the kernel. */
static bool limit(struct connection *connection, uint32_t limit_us) {
    if (connection->limit_us == limit_us)
        return true;
    struct timeval value = {limit_us / 1000000, limit_us % 1000000};
    connection->limit_us = limit_us;
    return !setsockopt(connection->fd, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value) &&
           !setsockopt(connection->fd, SOL_SOCKET, SO_SNDTIMEO, &value, sizeof value);
}

/* Waits until an answer with ``size`` bytes has come, so that this thread wakes once and not for
 * each part of it. At most ``most_us``, since another answer has fewer bytes. */
static void gather(struct connection *used, uint64_t size, uint32_t most_us) {
    bool gathers = size <= MOST_GATHERED;
    wake_at(used, gathers ? (uint32_t)size : 1);
    struct pollfd waits = {.fd = used->fd, .events = POLLIN};
    uint32_t us = most_us < used->limit_us ? most_us : used->limit_us;
    struct timespec most = {.tv_nsec = us * 1000l};
    if (gathers && ppoll(&waits, 1, &most, NULL) <= 0)
        wake_at(used, 1);
}

/* The value of a field in a head whose lines end with zeros; NULL if it has none. */
static const char *field(const char *head, const char *end, const char *name) {
    size_t length = strlen(name);
    for (const char *line = head; line < end; line += strlen(line) + 2) {
        if (strncasecmp(line, name, length) == 0 && line[length] == ':') {
            line += length + 1;
            return line + strspn(line, " \t");
        }
    }
    return NULL;
}

struct head {
    unsigned status;
    bool is_kept; /* the connection may have another request */
    uint64_t length, digest;
    size_t begin; /* of the bytes behind the head, and their end */
    size_t end;
};

/* Takes a number from a text that has nothing else. */
static bool number(const char *text, int base, size_t most, uint64_t *found) {
    static const char digits[] = "0123456789abcdef";
    size_t length = text ? strlen(text) : 0;
    *found = 0;
    if (!length || length > most)
        return false;
    for (; *text; text++) {
        const char *digit = memchr(digits, *text, (size_t)base);
        if (!digit)
            return false;
        *found = *found * (uint64_t)base + (uint64_t)(digit - digits);
    }
    return true;
}

/* Reads the head of an answer, and the bytes that come with it, into ``buffer``. */
static enum outcome read_head(struct connection *used, char *buffer, struct head *head,
                              uint64_t until_us) {
    char *end = NULL;
    *head = (struct head){0};
    while (!end) {
        if (head->end == HEAD)
            return OTHER;
        if (head->end && now_us() > until_us)
            return SLOW;
        /* A part has been read: the rest may be shorter than the file. */
        if (head->end)
            wake_at(used, 1);
        ssize_t got = recv(used->fd, buffer + head->end, HEAD - head->end, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0 && head->end)
            return got < 0 && failed() == SLOW ? SLOW : OTHER;
        if (got <= 0)
            return got < 0 ? failed() : CLOSED;
        head->end += (size_t)got;
        end = memmem(buffer, head->end, "\r\n\r\n", 4);
    }
    head->begin = (size_t)(end - buffer) + 4;
    if (memchr(buffer, 0, head->begin) || strncmp(buffer, "HTTP/1.1 ", 9) || end - buffer < 12)
        return OTHER;
    for (char *line = buffer;
         (line = memmem(line, head->begin - (size_t)(line - buffer), "\r\n", 2)) != NULL; line += 2)
        line[0] = line[1] = 0;
    char status[4] = {buffer[9], buffer[10], buffer[11]};
    uint64_t found;
    if (!number(status, 10, 3, &found) ||
        !number(field(buffer, end, "content-length"), 10, 19, &head->length))
        return OTHER;
    head->status = (unsigned)found;
    const char *closing = field(buffer, end, "connection"),
               *digest = field(buffer, end, "x-monarch-digest");
    head->is_kept = !closing || strcasecmp(closing, "close");
    if (!digest || strlen(digest) != 16 || !number(digest, 16, 16, &head->digest))
        head->digest = 0;
    return ANSWERED;
}

/* Reads the bytes from ``at`` on. Each wait for a part has the limit of the connection. */
static enum outcome read_rest(struct connection *used, struct content *content, size_t at) {
    if (used->wakes_at > 1) {
        ssize_t got = recv(used->fd, content->bytes + at, content->size - at, MSG_DONTWAIT);
        at += got > 0 ? (size_t)got : 0;
        if (at < content->size)
            wake_at(used, 1);
    }
    while (at < content->size) {
        size_t left = content->size - at, wanted = left < PIECE ? left : PIECE;
        ssize_t got = recv(used->fd, content->bytes + at, wanted, MSG_WAITALL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 && failed() == SLOW ? SLOW : OTHER;
        at += (size_t)got;
        if ((size_t)got < wanted) {
            char byte;
            ssize_t more = recv(used->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
            return more > 0 || (more < 0 && failed() == SLOW) ? SLOW : OTHER;
        }
    }
    return ANSWERED;
}

/* Sends a request and reads its answer. ``gather_us`` as for gather. */
static enum outcome exchange(struct connection *used, const char *request, size_t size,
                             struct content *content, struct head *head, uint64_t until_us,
                             uint32_t gather_us) {
    char buffer[HEAD];
    *head = (struct head){0};
    ssize_t sent = send(used->fd, request, size, MSG_NOSIGNAL);
    if (sent != (ssize_t)size)
        return sent < 0 ? failed() : OTHER;
    gather(used, content->size, gather_us);
    enum outcome outcome = read_head(used, buffer, head, until_us);
    if (outcome != ANSWERED)
        return outcome;
    size_t came = head->end - head->begin;
    if (head->status != 200) {
        head->is_kept = head->is_kept && came == head->length;
        return head->status == 404 ? NOT_KEPT : OTHER;
    }
    if (head->length != content->size || came > content->size)
        return OTHER;
    memcpy(content->bytes, buffer + head->begin, came);
    return read_rest(used, content, came);
}

/* -- files ------------------------------------------------------------------------------------- */

/* The member that is asked for a file; NULL if Python must find it. */
static struct member *giver_of(struct peers *peers, uint64_t ino) {
    uint32_t giver = ino <= peers->entries ? LOAD(peers->givers[ino]) : GIVER_NONE;
    return giver != GIVER_NONE && giver <= peers->count ? &peers->members[giver - 1] : NULL;
}

bool peers_may_fetch(struct peers *peers, uint64_t ino, uint64_t size) {
    struct member *member = size ? giver_of(peers, ino) : NULL;
    return member && member->after && LOAD(member->idle_count);
}

/* Records the result of a request for a file that began at ``begin_us``. */
static void count(struct member *member, enum outcome outcome, uint64_t size, uint64_t begin_us) {
    struct received *to = &member->received;
    /* The bytes after the first MiB have limits of their own. */
    uint64_t parts = 1 + size / PIECE, fair_us = parts * LOAD(member->fair_us);
    pthread_mutex_lock(&member->lock);
    uint64_t now = now_us(), waited_us = now - begin_us;
    if (outcome == SLOW) {
        to->slow++;
    } else if (outcome == ANSWERED) {
        to->files++;
        to->bytes += size;
        uint64_t each_us = waited_us / parts;
        to->latencies_us[to->latencies++ % PEERS_LATENCIES] =
            each_us < UINT32_MAX ? (uint32_t)each_us : UINT32_MAX;
    }
    if (waited_us > fair_us) {
        uint64_t late_us = waited_us - fair_us, since_us = now - member->late_to_us;
        to->late_us += late_us < since_us ? late_us : since_us;
        member->late_to_us = now;
    }
    pthread_mutex_unlock(&member->lock);
}

void peers_received(struct peers *peers, uint32_t member, uint32_t limit_us, uint64_t fair_us,
                    struct received *received) {
    *received = (struct received){0};
    if (member >= peers->count)
        return;
    struct member *of = &peers->members[member];
    STORE(of->limit_us, limit_us);
    STORE(of->fair_us, fair_us);
    pthread_mutex_lock(&of->lock);
    *received = of->received;
    of->received = (struct received){0};
    pthread_mutex_unlock(&of->lock);
}

/* Whether the bytes are those of the member's copy; ``said`` is the digest of its answer, 0 if it
 * has none. The member may have made the copy anew, with another digest, and then it says so. */
static bool is_right(struct peers *peers, uint64_t ino, const struct content *content,
                     uint64_t said) {
    uint64_t known = LOAD(peers->digests[ino]), wanted = said ? said : known;
    bool right = wanted && xxh3_high(content->bytes, content->size) == wanted;
    if (right && wanted != known)
        STORE(peers->digests[ino], wanted);
    return right;
}

struct content *peers_fetch(struct peers *peers, uint64_t ino, uint64_t size, int64_t *held) {
    struct member *member = giver_of(peers, ino);
    struct content *content = member && member->after ? content_new(size, held) : NULL;
    if (!content)
        return NULL;
    char request[PEERS_REQUEST];
    bool is_known = LOAD(peers->digests[ino]);
    /* Without its digest the copy is of no use, and the daemon of the member knows it. */
    int length = is_known ? snprintf(request, sizeof request, "%sc/%02x/%llu%s", member->before,
                                     (unsigned)(ino & 0xff), (unsigned long long)ino, member->after)
                          : snprintf(request, sizeof request, "%sd/%llu%s", member->before,
                                     (unsigned long long)ino, member->after);
    uint64_t begin_us = now_us();
    enum outcome outcome = CLOSED;
    struct connection *used;
    uint32_t drops;
    /* The member may have closed connections that had no request. */
    while (outcome == CLOSED && (used = take(peers, member, &drops))) {
        struct head head = {0};
        uint32_t limit_us = LOAD(member->limit_us);
        outcome = limit(used, limit_us)
                      ? exchange(used, request, (size_t)length, content, &head, now_us() + limit_us,
                                 is_known ? GATHER_KNOWN_US : GATHER_US)
                      : OTHER;
        bool whole = outcome == ANSWERED || outcome == NOT_KEPT || head.status == 202;
        if (outcome == ANSWERED && !is_right(peers, ino, content, head.digest))
            outcome = OTHER;
        /* Or it takes requests and closes late: each connection would hold the reader up. */
        if (outcome == CLOSED && now_us() - begin_us > limit_us / 2)
            outcome = SLOW;
        if (!whole || !head.is_kept || !keep(peers, member, used, drops))
            end(used);
    }
    count(member, outcome, size, begin_us);
    if (outcome == ANSWERED)
        return content;
    content_release(content);
    /* Python asks, and sets the member again; without a connection it only makes one. */
    if (outcome != CLOSED)
        STORE(peers->givers[ino], outcome == SLOW       ? GIVER_SLOW
                                  : outcome == NOT_KEPT ? GIVER_NOT_KEPT
                                                        : GIVER_NONE);
    return NULL;
}
