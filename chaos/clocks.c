/* A wall clock of its own for each process: see clocks.py. Loaded by LD_PRELOAD; the record of a process is a file
   named by its pid in the folder of CHIPMESH_CHAOS_CLOCKS: an offset in nanoseconds, and how often it was applied. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct record {
    volatile int64_t offset_ns;
    volatile uint64_t readings;
};

static struct record none;
static struct record *record = &none;
static int (*true_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_record(void) {
    true_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *folder = getenv("CHIPMESH_CHAOS_CLOCKS");
    if (folder == NULL) return;
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (ftruncate(file, sizeof *record) == 0) {
        void *shared = mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (shared != MAP_FAILED) record = shared;
    }
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = true_clock_gettime ? true_clock_gettime(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    int64_t offset_ns = record->offset_ns;
    if (result != 0 || offset_ns == 0 || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return result;
    int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + offset_ns;
    now->tv_sec = ns / 1000000000;
    now->tv_nsec = ns % 1000000000;
    __atomic_fetch_add(&record->readings, 1, __ATOMIC_RELAXED);
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *told) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (told != NULL) *told = precise.tv_sec;
    return precise.tv_sec;
}
