// csrc/kernels/gemm.cuh over fake_cublaslt.cpp: products against loops written from the formulas,
// and the wrapper's cache, refusals and errors. Prints each failure; exits with the number of
// failures.

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "fake_cublaslt.h"
#include "kernels/gemm.cuh"

namespace {

using namespace tp_ext::gemm;

int failures = 0;
void expect(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

std::mt19937 generator(7);

// A matrix of `type` on the heap that ends with its last element, so that accesses past the end are
// found; `shift` elements after a 256-byte boundary. The gaps between rows are NaN, and must stay
// NaN.
struct Buffer {
  int64_t rows, cols, ld;
  cudaDataType type;
  std::vector<char> memory;
  char* data;

  Buffer(int64_t rows, int64_t cols, int64_t ld, cudaDataType type, int64_t shift = 0)
      : rows(rows), cols(cols), ld(ld), type(type) {
    const int64_t bytes = ((rows - 1) * ld + cols + shift) * size();
    memory.resize(256 + bytes);
    memory.shrink_to_fit();
    const auto at = reinterpret_cast<uintptr_t>(memory.data() + memory.size()) - bytes;
    const auto back = at % 256;  // towards the front: the end stays as near as alignment allows
    data = reinterpret_cast<char*>(at - back) + shift * size();
    for (int64_t i = 0; i < (rows - 1) * ld + cols; ++i)
      set(i, std::numeric_limits<float>::quiet_NaN());
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        set(i * ld + j, std::normal_distribution<float>()(generator));
  }
  Buffer(const Buffer&) = delete;

  int64_t size() const { return type == CUDA_R_32F ? 4 : 2; }
  double get(int64_t i, int64_t j) const {
    if (type == CUDA_R_32F) return reinterpret_cast<const float*>(data)[i * ld + j];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(data)[i * ld + j];
    return type == CUDA_R_16BF ? fake::from_bfloat16(bits) : fake::from_half(bits);
  }
  void set(int64_t at, float value) {
    if (type == CUDA_R_32F)
      reinterpret_cast<float*>(data)[at] = value;
    else
      reinterpret_cast<uint16_t*>(data)[at] = std::isnan(value)     ? 0x7fff
                                              : type == CUDA_R_16BF ? fake::to_bfloat16(value)
                                                                    : fake::to_half(value);
  }
  Matrix matrix() const { return {data, rows, cols, ld, type}; }
  double eps() const {
    return type == CUDA_R_32F ? 1.2e-7 : type == CUDA_R_16BF ? 1. / 128 : 1. / 1024;
  }

  // One rounding of each element, and the difference between the formulas
  template <typename F>
  void is(F want, const std::string& what) const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        const double error = std::abs(get(i, j) - want(i, j));
        if (!(error <= eps() * std::abs(want(i, j)) + 1e-6))
          return expect(false, what + " at " + std::to_string(i) + ", " + std::to_string(j) + ": " +
                                   std::to_string(get(i, j)) + ", not " +
                                   std::to_string(want(i, j)));
      }
      for (int64_t j = cols; j < ld && i + 1 < rows; ++j)
        if (!std::isnan(get(i, j))) return expect(false, what + ": wrote between the rows");
    }
  }
};

alignas(256) char workspace[1024];
Context context() { return {nullptr, 0, workspace, sizeof workspace, nullptr}; }

void done(const Problem& problem, const std::string& what) {
  const Status status = run(problem, context());
  expect(status.outcome == Outcome::kDone, what + ": " + status.message);
}

struct Case {
  int64_t rows, in, out, extra,
      shift;  // extra: how much longer the leading dimensions of x, dy and weight are
};

void weight_grad_is_right(cudaDataType type, cudaDataType of_grad, const Case& c) {
  const Buffer dy(c.rows, c.out, c.out + c.extra, type, c.shift),
      x(c.rows, c.in, c.in + c.extra, type, c.shift);
  const Buffer grad(c.out, c.in, c.in + c.extra, of_grad, c.shift);
  std::vector<double> before;
  for (int64_t i = 0; i < c.out; ++i)
    for (int64_t j = 0; j < c.in; ++j) before.push_back(grad.get(i, j));
  done(weight_grad(dy.matrix(), x.matrix(), grad.matrix()), "weight_grad");
  const auto want = [&](int64_t i, int64_t j) {
    double sum = before[i * c.in + j];
    for (int64_t k = 0; k < c.rows; ++k) sum += dy.get(k, i) * x.get(k, j);
    return sum;
  };
  grad.is(want, "main_grad");
}

void algorithms_are_kept() {
  const Buffer dy(4, 8, 16, CUDA_R_16BF), x(4, 16, 24, CUDA_R_16BF, 0), grad(8, 16, 24, CUDA_R_32F);
  const auto problem = weight_grad(dy.matrix(), x.matrix(), grad.matrix());
  done(problem, "first");
  int asked = fake::counts.heuristics;
  done(problem, "again");
  expect(fake::counts.heuristics == asked, "the same problem is asked for once");
  const auto asks = [&](const Problem& other, const Context& with, const char* what) {
    expect(run(other, with).outcome == Outcome::kDone, what);
    expect(fake::counts.heuristics == ++asked, std::string("another problem: ") + what);
  };
  auto other = problem;
  other.left.data = dy.data + 2;
  other.left.rows = other.right.rows = 3;
  asks(other, context(), "shape");
  other = problem;
  other.left.ld = 8;
  asks(other, context(), "leading dimension");
  other = problem;
  other.left.data = dy.data + 16;
  asks(other, context(), "address");
  other = problem;
  other.accumulate = false;
  asks(other, context(), "beta");
  auto with = context();
  with.device = 1;
  asks(problem, with, "device");
  with.workspace_bytes = 512;
  asks(problem, with, "workspace");
  Key last{};
  for (int i = 0; i < 5000; ++i) {
    last[0] = -i;
    algorithms().keep(last, std::nullopt);
  }
  expect(algorithms().find(last).has_value(), "the latest is there");
  expect(!algorithms().find(key_of(problem, context())), "not more than some thousands are kept");
}

void what_is_not_done_is_reported() {
  const Buffer dy(5, 8, 8, CUDA_R_16F), x(5, 24, 24, CUDA_R_16F), grad(8, 24, 24, CUDA_R_32F);
  const auto problem = weight_grad(dy.matrix(), x.matrix(), grad.matrix());
  const double before = grad.get(3, 5);
  fake::supported = false;
  expect(run(problem, context()).outcome == Outcome::kUnsupported, "no algorithm");
  const int asked = fake::counts.heuristics, multiplied = fake::counts.matmuls;
  expect(run(problem, context()).outcome == Outcome::kUnsupported, "no algorithm, again");
  expect(fake::counts.heuristics == asked && fake::counts.matmuls == multiplied,
         "that is kept, too");
  fake::supported = true;

  auto with = context();
  with.device = 3;
  fake::matmul_status = CUBLAS_STATUS_NOT_SUPPORTED;
  expect(run(problem, with).outcome == Outcome::kUnsupported, "the product is not supported");
  fake::matmul_status = CUBLAS_STATUS_EXECUTION_FAILED;
  const auto status = run(problem, with);
  fake::matmul_status = CUBLAS_STATUS_SUCCESS;
  expect(status.outcome == Outcome::kFailed, "the product fails");
  for (const char* part :
       {"cublasLtMatmul: status 13", "[8, 24]", "[5, 8]^T", "[5, 24]", "leading dimension 24"})
    expect(status.message.find(part) != std::string::npos,
           std::string(part) + " is in: " + status.message);
  expect(grad.get(3, 5) == before, "and nothing was written");

  auto wrong = problem;
  wrong.right.rows = 6;
  const auto invalid = run(wrong, with);
  expect(invalid.outcome == Outcome::kFailed &&
             invalid.message.find("AlgoGetHeuristic: status 7") != std::string::npos,
         "sizes that do not fit: " + invalid.message);

  for (const int shift : {2, 4, 16, 64, 256})
    expect(alignment_of(reinterpret_cast<void*>(0x10000 + shift)) == static_cast<uint32_t>(shift),
           "alignment");
}

}  // namespace

int main() {
  const Case cases[] = {{1, 8, 8, 0, 0},  {3, 16, 8, 0, 0},  {5, 7, 24, 0, 0}, {17, 5, 40, 0, 0},
                        {2, 1, 16, 0, 0}, {9, 24, 16, 8, 0}, {4, 3, 8, 5, 0},  {6, 10, 8, 3, 1}};
  for (const auto type : {CUDA_R_16BF, CUDA_R_16F}) {
    for (const Case& c : cases) {
      weight_grad_is_right(type, CUDA_R_32F, c);
      weight_grad_is_right(type, type, c);
    }
  }
  algorithms_are_kept();
  what_is_not_done_is_reported();
  expect(fake::counts.alive == 0, "every descriptor is destroyed");
  std::printf("%d products, %d failures\n", fake::counts.matmuls, failures);
  return failures;
}
