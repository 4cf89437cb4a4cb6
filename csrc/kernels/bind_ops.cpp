// C.ops: every op as a Python function, for tests and benchmarks. The package does not use it.
//
// Memory is an Array. A new Array is filled with 0xFF bytes (NaN), so a value that a kernel failed
// to write is visible. bfloat16 is passed as uint16. C structs are passed as uint8, with their
// bytes as the last dimension; the matching numpy types are attributes (slot_sampling_dtype, ...).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bindings.h"
#include "kernels/attention/attention.h"
#include "kernels/bind_ops.h"
#include "kernels/gemm/gemm.h"
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "kernels/layer/rms_norm.h"
#include "kernels/layer/rotary_kv.h"
#include "kernels/layer/scale_queries.h"
#include "kernels/layer/sigmoid_gate.h"
#include "kernels/layer/silu_mul.h"
#include "kernels/sampling/sample.h"
#include "kernels/step/step_ops.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {
namespace {

// ---- context, memory, graphs

#ifdef CPMCU_WITH_CUDA
// The ops that a callable runs, captured as a CUDA graph.
class Graph {
 public:
  Graph(SharedContext context, const py::function& body) : context_(std::move(context)) {
    CHECK(context_->ctx.device.is_cuda(), "graphs need a CUDA device");
    const auto stream = static_cast<cudaStream_t>(context_->ctx.stream);
    cudaGraph_t graph = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      body();
    } catch (...) {
      if (cudaStreamEndCapture(stream, &graph) == cudaSuccess) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    CHECK_CUDA(status);
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  float replay(int times) {
    const auto stream = static_cast<cudaStream_t>(context_->ctx.stream);
    cudaEvent_t begin = nullptr, end = nullptr;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    CHECK_CUDA(cudaEventRecord(begin, stream));
    for (int i = 0; i < times; ++i) CHECK_CUDA(cudaGraphLaunch(executable_, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return milliseconds;
  }

 private:
  SharedContext context_;
  cudaGraphExec_t executable_ = nullptr;
};
#endif

void bind_memory(py::module_& m) {
  py::class_<OpsContext, SharedContext> context(m, "Context", "A device and its own stream.");
  context
      .def(py::init<const std::string&, int, const std::vector<std::string>&>(), "device"_a = "cpu",
           "index"_a = 0, "cublas_paths"_a = std::vector<std::string>{})
      .def("synchronize", &OpsContext::wait, "Waits for all work on the stream.")
      .def_property_readonly(
          "has_cublas", [](const OpsContext& c) { return c.ctx.cublas != nullptr; },
          "True if cuBLASLt was loaded.");
  py::class_<Array, SharedArray>(m, "Array",
                                 "Device memory with a shape, filled with 0xFF bytes (NaN).")
      .def(py::init<SharedContext, const std::vector<int64_t>&, const std::string&, bool>(),
           "ctx"_a, "shape"_a, "dtype"_a, "pinned"_a = false)
      .def("copy_from", &Array::copy_from, "source"_a,
           "Copies a numpy array of the same dtype and size into the array.")
      .def("numpy", &Array::numpy, "Waits for the stream and returns the content as a numpy array.")
      .def_property_readonly("shape", &Array::shape)
      .def_property_readonly("dtype", &Array::dtype);
#ifdef CPMCU_WITH_CUDA
  py::class_<Graph>(m, "Graph", "A captured CUDA graph.")
      .def("replay", &Graph::replay, "times"_a = 1,
           "Launches the graph `times` times, waits, and returns the total in milliseconds.");
  context.def(
      "graph",
      [](SharedContext c, const py::function& body) { return std::make_unique<Graph>(c, body); },
      "body"_a, "Captures the ops that body() runs.");
#endif
}

// ---- parameters shared by ops

void bind_shared_params(py::module_& m) {
  py::class_<OpsTokens>(m, "StepTokens",
                        "The tokens of a step; see csrc/kernels/step/step_tokens.h.")
      .def(
          py::init([](int num_tokens, int num_seqs, int max_seq_tokens, int max_kv,
                      SharedArray positions, SharedArray token_seqs, SharedArray seq_slots,
                      SharedArray seq_token_begin, SharedArray slot_lengths, SharedArray page_table,
                      SharedArray ancestor_masks, int first_token, SharedArray token_parents) {
            CHECK(page_table->shape().size() == 2, "page_table must be [slots, max_pages]");
            return OpsTokens{{.num_tokens = num_tokens,
                              .num_seqs = num_seqs,
                              .max_seq_tokens = max_seq_tokens,
                              .first_token = first_token,
                              .max_kv = max_kv,
                              .positions = ints(positions),
                              .token_seqs = ints(token_seqs),
                              .seq_slots = ints(seq_slots),
                              .seq_token_begin = ints(seq_token_begin),
                              .slot_lengths = ints(slot_lengths),
                              .ancestor_masks = words(ancestor_masks),
                              .token_parents = ints(token_parents),
                              .page_table = ints(page_table),
                              .max_pages = static_cast<int>(page_table->shape()[1])},
                             {positions, token_seqs, seq_slots, seq_token_begin, slot_lengths,
                              page_table, ancestor_masks, token_parents}};
          }),
          py::kw_only(), "num_tokens"_a, "num_seqs"_a, "max_seq_tokens"_a, "max_kv"_a,
          "positions"_a, "token_seqs"_a, "seq_slots"_a, "seq_token_begin"_a, "slot_lengths"_a,
          "page_table"_a, "ancestor_masks"_a = SharedArray(), "first_token"_a = 0,
          "token_parents"_a = SharedArray());

  py::class_<OpsAccepted>(m, "Accepted",
                          "Accepted tokens of each slot; see csrc/kernels/step/step_ops.h.")
      .def(py::init([](SharedArray ids, SharedArray paths, SharedArray counts) {
             return OpsAccepted{{.max_path = static_cast<int>(tensor_of(paths).size(1)),
                                 .ids = ints(ids),
                                 .paths = ints(paths),
                                 .counts = ints(counts)},
                                {ids, paths, counts}};
           }),
           py::kw_only(), "ids"_a, "paths"_a, "counts"_a);
  py::class_<OpsSink>(m, "ResultSink", "Ring of step results; see csrc/kernels/step/step_ops.h.")
      .def(py::init([](SharedArray results, int ring_size, int max_seqs, SharedArray step_counter,
                       SharedArray done) {
             return OpsSink{{.results = structs<SlotResult>(results),
                             .ring_size = ring_size,
                             .max_seqs = max_seqs,
                             .step_counter = words(step_counter),
                             .done = words(done)},
                            {results, step_counter, done}};
           }),
           py::kw_only(), "results"_a, "ring_size"_a, "max_seqs"_a, "step_counter"_a, "done"_a);
  py::class_<OpsState>(m, "SlotState", "Per-slot state; see csrc/kernels/step/step_ops.h.")
      .def(py::init([](SharedArray lengths, SharedArray next_tokens, SharedArray counts,
                       int vocab_size, SharedArray history, const OpsAccepted& accepted,
                       SharedArray num_shared) {
             CHECK(!history || history->shape().size() == 2, "history must be [slots, max_len]");
             return OpsState{{.lengths = ints(lengths),
                              .next_tokens = ints(next_tokens),
                              .num_shared = ints(num_shared),
                              .counts = ints(counts),
                              .history = ints(history),
                              .max_len = history ? static_cast<int>(history->shape()[1]) : 0,
                              .vocab_size = vocab_size,
                              .accepted = accepted.params},
                             {lengths, next_tokens, counts, history, num_shared},
                             accepted.arrays};
           }),
           py::kw_only(), "lengths"_a, "next_tokens"_a, "counts"_a, "vocab_size"_a,
           "history"_a = SharedArray(), "accepted"_a = OpsAccepted(),
           "num_shared"_a = SharedArray());

  PYBIND11_NUMPY_DTYPE(SlotSampling, temperature, top_p, min_p, top_k, seed, stream,
                       repetition_penalty, presence_penalty, frequency_penalty, use_penalties,
                       use_bias, num_logprobs, names_logprobs, logprob_ids);
  PYBIND11_NUMPY_DTYPE(TokenLogprobs, logprob, top_ids, top_logprobs);
  PYBIND11_NUMPY_DTYPE(TokenCandidates, num, ids, logprobs);
  PYBIND11_NUMPY_DTYPE(InnerCounts, steps, tokens);
  PYBIND11_NUMPY_DTYPE(SlotResult, slot, num_tokens, finished, inner, tokens, logprobs);
  m.attr("slot_sampling_dtype") = py::dtype::of<SlotSampling>();
  m.attr("token_logprobs_dtype") = py::dtype::of<TokenLogprobs>();
  m.attr("token_candidates_dtype") = py::dtype::of<TokenCandidates>();
  m.attr("inner_counts_dtype") = py::dtype::of<InnerCounts>();
  m.attr("slot_result_dtype") = py::dtype::of<SlotResult>();
  m.attr("PROMPT_BIT") = kPromptBit;
  m.attr("NO_TOKEN") = kNoToken;
}

// ---- layers

// The first `width` columns of a matrix, and its row stride. If width is 0: the matrix and 0.
std::pair<Tensor, int64_t> part_of(const SharedArray& array, int64_t width) {
  const Tensor whole = tensor_of(array);
  if (width == 0) return {whole, 0};
  return {Tensor(whole.data(), whole.dtype(), {whole.size(0), width}), whole.size(1)};
}

void bind_layer_ops(py::module_& m) {
  m.def(
      "embedding",
      [](const OpsContext& c, SharedArray out, SharedArray table, SharedArray ids, float scale,
         int64_t out_width) {
        const auto [tensor, stride] = part_of(out, out_width);
        embedding(c.ctx, {tensor, tensor_of(table), ints(ids), scale, stride});
      },
      "ctx"_a, "out"_a, "table"_a, "ids"_a, "scale"_a = 1.f, "out_width"_a = 0,
      "csrc/kernels/layer/embedding.h. out_width: the output is the first out_width columns of "
      "`out`.");
  m.def(
      "rms_norm",
      [](const OpsContext& c, SharedArray out, SharedArray x, SharedArray weight, float eps,
         int64_t out_width, SharedArray index, float weight_offset) {
        const auto [tensor, stride] = part_of(out, out_width);
        rms_norm(c.ctx, {tensor, tensor_of(x), tensor_of(weight), eps, stride, ints(index),
                         weight_offset});
      },
      "ctx"_a, "out"_a, "x"_a, "weight"_a, "eps"_a = 1e-6f, "out_width"_a = 0,
      "index"_a = SharedArray(), "weight_offset"_a = 0.f,
      "csrc/kernels/layer/rms_norm.h. out_width: the output is the first out_width columns of "
      "`out`.");
  m.def(
      "silu_mul",
      [](const OpsContext& c, SharedArray out, SharedArray x, bool interleaved) {
        silu_mul(c.ctx, {tensor_of(out), tensor_of(x), interleaved});
      },
      "ctx"_a, "out"_a, "x"_a, "interleaved"_a = false, "csrc/kernels/layer/silu_mul.h");
  m.def(
      "sigmoid_gate",
      [](const OpsContext& c, SharedArray x, SharedArray gates, int head_dim, int first, int stride,
         bool of_heads) {
        sigmoid_gate(c.ctx, {tensor_of(x), tensor_of(gates), head_dim, first, stride, of_heads});
      },
      "ctx"_a, py::kw_only(), "x"_a, "gates"_a, "head_dim"_a, "first"_a, "stride"_a,
      "of_heads"_a = false, "csrc/kernels/layer/sigmoid_gate.h");
  m.def(
      "gather_rows",
      [](const OpsContext& c, SharedArray out, SharedArray x, SharedArray index,
         SharedArray out_index, int num_rows, int64_t out_width) {
        const auto [tensor, stride] = part_of(out, out_width);
        gather_rows(c.ctx, {tensor, tensor_of(x), ints(index), ints(out_index), num_rows, stride});
      },
      "ctx"_a, "out"_a, "x"_a, "index"_a, "out_index"_a = SharedArray(), "num_rows"_a = 0,
      "out_width"_a = 0,
      "csrc/kernels/layer/gather_rows.h. out_width: the output is the first out_width columns of "
      "`out`.");
  py::class_<QkvLayout>(m, "QkvLayout", "See csrc/kernels/layer/qkv_layout.h.")
      .def(py::init([](int row, int q_head, int k, int v) { return QkvLayout{row, q_head, k, v}; }),
           py::kw_only(), "row"_a, "q_head"_a, "k"_a, "v"_a);
  m.def(
      "scale_queries",
      [](const OpsContext& c, SharedArray qkv, const QkvLayout& layout, int num_heads,
         int num_kv_heads, int head_dim, float beta, int length, SharedArray positions) {
        scale_queries(c.ctx, {tensor_of(qkv), layout, num_heads, num_kv_heads, head_dim, beta,
                              length, ints(positions)});
      },
      "ctx"_a, py::kw_only(), "qkv"_a, "layout"_a = QkvLayout(), "num_heads"_a, "num_kv_heads"_a,
      "head_dim"_a, "beta"_a, "length"_a, "positions"_a, "csrc/kernels/layer/scale_queries.h");
  py::class_<OpsRotary>(m, "RotaryKv", "See csrc/kernels/layer/rotary_kv.h.")
      .def(py::init([](SharedArray qkv, SharedArray bias, SharedArray q_norm, SharedArray k_norm,
                       float norm_eps, SharedArray inv_freq, float attention_scaling,
                       SharedArray k_cache, SharedArray v_cache, int num_heads, int num_kv_heads,
                       int head_dim, const OpsTokens& tokens, int rotary_dim,
                       const QkvLayout& layout, float norm_offset, SharedArray k_scales,
                       SharedArray v_scales) {
             OpsRotary made{{.qkv = tensor_of(qkv),
                             .layout = layout,
                             .bias = tensor_of(bias),
                             .q_norm = tensor_of(q_norm),
                             .k_norm = tensor_of(k_norm),
                             .norm_eps = norm_eps,
                             .norm_offset = norm_offset,
                             .inv_freq = floats(inv_freq),
                             .rotary_dim = rotary_dim,
                             .attention_scaling = attention_scaling,
                             .k_cache = tensor_of(k_cache),
                             .v_cache = tensor_of(v_cache),
                             .k_scales = tensor_of(k_scales),
                             .v_scales = tensor_of(v_scales),
                             .num_heads = num_heads,
                             .num_kv_heads = num_kv_heads,
                             .head_dim = head_dim,
                             .tokens = tokens.tokens},
                            tokens.arrays};
             made.arrays.insert(made.arrays.end(), {qkv, bias, q_norm, k_norm, inv_freq, k_cache,
                                                    v_cache, k_scales, v_scales});
             return made;
           }),
           py::kw_only(), "qkv"_a, "bias"_a = SharedArray(), "q_norm"_a = SharedArray(),
           "k_norm"_a = SharedArray(), "norm_eps"_a = 1e-6f, "inv_freq"_a,
           "attention_scaling"_a = 1.f, "k_cache"_a, "v_cache"_a, "num_heads"_a, "num_kv_heads"_a,
           "head_dim"_a, "tokens"_a, "rotary_dim"_a = 0, "layout"_a = QkvLayout(),
           "norm_offset"_a = 0.f, "k_scales"_a = SharedArray(), "v_scales"_a = SharedArray());
  m.def(
      "rotary_kv",
      [](const OpsContext& c, const OpsRotary& rotary) { rotary_kv(c.ctx, rotary.params); },
      "ctx"_a, "rotary"_a, "csrc/kernels/layer/rotary_kv.h");
}

void bind_gemm_ops(py::module_& m) {
  const auto bind_gemm = [&m](const char* name, void (*op)(const Context&, const GemmParams&)) {
    m.def(
        name,
        [op](const OpsContext& c, SharedArray y, SharedArray x, SharedArray w, float alpha,
             float beta, int64_t y_width) {
          const auto [tensor, stride] = part_of(y, y_width);
          op(c.ctx, {tensor, tensor_of(x), tensor_of(w), alpha, beta, stride});
        },
        "ctx"_a, "y"_a, "x"_a, "w"_a, "alpha"_a = 1.f, "beta"_a = 0.f, "y_width"_a = 0,
        "csrc/kernels/gemm/gemm.h. y_width: the output is the first y_width columns of `y`.");
  };
  bind_gemm("skinny_gemm", skinny_gemm);
  bind_gemm("large_gemm", large_gemm);
  m.def(
      "normed_gemm",
      [](const OpsContext& c, SharedArray y, SharedArray x, SharedArray w, SharedArray norm_weight,
         float norm_eps, float norm_offset) {
        normed_gemm(c.ctx, {tensor_of(y), tensor_of(x), tensor_of(w), tensor_of(norm_weight),
                            norm_eps, norm_offset});
      },
      "ctx"_a, "y"_a, "x"_a, "w"_a, "norm_weight"_a, "norm_eps"_a = 1e-6f, "norm_offset"_a = 0.f,
      "csrc/kernels/gemm/gemm.h");
  m.def(
      "gated_gemm",
      [](const OpsContext& c, SharedArray out, SharedArray x, SharedArray w, SharedArray scratch) {
        gated_gemm(c.ctx, {tensor_of(out), tensor_of(x), tensor_of(w), tensor_of(scratch)});
      },
      "ctx"_a, "out"_a, "x"_a, "w"_a, "scratch"_a, "csrc/kernels/gemm/gemm.h");
}

void bind_attention_ops(py::module_& m) {
  py::class_<OpsAttention>(m, "Attention", "See csrc/kernels/attention/attention.h.")
      .def(
          py::init([](SharedArray out, SharedArray qkv, SharedArray k_cache, SharedArray v_cache,
                      float scale, int num_heads, int num_kv_heads, int head_dim,
                      const OpsTokens& tokens, SharedArray scratch, int window, bool by_position,
                      const QkvLayout& layout, SharedArray selection, int dense_len, int max_splits,
                      SharedArray k_scales, SharedArray v_scales, SharedArray sinks) {
            OpsAttention made{{.out = tensor_of(out),
                               .qkv = tensor_of(qkv),
                               .layout = layout,
                               .k_cache = tensor_of(k_cache),
                               .v_cache = tensor_of(v_cache),
                               .k_scales = tensor_of(k_scales),
                               .v_scales = tensor_of(v_scales),
                               .scale = scale,
                               .num_heads = num_heads,
                               .num_kv_heads = num_kv_heads,
                               .head_dim = head_dim,
                               .window = window,
                               .by_position = by_position,
                               .selection = {.words = tensor_of(selection),
                                             .dense_len = dense_len,
                                             .max_splits = max_splits},
                               .sinks = tensor_of(sinks),
                               .tokens = tokens.tokens,
                               .scratch = tensor_of(scratch)},
                              tokens.arrays};
            made.arrays.insert(made.arrays.end(), {out, qkv, k_cache, v_cache, k_scales, v_scales,
                                                   scratch, selection, sinks});
            return made;
          }),
          py::kw_only(), "out"_a, "qkv"_a, "k_cache"_a, "v_cache"_a, "scale"_a, "num_heads"_a,
          "num_kv_heads"_a, "head_dim"_a, "tokens"_a, "scratch"_a = SharedArray(), "window"_a = 0,
          "by_position"_a = false, "layout"_a = QkvLayout(), "selection"_a = SharedArray(),
          "dense_len"_a = 0, "max_splits"_a = 0, "k_scales"_a = SharedArray(),
          "v_scales"_a = SharedArray(), "sinks"_a = SharedArray());
  const auto bind_attention = [&m](const char* name,
                                   void (*op)(const Context&, const AttentionParams&)) {
    m.def(
        name, [op](const OpsContext& c, const OpsAttention& a) { op(c.ctx, a.params); }, "ctx"_a,
        "attention"_a, "csrc/kernels/attention/attention.h");
  };
  bind_attention("attention_prefill", attention_prefill);
  bind_attention("attention_decode", attention_decode);
  bind_attention("attention_splits", attention_splits);
  m.def("sparse_scratch_floats", &sparse_scratch_floats, "num_tokens"_a, "num_heads"_a,
        "head_dim"_a, "max_splits"_a, "The same for attention with a selection.");
  m.def("attention_scratch_floats", &attention_scratch_floats, "num_tokens"_a, "num_heads"_a,
        "head_dim"_a, "max_kv"_a, "Number of float32 elements of the scratch of attention_decode.");
}

// ---- sampling and the state of slots

void bind_step_ops(py::module_& m) {
  m.def(
      "sample",
      [](const OpsContext& c, SharedArray logits, SharedArray token_slots,
         SharedArray token_positions, SharedArray sampling, SharedArray counts, SharedArray bias,
         SharedArray tree_tokens, SharedArray tree_masks, int tree_size, SharedArray mask_rows,
         SharedArray masks, SharedArray tokens, SharedArray logprobs, SharedArray candidates) {
        sample(c.ctx, {.logits = tensor_of(logits),
                       .token_slots = ints(token_slots),
                       .token_positions = ints(token_positions),
                       .sampling = structs<SlotSampling>(sampling),
                       .counts = ints(counts),
                       .bias = floats(bias),
                       .tree_tokens = ints(tree_tokens),
                       .tree_masks = words(tree_masks),
                       .tree_size = tree_size,
                       .mask_rows = ints(mask_rows),
                       .masks = structs<uint32_t>(masks),
                       .tokens = ints(tokens),
                       .logprobs = structs<TokenLogprobs>(logprobs),
                       .candidates = structs<TokenCandidates>(candidates)});
      },
      "ctx"_a, py::kw_only(), "logits"_a, "token_slots"_a, "token_positions"_a, "sampling"_a,
      "counts"_a = SharedArray(), "bias"_a = SharedArray(), "tree_tokens"_a = SharedArray(),
      "tree_masks"_a = SharedArray(), "tree_size"_a = 0, "mask_rows"_a = SharedArray(),
      "masks"_a = SharedArray(), "tokens"_a, "logprobs"_a = SharedArray(),
      "candidates"_a = SharedArray(), "csrc/kernels/sampling/sample.h");
  m.def(
      "finish_step",
      [](const OpsContext& c, SharedArray seq_slots, SharedArray seq_token_begin, int num_seqs,
         SharedArray ids, SharedArray token_seqs, SharedArray sampled_seqs, int num_sampled,
         SharedArray tokens, SharedArray logprobs, SharedArray sampling, const OpsState& state,
         const OpsSink& sink) {
        finish_step(c.ctx, {.seq_slots = ints(seq_slots),
                            .seq_token_begin = ints(seq_token_begin),
                            .num_seqs = num_seqs,
                            .num_tokens = static_cast<int>(tensor_of(ids).size(0)),
                            .ids = ints(ids),
                            .token_seqs = ints(token_seqs),
                            .sampled_seqs = ints(sampled_seqs),
                            .num_sampled = num_sampled,
                            .tokens = ints(tokens),
                            .logprobs = structs<TokenLogprobs>(logprobs),
                            .sampling = structs<SlotSampling>(sampling),
                            .state = state.state,
                            .sink = sink.params});
      },
      "ctx"_a, py::kw_only(), "seq_slots"_a, "seq_token_begin"_a, "num_seqs"_a, "ids"_a,
      "token_seqs"_a, "sampled_seqs"_a, "num_sampled"_a, "tokens"_a, "logprobs"_a, "sampling"_a,
      "state"_a, "sink"_a, "csrc/kernels/step/step_ops.h");
  m.def(
      "reset_slot",
      [](const OpsContext& c, int slot, const OpsState& state, SharedArray ids, int num_ids,
         int num_prompt, int num_cached) {
        reset_slot(c.ctx, {slot, state.state, ints(ids), num_ids, num_prompt, num_cached});
      },
      "ctx"_a, py::kw_only(), "slot"_a, "state"_a, "ids"_a, "num_ids"_a, "num_prompt"_a,
      "num_cached"_a = 0, "csrc/kernels/step/step_ops.h");
}

}  // namespace

void bind_ops(py::module_& m) {
  py::module_ ops = m.def_submodule("ops", "Every op by itself, for tests and benchmarks.");
  bind_memory(ops);
  bind_shared_params(ops);
  bind_layer_ops(ops);
  bind_gemm_ops(ops);
  bind_family_ops(ops);
  bind_attention_ops(ops);
  bind_delta_net_ops(ops);
  bind_sparse_ops(ops);
  bind_step_ops(ops);
  bind_tree_ops(ops);
  bind_packed_ops(ops);
  bind_moe_ops(ops);
}

}  // namespace cpmcu
