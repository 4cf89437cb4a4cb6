// mamba2: the recurrence of one layer (mamba2.h), for N = 128 or 256.
//
// Roofline: S is read and written once a step. 64 heads of 64 x 128 are 2 MiB: 1.3 us at 3.2 TB/s.
// A prompt is bound by the instructions of the recurrence: an element of S takes three of them a
// token.
//
// Schedule: a CTA has one head of one sequence. A warp owns 8 rows of S in its registers; a lane
// has 4 neighbouring columns of each 128.
//   1. Load S. Add the accepted tokens of the last step to S and store it. Nothing here needs the
//      convolution before it, so the work overlaps that.
//   2. Copy the tokens to shared memory: all of a decode step, or a prompt's in stages of 32.
//   3. Recurrence: each warp by itself, without a barrier. A tree is visited depth first
//      (step/tree_plan.cuh).
//
// Surprising: `pending` has B once for each head, although the heads of a group share it. So a CTA
// reads nothing that another CTA of the launch overwrites, and a step needs no second launch.
//
// All arithmetic that a token's bits depend on uses explicit intrinsics, so that the compiler
// contracts the two variants of the kernel alike.
#include "kernels/mamba2/mamba2.h"

#include <algorithm>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"
#include "kernels/step/tree_plan.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kRows = 8;  // rows of S that a warp has
constexpr int kStage = 32;
constexpr int kMaxHeadDim = 128;
constexpr int kMaxThreads = kMaxHeadDim / kRows * 32;

template <typename T>
struct Mamba2Args {
  T* y;
  const T *xbc, *dt;  // dt points to the column first_dt
  int64_t xbc_row, dt_row;
  MambaShape shape;
  const float *a_log, *dt_bias, *d;
  float min_step, max_step;
  float* state;
  T* pending;
  int* folded;
  int num_pending;
  Accepted accepted;
  int rows, copies;  // tokens and copies of S for which shared memory has room
  StepTokens tokens;
};

// A token in shared memory: x [P], B [N], C [N], and (step, decay).
template <typename T>
struct Row {
  const T *x, *b, *c;
  float2 gates;
};

// 8 rows of S. `s[r][4 i + j]` is column 128 i + 4 lane + j.
template <int kParts>
struct Rows {
  static constexpr int kState = 128 * kParts;  // state size N

  float s[kRows][4 * kParts];

  __device__ __forceinline__ void load_from(const float* first, int lane) {
    each([&](int r, int i, float* to) {
      const float4 v = *reinterpret_cast<const float4*>(first + r * kState + 128 * i + 4 * lane);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    });
  }
  __device__ __forceinline__ void store_to(float* first, int lane) {
    each([&](int r, int i, const float* v) {
      *reinterpret_cast<float4*>(first + r * kState + 128 * i + 4 * lane) =
          make_float4(v[0], v[1], v[2], v[3]);
    });
  }

  // Adds token `row`, whose x of the warp begins at row.x. With kOutputs, returns S C of row
  // lane % 8.
  template <bool kOutputs, typename T>
  __device__ __forceinline__ float step(const Row<T>& row, int lane) {
    float x[kRows], b[4 * kParts], c[4 * kParts], sums[kRows];
    const Vec<T, kRows> of_x = load<T, kRows>(row.x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = __fmul_rn(row.gates.x, to_float(of_x[r]));
    load_columns(b, row.b, lane);
    if constexpr (kOutputs) load_columns(c, row.c, lane);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
        s[r][i] = __fmaf_rn(x[r], b[i], __fmul_rn(s[r][i], row.gates.y));
        if constexpr (kOutputs) {
          sums[r] = i == 0 ? __fmul_rn(s[r][i], c[i]) : __fmaf_rn(s[r][i], c[i], sums[r]);
        }
      }
    }
    if constexpr (kOutputs) return sum_lanes(sums, lane);
    return 0;
  }

 private:
  template <typename F>
  __device__ __forceinline__ void each(F&& f) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) f(r, i, &s[r][4 * i]);
    }
  }
  template <typename T>
  static __device__ __forceinline__ void load_columns(float (&to)[4 * kParts], const T* from,
                                                      int lane) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const Vec<T, 4> v = load<T, 4>(from + 128 * i + 4 * lane);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[4 * i + j] = to_float(v[j]);
    }
  }
  // Returns the sum of sums[lane % 8] over all lanes. Each of the first three rounds halves how
  // many numbers a lane keeps.
  static __device__ __forceinline__ float sum_lanes(float (&sums)[kRows], int lane) {
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {
      const bool odd = lane >> bit & 1;
#pragma unroll
      for (int i = 0; i < kRows >> (bit + 1); ++i) {
        const float kept = odd ? sums[2 * i + 1] : sums[2 * i];
        const float given = odd ? sums[2 * i] : sums[2 * i + 1];
        sums[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, 1 << bit));
      }
    }
    const float half = __fadd_rn(sums[0], __shfl_xor_sync(0xffffffffu, sums[0], 8));
    return __fadd_rn(half, __shfl_xor_sync(0xffffffffu, half, 16));
  }
};

static_assert(sizeof(TreePlan) % 16 == 0, "copies of S behind it are read as float4");

// Sizes of shared memory, in bytes.
template <typename T>
struct Layout {
  int row;  // elements of a token in shared memory: x, B and C
  int64_t tokens, gates, copies;

  __host__ __device__ Layout(const MambaShape& shape, int num_rows, int num_copies)
      : row(shape.head_dim + 2 * shape.state_size),
        tokens(int64_t{num_rows} * row * sizeof(T)),
        gates(int64_t{num_rows} * sizeof(float2)),
        copies(int64_t{num_copies} * shape.head_dim * shape.state_size * sizeof(float)) {}
  __host__ __device__ int64_t num_bytes() const {
    return sizeof(TreePlan) + copies + tokens + gates;
  }
};

// One head of one sequence.
template <typename T, int kParts>
struct Head {
  using State = Rows<kParts>;

  const Mamba2Args<T>& args;
  const Layout<T> layout;
  const int head, slot, first, count, length;
  const int64_t at;  // index of the head in [slots, heads]
  const int warp, lane;
  TreePlan& tree;
  float* copies;
  T* tokens;
  float2* gates;
  float rate, bias, skip;  // exp(A_log), dt_bias and D of the head

  __device__ __forceinline__ Head(const Mamba2Args<T>& args, char* memory, int seq, int head)
      : args(args),
        layout(args.shape, args.rows, args.copies),
        head(head),
        slot(args.tokens.seq_slots[seq]),
        first(args.tokens.seq_token_begin[seq]),
        count(args.tokens.seq_token_begin[seq + 1] - first),
        length(args.tokens.slot_lengths[slot]),
        at(int64_t{slot} * args.shape.num_heads + head),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        tree(*reinterpret_cast<TreePlan*>(memory)),
        copies(reinterpret_cast<float*>(memory + sizeof(TreePlan))),
        tokens(reinterpret_cast<T*>(memory + sizeof(TreePlan) + layout.copies)),
        gates(reinterpret_cast<float2*>(memory + sizeof(TreePlan) + layout.copies + layout.tokens)),
        rate(expf(args.a_log[head])),
        bias(args.dt_bias[head]),
        skip(args.d[head]) {}

  // The warp's rows.
  __device__ __forceinline__ float* state() const {
    return args.state + (at * args.shape.head_dim + warp * kRows) * State::kState;
  }
  __device__ __forceinline__ float* copy(int index) const {
    return copies + (int64_t{index} * args.shape.head_dim + warp * kRows) * State::kState;
  }
  __device__ __forceinline__ T* pending(int node) const {
    return args.pending + (at * args.num_pending + node) * args.shape.pending_width();
  }
  __device__ __forceinline__ const int* path() const {
    return args.accepted.paths + int64_t{slot} * args.accepted.max_path;
  }

  // The accepted tokens that S does not contain yet. All threads call it, and a barrier must follow
  // before `folded` is written.
  __device__ __forceinline__ int num_accepted() const {
    if (args.accepted.counts == nullptr) return 0;
    const int folded = args.folded[at], num = args.accepted.counts[slot];
    if (folded == length || folded + num != length || num > args.rows) return 0;
    for (int i = 0; i < num; ++i) {
      if (path()[i] < 0 || path()[i] >= args.num_pending) return 0;
    }
    return num;
  }

  // Starts the copy of `num` tokens to rows row, row + 1, ... in chunks of 8 elements. `from` gives
  // the source of a chunk.
  template <typename Source>
  __device__ __forceinline__ void fetch(int row, int num, int width, Source&& from) const {
    const int chunks = width / 8;
    for (int i = threadIdx.x; i < num * chunks; i += blockDim.x) {
      const int token = i / chunks, column = i % chunks * 8;
      ptx::cp_async16(tokens + (row + token) * layout.row + column, from(token, column));
    }
  }
  __device__ __forceinline__ void fetch_gates(int row, T dt) const {
    const float x = __fadd_rn(to_float(dt), bias);
    const float softplus = x > 20 ? x : log1pf(expf(x));
    const float step = fminf(fmaxf(softplus, args.min_step), args.max_step);
    gates[row] = make_float2(step, expf(-__fmul_rn(rate, step)));
  }
  __device__ __forceinline__ void fetch_accepted(int num) const {
    const MambaShape& s = args.shape;
    fetch(0, num, s.head_dim + s.state_size,
          [&](int i, int column) { return pending(path()[i]) + column; });
    for (int i = threadIdx.x; i < num; i += blockDim.x) {
      fetch_gates(i, pending(path()[i])[s.head_dim + s.state_size]);
    }
  }
  // Tokens begin .. begin + num - 1 of the step's sequence.
  __device__ __forceinline__ void fetch_step(int row, int begin, int num) const {
    const MambaShape& s = args.shape;
    const int group = head / (s.num_heads / s.num_groups);
    const int64_t b = s.inner() + group * s.state_size;
    const int64_t c = b + s.num_groups * s.state_size;
    fetch(row, num, layout.row, [&](int i, int column) {
      const T* const from = args.xbc + int64_t{first + begin + i} * args.xbc_row;
      const int in_b = column - s.head_dim, in_c = in_b - s.state_size;
      return in_b < 0   ? from + head * s.head_dim + column
             : in_c < 0 ? from + b + in_b
                        : from + c + in_c;
    });
    for (int i = threadIdx.x; i < num; i += blockDim.x) {
      fetch_gates(row + i, dt(begin + i));
    }
  }
  __device__ __forceinline__ T dt(int i) const {
    return args.dt[int64_t{first + i} * args.dt_row + head];
  }
  // Waits until fetched rows have arrived. The kGroups latest groups of copies may still be in
  // flight.
  template <int kGroups>
  static __device__ __forceinline__ void wait_for_rows() {
    ptx::cp_async_wait<kGroups>();
    __syncthreads();
  }

  __device__ __forceinline__ Row<T> row(int i) const {
    const T* const x = tokens + i * layout.row;
    const T* const b = x + args.shape.head_dim;
    return {x + warp * kRows, b, b + State::kState, gates[i]};
  }
  // Adds the token in row i to S and writes y of token j.
  __device__ __forceinline__ void step(State& s, int i, int j) const {
    const Row<T> token = row(i);
    const float sum = s.template step<true>(token, lane);
    if (lane >= kRows) return;
    T* const y = args.y + int64_t{first + j} * args.shape.inner() + head * args.shape.head_dim;
    y[warp * kRows + lane] = from_float<T>(__fmaf_rn(skip, to_float(token.x[lane]), sum));
  }
  // Stores the tokens of a decode step in `pending`. Their rows must have arrived.
  __device__ __forceinline__ void store_pending() const {
    const int width = args.shape.head_dim + args.shape.state_size, chunks = width / 8;
    for (int i = threadIdx.x; i < count * chunks; i += blockDim.x) {
      const int token = i / chunks, column = i % chunks * 8;
      store(pending(token) + column, load<T, 8>(tokens + token * layout.row + column));
    }
    for (int i = threadIdx.x; i < count; i += blockDim.x) pending(i)[width] = dt(i);
  }
};

// ---- kernel

template <typename Cta, typename State>
__device__ __forceinline__ void run_prompt(const Cta& cta, State& s) {
  const int stages = (cta.count + kStage - 1) / kStage;
  const auto rows_of = [&](int stage) { return min(kStage, cta.count - stage * kStage); };
  const auto fetch = [&](int stage) {
    if (stage < stages) cta.fetch_step(stage % 2 * kStage, stage * kStage, rows_of(stage));
    ptx::cp_async_commit();
  };
  fetch(0);
  for (int stage = 0; stage < stages; ++stage) {
    fetch(stage + 1);
    cta.template wait_for_rows<1>();
    for (int i = 0; i < rows_of(stage); ++i) {
      cta.step(s, stage % 2 * kStage + i, stage * kStage + i);
    }
    __syncthreads();  // from here on the rows may be overwritten
  }
  s.store_to(cta.state(), cta.lane);
}

template <typename Cta, typename State>
__device__ __forceinline__ void run_step(const Cta& cta, State& s) {
  TreePlan& tree = cta.tree;
  const int* const parents = cta.args.tokens.token_parents;
  cta.fetch_step(0, 0, cta.count);
  ptx::cp_async_commit();
  if (parents != nullptr && threadIdx.x < cta.count) {
    tree.parents[threadIdx.x] = parents[cta.first + static_cast<int>(threadIdx.x)];
  }
  cta.template wait_for_rows<0>();
  cta.store_pending();
  if (parents == nullptr) {
    for (int i = 0; i < cta.count; ++i) cta.step(s, i, i);
    return;
  }
  tree.order(cta.count, cta.args.copies);
  __syncthreads();
  for (int i = 0; i < cta.count; ++i) {
    const Visit visit = tree.visits[i];
    if (visit.from != Visit::kFollows) {
      s.load_from(visit.from == Visit::kNone ? cta.state() : cta.copy(visit.from), cta.lane);
      for (uint64_t nodes = tree.replayed(visit); nodes != 0; nodes &= nodes - 1) {
        s.template step<false>(cta.row(__ffsll(static_cast<long long>(nodes)) - 1), cta.lane);
      }
    }
    cta.step(s, visit.node, visit.node);
    if (visit.to != Visit::kNone) s.store_to(cta.copy(visit.to), cta.lane);
  }
}

// Grid: (heads, B). kCommits: a prefill.
template <typename T, int kParts, bool kCommits>
__global__ void __launch_bounds__(kMaxThreads)
    mamba2_kernel(const __grid_constant__ Mamba2Args<T> args) {
  extern __shared__ __align__(16) char memory[];
  ptx::pdl_launch();
  const Head<T, kParts> cta(args, memory, blockIdx.y, blockIdx.x);
  const int num_accepted = cta.count > 0 ? cta.num_accepted() : 0;
  Rows<kParts> s;
  s.load_from(cta.state(), cta.lane);
  if (num_accepted > 0) {
    cta.fetch_accepted(num_accepted);
    ptx::cp_async_commit();
    cta.template wait_for_rows<0>();
    for (int i = 0; i < num_accepted; ++i) s.template step<false>(cta.row(i), cta.lane);
    if (!kCommits) s.store_to(cta.state(), cta.lane);
  }
  __syncthreads();  // the rows are free, and all threads have read `folded`
  ptx::pdl_wait();  // until here, the kernel reads only what earlier passes wrote
  if (cta.count == 0) return;
  if (threadIdx.x == 0) args.folded[cta.at] = kCommits ? cta.length + cta.count : cta.length;
  if constexpr (kCommits) {
    run_prompt(cta, s);
  } else {
    run_step(cta, s);
  }
}

template <typename T, int kParts, bool kCommits>
void run(const Context& ctx, const Mamba2Params& p) {
  const int max_path = p.accepted.max_path;
  const int rows = std::max(kCommits ? 2 * kStage : p.tokens.max_seq_tokens, max_path);
  const auto bytes_of = [&](int copies) { return Layout<T>(p.shape, rows, copies).num_bytes(); };
  int copies =
      kCommits || p.tokens.token_parents == nullptr ? 0 : copies_of(p.tokens.max_seq_tokens);
  while (copies > 0 && bytes_of(copies) + 1024 > ctx.sm_shared_bytes) --copies;
  CHECK(bytes_of(copies) + 1024 <= ctx.sm_shared_bytes,
        "mamba2: a step of {} tokens a sequence needs {} bytes of shared memory, an SM has {}; use "
        "a smaller draft tree",
        rows, bytes_of(copies), ctx.sm_shared_bytes);
  const Mamba2Args<T> args{.y = p.y.as<T>(),
                           .xbc = p.xbc.as<T>(),
                           .dt = p.dt.as<T>() + p.first_dt,
                           .xbc_row = p.xbc.size(1),
                           .dt_row = p.dt.size(1),
                           .shape = p.shape,
                           .a_log = p.a_log.as<float>(),
                           .dt_bias = p.dt_bias.as<float>(),
                           .d = p.d.as<float>(),
                           .min_step = p.min_step,
                           .max_step = p.max_step,
                           .state = p.state.as<float>(),
                           .pending = p.pending.as<T>(),
                           .folded = p.folded.as<int>(),
                           .num_pending = static_cast<int>(p.pending.size(2)),
                           .accepted = p.accepted,
                           .rows = rows,
                           .copies = copies,
                           .tokens = p.tokens};
  const auto kernel = mamba2_kernel<T, kParts, kCommits>;
  allow_shared_bytes(kernel, static_cast<size_t>(bytes_of(copies)));
  launch(ctx, kernel, dim3(p.shape.num_heads, p.tokens.num_seqs),
         dim3(p.shape.head_dim / kRows * 32), static_cast<size_t>(bytes_of(copies)), args);
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: the slots, lengths and parents of the tokens, accepted.
void mamba2(const Context& ctx, const Mamba2Params& p) {
  check_mamba2(p);
  check_rows("mamba2", "xbc", p.xbc);
  CHECK(p.shape.head_dim >= 16 && p.shape.head_dim <= kMaxHeadDim,
        "mamba2: heads have {} columns, expected 16 to {} on CUDA", p.shape.head_dim, kMaxHeadDim);
  if (p.tokens.num_tokens == 0) return;
  dispatch_half(p.xbc.dtype(), [&](auto t) {
    using T = decltype(t);
    dispatch_int<128, 256>("mamba2: state_size", p.shape.state_size, [&](auto size) {
      p.commits ? run<T, size.value / 128, true>(ctx, p) : run<T, size.value / 128, false>(ctx, p);
    });
  });
}

}  // namespace cpmcu::cuda
