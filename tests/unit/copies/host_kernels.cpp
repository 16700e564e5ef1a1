// SPDX-License-Identifier: Apache-2.0
// Compiles the kernel of COPY_BLOCKS or CRC_BLOCKS for the CPU, to run its threads one after the
// other: no thread waits for another, so any order is one that a GPU may choose. The one barrier of
// the CRCs stands behind filling shared memory, which each thread does again without harm: so each
// block runs twice, at first only up to the barrier.
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

// `run` returns how many words were not aligned, which on a GPU is a fault.
#ifdef COPY_BLOCKS
#include COPY_BLOCKS

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
#else
static bool only_to_the_barrier;
#include CRC_BLOCKS

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
#endif
