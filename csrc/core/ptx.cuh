// One wrapper for each PTX instruction. The comments say when to use it.
// Length of this file: each instruction has a wrapper, and there is no other code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/wgmma.cuh"

namespace cpmcu::ptx {

// Waits until all earlier kernels of the stream are complete and their writes are visible. Every
// thread of every kernel calls it (core/launch.h has the contract).
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its prologue. Call it as early as shared memory allows.
__device__ __forceinline__ void pdl_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies `bytes` bytes, at most 16, from global to shared memory without registers. The rest of the
// 16 becomes zero. In this file, a uint32_t address is a shared_address(). Constant offsets are
// part of an instruction.
__device__ __forceinline__ void cp_async_first(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global, bool valid = true) {
  cp_async_first(shared, global, valid ? 16 : 0);
}
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid = true) {
  cp_async16(shared_address(shared), global, valid);
}
// The same without a branch, if `copies`.
__device__ __forceinline__ void cp_async16_if(bool copies, uint32_t shared, const void* global) {
  asm volatile(
      "{ .reg .pred copies;\n"
      "setp.ne.u32 copies, %2, 0;\n"
      "@copies cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(shared),
      "l"(global), "r"(static_cast<uint32_t>(copies))
      : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" :::); }
// Waits until at most kPending of this thread's cp.async groups are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// For load_stream16: L2 evicts lines read under this policy first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Loads 16 bytes that are read once, without allocating in L1. For weights.
__device__ __forceinline__ uint4 load_stream16(const void* global, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global), "l"(policy));
  return v;
}

// True in one thread of the warp; all 32 threads must call it. The compiler then knows that one
// thread is active. Otherwise it wraps each mbarrier instruction in a loop over the threads of the
// warp.
__device__ __forceinline__ bool is_elected() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
#else
  return threadIdx.x % 32 == 0;
#endif
}

// ---- mbarriers: a phase completes after all expected arrivals and bytes

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA. A CTA barrier must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}
// Arrives when all earlier cp.async copies of this thread are complete; counts as one arrival.
__device__ __forceinline__ void mbarrier_arrive_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of this parity completes. The first phase has parity 0.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Whether the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_has_ended(uint32_t barrier, int parity) {
  uint32_t ended;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}
// Whether the phase of this parity is complete; may suspend the thread briefly. An early call hides
// the latency of the test. If !asks, returns false without testing.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, int parity, bool asks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t ended;
  asm volatile(
      "{ .reg .pred done, asks;\n"
      "setp.ne.u32 asks, %3, 0;\n"
      "setp.ne.u32 done, 0, 0;\n"
      "@asks mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(ended)
      : "r"(barrier), "r"(parity), "r"(static_cast<uint32_t>(asks))
      : "memory");
  return ended != 0;
#else
  return asks && mbarrier_has_ended(barrier, parity);
#endif
}
// Waits unless an earlier mbarrier_try_wait returned true. The branch is inside the assembly. With
// a branch in C++, the compiler would no longer know which values are warp-uniform.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity, bool has_ended) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done;\n"
      "setp.ne.u32 done, %2, 0;\n"
      "@done bra over;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "over: }" ::"r"(barrier),
      "r"(parity), "r"(static_cast<uint32_t>(has_ended))
      : "memory");
#else
  if (!has_ended) mbarrier_wait(barrier, parity);
#endif
}

// Arrives, and adds `bytes` to the bytes that the phase expects from bulk copies.
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t barrier, int bytes) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}
// TMA copy of contiguous memory (16-byte aligned, a multiple of 16 bytes), such as a weight block.
// One thread issues it. Its bytes count on the barrier.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, int bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// ---- between the CTAs of a kernel, all of which are co-resident

// Adds `count` with release semantics: earlier writes of this thread, and writes that it observed
// through a barrier, become visible first.
__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t count = 1) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}
// Loads with acquire semantics: the writes released before the observed count are visible
// afterwards.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
// Makes writes that load_acquire made visible to this thread visible to TMA.
__device__ __forceinline__ void copy_engine_fence() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// ---- clusters

// Arrives at the cluster barrier. Call mbarrier_init_fence before it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// The address in CTA `rank` of the cluster that corresponds to `shared` in this CTA.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// As mbarrier_arrive, at a cluster_address(). A consumer calls it after its reads. NOTE: it does
// not publish writes; cluster-scope release would be a device-wide fence.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores 16 or 8 bytes to a CTA of the cluster (DSMEM). The bytes count on the receiver's barrier,
// so only the receiver waits and no fence is needed. Both addresses are cluster_address()es of one
// rank.
__device__ __forceinline__ void store_cluster16(uint32_t to, const float (&v)[4],
                                                uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_cluster8(uint32_t to, float2 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(v.x), "f"(v.y), "r"(barrier)
      : "memory");
}

// Waits at the cluster barrier: all CTAs of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Hides from the compiler how v was computed: it neither recomputes v nor simplifies with it. For
// values that must stay in registers across a loop, and for loops that must not become divisions.
__device__ __forceinline__ void opaque(uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void opaque(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void opaque(const char*& v) { asm volatile("" : "+l"(v)); }

// Two words of 8 bytes, each read or written atomically, in memory that GPUs share. Use them if
// each word holds its data and its flag. Nothing orders the two words, or other accesses.
__device__ __forceinline__ void store_system64x2(uint64_t* to, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ ulonglong2 load_system64x2(const uint64_t* from) {
  unsigned long long a, b;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(a), "=l"(b)
               : "l"(from)
               : "memory");
  return {a, b};
}

// A clock that all SMs share.
__device__ __forceinline__ unsigned long long global_nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// The number of SM ids, at least the number of SMs: some ids may be unused.
__device__ __forceinline__ unsigned num_sms() {
  unsigned number;
  asm("mov.u32 %0, %nsmid;" : "=r"(number));
  return number;
}

// The warp index of this thread, as a value that the compiler knows to be warp-uniform.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}

// The lane of this thread. volatile: what is computed from it is not moved in front of a loop.
__device__ __forceinline__ int volatile_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// (v & mask) | bits in one instruction. For building floating-point numbers from bits.
__device__ __forceinline__ uint32_t masked_or(uint32_t v, uint32_t mask, uint32_t bits) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(v), "r"(mask), "r"(bits));
  return out;
}

// Shared memory accesses by address, for buffers that TMA or other CTAs fill. They are
// volatile: the compiler neither moves nor caches them.
__device__ __forceinline__ uint4 load_shared16(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared));
  return v;
}
__device__ __forceinline__ void store_shared16(uint32_t shared, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}
__device__ __forceinline__ void store_shared16(uint32_t shared, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ float load_shared_float(uint32_t shared) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t shared) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared));
  return v;
}
__device__ __forceinline__ uint16_t load_shared_half(uint32_t shared) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared));
  return v;
}
__device__ __forceinline__ int load_shared_byte(uint32_t shared) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(shared));
  return static_cast<int>(v);
}

// Loads four 8x8 matrices of 16-bit elements from shared memory into fragments.
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], const void* shared) {
  ldmatrix4(r, shared_address(shared));
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], const void* shared) {
  ldmatrix4_trans(r, shared_address(shared));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The inverse of ldmatrix4_trans.
__device__ __forceinline__ void stmatrix4_trans(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
#endif

// d += a b: a 16x16 row-major, b 16x8 column-major, d 16x8 float32.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);
template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x with an error of about 2 ulp; exactly 1 at 0 and 0 at -inf. For softmax.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A barrier of kThreads threads of the CTA. Barrier 0 is the one of __syncthreads.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Sets the registers of each thread of the warpgroup; all its warps must execute it. Does nothing
// if compiled for another target than 9.0a.
template <int kCount>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
// Prefetches the 128-byte line of `at` to L2.
__device__ __forceinline__ void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
// Prefetches a CUtensorMap.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- wgmma: asynchronous matrix multiplication by a warpgroup

// Makes this thread's writes to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void shared_copy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Copies a box of a two-dimensional tensor. The CUtensorMap has its size; x counts elements, y
// rows.
__device__ __forceinline__ void tensor_copy(uint32_t shared, const void* map, int x, int y,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// The same with an L2 policy.
__device__ __forceinline__ void tensor_copy(uint32_t shared, const void* map, int x, int y,
                                            uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}

// Like tensor_copy, but multicast to each CTA of the cluster whose bit is set in `cta_mask`.
// `shared` and `barrier` are at the same offset in each CTA.
__device__ __forceinline__ void tensor_multicast(uint32_t shared, const void* map, int x, int y,
                                                 uint32_t barrier, uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(cta_mask)
      : "memory");
}

// Like tensor_copy, for a tensor of four dimensions; x is the coordinate in the first, y in the
// last.
__device__ __forceinline__ void tensor_copy4(uint32_t shared, const void* map, int x, int y,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%5, %5, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "r"(0)
      : "memory");
}

// Required before a wgmma whose registers were written by other instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The offset of a 16-byte chunk of a row in panels [kRows][128 bytes] with 128-byte swizzle, which
// TMA writes and wgmma reads. A chunk has kUnits units; the offset is in units. Chunks of the same
// index in 8 consecutive rows are in 8 different bank groups.
template <int kRows, int kUnits = 16>
__device__ __forceinline__ constexpr int swizzled_chunk(int row, int chunk) {
  return chunk / 8 * (kRows * 8 * kUnits) + row * (8 * kUnits) + (chunk % 8 ^ row % 8) * kUnits;
}
// The wgmma descriptor of a swizzled panel in shared memory, 1024-byte aligned. All lanes of the
// warp must pass the same address. The shuffle makes the address uniform for the compiler. Without
// the shuffle, the compiler moves every descriptor to uniform registers separately.
__device__ __forceinline__ uint64_t wgmma_descriptor_swizzle128(uint32_t shared) {
  shared = __shfl_sync(0xffffffffu, shared, 0);
  const uint64_t stride = 1024 / 16;  // from 8 rows to the next 8
  return uint64_t{1} << 62 | stride << 32 | uint64_t{1} << 16 | (shared & 0x3FFFF) >> 4;
}

// 16 bytes whose value shows whether they have arrived. Not ordered with other accesses.
__device__ __forceinline__ void store_relaxed16(void* to, const float (&v)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]),
               "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
__device__ __forceinline__ uint4 load_relaxed16(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// Stores 8 bytes. From C++ the compiler may make two stores of 4 bytes.
__device__ __forceinline__ void store_global8(float* to, float a, float b) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
}
// 8 bytes as one access: a reader sees all of them or none.
__device__ __forceinline__ void store_relaxed8(uint64_t* to, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t load_relaxed8(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}

// Stores with system-scope release semantics. A host thread that reads the value also sees earlier
// writes of this thread, and writes that it observed through a CTA barrier.
__device__ __forceinline__ void store_release_system(volatile uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

}  // namespace cpmcu::ptx
