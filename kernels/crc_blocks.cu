// SPDX-License-Identifier: Apache-2.0
// Computes the CRC-32C of parts of GPU memory, one warp per part. NVRTC compiles this at run time,
// without includes. The host cuts pieces into parts and joins their CRCs (copy/gpu_checksums.py).
//
// Without its initial and final inversions, a CRC is linear: the CRC of a part is the XOR of one
// CRC per lane, each computed with zeros in place of the other lanes' bytes. Each lane writes one
// word per part, out[32 * part + lane], and the host computes the XOR of the 32 words.
// `crc_blocks_reference` defines the result; `crc_blocks` is the kernel in use.

typedef unsigned long long u64;

// A row of the host's table, uint64[n, 2]. `source` is a multiple of 16, `bytes` a multiple of 512.
struct Part {
  u64 source;
  u64 bytes;
};

constexpr int kLanes = 32;
constexpr int kNibbles = 8;
constexpr int kValues = 16;
// A stripe is one 16-byte word per lane: 512 bytes. This many stripes are read ahead.
constexpr int kAhead = 4;

// One thread per part, one bit at a time.
extern "C" __global__ void crc_blocks_reference(const Part* parts, u64 count, const unsigned*,
                                                unsigned* out) {
  const u64 first = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x;
  for (u64 i = first; i < count; i += gridDim.x * static_cast<u64>(blockDim.x)) {
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(parts[i].source);
    unsigned crc = 0;
    for (u64 at = 0; at < parts[i].bytes; ++at) {
      crc ^= bytes[at];
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0x82F63B78u & (0u - (crc & 1)));
    }
    for (int lane = 0; lane < kLanes; ++lane) out[kLanes * i + lane] = lane ? 0 : crc;
  }
}

// Append 512 zero bytes to `crc`, using a table of 16 values for each of its eight nibbles. mine:
// the lane's own copy of the tables, in its own bank of shared memory.
__device__ unsigned advance(const unsigned* mine, unsigned crc) {
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < kNibbles; ++i)
    found ^= mine[(i * kValues + ((crc >> (4 * i)) & (kValues - 1))) * kLanes];
  return found;
}

// Append the number of zero bytes that `columns` represents: it holds the image of each bit of a
// CRC. This is called only a few times per part.
__device__ unsigned by_columns(const unsigned* columns, unsigned crc) {
  unsigned found = 0;
#pragma unroll 8
  for (int bit = 0; bit < 32; ++bit) found ^= columns[bit] & (0u - ((crc >> bit) & 1));
  return found;
}

// tables: uint32, from `gpu_checksums.kernel_tables`: [8][16] to append 512 zero bytes, [32] for 4,
// and [32 lanes][32] for the bytes after a lane's word in a stripe. At most 1024 threads per block.
extern "C" __global__ void crc_blocks(const Part* parts, u64 count, const unsigned* tables,
                                      unsigned* out) {
  __shared__ unsigned table[kNibbles * kValues * kLanes];
  for (unsigned at = threadIdx.x; at < kNibbles * kValues * kLanes; at += blockDim.x)
    table[at] = tables[at / kLanes];
  __syncthreads();
  const unsigned lane = threadIdx.x % kLanes;
  const unsigned* mine = table + lane;
  const unsigned* word = tables + kNibbles * kValues;
  const unsigned* behind = word + 32 + 32 * lane;
  const u64 warps_per_block = blockDim.x / kLanes;
  const u64 step = gridDim.x * warps_per_block;
  for (u64 i = blockIdx.x * warps_per_block + threadIdx.x / kLanes; i < count; i += step) {
    const u64 stripes = parts[i].bytes / (sizeof(uint4) * kLanes);
    const uint4* from = reinterpret_cast<const uint4*>(parts[i].source) + lane;
    unsigned x = 0, y = 0, z = 0, w = 0;
    u64 at = 0;
    for (; at + kAhead <= stripes; at += kAhead) {
      uint4 held[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) held[k] = __ldcs(from + kLanes * (at + k));
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        x = advance(mine, x) ^ held[k].x;
        y = advance(mine, y) ^ held[k].y;
        z = advance(mine, z) ^ held[k].z;
        w = advance(mine, w) ^ held[k].w;
      }
    }
    for (; at < stripes; ++at) {
      const uint4 held = __ldcs(from + kLanes * at);
      x = advance(mine, x) ^ held.x;
      y = advance(mine, y) ^ held.y;
      z = advance(mine, z) ^ held.z;
      w = advance(mine, w) ^ held.w;
    }
    // Join the lane's four words, then append zero bytes for the lanes after it.
    unsigned crc = by_columns(word, x);
    crc = by_columns(word, crc ^ y);
    crc = by_columns(word, crc ^ z);
    crc = by_columns(word, crc ^ w);
    out[kLanes * i + lane] = by_columns(behind, crc);
  }
}
