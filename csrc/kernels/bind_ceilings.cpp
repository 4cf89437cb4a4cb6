// C.ceilings(device): measures the bandwidths of the machine, as ceilings for benchmarks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <vector>

#include "bindings.h"
#include "kernels/stream_read.h"

namespace cpmcu {
namespace {

constexpr int kRepeats = 7;

// Bytes per second: the median of kRepeats runs of `work`, which moves `bytes`.
template <typename Work>
double rate(const Context& ctx, double bytes, const Work& work) {
  std::vector<double> rates;
  for (int i = 0; i < kRepeats + 1; ++i) {
    synchronize(ctx.device, ctx.stream);
    const auto begin = std::chrono::steady_clock::now();
    work();
    synchronize(ctx.device, ctx.stream);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (i > 0) rates.push_back(bytes / seconds.count());  // the first run is the warm-up
  }
  std::nth_element(rates.begin(), rates.begin() + kRepeats / 2, rates.end());
  return rates[kRepeats / 2];
}

// Owns device memory.
struct Buffer {
  Buffer(Device d, int64_t bytes) : device(d), data(allocate(d, bytes)) {}
  ~Buffer() { release(device, data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Device device;
  void* data;
};

std::map<std::string, double> ceilings(const std::string& device, int index) {
  const DeviceContext ctx(device_named(device, index));
  const int64_t bytes = ctx.device.is_cuda() ? int64_t{4} << 30 : int64_t{1} << 28;
  std::map<std::string, double> rates;
  {
    const Buffer memory(ctx.device, bytes), sums(ctx.device, 4 * kStreamReadCtas);
    // Random-looking content: constant memory reads faster.
    std::vector<uint32_t> noise(1 << 22);
    uint32_t state = 1;
    for (uint32_t& word : noise) word = state = state * 1664525u + 1013904223u;
    const int64_t step = static_cast<int64_t>(4 * noise.size());
    for (int64_t at = 0; at < bytes; at += step) {
      copy_to_device(ctx.device, static_cast<char*>(memory.data) + at, noise.data(), step,
                     ctx.stream);
    }
    const StreamReadParams params{.in = Tensor(memory.data, DType::kI32, {bytes / 4}),
                                  .out = Tensor(sums.data, DType::kI32, {kStreamReadCtas})};
    rates["read_bytes_per_second"] =
        rate(ctx, static_cast<double>(bytes), [&] { stream_read(ctx, params); });
    const int64_t part = bytes / 4;
    void* pinned = allocate_pinned(ctx.device, part);
    rates["host_to_device_bytes_per_second"] = rate(ctx, static_cast<double>(part), [&] {
      copy_to_device(ctx.device, memory.data, pinned, part, ctx.stream);
    });
    release_pinned(ctx.device, pinned);
  }
  return rates;
}

}  // namespace

void bind_ceilings(pybind11::module_& m) {
  m.def(
      "ceilings", &ceilings, pybind11::arg("device"), pybind11::arg("index") = 0,
      pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Measures read_bytes_per_second and host_to_device_bytes_per_second of \"cpu\" or \"cuda\".");
}

}  // namespace cpmcu
