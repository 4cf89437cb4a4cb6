#include "core/device.h"

#include <omp.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace cpmcu {
namespace {

// Reads a "Name:   123 kB" line of /proc/meminfo, in bytes; 0 if there is none.
int64_t meminfo_bytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  int64_t kib = 0;
  while (file >> name >> kib) {
    std::getline(file, unit);
    if (name == key + ":") return kib * 1024;
  }
  return 0;
}

std::atomic<int64_t> num_allocations{0}, num_synchronizations{0};

DeviceInfo cpu_info() {
  DeviceInfo info;
  info.name = "CPU";
  info.total_bytes = meminfo_bytes("MemTotal");
  info.free_bytes = meminfo_bytes("MemAvailable");
  return info;
}

}  // namespace

#ifdef CPMCU_WITH_CUDA

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver or no device is an error only when a device is requested
    return 0;
  }
  return count;
}

namespace {

// 0 if the driver does not know the attribute.
int attribute_of(int index, cudaDeviceAttr attribute) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, index) != cudaSuccess) cudaGetLastError();
  return value;
}

// Memory bytes in one SM clock cycle. 0 for a MIG instance, whose memory bandwidth is unknown.
double bytes_per_cycle(const std::string& name, int index) {
  const double clock = attribute_of(index, cudaDevAttrClockRate);
  if (clock == 0 || name.find(" MIG ") != std::string::npos) return 0;
  // Data moves at both edges of the clock.
  const double memory_clock = 2.0 * attribute_of(index, cudaDevAttrMemoryClockRate);
  return memory_clock * attribute_of(index, cudaDevAttrGlobalMemoryBusWidth) / 8 / clock;
}

}  // namespace

DeviceInfo device_info(Device device) {
  if (!device.is_cuda()) return cpu_info();
  const int count = device_count();
  CHECK(device.index >= 0 && device.index < count,
        "CUDA device {} was requested, but the machine has {}", device.index, count);
  cudaDeviceProp properties{};
  CHECK_CUDA(cudaGetDeviceProperties(&properties, device.index));
  set_device(device);
  size_t free_bytes = 0, total_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  DeviceInfo info;
  info.name = properties.name;
  info.compute_capability = format_text("{}.{}", properties.major, properties.minor);
  info.total_bytes = static_cast<int64_t>(total_bytes);
  info.free_bytes = static_cast<int64_t>(free_bytes);
  info.sm_count = properties.multiProcessorCount;
  info.sm_shared_bytes = static_cast<int64_t>(properties.sharedMemPerMultiprocessor);
  info.l2_bytes = properties.l2CacheSize;
  info.bytes_per_cycle = bytes_per_cycle(info.name, device.index);
  CHECK_CUDA(cudaDriverGetVersion(&info.driver_version));
  info.is_shared = attribute_of(device.index, cudaDevAttrMpsEnabled) != 0;
  return info;
}

void set_device(Device device) {
  if (device.is_cuda()) CHECK_CUDA(cudaSetDevice(device.index));
}

void enable_peer_access(Device device, Device peer) {
  int can_access = 0;
  CHECK_CUDA(cudaDeviceCanAccessPeer(&can_access, device.index, peer.index));
  CHECK(can_access != 0,
        "GPU {} cannot access the memory of GPU {}, expected GPUs of one host with peer access "
        "(`nvidia-smi topo -p2p r` shows it)",
        device.index, peer.index);
  set_device(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer.index, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  CHECK_CUDA(status);
}

Stream create_stream(Device device) {
  if (!device.is_cuda()) return nullptr;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void destroy_stream(Device device, Stream stream) noexcept {
  if (device.is_cuda() && stream != nullptr) cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

void synchronize(Device device, Stream stream) {
  ++num_synchronizations;
  if (device.is_cuda()) CHECK_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

bool query(Device device, Stream stream) {
  if (!device.is_cuda()) return true;
  const cudaError_t status = cudaStreamQuery(static_cast<cudaStream_t>(stream));
  if (status == cudaErrorNotReady) return false;
  CHECK_CUDA(status);
  return true;
}

Event::Event(Device device) : device_(device) {
  if (!device_.is_cuda()) return;
  set_device(device_);
  cudaEvent_t event = nullptr;
  CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  event_ = event;
}

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}

void Event::record(Stream stream) {
  if (!device_.is_cuda()) return;
  CHECK_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event_), static_cast<cudaStream_t>(stream)));
}

void Event::wait() const {
  ++num_synchronizations;
  if (device_.is_cuda()) CHECK_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(event_)));
}

#else

int device_count() { return 0; }
int code_capability() { return 0; }

DeviceInfo device_info(Device device) {
  set_device(device);
  return cpu_info();
}

void set_device(Device device) {
  CHECK(!device.is_cuda(),
        "device \"cuda\" was requested, but this build has no CUDA; build with nvcc on the PATH");
}

void enable_peer_access(Device, Device) {}
Stream create_stream(Device) { return nullptr; }
void destroy_stream(Device, Stream) noexcept {}
void synchronize(Device, Stream) { ++num_synchronizations; }
bool query(Device, Stream) { return true; }
Event::Event(Device device) : device_(device) {}
Event::~Event() = default;
void Event::record(Stream) {}
void Event::wait() const { ++num_synchronizations; }

#endif

void set_num_threads(int threads) {
  static const int by_default = omp_get_max_threads();  // before anything here changes it
  omp_set_num_threads(threads > 0 ? threads : by_default);
}

Device device_named(const std::string& name, int index) {
  CHECK(name == "cpu" || name == "cuda", "device is \"{}\", expected cpu or cuda", name);
  return {name == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu, index};
}

DeviceCounters device_counters() { return {num_allocations, num_synchronizations}; }

void* allocate(Device device, int64_t bytes) {
  if (bytes == 0) return nullptr;
  ++num_allocations;
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    void* data = nullptr;
    set_device(device);
    const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw Error(ErrorKind::kMemory,
                  format_text("the GPU refused an allocation of {} MiB; {} MiB are free",
                              bytes >> 20, device_info(device).free_bytes >> 20));
    }
    CHECK_CUDA(status);
    return data;
  }
#endif
  void* data = std::aligned_alloc(256, (static_cast<size_t>(bytes) + 255) / 256 * 256);
  if (data == nullptr) {
    throw Error(ErrorKind::kMemory,
                format_text("the machine refused an allocation of {} MiB; {} MiB are "
                            "free",
                            bytes >> 20, device_info(device).free_bytes >> 20));
  }
  return data;
}

void release(Device device, void* data) noexcept {
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    cudaFree(data);
    return;
  }
#endif
  (void)device;
  std::free(data);
}

void* allocate_pinned(Device device, int64_t bytes) {
  ++num_allocations;
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    void* data = nullptr;
    set_device(device);
    CHECK_CUDA(cudaHostAlloc(&data, static_cast<size_t>(bytes),
                             cudaHostAllocMapped | cudaHostAllocPortable));
    return data;
  }
#endif
  return allocate(device, bytes);
}

void* allocate_pinned_large(Device device, int64_t bytes) {
  // Only the beginning is aligned to huge pages: the size is not rounded up to them.
  constexpr int64_t kPage = 4 << 10, kHugePage = 2 << 20;
  const auto size = static_cast<size_t>((bytes + kPage - 1) / kPage * kPage);
  void* data = nullptr;
  if (posix_memalign(&data, bytes < kHugePage ? kPage : kHugePage, size) != 0) {
    throw Error(ErrorKind::kMemory,
                format_text("the system has no {} bytes of host memory", bytes));
  }
  ++num_allocations;
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    madvise(data, size, MADV_HUGEPAGE);
    std::memset(data, 0, size);  // page faults happen here, not under the driver's lock
    set_device(device);
    const cudaError_t status = cudaHostRegister(data, size, cudaHostRegisterPortable);
    if (status != cudaSuccess) std::free(data);
    CHECK_CUDA(status);
  }
#endif
  (void)device;
  return data;
}

void release_pinned_large(Device device, void* data) noexcept {
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) cudaHostUnregister(data);
#endif
  (void)device;
  std::free(data);
}

void release_pinned(Device device, void* data) noexcept {
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    cudaFreeHost(data);
    return;
  }
#endif
  release(device, data);
}

void copy_to_device(Device device, void* dst, const void* src, int64_t bytes, Stream stream) {
  if (bytes == 0) return;
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    CHECK_CUDA(cudaMemcpyAsync(dst, src, static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                               static_cast<cudaStream_t>(stream)));
    return;
  }
#endif
  (void)device, (void)stream;
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}

void copy_to_host(Device device, void* dst, const void* src, int64_t bytes, Stream stream) {
  if (bytes == 0) return;
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    CHECK_CUDA(cudaMemcpyAsync(dst, src, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                               static_cast<cudaStream_t>(stream)));
    return;
  }
#endif
  (void)device, (void)stream;
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}

void copy_strided(Device device, const StridedCopy& copy, Stream stream) {
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    CHECK_CUDA(cudaMemcpy2DAsync(copy.dst, static_cast<size_t>(copy.dst_pitch), copy.src,
                                 static_cast<size_t>(copy.src_pitch),
                                 static_cast<size_t>(copy.width), static_cast<size_t>(copy.height),
                                 cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
    return;
  }
#endif
  (void)device, (void)stream;
  for (int64_t i = 0; i < copy.height; ++i) {
    std::memcpy(static_cast<char*>(copy.dst) + i * copy.dst_pitch,
                static_cast<const char*>(copy.src) + i * copy.src_pitch,
                static_cast<size_t>(copy.width));
  }
}

void copy_on_device(Device device, void* dst, const void* src, int64_t bytes, Stream stream) {
  if (bytes == 0) return;
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    CHECK_CUDA(cudaMemcpyAsync(dst, src, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                               static_cast<cudaStream_t>(stream)));
    return;
  }
#endif
  (void)device, (void)stream;
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}

void fill_bytes(Device device, void* dst, int value, int64_t bytes, Stream stream) {
  if (bytes == 0) return;
#ifdef CPMCU_WITH_CUDA
  if (device.is_cuda()) {
    CHECK_CUDA(
        cudaMemsetAsync(dst, value, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
    return;
  }
#endif
  (void)device, (void)stream;
  std::memset(dst, value, static_cast<size_t>(bytes));
}

}  // namespace cpmcu
