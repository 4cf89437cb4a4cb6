// C.ops of sparse attention (kernels/attention/sparse.h).
#include "kernels/attention/sparse.h"
#include "kernels/bind_fields.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {

void bind_sparse_ops(py::module_& m) {
  m.def(
      "compress_keys",
      [](const OpsContext& c, const std::vector<SharedArray>& k_caches,
         const std::vector<SharedArray>& fine, const std::vector<SharedArray>& coarse,
         const OpsParams<StepTokens>& tokens, SharedArray accepted_counts,
         const std::vector<SharedArray>& k_scales) {
        CHECK(fine.size() == k_caches.size() && coarse.size() == k_caches.size() &&
                  (k_scales.empty() || k_scales.size() == k_caches.size()),
              "compress_keys: {} k_caches, {} fine and {} coarse planes and {} k_scales, expected "
              "equally many, or no k_scales",
              k_caches.size(), fine.size(), coarse.size(), k_scales.size());
        CompressKeysParams params{.layers = {},
                                  .accepted_counts = pointer_to<int>(accepted_counts),
                                  .tokens = tokens.params};
        for (size_t i = 0; i < k_caches.size(); ++i) {
          params.layers.push_back(
              {.k_cache = tensor_of(k_caches[i]),
               .k_scales = k_scales.empty() ? Tensor() : tensor_of(k_scales[i]),
               .compressed = {.fine = tensor_of(fine[i]), .coarse = tensor_of(coarse[i])}});
        }
        compress_keys(c.ctx, params);
      },
      "ctx"_a, py::kw_only(), "k_caches"_a, "fine"_a, "coarse"_a, "tokens"_a,
      "accepted_counts"_a = SharedArray(), "k_scales"_a = std::vector<SharedArray>(),
      "csrc/kernels/attention/sparse.h; one array a layer.");
  using Select = SelectBlocksParams;
  bind_op(m, "select_blocks", select_blocks, "csrc/kernels/attention/sparse.h", py::kw_only(),
          field("selection", &Select::selection), field("qkv", &Select::qkv),
          within(&Select::keys, field("fine", &CompressedKeys::fine),
                 field("coarse", &CompressedKeys::coarse)),
          field("scale", &Select::scale), field("num_heads", &Select::num_heads),
          field("num_kv_heads", &Select::num_kv_heads), field("head_dim", &Select::head_dim),
          field("tokens", &Select::tokens),
          within(&Select::rule, field("init_blocks", &SparseRule::init_blocks),
                 field("window_size", &SparseRule::window_size), field("topk", &SparseRule::topk),
                 field("dense_len", &SparseRule::dense_len)),
          option("keys_are_old", &Select::keys_are_old), option("scratch", &Select::scratch),
          option("memory", &Select::memory));
  m.def("select_memory_bytes", &select_memory_bytes, "num_seqs"_a, "num_kv_heads"_a);
  m.def(
      "max_selected_splits",
      [](int init_blocks, int window_size, int topk, int dense_len, int max_kv) {
        return max_selected_splits({init_blocks, window_size, topk, dense_len}, max_kv);
      },
      py::kw_only(), "init_blocks"_a, "window_size"_a, "topk"_a, "dense_len"_a, "max_kv"_a,
      "csrc/kernels/attention/sparse.h");
  m.def("select_scratch_floats", &select_scratch_floats, py::kw_only(), "num_tokens"_a,
        "num_heads"_a, "num_kv_heads"_a, "max_kv"_a, "csrc/kernels/attention/sparse.h");
  m.def("selection_words", &selection_words, "max_kv"_a,
        "Number of uint64 words of a token and KV head in the selection of select_blocks.");
}

}  // namespace cpmcu
