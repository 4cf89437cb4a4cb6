// Python bindings of plain data: ModelSpec, RuntimeConfig, SamplingConfig, DrafterSpec.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "core/model_limits.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace cpmcu {
namespace {

// Sets attributes from keyword arguments; an unknown name is an error.
template <typename T>
std::unique_ptr<T> from_keywords(const py::KWArgs<py::object>& fields) {
  auto value = std::make_unique<T>();
  py::object object = py::cast(value.get(), py::return_value_policy::reference);
  for (const auto& [name, field] : fields) {
    if (!py::hasattr(object, name)) {
      throw py::type_error(format_text(
          "{} has no field \"{}\": Python files and extension are not of "
          "one version; build it again (make build)",
          std::string(py::str(py::type::of(object).attr("__name__"))), std::string(py::str(name))));
    }
    py::setattr(object, name, field);
  }
  return value;
}

using ParamValues = std::map<std::string, ParamValue>;
using Layers = std::vector<std::vector<std::pair<std::string, ParamValues>>>;

Layers layers_of(const ModelSpec& spec) {
  Layers layers;
  for (const LayerSpec& layer : spec.layers) {
    for (auto& blocks = layers.emplace_back(); const BlockSpec& block : layer) {
      blocks.emplace_back(block.kind, block.params.values());
    }
  }
  return layers;
}

void set_layers(ModelSpec& spec, const Layers& layers) {
  spec.layers.clear();
  for (const auto& layer : layers) {
    for (auto& blocks = spec.layers.emplace_back(); const auto& [kind, params] : layer) {
      blocks.push_back({.kind = kind, .params = Params(params)});
    }
  }
}

ParamValues values_of(const LinearOptions& options) {
  return {{"layout", options.layout},
          {"format", options.format},
          {"group_size", int64_t{options.group_size}},
          {"zero_points", options.zero_points},
          {"scale_dtype", std::string(name_of(options.scale_dtype))},
          {"stacked", options.stacked}};
}

LinearOptions linear_options_of(const ParamValues& values) {
  const Params from(values);
  from.check_known("linear_options",
                   {"layout", "format", "group_size", "zero_points", "scale_dtype", "stacked"});
  return {.layout = from.text("layout", ""),
          .format = from.text("format", ""),
          .group_size = from.integer("group_size", 0),
          .zero_points = from.flag("zero_points", false),
          .scale_dtype = parse_dtype(from.text("scale_dtype", "float16")),
          .stacked = from.flag("stacked", false)};
}

std::map<std::string, std::tuple<int, int, int>> model_limits() {
  std::map<std::string, std::tuple<int, int, int>> limits;
  for (const FieldLimit& limit : kModelLimits) {
    limits[limit.name] = {limit.least, limit.most, limit.multiple};
  }
  return limits;
}

void bind_model_spec(py::module_& m) {
  m.def("model_limits", &model_limits,
        "Field of ModelSpec -> least, most, a multiple of. cpmcu/models/limits.py is a copy.");
  m.def(
      "cuda_head_dims",
      [] { return std::vector<int>(std::begin(kCudaHeadDims), std::end(kCudaHeadDims)); },
      "What head_dim may be on CUDA.");
  py::class_<ModelSpec>(m, "ModelSpec",
                        R"(A model as plain data; see csrc/core/model_spec.h.

                        Made with keyword arguments. Sizes are in elements.)")
      .def(py::init(&from_keywords<ModelSpec>))
      .def_readwrite("vocab_size", &ModelSpec::vocab_size)
      .def_readwrite("hidden_size", &ModelSpec::hidden_size)
      .def_readwrite("intermediate_size", &ModelSpec::intermediate_size)
      .def_readwrite("num_hidden_layers", &ModelSpec::num_hidden_layers)
      .def_readwrite("num_attention_heads", &ModelSpec::num_attention_heads)
      .def_readwrite("num_key_value_heads", &ModelSpec::num_key_value_heads)
      .def_readwrite("head_dim", &ModelSpec::head_dim)
      .def_readwrite("rms_norm_eps", &ModelSpec::rms_norm_eps)
      .def_readwrite("max_position_embeddings", &ModelSpec::max_position_embeddings, "Tokens.")
      .def_readwrite("rope_inv_freq", &ModelSpec::rope_inv_freq,
                     "[rotary width / 2], at most head_dim / 2, float32, in radians a token.")
      .def_readwrite("rope_attention_scaling", &ModelSpec::rope_attention_scaling,
                     "Cos and sin are multiplied by it.")
      .def_readwrite("qkv_bias", &ModelSpec::qkv_bias, "The projections q, k and v have a bias.")
      .def_readwrite("qk_norm", &ModelSpec::qk_norm, "RMSNorm of each q and k head.")
      .def_readwrite("zero_centred_norms", &ModelSpec::zero_centred_norms,
                     "Norms multiply by 1 + weight.")
      .def_readwrite("plain_final_norm", &ModelSpec::plain_final_norm,
                     "The norm before the head multiplies by the weight all the same.")
      .def_readwrite("normed_embedding", &ModelSpec::normed_embedding,
                     "Embeddings have an RMSNorm without weights.")
      .def_readwrite("embed_scale", &ModelSpec::embed_scale,
                     "The embedding's output is multiplied by it.")
      .def_readwrite("residual_scale", &ModelSpec::residual_scale,
                     "Each block's output is multiplied by it before the residual add.")
      .def_readwrite("logit_scale", &ModelSpec::logit_scale,
                     "The head's input is multiplied by it.")
      .def_readwrite("logit_softcap", &ModelSpec::logit_softcap,
                     "Logits become cap * tanh(logits / cap); 0: no cap.")
      .def_readwrite("tie_word_embeddings", &ModelSpec::tie_word_embeddings,
                     "The head is the embedding table.")
      .def_property(
          "dtype", [](const ModelSpec& spec) { return std::string(name_of(spec.dtype)); },
          [](ModelSpec& spec, const std::string& name) { spec.dtype = parse_dtype(name); },
          "\"float16\" | \"bfloat16\" | \"float32\" (CPU only): weights and activations.")
      .def_readwrite("fp8_kv_cache", &ModelSpec::fp8_kv_cache,
                     "Keys and values are cached as e4m3 with a scale for each token and KV head.")
      .def_property("layers", &layers_of, &set_layers,
                    "Of each layer its blocks: kind, where it differs from other fields. Empty: "
                    "attention, mlp.")
      .def_readwrite("linear_method", &ModelSpec::linear_method,
                     "\"dense\" | \"packed\" | ... (`registered`).")
      .def_readwrite("linear_overrides", &ModelSpec::linear_overrides,
                     "Module name -> method, e.g. {\"lm_head\": \"dense\"}.")
      .def_property(
          "linear_options", [](const ModelSpec& spec) { return values_of(spec.linear_options); },
          [](ModelSpec& spec, const ParamValues& values) {
            spec.linear_options = linear_options_of(values);
          },
          "How the files store quantised matrices: LinearOptions of csrc/core/model_spec.h.")
      .def_property(
          "module_options",
          [](const ModelSpec& spec) {
            std::map<std::string, ParamValues> values;
            for (const auto& [module, own] : spec.module_options) values[module] = values_of(own);
            return values;
          },
          [](ModelSpec& spec, const std::map<std::string, ParamValues>& values) {
            spec.module_options.clear();
            for (const auto& [module, own] : values) {
              spec.module_options[module] = linear_options_of(own);
            }
          },
          "Module name -> linear_options of its own.");
}

void bind_drafter_spec(py::module_& m) {
  m.def(
      "beam_shapes",
      [](int depth, int topk, int tree_size) {
        std::vector<std::pair<int, int>> pairs;
        for (const auto& [levels, nodes] : beam_shapes({depth, tree_size}, topk)) {
          pairs.emplace_back(levels, nodes);
        }
        return pairs;
      },
      "Shapes (depth, nodes) of trees that grow by `topk` nodes a level, up to the given one.",
      py::kw_only(), py::arg("depth"), py::arg("topk"), py::arg("tree_size"));
  py::class_<DrafterSpec>(m, "DrafterSpec",
                          R"(A drafter as plain data; see csrc/speculative/drafter.h.

                          Made with keyword arguments.)")
      .def(py::init(&from_keywords<DrafterSpec>))
      .def_readwrite("method", &DrafterSpec::method,
                     "\"eagle\" | \"eagle3\" | \"model\" | \"ngram\" | ... (`registered`).")
      .def_readwrite("scope", &DrafterSpec::scope,
                     "Begins the names of its tensors and buffers: \"draft.\".")
      .def_property(
          "depth", [](const DrafterSpec& spec) { return spec.shape.depth; },
          [](DrafterSpec& spec, int depth) { spec.shape.depth = depth; },
          "Tokens of the longest drafted path.")
      .def_property(
          "tree_size", [](const DrafterSpec& spec) { return spec.shape.tree_size; },
          [](DrafterSpec& spec, int nodes) { spec.shape.tree_size = nodes; },
          "Tokens verified, root included.")
      .def_property(
          "options", [](const DrafterSpec& spec) { return spec.options.values(); },
          [](DrafterSpec& spec, ParamValues values) { spec.options = Params(std::move(values)); },
          "Of this method alone; its two files say which.")
      .def_readwrite("model", &DrafterSpec::model, "The draft's own layers.")
      .def_readwrite("parts", &DrafterSpec::parts, "Of a drafter that is made of others.");
}

void bind_run_configs(py::module_& m) {
  py::class_<RuntimeConfig>(
      m, "RuntimeConfig",
      "How an engine is run: device, memory, limits. Made with keyword arguments.")
      .def(py::init(&from_keywords<RuntimeConfig>))
      .def_readwrite("device", &RuntimeConfig::device, "\"cpu\" | \"cuda\".")
      .def_readwrite("device_index", &RuntimeConfig::device_index, "Which CUDA device.")
      .def_readwrite("num_ranks", &RuntimeConfig::num_ranks,
                     "GPUs from that one on that share the model; on the CPU: threads.")
      .def_readwrite("memory_limit", &RuntimeConfig::memory_limit,
                     "Share of the memory that is free at start, above 0; above 1: GB of it.")
      .def_readwrite("plans_for", &RuntimeConfig::plans_for,
                     "Only plans, for a device of this compute capability (89; 0: the CPU).")
      .def_readwrite("chunk_length", &RuntimeConfig::chunk_length,
                     "Most tokens of one prefill step.")
      .def_readwrite("max_num_seqs", &RuntimeConfig::max_num_seqs, "Sequence slots.")
      .def_readwrite("max_model_len", &RuntimeConfig::max_model_len,
                     "Tokens of one sequence; 0: max_position_embeddings, or what fits.")
      .def_readwrite("sized_for", &RuntimeConfig::sized_for,
                     "If max_model_len is 0: tokens of a sequence that buffers are made for.")
      .def_readwrite("cuda_graph", &RuntimeConfig::cuda_graph,
                     "Decode steps are captured and replayed.")
      .def_readwrite("num_threads", &RuntimeConfig::num_threads,
                     "CPU back end; 0: OMP_NUM_THREADS, or all cores.")
      .def_readwrite("cublas_paths", &RuntimeConfig::cublas_paths,
                     "Folders to look for libcublasLt in first.")
      .def_readwrite("verify_strategy", &RuntimeConfig::verify_strategy,
                     "Which drafted tokens are accepted: \"target_match\" | \"greedy\" | \"topp\". "
                     "The last two are lossy.")
      .def_readwrite("verify_window", &RuntimeConfig::verify_window, "Of topp.");

  py::class_<SamplingConfig>(
      m, "SamplingConfig",
      R"(Sampling parameters of one sequence; see csrc/kernels/sampling/sample.h.

                             Made with keyword arguments.)")
      .def(py::init(&from_keywords<SamplingConfig>))
      .def_readwrite("temperature", &SamplingConfig::temperature, "0: greedy.")
      .def_readwrite("top_p", &SamplingConfig::top_p, "1: off.")
      .def_readwrite("top_k", &SamplingConfig::top_k, "0: off.")
      .def_readwrite("min_p", &SamplingConfig::min_p, "0: off.")
      .def_readwrite("seed", &SamplingConfig::seed, "64 bits.")
      .def_readwrite("stream", &SamplingConfig::stream,
                     "Which random stream of that seed (the n-th choice of a request).")
      .def_readwrite("repetition_penalty", &SamplingConfig::repetition_penalty, "1: off.")
      .def_readwrite("presence_penalty", &SamplingConfig::presence_penalty, "0: off.")
      .def_readwrite("frequency_penalty", &SamplingConfig::frequency_penalty, "0: off.")
      .def_readwrite("logit_bias", &SamplingConfig::logit_bias,
                     "(token id, what is added to its logit).")
      .def_readwrite("logprobs", &SamplingConfig::logprobs,
                     "-1: none; n >= 0: of the emitted token and of the n most likely, at most "
                     "MAX_LOGPROBS.")
      .def_readwrite(
          "logprob_ids", &SamplingConfig::logprob_ids,
          "Not empty: `logprobs` tokens, which are reported in place of the most likely ones.")
      .def_readwrite("stop_ids", &SamplingConfig::stop_ids,
                     "With a drafter: the device ends the sequence after one of them.")
      .def_readwrite("max_tokens", &SamplingConfig::max_tokens,
                     "With a drafter: the device ends the sequence after so many.");
}

}  // namespace

void bind_specs(py::module_& m) {
  bind_model_spec(m);
  bind_run_configs(m);
  bind_drafter_spec(m);
}

}  // namespace cpmcu
