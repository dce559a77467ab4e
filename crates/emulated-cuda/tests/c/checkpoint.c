// The checkpoint functions between real processes.
#define _GNU_SOURCE
#include "harness.h"
#include "tests.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

// A saver's copy of what a target's GPUs hold.
struct image {
    unsigned count;
    struct {
        CUuuid uuid;
        CUdevice ordinal;
        size_t len;
        unsigned char *bytes;
    } extents[8];
};

static CUuuid uuid_of_stream(CUstream stream) {
    CUdevice device;
    CUuuid uuid;
    CUcontext context, primary;
    OK(cuStreamGetDevice(stream, &device));
    OK(cuStreamGetCtx(stream, &context));
    OK(cuDevicePrimaryCtxRetain(&primary, device));
    OK(cuDevicePrimaryCtxRelease(device));
    CHECK(context == primary);
    OK(cuDeviceGetUuid(&uuid, device));
    return uuid;
}

static void copy_out(CUcheckpointCustomStorageInfo *info, struct image *image) {
    image->count = info->deviceCount;
    for (unsigned i = 0; i < info->deviceCount; i++) {
        CUcheckpointCustomStoragePerDeviceData *device = &info->perDeviceData[i];
        image->extents[i].uuid = uuid_of_stream(device->stream);
        OK(cuStreamGetDevice(device->stream, &image->extents[i].ordinal));
        image->extents[i].len = device->size;
        OK(cuMemHostAlloc((void **)&image->extents[i].bytes, device->size, 0));
        // In two halves, to cross the borders of allocations.
        size_t half = device->size / 2 + 1;
        OK(cuMemcpyDtoHAsync(image->extents[i].bytes, device->devPtr, half, device->stream));
        OK(cuMemcpyDtoHAsync(image->extents[i].bytes + half, device->devPtr + half, device->size - half,
                             device->stream));
    }
}

static void copy_in(CUcheckpointCustomStorageInfo *info, const struct image *image) {
    CHECK(info->deviceCount == image->count);
    for (unsigned i = 0; i < info->deviceCount; i++) {
        CUcheckpointCustomStoragePerDeviceData *device = &info->perDeviceData[i];
        CUuuid uuid = uuid_of_stream(device->stream);
        unsigned k = 0;
        while (k < image->count && memcmp(&image->extents[k].uuid, &uuid, sizeof uuid) != 0)
            k++;
        CHECK(k < image->count && image->extents[k].len == device->size);
        OK(cuMemcpyHtoDAsync(device->devPtr, image->extents[k].bytes, device->size, device->stream));
    }
}

// Restored memory is not zero before it is written, so that a chunk that is left out shows.
static void check_soiled(const CUcheckpointCustomStorageInfo *info) {
    for (unsigned i = 0; i < info->deviceCount; i++) {
        const CUcheckpointCustomStoragePerDeviceData *device = &info->perDeviceData[i];
        unsigned char *bytes;
        OK(cuMemHostAlloc((void **)&bytes, device->size, 0));
        OK(cuMemcpyDtoHAsync(bytes, device->devPtr, device->size, device->stream));
        OK(cuStreamSynchronize(device->stream));
        for (size_t k = 0; k < device->size; k++)
            CHECK(bytes[k] == 0xA5);
        OK(cuMemFreeHost(bytes));
    }
}

static void use_all_devices(void) {
    int count;
    OK(cuInit(0));
    OK(cuDeviceGetCount(&count));
    while (count-- > 0)
        use_device(count);
}

// What a target holds in these tests: three GPUs, one of them without memory, with gaps and odd lengths.
static void fill_target(struct target *target) {
    static const char *const steps[] = {"alloc 0 3000000", "alloc 0 1",    "alloc 0 70000", "alloc 2 5000000",
                                        "free 1",          "alloc 0 4097", "alloc 2 123"};
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        CHECK(strncmp(target_ask(target, "%s", steps[i]), "error", 5) != 0);
    for (int i = 0; i < 6; i++)
        if (i != 1)
            target_expect(target, "ok", "fill %d %d", i, 10 + i);
}

static void check_target(struct target *target) {
    for (int i = 0; i < 6; i++)
        if (i != 1)
            target_expect(target, "ok", "check %d %d", i, 10 + i);
}

static size_t rounded(size_t len, size_t granularity) {
    return (len + granularity - 1) / granularity * granularity;
}

static void round_trip(struct target *target, size_t granularity) {
    struct image image;
    CUcheckpointCustomStorageInfo *info = NULL;
    OK(lock_within(target->pid, 5000));
    CHECK(state_of(target->pid) == CU_PROCESS_STATE_LOCKED);
    // A call of the target waits from now on.
    target_tell(target, "check 0 10");
    CHECK(!target_has_answer(target, 50));
    OK(checkpoint_custom(target->pid, &info));
    CHECK(state_of(target->pid) == CU_PROCESS_STATE_CHECKPOINTING);
    CHECK(info->deviceCount == 2); // GPU 1 holds nothing
    copy_out(info, &image);
    for (unsigned i = 0; i < 2; i++) {
        CUcontext context = (CUcontext)1;
        OK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, info->perDeviceData[i].devPtr));
        CHECK(context == NULL);
        CUdevice device;
        OK(cuStreamGetDevice(info->perDeviceData[i].stream, &device));
        size_t wanted = device == 0 ? rounded(3000000, granularity) + rounded(4097, granularity) +
                                          rounded(70000, granularity)
                                    : rounded(5000000, granularity) + rounded(123, granularity);
        CHECK(info->perDeviceData[i].size == wanted);
        // No byte more, and on no other GPU's stream.
        unsigned char byte;
        CUstream own = info->perDeviceData[i].stream, foreign = info->perDeviceData[1 - i].stream;
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoHAsync(&byte, info->perDeviceData[i].devPtr + wanted, 1, own));
        EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuMemcpyDtoHAsync(&byte, info->perDeviceData[i].devPtr, 1, foreign));
        EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamDestroy(own));
    }
    CUcheckpointOperationHandle handle = info->handle;
    OK(cuCheckpointOperationComplete(handle)); // synchronizes the streams first
    CHECK(state_of(target->pid) == CU_PROCESS_STATE_CHECKPOINTED);
    check_holds_nothing(target->pid);
    CHECK(info->deviceCount == 0 && info->perDeviceData == NULL);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointOperationComplete(handle));
    // The first allocation of each GPU lies at the start of its extent.
    for (unsigned i = 0; i < 2; i++) {
        bool is_first_gpu = image.extents[i].ordinal == 0;
        for (size_t k = 0; k < (is_first_gpu ? 3000000 : 5000000); k++)
            CHECK(image.extents[i].bytes[k] == pattern(is_first_gpu ? 10 : 13, k));
    }

    OK(restore_custom(target->pid, NULL, 0, &info));
    CHECK(state_of(target->pid) == CU_PROCESS_STATE_RESTORING);
    check_soiled(info);
    copy_in(info, &image);
    OK(cuCheckpointOperationComplete(info->handle));
    CHECK(state_of(target->pid) == CU_PROCESS_STATE_LOCKED);
    CHECK(!target_has_answer(target, 50));
    OK(cuCheckpointProcessUnlock(target->pid, NULL));
    CHECK(state_of(target->pid) == CU_PROCESS_STATE_RUNNING);
    CHECK(strcmp(target_answer(target), "ok") == 0);
    check_target(target);
    for (unsigned i = 0; i < image.count; i++)
        OK(cuMemFreeHost(image.extents[i].bytes));
}

// The granularity is in the environment variable GRANULARITY too.
void test_round_trip(void) {
    size_t granularity = strtoul(getenv("GRANULARITY"), NULL, 10);
    use_all_devices();
    struct target target = target_start(NULL);
    fill_target(&target);
    round_trip(&target, granularity);
    round_trip(&target, granularity);
    // The program goes on allocating where it was.
    CHECK(strncmp(target_ask(&target, "alloc 0 100000"), "error", 5) != 0);
    target_expect(&target, "ok", "fill 6 77");
    target_expect(&target, "ok", "check 6 77");
    check_target(&target);
    target_end(&target);
}

// Memory that stays populated: the same round trip, but for the memory itself.
void test_resident(void) {
    use_all_devices();
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", 3 * MIB), "error", 5) != 0);
    target_expect(&target, "ok", "fill 0 5");
    CUcheckpointCustomStorageInfo *info;
    struct image image;
    OK(lock_within(target.pid, 0));
    OK(checkpoint_custom(target.pid, &info));
    copy_out(info, &image);
    OK(cuCheckpointOperationComplete(info->handle));
    OK(restore_custom(target.pid, NULL, 0, &info));
    copy_in(info, &image);
    OK(cuCheckpointOperationComplete(info->handle));
    OK(cuCheckpointProcessUnlock(target.pid, NULL));
    target_expect(&target, "ok", "check 0 5");
    target_end(&target);
}

// Calls that are wrong in a state answer ILLEGAL_STATE and change nothing.
static void expect_illegal(pid_t pid, const char *allowed) {
    CUprocessState before = state_of(pid);
    CUcheckpointCustomStorageInfo *info;
    if (!strchr(allowed, 'l'))
        EXPECT(CUDA_ERROR_ILLEGAL_STATE, lock_within(pid, 1000));
    if (!strchr(allowed, 'c')) {
        EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessCheckpoint(pid, NULL));
        EXPECT(CUDA_ERROR_ILLEGAL_STATE, checkpoint_custom(pid, &info));
    }
    if (!strchr(allowed, 'r')) {
        EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessRestore(pid, NULL));
        EXPECT(CUDA_ERROR_ILLEGAL_STATE, restore_custom(pid, NULL, 0, &info));
    }
    if (!strchr(allowed, 'u'))
        EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(pid, NULL));
    CHECK(state_of(pid) == before);
}

void test_wrong_order(void) {
    use_all_devices();
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    target_expect(&target, "ok", "fill 0 1");
    CUcheckpointCustomStorageInfo *info;
    struct image image;
    expect_illegal(target.pid, "l");
    OK(lock_within(target.pid, 0));
    expect_illegal(target.pid, "cu");
    OK(checkpoint_custom(target.pid, &info));
    expect_illegal(target.pid, "");
    copy_out(info, &image);

    // A stream that captures.
    CUstream stream = info->perDeviceData[0].stream;
    CUgraph graph;
    OK(cuStreamSynchronize(stream));
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuCheckpointOperationComplete(info->handle));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTING);
    OK(cuStreamEndCapture(stream, &graph));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointOperationComplete((CUcheckpointOperationHandle)4096));
    OK(cuCheckpointOperationComplete(info->handle));

    expect_illegal(target.pid, "r");
    // The contents are not in host memory.
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessRestore(target.pid, NULL));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTED);
    OK(restore_custom(target.pid, NULL, 0, &info));
    expect_illegal(target.pid, "");
    copy_in(info, &image);
    OK(cuCheckpointOperationComplete(info->handle));
    expect_illegal(target.pid, "cu");
    OK(cuCheckpointProcessUnlock(target.pid, NULL));
    expect_illegal(target.pid, "l");
    target_expect(&target, "ok", "check 0 1");

    // Two targets at once, completed the other way round.
    struct target second = target_start(NULL);
    CHECK(strncmp(target_ask(&second, "alloc 0 %zu", MIB), "error", 5) != 0);
    CUcheckpointCustomStorageInfo *other;
    OK(lock_within(target.pid, 0));
    OK(lock_within(second.pid, 0));
    OK(checkpoint_custom(target.pid, &info));
    OK(checkpoint_custom(second.pid, &other));
    OK(cuCheckpointOperationComplete(other->handle));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTING);
    CHECK(state_of(second.pid) == CU_PROCESS_STATE_CHECKPOINTED);
    OK(cuCheckpointOperationComplete(info->handle));
    kill(target.pid, SIGKILL);
    kill(second.pid, SIGKILL);
}

// Arguments and conditions that are refused before anything changes.
void test_arguments(void) {
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 1 %zu", MIB), "error", 5) != 0);
    CUcheckpointCustomStorageInfo *info;
    CUprocessState state;
    int tid;

    // Nothing but custom storage needs cuInit.
    OK(cuCheckpointProcessGetState(target.pid, &state));
    OK(cuCheckpointProcessGetRestoreThreadId(target.pid, &tid));
    CHECK(tid != target.pid);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d", target.pid, tid);
    CHECK(access(path, F_OK) == 0);
    CUcheckpointLockArgs lock = {.timeoutMs = 1000, .reserved0 = 1};
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessLock(target.pid, &lock));
    OK(lock_within(target.pid, 1000));
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, checkpoint_custom(target.pid, &info));
    CUcheckpointCheckpointArgs checkpoint = {.reserved = {[55] = 1}};
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessCheckpoint(target.pid, &checkpoint));

    OK(cuInit(0));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, checkpoint_custom(target.pid, &info));
    use_device(0);
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, checkpoint_custom(target.pid, &info));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_LOCKED);
    use_device(1);
    OK(checkpoint_custom(target.pid, &info));
    OK(cuCheckpointOperationComplete(info->handle));
    OK(cuDevicePrimaryCtxRelease(1));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, restore_custom(target.pid, NULL, 0, &info));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTED);

    // Oneself, and who is no target.
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, checkpoint_custom(getpid(), &info));
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, restore_custom(getpid(), NULL, 0, &info));
    EXPECT(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessGetState(0x3fffff, &state));
    EXPECT(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessGetState(0, &state));
    EXPECT(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessGetState(-1, &state));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessGetState(target.pid, NULL));
    pid_t plain = fork();
    if (plain == 0) {
        execlp("sleep", "sleep", "60", (char *)NULL);
        _exit(127);
    }
    sleep_ms(100);
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCheckpointProcessGetState(plain, &state));
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, lock_within(plain, 1000));
    kill(plain, SIGKILL);
    siginfo_t ended;
    CHECK(waitid(P_PID, (id_t)plain, &ended, WEXITED | WNOWAIT) == 0); // now it only waits to be reaped
    EXPECT(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessGetState(plain, &state));

    // Another user's process; only root can become someone else to try it.
    if (geteuid() == 0) {
        pid_t stranger = fork();
        if (stranger == 0) {
            CHECK(setgid(65534) == 0 && setuid(65534) == 0);
            EXPECT(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessGetState(target.pid, &state));
            EXPECT(CUDA_ERROR_OPERATING_SYSTEM, lock_within(target.pid, 1000));
            EXPECT(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessCheckpoint(target.pid, NULL));
            _exit(0);
        }
        int status;
        CHECK(waitpid(stranger, &status, 0) == stranger && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTED);
    }
    kill(target.pid, SIGKILL);
}

static void get_uuids(CUuuid *uuids, int count) {
    for (int i = 0; i < count; i++)
        OK(cuDeviceGetUuid(&uuids[i], i));
}

static void parse_uuid(const char *text, CUuuid *uuid) {
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        CHECK(sscanf(text + 2 * i, "%2x", &byte) == 1);
        uuid->bytes[i] = (char)byte;
    }
}

// A target from another node, whose environment is TARGET_CUDA; this node has three GPUs and one of another chip.
void test_remap(void) {
    use_all_devices();
    struct target target = target_start(getenv("TARGET_CUDA"));
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    CHECK(strncmp(target_ask(&target, "alloc 1 %zu", 2 * MIB), "error", 5) != 0);
    CUuuid old[2], new[4];
    parse_uuid(target_ask(&target, "uuid 0"), &old[0]);
    parse_uuid(target_ask(&target, "uuid 1"), &old[1]);
    get_uuids(new, 4);
    target_expect(&target, "ok", "suspend");

    CUcheckpointCustomStorageInfo *info;
    // Without a map the GPUs would have to be here.
    EXPECT(CUDA_ERROR_INVALID_VALUE, restore_custom(target.pid, NULL, 0, &info));
    CUcheckpointGpuPair half[] = {{old[0], new[1]}};
    EXPECT(CUDA_ERROR_INVALID_VALUE, restore_custom(target.pid, half, 1, &info));
    CUcheckpointGpuPair none[] = {{old[0], new[1]}, {old[1], old[1]}};
    EXPECT(CUDA_ERROR_INVALID_VALUE, restore_custom(target.pid, none, 2, &info));
    CUcheckpointGpuPair unknown[] = {{old[0], new[1]}, {new[0], new[0]}};
    EXPECT(CUDA_ERROR_INVALID_VALUE, restore_custom(target.pid, unknown, 2, &info));
    CUcheckpointGpuPair same[] = {{old[0], new[1]}, {old[1], new[1]}};
    EXPECT(CUDA_ERROR_INVALID_VALUE, restore_custom(target.pid, same, 2, &info));
    CUcheckpointGpuPair chip[] = {{old[0], new[1]}, {old[1], new[3]}};
    EXPECT(CUDA_ERROR_INVALID_VALUE, restore_custom(target.pid, chip, 2, &info));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTED);

    CUcheckpointGpuPair pairs[] = {{old[1], new[0]}, {old[0], new[2]}};
    OK(restore_custom(target.pid, pairs, 2, &info));
    CHECK(info->deviceCount == 2);
    for (unsigned i = 0; i < 2; i++) {
        CUdevice device;
        OK(cuStreamGetDevice(info->perDeviceData[i].stream, &device));
        CHECK(device == 0 || device == 2);
        size_t len = device == 0 ? 2 * MIB : MIB;
        CHECK(info->perDeviceData[i].size == len);
        unsigned char *bytes;
        OK(cuMemHostAlloc((void **)&bytes, len, 0));
        pattern_fill(bytes, len, device == 0 ? 21 : 20);
        OK(cuMemcpyHtoDAsync(info->perDeviceData[i].devPtr, bytes, len, info->perDeviceData[i].stream));
    }
    OK(cuCheckpointOperationComplete(info->handle));
    OK(cuCheckpointProcessUnlock(target.pid, NULL));
    target_expect(&target, "ok", "check 0 20");
    target_expect(&target, "ok", "check 1 21");
    // The memory counts on the GPUs of this node now.
    size_t free_bytes, total;
    use_device(2);
    OK(cuMemGetInfo(&free_bytes, &total));
    CHECK(total - free_bytes == MIB);
    use_device(1);
    OK(cuMemGetInfo(&free_bytes, &total));
    CHECK(total == free_bytes);

    // And from here it can be saved again.
    OK(lock_within(target.pid, 1000));
    OK(checkpoint_custom(target.pid, &info));
    OK(cuCheckpointOperationComplete(info->handle));
    kill(target.pid, SIGKILL);
}

// Another process takes the GPU's memory meanwhile: 8 MiB in all.
void test_out_of_memory(void) {
    use_all_devices();
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", 5 * MIB), "error", 5) != 0);
    struct target greedy = target_start(NULL);
    CHECK(strcmp(target_ask(&greedy, "alloc 0 %zu", 4 * MIB), "error 2") == 0);
    CUcheckpointCustomStorageInfo *info;
    OK(lock_within(target.pid, 0));
    OK(checkpoint_custom(target.pid, &info));
    OK(cuCheckpointOperationComplete(info->handle));
    CHECK(strncmp(target_ask(&greedy, "alloc 0 %zu", 4 * MIB), "error", 5) != 0);
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, restore_custom(target.pid, NULL, 0, &info));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_FAILED);
    target_end(&greedy);
    // Stuck for ever, as was seen on hardware.
    expect_illegal(target.pid, "");
    kill(target.pid, SIGKILL);
}

void test_host_checkpoint(void) {
    struct target target = target_start(NULL);
    fill_target(&target);
    const size_t total = strtoul(target_ask(&target, "free-memory 0"), NULL, 10);
    OK(lock_within(target.pid, 1000));
    OK(cuCheckpointProcessCheckpoint(target.pid, NULL));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTED);
    check_holds_nothing(target.pid);
    use_all_devices();
    size_t free_bytes, all;
    use_device(0);
    OK(cuMemGetInfo(&free_bytes, &all));
    CHECK(free_bytes == all && total < all);
    OK(cuCheckpointProcessRestore(target.pid, NULL));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_LOCKED);
    OK(cuCheckpointProcessUnlock(target.pid, NULL));
    check_target(&target);
    target_end(&target);
}

// A process that comes up suspended gets the contents of another.
void test_suspended(void) {
    use_all_devices();
    struct target first = target_start(NULL);
    fill_target(&first);
    struct target fresh = target_start(NULL);
    static const char *const steps[] = {"alloc 0 3000000", "alloc 0 1",    "alloc 0 70000", "alloc 2 5000000",
                                        "free 1",          "alloc 0 4097", "alloc 2 123"};
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        target_ask(&fresh, "%s", steps[i]);
    target_expect(&fresh, "ok", "suspend");
    CHECK(state_of(fresh.pid) == CU_PROCESS_STATE_CHECKPOINTED);
    check_holds_nothing(fresh.pid);
    target_tell(&fresh, "check 0 10"); // blocks until Unlock

    CUcheckpointCustomStorageInfo *info;
    struct image image;
    OK(lock_within(first.pid, 0));
    OK(checkpoint_custom(first.pid, &info));
    copy_out(info, &image);
    OK(cuCheckpointOperationComplete(info->handle));
    kill(first.pid, SIGKILL);

    CHECK(!target_has_answer(&fresh, 50));
    OK(restore_custom(fresh.pid, NULL, 0, &info));
    copy_in(info, &image);
    OK(cuCheckpointOperationComplete(info->handle));
    OK(cuCheckpointProcessUnlock(fresh.pid, NULL));
    CHECK(strcmp(target_answer(&fresh), "ok") == 0);
    check_target(&fresh);
    target_end(&fresh);
}

// Lock waits for the work on the streams: a fill that begins 100 ms later is in what is saved.
void test_lock_waits(void) {
    use_all_devices();
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    target_expect(&target, "ok", "set-async 0 200");
    CUcheckpointCustomStorageInfo *info;
    struct image image;
    OK(lock_within(target.pid, 0));
    OK(checkpoint_custom(target.pid, &info));
    copy_out(info, &image);
    OK(cuCheckpointOperationComplete(info->handle));
    CHECK(image.extents[0].bytes[0] == 200 && image.extents[0].bytes[MIB - 1] == 200);
    kill(target.pid, SIGKILL);
}

void test_lock_timeout(void) {
    struct target target = target_start(NULL);
    // Work on a stream, then a call under way: neither ends in time, and the target goes on.
    const char *const reasons[] = {"stream-sleep 0 2000", "call-sleep 0 2000"};
    for (int i = 0; i < 2; i++) {
        target_tell(&target, "%s", reasons[i]);
        if (i == 0)
            CHECK(strcmp(target_answer(&target), "ok") == 0);
        sleep_ms(100);
        EXPECT(CUDA_ERROR_NOT_READY, lock_within(target.pid, 100));
        CHECK(state_of(target.pid) == CU_PROCESS_STATE_RUNNING);
        if (i == 1)
            CHECK(strcmp(target_answer(&target), "ok") == 0);
        target_expect(&target, "ok", "ping");
        CHECK(strtoul(target_ask(&target, "free-memory 0"), NULL, 10) > 0);
        OK(lock_within(target.pid, 5000));
        OK(cuCheckpointProcessUnlock(target.pid, NULL));
    }
    target_end(&target);
}

void test_stopped_target(void) {
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    kill(target.pid, SIGSTOP);
    EXPECT(CUDA_ERROR_NOT_READY, lock_within(target.pid, 100));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_RUNNING);
    kill(target.pid, SIGCONT);
    sleep_ms(50);
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_RUNNING); // it was not carried out later
    target_expect(&target, "ok", "fill 0 3");
    target_end(&target);
}

// Brings a target whose savers were killed back to RUNNING. What they had asked for may still be carried out meanwhile; once a lock of our
// own has been, everything before it has been too.
static void settle(pid_t pid) {
    for (;;) {
        CUprocessState state = state_of(pid);
        CUresult result;
        if (state == CU_PROCESS_STATE_CHECKPOINTED) {
            result = cuCheckpointProcessRestore(pid, NULL);
        } else if (state == CU_PROCESS_STATE_LOCKED) {
            result = cuCheckpointProcessUnlock(pid, NULL);
        } else {
            CHECK(state == CU_PROCESS_STATE_RUNNING);
            result = lock_within(pid, 10000);
            if (result == CUDA_SUCCESS) {
                OK(cuCheckpointProcessUnlock(pid, NULL));
                return;
            }
        }
        CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_ILLEGAL_STATE);
    }
}

// A hundred savers that lock and unlock, each killed at some moment; the target computes all the while.
void test_killed_savers(void) {
    OK(cuInit(0));
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", 64 * KIB), "error", 5) != 0);
    target_expect(&target, "ok", "work 0");
    srand(1);
    int left_locked = 0;
    for (int i = 0; i < 100; i++) {
        pid_t savers[2];
        for (int k = 0; k < 2; k++) {
            savers[k] = fork();
            CHECK(savers[k] >= 0);
            if (savers[k] == 0) {
                for (;;) {
                    lock_within(target.pid, rand() % 3 ? 1000 : 1);
                    if (rand() % 4 == 0)
                        cuCheckpointProcessCheckpoint(target.pid, NULL);
                    cuCheckpointProcessRestore(target.pid, NULL);
                    cuCheckpointProcessUnlock(target.pid, NULL);
                }
            }
        }
        sleep_ms(1 + rand() % 12);
        for (int k = 0; k < 2; k++) {
            kill(savers[k], SIGKILL);
            CHECK(waitpid(savers[k], NULL, 0) == savers[k]);
        }
        left_locked += state_of(target.pid) != CU_PROCESS_STATE_RUNNING;
        settle(target.pid);
    }
    CHECK(left_locked > 0); // else no saver was killed where it matters
    target_expect(&target, "ok", "stop-work 0");
    target_end(&target);
}

void test_killed_after_begin(void) {
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    pid_t saver = fork();
    if (saver == 0) {
        CUcheckpointCustomStorageInfo *info;
        use_all_devices();
        OK(lock_within(target.pid, 0));
        OK(checkpoint_custom(target.pid, &info));
        kill(getpid(), SIGKILL);
    }
    CHECK(waitpid(saver, NULL, 0) == saver);
    use_all_devices();
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTING);
    expect_illegal(target.pid, "");
    kill(target.pid, SIGKILL);
}

// An extent goes with the context that it is mapped in, and cannot be completed then.
void test_released_context(void) {
    use_all_devices();
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    CUcheckpointCustomStorageInfo *info;
    OK(lock_within(target.pid, 0));
    OK(checkpoint_custom(target.pid, &info));
    OK(cuDevicePrimaryCtxRelease(0));
    use_device(0);
    unsigned char byte;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(&byte, info->perDeviceData[0].devPtr, 1));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCheckpointOperationComplete(info->handle));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_CHECKPOINTING);
    kill(target.pid, SIGKILL);
}

// API 13.0: no custom storage. What driver 580 does.
void test_old_driver(void) {
    use_all_devices();
    struct target target = target_start(NULL);
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    void *function = NULL;
    CUdriverProcAddressQueryResult status;
    EXPECT(CUDA_ERROR_INVALID_VALUE,
           cuGetProcAddress("cuCheckpointOperationComplete", &function, 13040, 0, &status));
    OK(cuGetProcAddress("cuCheckpointOperationComplete", &function, 13000, 0, &status));
    CHECK(function == NULL && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    CUcheckpointCustomStorageInfo *info;
    OK(lock_within(target.pid, 1000));
    EXPECT(CUDA_ERROR_INVALID_VALUE, checkpoint_custom(target.pid, &info));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_LOCKED);
    OK(cuCheckpointProcessUnlock(target.pid, NULL));
    target_expect(&target, "ok", "fill 0 1");
    target_end(&target);
}

// API 12.4: no checkpoint functions at all.
void test_older_driver(void) {
    OK(cuInit(0));
    void *function = (void *)1;
    CUdriverProcAddressQueryResult status;
    OK(cuGetProcAddress("cuCheckpointProcessLock", &function, 12040, 0, &status));
    CHECK(function == NULL);
    CUprocessState state;
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuCheckpointProcessGetState(getpid(), &state));
}

// Faults by the variable SAVER_FAULTS; the target has none.
void test_faults(void) {
    OK(cuInit(0));
    use_device(0);
    struct target target = target_start(getenv("TARGET_CUDA"));
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    // cuCheckpointProcessLock#1=code:12345: not done.
    EXPECT(12345, lock_within(target.pid, 1000));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_RUNNING);
    // cuCheckpointProcessLock#2=after-code:600: done all the same.
    EXPECT(600, lock_within(target.pid, 1000));
    CHECK(state_of(target.pid) == CU_PROCESS_STATE_LOCKED);
    // cuMemcpyDtoHAsync#2=code:700.
    CUcheckpointCustomStorageInfo *info;
    OK(checkpoint_custom(target.pid, &info));
    CUcheckpointCustomStoragePerDeviceData *device = &info->perDeviceData[0];
    unsigned char byte;
    OK(cuMemcpyDtoHAsync(&byte, device->devPtr, 1, device->stream));
    EXPECT(700, cuMemcpyDtoHAsync(&byte, device->devPtr, 1, device->stream));
    OK(cuMemcpyDtoHAsync(&byte, device->devPtr, 1, device->stream));
    // cuStreamSynchronize#1=kill-target: the mapped memory is still there, the target is not.
    OK(cuStreamSynchronize(device->stream));
    CHECK(kill(target.pid, 0) == 0); // a zombie
    CUprocessState state;
    EXPECT(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointProcessGetState(target.pid, &state));
    OK(cuMemcpyDtoHAsync(&byte, device->devPtr + MIB - 1, 1, device->stream));
    EXPECT(CUDA_ERROR_OPERATING_SYSTEM, cuCheckpointOperationComplete(info->handle));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCheckpointOperationComplete(info->handle));
    // cuCtxSynchronize#1=kill-caller.
    cuCtxSynchronize();
    CHECK(!"still alive");
}

// Calls for the trace, which the Rust side reads.
void test_traced(void) {
    OK(cuInit(0));
    use_device(0);
    struct target target = target_start(getenv("TARGET_CUDA"));
    CHECK(strncmp(target_ask(&target, "alloc 0 %zu", MIB), "error", 5) != 0);
    CUcheckpointCustomStorageInfo *info;
    OK(lock_within(target.pid, 1000));
    OK(checkpoint_custom(target.pid, &info));
    CUcheckpointCustomStoragePerDeviceData *device = &info->perDeviceData[0];
    unsigned char *host;
    OK(cuMemHostAlloc((void **)&host, MIB, 0));
    OK(cuMemcpyDtoHAsync(host, device->devPtr, MIB / 2, device->stream));
    OK(cuMemcpyDtoHAsync(host, device->devPtr + MIB / 2, MIB / 2, device->stream));
    OK(cuStreamSynchronize(device->stream));
    OK(cuCheckpointOperationComplete(info->handle));
    EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(target.pid, NULL));
    kill(target.pid, SIGKILL);
}
