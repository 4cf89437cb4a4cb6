// Python bindings of the results of a step.
#include "engine/bind_outputs.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

namespace py = pybind11;

namespace cpmcu {
namespace {

using Output = Engine::SlotOutput;
using Outputs = std::vector<Output>;

// One item of each output, as a list.
template <typename Item>
std::vector<int> of_each(const Outputs& outputs, Item item) {
  std::vector<int> items;
  items.reserve(outputs.size());
  for (const Output& output : outputs) items.push_back(item(output));
  return items;
}

void bind_slot_outputs(py::module_& m) {
  py::class_<Output>(m, "SlotOutput", "What a step emitted for one sequence.")
      .def_readonly("slot", &Output::slot)
      .def_readonly("tokens", &Output::tokens, "Emitted by this step, in order.")
      .def_readonly("finished", &Output::finished, "With a drafter: the device ended the sequence.")
      .def_property_readonly(
          "inner",
          [](const Output& output) { return std::pair(output.inner.steps, output.inner.tokens); },
          "Steps that the draft took itself, and the tokens that they emitted.")
      .def_property_readonly(
          "logprobs",
          [](const Output& output) {
            std::vector<float> values;
            for (const TokenLogprobs& t : output.logprobs) values.push_back(t.logprob);
            return values;
          },
          "One a token, if asked for.")
      .def_property_readonly(
          "top_ids",
          [](const Output& output) {
            std::vector<std::vector<int>> ids;
            for (const TokenLogprobs& t : output.logprobs) {
              ids.emplace_back(t.top_ids, t.top_ids + output.num_logprobs);
            }
            return ids;
          },
          "Of each token the most likely ones at its place, likeliest first.")
      .def_property_readonly(
          "top_logprobs",
          [](const Output& output) {
            std::vector<std::vector<float>> values;
            for (const TokenLogprobs& t : output.logprobs) {
              values.emplace_back(t.top_logprobs, t.top_logprobs + output.num_logprobs);
            }
            return values;
          },
          "Log-probabilities of `top_ids`.");
}

void bind_step_outputs(py::module_& m) {
  py::class_<StepOutputs>(m, "StepOutputs",
                          "The results of a step, one for each sequence that was not released.")
      .def_property_readonly(
          "slots",
          [](const StepOutputs& self) {
            return of_each(self.outputs, [](const Output& output) { return output.slot; });
          },
          "The slot of each sequence, in the order of the step.")
      .def_property_readonly(
          "tokens",
          [](const StepOutputs& self) {
            std::vector<int> all;
            for (const Output& output : self.outputs) {
              all.insert(all.end(), output.tokens.begin(), output.tokens.end());
            }
            return all;
          },
          "The tokens of all sequences, one sequence after another.")
      .def_property_readonly(
          "counts",
          [](const StepOutputs& self) {
            return of_each(self.outputs, [](const Output& output) {
              return static_cast<int>(output.tokens.size());
            });
          },
          "The number of tokens of each sequence.")
      .def_property_readonly(
          "any_finished",
          [](const StepOutputs& self) {
            return std::ranges::any_of(self.outputs, &Output::finished);
          },
          "Has the device ended a sequence?")
      .def(
          "__getitem__",
          [](const StepOutputs& self, size_t i) {
            if (i >= self.outputs.size()) throw py::index_error();
            return self.outputs[i];
          },
          py::arg("i"), "The output of sequence number `i`.");
}

}  // namespace

void bind_outputs(pybind11::module_& m) {
  bind_slot_outputs(m);
  bind_step_outputs(m);
}

}  // namespace cpmcu
