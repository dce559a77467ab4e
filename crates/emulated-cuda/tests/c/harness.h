// What every test program here uses: checks that end the program, and target processes that take commands.
#ifndef HARNESS_H
#define HARNESS_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

// Ends the program with the place and the values if a call does not answer the code.
#define EXPECT(code, call) expect_code(__FILE__, __LINE__, #call, (int)(code), (int)(call))
#define OK(call) EXPECT(CUDA_SUCCESS, call)
#define CHECK(condition) check_that(__FILE__, __LINE__, #condition, (condition))

void expect_code(const char *file, int line, const char *call, int wanted, int got);
void check_that(const char *file, int line, const char *condition, bool holds);

// Another process with the driver. Its environment may differ from ours, as on another node.
struct target {
    pid_t pid;
    FILE *in;
    FILE *out;
};

// Starts a target whose EMULATED_CUDA is `variable`, or ours if it is NULL.
struct target target_start(const char *variable);
// Sends a command and gives its one-line answer, in a buffer that the next call overwrites.
const char *target_ask(struct target *target, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Sends a command without waiting for its answer, and takes the answer later.
void target_tell(struct target *target, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *target_answer(struct target *target);
// Whether an answer is there within `ms` milliseconds.
bool target_has_answer(struct target *target, int ms);
// As target_ask, and checks the answer.
void target_expect(struct target *target, const char *answer, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void target_end(struct target *target);

// The target's side: serves commands from stdin until it closes.
int target_main(void);

// Byte `index` of the pattern `seed`.
unsigned char pattern(unsigned seed, size_t index);
void pattern_fill(unsigned char *bytes, size_t len, unsigned seed);

CUprocessState state_of(pid_t pid);
// Makes sure that a process holds nothing of the driver: no memory file open or mapped, no shared memory resident.
void check_holds_nothing(pid_t pid);
void sleep_ms(int ms);

// Retains and makes current the primary context of a device, and gives it.
CUcontext use_device(int ordinal);

// Calls a checkpoint function with custom storage.
CUresult checkpoint_custom(pid_t pid, CUcheckpointCustomStorageInfo **info);
CUresult restore_custom(pid_t pid, CUcheckpointGpuPair *pairs, unsigned count, CUcheckpointCustomStorageInfo **info);
CUresult lock_within(pid_t pid, unsigned timeout_ms);

#endif
