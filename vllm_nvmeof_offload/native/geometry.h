// SPDX-License-Identifier: Apache-2.0
// Where the bytes of chunks are in the KV cache: `ChunkGeometry` in copy/geometry.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rules.h"

namespace nvmeof {

// Block b's page: `page_bytes` at `address` + b * `stride_bytes`.
struct CacheTensor {
  uint64_t address, stride_bytes, page_bytes, block_count;
};

class Geometry {
 public:
  Geometry(std::vector<CacheTensor> tensors, size_t blocks_per_chunk)
      : tensors_(std::move(tensors)), blocks_per_chunk_(blocks_per_chunk) {
    for (const CacheTensor& one : tensors_) {
      block_bytes_ += one.page_bytes;
      block_count_ = std::min(block_count_, one.block_count);
    }
  }

  // Three numbers per piece, (KV cache address, offset in the payload, bytes), and, by chunk, the
  // first of its pieces, and their end. blocks: of consecutive chunks, from the position `first` in
  // the first one.
  void pieces(std::span<const int32_t> blocks, size_t first, size_t chunks,
              std::vector<uint64_t>& rows, std::vector<uint32_t>& firsts) const {
    require(first < blocks_per_chunk_, "a position behind the chunk");
    if ((first + blocks.size() + blocks_per_chunk_ - 1) / blocks_per_chunk_ != chunks)
      throw BrokenRule(std::to_string(blocks.size()) + " blocks over " + std::to_string(chunks) +
                       " chunks");
    rows.reserve(3 * blocks.size() * tensors_.size());
    firsts.reserve(chunks + 1);
    firsts.push_back(0);
    size_t position = first;
    for (const int32_t block : blocks) {
      require(block >= 0 && static_cast<uint64_t>(block) < block_count_, "a block is unknown");
      if (position == blocks_per_chunk_) {
        position = 0;
        firsts.push_back(static_cast<uint32_t>(rows.size() / 3));
      }
      uint64_t offset = position++ * block_bytes_;
      for (const CacheTensor& one : tensors_) {
        const auto number = static_cast<uint64_t>(block);
        rows.insert(rows.end(),
                    {one.address + number * one.stride_bytes, offset, one.page_bytes});
        offset += one.page_bytes;
      }
    }
    firsts.push_back(static_cast<uint32_t>(rows.size() / 3));
  }

 private:
  std::vector<CacheTensor> tensors_;
  size_t blocks_per_chunk_;
  uint64_t block_bytes_ = 0;
  uint64_t block_count_ = uint64_t{1} << 31;
};

}  // namespace nvmeof
