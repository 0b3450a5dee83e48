/* fdatasync of written files that hangs, or that fails once, as a test says.
 * For LD_PRELOAD; the file TEST_SYNCS holds a byte: 's' for one that hangs, 'f'
 * for one that fails, which is taken from it. The journal is left alone. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile char *mode;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TEST_SYNCS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *map = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map != MAP_FAILED)
        mode = map;
}

static int is_object(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0)
        return 0;
    path[size] = 0;
    return strstr(path, "/absorbed-") && !strstr(path, "/journal");
}

int fdatasync(int fd) {
    if (mode && is_object(fd)) {
        while (*mode == 's')
            nanosleep(&(struct timespec){0, 20000000}, NULL);
        if (__sync_bool_compare_and_swap(mode, 'f', ' ')) {
            errno = EIO;
            return -1;
        }
    }
    return (int)syscall(SYS_fdatasync, fd);
}
