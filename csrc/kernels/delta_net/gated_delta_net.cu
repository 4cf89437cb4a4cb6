// gated_delta_net: convolution, gates, recurrence and gated norm of one layer (gated_delta_net.h),
// for heads of Dk = Dv = 128.
//
// Roofline: S is read and written once a step, 128 KiB for each value head. 32 heads take 2.6 us at
// 3.2 TB/s. A prompt is bound by the instructions of the recurrence. Each element of S takes four
// floating-point operations a token: 124 clock cycles for 32 heads on 132 SMs. For a token of up to
// 66 heads, each scheduler issues 370 instructions of the recurrence and 90 of the preparation:
// about 0.25 us.
//
// Schedule: from compute capability 9.0 on, a cluster of CTAs computes a value head of a sequence.
// It has four CTAs for a step and two for a prompt. Before 9.0 it is one CTA. A warp owns 8 columns
// of S in its registers (delta_net_columns.cuh).
//
// Decode step:
//   1. Load S, the window and the weights. Add the accepted tokens of the last step to S and store
//      it. Nothing here needs the projection before it, so the work overlaps that.
//   2. Copy the step's raw tokens to shared memory. Prepare them: convolution, SiLU, norms, gates.
//      With more than four tokens, each CTA prepares q and k of its share for all (DSMEM).
//   3. Recurrence: each warp by itself, without a barrier, depth first (step/tree_plan.cuh).
//   4. Exchange sums of squares over the head (DSMEM), norm, gate, store.
// A plain step of many sequences has a kernel of its own (delta_net_plain.cuh).
//
// Prompt: a pipeline of stages of 32 tokens. Eight warps run the recurrence of stage s. Meanwhile
// eight more send the squares of stage s - 1, prepare stage s + 1, and write the outputs of s - 2.
// Without clusters a stage has 16 tokens, and all 16 warps do both in turn.
//
// Surprising: a prompt runs the recurrence token by token, not in chunks on tensor cores. Its bits
// do not depend on chunks, and a prompt has the bits of decoding.
//
// All arithmetic that a token's bits depend on uses explicit intrinsics, so that the compiler
// contracts the two variants of the kernel alike.
#include "kernels/delta_net/gated_delta_net.h"

#include <algorithm>

#include "core/launch.h"
#include "kernels/delta_net/delta_net_plain.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

using namespace delta_net;

// ---- kernel

// All tokens are added to S. `count`: tokens of the sequence.
template <typename Cta>
__device__ __forceinline__ void run_prompt(const Cta& cta, Columns& state, int count,
                                           int num_accepted) {
  constexpr int kStage = Cta::kStage, kTokens = Cta::kTokens;
  constexpr int kStride = Cta::kProducers * kTokens;  // tokens whose outputs are written together
  constexpr int kPasses = kStage / kStride;
  static_assert(kStage % kStride == 0, "outputs of a stage are a whole number of passes");
  const int producer = cta.warp - Cta::kFirstProducer;
  const auto raw = [&](int i) { return i < 0 ? cta.in_window(kWindow + i) : cta.in_step(i); };
  const auto rows_of = [&](int stage) { return min(kStage, count - stage * kStage); };
  typename Cta::Weights weights;
  typename Cta::PromptFilters of_v;
  const auto load_weights = [&] {
    cta.load_weights(weights);
    cta.load_value_filters(of_v);
  };
  const auto prepare = [&](int stage) {
    cta.prepare_stage(stage * kStage, rows_of(stage), stage % 2 * kStage, weights, of_v, raw);
  };
  const int stages = (count + kStage - 1) / kStage;
  if (num_accepted > 0) {
    typename Cta::Weights of_accepted;
    typename Cta::Filters values_of_accepted;
    cta.load_weights(of_accepted);
    cta.load_value_filters(values_of_accepted);
    cta.prepare(num_accepted, of_accepted, values_of_accepted, cta.source(false));
    if (cta.warp < Cta::kWarps) {
      for (int i = 0; i < num_accepted; ++i) cta.update(state, i);
    }
    cta.move_window(
        num_accepted, [&](int i) { return cta.in_window(kWindow + i); }, threadIdx.x,
        Cta::kThreads);
    __syncthreads();
  }
  cta.exchange.meet();
  ptx::pdl_wait();  // until here, the kernel reads only what earlier passes wrote
  const auto produce = [&](int stage) {
    const int ended = stage - 2, summed = stage - 1;
    const int row = producer * kTokens + cta.token();
    decltype(cta.load_z(0)) z[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int at = row + pass * kStride;
      if (ended >= 0 && at < rows_of(ended)) z[pass] = cta.load_z(ended * kStage + at);
    }
    if (summed >= 0 && summed < stages) {
      const int round = summed % kExchanges;
      if (producer == 0 && cta.lane == 0) cta.exchange.expect_squares(round, kStage);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int at = row + pass * kStride;
        cta.send_squares(round, summed % 3 * kStage + at, at < rows_of(summed),
                         round * kStage + producer * kTokens + pass * kStride);
      }
    }
    if (stage + 1 < stages) prepare(stage + 1);
    if (stage == 0) {  // no later stage reads the window
      const int thread = static_cast<int>(threadIdx.x) - 32 * Cta::kFirstProducer;
      cta.move_window(count, raw, thread, 32 * Cta::kProducers);
      cta.store_window(thread, 32 * Cta::kProducers);
    }
    if (ended < 0) return;
    const int round = ended % kExchanges;
    cta.wait_for_squares(round, ended / kExchanges % 2);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int at = row + pass * kStride;
      if (at < rows_of(ended)) {
        cta.write_output(ended * kStage + at, ended % 3 * kStage + at, round * kStage + at, z[pass],
                         weights);
      }
    }
  };
  const auto recur = [&](int stage) {
    if (stage >= stages) return;
    const int rows = rows_of(stage), begin = stage % 2 * kStage;
    Operands token = cta.operands(begin);
#pragma unroll 2
    for (int row = 0; row < rows; ++row) {
      const Operands next = cta.operands(begin + min(row + 1, rows - 1));
      cta.store_output(stage % 3 * kStage + row, state.step<true>(token, cta.lane));
      token = next;
    }
    if (stage == stages - 1) state.store_to(cta.tile(), cta.lane);
  };
  const auto run_stages = [&](auto&& body) {
    for (int stage = 0; stage < stages + 2; ++stage) {
      __syncthreads();
      body(stage);
    }
  };
  // Consumers and producers have loops of their own, so that each loop gets its own number of
  // registers. A thread has 128 registers at first.
  if (!Cta::kSpecial) {
    load_weights();
    prepare(0);
    run_stages([&](int stage) {
      produce(stage);
      recur(stage);
    });
  } else if (cta.warp >= Cta::kWarps) {
    ptx::give_registers<112>();
    load_weights();
    prepare(0);
    run_stages(produce);
  } else {
    ptx::take_registers<144>();
    run_stages(recur);
  }
}

// Adds the accepted tokens to S and stores it. Then computes the nodes of a decode step; their raw
// tokens become the pending ones. Both passes run the same code: the second finds it in the
// instruction cache. The first pass is without outputs.
template <typename Cta>
__device__ __forceinline__ void run_step(const Cta& cta, Columns& state,
                                         const typename Cta::Weights& weights,
                                         const typename Cta::Filters& of_v, int count,
                                         int num_accepted) {
  constexpr int kStride = Cta::kWarps * Cta::kTokens;
  const int first = cta.warp * Cta::kTokens, mine = first + cta.token();
  TreePlan& tree = *cta.shared.tree;
  const bool is_tree = cta.args.tokens.token_parents != nullptr;
  decltype(cta.load_z(0)) z;
  int pass = num_accepted > 0 ? 0 : 1;
#pragma unroll 1
  for (; pass < 2; ++pass) {
    ptx::opaque(pass);
    const bool is_step = pass != 0;
    const int rows = is_step ? count : num_accepted;
    if (is_step) {
      cta.exchange.meet();
      if (num_accepted > 0) cta.store_window(threadIdx.x, Cta::kThreads);
      ptx::pdl_wait();  // until here, the kernel reads only what earlier passes wrote
      z = cta.load_z(min(mine, count - 1));
    }
    const auto source = cta.source(is_step);
    cta.prepare(rows, weights, of_v, source);
    const auto visit_of = [&](int i) {
      return is_step && is_tree
                 ? tree.visits[i]
                 : Visit{static_cast<uint8_t>(i), Visit::kNone, Visit::kFollows, Visit::kNone};
    };
    Visit visit = visit_of(0);
    Operands now = cta.operands(visit.node);
    OutputParts before{};  // terms of the previous visit's o; the first visit overwrites them
    int node_before = visit.node;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      const Visit next_visit = visit_of(min(i + 1, rows - 1));
      const Prepared next = cta.prepared(next_visit.node);
      const Operands token = now;
      now.load_k(next, cta.lane);
      if (visit.from != Visit::kFollows) {
        if (visit.from == Visit::kNone) {
          state.load_from(cta.tile(), cta.lane);
        } else {
          state.restore(cta.copy(visit.from), cta.lane);
        }
#pragma unroll 1
        for (uint64_t nodes = tree.replayed(visit); nodes != 0; nodes &= nodes - 1) {
          cta.update(state, __ffsll(static_cast<long long>(nodes)) - 1);
        }
      }
      cta.store_output(node_before, before);
      before = state.step<true>(token, cta.lane);
      now.load_others(next, cta.lane);
      node_before = visit.node;
      if (visit.to != Visit::kNone) state.save(cta.copy(visit.to), cta.lane);
      visit = next_visit;
    }
    cta.store_output(node_before, before);
    if (!is_step) {
      state.store_to(cta.tile(), cta.lane);
      cta.move_window(
          rows, [&](int i) { return cta.in_window(kWindow + i); }, threadIdx.x, Cta::kThreads);
      __syncthreads();
    }
  }
  if (threadIdx.x == 0) cta.exchange.expect_squares(0, (count + 3) / 4 * 4);
  __syncthreads();
#pragma unroll 1
  for (int row = first; row < count; row += kStride) {
    cta.send_squares(0, row + mine - first, row + mine - first < count, row);
  }
  cta.wait_for_squares(0, 0);
#pragma unroll 1
  for (int row = mine; row < count; row += kStride) {
    const auto of_row = z;
    z = cta.load_z(min(row + kStride, count - 1));
    cta.write_output(row, row, row, of_row, weights);
  }
}

// Grid: sequences * Hv * kSplit; the CTAs of a head are a cluster. kCommits: a prefill. kCtasPerSm:
// CTAs that an SM holds at least.
template <typename T, int kSplit, bool kCommits, int kCtasPerSm>
__global__ void __launch_bounds__(Head<T, kSplit, kCommits>::kThreads, kSplit > 1 ? kCtasPerSm : 1)
    gated_delta_net_kernel(const __grid_constant__ DeltaArgs<T> args) {
  extern __shared__ __align__(16) char memory[];
  using Cta = Head<T, kSplit, kCommits>;
  ptx::pdl_launch();
  typename Cta::Memory shared(memory, args.capacity);
  const int unit = blockIdx.x / kSplit, seq = unit / args.num_value_heads;
  const StepTokens& tokens = args.tokens;
  const int head = unit % args.num_value_heads, slot = tokens.seq_slots[seq];
  const int first = tokens.seq_token_begin[seq];
  const int count = tokens.seq_token_begin[seq + 1] - first;
  if (count == 0) return;
  const int length = tokens.slot_lengths[slot];
  const Cta cta(args, shared, head, slot, first);
  cta.exchange.init_barriers();
  Columns state;
  if (cta.warp < Cta::kWarps) state.load_from(cta.tile(), cta.lane);
  typename Cta::Weights weights;
  typename Cta::Filters of_v;
  if (!kCommits) cta.load_weights(weights), cta.load_value_filters(of_v);
  cta.load_window();
  const bool is_tree = !kCommits && tokens.token_parents != nullptr;
  if (!kCommits && threadIdx.x < count) {
    const int i = threadIdx.x;
    shared.tree->parents[i] = is_tree ? tokens.token_parents[first + i] : i - 1;
  }
  const int num_accepted = cta.num_accepted(length, args.capacity.raws);
  if (kCommits) ptx::cp_async_wait<0>();
  __syncthreads();
  if (is_tree) shared.tree->order(count, args.capacity.copies);
  if constexpr (kCommits) {
    run_prompt(cta, state, count, num_accepted);
  } else {
    run_step(cta, state, weights, of_v, count, num_accepted);
  }
  if (cta.part == 0 && threadIdx.x == 0) args.folded[cta.at] = kCommits ? length + count : length;
}

// Rows of shared memory for a step with at most `most` CTAs on an SM. Copies of S are as many as
// fit while all CTAs run at once.
template <typename T, int kSplit, bool kCommits>
Capacity capacity_of(const Context& ctx, const GatedDeltaNetParams& p, int most) {
  using Cta = Head<T, kSplit, kCommits>;
  const int max_path = p.accepted.max_path;
  if (kCommits) {
    return {std::max(2 * Cta::kStage, max_path), max_path, 3 * Cta::kStage,
            kExchanges * Cta::kStage, 0};
  }
  const int nodes = p.tokens.max_seq_tokens;
  const int rows = std::max(nodes, max_path);
  Capacity capacity{rows, rows, rows, (nodes + 3) / 4 * 4, 0};
  if (p.tokens.token_parents == nullptr) return capacity;
  const int ctas = p.tokens.num_seqs * p.shape.num_value_heads * kSplit;
  const int64_t on_sm = std::min(most, (ctas + ctx.sm_count - 1) / ctx.sm_count);
  const auto fits = [&] {
    return (Cta::Memory::num_bytes(capacity) + 1024) * on_sm <= ctx.sm_shared_bytes;
  };
  for (capacity.copies = copies_of(nodes); capacity.copies > 0 && !fits();) --capacity.copies;
  return capacity;
}

template <typename T>
DeltaArgs<T> args_of(const GatedDeltaNetParams& p, const Capacity& capacity) {
  return {.out = p.out.as<T>(),
          .qkvz = p.qkvz.as<T>(),
          .ba = p.ba.as<T>(),
          .conv = p.conv_weight.as<T>(),
          .a_log = p.a_log.as<float>(),
          .dt_bias = p.dt_bias.as<float>(),
          .norm = p.norm_weight.as<T>(),
          .eps = p.norm_eps,
          .state = p.state.as<float>(),
          .window = p.window.as<T>(),
          .pending = p.pending.as<T>(),
          .folded = p.folded.as<int>(),
          .accepted = p.accepted,
          .layout = p.layout,
          .num_key_heads = p.shape.num_key_heads,
          .num_value_heads = p.shape.num_value_heads,
          .pending_rows = static_cast<int>(p.pending.size(2)),
          .capacity = capacity,
          .accepts_all = p.accepts_all,
          .tokens = p.tokens};
}

template <typename T, int kSplit, bool kCommits, int kCtasPerSm>
void run(const Context& ctx, const GatedDeltaNetParams& p) {
  const auto args = args_of<T>(p, capacity_of<T, kSplit, kCommits>(ctx, p, kCtasPerSm));
  const int64_t bytes = Shared<T, kSplit>::num_bytes(args.capacity);
  CHECK(bytes + 1024 <= ctx.sm_shared_bytes,
        "gated_delta_net: a step of {} tokens a sequence needs {} bytes of shared memory, an SM "
        "has {}; use a smaller draft tree",
        args.capacity.rows, bytes, ctx.sm_shared_bytes);
  const auto kernel = gated_delta_net_kernel<T, kSplit, kCommits, kCtasPerSm>;
  allow_shared_bytes(kernel, bytes);
  launch_cluster(ctx, kSplit, kernel, dim3(p.tokens.num_seqs * args.num_value_heads * kSplit),
                 dim3(Head<T, kSplit, kCommits>::kThreads), bytes, args);
}

// CTAs of a step on an SM. If more than kFewCtas wait for an SM, kManyCtas are 13 % faster. Their
// threads have 128 registers and keep filters in local memory. A tree whose copies of S do not fit
// kManyCtas times runs with kFewCtas.
constexpr int kFewCtas = 2, kManyCtas = 4;

template <typename T>
void run_plain(const Context& ctx, const GatedDeltaNetParams& p) {
  const auto args = args_of<T>(p, PlainHead<T>::capacity());
  const auto kernel = plain_step_kernel<T>;
  const int64_t bytes = Shared<T, 1>::num_bytes(args.capacity);
  allow_shared_bytes(kernel, bytes);
  launch(ctx, kernel, dim3(p.tokens.num_seqs * args.num_value_heads), dim3(32 * kPlainWarps), bytes,
         args);
}

template <typename T>
void run_step_in_clusters(const Context& ctx, const GatedDeltaNetParams& p) {
  constexpr int kSplit = 4;
  const bool is_tree = p.tokens.token_parents != nullptr;
  const int copies = is_tree ? copies_of(p.tokens.max_seq_tokens) : 0;
  const int ctas = p.tokens.num_seqs * p.shape.num_value_heads * kSplit;
  const bool must_wait = ctas > kFewCtas * ctx.sm_count;
  const int64_t plain_bytes = Shared<T, 1>::num_bytes(PlainHead<T>::capacity()) + 1024;
  if (must_wait && p.tokens.max_seq_tokens == 1 &&
      kPlainCtas * plain_bytes <= ctx.sm_shared_bytes) {
    return run_plain<T>(ctx, p);
  }
  const bool many = must_wait && capacity_of<T, kSplit, false>(ctx, p, kManyCtas).copies == copies;
  many ? run<T, kSplit, false, kManyCtas>(ctx, p) : run<T, kSplit, false, kFewCtas>(ctx, p);
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: qkvz, ba, the state of the slots, accepted, and seq_slots,
// seq_token_begin, slot_lengths, token_parents.
void gated_delta_net(const Context& ctx, const GatedDeltaNetParams& p) {
  check_gated_delta_net(p);
  CHECK(p.shape.key_dim == kDim && p.shape.value_dim == kDim,
        "gated_delta_net: heads have {} and {} columns, expected {} on CUDA", p.shape.key_dim,
        p.shape.value_dim, kDim);
  check_rows("gated_delta_net", "qkvz", p.qkvz);
  check_rows("gated_delta_net", "out", p.out);
  if (p.tokens.num_tokens == 0) return;
  dispatch_half(p.qkvz.dtype(), [&](auto t) {
    using T = decltype(t);
    const bool clusters = ctx.code_capability >= 90;
    if (p.commits) {
      clusters ? run<T, 2, true, 1>(ctx, p) : run<T, 1, true, 1>(ctx, p);
    } else {
      clusters ? run_step_in_clusters<T>(ctx, p) : run<T, 1, false, kFewCtas>(ctx, p);
    }
  });
}

}  // namespace cpmcu::cuda
