// Devices, memory, streams, events: what any CUDA program uses.
#define _GNU_SOURCE
#include "harness.h"
#include "tests.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

// The legacy names, which the header hides behind its #defines.
#undef cuMemAlloc
#undef cuMemcpyDtoH
#undef cuMemGetInfo
#undef cuGetProcAddress
CUresult cuMemAlloc(unsigned *address, unsigned len);
CUresult cuMemcpyDtoH(void *host, unsigned address, unsigned len);
CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total);
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags);

// Two GPUs of 1 GiB and 512 MiB.
void test_devices(void) {
    int count = 0, version = 0, value = -1;
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
    OK(cuDriverGetVersion(&version));
    CHECK(version == 13050);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuInit(1));
    OK(cuInit(0));
    OK(cuInit(0));
    OK(cuDeviceGetCount(&count));
    CHECK(count == 2);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuDeviceGetCount(NULL));

    CUdevice device;
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, 2));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, -1));
    OK(cuDeviceGet(&device, 1));
    char name[64], small[5];
    OK(cuDeviceGetName(name, sizeof name, device));
    CHECK(strstr(name, "not hardware") != NULL);
    OK(cuDeviceGetName(small, sizeof small, device));
    CHECK(strlen(small) == 4);
    size_t total;
    OK(cuDeviceTotalMem(&total, device));
    CHECK(total == 512 * MIB);
    CUuuid one, other;
    OK(cuDeviceGetUuid(&one, 0));
    OK(cuDeviceGetUuid(&other, 1));
    CHECK(memcmp(&one, &other, sizeof one) != 0);

    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    CHECK(value == 0); // no real chip
    OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, device));
    CHECK(value == 0);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuDeviceGetAttribute(&value, (CUdevice_attribute)9999, device));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 99));
    char pci[16];
    OK(cuDeviceGetPCIBusId(pci, sizeof pci, device));
    CUdevice found = -1;
    OK(cuDeviceGetByPCIBusId(&found, pci));
    CHECK(found == device);

    const char *text = NULL;
    OK(cuGetErrorName(CUDA_ERROR_ILLEGAL_STATE, &text));
    CHECK(strcmp(text, "CUDA_ERROR_ILLEGAL_STATE") == 0);
    OK(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
    CHECK(strcmp(text, "out of memory") == 0);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuGetErrorName((CUresult)12345, &text));
    CHECK(text == NULL);
}

// Contexts: what was seen on driver 580.
void test_contexts(void) {
    OK(cuInit(0));
    CUdeviceptr address = 0;
    void *host = NULL;
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&address, 4096));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuMemHostAlloc(&host, 4096, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost((void *)4096));
    EXPECT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister((void *)4096));
    OK(cuMemFree(0));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCurrent((CUcontext)4096));

    CUcontext context = use_device(0), again, current;
    OK(cuDevicePrimaryCtxRetain(&again, 0));
    CHECK(again == context);
    OK(cuCtxGetCurrent(&current));
    CHECK(current == context);
    CUcontext other;
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    OK(cuCtxPushCurrent(other));
    CUdevice device;
    OK(cuCtxGetDevice(&device));
    CHECK(device == 1);
    OK(cuCtxPopCurrent(&current));
    CHECK(current == other);
    OK(cuCtxGetDevice(&device));
    CHECK(device == 0);
    OK(cuCtxSynchronize());

    OK(cuMemAlloc_v2(&address, 4096));
    OK(cuDevicePrimaryCtxRelease(0));
    OK(cuMemsetD8(address, 1, 4096));
    OK(cuDevicePrimaryCtxRelease(0));
    EXPECT(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuMemAlloc_v2(&address, 4096));
    OK(cuCtxGetDevice(&device));
    OK(cuCtxSetCurrent(context));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(0));
    use_device(0);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(address, 1, 4096));
}

// Allocations, copies and fills; 1 GiB, granularity 1.
void test_memory(void) {
    OK(cuInit(0));
    use_device(0);
    size_t free_before, free_after, total;
    OK(cuMemGetInfo_v2(&free_before, &total));
    CUdeviceptr a, b, c, again;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&a, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(NULL, 16));
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&a, total + 1));
    OK(cuMemAlloc_v2(&a, 100 * MIB));
    OK(cuMemAlloc_v2(&b, 1000));
    OK(cuMemAlloc_v2(&c, 5));
    OK(cuMemGetInfo_v2(&free_after, &total));
    CHECK(free_before - free_after == 100 * MIB + 1005);
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&again, free_after + 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(a + 1));
    OK(cuMemFree(a));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(a));
    OK(cuMemAlloc_v2(&again, 50 * MIB));
    CHECK(again == a);

    unsigned char out[1000], back[1000];
    pattern_fill(out, sizeof out, 3);
    OK(cuMemcpyHtoD(b, out, sizeof out));
    OK(cuMemcpyDtoH_v2(back, b, sizeof back));
    CHECK(memcmp(out, back, sizeof out) == 0);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(back, b + 1, 1000));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(back, c, 6));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD(0x1234567000, out, 1));
    OK(cuMemcpyDtoH_v2(back, b, 0));
    OK(cuMemsetD8(b + 10, 0xab, 100));
    OK(cuMemsetD32(b + 200, 0x01020304, 25));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD32(b + 202, 0, 1));
    OK(cuMemcpyDtoD(again, b, 1000));
    OK(cuMemcpyDtoH_v2(back, again, 1000));
    memset(out + 10, 0xab, 100);
    for (int i = 0; i < 25; i++)
        memcpy(out + 200 + 4 * i, &(unsigned){0x01020304}, 4);
    CHECK(memcmp(out, back, sizeof out) == 0);

    CUdeviceptr base;
    size_t len;
    OK(cuMemGetAddressRange(&base, &len, b + 999));
    CHECK(base == b && len == 1000);
    EXPECT(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange(&base, &len, 0x1234567000));
    CUcontext context = NULL, current;
    OK(cuCtxGetCurrent(&current));
    OK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, b));
    CHECK(context == current);
    CUmemorytype type;
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, b));
    CHECK(type == CU_MEMORYTYPE_DEVICE);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)out));

    // A device address is none of the host's.
    pid_t child = fork();
    if (child == 0) {
        volatile unsigned char *pointer = (volatile unsigned char *)(uintptr_t)b;
        signal(SIGSEGV, SIG_DFL);
        _exit(*pointer);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
}

// Page-locked memory: what was seen on driver 580.
void test_host_memory(void) {
    OK(cuInit(0));
    use_device(0);
    unsigned char *host = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    OK(cuMemHostRegister(host, 4096, 0));
    EXPECT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(host, 4096, 0));
    EXPECT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(host, 8192, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostUnregister(host + 100));
    OK(cuMemHostUnregister(host));
    EXPECT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(host));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister(host, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister(NULL, 4096, 0));
    OK(cuMemHostRegister(host + 100, 1000, CU_MEMHOSTREGISTER_PORTABLE));
    OK(cuMemHostUnregister(host + 100));

    unsigned char *ours;
    OK(cuMemHostAlloc((void **)&ours, 10000, CU_MEMHOSTALLOC_PORTABLE));
    memset(ours, 7, 10000);
    unsigned flags;
    OK(cuMemHostGetFlags(&flags, ours + 5));
    CHECK(flags == CU_MEMHOSTALLOC_PORTABLE);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(ours + 1));
    OK(cuMemFreeHost(ours));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(ours));
}

static void set_flag(void *flag) {
    __atomic_store_n((int *)flag, 1, __ATOMIC_RELEASE);
}

static CUresult from_callback;
static void call_the_driver(void *unused) {
    (void)unused;
    from_callback = cuCtxSynchronize();
}

// Streams run later and in order; copies at 40 MiB/s each way, so that a machine that pauses for a moment does not spoil a check.
void test_streams(void) {
    OK(cuInit(0));
    use_device(0);
    const size_t len = 20 * MIB; // half a second
    CUdeviceptr device;
    OK(cuMemAlloc_v2(&device, len));
    OK(cuMemsetD8(device, 0x55, len));
    unsigned char *host;
    OK(cuMemHostAlloc((void **)&host, len, 0));
    memset(host, 0xee, len);
    CUstream stream, other;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    CUevent start, end;
    OK(cuEventCreate(&start, CU_EVENT_DEFAULT));
    OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
    OK(cuEventQuery(start));
    float ms;
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, start, end));

    // A copy that nobody has waited for has not happened, to the last byte.
    OK(cuEventRecord(start, stream));
    OK(cuMemcpyDtoHAsync(host, device, len, stream));
    OK(cuEventRecord(end, stream));
    CHECK(host[0] == 0xee && host[len - 1] == 0xee);
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(end));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&ms, start, end));
    // The source is read late too.
    memset(host, 0xdd, len);
    OK(cuStreamSynchronize(stream));
    CHECK(host[0] == 0x55 && host[len - 1] == 0x55);
    OK(cuEventQuery(end));
    OK(cuEventElapsedTime(&ms, start, end));
    CHECK(ms >= 490);

    // The other direction; the buffer changes under the copy.
    memset(host, 0x11, len);
    OK(cuMemcpyHtoDAsync(device, host, len, stream));
    memset(host, 0x22, len);
    OK(cuStreamSynchronize(stream));
    unsigned char byte;
    OK(cuMemcpyDtoH_v2(&byte, device + len - 1, 1));
    CHECK(byte == 0x22);

    // One stream waits for another's event, and host functions come in order.
    int flag = 0;
    OK(cuMemcpyDtoHAsync(host, device, len, stream));
    OK(cuEventRecord(end, stream));
    OK(cuStreamWaitEvent(other, end, 0));
    OK(cuLaunchHostFunc(other, set_flag, &flag));
    CHECK(__atomic_load_n(&flag, __ATOMIC_ACQUIRE) == 0);
    OK(cuStreamSynchronize(other));
    CHECK(flag == 1);
    OK(cuStreamQuery(stream));

    // Memory that is not page-locked: the call returns when the copy is done.
    unsigned char *pageable = malloc(len);
    memset(pageable, 0, len);
    OK(cuMemcpyDtoHAsync(pageable, device, len, stream));
    CHECK(pageable[0] == 0x22 && pageable[len - 1] == 0x22);
    OK(cuMemHostRegister(pageable, len, 0));
    memset(pageable, 0, len);
    OK(cuMemcpyDtoHAsync(pageable, device, len, stream));
    CHECK(pageable[len - 1] == 0);
    OK(cuMemHostUnregister(pageable)); // waits for the copy
    CHECK(pageable[len - 1] == 0x22);
    free(pageable);

    // The default stream waits for blocking streams, and they for it.
    CUstream blocking;
    OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    flag = 0;
    OK(cuMemcpyDtoHAsync(host, device, len, blocking));
    OK(cuLaunchHostFunc(blocking, set_flag, &flag));
    OK(cuMemsetD8Async(device, 0, 1, NULL));
    OK(cuStreamSynchronize(NULL));
    CHECK(flag == 1);

    OK(cuLaunchHostFunc(stream, call_the_driver, NULL));
    OK(cuStreamSynchronize(stream));
    CHECK(from_callback == CUDA_ERROR_NOT_PERMITTED);

    // Work of a destroyed stream is still done.
    flag = 0;
    OK(cuMemcpyDtoHAsync(host, device, len, other));
    OK(cuLaunchHostFunc(other, set_flag, &flag));
    OK(cuStreamDestroy(other));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(other));
    OK(cuCtxSynchronize());
    CHECK(flag == 1);
    OK(cuEventDestroy(start));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(start));

    CUcontext context, current;
    OK(cuCtxGetCurrent(&current));
    OK(cuStreamGetCtx(stream, &context));
    CHECK(context == current);
    CUgreenCtx green = (CUgreenCtx)1;
    OK(cuStreamGetCtx_v2(stream, &context, &green));
    CHECK(context == current && green == NULL);
    CUdevice gpu = -1;
    OK(cuStreamGetDevice(stream, &gpu));
    CHECK(gpu == 0);
}

// Even without a limit an asynchronous copy is not done in the call. The stream is busy until `go`, so this is no matter of time.
static void wait_for_flag(void *flag) {
    while (!__atomic_load_n((int *)flag, __ATOMIC_ACQUIRE))
        sleep_ms(1);
}

void test_missing_synchronize(void) {
    OK(cuInit(0));
    use_device(0);
    CUdeviceptr device;
    OK(cuMemAlloc_v2(&device, MIB));
    OK(cuMemsetD8(device, 9, MIB));
    unsigned char *host;
    OK(cuMemHostAlloc((void **)&host, MIB, 0));
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    int go = 0;
    OK(cuLaunchHostFunc(stream, wait_for_flag, &go));
    OK(cuMemcpyDtoHAsync(host, device, MIB, stream));
    CHECK(host[0] == 0 && host[MIB - 1] == 0);
    __atomic_store_n(&go, 1, __ATOMIC_RELEASE);
    OK(cuStreamSynchronize(stream));
    CHECK(host[0] == 9 && host[MIB - 1] == 9);
}

void test_capture(void) {
    OK(cuInit(0));
    use_device(0);
    CUstream stream;
    CUstreamCaptureStatus status;
    CUgraph graph = NULL;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuStreamEndCapture(stream, &graph));
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuStreamIsCapturing(stream, &status));
    CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphDestroy(graph));
    OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(stream));
    OK(cuStreamIsCapturing(stream, &status));
    CHECK(status == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &graph));
    OK(cuStreamSynchronize(stream));
}

// What a bare dlsym gives, and what cuGetProcAddress gives; codes of driver 580.
void test_entry_points(void) {
    OK(cuInit(0));
    use_device(0);
    unsigned legacy = 0;
    char byte;
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&legacy, 4096));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuMemcpyDtoH(&byte, 0x1000, 1));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuMemGetInfo(&legacy, &legacy));

    void *function = NULL;
    CUdriverProcAddressQueryResult status;
    OK(cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &status));
    CHECK(function == (void *)cuMemAlloc_v2 && status == CU_GET_PROC_ADDRESS_SUCCESS);
    OK(cuGetProcAddress_v2("cuMemAlloc", &function, 2000, 0, NULL));
    CHECK(function == (void *)cuMemAlloc);
    OK(cuGetProcAddress_v2("cuStreamGetCtx", &function, 12000, 0, &status));
    CHECK(function == (void *)cuStreamGetCtx);
    OK(cuGetProcAddress_v2("cuStreamGetCtx", &function, 13040, 0, &status));
    CHECK(function == (void *)cuStreamGetCtx_v2);
    OK(cuGetProcAddress_v2("cuCheckpointOperationComplete", &function, 13040, 0, &status));
    CHECK(function == (void *)cuCheckpointOperationComplete);
    OK(cuGetProcAddress_v2("cuStreamGetDevice", &function, 12000, 0, &status));
    CHECK(function == NULL && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    OK(cuGetProcAddress_v2("cuMemAlloc_v2", &function, 12000, 0, &status));
    CHECK(function == NULL && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress_v2("cuInit", &function, 99000, 0, &status));
    OK(cuGetProcAddress("cuInit", &function, 12000, 0));
    CHECK(function == (void *)cuInit);
    EXPECT(CUDA_ERROR_NOT_FOUND, cuGetProcAddress("cuNoSuchThing", &function, 12000, 0));
    CHECK(function == (void *)cuInit);
}

// A process forked after cuInit has no driver, and is none to others.
void test_fork(void) {
    OK(cuInit(0));
    use_device(0);
    int to_child[2];
    CHECK(pipe(to_child) == 0);
    pid_t child = fork();
    if (child == 0) {
        int count;
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuInit(0));
        char byte;
        close(to_child[1]);
        CHECK(read(to_child[0], &byte, 1) == 0);
        _exit(0);
    }
    close(to_child[0]);
    CUprocessState state;
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCheckpointProcessGetState(child, &state));
    close(to_child[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// A wrong variable: cuInit refuses.
void test_wrong_variable(void) {
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuInit(0));
}

void test_no_device(void) {
    EXPECT(CUDA_ERROR_NO_DEVICE, cuInit(0));
}
