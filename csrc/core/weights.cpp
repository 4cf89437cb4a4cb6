#include "core/weights.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "core/finite.h"
#include "core/half.h"

namespace cpmcu {
namespace {

constexpr int64_t kChunkBytes = 8 << 20;
// Bytes that are read and then checked, while they are in the cache.
constexpr int64_t kPartBytes = 1 << 18;
constexpr int kNumReaders = 8;

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

int64_t elements_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

// Throws the error for number `index` of tensor `name`, which is NaN or infinite.
[[noreturn]] void refuse(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                         const void* number, int64_t index) {
  float value = NAN;  // e4m3 has no infinity
  if (dtype != DType::kE4M3) {
    dispatch_host_dtype(
        dtype, [&](auto type) { value = to_float(*static_cast<const decltype(type)*>(number)); });
  }
  std::vector<int64_t> place(shape.size());
  int64_t rest = index;
  for (size_t i = shape.size(); i-- > 0; rest /= shape[i]) place[i] = rest % shape[i];
  const char* what = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  throw Error(
      ErrorKind::kInvalid,
      format_text("tensor \"{}\" holds {} at {}, expected finite numbers: the file is damaged",
                  name, what, text_of(place)));
}

// The elements of a stored tensor that its destination takes: those in `ranges` of every `stride`
// elements. `run`: number of elements in all ranges.
struct Runs {
  int64_t run = 0, stride;
  std::vector<WeightTable::Range> ranges;

  explicit Runs(const WeightTable::Entry& entry) : ranges(entry.ranges) {
    const std::vector<int64_t>& shape = entry.shape;
    const auto dim = static_cast<size_t>(std::max(entry.cut_dim, 0));
    int64_t inner = 1;
    for (size_t i = dim + 1; i < shape.size(); ++i) inner *= shape[i];
    stride = shape.empty() ? 1 : shape[dim] * inner;
    if (entry.cut_dim < 0) ranges = {{0, shape.empty() ? 1 : shape[dim]}};
    for (WeightTable::Range& range : ranges) {
      range.begin *= inner, range.size *= inner;
      run += range.size;
    }
  }
  // The place in the stored tensor of element `index` of the destination.
  int64_t place(int64_t index) const { return find(index).begin; }
  // Cuts the elements [first, first + count) of the destination into ranges that are contiguous in
  // the stored tensor, and calls use(place, count) for each.
  template <typename Use>
  void each(int64_t first, int64_t count, const Use& use) const {
    if (run == stride && ranges.size() == 1) return use(first, count);
    while (count > 0) {
      const WeightTable::Range rest = find(first);
      const int64_t length = std::min(count, rest.size);
      use(rest.begin, length);
      first += length, count -= length;
    }
  }

 private:
  // The rest of the range that element `index` of the destination is in.
  WeightTable::Range find(int64_t index) const {
    int64_t within = index % run;
    size_t i = 0;
    while (within >= ranges[i].size) within -= ranges[i++].size;
    return {index / run * stride + ranges[i].begin + within, ranges[i].size - within};
  }
};

// Divides a dimension of size `whole`, of which a rank has `part` elements. Returns a range of
// `rank` in each section. `sections`, `part_sections`: the sections' sizes in `whole` and in
// `part`, up to a factor. Empty if the dimension cannot be divided.
std::vector<WeightTable::Range> divide(int64_t whole, const std::vector<int64_t>& sections,
                                       int64_t part, const std::vector<int64_t>& part_sections,
                                       int rank, int num_ranks) {
  const int64_t sum = std::reduce(sections.begin(), sections.end());
  const int64_t part_sum = std::reduce(part_sections.begin(), part_sections.end());
  std::vector<WeightTable::Range> ranges;
  int64_t first = 0;
  for (size_t i = 0; i < sections.size(); ++i) {
    const int64_t size = whole * sections[i] / sum, own = part * part_sections[i] / part_sum;
    const int64_t parts = own > 0 ? size / own : 0;
    if (size * sum != whole * sections[i] || own * part_sum != part * part_sections[i] ||
        parts == 0 || parts * own != size || num_ranks % parts != 0) {
      return {};
    }
    // If a section has fewer parts than ranks, several ranks have the same part.
    ranges.push_back({first + rank * parts / num_ranks * own, own});
    first += size;
  }
  return ranges;
}

// The whole dimension of size `whole` in three ranges: `own`, the elements after it, those before
// it.
std::vector<WeightTable::Range> with_rest(const WeightTable::Range& own, int64_t whole) {
  std::vector<WeightTable::Range> ranges{own};
  const int64_t end = own.begin + own.size;
  if (end < whole) ranges.push_back({end, whole - end});
  if (own.begin > 0) ranges.push_back({0, own.begin});
  return ranges;
}

// Throws if one of `count` numbers of tensor `name`, starting at index `first` of the destination,
// is NaN or infinite.
void check_finite(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                  const void* numbers, const Runs& runs, int64_t first, int64_t count) {
  const int64_t found = find_not_finite(dtype, numbers, count);
  if (found < 0) return;
  const char* number = static_cast<const char*>(numbers) + found * size_of(dtype);
  refuse(name, dtype, shape, number, runs.place(first + found));
}

// Checks the tensors that were copied to a CUDA device without conversion, as check_finite does.
void check_finite_on_device(const Context& ctx, WeightTable& table,
                            const std::vector<FileEntry>& entries) {
  std::vector<const FileEntry*> copied;
  std::vector<DeviceNumbers> numbers;
  for (const FileEntry& entry : entries) {
    const WeightTable::Entry& target = table.find(entry.name, entry.dtype, entry.shape);
    const Tensor& tensor = target.destination;
    const bool has_nan = is_floating(entry.dtype) || entry.dtype == DType::kE4M3;
    if (tensor.dtype() != entry.dtype || !has_nan) continue;
    copied.push_back(&entry);
    numbers.push_back({entry.dtype, tensor.data(), tensor.num_elements()});
  }
  const std::vector<int64_t> found = find_not_finite_on_device(ctx, numbers);
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] < 0) continue;
    const int64_t size = size_of(numbers[i].dtype);
    float number = 0;  // holds one number of any dtype
    copy_to_host(ctx.device, &number, static_cast<const char*>(numbers[i].data) + found[i] * size,
                 size, ctx.stream);
    synchronize(ctx.device, ctx.stream);
    const FileEntry& entry = *copied[i];
    const Runs runs(table.find(entry.name, entry.dtype, entry.shape));
    refuse(entry.name, entry.dtype, entry.shape, &number, runs.place(found[i]));
  }
}

// Converts finite numbers. Throws if a number of tensor `name` becomes infinite.
void convert(const std::string& name, void* out, DType to, const void* in, DType from,
             int64_t count) {
  dispatch_host_dtype(from, [&](auto in_type) {
    dispatch_host_dtype(to, [&](auto out_type) {
      const auto* source = static_cast<const decltype(in_type)*>(in);
      auto* target = static_cast<decltype(out_type)*>(out);
      // Only the largest magnitude is checked: checking each result would take twice as long.
      float largest = 0, largest_magnitude = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float value = to_float(source[i]), magnitude = std::fabs(value);
        target[i] = from_float<decltype(out_type)>(value);
        const bool is_larger = magnitude > largest_magnitude;
        largest = is_larger ? value : largest;
        largest_magnitude = is_larger ? magnitude : largest_magnitude;
      }
      CHECK(std::isfinite(to_float(from_float<decltype(out_type)>(largest))),
            "tensor \"{}\" holds {}, which is beyond {}: load it as bfloat16 or float32", name,
            largest, name_of(to));
    });
  });
}

// A file that several threads read at different offsets.
class File {
 public:
  explicit File(const std::string& path) : path_(path), fd_(::open(path.c_str(), O_RDONLY)) {
    CHECK(fd_ >= 0, "cannot open {}: {}", path, std::strerror(errno));
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void read(void* out, int64_t offset, int64_t bytes) const {
    char* at = static_cast<char*>(out);
    while (bytes > 0) {
      const ssize_t got = ::pread(fd_, at, static_cast<size_t>(bytes), offset);
      if (got < 0 && errno == EINTR) continue;
      CHECK(got >= 0, "cannot read {} at byte {}: {}", path_, offset, std::strerror(errno));
      CHECK(got > 0, "{} ends at byte {}, but a tensor needs {} bytes more: the file is truncated",
            path_, offset, bytes);
      at += got, offset += got, bytes -= got;
    }
  }

 private:
  std::string path_;
  int fd_;
};

// The part of one tensor that a reader reads at a time.
struct Chunk {
  const FileEntry* entry;
  Tensor destination;
  Runs runs;
  int64_t first;  // index of the first element in the destination
  int64_t count;

  void read(const File& file, int64_t from, int64_t num, char* out) const {
    const int64_t size = size_of(entry->dtype);
    runs.each(from, num, [&](int64_t place, int64_t length) {
      file.read(out, entry->offset + place * size, length * size);
      out += length * size;
    });
  }
};

}  // namespace

void WeightTable::add(const std::string& name, const Tensor& destination, bool required) {
  CHECK_STATE(!entries_.contains(name), "tensor {} is expected twice", name);
  Entry entry{.destination = destination, .required = required};
  for (int i = 0; i < destination.num_dims(); ++i) entry.shape.push_back(destination.size(i));
  entries_[name] = std::move(entry);
}

void WeightTable::set_sections(const std::string& module, const std::vector<int64_t>& rows) {
  const std::string prefix = module + ".";
  for (auto it = entries_.lower_bound(prefix);
       it != entries_.end() && it->first.starts_with(prefix); ++it) {
    it->second.sections = rows;
  }
}

void WeightTable::take_parts(const WeightTable& whole, const WeightTable& divided, int rank,
                             int num_ranks) {
  for (auto& [name, entry] : entries_) {
    const auto found = whole.entries_.find(name), least = divided.entries_.find(name);
    if (found == whole.entries_.end() || least == divided.entries_.end()) continue;
    const Entry& target = least->second;
    const std::vector<int64_t> own = std::exchange(entry.shape, found->second.shape);
    const std::vector<int64_t>& part = target.shape;
    bool divides = part.size() == entry.shape.size() && own.size() == part.size();
    const auto sections_of = [](const Entry& of) {
      return of.sections.empty() ? std::vector<int64_t>{1} : of.sections;
    };
    for (size_t i = 0; divides && i < part.size(); ++i) {
      if (part[i] == entry.shape[i]) continue;
      divides = entry.cut_dim < 0;
      entry.cut_dim = static_cast<int>(i);
      entry.ranges = divide(entry.shape[i], sections_of(found->second), part[i],
                            sections_of(target), rank, num_ranks);
      divides &= !entry.ranges.empty();
      if (!divides || own[i] == part[i]) continue;
      divides = own[i] == entry.shape[i] && entry.ranges.size() == 1;
      entry.ranges = with_rest(entry.ranges[0], entry.shape[i]);
    }
    CHECK(divides, "tensor \"{}\" of shape {} cannot be divided among {} GPUs into {}", name,
          text_of(entry.shape), num_ranks, text_of(part));
  }
}

WeightTable::Entry& WeightTable::find(const std::string& name, DType dtype,
                                      const std::vector<int64_t>& shape) {
  auto it = entries_.find(name);
  CHECK(it != entries_.end(), "tensor \"{}\" is not part of this model", name);
  const Tensor& destination = it->second.destination;
  CHECK(shape == it->second.shape, "tensor \"{}\" has shape {}, expected {}", name, text_of(shape),
        text_of(it->second.shape));
  CHECK(dtype == destination.dtype() || (is_floating(dtype) && is_floating(destination.dtype())),
        "tensor \"{}\" has dtype {}, expected {}", name, name_of(dtype),
        name_of(destination.dtype()));
  return it->second;
}

void WeightTable::check_complete() const {
  std::string missing;
  int count = 0;
  for (const auto& [name, entry] : entries_) {
    if (entry.loaded || !entry.required) continue;
    if (++count <= 8) missing += (count > 1 ? ", " : "") + name;
  }
  CHECK(count == 0, "the checkpoint lacks {} tensor(s) that this model needs: {}{}", count, missing,
        count > 8 ? ", …" : "");
}

// One reader thread's stream and pinned buffers.
class WeightLoader::Reader {
 public:
  explicit Reader(Device device) : device_(device), stream_(create_stream(device)) {}
  ~Reader() {
    if (raw_ != nullptr) release_pinned(device_, raw_);
    destroy_stream(device_, stream_);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void load(const File& file, const Chunk& chunk) {
    const DType from = chunk.entry->dtype, to = chunk.destination.dtype();
    char* destination = chunk.destination.as<char>() + chunk.first * size_of(to);
    if (!device_.is_cuda() && from == to) {
      read(file, chunk, destination);
      return;
    }
    if (raw_ == nullptr) raw_ = static_cast<char*>(allocate_pinned(device_, kChunkBytes));
    const char* source = raw_;
    if (from == to) {  // the device checks these numbers
      chunk.read(file, chunk.first, chunk.count, raw_);
    } else {
      read(file, chunk, raw_);
      converted_.resize(static_cast<size_t>(chunk.count * size_of(to)));
      convert(chunk.entry->name, converted_.data(), to, raw_, from, chunk.count);
      source = converted_.data();
    }
    copy_to_device(device_, destination, source, chunk.count * size_of(to), stream_);
    // raw_ is free only after the copies; other readers go on meanwhile.
    synchronize(device_, stream_);
  }

 private:
  // Reads a chunk in parts and checks each part while it is in the cache.
  static void read(const File& file, const Chunk& chunk, char* out) {
    const FileEntry& entry = *chunk.entry;
    const int64_t size = size_of(entry.dtype), step = kPartBytes / size;
    for (int64_t done = 0; done < chunk.count; done += step) {
      const int64_t first = chunk.first + done, count = std::min(step, chunk.count - done);
      char* part = out + done * size;
      chunk.read(file, first, count, part);
      check_finite(entry.name, entry.dtype, entry.shape, part, chunk.runs, first, count);
    }
  }

  Device device_;
  Stream stream_;
  char* raw_ = nullptr;
  std::vector<char> converted_;
};

WeightLoader::WeightLoader(const Context& ctx) : ctx_(ctx) {
  set_device(ctx.device);
  for (int i = 0; i < kNumReaders; ++i) readers_.push_back(std::make_unique<Reader>(ctx.device));
}

WeightLoader::~WeightLoader() = default;

void WeightLoader::load_file(WeightTable& table, const std::string& path,
                             const std::vector<FileEntry>& entries,
                             const std::function<void(int64_t)>& progress) {
  const File file(path);
  std::vector<Chunk> chunks;
  for (const FileEntry& entry : entries) {
    const WeightTable::Entry& target = table.find(entry.name, entry.dtype, entry.shape);
    const int64_t count = elements_of(entry.shape);
    CHECK(entry.num_bytes == count * size_of(entry.dtype),
          "tensor \"{}\" in {} has {} bytes, its shape {} and dtype {} need {}", entry.name, path,
          entry.num_bytes, text_of(entry.shape), name_of(entry.dtype),
          count * size_of(entry.dtype));
    const int64_t step = kChunkBytes / size_of(entry.dtype);
    const int64_t own = target.destination.num_elements();
    for (int64_t first = 0; first < own; first += step) {
      chunks.push_back(
          {&entry, target.destination, Runs(target), first, std::min(step, own - first)});
    }
  }

  std::atomic<size_t> next{0};
  std::atomic<int64_t> done_bytes{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::mutex mutex;
  std::condition_variable finished;
  const int num_readers = static_cast<int>(std::min<size_t>(kNumReaders, chunks.size()));
  int running = num_readers;

  const auto read_chunks = [&](Reader& reader) {
    try {
      set_device(ctx_.device);
      for (size_t i; !failed && (i = next++) < chunks.size();) {
        reader.load(file, chunks[i]);
        done_bytes += chunks[i].count * size_of(chunks[i].entry->dtype);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      failed = true;
    }
    const std::lock_guard lock(mutex);
    --running;
    finished.notify_all();
  };
  std::vector<std::jthread> readers;
  for (int i = 0; i < num_readers; ++i) {
    readers.emplace_back(read_chunks, std::ref(*readers_[static_cast<size_t>(i)]));
  }

  std::unique_lock lock(mutex);
  while (!finished.wait_for(lock, std::chrono::milliseconds(50), [&] { return running == 0; })) {
    lock.unlock();
    try {
      if (progress) progress(done_bytes);
    } catch (...) {  // e.g. Ctrl-C in Python: stop the readers, then rethrow
      failed = true;
      for (std::jthread& reader : readers) reader.join();
      throw;
    }
    lock.lock();
  }
  lock.unlock();
  for (std::jthread& reader : readers) reader.join();
  if (error) std::rethrow_exception(error);
  if (ctx_.device.is_cuda()) check_finite_on_device(ctx_, table, entries);
  if (progress) progress(done_bytes);
  for (const FileEntry& entry : entries)
    table.find(entry.name, entry.dtype, entry.shape).loaded = true;
}

void WeightLoader::load_array(WeightTable& table, const std::string& name, DType dtype,
                              const std::vector<int64_t>& shape, const void* data) {
  WeightTable::Entry& target = table.find(name, dtype, shape);
  const int64_t count = target.destination.num_elements();
  const DType to = target.destination.dtype();
  std::vector<char> part, converted;
  const Runs runs(target);
  if (target.cut_dim >= 0) {
    part.resize(static_cast<size_t>(count * size_of(dtype)));
    char* out = part.data();
    runs.each(0, count, [&](int64_t place, int64_t length) {
      const int64_t bytes = length * size_of(dtype);
      std::memcpy(out, static_cast<const char*>(data) + place * size_of(dtype),
                  static_cast<size_t>(bytes));
      out += bytes;
    });
    data = part.data();
  }
  check_finite(name, dtype, shape, data, runs, 0, count);
  if (dtype != to) {
    converted.resize(static_cast<size_t>(count * size_of(to)));
    convert(name, converted.data(), to, data, dtype, count);
    data = converted.data();
  }
  copy_to_device(ctx_.device, target.destination.data(), data, count * size_of(to), ctx_.stream);
  synchronize(ctx_.device, ctx_.stream);
  target.loaded = true;
}

}  // namespace cpmcu
