// SPDX-License-Identifier: Apache-2.0
// A batch column that stores a few items inline. A step may contain hundreds of single-chunk ops,
// and every column would otherwise cost an allocation and a cold cache line.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace nvmeof {

// A vector of trivially copyable items that allocates only for more than kInside items.
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
    if (row >= size_) throw std::out_of_range("no such row");
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
    const T kept = item;  // `item` may refer into this column
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
  // Move the items of `other` here. The caller has dropped this column's items.
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
