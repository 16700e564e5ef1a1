// SPDX-License-Identifier: Apache-2.0
// Columns in huge pages. Rows are accessed in random order, and with 4 KiB pages each access would
// cost a page-table walk on top of the memory latency. With a million entries, that is a third of
// the scheduler thread's time per chunk.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace nvmeof {

inline constexpr size_t kHugePage = size_t{2} << 20;

// A fixed number of items, initially all zero bytes. A column of at least one huge page uses memory
// only where it was written. This matters for parts of divided slots: most of the space reserved
// for them is never used.
template <typename T>
class HugeColumn {
 public:
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

  explicit HugeColumn(size_t count) : items_(allocate(count), Release{count}) {}

  size_t size() const { return items_.get_deleter().count; }
  T* data() { return items_.get(); }
  const T* data() const { return items_.get(); }
  T& operator[](size_t at) { return items_.get()[at]; }
  const T& at(size_t at) const {  // throws std::out_of_range if there is no such item
    return at < size() ? (*this)[at] : throw std::out_of_range("beyond the column's end");
  }
  const T& operator[](size_t at) const { return items_.get()[at]; }

 private:
  static bool is_huge(size_t count) { return count * sizeof(T) >= kHugePage; }

  struct Release {
    size_t count;
    void operator()(T* items) const {
      if (is_huge(count))
        ::munmap(items, count * sizeof(T));
      else
        std::free(items);
    }
  };

  static T* allocate(size_t count) {
    if (count > SIZE_MAX / sizeof(T)) throw std::bad_alloc();
    if (!is_huge(count)) {
      void* const items = std::calloc(count + 1, sizeof(T));  // never 0, so `data` is not null
      if (!items) throw std::bad_alloc();
      return static_cast<T*>(items);
    }
    void* const items = ::mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (items == MAP_FAILED) throw std::bad_alloc();
    ::madvise(items, count * sizeof(T), MADV_HUGEPAGE);  // only for speed; may fail
    return static_cast<T*>(items);
  }

  std::unique_ptr<T[], Release> items_;
};

// An allocator that aligns to pages, as O_DIRECT requires.
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
