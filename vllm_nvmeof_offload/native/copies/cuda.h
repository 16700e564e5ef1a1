// SPDX-License-Identifier: Apache-2.0
// Calls NVIDIA's driver through the addresses of its functions, so that submitting a whole batch of
// copies, recording its end event, and waiting for that event do not need the GIL.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace nvmeof {

using CudaHandle = void*;  // a context, stream, event or kernel

// The driver's functions, and the context in which they are called. Each returns a CUresult.
struct CudaFunctions {
  CudaHandle context = nullptr;
  // cuMemcpyBatchAsync as in CUDA 12.8, or null if the driver is older.
  int (*copy_batch)(uint64_t* to, uint64_t* from, size_t* sizes, size_t count, void* attributes,
                    size_t* first, size_t attributes_count, size_t* failed, CudaHandle) = nullptr;
  int (*copy)(uint64_t to, uint64_t from, size_t bytes, CudaHandle) = nullptr;
  int (*launch)(CudaHandle kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                CudaHandle, void** arguments, void** extra) = nullptr;
  int (*record)(CudaHandle event, CudaHandle) = nullptr;
  int (*query)(CudaHandle event) = nullptr;
  int (*synchronize)(CudaHandle event) = nullptr;
  int (*set_context)(CudaHandle) = nullptr;
  int (*exchange_capture_mode)(int* mode) = nullptr;
};

// The first call that failed: its name, its CUresult, and the index of the copy or launch. The name
// is null after success.
struct CudaFailure {
  const char* call = nullptr;
  int status = 0;
  size_t at = 0;
};

// A thread that blocks in the driver until the oldest watched event is done, and then signals an
// eventfd. Events must be watched in the order in which they end. They are numbered from 1.
class EventWaiter {
 public:
  EventWaiter(const CudaFunctions& cuda, int wake_fd, const std::string& name)
      : state_(std::make_shared<State>(cuda, wake_fd)), thread_([state = state_] { run(*state); }) {
    pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  }
  ~EventWaiter() {
    if (thread_.joinable()) thread_.detach();  // the process may exit without closing the engine
  }

  void watch(CudaHandle event) {
    const std::scoped_lock lock(state_->mutex);
    state_->events.push_back(event);
    state_->changed.notify_one();
    ++watched_;
  }
  uint64_t newest() const { return watched_; }
  // Return whether the thread no longer uses the event with this number.
  bool is_over(uint64_t number) const { return state_->done >= number; }
  // End the thread after the last watched event, which must complete soon.
  void close() {
    {
      const std::scoped_lock lock(state_->mutex);
      state_->stopping = true;
    }
    state_->changed.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct State {
    State(const CudaFunctions& functions, int fd)
        : cuda(functions), wake_fd(fcntl(fd, F_DUPFD_CLOEXEC, 0)) {}
    ~State() { ::close(wake_fd); }

    const CudaFunctions cuda;
    const int wake_fd;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<CudaHandle> events;  // watched, but not waited for yet
    bool stopping = false;
    std::atomic<uint64_t> done{0};
  };

  static void run(State& state) {
    int mode = 2;  // relaxed; `Cuda.enter_own_thread` explains why
    state.cuda.set_context(state.cuda.context);
    state.cuda.exchange_capture_mode(&mode);
    for (std::unique_lock lock(state.mutex);; lock.lock()) {
      state.changed.wait(lock, [&] { return state.stopping || !state.events.empty(); });
      if (state.events.empty()) return;
      const CudaHandle event = state.events.front();
      state.events.pop_front();
      lock.unlock();
      state.cuda.synchronize(event);  // the engine's poll gets and logs the same error
      ++state.done;
      eventfd_write(state.wake_fd, 1);
    }
  }

  const std::shared_ptr<State> state_;
  uint64_t watched_ = 0;
  std::thread thread_;
};

// The end of a submission: the event to record, and the thread to wait for it; either may be null.
struct CudaEnd {
  CudaHandle event = nullptr;
  EventWaiter* waiter = nullptr;
};

inline CudaFailure record_end(const CudaFunctions& cuda, CudaHandle stream, const CudaEnd& end) {
  if (!end.event) return {};
  if (const int status = cuda.record(end.event, stream)) return {"cuEventRecord", status};
  if (end.waiter) end.waiter->watch(end.event);
  return {};
}

struct CopyColumns {
  uint64_t *to, *from;
  size_t* sizes;
};

// The maximum number of copies in the first call, the factor by which it grows from call to call,
// and its limit. On an H200, the driver needs 0.43 µs per copy and about 28 µs per call (16 calls
// of 64 copies took 895 µs). The GPU seems to start when a call returns: a small first call starts
// it early, which leaves time for larger ones. Batches of about 50,000 copies have crashed drivers.
inline constexpr size_t kFirstCopies = 16, kCopiesGrowth = 4, kCopiesMax = 4096;

// Submit copies, then record their end. attributes: a CUmemcpyAttributes, ignored without
// `copy_batch`. After a failure, earlier copies may still be running, and the end is not recorded.
inline CudaFailure submit_copies(const CudaFunctions& cuda, const CopyColumns& all, size_t count,
                                 CudaHandle stream, void* attributes, const CudaEnd& end) {
  size_t first = 0, failed = 0, call_max = kFirstCopies;
  for (size_t at = 0, taken = 1; at < count; at += taken) {
    uint64_t *const to = all.to + at, *const from = all.from + at;
    if (!cuda.copy_batch) {
      if (const int status = cuda.copy(*to, *from, all.sizes[at], stream))
        return {"cuMemcpyAsync", status, at};
      continue;
    }
    taken = std::min(call_max, count - at);
    call_max = std::min(call_max * kCopiesGrowth, kCopiesMax);
    const int status =
        cuda.copy_batch(to, from, all.sizes + at, taken, attributes, &first, 1, &failed, stream);
    if (status) return {"cuMemcpyBatchAsync", status, at + failed};
  }
  return record_end(cuda, stream, end);
}

// Launch a kernel once per row, then record the end. A row holds the number of thread blocks and
// the kernel's arguments. threads: the number of threads per block.
inline CudaFailure submit_launches(const CudaFunctions& cuda, CudaHandle kernel, unsigned threads,
                                   std::span<uint64_t> rows, size_t columns, CudaHandle stream,
                                   const CudaEnd& end) {
  std::vector<void*> arguments(columns - 1);
  for (size_t at = 0; at < rows.size() / columns; ++at) {
    uint64_t* const row = &rows[at * columns];
    for (size_t one = 0; one < arguments.size(); ++one) arguments[one] = row + 1 + one;
    if (const int status = cuda.launch(kernel, static_cast<unsigned>(*row), 1, 1, threads, 1, 1, 0,
                                       stream, arguments.data(), nullptr))
      return {"cuLaunchKernel", status, at};
  }
  return record_end(cuda, stream, end);
}

}  // namespace nvmeof
