// SPDX-License-Identifier: Apache-2.0
// Kernels that copy many pieces, each too small for the copy engines, between GPU memory and pinned
// host memory. NVRTC compiles this file at run time, without includes. No thread waits for another,
// and no two pieces overlap. `copy_blocks_reference` defines the result; `copy_blocks` is the
// kernel in use.

typedef unsigned long long u64;

// A row of the table in host memory: uint64[n, 3].
struct Piece {
  u64 destination;
  u64 source;
  u64 bytes;
};

// Each thread block copies one piece at a time, one byte per thread.
extern "C" __global__ void copy_blocks_reference(const Piece* pieces, u64 count) {
  for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
    char* destination = reinterpret_cast<char*>(pieces[i].destination);
    const char* source = reinterpret_cast<const char*>(pieces[i].source);
    for (u64 at = threadIdx.x; at < pieces[i].bytes; at += blockDim.x) destination[at] = source[at];
  }
}

// One warp copies `bytes`. Each lane issues kWordsInFlight loads before its first store: PCIe
// bandwidth is the number of bytes in flight divided by the round-trip time, and only a few thread
// blocks run, to leave multiprocessors to the model. Streaming accesses keep the model's data in
// the L2 cache.
constexpr int kLanes = 32;
constexpr int kWordsInFlight = 8;

template <typename Word>
__device__ void copy_by(char* destination, const char* source, u64 bytes, unsigned lane) {
  Word* to = reinterpret_cast<Word*>(destination);
  const Word* from = reinterpret_cast<const Word*>(source);
  const u64 words = bytes / sizeof(Word);
  u64 at = lane;
  for (; at + kLanes * (kWordsInFlight - 1) < words; at += kLanes * kWordsInFlight) {
    Word held[kWordsInFlight];
#pragma unroll
    for (int k = 0; k < kWordsInFlight; ++k) held[k] = __ldcs(from + at + kLanes * k);
#pragma unroll
    for (int k = 0; k < kWordsInFlight; ++k) __stcs(to + at + kLanes * k, held[k]);
  }
  for (; at < words; at += kLanes) __stcs(to + at, __ldcs(from + at));
  for (u64 rest = words * sizeof(Word) + lane; rest < bytes; rest += kLanes)
    destination[rest] = source[rest];
}

// Each warp copies one part after another. The host splits long pieces so that every warp has work.
// The table is in host memory, so the row for the next part is fetched while this one is copied.
extern "C" __global__ void copy_blocks(const Piece* parts, u64 count) {
  const unsigned lane = threadIdx.x % kLanes;
  const u64 warps_per_block = blockDim.x / kLanes;
  const u64 step = gridDim.x * warps_per_block;
  u64 i = blockIdx.x * warps_per_block + threadIdx.x / kLanes;
  if (i >= count) return;
  Piece next = parts[i];
  while (i < count) {
    const Piece part = next;
    i += step;
    if (i < count) next = parts[i];
    char* destination = reinterpret_cast<char*>(part.destination);
    const char* source = reinterpret_cast<const char*>(part.source);
    const u64 misaligned = part.destination | part.source;
    if (misaligned % 16 == 0)
      copy_by<uint4>(destination, source, part.bytes, lane);
    else if (misaligned % 4 == 0)
      copy_by<unsigned>(destination, source, part.bytes, lane);
    else
      copy_by<char>(destination, source, part.bytes, lane);
  }
}
