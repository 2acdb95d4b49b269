// cublasLt on host memory: the entry points that csrc/kernels/gemm.cuh calls, from NVIDIA's
// documentation of them. A plain loop per element in fp64, so a wrong layout, transpose, leading
// dimension, type or beta gives wrong numbers; and a broken rule (sizes that do not fit, an
// alignment promised and not kept, an algorithm of another problem) gives an error status.

#include "fake_cublaslt.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cublasLt.h>

namespace fake {
Counts counts;
bool supported = true;
cublasStatus_t matmul_status = CUBLAS_STATUS_SUCCESS;

namespace {

struct Layout {
  cudaDataType type;
  uint64_t rows, cols;
  int64_t ld;
};
struct Description {
  int32_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_MASK, a = 256, b = 256, c = 256, d = 256;
};

template <typename T>
const T& as(const void* opaque) {
  return *static_cast<const T*>(opaque);
}

size_t bytes_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

double load(const void* data, cudaDataType type, int64_t i) {
  const char* at = static_cast<const char*>(data) + i * static_cast<int64_t>(bytes_of(type));
  if (type == CUDA_R_32F) return as<float>(at);
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return type == CUDA_R_16BF ? from_bfloat16(bits) : from_half(bits);
}
void store(void* data, cudaDataType type, int64_t i, double value) {
  char* at = static_cast<char*>(data) + i * static_cast<int64_t>(bytes_of(type));
  const float single = static_cast<float>(value);
  const uint16_t bits = type == CUDA_R_16BF ? to_bfloat16(single) : to_half(single);
  type == CUDA_R_32F ? std::memcpy(at, &single, 4) : std::memcpy(at, &bits, 2);
}

bool aligned(const void* pointer, uint32_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// The problem that an algorithm was chosen for: everything but the addresses
struct Chosen {
  Layout a, b, c, d;
  int32_t transa, transb;
  uint32_t align_a, align_b, align_c, align_d;
  uint64_t workspace;
  bool operator==(const Chosen&) const = default;
};
bool operator==(const Layout& x, const Layout& y) {
  return x.type == y.type && x.rows == y.rows && x.cols == y.cols && x.ld == y.ld;
}
std::vector<Chosen>& chosen() {
  static std::vector<Chosen> all;
  return all;
}

struct Shape {
  uint64_t m, n, k;
};
bool fits(const Description& op, const Layout& a, const Layout& b, const Layout& c, const Layout& d,
          Shape& shape) {
  shape.m = op.transa == CUBLAS_OP_N ? a.rows : a.cols;
  shape.k = op.transa == CUBLAS_OP_N ? a.cols : a.rows;
  shape.n = op.transb == CUBLAS_OP_N ? b.cols : b.rows;
  const uint64_t k_of_b = op.transb == CUBLAS_OP_N ? b.rows : b.cols;
  for (const Layout* m : {&a, &b, &c, &d})
    if (m->rows == 0 || m->cols == 0 || m->ld < static_cast<int64_t>(m->rows)) return false;
  if (shape.k != k_of_b || d.rows != shape.m || d.cols != shape.n || !(c == d)) return false;
  return a.type == b.type && (d.type == a.type || d.type == CUDA_R_32F);
}

}  // namespace
}  // namespace fake

using namespace fake;

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  ++counts.alive;
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, cols, ld});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  --counts.alive;
  delete reinterpret_cast<Layout*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  ++counts.alive;
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new Description());
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t description) {
  --counts.alive;
  delete reinterpret_cast<Description*>(description);
  return CUBLAS_STATUS_SUCCESS;
}

namespace {
template <typename T>
cublasStatus_t take(T& field, const void* value, size_t size) {
  if (value == nullptr || size != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, size);
  return CUBLAS_STATUS_SUCCESS;
}
}  // namespace

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t made,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  auto& op = *reinterpret_cast<Description*>(made);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take(op.transa, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return take(op.transb, value, size);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  ++counts.alive;
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference());
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t preference) {
  --counts.alive;
  delete reinterpret_cast<Preference*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t made,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t size) {
  auto& preference = *reinterpret_cast<Preference*>(made);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return take(preference.workspace, value, size);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return take(preference.reduction, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return take(preference.a, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return take(preference.b, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return take(preference.c, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return take(preference.d, value, size);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t made,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* count) {
  ++counts.heuristics;
  const auto& op = as<Description>(made);
  const auto& wanted = as<Preference>(preference);
  const Chosen choice{as<Layout>(a), as<Layout>(b), as<Layout>(c),   as<Layout>(d),
                      op.transa,     op.transb,     wanted.a,        wanted.b,
                      wanted.c,      wanted.d,      wanted.workspace};
  Shape shape;
  if (asked < 1 || !fits(op, choice.a, choice.b, choice.c, choice.d, shape))
    return CUBLAS_STATUS_INVALID_VALUE;
  // Partial sums of a split product may be kept in fp32 only
  if (wanted.reduction & ~static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE))
    return CUBLAS_STATUS_INVALID_VALUE;
  *count = supported ? 1 : 0;
  if (!supported) return CUBLAS_STATUS_NOT_SUPPORTED;
  results[0] = {};
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].workspaceSize = wanted.workspace;
  results[0].algo.data[0] = chosen().size() + 1;
  chosen().push_back(choice);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t made, const void* alpha,
                              const void* pa, cublasLtMatrixLayout_t a, const void* pb,
                              cublasLtMatrixLayout_t b, const void* beta, const void* pc,
                              cublasLtMatrixLayout_t c, void* pd, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t bytes,
                              cudaStream_t) {
  ++counts.matmuls;
  if (matmul_status != CUBLAS_STATUS_SUCCESS) return matmul_status;
  const auto& op = as<Description>(made);
  const auto &la = as<Layout>(a), &lb = as<Layout>(b), &lc = as<Layout>(c), &ld = as<Layout>(d);
  Shape shape;
  if (!fits(op, la, lb, lc, ld, shape) || algo == nullptr || algo->data[0] == 0 ||
      algo->data[0] > chosen().size())
    return CUBLAS_STATUS_INVALID_VALUE;
  const Chosen& had = chosen()[algo->data[0] - 1];
  const Chosen now{la,          lb,          lc,          ld,          op.transa,    op.transb,
                   had.align_a, had.align_b, had.align_c, had.align_d, had.workspace};
  if (!(now == had) || bytes < had.workspace || (bytes > 0 && workspace == nullptr))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!aligned(pa, had.align_a) || !aligned(pb, had.align_b) || !aligned(pc, had.align_c) ||
      !aligned(pd, had.align_d))
    return CUBLAS_STATUS_INVALID_VALUE;
  std::memset(workspace, 0xcd, bytes);  // the algorithm may overwrite it

  const double scale = as<float>(alpha), factor = as<float>(beta);
  for (uint64_t i = 0; i < shape.m; ++i) {
    for (uint64_t j = 0; j < shape.n; ++j) {
      double sum = 0;
      for (uint64_t l = 0; l < shape.k; ++l)
        sum += load(pa, la.type, op.transa == CUBLAS_OP_N ? i + l * la.ld : l + i * la.ld) *
               load(pb, lb.type, op.transb == CUBLAS_OP_N ? l + j * lb.ld : j + l * lb.ld);
      double value = scale * sum;
      if (factor != 0) value += factor * load(pc, lc.type, i + j * lc.ld);
      store(pd, ld.type, i + j * ld.ld, value);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
