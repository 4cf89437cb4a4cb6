// Copies the codes of an fp8 cache to 16-bit numbers (fp8_copies.cuh).
//
// Roofline: a code is read and a 16-bit number written, 3 bytes of each number of keys and values
// that the tokens see. Example: a layer of Llama-3.1-8B, 30000 entries: 184 MB, 60 us. Attention of
// 2048 tokens to them takes 1.5 ms.
//
// Schedule: a CTA has one page of a pair. A thread copies 16 numbers at a time: the 16 bytes of a
// group of codes, whose even bytes are the first eight numbers.
#include "kernels/attention/fp8_copies.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroups = kCopyDim / 16;  // groups of 16 numbers in a row
static_assert(kPageSize * kGroups % kThreads == 0);

// Writes the 16 numbers of a group of codes.
template <typename T>
__device__ __forceinline__ void write_group(T* to, const uint4& codes) {
  uint4 even, odd;
  unpack_codes<T>(even.x, odd.x, codes.x);
  unpack_codes<T>(even.y, odd.y, codes.y);
  unpack_codes<T>(even.z, odd.z, codes.z);
  unpack_codes<T>(even.w, odd.w, codes.w);
  reinterpret_cast<uint4*>(to)[0] = even;
  reinterpret_cast<uint4*>(to)[1] = odd;
}

// ---- kernels

// Grid: (pages, KV heads, B), those of the round. Entries beyond the sequence become zero, up to
// the end of the last KV tile.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    copy_codes_kernel(const __grid_constant__ AttentionArgs<T> args,
                      const __grid_constant__ Fp8Copies copies, NeededTokens needed) {
  ptx::pdl_wait();
  ptx::pdl_launch();
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const Sequence seq = load_sequence(args.tokens, static_cast<int>(blockIdx.z));
  const int end = seq.end();
  // Row tiles that begin before needed.end reach at most kCopyEntries further.
  const int seen = end - kCopyEntries < needed.end ? end : needed.end + kCopyEntries;
  const int copied = (seen + kCopyEntries - 1) / kCopyEntries * kCopyEntries;
  if (block * kPageSize >= copied || end <= needed.begin || seq.first_entry >= needed.end) {
    return;
  }
  const int num_valid = min(max(end - block * kPageSize, 0), kPageSize);
  const int64_t page =
      num_valid > 0
          ? args.tokens.page_table[static_cast<int64_t>(seq.slot) * args.tokens.max_pages + block]
          : 0;
  const int64_t from = (page * args.num_kv_heads + copies.first_kv_head + head) * kPageSize;
  const int64_t to = int64_t{copies.first_row(static_cast<int>(blockIdx.z), head)} +
                     static_cast<int64_t>(block) * kPageSize;
#pragma unroll
  for (int operand = 0; operand < 2; ++operand) {
    const auto* codes =
        reinterpret_cast<const uint8_t*>(operand == kKeys ? args.k_cache : args.v_cache);
    const float* scales = operand == kKeys ? args.k_scales : args.v_scales;
    T* const rows = static_cast<T*>(copies.rows[operand]);
#pragma unroll
    for (int first = 0; first < kPageSize * kGroups; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int row = i / kGroups;
      const int64_t place = static_cast<int64_t>(row) * kCopyDim + i % kGroups * 16;
      uint4 of_group = make_uint4(0, 0, 0, 0);
      if (row < num_valid) {
        of_group = *reinterpret_cast<const uint4*>(codes + from * kCopyDim + place);
      }
      write_group(rows + to * kCopyDim + place, of_group);
    }
    if (threadIdx.x < kPageSize) {
      const int row = static_cast<int>(threadIdx.x);
      copies.scales[operand][to + row] = row < num_valid ? scales[from + row] : 0.0f;
    }
  }
}

// ---- launchers

template <typename T>
void launch_copy(const Context& ctx, const AttentionArgs<T>& args, const Fp8Copies& copies,
                 NeededTokens needed) {
  const dim3 grid(copies.entries / kPageSize, copies.num_kv_heads, copies.num_seqs);
  launch(ctx, copy_codes_kernel<T>, grid, dim3(kThreads), 0, args, copies, needed);
}

}  // namespace

// Graph-safe. Reads from the device: seq_slots, seq_token_begin, slot_lengths, page_table.
void copy_codes(const Context& ctx, const AttentionArgs<__half>& args, const Fp8Copies& copies,
                NeededTokens needed) {
  launch_copy(ctx, args, copies, needed);
}
void copy_codes(const Context& ctx, const AttentionArgs<__nv_bfloat16>& args,
                const Fp8Copies& copies, NeededTokens needed) {
  launch_copy(ctx, args, copies, needed);
}

}  // namespace cpmcu::cuda
