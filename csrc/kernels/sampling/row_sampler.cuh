// The work of a team of CTAs for one row of logits: passes over the adjusted logits, the draw, the
// candidates, the log-probabilities. The contract is in kernels/sampling/sample.h, the schedule in
// sample.cu.
#pragma once

#include <limits>

#include "core/reduce.cuh"
#include "kernels/sampling/best.cuh"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sample.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu::cuda {

constexpr int kThreads = 1024;
constexpr int kBins = 2048;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMaxGumbel = 16.7f;  // above -log(-log(u)) for the largest u that is drawn
constexpr uint64_t kNotFinite = ~uint64_t{0};  // above the key of every logit, +inf included
static_assert(kBins == 2 * kThreads, "each thread sums two bins");

struct SampleArgs {
  const float* logits;           // [R, V]
  const int* token_slots;        // [R]
  const int* token_positions;    // [R]
  const SlotSampling* sampling;  // [slots]
  const int* counts;             // [slots, V]
  const float* bias;             // [slots, V]
  const int* tree_tokens;        // [B, N]; null: the rows are not those of trees
  const uint64_t* tree_masks;    // [B, N]
  int tree_size;                 // N
  const int* mask_rows;          // [R]; null: no row has a mask
  const uint32_t* masks;         // [M, num_mask_words(V)]
  int* tokens;                   // [R]
  TokenLogprobs* logprobs;       // [R], written for slots that ask for log-probabilities
  int vocab_size;
  TokenCandidates* candidates;  // [R]; null: no candidates are written
};

struct Histogram {
  uint32_t low[kBins];  // low 32 bits of each bin's sum of weights
  uint32_t high[kBins];
};

struct ReduceSmem {
  uint64_t scratch[32];
  uint64_t partials[2][kMaxTeamCtas];
};

struct Smem {
  ReduceSmem reduce;
  Histogram histograms[2];
  uint64_t warp_weights[32];
  int path[kMaxTreeSize];  // the drafted tokens from the root (excluded) to the row
  int num_path;
  uint64_t rest;
  uint32_t digit;
};

// ---- probabilities

// Log-probability relative to the most likely token, whose logit may be infinite.
__device__ __forceinline__ float score_of(float z, float maximum, float temperature) {
  return z == maximum ? 0.0f : (z - maximum) / temperature;
}

// The relative probability in units of 2^-40.
__device__ __forceinline__ uint64_t mass_of(float z, float maximum, float temperature) {
  return static_cast<uint64_t>(llroundf(expf(score_of(z, maximum, temperature)) * 0x1p40f));
}

__device__ __forceinline__ float gumbel_of(uint32_t word) {
  return -logf(-logf(uniform_from(word)));
}

// ---- a row

// The work of one thread for one row. Every thread of the team calls every method.
template <bool kAligned,  // each row of logits, counts and bias starts at a multiple of 16 bytes
          int kTeam>
struct RowSampler {
  using Team = TeamOf<kTeam>;

  const SampleArgs& args;
  const SlotSampling s;
  Smem& smem;
  const float* logits;     // [V]
  const int* counts;       // [V]
  const float* bias;       // [V]
  const int* logprob_ids;  // [kMaxLogprobs] in memory, because it is indexed; `s` is in registers
  const uint32_t* mask = nullptr;  // [num_mask_words(V)]; null: the row has no mask
  int buffer = 0;                  // the one of the two exchange buffers that is free
  float least = -kInfinity;        // after draw: the smallest logit that passes top-k and top-p

  __device__ RowSampler(const SampleArgs& args, Smem& smem, int row)
      : args(args), s(args.sampling[args.token_slots[row]]), smem(smem) {
    const int64_t slot = args.token_slots[row];
    logits = args.logits + int64_t{row} * args.vocab_size;
    counts = args.counts + slot * args.vocab_size;
    bias = args.bias + slot * args.vocab_size;
    logprob_ids = args.sampling[slot].logprob_ids;
    const int mask_row = args.mask_rows ? args.mask_rows[row] : -1;
    if (mask_row >= 0) mask = args.masks + int64_t{mask_row} * num_mask_words(args.vocab_size);
    if (s.use_penalties) find_path(row);
  }

  // The drafted tokens from the root to the row. The root itself is emitted and counted already.
  __device__ void find_path(int row) {
    const uint64_t path = args.tree_tokens ? args.tree_masks[row] & ~uint64_t{1} : 0;
    if (threadIdx.x < kMaxTreeSize && path >> threadIdx.x & 1) {
      const int place = __popcll(path & ((uint64_t{1} << threadIdx.x) - 1));
      smem.path[place] = args.tree_tokens[row - row % args.tree_size + threadIdx.x];
    }
    if (threadIdx.x == 0) smem.num_path = __popcll(path);
    __syncthreads();
  }

  // Four adjacent elements of a row from memory; `padding` after the end of the row.
  template <typename T, typename T4>
  __device__ __forceinline__ void load4(T (&v)[4], const T* row, int token, T padding) const {
    if constexpr (kAligned) {
      const T4 packed = *reinterpret_cast<const T4*>(row + token);
      v[0] = packed.x, v[1] = packed.y, v[2] = packed.z, v[3] = packed.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = token + i < args.vocab_size ? row[token + i] : padding;
    }
  }

  // Operations round explicitly, because all passes must compute the same bits.
  __device__ __forceinline__ void penalize(float (&z)[4], int token) const {
    int count[4];
    load4<int, int4>(count, counts, token, 0);
#pragma unroll 1
    for (int j = 0; j < smem.num_path; ++j) {
      const int drafted = smem.path[j] - token;
#pragma unroll
      for (int i = 0; i < 4; ++i) count[i] += drafted == i ? 1 : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (count[i] == 0) continue;
      const int emitted = count[i] & ~kPromptBit;
      z[i] =
          z[i] > 0 ? __fdiv_rn(z[i], s.repetition_penalty) : __fmul_rn(z[i], s.repetition_penalty);
      if (emitted > 0) {
        const float frequency = __fmul_rn(s.frequency_penalty, static_cast<float>(emitted));
        z[i] = __fsub_rn(z[i], __fadd_rn(s.presence_penalty, frequency));
      }
    }
  }

  __device__ __forceinline__ void add_bias(float (&z)[4], int token) const {
    float b[4];
    load4<float, float4>(b, bias, token, 0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = __fadd_rn(z[i], b[i]);
  }

  // The bits of four tokens lie in one word.
  __device__ __forceinline__ void apply_mask(float (&z)[4], int token) const {
    const uint32_t allowed = mask[token / 32] >> (token % 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = allowed >> i & 1 ? z[i] : -kInfinity;
  }

  struct Nothing {
    __device__ void operator()(const float (&)[4]) const {}
  };

  // Calls of_raw(z) with the raw logits, then f(token, z), for this thread's groups of four tokens
  // in ascending order. After the end of the row z is -inf. A raw NaN becomes +inf: find_maximum
  // then refuses the row.
  template <bool kAdjusted, typename F, typename OfRaw = Nothing>
  __device__ __forceinline__ void for_each_four(F f, OfRaw of_raw = {}) const {
    constexpr int kStep = 4 * Team::kCtas;
    constexpr int kBatch = kAdjusted ? 1 : 4;  // loads in flight: the first pass reads from L2
    const int part = (args.vocab_size + kStep - 1) / kStep * 4;
    const int begin = blockIdx.x * part;
    const int end = min(begin + part, args.vocab_size);
    for (int first = begin + threadIdx.x * 4; first < end; first += kBatch * kThreads * 4) {
      float z[kBatch][4];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int token = first + j * kThreads * 4;
        if (token < end) load4<float, float4>(z[j], logits, token, -kInfinity);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int token = first + j * kThreads * 4;
        if (token >= end) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) z[j][i] = fminf(z[j][i], kInfinity);
        of_raw(z[j]);
        if (kAdjusted && s.use_penalties) penalize(z[j], token);
        if (kAdjusted && s.use_bias) add_bias(z[j], token);
        if (kAdjusted && mask != nullptr) apply_mask(z[j], token);
        f(token, z[j]);
      }
    }
  }

  // Reduction over the team. All threads receive the result. 0 is the neutral element.
  template <typename Op>
  __device__ uint64_t team_reduce(uint64_t value, Op op) {
    value = block_reduce<kThreads>(value, uint64_t{0}, smem.reduce.scratch, op);
    uint64_t* partials = smem.reduce.partials[buffer ^= 1];
    if (threadIdx.x < Team::kCtas) Team::shared_of(threadIdx.x, partials)[blockIdx.x] = value;
    Team::sync();
    value = partials[0];
    for (int rank = 1; rank < Team::kCtas; ++rank) value = op(value, partials[rank]);
    return value;
  }

  // The largest logit as a key, or kNotFinite.
  template <bool kAdjusted>
  __device__ uint64_t find_maximum() {
    float maximum = -kInfinity, raw_maximum = -kInfinity;
    int best = 0;  // the result also if all logits are -inf
    for_each_four<kAdjusted>(
        [&](int token, const float (&z)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (z[i] > maximum) maximum = z[i], best = token + i;
          }
        },
        [&](const float (&z)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) raw_maximum = fmaxf(raw_maximum, z[i]);
        });
    const bool is_finite = (kAdjusted ? raw_maximum : maximum) < kInfinity;
    return team_reduce(is_finite ? key_of(maximum, best) : kNotFinite, Max{});
  }

  // The largest key below `bound` among the keys of the raw logits.
  __device__ uint64_t find_next(uint64_t bound) {
    uint64_t best = 0;
    for_each_four<false>([&](int token, const float (&z)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint64_t key = key_of(z[i], token + i);
        if (key < bound && key > best) best = key;
      }
    });
    return team_reduce(best, Max{});
  }

  __device__ __forceinline__ static void add_weight(Histogram& histogram, uint32_t bin,
                                                    uint64_t weight) {
    const uint32_t low = static_cast<uint32_t>(weight);
    const uint32_t before = atomicAdd(&histogram.low[bin], low);
    const uint32_t carry = before + low < before ? 1 : 0;
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
    if (high != 0) atomicAdd(&histogram.high[bin], high);
  }

  // Inclusive prefix sum of `value` over the CTA's threads. `total` is the sum over the CTA.
  __device__ uint64_t scan(uint64_t value, uint64_t& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint64_t below = __shfl_up_sync(0xffffffffu, value, offset);
      if (lane >= offset) value += below;
    }
    if (lane == 31) smem.warp_weights[warp] = value;
    __syncthreads();
    const uint64_t warp_weight = smem.warp_weights[lane];
    total = warp_reduce(warp_weight, Sum{});
    return value + warp_reduce(lane < warp ? warp_weight : uint64_t{0}, Sum{});
  }

  // The largest logit such that the tokens from it upwards weigh at least target_of(total weight).
  // weight_of(z) is 0 for excluded tokens. At least one token weighs more than 0.
  template <typename WeightOf, typename TargetOf>
  __device__ float select(WeightOf weight_of, TargetOf target_of) {
    uint32_t prefix = 0;  // the upper digits of the image that are known so far
    uint64_t target = 0;  // remaining weight, from tokens whose image begins with the prefix
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
      Histogram& histogram = smem.histograms[buffer ^= 1];
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
        histogram.low[bin] = 0;
        histogram.high[bin] = 0;
      }
      __syncthreads();
      const uint32_t digit_mask = shift == 0 ? kBins / 2 - 1 : kBins - 1;
      const uint32_t prefix_mask = ~(digit_mask << shift | ((1u << shift) - 1));
      for_each_four<true>([&](int, const float (&z)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t image = ordered(z[i]);
          if ((image & prefix_mask) != prefix) continue;
          const uint64_t weight = weight_of(z[i]);
          if (weight != 0) add_weight(histogram, image >> shift & digit_mask, weight);
        }
      });
      Team::sync();

      // Thread t reads the bins 2047 - 2 t and 2046 - 2 t of all CTAs, so bins descend with t.
      const int lower_bin = kBins - 2 - 2 * threadIdx.x;
      uint64_t lower = 0, upper = 0;
      for (int rank = 0; rank < Team::kCtas; ++rank) {
        const Histogram* part = Team::shared_of(rank, &histogram);
        const uint2 low = *reinterpret_cast<const uint2*>(&part->low[lower_bin]);
        const uint2 high = *reinterpret_cast<const uint2*>(&part->high[lower_bin]);
        lower += uint64_t{high.x} << 32 | low.x;
        upper += uint64_t{high.y} << 32 | low.y;
      }
      uint64_t total;
      const uint64_t end = scan(lower + upper, total);
      const uint64_t begin = end - lower - upper;
      if (shift == 21) target = min(max(target_of(total), uint64_t{1}), total);
      if (begin < target && target <= end) {
        const bool in_upper = begin + upper >= target;
        smem.digit = in_upper ? lower_bin + 1 : lower_bin;
        smem.rest = target - begin - (in_upper ? 0 : upper);
      }
      __syncthreads();
      prefix |= smem.digit << shift;
      target = smem.rest;
    }
    return unordered(prefix);
  }

  // The smallest logit that passes top-k and top-p.
  __device__ float keep_from(float maximum) {
    float least = -kInfinity;
    if (s.top_k > 0 && s.top_k < args.vocab_size) {
      least = select([](float) { return uint64_t{1}; },
                     [&](uint64_t) { return static_cast<uint64_t>(s.top_k); });
    }
    if (s.top_p < 1) {
      least = select(
          [&](float z) { return z < least ? uint64_t{0} : mass_of(z, maximum, s.temperature); },
          [&](uint64_t total) {
            const double share = fmax(0.0, static_cast<double>(s.top_p));
            return static_cast<uint64_t>(ceil(share * static_cast<double>(total)));
          });
    }
    return least;
  }

  // Whether a token passes top-k, top-p and min-p.
  __device__ __forceinline__ bool passes(float z, float score, float maximum,
                                         float least_score) const {
    return z >= least && (score >= least_score || z == maximum);
  }

  // The token with the largest z / T + gumbel among those that pass the filters. The most likely
  // token always passes. Tokens that cannot exceed its value need no random numbers.
  __device__ int draw(uint64_t maximum_key, int position) {
    const float maximum = value_of(maximum_key);
    least = keep_from(maximum);
    const float least_score = s.min_p > 0 ? logf(s.min_p) : -kInfinity;
    const int likeliest = token_of(maximum_key);
    const auto gumbel_at = [&](const Philox4& random, int lane) {
      return gumbel_of(lane == 0   ? random.words[0]
                       : lane == 1 ? random.words[1]
                       : lane == 2 ? random.words[2]
                                   : random.words[3]);
    };
    float bar = gumbel_at(sampling_words(s.seed, s.stream, position, likeliest), likeliest % 4);
    uint64_t best = key_of(bar, likeliest);
    for_each_four<true>([&](int token, const float (&z)[4]) {
      float scores[4];
      float largest = -kInfinity;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = score_of(z[i], maximum, s.temperature);
        scores[i] = passes(z[i], score, maximum, least_score) ? score : -kInfinity;
        largest = fmaxf(largest, scores[i]);
      }
      if (largest + kMaxGumbel < bar) return;
      const Philox4 random = sampling_words(s.seed, s.stream, position, token);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (scores[i] + kMaxGumbel < bar) continue;
        const float value = scores[i] + gumbel_of(random.words[i]);
        best = max(best, key_of(value, token + i));
        bar = fmaxf(bar, value);
      }
    });
    return token_of(team_reduce(best, Max{}));
  }

  // The drawn token or kNoToken, in all threads.
  __device__ int choose(int position) {
    const bool adjusted = s.use_penalties || s.use_bias || mask != nullptr;
    const uint64_t key = adjusted ? find_maximum<true>() : find_maximum<false>();
    const bool is_empty = value_of(key) == -kInfinity;
    if (key == kNotFinite || (is_empty && mask == nullptr)) return kNoToken;
    if (s.temperature == 0 || is_empty) return token_of(key);
    return draw(key, position);
  }

  // Writes the most likely tokens, after choose() returned `drawn`. One thread writes them. Each
  // thread collects the largest of its keys in one pass; then the team takes the largest of all.
  __device__ void write_candidates(int drawn, TokenCandidates& out) {
    uint64_t keys[kMaxCandidates] = {};  // the thread's largest keys in descending order; 0: no key
    if (drawn != kNoToken) {
      for_each_four<true>([&](int token, const float (&z)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint64_t key = z[i] > -kInfinity ? key_of(z[i], token + i) : 0;
          if (key <= keys[kMaxCandidates - 1]) continue;
#pragma unroll
          for (int j = 0; j < kMaxCandidates; ++j) {
            const uint64_t larger = max(key, keys[j]);
            key = min(key, keys[j]);
            keys[j] = larger;
          }
        }
      });
    }
    const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
    const float least_score = s.min_p > 0 ? logf(s.min_p) : -kInfinity;
    float maximum = -kInfinity;
    int num = 0;
#pragma unroll 1
    for (int i = 0; i < kMaxCandidates; ++i) {
      const uint64_t key = team_reduce(keys[0], Max{});
      if (key != 0 && key == keys[0]) {  // keys are distinct, so one thread holds it
#pragma unroll
        for (int j = 1; j < kMaxCandidates; ++j) keys[j - 1] = keys[j];
        keys[kMaxCandidates - 1] = 0;
      }
      const float z = value_of(key);
      if (i == 0) maximum = z;
      const bool allowed =
          s.temperature == 0 ? i == 0
                             : passes(z, score_of(z, maximum, s.temperature), maximum, least_score);
      if (key != 0 && allowed) ++num;
      if (writes) out.ids[i] = key == 0 ? kNoToken : token_of(key);
    }
    if (writes) out.num = num;
  }

  // Writes log-probabilities of the raw logits (finite or -inf), and those of `candidates`. One
  // thread writes them.
  template <bool kCandidates>
  __device__ void write_logprobs(int token, TokenLogprobs& out, TokenCandidates* candidates) {
    uint64_t key = find_maximum<false>();
    const float maximum = value_of(key);
    uint64_t mass = 0;
    for_each_four<false>([&](int, const float (&z)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) mass += mass_of(z[i], maximum, 1.0f);
    });
    mass = team_reduce(mass, Sum{});
    const float log_sum = logf(static_cast<float>(mass) * 0x1p-40f);
    const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
    const auto logprob_of = [&](float z) {
      return maximum > -kInfinity ? fmaxf(z, -kInfinity) - maximum - log_sum : -kInfinity;
    };
    if (writes) out.logprob = logprob_of(logits[token]);
    if constexpr (kCandidates) {
      for (int i = 0; writes && i < kMaxCandidates; ++i) {
        const int id = candidates->ids[i];
        candidates->logprobs[i] = id == kNoToken ? -kInfinity : logprob_of(logits[id]);
      }
    }
    const int num_named = s.names_logprobs && writes ? min(s.num_logprobs, kMaxLogprobs) : 0;
    for (int i = 0; i < num_named; ++i) {
      const int id = logprob_ids[i];
      out.top_ids[i] = id;
      out.top_logprobs[i] = logprob_of(logits[id]);
    }
    const int num_top =
        s.names_logprobs ? 0 : min(min(s.num_logprobs, args.vocab_size), kMaxLogprobs);
    for (int i = 0; i < num_top; ++i) {
      if (i > 0) key = find_next(key);
      if (!writes) continue;
      out.top_ids[i] = token_of(key);
      out.top_logprobs[i] = logprob_of(value_of(key));
    }
  }
};

}  // namespace cpmcu::cuda
