// SPDX-License-Identifier: Apache-2.0
// The KV cache addresses of a chunk's bytes; see copy/geometry.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/op.h"

namespace nvmeof {

// The page of block b is the `page_bytes` bytes at `address` + b * `stride_bytes`.
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

  size_t blocks_per_chunk() const { return blocks_per_chunk_; }

  // Append each piece's (KV cache address, offset in the payload, size) to `rows`. Append to
  // `firsts` the index of each chunk's first piece, followed by the end index. `blocks` belong to
  // consecutive chunks and start at position `first` of the first chunk.
  void pieces(std::span<const int32_t> blocks, size_t first, size_t chunks,
              std::vector<uint64_t>& rows, std::vector<uint32_t>& firsts) const {
    require(first < blocks_per_chunk_, "a position is beyond the chunk");
    if ((first + blocks.size() + blocks_per_chunk_ - 1) / blocks_per_chunk_ != chunks)
      throw BrokenRule(std::to_string(blocks.size()) + " blocks do not match " +
                       std::to_string(chunks) + " chunks");
    rows.reserve(rows.size() + 3 * blocks.size() * tensors_.size());
    firsts.reserve(firsts.size() + chunks + 1);
    if (firsts.empty()) firsts.push_back(0);
    size_t position = first;
    for (const int32_t block : blocks) {
      require(block >= 0 && static_cast<uint64_t>(block) < block_count_, "a block is out of range");
      if (position == blocks_per_chunk_) {
        position = 0;
        firsts.push_back(static_cast<uint32_t>(rows.size() / 3));
      }
      uint64_t offset = position++ * block_bytes_;
      for (const CacheTensor& one : tensors_) {
        const auto number = static_cast<uint64_t>(block);
        rows.insert(rows.end(), {one.address + number * one.stride_bytes, offset, one.page_bytes});
        offset += one.page_bytes;
      }
    }
    firsts.push_back(static_cast<uint32_t>(rows.size() / 3));
  }

  // Like `pieces`, but add no pieces for a chunk with missing blocks. vLLM omits blocks that it has
  // freed, and reports only the position of the first block. If exactly `first` blocks are missing,
  // they precede the first block. Otherwise any chunk may lack blocks, so no chunk gets pieces.
  void pieces_of_whole_chunks(std::span<const int32_t> blocks, size_t first, size_t chunks,
                              std::vector<uint64_t>& rows, std::vector<uint32_t>& firsts) const {
    require(blocks.size() <= chunks * blocks_per_chunk_, "there are too many blocks");
    const size_t missing = chunks * blocks_per_chunk_ - blocks.size();
    if (missing == 0) {
      pieces(blocks, 0, chunks, rows, firsts);
      return;
    }
    const bool lacks_head = missing == first && chunks > 1;
    if (firsts.empty()) firsts.push_back(0);
    firsts.insert(firsts.end(), lacks_head ? 1 : chunks, static_cast<uint32_t>(rows.size() / 3));
    if (lacks_head)
      pieces(blocks.subspan(blocks_per_chunk_ - missing), 0, chunks - 1, rows, firsts);
  }

 private:
  std::vector<CacheTensor> tensors_;
  size_t blocks_per_chunk_;
  uint64_t block_bytes_ = 0;
  uint64_t block_count_ = uint64_t{1} << 31;
};

// The GPU blocks of a store or load. ids: group by group. sizes, firsts: per group, the number of
// blocks and the first block's index in its request. groups: each chunk's group, ascending.
struct JobBlocks {
  std::span<const int32_t> ids;
  std::vector<size_t> sizes, firsts;
  std::span<const uint8_t> groups;
};

class CacheGeometry {
 public:
  explicit CacheGeometry(std::vector<Geometry> groups) : groups_(std::move(groups)) {}

  // Append a job's pieces. A chunk to store gets none if any of its blocks is missing.
  void pieces(const JobBlocks& job, bool is_store, std::vector<uint64_t>& rows,
              std::vector<uint32_t>& firsts) const {
    require(job.sizes.size() == groups_.size() && job.firsts.size() == groups_.size(),
            "the blocks' columns and the groups differ in number");
    require(std::ranges::is_sorted(job.groups), "the chunks are not sorted by group");
    size_t at = 0, row = 0;
    for (size_t group = 0; group < groups_.size(); ++group) {
      const Geometry& geometry = groups_[group];
      const size_t size = job.sizes[group], first = job.firsts[group] % geometry.blocks_per_chunk();
      size_t chunks = 0;
      for (; row < job.groups.size() && job.groups[row] == group; ++row) ++chunks;
      require(at + size <= job.ids.size(), "there are fewer blocks than the groups need");
      const auto ids = job.ids.subspan(at, size);
      at += size;
      if (!chunks && size)
        throw BrokenRule(std::to_string(size) + " blocks belong to a group without chunks");
      if (chunks && is_store) geometry.pieces_of_whole_chunks(ids, first, chunks, rows, firsts);
      if (chunks && !is_store) geometry.pieces(ids, first, chunks, rows, firsts);
    }
    require(row == job.groups.size(), "a chunk names an unknown group");
    require(at == job.ids.size(), "there are more blocks than the groups need");
    if (firsts.empty()) firsts.push_back(0);
  }

 private:
  std::vector<Geometry> groups_;
};

}  // namespace nvmeof
