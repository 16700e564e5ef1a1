// SPDX-License-Identifier: Apache-2.0
// Columns: one array per field. `HugeColumn` uses huge pages; `SmallColumn` is for small batches.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

namespace nvmeof {

// Rows are accessed at random. With 4 KiB pages and a million entries, page-table walks would take
// a third of the scheduler thread's time per chunk.
inline constexpr size_t kHugePage = size_t{2} << 20;

// A fixed number of items, initially zero. A column of at least one huge page uses memory only for
// the pages that are written: most of the space reserved for parts of divided slots is never used.
template <typename T>
class HugeColumn {
 public:
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

  explicit HugeColumn(size_t count) : items_(allocate(count), Release{count}) {}

  size_t size() const { return items_.get_deleter().count; }
  T* data() { return items_.get(); }
  const T* data() const { return items_.get(); }
  T& operator[](size_t at) { return items_.get()[at]; }
  const T& at(size_t at) const {  // throws std::out_of_range
    return at < size() ? (*this)[at] : throw std::out_of_range("a column has no such item");
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
      void* const items = std::calloc(count + 1, sizeof(T));  // at least 1, so `data` is never null
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

// A vector that stores up to kInside items inline. A step may contain hundreds of one-chunk ops,
// and each of their columns would otherwise cost an allocation and a cache miss.
template <typename T, uint32_t kInside = 1>
class SmallColumn {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  using value_type = T;

  SmallColumn() = default;
  SmallColumn(const SmallColumn& other) { append(other.data_, other.size_); }
  SmallColumn(SmallColumn&& other) noexcept { take(other); }
  SmallColumn& operator=(SmallColumn other) noexcept {
    drop();
    take(other);
    return *this;
  }
  ~SmallColumn() { drop(); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](size_t row) { return data_[row]; }
  const T& operator[](size_t row) const { return data_[row]; }
  const T& at(size_t row) const {
    if (row >= size_) throw std::out_of_range("a column has no such row");
    return data_[row];
  }

  void reserve(size_t count) {
    if (count <= capacity_) return;
    T* const more = new T[count];
    std::copy_n(data_, size_, more);
    drop();
    data_ = more;
    capacity_ = static_cast<uint32_t>(count);
  }
  void push_back(const T& item) {
    const T kept = item;  // `item` may be in this column
    grow(1);
    data_[size_++] = kept;
  }
  // Append `count` items, which must not belong to this column.
  void append(const T* items, size_t count) {
    grow(count);
    std::copy_n(items, count, data_ + size_);
    size_ += static_cast<uint32_t>(count);
  }
  void erase(size_t row, size_t count) {
    std::copy(data_ + row + count, data_ + size_, data_ + row);
    size_ -= static_cast<uint32_t>(count);
  }

 private:
  void grow(size_t count) {
    if (size_ + count > capacity_) reserve(std::max<size_t>(size_ + count, 2 * size_t{capacity_}));
  }
  void drop() {
    if (data_ != inside_) delete[] data_;
  }
  // Move the items of `other` here. The caller must have dropped this column's items.
  void take(SmallColumn& other) {
    const bool is_inside = other.data_ == other.inside_;
    if (is_inside) std::memcpy(inside_, other.inside_, sizeof(inside_));
    data_ = is_inside ? inside_ : other.data_;
    size_ = std::exchange(other.size_, 0);
    capacity_ = std::exchange(other.capacity_, kInside);
    other.data_ = other.inside_;
  }

  T* data_ = inside_;
  uint32_t size_ = 0, capacity_ = kInside;
  T inside_[kInside]{};
};

}  // namespace nvmeof
