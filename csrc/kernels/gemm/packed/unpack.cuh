// Unpackers: how the kernels read the weight blocks of a layout (layout.h).
//
// A kernel takes an unpacker as a template parameter. It has
//   kBits            bits of a code, 4 or 8; codes are in the order of nibble_place or byte_place
//   kExtraBytes      most bytes of a block behind the codes
//   Fragment         a lane's codes of one m16 tile and one k step
//   kFactor<T>       unpacked numbers are the numbers of the layout times kFactor, exact in T
//   Tile<T>          what a lane keeps for the rows g and g + 8 of an m16 tile of a block
//   kTileOffset      byte offset of a block's tile data: zero points or group scales. K-quants have
//                    a function tile_offset instead. Bytes of tile data: kTileBytes at most,
//                    tile_bytes in a block, tile_row_bytes for a row
//   unpack<T>        Fragment, Tile and k step -> the A fragment of mma.m16n8k16
//   scale_place      byte offset of a row's scale in a block; scale_step: from there to the row 8
//                    further
//   load_scale       row's place and group of k -> the float32 factor of a sum over kScaleSteps k
//                    steps
//   kScaleSteps      k steps that share a scale: 8, all of a block, or fewer. If fewer, the tile
//                    data of the next group is 1 byte further
//   kHasMinimum      if declared: load_min, the float32 factor of a sum of x, which is subtracted
// load_tile, load_scale and load_min take an address in shared memory, or a pointer.
// `form` is a number that tells layouts apart at run time (scale_form). One kernel serves several
// similar layouts, because each kernel takes seconds to compile.
#pragma once

#include "kernels/gemm/packed/unpack_floats.cuh"
#include "kernels/gemm/packed/unpack_k_quants.cuh"

namespace cpmcu::cuda {
namespace {

// Offsets within a block.
template <typename Unpacker>
constexpr int kPairBytes = 32 * 4 * Unpacker::kBits;  // bytes of two k steps of a warp tile
template <typename Unpacker>
constexpr int kWarpTileBytes = kPackedK / 32 * kPairBytes<Unpacker>;
template <typename Unpacker>
constexpr int kScaleOffset = kWarpTiles * kWarpTileBytes<Unpacker>;
template <typename Unpacker>
__device__ __forceinline__ constexpr int tile_offset(uint8_t form) {
  if constexpr (requires { Unpacker::kTileOffset; }) {
    return Unpacker::kTileOffset;
  } else {
    return Unpacker::tile_offset(form);
  }
}

// A lane's codes of two k steps of a warp tile.
template <typename Unpacker, int kBits = Unpacker::kBits>
struct CodePair;
template <typename Unpacker>
struct CodePair<Unpacker, 4> {
  uint4 words;

  __device__ __forceinline__ void load(uint32_t shared) { words = ptx::load_shared16(shared); }
  // Of k step `step` and m16 tile `tile`.
  __device__ __forceinline__ uint32_t at(int step, int tile) const {
    return step == 0 ? (tile == 0 ? words.x : words.y) : (tile == 0 ? words.z : words.w);
  }
};
template <typename Unpacker>
struct CodePair<Unpacker, 8> {
  uint4 steps[2];

  __device__ __forceinline__ void load(uint32_t shared) {
    steps[0] = ptx::load_shared16(shared);
    steps[1] = ptx::load_shared16(shared + kPairBytes<Unpacker> / 2);
  }
  __device__ __forceinline__ uint2 at(int step, int tile) const {
    const uint4& of = steps[step];
    return tile == 0 ? make_uint2(of.x, of.y) : make_uint2(of.z, of.w);
  }
};

// A lane's codes of one k step of a warp tile at `from` in shared memory, by generic loads.
template <typename Unpacker>
struct StepCodes {
  typename Unpacker::Fragment tile[2];

  __device__ __forceinline__ StepCodes(const char* from, int step, int lane) {
    if constexpr (Unpacker::kBits == 4) {
      const uint2 both = *reinterpret_cast<const uint2*>(from + step / 2 * kPairBytes<Unpacker> +
                                                         lane * 16 + step % 2 * 8);
      tile[0] = both.x, tile[1] = both.y;
    } else {
      const uint4 both =
          *reinterpret_cast<const uint4*>(from + step * (kPairBytes<Unpacker> / 2) + lane * 16);
      tile[0] = make_uint2(both.x, both.y), tile[1] = make_uint2(both.z, both.w);
    }
  }
};

// The run-time number of a layout that its unpacker gets.
inline uint8_t scale_form(const PackedLayout& layout) {
  switch (layout.codes) {
    case Codes::kInt4:
    case Codes::kInt8:
      return (layout.scale_dtype == DType::kBF16 ? kFirstForm : 0) |
             (layout.group > 0 && layout.zero_points ? kZerosForm : 0);
    case Codes::kE2m1:
      return layout.group == 16 ? kFirstForm : 0;
    case Codes::kK4:
    case Codes::kK8:
      return layout.halves ? kFirstForm : 0;
    default:
      return layout.scale_rows == 8 ? kFirstForm : 0;
  }
}

// Kernels for 9 to 16 rows of x, and fused ones for more than 64, exist for the layouts that most
// checkpoints have. For 9 to 16 rows, other layouts take the kernel for 32 rows. The bits of y are
// the same.
template <typename Unpacker>
constexpr bool kIsCommon = Unpacker::kScaleSteps == 8 && !std::is_same_v<Unpacker, GroupedE4m3>;
inline bool is_common(const PackedLayout& layout) {
  return layout.group == 0 || layout.codes == Codes::kE2m1;
}
template <typename Unpacker, int kGroups>
constexpr bool kHasRows = kIsCommon<Unpacker> || (kGroups != 2 && kGroups <= 8);
// As row_groups, for one launch.
inline int row_groups_of(const PackedLayout& layout, int64_t rows, int64_t most = kMaxSkinnyRows) {
  const int groups = row_groups(rows, most);
  return groups == 2 && !is_common(layout) ? 4 : groups;
}

// Unpackers of the layouts that the fused layer kernel reads (`fuses`).
using Int4By16 = Int4<Zeros::kByForm, 8>;
template <typename Unpacker>
constexpr bool kIsFused = !std::is_same_v<Unpacker, Int4By16>;
// Unpackers of the layouts that the fused layer kernel reads on all GPUs.
template <typename Unpacker>
constexpr bool kIsFusedAnywhere =
    kIsFused<Unpacker> &&
    (Unpacker::kBits == 4 || std::is_same_v<Unpacker, E4m3> || std::is_same_v<Unpacker, Int8>);

// Calls f(unpacker) for the layout. Throws if the CUDA kernels have none.
template <typename F>
void dispatch_unpacker(const PackedLayout& layout, F f) {
  switch (layout.codes) {
    case Codes::kInt4:
      if (layout.group == 16) return f(Int4By16{});
      if (layout.group > 0) return f(Int4<Zeros::kByForm, 4>{});
      return layout.zero_points ? f(Int4<Zeros::kAll>{}) : f(Int4<Zeros::kNone>{});
    case Codes::kInt8:
      return f(Int8{});
    case Codes::kE4m3:
      return layout.group == 0 ? f(E4m3{}) : f(GroupedE4m3{});
    case Codes::kE2m1:
      return f(E2m1{});
    case Codes::kK4:
      return f(K4{});
    case Codes::kK8:
      return layout.minimum ? f(K8WithMinimum{}) : f(K8{});
    case Codes::kOther:
      break;
  }
  CHECK(false, "a layout of packed weights from outside has no CUDA kernels, expected device cpu");
}

}  // namespace
}  // namespace cpmcu::cuda
