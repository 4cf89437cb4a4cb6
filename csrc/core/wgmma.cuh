// wgmma instructions with m = 64: one wrapper for a left operand in registers, one for shared
// memory. core/ptx.cuh has the fences and waits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace cpmcu::ptx {

// The accumulator registers of 64 rows by number of columns: as text, and as operands.
#define SUMS_32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define SUMS_64                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SUMS_128                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "  \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "  \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define SUMS_256                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "  \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "  \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "  \
  "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "  \
  "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "    \
  "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "   \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define GROUP(g) "+f"(d[g][0]), "+f"(d[g][1]), "+f"(d[g][2]), "+f"(d[g][3])
#define GROUPS_32 GROUP(0), GROUP(1), GROUP(2), GROUP(3)
#define GROUPS_64 GROUPS_32, GROUP(4), GROUP(5), GROUP(6), GROUP(7)
#define GROUPS_128 \
  GROUPS_64, GROUP(8), GROUP(9), GROUP(10), GROUP(11), GROUP(12), GROUP(13), GROUP(14), GROUP(15)
#define GROUPS_256                                                                            \
  GROUPS_128, GROUP(16), GROUP(17), GROUP(18), GROUP(19), GROUP(20), GROUP(21), GROUP(22),    \
      GROUP(23), GROUP(24), GROUP(25), GROUP(26), GROUP(27), GROUP(28), GROUP(29), GROUP(30), \
      GROUP(31)

// Left operand in registers. The arguments are operand numbers: a0 to a3 the left operand, x the
// descriptor of x, `add` the accumulate flag, `transposed` the flag that x is transposed.
#define WGMMA(columns, type, a0, a1, a2, a3, x, add, transposed)                     \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" add                                \
               ", 0;\n"                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
               " " SUMS_##columns ", {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" x      \
                                  ", p, 1, 1, %" transposed "; }"                    \
               : GROUPS_##columns                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x_rows),            \
                 "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposed)))
// Left operand in shared memory: operand number a.
#define WGMMA_SHARED(columns, type, a, x, add)                                       \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" add                                \
               ", 0;\n"                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
               " " SUMS_##columns ", %" a ", %" x ", p, 1, 1, 0, 0; }"               \
               : GROUPS_##columns                                                    \
               : "l"(a_rows), "l"(x_rows), "r"(static_cast<int>(accumulate)))

// d (+)= a x^T. If !accumulate, d is overwritten.
//   a  64 x 16 in registers, 16 rows for each warp, as in mma_16x8x16
//   x  8 kGroups x 16 in shared memory; if kTransposed, as x^T [16, 64], and kGroups is 8
//   d  64 x 8 kGroups float32, as in mma_16x8x16 for each 8 columns
template <typename T, int kGroups, bool kTransposed = false>
__device__ __forceinline__ void wgmma_64xNx16(float (&d)[kGroups][4], const uint32_t (&a)[4],
                                              uint64_t x_rows, bool accumulate) {
  static_assert(kGroups == 4 || kGroups == 8 || kGroups == 16, "32, 64 or 128 columns");
  static_assert(!kTransposed || kGroups == 8, "rows of 64");
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kGroups == 4 && kHalf) {
    WGMMA(32, "f16", "16", "17", "18", "19", "20", "21", "22");
  } else if constexpr (kGroups == 4) {
    WGMMA(32, "bf16", "16", "17", "18", "19", "20", "21", "22");
  } else if constexpr (kGroups == 8 && kHalf) {
    WGMMA(64, "f16", "32", "33", "34", "35", "36", "37", "38");
  } else if constexpr (kGroups == 8) {
    WGMMA(64, "bf16", "32", "33", "34", "35", "36", "37", "38");
  } else if constexpr (kHalf) {
    WGMMA(128, "f16", "64", "65", "66", "67", "68", "69", "70");
  } else {
    WGMMA(128, "bf16", "64", "65", "66", "67", "68", "69", "70");
  }
}
// d (+)= a x^T with a [64, 16] in shared memory; 64, 128 or 256 columns.
template <typename T, int kGroups>
__device__ __forceinline__ void wgmma_64xNx16(float (&d)[kGroups][4], uint64_t a_rows,
                                              uint64_t x_rows, bool accumulate) {
  static_assert(kGroups == 8 || kGroups == 16 || kGroups == 32, "64, 128 or 256 columns");
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kGroups == 8 && kHalf) {
    WGMMA_SHARED(64, "f16", "32", "33", "34");
  } else if constexpr (kGroups == 8) {
    WGMMA_SHARED(64, "bf16", "32", "33", "34");
  } else if constexpr (kGroups == 16 && kHalf) {
    WGMMA_SHARED(128, "f16", "64", "65", "66");
  } else if constexpr (kGroups == 16) {
    WGMMA_SHARED(128, "bf16", "64", "65", "66");
  } else if constexpr (kHalf) {
    WGMMA_SHARED(256, "f16", "128", "129", "130");
  } else {
    WGMMA_SHARED(256, "bf16", "128", "129", "130");
  }
}

#undef WGMMA_SHARED
#undef WGMMA
#undef GROUPS_256
#undef GROUPS_128
#undef GROUPS_64
#undef GROUPS_32
#undef GROUP
#undef SUMS_256
#undef SUMS_128
#undef SUMS_64
#undef SUMS_32

}  // namespace cpmcu::ptx
