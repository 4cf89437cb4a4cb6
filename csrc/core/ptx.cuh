// PTX instructions, one wrapper each; the comment says when to use it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/wgmma.cuh"

namespace cpmcu::ptx {

// Waits until every kernel before this one in the stream is done and its writes are visible.
// In every kernel, in every thread (core/launch.h says why, and what may be done before).
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its prologue. As early as shared memory allows.
__device__ __forceinline__ void pdl_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory without registers; zeros when !valid.
// Here and below a uint32_t is a shared_address(): sums of it fold into the instruction.
__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid = true) {
  cp_async16(shared_address(shared), global, valid);
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" :::); }
// Waits until at most kPending of this thread's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// For load_stream16: what is read under this policy leaves L2 first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes that are read once, past L1. For weights.
__device__ __forceinline__ uint4 load_stream16(const void* global, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global), "l"(policy));
  return v;
}

// Whether this is the thread that its warp, which is here as a whole, chooses. Then the compiler
// knows that it is alone; what threads of a warp do with barriers it else has them do one after
// another, in a loop around each instruction.
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

// ---- mbarriers: a phase ends when all expected arrivals and bytes are there

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine; then a block barrier.
__device__ __forceinline__ void mbarrier_init_fence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}
// This thread's cp.asyncs so far arrive when they are done; counts as one of the arrivals.
__device__ __forceinline__ void mbarrier_arrive_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase of this parity; phases alternate from 0.
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

// Whether the phase of this parity has ended.
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
// Whether it has ended, which may wait for a moment. Asked early, the answer is there when it is
// needed. Where nobody `asks` it is no.
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
// What is left to wait for after mbarrier_try_wait. Without a branch that the compiler sees: it
// would no longer know what is the same in all lanes.
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

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Arrives and expects that many bytes more of bulk copies in this phase.
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t barrier, int bytes) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}
// A contiguous piece (16-byte aligned, a multiple of 16 bytes) by the copy engine, issued by one
// thread; counts on the barrier. For weights: whole blocks, no registers.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, int bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// ---- between the blocks of a kernel, all of which run at the same time

// Counts `count`: all that this thread wrote, or that a barrier told it of, comes before.
__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t count = 1) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}
// What came before the counts that are seen here is visible after.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
// Lets the copy engine see what load_acquire made visible to this thread.
__device__ __forceinline__ void copy_engine_fence() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// 16 bytes that say by themselves whether they have come: no order with anything else.
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

// ---- clusters

// First half of a barrier of the cluster: this block's mbarriers are initialised (after
// mbarrier_init_fence).
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Second half: those of all its blocks are.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where block `rank` of the cluster has what this block has at `shared`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// As mbarrier_arrive, at a cluster_address(), by who has read what may be written anew. NOTE: not
// for what was written: with release semantics for the cluster it would be a device-wide fence.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// 16 bytes into another block of the cluster; they count on its barrier, so nobody waits but the
// receiver and no fence is needed. Both are cluster_address()es of the same rank.
__device__ __forceinline__ void store_cluster16(uint32_t to, const float (&v)[4],
                                                uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
      : "memory");
}
#endif

// The compiler takes v as it is: it does not compute it again, nor conclude anything from how it
// was computed. For values that a loop is to keep, and loops that are not to become divisions.
__device__ __forceinline__ void opaque(uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void opaque(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void opaque(const char*& v) { asm volatile("" : "+l"(v)); }

// Of a clock that all multiprocessors share.
__device__ __forceinline__ unsigned long long global_nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// How many multiprocessors there are, or a few more: numbers that none has count, too.
__device__ __forceinline__ unsigned num_sms() {
  unsigned number;
  asm("mov.u32 %0, %nsmid;" : "=r"(number));
  return number;
}

// The number of a thread's warp, and the compiler knows that it is that of the whole warp.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}

// (v & mask) | bits in one instruction. For numbers made of bits.
__device__ __forceinline__ uint32_t masked_or(uint32_t v, uint32_t mask, uint32_t bits) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(v), "r"(mask), "r"(bits));
  return out;
}

// From and to shared memory by address, for buffers that the copy engine or other blocks fill:
// never moved or kept.
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

// Four 8x8 matrices of 16-bit elements from shared memory into fragments.
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
// The other way of ldmatrix4_trans.
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

// 2^x to about two units in the last place; exactly 1 at 0 and 0 at -inf. For softmax.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A barrier of the first kThreads threads of the block; 0 is __syncthreads.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// The registers of each thread of this warpgroup from here on; all its warps say so. (9.0a)
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
// Fetches the 128 bytes around it to L2.
__device__ __forceinline__ void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
// Fetches a CUtensorMap before it is needed.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- wgmma: products of a warpgroup that run asynchronously

// Lets wgmma, and the copy engine, see this thread's writes to shared memory.
__device__ __forceinline__ void shared_copy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// A box of a two-dimensional tensor, as its CUtensorMap says; x counts elements, y rows.
__device__ __forceinline__ void tensor_copy(uint32_t shared, const void* map, int x, int y,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// The same under a policy for L2.
__device__ __forceinline__ void tensor_copy(uint32_t shared, const void* map, int x, int y,
                                            uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}

// The same for all blocks of the cluster whose bits `blocks` has: to where each has `shared` and
// `barrier`.
__device__ __forceinline__ void tensor_multicast(uint32_t shared, const void* map, int x, int y,
                                                 uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}

// Of a tensor of four dimensions, from x of the first and y of the last on.
__device__ __forceinline__ void tensor_copy4(uint32_t shared, const void* map, int x, int y,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%5, %5, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "r"(0)
      : "memory");
}

// Before a wgmma whose registers were written by other instructions.
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
// Where a chunk of 16 bytes of a row lies in panels of [kRows][128 bytes] whose chunks are swizzled
// within 8 rows, as the copy engine writes and wgmma reads them; in units of which a chunk has
// kUnits. Eight rows' chunks of one number are in eight different bank groups.
template <int kRows, int kUnits = 16>
__device__ __forceinline__ constexpr int swizzled_chunk(int row, int chunk) {
  return chunk / 8 * (kRows * 8 * kUnits) + row * (8 * kUnits) + (chunk % 8 ^ row % 8) * kUnits;
}
// Such a panel in shared memory, 1024-byte aligned. By whole warps: all lanes say the same, but the
// compiler has to be told, else it moves every descriptor to uniform registers by itself.
__device__ __forceinline__ uint64_t wgmma_descriptor_swizzle128(uint32_t shared) {
  shared = __shfl_sync(0xffffffffu, shared, 0);
  const uint64_t stride = 1024 / 16;  // from 8 rows to the next 8
  return uint64_t{1} << 62 | stride << 32 | uint64_t{1} << 16 | (shared & 0x3FFFF) >> 4;
}

// Lets the host, which sees the value, see all that this thread wrote before, or that a barrier of
// the block told it of.
__device__ __forceinline__ void store_release_system(volatile uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

}  // namespace cpmcu::ptx
