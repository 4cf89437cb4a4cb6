// A run of 4-bit products in which each reads what the one before wrote, as one kernel: of a layer,
// o, gate and up, down, and qkv of the next.
//
// Link i: y = alpha * x W^T + beta * y as in w4_gemm. With a norm, `normed` then stands for the
// rows of y, RMS-normed: the next link multiplies it, and what the memory holds afterwards is not
// said. Every W is of one digit and has 16-bit y.
//
// The blocks of the kernel wait for one another, so all of them must find room: only one such
// launch may run on a device at a time (engine/graph_runner.h sees to it within a process), and the
// kernel does not run on a device that processes share by MPS.
//
// Where the kernel does not run (the CPU, before and after Hopper), links are launched one by one.
#pragma once

#include <vector>

#include "kernels/gemm/w4a16.h"

namespace cpmcu {

constexpr int kMaxChainLinks = 4;
constexpr int kMaxChainBlocks = 144;  // of threads: the multiprocessors of the largest Hopper chip

struct W4Link {
  Tensor y;  // [M, N] (gated: [M, N / 2]), dtype of x
  Tensor x;  // [M, K]
  W4Weight w;
  float alpha = 1;  // as in W4GemmParams
  float beta = 0;
  Tensor scratch{};
  Tensor normed{};       // [M, N]; empty: no norm
  Tensor norm_weight{};  // [N]
  float norm_eps = 0;
};

struct W4ChainParams {
  std::vector<W4Link> links;  // 1 to kMaxChainLinks
  Tensor memory;              // [w4_chain_bytes] uint8, prepared once by w4_chain_prepare
};

// What the kernel keeps between launches: counters, and room for the sums of slices of up to
// `max_rows` rows.
inline int64_t w4_chain_bytes(int64_t max_rows) {
  const int64_t rows = (std::min<int64_t>(max_rows, 64) + 7) / 8 * 8;
  return 128 * 1024 + int64_t{kMaxChainBlocks} * kW4BlockRows * rows * 4;
}

// Whether `ctx` has the kernel.
bool w4_chain_runs(const Context& ctx);
void w4_chain_prepare(const Context& ctx, const Tensor& memory);
void w4_chain(const Context& ctx, const W4ChainParams& params);

}  // namespace cpmcu
