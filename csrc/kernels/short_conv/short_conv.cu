// short_conv: the short convolution of a step's tokens, and the state of the slots.
//
// Roofline: HBM traffic of 8 bytes an element of `out` (gated), or 4 (SiLU). For one token: the
// latency of the dependent loads slot -> length -> accepted path -> pending.
//
// Schedule: a CTA has 32 channels of up to 64 tokens of a sequence. A warp has every eighth token,
// a lane one channel.
//   1. Each thread loads the window of its channel, with the accepted tokens of the last step.
//   2. It computes the outputs of its tokens. It computes u of their ancestors again.
//   3. Barrier. The first warp of the sequence's first CTA stores the window.
//
// Surprising: only the first 64 tokens of a sequence read the window, because K - 1 is less than
// 64. So the CTA that writes the window is the only one that reads it, and a prompt needs no second
// launch.
#include "kernels/short_conv/short_conv.h"

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kChannels = 32;  // channels of a CTA
constexpr int kWarps = 8;
constexpr int kTokens = kMaxTreeSize;  // tokens of a CTA

template <typename T>
struct ShortConvArgs {
  T* out;
  const T* x;
  const T* weight;
  const T* bias;  // [H]; null: no bias
  T* window;
  T* pending;
  int* folded;
  int width, num_pending;
  int64_t row, first;  // number of columns of x; first column of u in the SiLU form
  bool silu;
  Accepted accepted;
  bool commits;
  StepTokens tokens;
};

// One channel of one sequence.
template <typename T, int kTaps>
struct Channel {
  static constexpr int kBefore = kTaps - 1;

  const ShortConvArgs<T>& args;
  const int channel;
  const int slot, first, num_tokens, length;
  float before[kBefore];  // u of the tokens before the step

  __device__ __forceinline__ Channel(const ShortConvArgs<T>& args, int seq, int channel)
      : args(args),
        channel(channel),
        slot(args.tokens.seq_slots[seq]),
        first(args.tokens.seq_token_begin[seq]),
        num_tokens(args.tokens.seq_token_begin[seq + 1] - first),
        length(args.tokens.slot_lengths[slot]) {}

  __device__ __forceinline__ T* window(int i) const {
    return args.window + (int64_t{slot} * kBefore + i) * args.width + channel;
  }
  __device__ __forceinline__ T* pending(int node) const {
    return args.pending + (int64_t{slot} * args.num_pending + node) * args.width + channel;
  }
  __device__ __forceinline__ int& folded() const {
    return args.folded[int64_t{slot} * args.width + channel];
  }
  __device__ __forceinline__ void remember(float u) {
#pragma unroll
    for (int i = 0; i + 1 < kBefore; ++i) before[i] = before[i + 1];
    before[kBefore - 1] = u;
  }

  // The window, with the accepted tokens of the slot's last step.
  __device__ __forceinline__ void load_window() {
#pragma unroll
    for (int i = 0; i < kBefore; ++i) before[i] = to_float(*window(i));
    const Accepted& accepted = args.accepted;
    const int done = folded();
    if (accepted.counts == nullptr || done == length) return;
    const int count = accepted.counts[slot];
    const int* const path = accepted.paths + int64_t{slot} * accepted.max_path;
    if (done + count != length) return;
    for (int i = 0; i < count; ++i) {
      if (path[i] < 0 || path[i] >= args.num_pending) return;
    }
    for (int i = max(count - kBefore, 0); i < count; ++i) remember(to_float(*pending(path[i])));
  }
  // Stores the window. A prefill adds its tokens, a decode step does not.
  __device__ __forceinline__ void store_window() {
    if (args.commits) {
      for (int j = max(num_tokens - kBefore, 0); j < num_tokens; ++j) remember(input(j));
    }
#pragma unroll
    for (int i = 0; i < kBefore; ++i) *window(i) = from_float<T>(before[i]);
    folded() = args.commits ? length + num_tokens : length;
  }

  // u of token j of the sequence, as it is stored.
  __device__ __forceinline__ float input(int j) const {
    const T* const row = args.x + int64_t{first + j} * args.row + channel;
    if (args.silu) return to_float(row[args.first]);
    return to_float(from_float<T>(__fmul_rn(to_float(row[0]), to_float(row[2 * args.width]))));
  }
  __device__ __forceinline__ int parent_of(int node) const {
    const int* const parents = args.tokens.token_parents;
    return args.commits || parents == nullptr ? node - 1 : parents[first + node];
  }

  __device__ __forceinline__ void convolve(const float (&weight)[kTaps], float bias, int j) const {
    float inputs[kTaps];
    int node = j, missing = 0;
#pragma unroll
    for (int t = kTaps - 1; t >= 0; --t) {
      inputs[t] = 0;
      if (node >= 0) {
        inputs[t] = input(node);
        node = parent_of(node);
      } else {
#pragma unroll
        for (int i = 0; i < kBefore; ++i) {
          if (i == kBefore - 1 - missing) inputs[t] = before[i];
        }
        ++missing;
      }
    }
    if (!args.commits) *pending(j) = from_float<T>(inputs[kTaps - 1]);
    float sum = bias;
#pragma unroll
    for (int t = 0; t < kTaps; ++t) sum = __fmaf_rn(weight[t], inputs[t], sum);
    const int64_t row = first + j;
    const float factor = args.silu ? __fdividef(1.0f, 1.0f + __expf(-sum))
                                   : to_float(args.x[row * args.row + args.width + channel]);
    args.out[row * args.width + channel] = from_float<T>(__fmul_rn(factor, sum));
  }
};

// ---- kernels

// Grid: (CTAs of the channels, tiles of 64 tokens, B).
template <typename T, int kTaps>
__global__ void __launch_bounds__(kChannels* kWarps)
    short_conv_kernel(const __grid_constant__ ShortConvArgs<T> args) {
  ptx::pdl_launch();
  const int channel = static_cast<int>(blockIdx.x * kChannels + threadIdx.x % kChannels);
  const int warp = static_cast<int>(threadIdx.x / kChannels), first = blockIdx.y * kTokens;
  const bool exists = channel < args.width;
  Channel<T, kTaps> of(args, blockIdx.z, min(channel, args.width - 1));
  float weight[kTaps];
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
    weight[t] = to_float(args.weight[int64_t{of.channel} * kTaps + t]);
  }
  const float bias = args.bias == nullptr ? 0.0f : to_float(args.bias[of.channel]);
  ptx::pdl_wait();
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) of.before[i] = 0;
  if (first == 0) of.load_window();
  // The accepted tokens have been read before a token of this step takes their place.
  __syncthreads();
  for (int j = first + warp; j < min(first + kTokens, of.num_tokens) && exists; j += kWarps) {
    of.convolve(weight, bias, j);
  }
  if (first == 0 && warp == 0 && exists) of.store_window();
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: the slots, lengths and parents of the tokens, accepted.
void short_conv(const Context& ctx, const ShortConvParams& p) {
  check_short_conv(p);
  if (p.tokens.num_tokens == 0) return;
  const int width = static_cast<int>(p.out.size(1));
  const dim3 grid((width + kChannels - 1) / kChannels,
                  (p.tokens.max_seq_tokens + kTokens - 1) / kTokens, p.tokens.num_seqs);
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_int<2, 3, 4, 5, 6, 7, 8>(
        "short_conv: kernel_size", static_cast<int>(p.weight.size(1)), [&](auto kernel_size) {
          launch(ctx, short_conv_kernel<T, kernel_size.value>, grid, dim3(kChannels * kWarps), 0,
                 ShortConvArgs<T>{.out = p.out.as<T>(),
                                  .x = p.x.as<const T>(),
                                  .weight = p.weight.as<const T>(),
                                  .bias = p.bias.as<const T>(),
                                  .window = p.window.as<T>(),
                                  .pending = p.pending.as<T>(),
                                  .folded = p.folded.as<int>(),
                                  .width = width,
                                  .num_pending = static_cast<int>(p.pending.size(1)),
                                  .row = p.x.size(1),
                                  .first = p.first,
                                  .silu = p.silu,
                                  .accepted = p.accepted,
                                  .commits = p.commits,
                                  .tokens = p.tokens});
        });
  });
}

}  // namespace cpmcu::cuda
