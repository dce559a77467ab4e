#define _GNU_SOURCE
#include "harness.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void expect_code(const char *file, int line, const char *call, int wanted, int got) {
    if (wanted != got) {
        fprintf(stderr, "%s:%d: %s answered %d, not %d\n", file, line, call, got, wanted);
        exit(1);
    }
}

void check_that(const char *file, int line, const char *condition, bool holds) {
    if (!holds) {
        fprintf(stderr, "%s:%d: not so: %s\n", file, line, condition);
        exit(1);
    }
}

struct target target_start(const char *variable) {
    int to[2], from[2];
    CHECK(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        prctl(PR_SET_PDEATHSIG, SIGKILL); // a test that fails leaves no target behind
        for (int fd = 3; fd < 1024; fd++)
            close(fd); // so that what the target holds is its own
        if (variable)
            setenv("EMULATED_CUDA", variable, 1);
        execl("/proc/self/exe", "driver_test", "target", (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    struct target target = {.pid = pid, .in = fdopen(to[1], "w"), .out = fdopen(from[0], "r")};
    CHECK(target.in && target.out);
    setvbuf(target.out, NULL, _IONBF, 0); // so that poll sees what has not been read
    return target;
}

static void tell(struct target *target, const char *format, va_list args) {
    vfprintf(target->in, format, args);
    fputc('\n', target->in);
    fflush(target->in);
}

void target_tell(struct target *target, const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell(target, format, args);
    va_end(args);
}

const char *target_answer(struct target *target) {
    static char line[256];
    if (!fgets(line, sizeof line, target->out)) {
        fprintf(stderr, "the target has ended\n");
        exit(1);
    }
    line[strcspn(line, "\n")] = 0;
    return line;
}

bool target_has_answer(struct target *target, int ms) {
    struct pollfd fd = {.fd = fileno(target->out), .events = POLLIN};
    return poll(&fd, 1, ms) == 1;
}

const char *target_ask(struct target *target, const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell(target, format, args);
    va_end(args);
    return target_answer(target);
}

void target_expect(struct target *target, const char *answer, const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell(target, format, args);
    va_end(args);
    const char *got = target_answer(target);
    if (strcmp(got, answer) != 0) {
        fprintf(stderr, "%s: the target answered %s, not %s\n", format, got, answer);
        exit(1);
    }
}

void target_end(struct target *target) {
    fclose(target->in);
    int status;
    CHECK(waitpid(target->pid, &status, 0) == target->pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fclose(target->out);
}

unsigned char pattern(unsigned seed, size_t index) {
    return (unsigned char)((index * 2654435761u + seed * 40503u) >> 7);
}

void pattern_fill(unsigned char *bytes, size_t len, unsigned seed) {
    for (size_t i = 0; i < len; i++)
        bytes[i] = pattern(seed, i);
}

CUprocessState state_of(pid_t pid) {
    CUprocessState state;
    OK(cuCheckpointProcessGetState(pid, &state));
    return state;
}

void check_holds_nothing(pid_t pid) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *folder = opendir(path);
    CHECK(folder != NULL);
    for (struct dirent *entry; (entry = readdir(folder));) {
        ssize_t len = readlinkat(dirfd(folder), entry->d_name, text, sizeof text - 1);
        if (len < 0)
            continue;
        text[len] = 0;
        // The three streams that the harness gave, and nothing else.
        CHECK(atoi(entry->d_name) <= 2);
        CHECK(!strstr(text, "memfd") && !strstr(text, "emulated"));
    }
    closedir(folder);
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "r");
    CHECK(maps != NULL);
    while (fgets(text, sizeof text, maps))
        CHECK(!strstr(text, "memfd") && !strstr(text, "/dev/"));
    fclose(maps);
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *status = fopen(path, "r");
    CHECK(status != NULL);
    bool seen = false;
    while (fgets(text, sizeof text, status)) {
        if (strncmp(text, "RssShmem:", 9) == 0) {
            seen = true;
            CHECK(atol(text + 9) == 0);
        }
    }
    fclose(status);
    CHECK(seen);
}

void sleep_ms(int ms) {
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    while (nanosleep(&time, &time) != 0 && errno == EINTR) {
    }
}

CUcontext use_device(int ordinal) {
    CUdevice device;
    CUcontext context;
    OK(cuDeviceGet(&device, ordinal));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    return context;
}

CUresult checkpoint_custom(pid_t pid, CUcheckpointCustomStorageInfo **info) {
    CUcheckpointCheckpointArgs args = {.customStorageInfo_out = info};
    return cuCheckpointProcessCheckpoint(pid, &args);
}

CUresult restore_custom(pid_t pid, CUcheckpointGpuPair *pairs, unsigned count, CUcheckpointCustomStorageInfo **info) {
    CUcheckpointRestoreArgs args = {.gpuPairs = pairs, .gpuPairsCount = count, .customStorageInfo_out = info};
    return cuCheckpointProcessRestore(pid, &args);
}

CUresult lock_within(pid_t pid, unsigned timeout_ms) {
    CUcheckpointLockArgs args = {.timeoutMs = timeout_ms};
    return cuCheckpointProcessLock(pid, &args);
}
