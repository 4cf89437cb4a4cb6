// The order in which an op with a recurrent state S (gated_delta_net.cu, mamba2.cu) visits the
// nodes of a tree.
//
// Depth first, so that most nodes follow their parent. A node with several children keeps a copy of
// its S in a slot of shared memory, from which its later children start. The child with the most
// descendants is last, and its subtree may use the slot again. So a tree of N nodes needs at most
// copies_of(N) slots. With fewer slots, a node starts from the nearest ancestor that has one, or
// else from S. It then replays the ancestors between.
#pragma once

#include "kernels/step/step_tokens.h"

namespace cpmcu::cuda {

constexpr int copies_of(int num_nodes) {
  return num_nodes < 3 ? 0 : 1 + copies_of((num_nodes - 1) / 2);
}

struct Visit {
  static constexpr uint8_t kNone = 255;

  uint8_t node;
  uint8_t base;  // the visit starts with this node's copy of S; kNone: with S before the step
  // Slot of that copy. kFollows: the visit starts with S of the node visited just before.
  uint8_t from;
  uint8_t to;  // the slot that gets a copy of this node's S; kNone: no copy
  static constexpr uint8_t kFollows = 254;
};

// Places of the three tokens before a token, a byte each, nearest first. The window is in places 0
// to 2, and token i of the step is in place 3 + i.
__device__ __forceinline__ uint32_t window_of(int before1, int before2, int before3) {
  return (before1 + 3) | (before2 + 3) << 8 | (before3 + 3) << 16;
}

// In shared memory.
struct TreePlan {
  uint64_t ancestors[kMaxTreeSize];  // bit mask of each node's ancestors, the node itself included
  int parents[kMaxTreeSize];
  int sizes[kMaxTreeSize];  // number of nodes in the node's subtree
  // 1 + the number of nodes in the subtrees of siblings that are visited before. Bit 16 is set if
  // another sibling is visited after the node.
  int places[kMaxTreeSize];
  int slots[kMaxTreeSize];  // slot of the node's copy, or kNone
  Visit visits[kMaxTreeSize];
  uint32_t windows[kMaxTreeSize];  // the result of window_of for each node

  // All threads call it after a barrier behind the writes of `parents`, one thread for each node.
  // Another barrier must follow.
  __device__ __forceinline__ void order(int count, int num_slots) {
    const int node = threadIdx.x;
    const bool is_node = node < count;
    const int parent = is_node ? parents[node] : -1;
    if (is_node) {
      uint64_t path = 0;
      for (int at = node; at >= 0; at = parents[at]) path |= uint64_t{1} << at;
      ancestors[node] = path;
      const auto before = [&](int at) { return at < 0 ? at - 1 : parents[at]; };
      windows[node] = window_of(parent, before(parent), before(before(parent)));
    }
    __syncthreads();
    int size = 0, children = 0, before = 0, later = 0;
    if (is_node) {
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        size += static_cast<int>(ancestors[i] >> node & 1);
        children += parents[i] == node;
      }
      sizes[node] = size;
    }
    __syncthreads();
    if (is_node) {
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        if (parents[i] != parent || i == node) continue;
        const bool is_before = sizes[i] < size || (sizes[i] == size && i < node);
        before += is_before ? sizes[i] : 0;
        later += !is_before;
      }
      places[node] = 1 + before | (later > 0) << 16;
    }
    __syncthreads();
    int place = -1, slot = 0;
    if (is_node) {
      for (int at = node; at >= 0; at = parents[at]) {
        place += places[at] & 0xffff;
        slot += places[at] >> 16;
      }
      slots[node] = children > 1 && slot < num_slots ? slot : Visit::kNone;
    }
    __syncthreads();
    if (is_node) {
      Visit visit{static_cast<uint8_t>(node), Visit::kNone, Visit::kFollows,
                  static_cast<uint8_t>(slots[node])};
      if (before > 0) {
        int base = parent;
        while (base >= 0 && slots[base] == Visit::kNone) base = parents[base];
        visit.base = static_cast<uint8_t>(base < 0 ? Visit::kNone : base);
        visit.from = static_cast<uint8_t>(base < 0 ? Visit::kNone : slots[base]);
      }
      visits[place] = visit;
    }
  }
  // The nodes between the visit's base and its node.
  __device__ __forceinline__ uint64_t replayed(const Visit& visit) const {
    const uint64_t known = visit.base == Visit::kNone ? 0 : ancestors[visit.base];
    return ancestors[visit.node] & ~known & ~(uint64_t{1} << visit.node);
  }
};

}  // namespace cpmcu::cuda
