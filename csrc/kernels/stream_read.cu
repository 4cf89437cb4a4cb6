// stream_read: measures the memory bandwidth that other kernels can reach.
//
// Roofline: this kernel is the roofline. Each thread keeps eight 16-byte loads in flight.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/stream_read.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 8;

__global__ void __launch_bounds__(kThreads)
    stream_read_kernel(uint32_t* out, const uint4* in, int64_t count) {
  ptx::pdl_wait();
  const uint64_t policy = ptx::evict_first_policy();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  uint32_t sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride * kInFlight) {
    uint4 words[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t at = i + j * stride;
      words[j] = at < count ? ptx::load_stream16(in + at, policy) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (const uint4& v : words) sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  sum = __reduce_xor_sync(0xffffffffu, sum);
  if (threadIdx.x % 32 == 0) atomicXor(out + blockIdx.x, sum);
}

}  // namespace

void stream_read(const Context& ctx, const StreamReadParams& params) {
  CHECK(params.in.num_bytes() % 16 == 0, "{} bytes, expected a multiple of 16",
        params.in.num_bytes());
  fill_bytes(ctx.device, params.out.data(), 0, int64_t{4} * kStreamReadCtas, ctx.stream);
  launch(ctx, stream_read_kernel, dim3(kStreamReadCtas), dim3(kThreads), 0,
         params.out.as<uint32_t>(), params.in.as<const uint4>(), params.in.num_bytes() / 16);
}

}  // namespace cpmcu::cuda
