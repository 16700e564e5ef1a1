// SPDX-License-Identifier: Apache-2.0
// A STUB of NVIDIA's driver library, on which cuda-python itself runs: no GPU. Every call works
// at once on host memory. It shows that we call cuda-python as it wants to be called; which
// orderings matter, tests/unit/copies/fake_cuda.py shows.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int R;
typedef uint64_t P;
enum { OK = 0, INVALID_VALUE = 1, NOT_READY = 600 };

// What the last calls were given, for the test to look at.
struct {
  uint64_t batch_calls, batch_count, source_order, flags, launches, grid, block, arguments[2];
  uint64_t single_copies, registered, not_ready, relaxed;
} stub_seen;

// Batch calls and launches wait inside until another thread opens this again, at most 10 s.
struct {
  volatile uint64_t shut, inside;
} stub_gate;
static R pass_gate(void) {
  stub_gate.inside = stub_gate.shut;
  for (int i = 0; stub_gate.shut && i < 1000; ++i) usleep(10000);
  return stub_gate.shut ? INVALID_VALUE : OK;
}

// How often a thread took the interpreter lock: in all, and between the first call of a batch, when
// `armed`, and its end. Counted if this library is preloaded and Python is a shared library.
struct {
  volatile uint64_t armed, taken_in_all, taken;
} stub_lock;
static __thread uint64_t taken_by_me, taken_before;
static void count_taken(const char* name, void* state) {
  ((void (*)(void*))dlsym(RTLD_NEXT, name))(state);
  taken_by_me++, stub_lock.taken_in_all++;
}
void PyEval_RestoreThread(void* state) { count_taken("PyEval_RestoreThread", state); }
static void look_at_lock(void) {
  if (!stub_lock.armed) stub_lock.taken += taken_by_me - taken_before;
  stub_lock.armed = 0, taken_before = taken_by_me;
}

// Open the gate, and wait until `fd` is readable; PyDLL calls this without releasing the lock.
int stub_hold_until_readable(int fd, int wait_ms) {
  struct pollfd one = {fd, POLLIN, 0};
  stub_gate.shut = 0;
  return poll(&one, 1, wait_ms);
}

R stub_cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
R stub_cuDriverGetVersion(int* v) { return *v = 13000, OK; }
R stub_cuGetErrorName(R e, const char** s) { return *s = e ? "CUDA_ERROR_X" : "CUDA_SUCCESS", OK; }
R stub_cuGetErrorString(R e, const char** s) { return *s = "stub", (void)e, OK; }
R stub_cuDeviceGetCount(int* n) { return *n = 1, OK; }
R stub_cuDeviceGet(int* device, int n) { return *device = n, n ? 101 : OK; }
R stub_cuDeviceGetName(char* name, int size, int d) {
  return (void)d, snprintf(name, size, "Stub GPU"), OK;
}
R stub_cuDeviceGetUuid(char* uuid, int d) { return (void)d, memset(uuid, 0xab, 16), OK; }
R stub_cuDeviceGetAttribute(int* value, int which, int d) {
  (void)d;
  *value = which == 75 ? 9 : which == 76 ? 0 : which == 91 ? 1 : which == 134 ? -1 : 0;
  return OK;
}
R stub_cuDevicePrimaryCtxRetain(P* c, int d) { return *c = 77, (void)d, OK; }
R stub_cuDevicePrimaryCtxRelease(int d) { return (void)d, OK; }
R stub_cuCtxSetCurrent(P c) { return c == 77 ? OK : 201; }
R stub_cuThreadExchangeStreamCaptureMode(int* mode) {
  return stub_seen.relaxed += *mode == 2, *mode = 0, OK;
}
R stub_cuCtxGetStreamPriorityRange(int* least, int* most) { return *least = 0, *most = -5, OK; }
R stub_cuStreamCreateWithPriority(P* s, unsigned flags, int priority) {
  return *s = 1000, flags == 1 && priority == 0 ? OK : INVALID_VALUE;
}
R stub_cuStreamDestroy(P s) { return s == 1000 ? OK : 400; }
R stub_cuStreamSynchronize(P s) { return s == 1000 ? OK : 400; }
R stub_cuStreamQuery(P s) { return s == 1000 ? OK : 400; }
R stub_cuStreamWaitEvent(P s, P e, unsigned f) { return s == 1000 && e == 2000 && !f ? OK : 400; }
R stub_cuEventCreate(P* e, unsigned flags) { return *e = 2000, flags == 3 ? OK : INVALID_VALUE; }
R stub_cuEventRecord(P e, P s) {
  look_at_lock();
  return e == 2000 && (s == 1000 || !s) ? OK : 400;
}
R stub_cuEventQuery(P e) {
  if (e != 2000) return 400;
  return stub_seen.not_ready ? stub_seen.not_ready--, NOT_READY : OK;
}
R stub_cuEventSynchronize(P e) { return look_at_lock(), e == 2000 ? OK : 400; }
R stub_cuEventDestroy(P e) { return e == 2000 ? OK : 400; }

struct Attributes {
  int order, hints[4];
  unsigned flags;
};
R stub_cuMemcpyBatchAsync(P* to, P* from, size_t* sizes, size_t count, struct Attributes* a,
                          size_t* first, size_t attributes, size_t* failed, P stream) {
  if (attributes != 1 || first[0] || stream != 1000) return INVALID_VALUE;
  look_at_lock();
  if (pass_gate()) return INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (!sizes[i]) return *failed = i, INVALID_VALUE;
    if (sizes[i] == ~(size_t)0) return *failed = i, 987654;  // what no header names yet
    memcpy((void*)to[i], (void*)from[i], sizes[i]);
  }
  stub_seen.batch_calls++;
  stub_seen.batch_count += count;
  stub_seen.source_order = a->order;
  stub_seen.flags = a->flags;
  return OK;
}
R stub_cuMemcpyAsync(P to, P from, size_t count, P stream) {
  if (stream != 1000) return 400;
  return memcpy((void*)to, (void*)from, count), stub_seen.single_copies++, OK;
}
R stub_cuLibraryLoadData(P* l, const void* code, void* a, void* b, unsigned n, void* c, void* d,
                         unsigned m) {
  (void)a, (void)b, (void)c, (void)d;
  return *l = 3000, n || m || memcmp(code, "\177ELF", 4) ? INVALID_VALUE : OK;
}
R stub_cuLibraryGetKernel(P* k, P l, const char* name) {
  return *k = 3001, l == 3000 && !strcmp(name, "copy_blocks") ? OK : 500;
}
R stub_cuKernelGetFunction(P* f, P k) { return *f = 3002, k == 3001 ? OK : 400; }
R stub_cuLaunchKernel(P f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                      unsigned bz, unsigned shared, P stream, void** arguments, void** extra) {
  if (f != 3002 || gy * gz * by * bz != 1 || shared || stream != 1000 || extra) return 400;
  look_at_lock();
  if (pass_gate()) return INVALID_VALUE;
  stub_seen.launches++, stub_seen.grid = gx, stub_seen.block = bx;
  for (int i = 0; i < 2; ++i) stub_seen.arguments[i] = *(uint64_t*)arguments[i];
  uint64_t* row = (uint64_t*)stub_seen.arguments[0];
  for (uint64_t i = 0; i < stub_seen.arguments[1]; ++i, row += 3)
    memcpy((void*)row[0], (void*)row[1], row[2]);
  return OK;
}
R stub_cuMemHostRegister(void* p, size_t n, unsigned f) {
  return stub_seen.registered += n, p && f == 3 ? OK : INVALID_VALUE;
}
R stub_cuMemHostUnregister(void* p) { return p ? OK : INVALID_VALUE; }
R stub_cuMemHostAlloc(void** p, size_t n, unsigned f) {
  return *p = malloc(n), f == 3 ? OK : INVALID_VALUE;
}
R stub_cuMemFreeHost(void* p) { return free(p), OK; }
R stub_cuMemAlloc(P* p, size_t n) { return *p = (P)malloc(n), OK; }
R stub_cuMemFree(P p) { return free((void*)p), OK; }

R cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status) {
  char mine[128];
  (void)flags;
  int is_batch = !strcmp(name, "cuMemcpyBatchAsync");
  int missing = is_batch && (version != 12080 || getenv("STUB_OLD_DRIVER"));
  snprintf(mine, sizeof mine, "stub_%s", name);
  *found = !strncmp(name, "cuGetProcAddress", 16) ? (void*)cuGetProcAddress_v2
           : missing                              ? NULL
                                                  : dlsym(RTLD_DEFAULT, mine);
  if (!*found && !is_batch) {
    void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *found = self ? dlsym(self, mine) : NULL;
  }
  if (is_batch && !missing) *found = (void*)stub_cuMemcpyBatchAsync;
  if (status) *status = *found ? 0 : 1;
  return *found ? OK : is_batch ? 500 : OK;
}
