// The device: memory, copies, streams, events. This header hides whether the build has CUDA.
//
// On the CPU back end every call is synchronous and a stream is a null pointer.
#pragma once

#include <cstdint>
#include <string>

#include "core/check.h"

namespace cpmcu {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  bool is_cuda() const { return kind == DeviceKind::kCuda; }
};

// "cpu" or "cuda"; throws for other names.
Device device_named(const std::string& name, int index);

using Stream = void*;  // cudaStream_t

struct DeviceInfo {
  std::string name;
  std::string compute_capability;  // such as "9.0"
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  int sm_count = 0;
  int64_t sm_shared_bytes = 0;  // shared memory of one SM
  int64_t l2_bytes = 0;
  // Peak memory bytes in one SM clock cycle; 0: not known.
  double bytes_per_cycle = 0;
  int driver_version = 0;  // CUDA version of the driver: 13000 is 13.0; 0 without a driver
  bool is_shared = false;  // kernels of other processes run at the same time (MPS)
};

int device_count();  // number of CUDA devices; 0 without a driver
DeviceInfo device_info(Device device);
// __CUDA_ARCH__ / 10 of the compiled code that runs on the current CUDA device.
int code_capability();

void set_device(Device device);  // makes it the current device of the calling thread
// Threads that run CPU kernels for the calling thread; 0: OpenMP's number.
void set_num_threads(int threads);
// Lets kernels of `device` access the memory of GPU `peer`. Throws if the hardware does not allow
// it.
void enable_peer_access(Device device, Device peer);

Stream create_stream(Device device);
void destroy_stream(Device device, Stream stream) noexcept;
void synchronize(Device device, Stream stream);

// Device memory. Throws Error(kMemory).
void* allocate(Device device, int64_t bytes);
void release(Device device, void* data) noexcept;
// Page-locked host memory that the device can access at the same address.
void* allocate_pinned(Device device, int64_t bytes);
void release_pinned(Device device, void* data) noexcept;
// Large page-locked buffers for copies. The operating system allocates the pages before the driver
// locks them, so other threads can launch kernels meanwhile. Kernels cannot access this memory; it
// is for copies only.
void* allocate_pinned_large(Device device, int64_t bytes);
void release_pinned_large(Device device, void* data) noexcept;

// Allocations of device or pinned memory and waits for a device, counted in this process. A decode
// step must do neither.
struct DeviceCounters {
  int64_t allocations = 0;
  int64_t synchronizations = 0;
};
DeviceCounters device_counters();

// Copies in the order of `stream`. If the host memory is not pinned, the call may block.
void copy_to_device(Device device, void* dst, const void* src, int64_t bytes, Stream stream);
void copy_to_host(Device device, void* dst, const void* src, int64_t bytes, Stream stream);
// A copy of `height` runs of `width` bytes. The runs begin `dst_pitch` and `src_pitch` bytes apart.
// One side is pinned memory.
struct StridedCopy {
  void* dst = nullptr;
  int64_t dst_pitch = 0;
  const void* src = nullptr;
  int64_t src_pitch = 0;
  int64_t width = 0, height = 0;
};
void copy_strided(Device device, const StridedCopy& copy, Stream stream);
void copy_on_device(Device device, void* dst, const void* src, int64_t bytes, Stream stream);
void fill_bytes(Device device, void* dst, int value, int64_t bytes, Stream stream);

// Whether all work of the stream is done. Throws if the stream has an error.
bool query(Device device, Stream stream);

// A CUDA event: a point in a stream that the host can wait for.
class Event {
 public:
  explicit Event(Device device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Stream stream);  // marks the work that is enqueued so far
  void wait() const;  // waits for the work that `record` marked; throws if the device failed

 private:
  Device device_;
  void* event_ = nullptr;  // cudaEvent_t
};

}  // namespace cpmcu

#ifdef CPMCU_WITH_CUDA
#include <cuda_runtime.h>
#define CHECK_CUDA(call)                                                                       \
  do {                                                                                         \
    const cudaError_t status_ = (call);                                                        \
    if (status_ != cudaSuccess) {                                                              \
      throw ::cpmcu::Error(                                                                    \
          status_ == cudaErrorMemoryAllocation ? ::cpmcu::ErrorKind::kMemory                   \
                                               : ::cpmcu::ErrorKind::kRuntime,                 \
          ::cpmcu::format_text("CUDA reports \"{}\" ({}:{}: {})", cudaGetErrorString(status_), \
                               __FILE__, __LINE__, #call));                                    \
    }                                                                                          \
  } while (false)
#define CHECK_LAUNCH() CHECK_CUDA(cudaGetLastError())
#endif
