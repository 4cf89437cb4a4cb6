// Warp tiles of a weight block (layout.h), for kernels that read it by fragments.
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu::cuda {
namespace {

constexpr int kWarpTileRows = 32;                        // rows of W in a warp tile
constexpr int kWarpTiles = kPackedRows / kWarpTileRows;  // warp tiles of a weight block

}  // namespace
}  // namespace cpmcu::cuda
