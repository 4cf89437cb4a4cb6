// C.ops of sparse attention (kernels/attention/sparse.h).
#include "kernels/attention/sparse.h"
#include "kernels/bind_ops.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {

void bind_sparse_ops(py::module_& m) {
  m.def(
      "compress_keys",
      [](const OpsContext& c, const std::vector<SharedArray>& k_caches,
         const std::vector<SharedArray>& fine, const std::vector<SharedArray>& coarse,
         const OpsTokens& tokens, SharedArray accepted_counts) {
        CHECK(fine.size() == k_caches.size() && coarse.size() == k_caches.size(),
              "compress_keys: {} k_caches, {} fine and {} coarse planes, expected equally many",
              k_caches.size(), fine.size(), coarse.size());
        CompressKeysParams params{
            .layers = {}, .accepted_counts = ints(accepted_counts), .tokens = tokens.tokens};
        for (size_t i = 0; i < k_caches.size(); ++i) {
          params.layers.push_back(
              {.k_cache = tensor_of(k_caches[i]),
               .compressed = {.fine = tensor_of(fine[i]), .coarse = tensor_of(coarse[i])}});
        }
        compress_keys(c.ctx, params);
      },
      "ctx"_a, py::kw_only(), "k_caches"_a, "fine"_a, "coarse"_a, "tokens"_a,
      "accepted_counts"_a = SharedArray(), "csrc/kernels/attention/sparse.h; one array a layer.");
  m.def(
      "select_blocks",
      [](const OpsContext& c, SharedArray selection, SharedArray qkv, SharedArray fine,
         SharedArray coarse, float scale, int num_heads, int num_kv_heads, int head_dim,
         const OpsTokens& tokens, int init_blocks, int window_size, int topk, int dense_len,
         bool keys_are_old, SharedArray scratch, SharedArray memory) {
        select_blocks(c.ctx, {.selection = tensor_of(selection),
                              .qkv = tensor_of(qkv),
                              .keys = {.fine = tensor_of(fine), .coarse = tensor_of(coarse)},
                              .scale = scale,
                              .num_heads = num_heads,
                              .num_kv_heads = num_kv_heads,
                              .head_dim = head_dim,
                              .rule = {.init_blocks = init_blocks,
                                       .window_size = window_size,
                                       .topk = topk,
                                       .dense_len = dense_len},
                              .keys_are_old = keys_are_old,
                              .tokens = tokens.tokens,
                              .scratch = tensor_of(scratch),
                              .memory = tensor_of(memory)});
      },
      "ctx"_a, py::kw_only(), "selection"_a, "qkv"_a, "fine"_a, "coarse"_a, "scale"_a,
      "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "tokens"_a, "init_blocks"_a, "window_size"_a,
      "topk"_a, "dense_len"_a, "keys_are_old"_a = false, "scratch"_a = SharedArray(),
      "memory"_a = SharedArray(), "csrc/kernels/attention/sparse.h");
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
