// Python bindings of MemoryPlan, PagePool, PageGroup and divide_pages: they work on the host only.
#include "engine/bind_memory.h"

#include "bindings.h"
#include "state/page_group.h"
#include "state/page_shares.h"

namespace py = pybind11;

namespace cpmcu {

std::vector<PlanRow> plan_rows(const MemoryPlan& plan) {
  std::vector<PlanRow> rows;
  for (const MemoryPlan::Buffer& buffer : plan.buffers()) {
    using namespace py::literals;
    rows.push_back(py::dict("name"_a = buffer.name, "group"_a = buffer.group,
                            "offset"_a = buffer.offset, "bytes"_a = buffer.bytes,
                            "first"_a = buffer.first, "last"_a = buffer.last));
  }
  return rows;
}

void bind_memory_plan(py::module_& m) {
  py::class_<MemoryPlan>(m, "MemoryPlan",
                         "Buffers with sizes and lifetimes, and the offsets that they get; see "
                         "csrc/core/arena.h.")
      .def(py::init<>())
      .def("add", &MemoryPlan::add, py::arg("name"), py::arg("group"), py::arg("bytes"),
           "Adds a persistent buffer; returns its number.")
      .def("add_scratch", &MemoryPlan::add_scratch, py::arg("name"), py::arg("bytes"),
           py::arg("first"), py::arg("last"),
           R"(Adds a buffer that lives from phase `first` to phase `last`, both included.

           Buffers of one name are one buffer.)")
      .def("assign", &MemoryPlan::assign, "Gives each buffer its offset; returns bytes in all.")
      .def("rows", &plan_rows,
           "{name, group, offset, bytes, first, last} of each buffer; first is -1: persistent.");

  py::class_<PagePool>(m, "PagePool",
                       "Numbers of pages with reference counts, without memory; see "
                       "csrc/state/page_pool.h.")
      .def(py::init<int>(), py::arg("num_pages"))
      .def("num_owners", &PagePool::num_owners, py::arg("page"),
           "0 if nobody has it. RuntimeError for a page that is not there, as below.")
      .def("take", &PagePool::take, "A page with one owner. RuntimeError if none is free.")
      .def("share", &PagePool::share, py::arg("page"),
           "One more owner. RuntimeError for a page without one.")
      .def("release", &PagePool::release, py::arg("page"), py::arg("num_steps"),
           R"(One owner less. RuntimeError for a page without one.

           `num_steps`: the steps that were launched until now; they may read the page. RuntimeError
           if it is less than before.)")
      .def("retire", &PagePool::retire, py::arg("num_done"),
           "So many steps are done: pages that no owner and no other step holds are free.")
      .def_property_readonly("num_pages", &PagePool::num_pages)
      .def_property_readonly("num_free", &PagePool::num_free)
      .def_property_readonly("num_retiring", &PagePool::num_retiring,
                             "Pages without an owner that steps in flight may still read.");

  py::class_<PageGroup>(m, "PageGroup",
                        "The pages of the layers with one window; see csrc/state/page_group.h.")
      .def(py::init([](int window, int num_pages, int num_slots) {
             PageGroup group(window);
             group.allocate(num_pages, num_slots);
             return group;
           }),
           py::arg("window"), py::arg("num_pages"), py::arg("num_slots"))
      .def("first_read", &PageGroup::first_read, py::arg("length"),
           "The first page of a sequence that its tokens from position `length` on read.")
      .def("most_pages", &PageGroup::most_pages, py::arg("num_entries"),
           "Most pages of so many consecutive entries and the window before them.")
      .def(
          "of_slot",
          [](const PageGroup& group, int slot) {
            const HeldPages& held = group.of_slot(slot);
            return std::pair(held.first, held.pages);
          },
          py::arg("slot"), "The number of the first page within the sequence, and the pages.")
      .def("reserve", &PageGroup::reserve, py::arg("slot"), py::arg("length"),
           py::arg("num_entries"), py::arg("num_steps"), "False if too few pages are free.")
      .def("num_missing", &PageGroup::num_missing, py::arg("slot"), py::arg("length"),
           py::arg("num_entries"), "Pages that `reserve` lacks, even after the steps in flight.")
      .def("share", &PageGroup::share, py::arg("slot"), py::arg("first"), py::arg("pages"),
           "Gives a slot without pages those of other owners, from page `first` on.")
      .def("release", &PageGroup::release, py::arg("slot"), py::arg("num_steps"),
           "All pages of the slot.")
      .def_property_readonly(
          "pool", [](PageGroup& group) -> PagePool& { return group.pool(); },
          py::return_value_policy::reference_internal, "Owners of the pages.");

  m.def(
      "divide_pages",
      [](const std::vector<std::array<int64_t, 5>>& groups, int64_t bytes) {
        std::vector<PageDemand> demands;
        for (const auto& [page_bytes, least, sequence, running, most] : groups) {
          demands.push_back({page_bytes, least, sequence, running, most});
        }
        return divide_pages(demands, bytes);
      },
      py::arg("groups"), py::arg("bytes"),
      "Pages of each group, of (page_bytes, least, sequence, running, most); see "
      "csrc/state/page_shares.h.");
}

}  // namespace cpmcu
