// SPDX-License-Identifier: Apache-2.0
// Columns in huge pages. Rows are reached in random order, and with pages of 4 KiB each of them
// would cost a walk through the page tables besides the memory's own latency: a third of all that
// the scheduler's thread pays per chunk beside a million entries.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>

namespace nvmeof {

inline constexpr size_t kHugePage = size_t{2} << 20;

// Allocations of a huge page or more are aligned to one, and huge where the kernel allows it.
template <typename T>
struct HugePages {
  using value_type = T;

  HugePages() = default;
  template <typename Other>
  HugePages(const HugePages<Other>&) {}

  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < kHugePage) return static_cast<T*>(::operator new(bytes));
    void* const memory = ::operator new(bytes, std::align_val_t(kHugePage));
    ::madvise(memory, bytes, MADV_HUGEPAGE);  // a hint: without it everything works, but slower
    return static_cast<T*>(memory);
  }

  void deallocate(T* memory, size_t count) {
    if (count * sizeof(T) < kHugePage)
      ::operator delete(memory);
    else
      ::operator delete(memory, std::align_val_t(kHugePage));
  }

  bool operator==(const HugePages&) const = default;
};

template <typename T>
using HugeVector = std::vector<T, HugePages<T>>;

// Every allocation is aligned to a page, as O_DIRECT requires.
template <typename T>
struct Pages {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{4096};

  Pages() = default;
  template <typename Other>
  Pages(const Pages<Other>&) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kAlignment));
  }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kAlignment); }

  bool operator==(const Pages&) const = default;
};

template <typename T>
using PageVector = std::vector<T, Pages<T>>;

}  // namespace nvmeof
