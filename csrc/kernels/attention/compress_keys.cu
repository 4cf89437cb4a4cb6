// compress_keys: means of 32 and of 128 keys (sparse.h).
//
//   fine[r] = mean of keys 16 (r - 1) .. + 31,  coarse[b] = mean of keys 64 (b - 1) .. + 127
//
// Roofline: the new keys are read three to four times from L2, 2 * D bytes each. For one new token
// it is the latency of 128 independent loads, and only in every 16th step.
//
// Schedule: a CTA has one compressed key of one KV head of one sequence and layer; a thread has one
// dimension. CTAs beyond the keys that end in the step return at once. All layers take one launch.
//
// Surprising: keys are added in order in float32, one thread for a dimension. The bits equal those
// of the CPU, and they do not depend on the step that completes the span. Keys of an fp8 cache are
// scale * code, rounded to float32.
#include <algorithm>

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/attention/sparse_checks.h"
#include "kernels/layer/fp8_row.h"

namespace cpmcu::cuda {
namespace {

// Maximum number of layers of a launch; more layers take several launches.
constexpr int kMaxLayers = 64;

template <typename T>
struct CompressArgs {
  struct Layer {
    const void* k_cache;    // [pages, Hkv, 64, D] of T; if kFp8, of e4m3 codes
    const float* k_scales;  // [pages, Hkv, 64]; only kFp8 reads it
    T* fine;                // [pages, Hkv, 4, D]
    T* coarse;              // [pages, Hkv, 1, D]
  };
  Layer layers[kMaxLayers];
  const int* accepted_counts;
  int num_fine;  // number of CTAs for fine keys; the other CTAs are for coarse ones
  StepTokens tokens;
};

// Dimension `dim` of key `key`, a row of [pages, Hkv, 64].
template <typename T, bool kFp8>
__device__ __forceinline__ float key_of(const typename CompressArgs<T>::Layer& layer, int64_t key,
                                        int dim, int head_dim) {
  if constexpr (kFp8) {
    const auto* codes = static_cast<const uint8_t*>(layer.k_cache) + key * head_dim;
    return __fmul_rn(layer.k_scales[key], from_e4m3(codes[fp8_place(dim)]));
  } else {
    return to_float(static_cast<const T*>(layer.k_cache)[key * head_dim + dim]);
  }
}

// ---- kernels

// Grid: (fine and coarse keys of a sequence, Hkv, B * layers). A CTA has D threads.
template <typename T, bool kFp8>
__global__ void compress_keys_kernel(const __grid_constant__ CompressArgs<T> args) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.z % args.tokens.num_seqs, layer = blockIdx.z / args.tokens.num_seqs;
  const int head = blockIdx.y, num_heads = gridDim.y;
  const int dim = threadIdx.x, head_dim = blockDim.x;
  const int slot = args.tokens.seq_slots[seq];
  const NewTokens range = new_tokens(args.tokens, args.accepted_counts, seq);
  const bool is_fine = static_cast<int>(blockIdx.x) < args.num_fine;
  const int stride = is_fine ? kFineStride : kPageSize;
  const int length = is_fine ? kFineTokens : kCoarseTokens;
  const int rows = is_fine ? kFineRows : 1;  // compressed keys of a page
  const int row = range.begin / stride + blockIdx.x - (is_fine ? 0 : args.num_fine);
  if (row >= range.end / stride) return;

  const auto& planes = args.layers[layer];
  const int* pages = args.tokens.page_table + static_cast<int64_t>(slot) * args.tokens.max_pages;
  float sum = 0;
  if (row > 0) {
#pragma unroll 8
    for (int i = 0; i < length; ++i) {
      const int token = (row - 1) * stride + i;
      const int64_t page = pages[token / kPageSize];
      const int64_t key = (page * num_heads + head) * kPageSize + token % kPageSize;
      sum = __fadd_rn(sum, key_of<T, kFp8>(planes, key, dim, head_dim));
    }
  }
  T* const plane = is_fine ? planes.fine : planes.coarse;
  const int64_t to = (int64_t{pages[row / rows]} * num_heads + head) * rows + row % rows;
  plane[to * head_dim + dim] = from_float<T>(__fmul_rn(sum, 1.0f / length));
}

}  // namespace

// ---- launchers

// Graph-safe. Reads from the device: seq_slots, slot_lengths, seq_token_begin or accepted_counts,
// page_table.
void compress_keys(const Context& ctx, const CompressKeysParams& p) {
  check_compress(p);
  const StepTokens& tokens = p.tokens;
  if (tokens.num_seqs == 0) return;
  const Tensor& first = p.layers.front().k_cache;
  const int head_dim = static_cast<int>(first.size(3)), num_layers = p.layers.size();
  CHECK(head_dim <= 256, "compress_keys: head_dim is {}, expected at most 256", head_dim);
  // n new tokens end at most (n + 15) / 16 fine keys; a step accepts at most its own tokens.
  const auto most = [&](int stride) { return (tokens.max_seq_tokens + stride - 1) / stride; };
  const int num_fine = most(kFineStride);
  const bool is_fp8 = !p.layers.front().k_scales.empty();
  dispatch_half(p.layers.front().compressed.fine.dtype(), [&](auto element) {
    using T = decltype(element);
    for (int begin = 0; begin < num_layers; begin += kMaxLayers) {
      const int count = std::min(num_layers - begin, kMaxLayers);
      CompressArgs<T> args{.layers = {},
                           .accepted_counts = p.accepted_counts,
                           .num_fine = num_fine,
                           .tokens = tokens};
      for (int i = 0; i < count; ++i) {
        const LayerKeys& layer = p.layers[begin + i];
        args.layers[i] = {.k_cache = layer.k_cache.data(),
                          .k_scales = layer.k_scales.as<const float>(),
                          .fine = layer.compressed.fine.as<T>(),
                          .coarse = layer.compressed.coarse.as<T>()};
      }
      const dim3 grid(num_fine + most(kPageSize), static_cast<unsigned>(first.size(1)),
                      tokens.num_seqs * count);
      const auto kernel = is_fp8 ? compress_keys_kernel<T, true> : compress_keys_kernel<T, false>;
      launch(ctx, kernel, grid, dim3(head_dim), 0, args);
    }
  });
}

}  // namespace cpmcu::cuda
