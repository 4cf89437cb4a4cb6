// cuBLASLt, loaded at run time: the engine gemms no CUDA library but the runtime.
//
// One algorithm is chosen per (N, K, dtype), by the library's heuristic for 2048 rows and without
// split-K, and then used for every number of rows: so a row's bits do not depend on the chunk it is
// in. Its workspace is part of the class and allocated once.
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
  // Looks in `paths`, then where the loader looks. Null if it is not found (or on the CPU).
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
