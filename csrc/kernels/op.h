// An op is one struct of parameters and two implementations: cuda::x (x.cu) and cpu::x (cpu/x.cpp).
//
// REGISTER_OP(x, XParams) declares both implementations and defines x(ctx, params), which selects
// one by ctx.device. All ops are graph-safe: they never allocate and never wait. Values that change
// between replays of a graph (lengths, positions, ids, masks) are read from device memory.
#pragma once

#include "core/context.h"
#include "core/tensor.h"

#ifdef CPMCU_WITH_CUDA
#define REGISTER_OP(name, Params)                                            \
  namespace cuda {                                                           \
  void name(const Context& ctx, const Params& params);                       \
  }                                                                          \
  namespace cpu {                                                            \
  void name(const Context& ctx, const Params& params);                       \
  }                                                                          \
  inline void name(const Context& ctx, const Params& params) {               \
    ctx.device.is_cuda() ? cuda::name(ctx, params) : cpu::name(ctx, params); \
  }
#else
#define REGISTER_OP(name, Params)                      \
  namespace cpu {                                      \
  void name(const Context& ctx, const Params& params); \
  }                                                    \
  inline void name(const Context& ctx, const Params& params) { cpu::name(ctx, params); }
#endif
