// k_quant_pack: K-quants of llama.cpp to weight blocks.
//
// Roofline: bytes read plus bytes written, at load.
//
// Schedule: one CTA a weight block. A thread copies the records of a row, then writes one word of
// codes after another.
//
// The surprising decision: this op only copies records. cpmcu/loading/gguf/blocks.py has already
// given them the layout of weight blocks, so one op packs K-quants of all forms.
#include "kernels/gemm/packed/k_quant_pack.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/gemm/packed/part_rows.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = kPackedRows;

struct PackArgs {
  PartRows part;
  const uint8_t* codes;
  const uint8_t* records;
  const uint8_t* min_records;  // records of the minima; null: W has no minima
  int k, k_blocks, record_bytes;
  int64_t code_bytes;
};

// ---- kernels

// Packs a weight block. Bytes of kK8 are stored with 128 added.
template <int kBits>
__global__ void __launch_bounds__(kThreads)
    k_quant_pack_kernel(const __grid_constant__ PackArgs p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int k0 = blockIdx.x * kPackedK;
  char* block = p.part.block();
  const int own = p.part.own(static_cast<int>(threadIdx.x));
  const auto write = [&](char* to, const uint8_t* records) {
    const uint8_t* from = records + (int64_t{own} * p.k_blocks + blockIdx.x) * p.record_bytes;
    for (int i = 0; i < p.record_bytes; ++i) {
      to[i] = static_cast<char>(own < 0 ? uint8_t{0} : from[i]);
    }
  };
  if (own != -2) {
    char* record = block + p.code_bytes + threadIdx.x * p.record_bytes;
    write(record, p.records);
    if (p.min_records != nullptr) write(record + kPackedRows * p.record_bytes, p.min_records);
  }
  constexpr uint8_t kZero = kBits == 8 ? 128 : 0;
  write_codes<kBits>(p.part, block, [&](int row, Place at) -> uint8_t {
    if (row < 0 || k0 + at.k >= p.k) return kZero;
    const int64_t place = int64_t{row} * p.k + k0 + at.k;
    return kBits == 8 ? p.codes[place] ^ kZero : p.codes[place / 2] >> (4 * (place % 2)) & 15;
  });
}

}  // namespace

// ---- launchers

void k_quant_pack(const Context& ctx, const KQuantPackParams& params) {
  check_k_quant_pack(params);
  const PackedWeight& w = params.w;
  const PackArgs args{.part = part_rows(w, params.first_row, params.codes.size(0)),
                      .codes = params.codes.as<uint8_t>(),
                      .records = params.records.as<uint8_t>(),
                      .min_records = params.min_records.as<uint8_t>(),
                      .k = static_cast<int>(w.k),
                      .k_blocks = static_cast<int>(w.k_blocks()),
                      .record_bytes = w.layout.record_bytes(),
                      .code_bytes = w.layout.code_bytes()};
  launch(ctx, w.layout.bits() == 4 ? k_quant_pack_kernel<4> : k_quant_pack_kernel<8>,
         grid_of_blocks(w), dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
