// SPDX-License-Identifier: Apache-2.0
// Copies many pieces between GPU memory and pinned host memory, for fragments too small for
// the copy engines. NVRTC compiles this at run time; nothing is included. No thread waits for
// another one, and no two pieces overlap.
//
// The ladder: `copy_blocks_reference` says what is right; `copy_blocks` is what runs.

typedef unsigned long long u64;

// A row of the host's table: uint64[n, 3].
struct Piece {
  u64 destination;
  u64 source;
  u64 bytes;
};

// A byte a thread; a thread block a piece.
extern "C" __global__ void copy_blocks_reference(const Piece* pieces, u64 count) {
  for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
    char* destination = reinterpret_cast<char*>(pieces[i].destination);
    const char* source = reinterpret_cast<const char*>(pieces[i].source);
    for (u64 at = threadIdx.x; at < pieces[i].bytes; at += blockDim.x)
      destination[at] = source[at];
  }
}

// One warp copies `bytes`. kWordsInFlight words of each lane are on their way before the first
// is stored: PCIe's bandwidth is bytes in flight over its round trip, and only few thread
// blocks run, so that the model keeps its multiprocessors. Marked as streaming, since nobody
// reads the bytes again soon: they should not push the model's data out of the L2 cache.
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

// A warp takes one part of one piece: parts × part_bytes covers the longest piece, so that a
// few long pieces keep as many warps busy as many short ones. part_bytes is a multiple of 16.
extern "C" __global__ void copy_blocks(const Piece* pieces, u64 count, u64 parts,
                                       u64 part_bytes) {
  const unsigned lane = threadIdx.x % kLanes;
  const u64 warps_a_block = blockDim.x / kLanes;
  const u64 first = blockIdx.x * warps_a_block + threadIdx.x / kLanes;
  for (u64 i = first; i < count * parts; i += gridDim.x * warps_a_block) {
    const Piece piece = pieces[i / parts];
    const u64 start = (i % parts) * part_bytes;
    if (start >= piece.bytes) continue;
    const u64 left = piece.bytes - start;
    const u64 bytes = left < part_bytes ? left : part_bytes;
    char* destination = reinterpret_cast<char*>(piece.destination + start);
    const char* source = reinterpret_cast<const char*>(piece.source + start);
    const u64 misaligned = piece.destination | piece.source;
    if (misaligned % 16 == 0)
      copy_by<uint4>(destination, source, bytes, lane);
    else if (misaligned % 4 == 0)
      copy_by<unsigned>(destination, source, bytes, lane);
    else
      copy_by<char>(destination, source, bytes, lane);
  }
}
