// w4_gemm for at most 8 rows of x and matrices of too few rows to fill the chip by blocks of 256.
//
// Roofline: as w4a16_kernel.cuh says. 4096 x 4096 takes 2.9 us to read; once its weights wait in
// shared memory, what counts is how soon after x the last product is done.
//
// The surprising decision: no thread owns a sum while it grows. A warp multiplies 32 rows of W by
// the 128 k of one group and leaves 32 scaled products for each row of x; one thread per sum adds
// them up later, in the order in which the large kernel adds. So the groups of a row can be spread
// over all warps, twelve at a time, and y still has the same bits.
//
// Work: a block of threads owns 32 rows of W and all of K. In round i warp w multiplies group 12 i
// + w, which it has copied itself, three rounds ahead: weights before the kernels before are done,
// rows of x after. Behind each round the first warps add it up, one warp for each row of x, while
// the others go on.
#include "kernels/gemm/w4a16_kernel.cuh"

namespace cpmcu::cuda {

// w4a16_gemm.cu calls it with its copy of Args.
void w4_gemm_narrow(const Context& ctx, DType dtype, const void* args);

namespace {

constexpr int kNarrowWarps = 12;
constexpr int kNarrowThreads = 32 * kNarrowWarps;
constexpr int kDepth = 3;  // rounds in flight
constexpr int kSlabRows = 32;
constexpr int kSlabBytes = kSlabRows * kW4BlockK / 2;
constexpr int kSlabScales = kSlabBytes, kSlabZeros = kSlabScales + 2 * kSlabRows;
constexpr int kSlabRowsOfX = kSlabBytes + 256;  // where x begins: a multiple of 256 bytes
constexpr int kProductStride = kSlabRows + 4;   // floats; keeps banks apart
constexpr int kMaxNarrowRows = 8;

int entry_bytes(int m) { return kSlabRowsOfX + m * kRowBytes; }
int products_bytes(int m) { return 2 * kNarrowWarps * m * kProductStride * 4; }

// ---- kernels

template <typename T>
__global__ void __launch_bounds__(kNarrowThreads, 2)
    w4_gemm_narrow_kernel(const __grid_constant__ Args args, int entry_bytes) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n0 = blockIdx.x * kSlabRows;
  const int rounds = (args.k_blocks + kNarrowWarps - 1) / kNarrowWarps;
  const uint32_t ring = ptx::shared_address(shared) + warp * kDepth * entry_bytes;
  // Behind the rings (and room for rows of x that do not exist): [2][warps][m][32] products.
  const uint32_t products = ptx::shared_address(shared) + kNarrowWarps * kDepth * entry_bytes +
                            kMaxNarrowRows * kRowBytes;
  const uint64_t policy = ptx::evict_first_policy();
  const char* slab =
      args.blocks + static_cast<int64_t>(n0 / kW4BlockRows) * args.k_blocks * args.block_bytes;
  const int first_row = n0 % kW4BlockRows;

  const auto copy_weights = [&](int round) {
    const int k_block = round * kNarrowWarps + warp;
    if (k_block >= args.k_blocks) return;
    const char* block = slab + static_cast<int64_t>(k_block) * args.block_bytes;
    const uint32_t to = ring + round % kDepth * entry_bytes;
    const char* from = block + first_row * (kW4BlockK / 2) + lane * 16;
#pragma unroll
    for (int i = 0; i < kSlabBytes / 512; ++i) {
      ptx::cp_async16_stream(to + lane * 16 + i * 512, from + i * 512, policy);
    }
    if (lane < 4) {
      ptx::cp_async16(to + kSlabScales + lane * 16,
                      block + kScaleOffset + 2 * first_row + lane * 16);
    } else if (lane < 6 && args.zero_points) {
      ptx::cp_async16(to + kSlabZeros + (lane - 4) * 16,
                      block + kZeroOffset + first_row + (lane - 4) * 16);
    }
  };
  const auto copy_rows = [&](int round) {
    int k_block = round * kNarrowWarps + warp;
    if (k_block >= args.k_blocks) return;
    if (k_block >= args.blocks_of_digit) k_block -= args.blocks_of_digit;
    const uint32_t to = ring + round % kDepth * entry_bytes + kSlabRowsOfX;
    const int chunk = lane % 16, k = k_block * kW4BlockK + chunk * 8;
    const T* from = static_cast<const T*>(args.x) + k;
    for (int row = lane / 16; row < args.m; row += 2) {
      ptx::cp_async16(to + row * kRowBytes + ((chunk ^ row) << 4),
                      from + static_cast<int64_t>(row) * args.k, k < args.k);
    }
  };

  ptx::pdl_launch();
#pragma unroll
  for (int round = 0; round < kDepth; ++round) copy_weights(round);
  ptx::cp_async_commit();
  ptx::pdl_wait();
#pragma unroll
  for (int round = 0; round < kDepth; ++round) {
    copy_rows(round);
    ptx::cp_async_commit();
  }

  // What the thread of row n0 + lane of W and row `warp` of x adds up, in the order of the slices.
  float total = 0, sum = 0;
  int slice = 0, slice_end = slice_range(args.k_blocks, args.slices, 0).end;
  const auto add_round = [&](int round) {
    const uint32_t from = products + round % 2 * (kNarrowWarps * args.m * kProductStride * 4) +
                          (warp * kProductStride + lane) * 4;
    float v[kNarrowWarps];
#pragma unroll
    for (int i = 0; i < kNarrowWarps; ++i) {
      v[i] = load_shared_float(from + i * (args.m * kProductStride * 4));
    }
#pragma unroll
    for (int i = 0; i < kNarrowWarps; ++i) {
      const int k_block = round * kNarrowWarps + i;
      if (k_block >= args.k_blocks) break;
      sum = __fadd_rn(sum, v[i]);
      if (k_block + 1 == slice_end) {
        total = __fadd_rn(total, sum);
        sum = 0;
        slice_end = slice_range(args.k_blocks, args.slices, ++slice).end;
      }
    }
  };

  const int g = lane / 4, q = lane % 4;
  for (int round = 0; round < rounds; ++round) {
    ptx::cp_async_wait<kDepth - 1>();
    __syncwarp();
    if (round * kNarrowWarps + warp < args.k_blocks) {
      const uint32_t entry = ring + round % kDepth * entry_bytes;
      uint32_t low[2] = {low_offset<T>(8), low_offset<T>(8)};
      uint32_t high[2] = {high_offset<T>(8), high_offset<T>(8)};
      if (args.zero_points) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          low[t] = low_offset<T>(load_shared_byte(entry + kSlabZeros + t * 16 + g));
          high[t] = high_offset<T>(load_shared_byte(entry + kSlabZeros + t * 16 + 8 + g));
        }
      }
      float part[2][1][4];
      MmaSync::multiply<T, 1>(part, entry + lane * 16, entry + kSlabRowsOfX, low, high);
      const uint32_t to =
          products + (round % 2 * kNarrowWarps + warp) * (args.m * kProductStride * 4);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = t * 16 + i / 2 * 8 + g, x_row = q * 2 + i % 2;
          const float scale = load_scale(entry + kSlabScales + 2 * row, args.bf16_scales);
          if (x_row < args.m) {
            store_shared_float(to + (x_row * kProductStride + row) * 4,
                               __fmul_rn(scale, part[t][0][i]));
          }
        }
      }
    }
    __syncwarp();
    copy_weights(round + kDepth);
    copy_rows(round + kDepth);
    ptx::cp_async_commit();
    // After the barrier the products of this round are all there, and those of the round before are
    // added up, so that their place is free for the next.
    __syncthreads();
    if (warp < args.m) add_round(round);
  }
  if (warp < args.m && n0 + lane < args.n) store_y<T>(args, warp, n0 + lane, total);
}

}  // namespace

// ---- launchers

void w4_gemm_narrow(const Context& ctx, DType dtype, const void* args_of_caller) {
  const Args& args = *static_cast<const Args*>(args_of_caller);
  const int entry = entry_bytes(args.m);
  const size_t shared_bytes = static_cast<size_t>(kNarrowWarps) * kDepth * entry +
                              kMaxNarrowRows * kRowBytes + products_bytes(args.m);
  const dim3 grid((args.n + kSlabRows - 1) / kSlabRows);
  dispatch_half(dtype, [&](auto t) {
    const auto kernel = w4_gemm_narrow_kernel<decltype(t)>;
    allow_shared_bytes(kernel, shared_bytes);
    launch(ctx, kernel, grid, dim3(kNarrowThreads), shared_bytes, args, entry);
  });
}

}  // namespace cpmcu::cuda
