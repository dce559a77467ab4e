// The target process of the tests: device memory that it fills and checks when told to.
#include "harness.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ALLOCATIONS 64

static struct {
    int gpu;
    CUdeviceptr address;
    size_t len;
} allocations[ALLOCATIONS];
static int allocation_count;
static CUcontext contexts[64];
static CUstream streams[64];

static void on_gpu(int gpu) {
    if (!contexts[gpu]) {
        contexts[gpu] = use_device(gpu);
        OK(cuStreamCreate(&streams[gpu], CU_STREAM_NON_BLOCKING));
    }
    OK(cuCtxSetCurrent(contexts[gpu]));
}

static void sleep_in_stream(void *ms) {
    sleep_ms((int)(intptr_t)ms);
}

// Raises every byte of an allocation, over and over, one copy at a time: a lock can fall between any two calls.
static unsigned long rounds;
static pthread_t worker;
static volatile int worker_stops;

static void *work(void *index_as_pointer) {
    int index = (int)(intptr_t)index_as_pointer;
    size_t len = allocations[index].len;
    unsigned char *bytes = malloc(len);
    CHECK(bytes != NULL);
    OK(cuCtxSetCurrent(contexts[allocations[index].gpu]));
    while (!worker_stops) {
        OK(cuMemcpyDtoH(bytes, allocations[index].address, len));
        for (size_t i = 0; i < len; i++)
            bytes[i]++;
        OK(cuMemcpyHtoD(allocations[index].address, bytes, len));
        rounds++;
    }
    free(bytes);
    return NULL;
}

static void serve(char *line) {
    int gpu, index, ms;
    unsigned seed;
    size_t len;
    if (sscanf(line, "alloc %d %zu", &gpu, &len) == 2) {
        CHECK(allocation_count < ALLOCATIONS);
        on_gpu(gpu);
        CUdeviceptr address;
        CUresult result = cuMemAlloc(&address, len);
        if (result != CUDA_SUCCESS) {
            printf("error %d\n", result);
            return;
        }
        allocations[allocation_count].gpu = gpu;
        allocations[allocation_count].len = len;
        allocations[allocation_count++].address = address;
        printf("%llx\n", address);
    } else if (sscanf(line, "free %d", &index) == 1) {
        OK(cuMemFree(allocations[index].address));
        allocations[index].len = 0;
        puts("ok");
    } else if (sscanf(line, "fill %d %u", &index, &seed) == 2) {
        on_gpu(allocations[index].gpu);
        unsigned char *bytes = malloc(allocations[index].len);
        CHECK(bytes != NULL);
        pattern_fill(bytes, allocations[index].len, seed);
        OK(cuMemcpyHtoD(allocations[index].address, bytes, allocations[index].len));
        free(bytes);
        puts("ok");
    } else if (sscanf(line, "check %d %u", &index, &seed) == 2) {
        on_gpu(allocations[index].gpu);
        unsigned char *bytes = malloc(allocations[index].len);
        CHECK(bytes != NULL);
        OK(cuMemcpyDtoH(bytes, allocations[index].address, allocations[index].len));
        size_t i = 0;
        while (i < allocations[index].len && bytes[i] == pattern(seed, i))
            i++;
        if (i == allocations[index].len)
            puts("ok");
        else
            printf("differs at %zu\n", i);
        free(bytes);
    } else if (sscanf(line, "set-async %d %u", &index, &seed) == 2) {
        on_gpu(allocations[index].gpu);
        CUstream stream = streams[allocations[index].gpu];
        OK(cuLaunchHostFunc(stream, sleep_in_stream, (void *)(intptr_t)100));
        OK(cuMemsetD8Async(allocations[index].address, (unsigned char)seed, allocations[index].len, stream));
        puts("ok");
    } else if (sscanf(line, "stream-sleep %d %d", &gpu, &ms) == 2) {
        on_gpu(gpu);
        OK(cuLaunchHostFunc(streams[gpu], sleep_in_stream, (void *)(intptr_t)ms));
        puts("ok");
    } else if (sscanf(line, "call-sleep %d %d", &gpu, &ms) == 2) {
        on_gpu(gpu);
        OK(cuLaunchHostFunc(streams[gpu], sleep_in_stream, (void *)(intptr_t)ms));
        OK(cuStreamSynchronize(streams[gpu]));
        puts("ok");
    } else if (sscanf(line, "work %d", &index) == 1) {
        worker_stops = 0;
        CHECK(pthread_create(&worker, NULL, work, (void *)(intptr_t)index) == 0);
        puts("ok");
    } else if (sscanf(line, "stop-work %d", &index) == 1) {
        worker_stops = 1;
        CHECK(pthread_join(worker, NULL) == 0);
        unsigned char *bytes = malloc(allocations[index].len);
        CHECK(bytes != NULL);
        OK(cuMemcpyDtoH(bytes, allocations[index].address, allocations[index].len));
        bool all = true;
        for (size_t i = 0; i < allocations[index].len; i++)
            all = all && bytes[i] == (unsigned char)rounds;
        free(bytes);
        puts(all && rounds > 0 ? "ok" : "lost");
    } else if (strncmp(line, "uuid ", 5) == 0) {
        CUuuid uuid;
        OK(cuDeviceGetUuid(&uuid, atoi(line + 5)));
        for (int i = 0; i < 16; i++)
            printf("%02x", (unsigned char)uuid.bytes[i]);
        putchar('\n');
    } else if (strncmp(line, "free-memory ", 12) == 0) {
        on_gpu(atoi(line + 12));
        size_t free_bytes, total;
        OK(cuMemGetInfo(&free_bytes, &total));
        printf("%zu\n", free_bytes);
    } else if (strcmp(line, "suspend") == 0) {
        OK(cuCheckpointProcessLock(getpid(), NULL));
        OK(cuCheckpointProcessCheckpoint(getpid(), NULL));
        puts("ok");
    } else if (strcmp(line, "ping") == 0) {
        puts("ok");
    } else {
        printf("unknown command %s\n", line);
    }
}

int target_main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    OK(cuInit(0));
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        serve(line);
    }
    return 0;
}
