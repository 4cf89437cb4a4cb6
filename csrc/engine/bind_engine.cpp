// Python bindings of the engine: ModelSpec, RuntimeConfig, SamplingConfig, Engine.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bindings.h"
#include "core/plugin.h"
#include "engine/engine.h"
#include "engine/logprobs.h"

namespace py = pybind11;

namespace cpmcu {
namespace {

// Sets attributes from keyword arguments; an unknown name is an error that lists the known ones.
template <typename T>
std::unique_ptr<T> from_keywords(const py::kwargs& fields) {
  auto value = std::make_unique<T>();
  py::object object = py::cast(value.get(), py::return_value_policy::reference);
  for (const auto& [name, field] : fields) {
    if (!py::hasattr(object, name)) {
      throw py::type_error(format("{} has no field \"{}\"",
                                  std::string(py::str(py::type::of(object).attr("__name__"))),
                                  std::string(py::str(name))));
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

void bind_configs(py::module_& m) {
  py::class_<ModelSpec>(m, "ModelSpec", "A model as plain data.")
      .def(py::init(&from_keywords<ModelSpec>))
      .def_readwrite("vocab_size", &ModelSpec::vocab_size)
      .def_readwrite("hidden_size", &ModelSpec::hidden_size)
      .def_readwrite("intermediate_size", &ModelSpec::intermediate_size)
      .def_readwrite("num_hidden_layers", &ModelSpec::num_hidden_layers)
      .def_readwrite("num_attention_heads", &ModelSpec::num_attention_heads)
      .def_readwrite("num_key_value_heads", &ModelSpec::num_key_value_heads)
      .def_readwrite("head_dim", &ModelSpec::head_dim)
      .def_readwrite("rms_norm_eps", &ModelSpec::rms_norm_eps)
      .def_readwrite("max_position_embeddings", &ModelSpec::max_position_embeddings)
      .def_readwrite("rope_inv_freq", &ModelSpec::rope_inv_freq)
      .def_readwrite("rope_attention_scaling", &ModelSpec::rope_attention_scaling)
      .def_readwrite("qkv_bias", &ModelSpec::qkv_bias)
      .def_readwrite("qk_norm", &ModelSpec::qk_norm)
      .def_readwrite("embed_scale", &ModelSpec::embed_scale)
      .def_readwrite("residual_scale", &ModelSpec::residual_scale)
      .def_readwrite("logit_scale", &ModelSpec::logit_scale)
      .def_readwrite("tie_word_embeddings", &ModelSpec::tie_word_embeddings)
      .def_property(
          "dtype", [](const ModelSpec& spec) { return std::string(name_of(spec.dtype)); },
          [](ModelSpec& spec, const std::string& name) { spec.dtype = parse_dtype(name); })
      .def_property("layers", &layers_of, &set_layers)
      .def_readwrite("linear_method", &ModelSpec::linear_method)
      .def_readwrite("linear_overrides", &ModelSpec::linear_overrides)
      .def_readwrite("linear_options", &ModelSpec::linear_options);

  py::class_<RuntimeConfig>(m, "RuntimeConfig", "How an engine is run: device, memory, limits.")
      .def(py::init(&from_keywords<RuntimeConfig>))
      .def_readwrite("device", &RuntimeConfig::device)
      .def_readwrite("device_index", &RuntimeConfig::device_index)
      .def_readwrite("memory_limit", &RuntimeConfig::memory_limit)
      .def_readwrite("chunk_length", &RuntimeConfig::chunk_length)
      .def_readwrite("max_num_seqs", &RuntimeConfig::max_num_seqs)
      .def_readwrite("max_model_len", &RuntimeConfig::max_model_len)
      .def_readwrite("cuda_graph", &RuntimeConfig::cuda_graph)
      .def_readwrite("num_threads", &RuntimeConfig::num_threads)
      .def_readwrite("cublas_paths", &RuntimeConfig::cublas_paths);

  py::class_<SamplingConfig>(m, "SamplingConfig", "One sequence's sampling parameters.")
      .def(py::init(&from_keywords<SamplingConfig>))
      .def_readwrite("temperature", &SamplingConfig::temperature)
      .def_readwrite("top_p", &SamplingConfig::top_p)
      .def_readwrite("top_k", &SamplingConfig::top_k)
      .def_readwrite("min_p", &SamplingConfig::min_p)
      .def_readwrite("seed", &SamplingConfig::seed)
      .def_readwrite("stream", &SamplingConfig::stream)
      .def_readwrite("repetition_penalty", &SamplingConfig::repetition_penalty)
      .def_readwrite("presence_penalty", &SamplingConfig::presence_penalty)
      .def_readwrite("frequency_penalty", &SamplingConfig::frequency_penalty)
      .def_readwrite("logit_bias", &SamplingConfig::logit_bias)
      .def_readwrite("logprobs", &SamplingConfig::logprobs)
      .def_readwrite("stop_ids", &SamplingConfig::stop_ids)
      .def_readwrite("max_tokens", &SamplingConfig::max_tokens);

  py::class_<DrafterSpec>(m, "DrafterSpec", "A drafter as plain data.")
      .def(py::init(&from_keywords<DrafterSpec>))
      .def_readwrite("method", &DrafterSpec::method)
      .def_readwrite("scope", &DrafterSpec::scope)
      .def_readwrite("depth", &DrafterSpec::depth)
      .def_readwrite("topk", &DrafterSpec::topk)
      .def_readwrite("tree_size", &DrafterSpec::tree_size)
      .def_property(
          "options", [](const DrafterSpec& spec) { return spec.options.values(); },
          [](DrafterSpec& spec, ParamValues values) { spec.options = Params(std::move(values)); })
      .def_readwrite("model", &DrafterSpec::model)
      .def_readwrite("parts", &DrafterSpec::parts);
}

struct TensorInfo {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype;
  bool required;
};

std::vector<TensorInfo> expected_tensors(const Engine& engine) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, entry] : engine.weights().entries()) {
    std::vector<int64_t> shape;
    for (int i = 0; i < entry.destination.num_dims(); ++i)
      shape.push_back(entry.destination.size(i));
    infos.push_back({name, shape, std::string(name_of(entry.destination.dtype())), entry.required});
  }
  return infos;
}

std::vector<py::dict> plan_rows(const MemoryPlan& plan) {
  std::vector<py::dict> rows;
  for (const MemoryPlan::Buffer& buffer : plan.buffers()) {
    using namespace py::literals;
    rows.push_back(py::dict("name"_a = buffer.name, "group"_a = buffer.group,
                            "offset"_a = buffer.offset, "bytes"_a = buffer.bytes,
                            "first"_a = buffer.first, "last"_a = buffer.last));
  }
  return rows;
}

void load_file(Engine& engine, const std::string& path, const std::vector<FileEntry>& entries,
               const py::object& progress) {
  std::function<void(int64_t)> callback;
  if (!progress.is_none()) {
    callback = [&](int64_t bytes) {
      const py::gil_scoped_acquire gil;
      progress(bytes);
    };
  } else {
    callback = [](int64_t) {  // let Ctrl-C through
      const py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    };
  }
  const py::gil_scoped_release no_gil;
  engine.load_file(path, entries, callback);
}

void load_tensor(Engine& engine, const std::string& name, const py::array& array,
                 const std::string& dtype_name) {
  const DType dtype = parse_dtype(dtype_name);
  CHECK(array.itemsize() == size_of(dtype), "tensor \"{}\": an array of {}-byte items for dtype {}",
        name, array.itemsize(), dtype_name);
  const py::array contiguous = py::array::ensure(array, py::array::c_style);
  std::vector<int64_t> shape(contiguous.shape(), contiguous.shape() + contiguous.ndim());
  const void* data = contiguous.data();
  const py::gil_scoped_release no_gil;
  engine.load_array(name, dtype, shape, data);
}

using ShapeArgument = std::optional<std::pair<int, int>>;
std::optional<DraftShape> shape_of(const ShapeArgument& shape) {
  if (!shape) return std::nullopt;
  return DraftShape{shape->first, shape->second};
}

// Logits [n, V] of a prompt chunk, one row a token.
py::array_t<float> prefill_logits(Engine& engine, int slot, const std::vector<int>& ids) {
  const int64_t vocab = engine.spec().vocab_size;
  py::array_t<float> logits({static_cast<int64_t>(ids.size()), vocab});
  float* out = logits.mutable_data();
  const py::gil_scoped_release no_gil;
  engine.prefill({{.slot = slot, .ids = ids}}, {}, [&](int row, int rows, const float* data) {
    std::memcpy(out + row * vocab, data, sizeof(float) * static_cast<size_t>(rows * vocab));
  });
  return logits;
}

std::vector<PrefillItem> prefill_items(
    const std::vector<std::tuple<int, std::vector<int>, bool>>& tuples) {
  std::vector<PrefillItem> items;
  for (const auto& [slot, ids, last] : tuples) items.push_back({slot, ids, last});
  return items;
}

using PromptLogprob = std::tuple<float, std::vector<int>, std::vector<float>>;

std::vector<PromptLogprob> prefill_logprobs(Engine& engine, int slot, const std::vector<int>& ids,
                                            const std::vector<int>& targets, int num_top) {
  CHECK(targets.size() == ids.size(), "{} targets for {} tokens of a prompt", targets.size(),
        ids.size());
  const int vocab_size = engine.spec().vocab_size;
  const auto top = static_cast<size_t>(std::min(num_top, vocab_size));
  std::vector<PromptLogprob> found;
  engine.prefill({{.slot = slot, .ids = ids}}, {}, [&](int first, int rows, const float* logits) {
    for (int row = 0; row < rows; ++row) {
      const int target = targets[static_cast<size_t>(first + row)];
      const TokenLogprobs entry =
          token_logprobs(logits + int64_t{row} * vocab_size, vocab_size, target, num_top);
      found.emplace_back(entry.logprob, std::vector<int>(entry.top_ids, entry.top_ids + top),
                         std::vector<float>(entry.top_logprobs, entry.top_logprobs + top));
    }
  });
  return found;
}

using Words = py::array_t<uint32_t, py::array::c_style>;

// `words` must outlive the result.
TokenMasks token_masks(const Engine& engine, const std::vector<int>& rows, const Words& words) {
  const int64_t width = num_mask_words(engine.spec().vocab_size);
  CHECK(words.ndim() == 2 && (words.shape(0) == 0 || words.shape(1) == width),
        "masks have {} dimensions and {} words a row, expected 2 and {}", words.ndim(),
        words.ndim() == 0 ? 0 : words.shape(words.ndim() - 1), width);
  return {.rows = rows, .words = words.data(), .num_masks = static_cast<int>(words.shape(0))};
}

void bind_outputs(py::module_& m) {
  py::class_<TensorInfo>(m, "TensorInfo", "A tensor that a checkpoint has to bring.")
      .def_readonly("name", &TensorInfo::name)
      .def_readonly("shape", &TensorInfo::shape)
      .def_readonly("dtype", &TensorInfo::dtype)
      .def_readonly("required", &TensorInfo::required);

  py::class_<FileEntry>(m, "FileEntry", "One tensor's bytes in a file.")
      .def(
          py::init([](std::string name, const std::string& dtype, std::vector<int64_t> shape,
                      int64_t offset, int64_t nbytes) {
            return FileEntry{std::move(name), parse_dtype(dtype), std::move(shape), offset, nbytes};
          }),
          py::arg("name"), py::arg("dtype"), py::arg("shape"), py::arg("offset"), py::arg("nbytes"))
      .def_readonly("name", &FileEntry::name)
      .def_property_readonly("dtype",
                             [](const FileEntry& e) { return std::string(name_of(e.dtype)); })
      .def_readonly("shape", &FileEntry::shape)
      .def_readonly("offset", &FileEntry::offset)
      .def_readonly("nbytes", &FileEntry::num_bytes);

  using Output = Engine::SlotOutput;
  py::class_<Output>(m, "SlotOutput", "What a step emitted for one sequence.")
      .def_readonly("slot", &Output::slot)
      .def_readonly("tokens", &Output::tokens)
      .def_readonly("finished", &Output::finished)
      .def_property_readonly("logprobs",
                             [](const Output& output) {
                               std::vector<float> values;
                               for (const TokenLogprobs& t : output.logprobs)
                                 values.push_back(t.logprob);
                               return values;
                             })
      .def_property_readonly("top_ids",
                             [](const Output& output) {
                               std::vector<std::vector<int>> ids;
                               for (const TokenLogprobs& t : output.logprobs) {
                                 ids.emplace_back(t.top_ids, t.top_ids + output.num_logprobs);
                               }
                               return ids;
                             })
      .def_property_readonly("top_logprobs", [](const Output& output) {
        std::vector<std::vector<float>> values;
        for (const TokenLogprobs& t : output.logprobs) {
          values.emplace_back(t.top_logprobs, t.top_logprobs + output.num_logprobs);
        }
        return values;
      });
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_configs(m);
  bind_outputs(m);
  m.attr("PAGE_SIZE") = kPageSize;
  m.attr("MAX_TREE_SIZE") = kMaxTreeSize;
  m.attr("MAX_LOGPROBS") = kMaxLogprobs;
  m.def("device_count", &device_count, "CUDA devices that the driver shows.");
  m.def(
      "device_info",
      [](int index) {
        using namespace py::literals;
        const DeviceInfo info = device_info({DeviceKind::kCuda, index});
        return py::dict("name"_a = info.name, "compute_capability"_a = info.compute_capability,
                        "total_bytes"_a = info.total_bytes, "free_bytes"_a = info.free_bytes,
                        "sm_count"_a = info.sm_count, "driver_version"_a = info.driver_version);
      },
      py::arg("index"), "Name, compute capability, memory in bytes and driver of a CUDA device.");
  m.def(
      "registered",
      [] {
        std::map<std::string, std::map<std::string, std::string>> all;
        for (const auto& [name, entry] : LinearRegistry::instance().entries()) {
          all["linear"][name] = entry.file;
        }
        for (const auto& [name, entry] : BlockRegistry::instance().entries()) {
          all["block"][name] = entry.file;
        }
        for (const auto& [name, entry] : DrafterRegistry::instance().entries()) {
          all["drafter"][name] = entry.file;
        }
        return all;
      },
      "What is registered, by kind and name, with its source file.");

  m.def("load_plugin", &load_plugin, py::arg("path"),
        "Loads a shared library that registers linear methods, blocks or drafters.");

  py::class_<MemoryPlan>(m, "MemoryPlan", "Buffers with sizes and lifetimes, and their offsets.")
      .def(py::init<>())
      .def("add", &MemoryPlan::add, py::arg("name"), py::arg("group"), py::arg("bytes"))
      .def("add_scratch", &MemoryPlan::add_scratch, py::arg("name"), py::arg("bytes"),
           py::arg("first"), py::arg("last"))
      .def("assign", &MemoryPlan::assign)
      .def("rows", &plan_rows);

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Engine>(m, "Engine", "One model on one device. Not thread-safe.")
      .def(py::init<const ModelSpec&, const RuntimeConfig&, const std::optional<DrafterSpec>&>(),
           py::arg("spec"), py::arg("config"), py::arg("draft") = py::none(), no_gil)
      .def("memory_plan", [](const Engine& engine) { return plan_rows(engine.memory_plan()); })
      .def("expected_tensors", &expected_tensors)
      .def("load_file", &load_file, py::arg("path"), py::arg("entries"),
           py::arg("progress") = py::none())
      .def("load_tensor", &load_tensor, py::arg("name"), py::arg("array"), py::arg("dtype"))
      .def("finish_loading", &Engine::finish_loading, no_gil)
      .def(
          "add_sequence",
          [](Engine& engine, const SamplingConfig& sampling, const std::vector<int>& prompt,
             const std::vector<int>& generated) {
            std::vector<int> ids = prompt;
            ids.insert(ids.end(), generated.begin(), generated.end());
            return engine.add_sequence(sampling, ids, static_cast<int>(prompt.size()));
          },
          py::arg("sampling"), py::arg("prompt"), py::arg("generated") = std::vector<int>{}, no_gil)
      .def("release", &Engine::release, py::arg("slot"), no_gil)
      .def("reserve", &Engine::reserve, py::arg("slot"), py::arg("num_tokens"), no_gil)
      .def(
          "prefill",
          [](Engine& engine, const std::vector<std::tuple<int, std::vector<int>, bool>>& items,
             const std::vector<int>& mask_rows, const std::optional<Words>& words) {
            const TokenMasks masks = words ? token_masks(engine, mask_rows, *words) : TokenMasks{};
            const py::gil_scoped_release released;
            engine.prefill(prefill_items(items), masks);
          },
          py::arg("items"), py::arg("mask_rows") = std::vector<int>{},
          py::arg("masks") = py::none())
      .def("prefill_logprobs", &prefill_logprobs, py::arg("slot"), py::arg("ids"),
           py::arg("targets"), py::arg("num_top"), no_gil)
      .def(
          "decode",
          [](Engine& engine, const std::vector<int>& slots, const ShapeArgument& shape) {
            engine.decode(slots, shape_of(shape));
          },
          py::arg("slots"), py::arg("shape") = std::nullopt, no_gil)
      .def(
          "begin_masked",
          [](Engine& engine, const std::vector<int>& slots, const ShapeArgument& shape) {
            std::vector<std::pair<std::vector<int>, std::vector<int>>> trees;
            for (Engine::DraftedTree& tree : engine.begin_masked(slots, shape_of(shape))) {
              trees.emplace_back(std::move(tree.tokens), std::move(tree.parents));
            }
            return trees;
          },
          py::arg("slots"), py::arg("shape") = std::nullopt, no_gil)
      .def(
          "end_masked",
          [](Engine& engine, const std::vector<int>& mask_rows, const Words& words) {
            const TokenMasks masks = token_masks(engine, mask_rows, words);
            const py::gil_scoped_release released;
            engine.end_masked(masks);
          },
          py::arg("mask_rows"), py::arg("masks"))
      .def("in_flight", &Engine::in_flight)
      .def("collect", &Engine::collect, no_gil)
      .def("prefill_logits", &prefill_logits, py::arg("slot"), py::arg("ids"))
      .def_property_readonly("max_model_len", &Engine::max_model_len)
      .def_property_readonly("num_pages", &Engine::num_pages)
      .def_property_readonly("num_free_pages", &Engine::num_free_pages)
      .def_property_readonly("max_num_seqs",
                             [](const Engine& e) { return e.config().max_num_seqs; })
      .def_property_readonly("chunk_length", [](const Engine& e) { return e.chunk_length(); })
      .def_property_readonly("tokens_per_step", &Engine::tokens_per_step)
      .def_property_readonly("launch_ahead", &Engine::launch_ahead)
      .def_property_readonly("counters", &Engine::counters);
}

}  // namespace cpmcu
