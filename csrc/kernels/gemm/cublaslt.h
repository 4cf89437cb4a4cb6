// cuBLASLt, loaded at run time, so that the engine links no CUDA library but the runtime.
//
// One algorithm is chosen for each (N, K, y stride, dtypes) and used for every M: the first without
// split-K that the heuristic proposes for 2048 rows. So a row's bits do not depend on the chunk it
// is in. The workspace is allocated once.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/context.h"

namespace cpmcu {

class CublasLt : public GemmLibrary {
 public:
  // Searches `paths`, then the loader's directories. Null if not found, or on the CPU.
  static std::unique_ptr<CublasLt> load(const Context& ctx, const std::vector<std::string>& paths);
  ~CublasLt() override;
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  void gemm(const Context& ctx, const Tensor& y, const Tensor& x, const Tensor& w, float alpha,
            float beta, int64_t y_stride) override;

 private:
  CublasLt();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cpmcu
