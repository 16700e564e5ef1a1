// SPDX-License-Identifier: Apache-2.0
// Compiles kernels/crc_blocks.cu for the CPU. Threads run one after the other; its one barrier
// stands behind filling shared memory, which each thread does again without harm: so each block
// runs twice, at first only up to the barrier.
#include <cstdint>

#define __global__
#define __device__
#define __shared__ static
#define __syncthreads() \
  if (only_to_the_barrier) return
struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
static bool only_to_the_barrier;
static uintptr_t misaligned_words;
struct uint4 {
  unsigned x, y, z, w;
};
template <typename Word>
Word __ldcs(const Word* at) {
  misaligned_words += reinterpret_cast<uintptr_t>(at) % sizeof(Word) != 0;
  return *at;
}

#include CRC_BLOCKS

// Returns how many words were not aligned, which on a GPU is a fault.
extern "C" u64 run(int fast, unsigned blocks, unsigned threads, const Part* parts, u64 count,
                   const unsigned* tables, unsigned* out) {
  misaligned_words = 0;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (int pass = fast ? 0 : 1; pass < 2; ++pass) {
      only_to_the_barrier = pass == 0;
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
        if (fast)
          crc_blocks(parts, count, tables, out);
        else
          crc_blocks_reference(parts, count, tables, out);
    }
  return misaligned_words;
}
