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
#include "kernels/bind_fields.h"
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
  using T = StepTokens;
  bind_params<T>(m, "StepTokens", "The tokens of a step; see csrc/kernels/step/step_tokens.h.",
                 field("num_tokens", &T::num_tokens), field("num_seqs", &T::num_seqs),
                 field("max_seq_tokens", &T::max_seq_tokens), field("max_kv", &T::max_kv),
                 field("positions", &T::positions), field("token_seqs", &T::token_seqs),
                 field("seq_slots", &T::seq_slots), field("seq_token_begin", &T::seq_token_begin),
                 field("slot_lengths", &T::slot_lengths),
                 shaped("page_table", &T::page_table, 1, &T::max_pages),
                 option("ancestor_masks", &T::ancestor_masks),
                 option("first_token", &T::first_token),
                 option("token_parents", &T::token_parents));
  bind_params<Accepted>(
      m, "Accepted", "Accepted tokens of each slot; see csrc/kernels/step/step_ops.h.",
      field("ids", &Accepted::ids), shaped("paths", &Accepted::paths, 1, &Accepted::max_path),
      field("counts", &Accepted::counts));
  using R = ResultSink;
  bind_params<R>(m, "ResultSink", "Ring of step results; see csrc/kernels/step/step_ops.h.",
                 field("results", &R::results), field("ring_size", &R::ring_size),
                 field("max_seqs", &R::max_seqs), field("step_counter", &R::step_counter),
                 field("done", &R::done));
  using S = SlotState;
  bind_params<S>(m, "SlotState", "Per-slot state; see csrc/kernels/step/step_ops.h.",
                 field("lengths", &S::lengths), field("next_tokens", &S::next_tokens),
                 field("counts", &S::counts), field("vocab_size", &S::vocab_size),
                 optional(shaped("history", &S::history, 1, &S::max_len)),
                 option("accepted", &S::accepted), option("num_shared", &S::num_shared));

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

void bind_layer_ops(py::module_& m) {
  using Embedding = EmbeddingParams;
  bind_op(m, "embedding", embedding,
          "csrc/kernels/layer/embedding.h. out_width: the output is the first out_width columns of "
          "`out`.",
          field("out", &Embedding::out), field("table", &Embedding::table),
          field("ids", &Embedding::ids), option("scale", &Embedding::scale),
          width("out_width", &Embedding::out, &Embedding::out_stride));
  using Norm = RmsNormParams;
  bind_op(m, "rms_norm", rms_norm,
          "csrc/kernels/layer/rms_norm.h. out_width: the output is the first out_width columns of "
          "`out`.",
          field("out", &Norm::out), field("x", &Norm::x), field("weight", &Norm::weight),
          option("eps", &Norm::eps), width("out_width", &Norm::out, &Norm::out_stride),
          option("index", &Norm::index), option("weight_offset", &Norm::weight_offset));
  bind_op(m, "silu_mul", silu_mul, "csrc/kernels/layer/silu_mul.h",
          field("out", &SiluMulParams::out), field("x", &SiluMulParams::x),
          option("interleaved", &SiluMulParams::interleaved));
  using Gate = SigmoidGateParams;
  bind_op(m, "sigmoid_gate", sigmoid_gate, "csrc/kernels/layer/sigmoid_gate.h", py::kw_only(),
          field("x", &Gate::x), field("gates", &Gate::gates), field("head_dim", &Gate::head_dim),
          field("first", &Gate::first), field("stride", &Gate::stride),
          option("of_heads", &Gate::of_heads));
  using Gather = GatherRowsParams;
  bind_op(m, "gather_rows", gather_rows,
          "csrc/kernels/layer/gather_rows.h. out_width: the output is the first out_width columns "
          "of `out`.",
          field("out", &Gather::out), field("x", &Gather::x), field("index", &Gather::index),
          option("out_index", &Gather::out_index), option("num_rows", &Gather::num_rows),
          width("out_width", &Gather::out, &Gather::out_stride));
  bind_params<QkvLayout>(m, "QkvLayout", "See csrc/kernels/layer/qkv_layout.h.",
                         field("row", &QkvLayout::row), field("q_head", &QkvLayout::q_head),
                         field("k", &QkvLayout::k), field("v", &QkvLayout::v));
  using Scale = ScaleQueriesParams;
  bind_op(m, "scale_queries", scale_queries, "csrc/kernels/layer/scale_queries.h", py::kw_only(),
          field("qkv", &Scale::qkv), option("layout", &Scale::layout),
          field("num_heads", &Scale::num_heads), field("num_kv_heads", &Scale::num_kv_heads),
          field("head_dim", &Scale::head_dim), field("beta", &Scale::beta),
          field("length", &Scale::length), field("positions", &Scale::positions));
  using Rotary = RotaryKvParams;
  bind_params<Rotary>(
      m, "RotaryKv", "See csrc/kernels/layer/rotary_kv.h.", field("qkv", &Rotary::qkv),
      option("bias", &Rotary::bias), option("q_norm", &Rotary::q_norm),
      option("k_norm", &Rotary::k_norm), option("norm_eps", &Rotary::norm_eps),
      field("inv_freq", &Rotary::inv_freq), option("attention_scaling", &Rotary::attention_scaling),
      field("k_cache", &Rotary::k_cache), field("v_cache", &Rotary::v_cache),
      field("num_heads", &Rotary::num_heads), field("num_kv_heads", &Rotary::num_kv_heads),
      field("head_dim", &Rotary::head_dim), field("tokens", &Rotary::tokens),
      option("rotary_dim", &Rotary::rotary_dim), option("layout", &Rotary::layout),
      option("norm_offset", &Rotary::norm_offset), option("k_scales", &Rotary::k_scales),
      option("v_scales", &Rotary::v_scales));
  m.def(
      "rotary_kv",
      [](const OpsContext& c, const OpsParams<Rotary>& rotary) { rotary_kv(c.ctx, rotary.params); },
      "ctx"_a, "rotary"_a, "csrc/kernels/layer/rotary_kv.h");
}

void bind_gemm_ops(py::module_& m) {
  const auto bind_gemm = [&m](const char* name, void (*op)(const Context&, const GemmParams&)) {
    bind_op(m, name, op,
            "csrc/kernels/gemm/gemm.h. y_width: the output is the first y_width columns of `y`.",
            field("y", &GemmParams::y), field("x", &GemmParams::x), field("w", &GemmParams::w),
            option("alpha", &GemmParams::alpha), option("beta", &GemmParams::beta),
            width("y_width", &GemmParams::y, &GemmParams::y_stride));
  };
  bind_gemm("skinny_gemm", skinny_gemm);
  bind_gemm("large_gemm", large_gemm);
  using Normed = NormedGemmParams;
  bind_op(m, "normed_gemm", normed_gemm, "csrc/kernels/gemm/gemm.h", field("y", &Normed::y),
          field("x", &Normed::x), field("w", &Normed::w),
          field("norm_weight", &Normed::norm_weight), option("norm_eps", &Normed::norm_eps),
          option("norm_offset", &Normed::norm_offset));
  using Gated = GatedGemmParams;
  bind_op(m, "gated_gemm", gated_gemm, "csrc/kernels/gemm/gemm.h", field("out", &Gated::out),
          field("x", &Gated::x), field("w", &Gated::w), field("scratch", &Gated::scratch));
}

void bind_attention_ops(py::module_& m) {
  using A = AttentionParams;
  bind_params<A>(m, "Attention", "See csrc/kernels/attention/attention.h.", field("out", &A::out),
                 field("qkv", &A::qkv), field("k_cache", &A::k_cache),
                 field("v_cache", &A::v_cache), field("scale", &A::scale),
                 field("num_heads", &A::num_heads), field("num_kv_heads", &A::num_kv_heads),
                 field("head_dim", &A::head_dim), field("tokens", &A::tokens),
                 option("scratch", &A::scratch), option("window", &A::window),
                 option("by_position", &A::by_position), option("layout", &A::layout),
                 within(&A::selection, option("selection", &BlockSelection::words),
                        option("dense_len", &BlockSelection::dense_len),
                        option("max_splits", &BlockSelection::max_splits)),
                 option("k_scales", &A::k_scales), option("v_scales", &A::v_scales),
                 option("sinks", &A::sinks), option("rotary", &A::rotary));
  const auto bind_attention = [&m](const char* name, void (*op)(const Context&, const A&)) {
    m.def(
        name, [op](const OpsContext& c, const OpsParams<A>& a) { op(c.ctx, a.params); }, "ctx"_a,
        "attention"_a, "csrc/kernels/attention/attention.h");
  };
  bind_attention("attention_prefill", attention_prefill);
  bind_attention("attention_decode", attention_decode);
  bind_attention("attention_splits", attention_splits);
  m.def("sparse_scratch_floats", &sparse_scratch_floats, "num_tokens"_a, "num_heads"_a,
        "head_dim"_a, "max_splits"_a, "The same for attention with a selection.");
  m.def("attention_scratch_floats", &attention_scratch_floats, "num_tokens"_a, "num_heads"_a,
        "head_dim"_a, "max_kv"_a, "Number of float32 elements of the scratch of attention_decode.");
  m.def("fp8_pair_floats", &fp8_pair_floats, "head_dim"_a, "max_kv"_a,
        "The least scratch of attention_prefill over an fp8 cache.");
  m.def("fp8_prefill_floats", &fp8_prefill_floats, "num_kv_heads"_a, "head_dim"_a, "max_kv"_a,
        "The scratch that a model plans for attention_prefill over an fp8 cache.");
}

// ---- sampling and the state of slots

void bind_step_ops(py::module_& m) {
  using Sample = SampleParams;
  bind_op(m, "sample", sample, "csrc/kernels/sampling/sample.h", py::kw_only(),
          field("logits", &Sample::logits), field("token_slots", &Sample::token_slots),
          field("token_positions", &Sample::token_positions), field("sampling", &Sample::sampling),
          option("counts", &Sample::counts), option("bias", &Sample::bias),
          option("tree_tokens", &Sample::tree_tokens), option("tree_masks", &Sample::tree_masks),
          option("tree_size", &Sample::tree_size), option("mask_rows", &Sample::mask_rows),
          option("masks", &Sample::masks), field("tokens", &Sample::tokens),
          option("logprobs", &Sample::logprobs), option("candidates", &Sample::candidates));
  using Finish = FinishStepParams;
  bind_op(m, "finish_step", finish_step, "csrc/kernels/step/step_ops.h", py::kw_only(),
          field("seq_slots", &Finish::seq_slots),
          field("seq_token_begin", &Finish::seq_token_begin), field("num_seqs", &Finish::num_seqs),
          shaped("ids", &Finish::ids, 0, &Finish::num_tokens),
          field("token_seqs", &Finish::token_seqs), field("sampled_seqs", &Finish::sampled_seqs),
          field("num_sampled", &Finish::num_sampled), field("tokens", &Finish::tokens),
          field("logprobs", &Finish::logprobs), field("sampling", &Finish::sampling),
          field("state", &Finish::state), field("sink", &Finish::sink));
  using Reset = ResetSlotParams;
  bind_op(m, "reset_slot", reset_slot, "csrc/kernels/step/step_ops.h", py::kw_only(),
          field("slot", &Reset::slot), field("state", &Reset::state), field("ids", &Reset::ids),
          field("num_ids", &Reset::num_ids), field("num_prompt", &Reset::num_prompt),
          option("num_cached", &Reset::num_cached));
}

}  // namespace

// ---- fields (bind_fields.h)

void store_arguments(const std::string& name, const std::vector<Field>& fields, void* params,
                     const py::args& args, const py::kwargs& kwargs, Arrays& kept) {
  size_t num_positional = 0, num_used = 0;
  bool is_keyword = false;
  for (const Field& field : fields) {
    if (field.name == nullptr) {
      is_keyword = true;
      continue;
    }
    py::object passed = field.initial;
    if (!is_keyword && num_positional < args.size()) {
      passed = args[num_positional++];
    } else if (kwargs.contains(field.name)) {
      passed = kwargs[field.name];
      ++num_used;
    } else if (field.is_required) {
      throw py::type_error(format_text("{}: {} is missing", name, field.name));
    }
    if (!passed) continue;
    try {
      field.set(static_cast<char*>(params) + field.offset, passed, kept);
    } catch (const py::cast_error&) {
      throw py::type_error(format_text("{}: {} is {}, which is another type than expected", name,
                                       field.name, std::string(py::repr(passed))));
    }
  }
  if (num_positional < args.size() || num_used < kwargs.size()) {
    throw py::type_error(format_text("{}: {} and {} arguments by position and name, expected {}",
                                     name, args.size(), kwargs.size(), signature_of("(", fields)));
  }
}

std::string signature_of(const std::string& name, const std::vector<Field>& fields) {
  std::string text = name;
  for (const Field& field : fields) {
    if (&field != fields.data()) text += ", ";
    text += field.name ? field.name : "*";
    if (field.name && !field.is_required) {
      text += "=" + (field.initial ? std::string(py::repr(field.initial)) : "...");
    }
  }
  return text + ")";
}

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
  bind_block_ops(ops);
  bind_packed_ops(ops);
  bind_moe_ops(ops);
}

}  // namespace cpmcu
