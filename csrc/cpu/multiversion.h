// Function multiversioning: loops for several instruction sets in one binary.
//
// [Note: CPU kernels are plain loops]

#pragma once

// Compiles the function once per x86-64 level; the loader picks the best version for the machine,
// so a wheel runs on any x86-64 and the loops still use AVX2 or AVX-512. Inlined callees get the
// same target, and `flatten` inlines them all: left to its size limits, gcc leaves a call in the
// loops of the larger activations, which then run 50 times slower. Other targets: one version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define TP_MULTIVERSION \
  __attribute__((flatten, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TP_MULTIVERSION
#endif

// Always inlined, so the body is compiled for its caller's ISA. TP_INLINED is the form for lambdas.
#define TP_INLINE inline __attribute__((always_inline))
#define TP_INLINED __attribute__((always_inline))

namespace tp_ext {

// Whether the machine has AVX-512 as in x86-64-v4, for functions that use its instructions
// explicitly
inline bool has_avx512() {
#if defined(__x86_64__) && defined(__GNUC__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

}  // namespace tp_ext
