// cuBLASLt, loaded at run time: the engine links no CUDA library but the runtime.
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

#include "kernels/gemm/gemm.h"

namespace cpmcu {

class CublasLt {
 public:
  // Looks in `paths`, then where the loader looks. Null if it is not found (or on the CPU).
  static std::unique_ptr<CublasLt> load(const Context& ctx, const std::vector<std::string>& paths);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  void gemm(const Context& ctx, const GemmParams& params);
  const std::string& path() const;

 private:
  CublasLt();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cpmcu
