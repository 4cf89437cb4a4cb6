// Common code of the kernels that pack a part of W. A CTA has one weight block, blockIdx.x along K
// and blockIdx.y along N.
#pragma once

#include "kernels/gemm/packed/block.cuh"

namespace cpmcu::cuda {
namespace {

// The rows of a part of W, and the weight blocks of W.
struct PartRows {
  char* blocks;
  int64_t block_bytes;
  int n, rows;  // number of rows of W, and of the part
  // Rows to write, [first_row, end_row) in the checkpoint's order. The last part also has the
  // padding.
  int first_row, end_row;
  bool gated, interleaved;

  __device__ __forceinline__ char* block() const {
    return blocks + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * block_bytes;
  }
  // The row of the part that is row `row` of the block; -1: padding; -2: of another part.
  __device__ __forceinline__ int own(int row) const {
    const int stored = static_cast<int>(blockIdx.y) * kPackedRows + row;
    const int source = gated ? static_cast<int>(gated_row(n, stored)) : stored;
    if (source < first_row || source >= end_row) return -2;
    if (source >= first_row + rows) return -1;
    return static_cast<int>(part_row(source, first_row, interleaved, n));
  }
};

inline PartRows part_rows(const PackedWeight& w, int64_t first_row, int64_t rows,
                          bool interleaved = false) {
  const int64_t end_row = first_row + rows;
  return {.blocks = static_cast<char*>(w.blocks),
          .block_bytes = w.block_bytes(),
          .n = static_cast<int>(w.n),
          .rows = static_cast<int>(rows),
          .first_row = static_cast<int>(first_row),
          .end_row = static_cast<int>(end_row == w.n ? w.row_blocks() * kPackedRows : end_row),
          .gated = w.gated,
          .interleaved = interleaved};
}

inline dim3 grid_of_blocks(const PackedWeight& w) {
  return dim3(static_cast<unsigned>(w.k_blocks()), static_cast<unsigned>(w.row_blocks()));
}

// The place of code `i` of word `word` of a block: the inverse of nibble_place and byte_place.
struct Place {
  int row, k;
};
template <int kBits>
__device__ __forceinline__ Place place_of(int word, int i) {
  const int lane = word / 4 % 32;
  if constexpr (kBits == 4) {
    const int row = word / 512 * kWarpTileRows + word % 2 * 16 + i % 2 * 8 + lane / 4;
    const int step = word / 128 % 4 * 2 + word / 2 % 2;
    return {row, 16 * step + i / 2 % 2 * 8 + lane % 4 * 2 + i / 4};
  } else {
    const int row = word / 1024 * kWarpTileRows + word / 2 % 2 * 16 + word % 2 * 8 + lane / 4;
    return {row, word / 128 % 8 * 16 + lane % 4 * 2 + i / 2 + (1 - i % 2) * 8};
  }
}

// Writes the codes of a block, by all threads. code_of(row of the part or -1, place) gives a code.
// A word may hold rows of two parts: the bits of the other part stay.
template <int kBits, typename F>
__device__ __forceinline__ void write_codes(const PartRows& part, char* block, F code_of) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  uint32_t* words = reinterpret_cast<uint32_t*>(block);
  for (int word = threadIdx.x; word < kPackedRows * kPackedK * kBits / 32; word += blockDim.x) {
    uint32_t bits = 0, mask = 0;
    for (int i = 0; i < 32 / kBits; ++i) {
      const Place at = place_of<kBits>(word, i);
      const int own = part.own(at.row);
      if (own == -2) continue;
      mask |= kMask << (kBits * i);
      bits |= static_cast<uint32_t>(code_of(own, at)) << (kBits * i);
    }
    if (mask != 0) words[word] = mask == 0xFFFFFFFF ? bits : (words[word] & ~mask) | bits;
  }
}

}  // namespace
}  // namespace cpmcu::cuda
