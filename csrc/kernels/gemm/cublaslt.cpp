#include "kernels/gemm/cublaslt.h"

#ifdef CPMCU_WITH_CUDA
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>
#endif

namespace cpmcu {

#ifdef CPMCU_WITH_CUDA

namespace {

// Declarations of cublasLt.h, which need not be installed at build time.
using Handle = void*;
using Opaque = void*;
using Status = int;
struct Algorithm {
  uint64_t data[8];
};
struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
constexpr int kCompute32F = 68;    // CUBLAS_COMPUTE_32F
constexpr int kOpTranspose = 1;    // CUBLAS_OP_T
constexpr int kDescTransA = 3;     // CUBLASLT_MATMUL_DESC_TRANSA
constexpr int kPrefWorkspace = 1;  // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
constexpr int kPrefReduction = 3;  // CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK
constexpr int kConfigSplitK = 2;   // CUBLASLT_ALGO_CONFIG_SPLITK_NUM
constexpr size_t kWorkspaceBytes = 32 << 20;
constexpr int kReferenceRows = 2048;

struct Api {
  Status (*create)(Handle*);
  Status (*destroy)(Handle);
  Status (*desc_create)(Opaque*, int compute, int scale_type);
  Status (*desc_destroy)(Opaque);
  Status (*desc_set)(Opaque, int attribute, const void*, size_t);
  Status (*layout_create)(Opaque*, int type, uint64_t rows, uint64_t cols, int64_t ld);
  Status (*layout_destroy)(Opaque);
  Status (*pref_create)(Opaque*);
  Status (*pref_destroy)(Opaque);
  Status (*pref_set)(Opaque, int attribute, const void*, size_t);
  Status (*heuristic)(Handle, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, int, HeuristicResult*,
                      int*);
  Status (*config_get)(const Algorithm*, int attribute, void*, size_t, size_t*);
  Status (*matmul)(Handle, Opaque, const void*, const void*, Opaque, const void*, Opaque,
                   const void*, const void*, Opaque, void*, Opaque, const Algorithm*, void*, size_t,
                   cudaStream_t);
};

template <typename F>
bool resolve(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

bool resolve_all(void* library, Api& api) {
  return resolve(library, "cublasLtCreate", api.create) &&
         resolve(library, "cublasLtDestroy", api.destroy) &&
         resolve(library, "cublasLtMatmulDescCreate", api.desc_create) &&
         resolve(library, "cublasLtMatmulDescDestroy", api.desc_destroy) &&
         resolve(library, "cublasLtMatmulDescSetAttribute", api.desc_set) &&
         resolve(library, "cublasLtMatrixLayoutCreate", api.layout_create) &&
         resolve(library, "cublasLtMatrixLayoutDestroy", api.layout_destroy) &&
         resolve(library, "cublasLtMatmulPreferenceCreate", api.pref_create) &&
         resolve(library, "cublasLtMatmulPreferenceDestroy", api.pref_destroy) &&
         resolve(library, "cublasLtMatmulPreferenceSetAttribute", api.pref_set) &&
         resolve(library, "cublasLtMatmulAlgoGetHeuristic", api.heuristic) &&
         resolve(library, "cublasLtMatmulAlgoConfigGetAttribute", api.config_get) &&
         resolve(library, "cublasLtMatmul", api.matmul);
}

void check(Status status, const char* what) {
  CHECK_STATE(status == 0, "cuBLASLt's {} failed with status {}", what, status);
}

int type_of(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF32:
      return CUDA_R_32F;
    default:
      break;
  }
  throw Error(ErrorKind::kRuntime, format_text("cuBLASLt is not used with {}", name_of(dtype)));
}

// In column-major terms y^T = W x^T: A = W [N, K] as [K, N]^T, B = x^T, C = y^T.
class Problem {
 public:
  Problem(const Api& api, DType dtype, DType out, int64_t m, int64_t n, int64_t k, int64_t y_stride)
      : api_(api) {
    check(api.desc_create(&desc, kCompute32F, CUDA_R_32F), "MatmulDescCreate");
    const int op = kOpTranspose;
    check(api.desc_set(desc, kDescTransA, &op, sizeof(op)), "MatmulDescSetAttribute");
    const auto uk = static_cast<uint64_t>(k), un = static_cast<uint64_t>(n);
    const auto um = static_cast<uint64_t>(m);
    check(api.layout_create(&a, type_of(dtype), uk, un, k), "MatrixLayoutCreate");
    check(api.layout_create(&b, type_of(dtype), uk, um, k), "MatrixLayoutCreate");
    check(api.layout_create(&c, type_of(out), un, um, y_stride), "MatrixLayoutCreate");
  }
  ~Problem() {
    if (c != nullptr) api_.layout_destroy(c);
    if (b != nullptr) api_.layout_destroy(b);
    if (a != nullptr) api_.layout_destroy(a);
    if (desc != nullptr) api_.desc_destroy(desc);
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  Opaque desc = nullptr, a = nullptr, b = nullptr, c = nullptr;

 private:
  const Api& api_;
};

}  // namespace

struct CublasLt::Impl {
  // N, K, stride of y, dtype, dtype of y
  using Key = std::tuple<int64_t, int64_t, int64_t, DType, DType>;

  Api api{};
  void* library = nullptr;
  Handle handle = nullptr;
  Device device;
  void* workspace = nullptr;
  std::map<Key, Algorithm> algorithms;

  ~Impl() {
    if (handle != nullptr) api.destroy(handle);
    release(device, workspace);
    // NOTE: the library stays loaded: unloading a CUDA library while a context exists is not safe.
  }

  // The first algorithm without split-K that the heuristic proposes for many rows.
  Algorithm choose(const Problem& problem) const {
    Opaque preference = nullptr;
    check(api.pref_create(&preference), "MatmulPreferenceCreate");
    const size_t bytes = kWorkspaceBytes;
    const uint32_t no_reduction = 0;
    api.pref_set(preference, kPrefWorkspace, &bytes, sizeof(bytes));
    api.pref_set(preference, kPrefReduction, &no_reduction, sizeof(no_reduction));
    HeuristicResult results[16];
    int count = 0;
    const Status status = api.heuristic(handle, problem.desc, problem.a, problem.b, problem.c,
                                        problem.c, preference, 16, results, &count);
    api.pref_destroy(preference);
    check(status, "MatmulAlgoGetHeuristic");
    for (int i = 0; i < count; ++i) {
      int split = 1;
      size_t written = 0;
      api.config_get(&results[i].algorithm, kConfigSplitK, &split, sizeof(split), &written);
      if (results[i].state == 0 && split <= 1) return results[i].algorithm;
    }
    throw Error(ErrorKind::kRuntime, "cuBLASLt proposes no algorithm without split-K");
  }
};

CublasLt::CublasLt() : impl_(std::make_unique<Impl>()) {}
CublasLt::~CublasLt() = default;

std::unique_ptr<CublasLt> CublasLt::load(const Context& ctx,
                                         const std::vector<std::string>& paths) {
  if (!ctx.device.is_cuda()) return nullptr;
  std::vector<std::string> names;
  for (const char* soname : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    for (const std::string& path : paths) names.push_back(path + "/" + soname);
    names.emplace_back(soname);
  }
  for (const std::string& name : names) {
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    std::unique_ptr<CublasLt> cublas(new CublasLt);
    Impl& impl = *cublas->impl_;
    impl.device = ctx.device;
    if (!resolve_all(library, impl.api) || impl.api.create(&impl.handle) != 0) continue;
    impl.workspace = allocate(ctx.device, kWorkspaceBytes);
    return cublas;
  }
  return nullptr;
}

void CublasLt::gemm(const Context& ctx, const Tensor& y, const Tensor& x, const Tensor& w,
                    float alpha, float beta, int64_t y_stride) {
  const int64_t m = x.size(0), k = x.size(1), n = w.size(0);
  const Impl::Key key{n, k, y_stride, x.dtype(), y.dtype()};
  auto it = impl_->algorithms.find(key);
  if (it == impl_->algorithms.end()) {
    const Problem reference(impl_->api, x.dtype(), y.dtype(), kReferenceRows, n, k, y_stride);
    it = impl_->algorithms.emplace(key, impl_->choose(reference)).first;
  }
  const Problem problem(impl_->api, x.dtype(), y.dtype(), m, n, k, y_stride);
  check(impl_->api.matmul(impl_->handle, problem.desc, &alpha, w.data(), problem.a, x.data(),
                          problem.b, &beta, y.data(), problem.c, y.data(), problem.c, &it->second,
                          impl_->workspace, kWorkspaceBytes, static_cast<cudaStream_t>(ctx.stream)),
        "Matmul");
}

#else

struct CublasLt::Impl {};
CublasLt::CublasLt() : impl_(std::make_unique<Impl>()) {}
CublasLt::~CublasLt() = default;
std::unique_ptr<CublasLt> CublasLt::load(const Context&, const std::vector<std::string>&) {
  return nullptr;
}
void CublasLt::gemm(const Context&, const Tensor&, const Tensor&, const Tensor&, float, float,
                    int64_t) {}

#endif

}  // namespace cpmcu
