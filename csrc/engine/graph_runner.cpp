#include "engine/graph_runner.h"

#include <algorithm>
#include <mutex>

namespace cpmcu {

#ifdef CPMCU_WITH_CUDA

namespace {

// Captures the launches that `launches` enqueues, and instantiates the graph.
cudaGraphExec_t capture(cudaStream_t stream, const std::function<void()>& launches) {
  cudaGraph_t graph = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    launches();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  CHECK_CUDA(status);
  return executable;
}

// The GraphRunner that ran last on a device. Kept until the process ends.
struct Turn {
  std::mutex mutex;
  const GraphRunner* owner = nullptr;
  cudaEvent_t done = nullptr;  // recorded after the last run of `owner`
};
Turn& turn_of(int device) {
  static std::mutex mutex;
  static std::map<int, Turn> turns;
  const std::lock_guard lock(mutex);
  return turns[device];
}

}  // namespace

GraphRunner::~GraphRunner() {
  for (const auto& [key, entry] : graphs_) {
    if (entry.graph != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(entry.graph));
  }
}

void GraphRunner::drop_oldest() {
  const auto oldest = std::min_element(
      graphs_.begin(), graphs_.end(),
      [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; });
  // CUDA frees a graph in flight only after its run.
  if (oldest->second.graph != nullptr) {
    CHECK_CUDA(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(oldest->second.graph)));
  }
  graphs_.erase(oldest);
}

// If another engine ran last on the device, this run waits for the end of that run.
void GraphRunner::run(const Key& key, const std::function<void()>& launches) {
  if (!ctx_.device.is_cuda()) return launches();
  Turn& turn = turn_of(ctx_.device.index);
  const auto stream = static_cast<cudaStream_t>(ctx_.stream);
  const std::lock_guard lock(turn.mutex);
  if (turn.owner != this && turn.done != nullptr) {
    CHECK_CUDA(cudaStreamWaitEvent(stream, turn.done, 0));
  }
  turn.owner = this;
  try {
    launch(key, launches);
  } catch (...) {
    cudaStreamSynchronize(stream);  // no event marks the end of the launches so far
    throw;
  }
  if (turn.done == nullptr) {
    CHECK_CUDA(cudaEventCreateWithFlags(&turn.done, cudaEventDisableTiming));
  }
  CHECK_CUDA(cudaEventRecord(turn.done, stream));
}

void GraphRunner::launch(const Key& key, const std::function<void()>& launches) {
  if (!enabled_) return launches();
  const auto [it, is_new] = graphs_.try_emplace(key);
  Entry& entry = it->second;
  entry.last_use = ++num_uses_;
  if (graphs_.size() > kMaxGraphs) drop_oldest();
  if (is_new) return launches();
  const auto stream = static_cast<cudaStream_t>(ctx_.stream);
  if (entry.graph == nullptr) {
    entry.graph = capture(stream, launches);
    ++num_captures_;
  }
  CHECK_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(entry.graph), stream));
  ++num_replays_;
}

#else

GraphRunner::~GraphRunner() = default;

void GraphRunner::run(const Key&, const std::function<void()>& launches) { launches(); }

#endif

}  // namespace cpmcu
