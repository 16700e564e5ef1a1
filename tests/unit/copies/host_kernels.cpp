// SPDX-License-Identifier: Apache-2.0
// Compiles kernels/copy_blocks.cu for the CPU, to run its threads one after the other. No thread
// of these kernels waits for another, so any order of threads is one that a GPU may choose.
#include <cstdint>

#define __global__
#define __device__
struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
struct uint4 {
  unsigned x, y, z, w;
};
static uintptr_t misaligned_words;
template <typename Word>
Word __ldcs(const Word* at) {
  misaligned_words += reinterpret_cast<uintptr_t>(at) % sizeof(Word) != 0;
  return *at;
}
template <typename Word>
void __stcs(Word* at, Word value) {
  misaligned_words += reinterpret_cast<uintptr_t>(at) % sizeof(Word) != 0;
  *at = value;
}

#include COPY_BLOCKS

// Returns how many words were not aligned, which on a GPU is a fault.
extern "C" u64 run(int fast, unsigned blocks, unsigned threads, const Piece* pieces, u64 count) {
  misaligned_words = 0;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
      if (fast)
        copy_blocks(pieces, count);
      else
        copy_blocks_reference(pieces, count);
  return misaligned_words;
}
