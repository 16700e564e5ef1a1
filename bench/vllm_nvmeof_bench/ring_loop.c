// SPDX-License-Identifier: Apache-2.0
//
// A minimal io_uring loop as a baseline for engines: one thread, one ring, registered buffers and
// a registered file, O_DIRECT, a fixed number of blocks in flight, sequentially through one file
// that was already written. Each block has its own memory, as in a server: a few reused buffers
// would stay in cache. Prints one line of JSON.
//
//   ring_loop FILE write|read|mixed BLOCK_BYTES TOTAL_BYTES DEPTH

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { HUGE_BYTES = 2 << 20, REGIONS_MAX = 64 };
// The kernel's limit for one registered buffer.
static const size_t REGION_BYTES = (size_t)1 << 30;
// Content that no device can treat as zeros, generated once and copied.
static const size_t NOISE_BYTES = (size_t)8 << 20;

struct plan {
  size_t block, blocks;
  size_t per_region;  // blocks per registered buffer
  unsigned depth;
  int mixed, write, registered;
};

static double seconds_of(clockid_t clock) {
  struct timespec t;

  clock_gettime(clock, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char* what, int error) {
  fprintf(stderr, "ring_loop: %s: %s\n", what, strerror(error));
  exit(1);
}

static int by_value(const void* left, const void* right) {
  double a = *(const double*)left, b = *(const double*)right;

  return (a > b) - (a < b);
}

static char* buffers_of(size_t bytes) {
  char* memory =
      mmap(NULL, bytes + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

  if (memory == MAP_FAILED) die("mmap", errno);
  memory += HUGE_BYTES - (uintptr_t)memory % HUGE_BYTES;
  madvise(memory, bytes, MADV_HUGEPAGE);
  size_t noise = bytes < NOISE_BYTES ? bytes : NOISE_BYTES;
  uint64_t state = 88172645463325252ull;
  for (size_t i = 0; i < noise / 8; i++) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    ((uint64_t*)memory)[i] = state;
  }
  for (size_t done = noise; done < bytes; done += noise)
    memcpy(memory + done, memory, bytes - done < noise ? bytes - done : noise);
  return memory;
}

static int register_buffers(struct io_uring* ring, const struct plan* plan, char* memory) {
  struct iovec regions[REGIONS_MAX];
  unsigned count = 0;

  for (size_t begin = 0; begin < plan->blocks; begin += plan->per_region) {
    size_t left = plan->blocks - begin;
    size_t blocks = left < plan->per_region ? left : plan->per_region;

    if (count == REGIONS_MAX) return 0;
    regions[count++] = (struct iovec){memory + begin * plan->block, blocks * plan->block};
  }
  return io_uring_register_buffers(ring, regions, count) == 0;
}

static void open_ring(struct io_uring* ring, unsigned depth) {
  unsigned flags[] = {
      IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
      IORING_SETUP_COOP_TASKRUN,
      0,
  };
  int error = 0;

  for (unsigned i = 0; i < sizeof flags / sizeof *flags; i++) {
    error = io_uring_queue_init(depth, ring, flags[i]);
    if (!error) return;
  }
  die("io_uring_queue_init", -error);
}

static void submit_block(struct io_uring* ring, const struct plan* plan, char* memory,
                         size_t number, unsigned slot, double* started) {
  struct io_uring_sqe* sqe = io_uring_get_sqe(ring);
  char* buffer = memory + number * plan->block;
  int region = (int)(number / plan->per_region);
  // Mixed: even blocks are read, and odd ones are written.
  int write = plan->mixed ? (int)(number & 1) : plan->write;
  uint64_t offset = (uint64_t)number * plan->block;

  if (write && plan->registered)
    io_uring_prep_write_fixed(sqe, 0, buffer, plan->block, offset, region);
  else if (write)
    io_uring_prep_write(sqe, 0, buffer, plan->block, offset);
  else if (plan->registered)
    io_uring_prep_read_fixed(sqe, 0, buffer, plan->block, offset, region);
  else
    io_uring_prep_read(sqe, 0, buffer, plan->block, offset);
  sqe->flags |= IOSQE_FIXED_FILE;
  sqe->user_data = slot;
  started[slot] = seconds_of(CLOCK_MONOTONIC);
}

static void run(struct io_uring* ring, const struct plan* plan, char* memory, double* latencies) {
  double* started = calloc(plan->depth, sizeof *started);
  size_t next = 0, done = 0;

  while (next < plan->blocks && next < plan->depth) {
    submit_block(ring, plan, memory, next, next, started);
    next++;
  }
  while (done < plan->blocks) {
    struct io_uring_cqe* cqe;
    unsigned head, count = 0;
    int error = io_uring_submit_and_wait(ring, 1);

    if (error < 0 && error != -EINTR) die("io_uring_submit_and_wait", -error);
    double end = seconds_of(CLOCK_MONOTONIC);
    io_uring_for_each_cqe(ring, head, cqe) {
      unsigned slot = cqe->user_data;

      if (cqe->res != (int)plan->block) die("transfer", cqe->res < 0 ? -cqe->res : EIO);
      latencies[done++] = end - started[slot];
      count++;
      if (next < plan->blocks) submit_block(ring, plan, memory, next++, slot, started);
    }
    io_uring_cq_advance(ring, count);
  }
  free(started);
}

int main(int argc, char** argv) {
  if (argc != 6) {
    fprintf(stderr, "ring_loop FILE write|read|mixed BLOCK_BYTES TOTAL_BYTES DEPTH\n");
    return 2;
  }
  struct plan plan = {.block = strtoull(argv[3], NULL, 10), .depth = atoi(argv[5])};

  plan.mixed = !strcmp(argv[2], "mixed");
  plan.write = !strcmp(argv[2], "write");
  plan.blocks = strtoull(argv[4], NULL, 10) / plan.block;
  plan.per_region = plan.block < REGION_BYTES ? REGION_BYTES / plan.block : 1;
  int fd = open(argv[1], O_RDWR | O_DIRECT | O_CLOEXEC);
  if (fd < 0) die("open", errno);
  char* memory = buffers_of(plan.block * plan.blocks);
  double* latencies = calloc(plan.blocks, sizeof *latencies);
  struct io_uring ring;

  open_ring(&ring, plan.depth);
  plan.registered = register_buffers(&ring, &plan, memory);
  int error = io_uring_register_files(&ring, &fd, 1);
  if (error) die("io_uring_register_files", -error);
  double cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID), start = seconds_of(CLOCK_MONOTONIC);
  run(&ring, &plan, memory, latencies);
  double seconds = seconds_of(CLOCK_MONOTONIC) - start;
  cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  qsort(latencies, plan.blocks, sizeof *latencies, by_value);
  printf(
      "{\"bytes\": %zu, \"seconds\": %.6f, \"cpu_s\": %.6f, \"p50_us\": %.1f, "
      "\"p99_us\": %.1f, \"registered\": %s}\n",
      plan.blocks * plan.block, seconds, cpu, 1e6 * latencies[(plan.blocks - 1) / 2],
      1e6 * latencies[(size_t)((plan.blocks - 1) * 0.99)], plan.registered ? "true" : "false");
  io_uring_queue_exit(&ring);
  return 0;
}
