// Arguments and persistent state of the fused layer kernel (kernel.cuh).
#pragma once

#include "core/exchange.h"
#include "kernels/attention/tiles.cuh"
#include "kernels/gemm/fused_layer.h"
#include "kernels/gemm/packed/multiply.cuh"

namespace cpmcu::cuda::fused {

constexpr uint32_t kNotReady = 0xFFFFFFFF;  // a NaN; instructions produce 0x7FFFFFFF only

// A sum that does not depend on the order of its terms. A term is split into units of 2^-8 and a
// remainder in units of 2^-48. The limit of 2^56 is far beyond any sum of squares of a norm.
// One cache line each, so that atomics on neighbours do not serialise.
struct alignas(128) ExactSum {
  unsigned long long high, low;

  __device__ __forceinline__ void add(float term) {
    const float whole = floorf(term * 0x1p8f);
    atomicAdd(&high, static_cast<unsigned long long>(whole));
    atomicAdd(&low, static_cast<unsigned long long>(__fmaf_rn(whole, -0x1p-8f, term) * 0x1p48f));
  }
  __device__ __forceinline__ float value() const {
    return static_cast<float>(high) * 0x1p-8f + static_cast<float>(low) * 0x1p-48f;
  }
};

// Weight blocks that each CTA prefetches to L2 for one row (prefetch.cuh), 18 MB on an H100.
constexpr int prefetch_blocks_of(int bits) { return bits == 8 ? 4 : 8; }
// GEMMs and their rests (GemmArgs); at most two GEMMs have a rest.
constexpr int kMaxFusedParts = 6;
constexpr uint32_t kSummed = 64;  // maximum number of slices; divides 2^32

// State kept from launch to launch. Zero at first.
struct FusedState {
  // Grid barrier of GEMM i: the number of CTAs that have completed their part of all that GEMM i
  // reads. A cache line for each counter. Never reset.
  uint32_t arrived[kMaxFusedGemms][32];
  uint32_t bases[kMaxFusedGemms];  // the value of `arrived` when the launch began
  uint32_t launches;
  // Double-buffered: one half is in use, the other is zeroed.
  ExactSum squares[2][kMaxFusedGemms][kMaxFusedRows];
  // More than 16 rows: the number of CTAs whose partial sums of a tile have arrived. A cache line
  // for each counter. A launch moves a counter from one multiple of kSummed to the next, whatever
  // the number of slices.
  uint32_t summed[kMaxFusedGemms][kMaxFusedCtas][32];
};
static_assert(sizeof(FusedState) <= kFusedStateBytes);

// The weight blocks of a part of a GEMM, and how they are divided among CTAs.
struct WeightBlocks {
  const char* blocks;     // [tiles of the GEMM][k_blocks]; null: W has 16 bits
  int first_tile, tiles;  // the part has `tiles` tiles of 256 rows, from first_tile on
  int k_blocks;           // number of k blocks, of the size that the Mainloop has
  int block_bytes;
  int slices, slice_blocks, longer_slices;
  // 1 / slices in units of 2^-16, rounded up; replaces divisions of small numbers.
  int one_over_slices;
  int active_ctas;  // number of CTAs with a part in the GEMM

  __device__ __forceinline__ int over_slices(int v) const { return v * one_over_slices >> 16; }
};

// A GEMM, or a part of its tiles. If the tiles of a gated GEMM do not divide evenly among the CTAs,
// the few tiles left over are its rest: a separate part whose K is cut.
struct alignas(64) GemmArgs : WeightBlocks {
  int number;  // number of the GEMM in the launch, an index of FusedState
  // The part has the x of the part before it, so no grid barrier lies between them.
  bool is_rest;
  TensorMap x_map, w_map;   // read by TMA; w_map only if W has 16 bits
  const void* x;            // [M, K]
  void* y;                  // [M, N]; gated: [M, N / 2]
  void* normed;             // [M, N]; null: no norm
  const void* norm_weight;  // [N]
  const void* bias;         // [N], added to y; null: none. A bias excludes a norm and rotary_kv
  float norm_offset;        // added to norm_weight
  float alpha, beta;
  float inv_size, eps;  // size and eps of the norm of x: 1 / K and eps; inv_size 0: no norm
  int n, k;
  // Distance in m16 tiles between the two m16 tiles of an epilogue tile. 1, or half a head if
  // rotary_kv follows, so that a lane holds both elements of a rotated pair.
  int rope_pair_stride = 1;
  uint8_t scale_form;
  bool gated;
  uint8_t rank_sum;  // number of this sum over ranks in the launch, from 1; 0: no such sum
};

// rotary_kv after the last GEMM.
struct Rotary {
  void* k_cache;
  void* v_cache;
  const void* bias;
  const float* inv_freq;
  float attention_scaling;
  int num_heads, num_kv_heads;
  StepTokens tokens;
};

// How attention splits are combined before the first GEMM.
enum class CombineMode {
  kNone,         // there are no splits, or attention_combine has run before this kernel
  kPerCtaSlice,  // one row: each CTA combines its slice of x and stores it in its stages
  kGridWide,     // all CTAs combine rows of x in memory; a grid barrier follows
};

struct FusedLayerArgs {
  GemmArgs parts[kMaxFusedParts];
  Rotary rotary;
  FusedState* state;
  // Partial sums: [CTAs][warp tiles][row groups][m16 tiles][lanes] fragments of 16 bytes.
  char* fragments;
  int num_parts, num_gemms, m;
  int min_active_ctas;  // minimum of active_ctas over all GEMMs but the last, without rests
  CombineMode combine_mode;
  int max_splits, head_dim;  // of the attention whose splits are combined
  WeightBlocks following[kMaxFollowing];
  int num_following;
  int prefetch_cycles;  // cycles between two L2 prefetches of a CTA; 0: no prefetch
  int num_rank_sums;
  Exchange exchange;  // the exchange that these sums use
  int num_stages;     // stages in shared memory
};

// The state of the exchange when a launch with sums over ranks begins.
struct RankRounds {
  uint32_t before;  // number of rounds of earlier launches
  bool is_silent;   // for tests: this rank sends nothing
  bool waits;       // false: this rank gave up in an earlier launch
};

// The work range of a CTA in a GEMM: k blocks [begin, end) of tiles `tile`, tile + gridDim.x, ...
struct CtaRange {
  int tile, slice, begin, end;

  __device__ __forceinline__ explicit CtaRange(const WeightBlocks& of) {
    const int b = blockIdx.x;
    const int place = of.over_slices(b);
    tile = of.first_tile + place;
    slice = b - place * of.slices;
    begin = slice * of.slice_blocks + min(slice, of.longer_slices);
    end = begin + of.slice_blocks + (slice < of.longer_slices);
  }
};

}  // namespace cpmcu::cuda::fused
