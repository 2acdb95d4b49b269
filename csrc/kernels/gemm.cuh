// Matrix products through cublasLt, which adds to a result of another type than the factors'.
// Torch-free: pointers in, a status out; the caller supplies handle, workspace and stream.
//
// All matrices are row-major: element (i, j) of a matrix with leading dimension ld is [i * ld + j].
// cublasLt's are column-major, where the same memory is the transposed matrix; so D = L R is
// requested as D^T = R^T L^T, with R as its A and L as its B.
//
// Partial sums of a split product stay in fp32 (not in the output's type), so that a result is
// rounded once. The algorithm for a problem is looked up once and cached, on the host alone.

#pragma once

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace tp_ext::gemm {

// A matrix in row-major memory; `transposed`: its transpose is the factor
struct Matrix {
  const void* data;
  int64_t rows, cols, ld;  // as stored
  cudaDataType_t type;
  bool transposed = false;
};

// D = L R, or D += L R
struct Problem {
  Matrix left, right, result;
  bool accumulate = false;
};

struct Context {
  cublasLtHandle_t handle;
  int device;
  void* workspace;
  size_t workspace_bytes;
  cudaStream_t stream;
};

// kUnsupported: cublasLt has no algorithm, nothing was done and the caller computes it otherwise
enum class Outcome { kDone, kUnsupported, kFailed };
struct Status {
  Outcome outcome;
  std::string message;  // what failed, with the shapes
};

// grad += dy^T x, grad fp32 next to half factors; all may have longer leading dimensions
inline Problem weight_grad(const Matrix& dy, const Matrix& x, const Matrix& grad) {
  Problem problem{dy, x, grad};
  problem.left.transposed = true;
  problem.accumulate = true;
  return problem;
}

// The largest power of two up to 256 that divides the address: the alignment promised to an
// algorithm
inline uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

// Everything that the choice of an algorithm depends on
using Key = std::array<int64_t, 20>;
inline Key key_of(const Problem& p, const Context& context) {
  const auto of = [](const Matrix& m) {
    return std::array<int64_t, 6>{m.rows, m.cols, m.ld, m.type, m.transposed, alignment_of(m.data)};
  };
  const auto l = of(p.left), r = of(p.right), d = of(p.result);
  return {l[0], l[1], l[2],         l[3],           l[4],
          l[5], r[0], r[1],         r[2],           r[3],
          r[4], r[5], d[0],         d[1],           d[2],
          d[3], d[5], p.accumulate, context.device, static_cast<int64_t>(context.workspace_bytes)};
}

// Algorithms by problem, nullopt where there is none; cleared when there are many, as with batches
// that all have different lengths
class Algorithms {
 public:
  using Choice = std::optional<cublasLtMatmulAlgo_t>;

  std::optional<Choice> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = choices_.find(key);
    return found == choices_.end() ? std::nullopt : std::optional<Choice>(found->second);
  }
  void keep(const Key& key, const Choice& choice) {
    const std::lock_guard lock(mutex_);
    if (choices_.size() >= 4096) choices_.clear();
    choices_[key] = choice;
  }

 private:
  std::mutex mutex_;
  std::map<Key, Choice> choices_;
};
inline Algorithms& algorithms() {
  static Algorithms* const all = new Algorithms();  // outlives threads that still compute at exit
  return *all;
}

namespace detail {

struct Failure {
  const char* call;
  cublasStatus_t status;
};
inline void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw Failure{call, status};
}
#define TP_LT(name, ...) ::tp_ext::gemm::detail::check(name(__VA_ARGS__), #name)

template <typename T, cublasStatus_t (*destroy)(T)>
struct Destroy {
  using pointer = T;
  void operator()(T object) const { destroy(object); }
};
using Layout = std::unique_ptr<void, Destroy<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>>;
using Description = std::unique_ptr<void, Destroy<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>>;
using Preference =
    std::unique_ptr<void, Destroy<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>>;

inline Layout layout_of(const Matrix& m) {
  cublasLtMatrixLayout_t made;
  TP_LT(cublasLtMatrixLayoutCreate, &made, m.type, m.cols, m.rows, m.ld);
  return Layout(made);
}

template <typename T>
void set(const Description& description, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  TP_LT(cublasLtMatmulDescSetAttribute, description.get(), attribute, &value, sizeof value);
}
template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  TP_LT(cublasLtMatmulPreferenceSetAttribute, preference.get(), attribute, &value, sizeof value);
}

inline Description description_of(const Problem& p) {
  cublasLtMatmulDesc_t made;
  TP_LT(cublasLtMatmulDescCreate, &made, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  Description description(made);
  const auto op = [](const Matrix& m) -> int32_t {
    return m.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  set(description, CUBLASLT_MATMUL_DESC_TRANSA, op(p.right));
  set(description, CUBLASLT_MATMUL_DESC_TRANSB, op(p.left));
  return description;
}

struct Layouts {
  Layout a, b, d;
};

inline Algorithms::Choice choose(const Problem& p, const Context& context,
                                 const Description& description, const Layouts& layouts) {
  cublasLtMatmulPreference_t made;
  TP_LT(cublasLtMatmulPreferenceCreate, &made);
  const Preference preference(made);
  const uint32_t in_fp32 = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const uint32_t result_alignment = alignment_of(p.result.data);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
      static_cast<uint64_t>(context.workspace_bytes));
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, in_fp32);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.right.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.left.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, result_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, result_alignment);
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      context.handle, description.get(), layouts.a.get(), layouts.b.get(), layouts.d.get(),
      layouts.d.get(), preference.get(), 1, &found, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return std::nullopt;
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  if (count == 0 || found.state != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  return found.algo;
}

inline std::string words(const Matrix& m) {
  return "[" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "]" +
         (m.transposed ? "^T" : "") + " of type " + std::to_string(m.type) +
         ", leading dimension " + std::to_string(m.ld);
}

}  // namespace detail

// "D = L R" in words, for messages
inline std::string words(const Problem& p) {
  return "result " + detail::words(p.result) + (p.accumulate ? " += " : " = ") +
         detail::words(p.left) + " times " + detail::words(p.right);
}

// Computes the problem on the context's stream. Sizes must be positive.
inline Status run(const Problem& p, const Context& context) {
  using namespace detail;
  try {
    const Description description = description_of(p);
    const Layouts layouts{layout_of(p.right), layout_of(p.left), layout_of(p.result)};
    const Key key = key_of(p, context);
    auto choice = algorithms().find(key);
    if (!choice) algorithms().keep(key, choice.emplace(choose(p, context, description, layouts)));
    if (!*choice) return {Outcome::kUnsupported, {}};
    const float one = 1.f, beta = p.accumulate ? 1.f : 0.f;
    void* const result = const_cast<void*>(p.result.data);
    const cublasStatus_t status = cublasLtMatmul(
        context.handle, description.get(), &one, p.right.data, layouts.a.get(), p.left.data,
        layouts.b.get(), &beta, result, layouts.d.get(), result, layouts.d.get(), &**choice,
        context.workspace, context.workspace_bytes, context.stream);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {Outcome::kUnsupported, {}};
    check(status, "cublasLtMatmul");
    return {Outcome::kDone, {}};
  } catch (const Failure& failure) {
    return {Outcome::kFailed, std::string(failure.call) + ": status " +
                                  std::to_string(failure.status) + " for " + words(p)};
  }
}
#undef TP_LT

}  // namespace tp_ext::gemm
