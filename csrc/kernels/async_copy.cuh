// Copies from global to shared memory that need no registers while they are in flight (sm_80; on
// older GPUs they are loads and stores).

#pragma once

#include "vec.cuh"

namespace tp_ext {

#ifdef __CUDACC__  // tests on a host supply their own
// One vector, of zeros unless `owns`. Only the thread that copied it may read it without a barrier.
template <typename V>
__device__ __forceinline__ void copy_async(V* to, const V* from, bool owns) {
  static_assert(sizeof(V) == kVecBytes);
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "r"(owns ? 16 : 0)
               : "memory");
#else
  *to = owns ? *from : V{};
#endif
}
// The copies since the last call are one batch
__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for all of this thread's batches but the last kLater
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}
#endif

}  // namespace tp_ext
