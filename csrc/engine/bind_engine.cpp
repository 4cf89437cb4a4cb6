// Python bindings of the engine, its arguments and its results.
// Length of this file: a binding for each field and each method of these classes.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <limits>

#include "bindings.h"
#include "core/plugin.h"
#include "engine/bind_launches.h"
#include "engine/bind_memory.h"
#include "engine/bind_outputs.h"
#include "engine/bind_ranks.h"
#include "engine/logprobs.h"
#include "engine/ranks.h"
#include "linear/packed_tensors.h"

namespace py = pybind11;

namespace cpmcu {
namespace {

struct TensorInfo {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype;
  bool required;
};

std::vector<TensorInfo> expected_tensors(const Ranks& engine) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, entry] : engine.first().weights().entries()) {
    infos.push_back(
        {name, entry.shape, std::string(name_of(entry.destination.dtype())), entry.required});
  }
  return infos;
}

using Progress = py::typing::Callable<void(int64_t)>;

void load_file(Ranks& engine, const std::string& path, const std::vector<FileEntry>& entries,
               const std::optional<Progress>& progress) {
  std::function<void(int64_t)> callback;
  if (progress) {
    callback = [&](int64_t bytes) {
      const py::gil_scoped_acquire gil;
      (*progress)(bytes);
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

void load_tensor(Ranks& engine, const std::string& name, const py::array& array,
                 const std::string& dtype_name) {
  const DType dtype = parse_dtype(dtype_name);
  CHECK(array.itemsize() == size_of(dtype), "tensor \"{}\": an array of {}-byte items for dtype {}",
        name, array.itemsize(), dtype_name);
  const py::array contiguous = py::array::ensure(array, py::array::c_style);
  std::vector<int64_t> shape(contiguous.shape(), contiguous.shape() + contiguous.ndim());
  const void* data = contiguous.data();
  const py::gil_scoped_release no_gil;
  engine.each([&](Engine& e, int) { e.load_array(name, dtype, shape, data); });
}

using ShapeArgument = std::optional<std::pair<int, int>>;
std::optional<DraftShape> shape_of(const ShapeArgument& shape) {
  if (!shape) return std::nullopt;
  return DraftShape{shape->first, shape->second};
}

// Logits [n, V] of a prompt chunk, one row a token.
py::array_t<float> prefill_logits(Ranks& engine, int slot, const std::vector<int>& ids) {
  const int64_t vocab = engine.first().spec().vocab_size;
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

std::vector<PromptLogprob> prefill_logprobs(Ranks& engine, int slot, const std::vector<int>& ids,
                                            const std::vector<int>& targets, int num_top) {
  CHECK(targets.size() == ids.size(), "{} targets for {} tokens of a prompt", targets.size(),
        ids.size());
  const int vocab_size = engine.first().spec().vocab_size;
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
TokenMasks token_masks(const Ranks& engine, const std::vector<int>& rows, const Words& words) {
  const int64_t width = num_mask_words(engine.first().spec().vocab_size);
  CHECK(words.ndim() == 2 && (words.shape(0) == 0 || words.shape(1) == width),
        "masks have {} dimensions and {} words a row, expected 2 and {}", words.ndim(),
        words.ndim() == 0 ? 0 : words.shape(words.ndim() - 1), width);
  return {.rows = rows, .words = words.data(), .num_masks = static_cast<int>(words.shape(0))};
}

void bind_tensors(py::module_& m) {
  py::class_<TensorInfo>(m, "TensorInfo", "A tensor that a checkpoint has to bring.")
      .def_readonly("name", &TensorInfo::name, "As in a Hugging Face checkpoint of Llama.")
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
      .def_property_readonly(
          "dtype", [](const FileEntry& e) { return std::string(name_of(e.dtype)); },
          "\"float32\" | \"float16\" | \"bfloat16\" | \"int32\" | ...")
      .def_readonly("shape", &FileEntry::shape)
      .def_readonly("offset", &FileEntry::offset, "Bytes from the file's start.")
      .def_readonly("nbytes", &FileEntry::num_bytes);
}

using IdList = py::typing::List<int>;

// Prompts have tens of thousands of ids: these functions read a list in one pass, without a caster
// for each item.
int64_t first_outside(const IdList& ids, int64_t vocab_size) {
  for (py::ssize_t i = 0; i < PyList_GET_SIZE(ids.ptr()); ++i) {
    PyObject* item = PyList_GET_ITEM(ids.ptr(), i);
    int overflow = 0;
    const int64_t id = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : -1;
    if (overflow != 0 || id < 0 || id >= vocab_size) return i;
  }
  return -1;
}

std::vector<int> to_ids(const IdList& list) {
  const int64_t outside = first_outside(list, int64_t{1} << 31);
  CHECK(outside < 0, "item {} of the ids is no token id", outside);
  std::vector<int> ids;
  ids.reserve(static_cast<size_t>(PyList_GET_SIZE(list.ptr())));
  for (py::ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) {
    ids.push_back(static_cast<int>(PyLong_AsLong(PyList_GET_ITEM(list.ptr(), i))));
  }
  return ids;
}

py::bytes token_bytes(const IdList& list) {
  const std::vector<int> ids = to_ids(list);
  return {reinterpret_cast<const char*>(ids.data()), sizeof(int) * ids.size()};
}

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_loading(EngineClass& engine) {
  engine
      .def(
          "memory_plan",
          [](const Ranks& e, int rank) { return plan_rows(e.rank(rank).memory_plan()); },
          py::arg("rank") = 0, "Rows {name, group, offset, bytes, first, last}, as of MemoryPlan.")
      .def("expected_tensors", &expected_tensors,
           "What a checkpoint has to bring, or may, in the order of names.")
      .def(
          "load_file", &load_file, py::arg("path"), py::arg("entries"),
          py::arg("progress") = py::none(),
          R"(Streams tensors from `path` into place; `progress` gets bytes done so far in this call.

           ValueError for an unknown name, a shape or dtype that differs, a short file.
           Floating-point dtypes are converted to the model's.)")
      .def("load_tensor", &load_tensor, py::arg("name"), py::arg("array"), py::arg("dtype"),
           "The same from host memory; bfloat16 comes as uint16.")
      .def("finish_loading", on_each<&Engine::finish_loading>, NoGil(),
           "ValueError that lists the missing tensors.");
}

void bind_sequences(EngineClass& engine) {
  engine
      .def(
          "add_sequence",
          [](Ranks& e, const SamplingConfig& sampling, const IdList& prompt,
             const std::vector<int>& generated,
             const std::vector<std::pair<int, std::vector<int>>>& pages, int num_cached) {
            std::vector<int> ids = to_ids(prompt);
            ids.insert(ids.end(), generated.begin(), generated.end());
            CachedPrefix cached{.num_tokens = num_cached};
            for (const auto& [first, held] : pages) cached.pages.push_back({first, held});
            const py::gil_scoped_release released;
            return on_each<&Engine::add_sequence>(e, sampling, ids, static_cast<int>(prompt.size()),
                                                  cached);
          },
          py::arg("sampling"), py::arg("prompt"), py::arg("generated") = std::vector<int>{},
          py::arg("pages") = std::vector<std::pair<int, std::vector<int>>>{},
          py::arg("num_cached") = 0,
          R"(Takes a free slot for a sequence (resets its state). RuntimeError if none is free.

          `prompt` and what was `generated` before (when a sequence is resumed) are for penalties
          and look-up. `prefill` brings the tokens behind the first `num_cached`, which are a
          multiple of PAGE_SIZE. The slot shares `pages` of each group of layers, from a page of
          the sequence on: (first, pages). `reserve` and `reserve_windows` take pages for the
          others, and `pages.load` fills them.)")
      .def("release", on_each<&Engine::release>, py::arg("slot"), NoGil(),
           "Gives the slot and its pages back. Steps in flight for it are dropped from results.")
      .def("vacate", on_each<&Engine::vacate>, py::arg("slot"), NoGil(),
           R"(Gives the pages of a slot without steps in flight back, but keeps its sequence.

           Before its next step, `reserve` and `reserve_windows` take pages again and `pages.load`
           fills them.)")
      .def("reserve", on_each<&Engine::reserve>, py::arg("slot"), py::arg("num_tokens"), NoGil(),
           R"(Takes pages so that the slot can hold `num_tokens`; False if there are too few.

           Waits for the steps in flight if they are the last that read the pages it needs.)")
      .def("reserve_step", on_each<&Engine::reserve_step>, py::arg("slots"), NoGil(),
           R"(Takes pages for one more decode step of these slots, in order, as both of these do.

           Returns the number of slots before the first one that lacks pages.)")
      .def("reserve_windows", on_each<&Engine::reserve_windows>, py::arg("slot"),
           py::arg("step_end"), NoGil(),
           R"(The same in the groups of layers with a window, for the slot's next step.

           The step ends behind at most `step_end` tokens. Pages that neither it nor a later step
           reads are given back.)")
      .def("num_missing", of_first<&Engine::num_missing>, py::arg("slot"), py::arg("num_tokens"),
           py::arg("step_end"), NoGil(),
           "Pages of each group that `reserve` and `reserve_windows` lack, even after the steps in "
           "flight.");
}

py::memoryview view_of(const HostBlocks& blocks, int block) {
  return py::memoryview::from_memory(blocks.block(block), blocks.block_bytes());
}

void bind_host_blocks(py::module_& m) {
  py::class_<HostBlocks>(m, "HostBlocks", "Pinned host memory in blocks of one size.")
      .def(py::init([](const Ranks& e, int64_t block_bytes, int blocks_per_segment, int most) {
             return std::make_unique<HostBlocks>(e.first().device(), block_bytes,
                                                 blocks_per_segment, most);
           }),
           py::arg("engine"), py::arg("block_bytes"), py::arg("blocks_per_segment"),
           py::arg("most_blocks"))
      .def(
          "grow", &HostBlocks::grow, NoGil(),
          "Takes one segment more, up to `most_blocks`; the number of blocks. From any thread, but "
          "not from two at a time. MemoryError if there is none.")
      .def_property_readonly("num_blocks", &HostBlocks::num_blocks)
      .def_property_readonly("num_bytes", &HostBlocks::num_bytes, "Bytes taken from the system.")
      .def("view", &view_of, py::arg("block"), py::keep_alive<0, 1>(),
           "The bytes of a block, writable.");
}

void bind_pages(py::module_& m, EngineClass& engine) {
  py::class_<RankPages>(m, "Pages",
                        "Owners of an engine's pages, and copies in host memory. Group 0: layers "
                        "without a window; the layers of each window are a further group.")
      .def_property_readonly(
          "windows",
          [](const RankPages& self) {
            const Pages& pages = self.ranks.first().pages();
            std::vector<int> windows;
            for (int i = 0; i < pages.num_groups(); ++i) windows.push_back(pages.window(i));
            return windows;
          },
          "The window of each group, in tokens; 0 is the first.")
      .def("num_pages", of_first<&Pages::num_pages>, py::arg("group"),
           "Pages of a group, those of an idle slot included.")
      .def("first_read", of_first<&Pages::first_read>, py::arg("group"), py::arg("length"),
           "The first page of a sequence that its tokens from position `length` on read.")
      .def(
          "of_slot",
          [](const RankPages& p, int slot, int group) {
            return of_first<&Pages::of_slot>(p, slot, group).pages;
          },
          py::arg("slot"), py::arg("group") = 0, "The pages of a slot, in order.")
      .def(
          "first_of_slot",
          [](const RankPages& p, int slot, int group) {
            return of_first<&Pages::of_slot>(p, slot, group).first;
          },
          py::arg("slot"), py::arg("group"),
          "Which page of the sequence of_slot(slot, group)[0] is.")
      .def("num_owners", of_first<&Pages::num_owners>, py::arg("page"), py::arg("group") = 0,
           "Slots and caches that have a page. RuntimeError for a page that is not there.")
      .def("take", on_each<&Pages::take>, py::arg("most"), py::arg("group") = 0, NoGil(),
           "Up to `most` free pages, each with one owner; `drop` gives them back.")
      .def("hold", on_each<&Pages::hold>, py::arg("pages"), py::arg("group") = 0, NoGil(),
           "One more owner of pages that have one.")
      .def("drop", on_each<&Pages::drop>, py::arg("pages"), py::arg("group") = 0, NoGil(),
           "One owner less.")
      .def("save", on_each<&Pages::save>, py::arg("pages"), py::arg("to"), py::arg("blocks"),
           py::arg("group") = 0, NoGil(),
           "Copies pages into host blocks, behind the steps so far; does not wait.")
      .def("load", on_each<&Pages::load>, py::arg("pages"), py::arg("source"), py::arg("blocks"),
           py::arg("group") = 0, NoGil(),
           "Copies host blocks into pages, before the steps to come; does not wait.")
      .def("save_slot", on_each<&Pages::save_slot>, py::arg("slot"), py::arg("to"),
           py::arg("block"), NoGil(),
           "Copies a slot's per-slot state into a host block; does not wait.")
      .def("load_slot", on_each<&Pages::load_slot>, py::arg("slot"), py::arg("source"),
           py::arg("block"), NoGil(), "The other way round.")
      .def("wait_for_copies", on_each<&Pages::wait_for_copies>, NoGil(),
           "Waits for all copies and steps that were enqueued.")
      .def_property_readonly("has_copies", of_first<&Pages::has_copies>,
                             "Were copies enqueued since the last wait for them?")
      .def_property_readonly(
          "page_bytes",
          [](const RankPages& pages) { return of_first<&Pages::page_bytes>(pages, 0); },
          "Bytes of one page of group 0 in all models' planes.")
      .def("group_page_bytes", of_first<&Pages::page_bytes>, py::arg("group"),
           "The same of any group.")
      .def_property_readonly("slot_bytes", of_first<&Pages::slot_bytes>,
                             "Bytes of a slot's per-slot state; 0: the models have none.");
  engine.def_property_readonly("pages", &Ranks::pages, py::return_value_policy::reference_internal);
}

void bind_steps(EngineClass& engine) {
  engine
      .def(
          "prefill",
          [](Ranks& e, const std::vector<std::tuple<int, std::vector<int>, bool>>& items,
             const std::vector<int>& mask_rows, const std::optional<Words>& words,
             bool skip_draft) {
            const TokenMasks masks = words ? token_masks(e, mask_rows, *words) : TokenMasks{};
            const py::gil_scoped_release released;
            e.prefill(prefill_items(items), masks, nullptr, skip_draft);
          },
          py::arg("items"), py::arg("mask_rows") = std::vector<int>{},
          py::arg("masks") = py::none(), py::arg("skip_draft") = false,
          R"(One step over prompt chunks: (slot, token ids, last chunk of its prompt?).

          At most chunk_length tokens in all. A last chunk samples the first token; with `masks`
          [M, ceil(V / 32)] the i-th of those that do so only one that mask mask_rows[i] allows
          (-1: any). `skip_draft`: the drafter does not read the chunks; its later drafts of these
          sequences are worse, which changes no token.)")
      .def("prefill_logprobs", &prefill_logprobs, py::arg("slot"), py::arg("ids"),
           py::arg("targets"), py::arg("num_top"), NoGil(),
           R"(A prefill step of one chunk that is not the last of its prompt, and waits for it.

           For each token: the log-probability of its target (the token that follows it), and ids
           and log-probabilities of the likeliest tokens there. To be collected like any step.)")
      .def("prefill_logits", &prefill_logits, py::arg("slot"), py::arg("ids"),
           R"(A prefill step of one chunk that draws nothing; the logits [n, V] of its tokens.

           Waits for the device. To be collected like any step.)")
      .def(
          "decode",
          [](Ranks& e, const std::vector<int>& slots, const ShapeArgument& shape) {
            on_each<&Engine::decode>(e, slots, shape_of(shape));
          },
          py::arg("slots"), py::arg("shape") = std::nullopt, NoGil(),
          R"(Enqueues one decode step for these slots; does not wait.

          `shape`: depth and nodes of a speculative step's trees, at most (and by default) those of
          the DrafterSpec; (0, 1) drafts nothing. It changes no token, unless verify_strategy
          is topp. ValueError for others.)")
      .def(
          "begin_masked",
          [](Ranks& e, const std::vector<int>& slots, const ShapeArgument& shape) {
            std::vector<std::pair<std::vector<int>, std::vector<int>>> trees;
            for (Engine::DraftedTree& tree : e.begin_masked(slots, shape_of(shape))) {
              trees.emplace_back(std::move(tree.tokens), std::move(tree.parents));
            }
            return trees;
          },
          py::arg("slots"), py::arg("shape") = std::nullopt, NoGil(),
          R"(Enqueues a decode step up to its logits. Waits for the draft alone.

          Returns tokens and parents of the N nodes of each slot's tree; node 0 is the root, an
          unused node has token -1. Without a drafter there is the root alone. Another step or a
          release before `end_masked` abandons the step.)")
      .def(
          "end_masked",
          [](Ranks& e, const std::vector<int>& mask_rows, const Words& words) {
            const TokenMasks masks = token_masks(e, mask_rows, words);
            const py::gil_scoped_release released;
            on_each<&Engine::end_masked>(e, masks);
          },
          py::arg("mask_rows"), py::arg("masks"),
          R"(The rest of the step: draws, and accepts what agrees with the draft; does not wait.

          mask_rows [slots * N]: which of masks [M, ceil(V / 32)] a node is held to; -1: none.
          RuntimeError if no masked step has begun.)")
      .def("in_flight", of_first<&Engine::in_flight>, "Steps enqueued and not yet collected.")
      .def("collect", &Ranks::collect, NoGil(),
           R"(Waits for the oldest step in flight and returns what it emitted.

           Prefill steps of chunks that are not last return []. Device errors surface here as
           RuntimeError.)")
      .def(
          "collect_step", [](Ranks& e) { return StepOutputs{e.collect()}; }, NoGil(),
          "Like `collect`. With many sequences, Python reads the result without a loop over them.");
}

void bind_facts(EngineClass& engine) {
  engine
      .def_property_readonly("max_model_len", of_first<&Engine::max_model_len>,
                             "Tokens that one sequence can hold.")
      .def_property_readonly("num_pages", of_first<&Engine::num_pages>,
                             "KV pages of PAGE_SIZE tokens in group 0, shared by all slots.")
      .def_property_readonly(
          "num_free_pages", of_first<&Engine::num_free_pages>,
          "Of these, pages without an owner; steps in flight may still read some.")
      .def_property_readonly("max_num_seqs",
                             [](const Ranks& e) { return e.first().config().max_num_seqs; })
      .def_property_readonly("chunk_length",
                             [](const Ranks& e) { return e.first().chunk_length(); })
      .def_property_readonly(
          "draft_shapes",
          [](const Ranks& engine) {
            std::vector<std::pair<int, int>> shapes;
            for (const auto& [depth, nodes] : engine.first().draft_shapes()) {
              shapes.emplace_back(depth, nodes);
            }
            return shapes;
          },
          "Shapes among which each step may choose: (depth, nodes), the last one the largest.")
      .def_property_readonly("tokens_per_step", of_first<&Engine::tokens_per_step>,
                             "Most tokens that a decode step emits for a sequence.")
      .def_property_readonly("num_rewritten", of_first<&Engine::num_rewritten>,
                             "Last tokens of a sequence whose entries a later step may write.")
      .def_property_readonly("launch_ahead", of_first<&Engine::launch_ahead>,
                             "Decode steps worth having in flight: 2 on CUDA, 1 on the CPU.")
      .def_property_readonly(
          "counters", of_first<&Engine::counters>,
          "steps, waits, graph_captures, graph_replays;\nof the process: allocations, "
          "synchronizations.");
}

using DeviceFacts = py::typing::Dict<py::str, py::object>;

DeviceFacts device_facts(int index) {
  using namespace py::literals;
  const DeviceInfo info = device_info({DeviceKind::kCuda, index});
  return py::dict("name"_a = info.name, "compute_capability"_a = info.compute_capability,
                  "total_bytes"_a = info.total_bytes, "free_bytes"_a = info.free_bytes,
                  "sm_count"_a = info.sm_count, "driver_version"_a = info.driver_version,
                  "code_capability"_a = code_capability());
}

using SourceFiles = std::map<std::string, std::string>;

std::map<std::string, SourceFiles> registered() {
  std::map<std::string, SourceFiles> all;
  for (const auto& [name, entry] : LinearRegistry::instance().entries()) {
    all["linear"][name] = entry.file;
  }
  for (const auto& [name, entry] : LayoutRegistry::instance().entries()) {
    all["layout"][name] = entry.file;
  }
  for (const auto& [name, entry] : BlockRegistry::instance().entries()) {
    all["block"][name] = entry.file;
  }
  for (const auto& [name, entry] : DrafterRegistry::instance().entries()) {
    all["drafter"][name] = entry.file;
  }
  return all;
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_tensors(m);
  bind_outputs(m);
  m.attr("PAGE_SIZE") = kPageSize;
  m.attr("MAX_TREE_SIZE") = kMaxTreeSize;
  m.attr("MAX_LOGPROBS") = kMaxLogprobs;
  m.attr("MAX_TOKEN_ID") = std::numeric_limits<int>::max();
  m.def("device_count", &device_count, py::call_guard<py::gil_scoped_release>(),
        "Number of CUDA devices that the driver shows; 0 without a driver or a CUDA build.");
  m.def("device_info", &device_facts, py::arg("index"),
        "name, compute_capability, total_bytes, free_bytes, sm_count, driver_version,\n"
        "code_capability (of this build's kernels that the device runs).");
  m.def("first_outside", &first_outside, py::arg("ids"), py::arg("vocab_size"),
        "Place of the first item that is no int from 0 to vocab_size - 1; -1: there is none.");
  m.def("token_bytes", &token_bytes, py::arg("ids"),
        "Token ids as little-endian int32. ValueError for items that first_outside finds.");
  m.def("registered", &registered,
        "What is registered: kind (\"linear\", \"block\", \"drafter\") -> name -> source file.");
  m.def("load_plugin", &load_plugin, py::arg("path"),
        R"(Loads a shared library that registers linear methods, blocks or drafters.

        See csrc/core/plugin.h. ValueError if it cannot be loaded.)");

  EngineClass engine(m, "Engine",
                     "One model, on one GPU or several. Not thread-safe: one thread drives it.");
  engine
      .def(py::init<const ModelSpec&, const RuntimeConfig&, const std::optional<DrafterSpec>&>(),
           py::arg("spec"), py::arg("config"), py::arg("draft") = py::none(), NoGil(),
           "Plans and allocates all memory. MemoryError says what does not fit and by how much.")
      .def_static(
          "planned_model_len", &Ranks::planned_model_len, py::arg("spec"), py::arg("config"),
          py::arg("draft") = py::none(), NoGil(),
          R"(`max_model_len` of an engine made of the same now. Allocates none of its memory.

                  MemoryError as of the constructor.)");
  engine.def_property_readonly("num_ranks", &Ranks::size, "GPUs that share the model.")
      .def("silence", &Ranks::silence, py::arg("rank"),
           "For tests: from now on a rank sends nothing to the others.");
  bind_loading(engine);
  bind_launches(engine);
  bind_sequences(engine);
  bind_host_blocks(m);
  bind_pages(m, engine);
  bind_steps(engine);
  bind_facts(engine);
}

}  // namespace cpmcu
