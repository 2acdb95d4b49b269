// Vocab-parallel embedding on the CPU. Forward copies rows. Backward sorts the positions of the ids
// by row (counting sort, stable), so that threads own disjoint rows and each sums its occurrences
// in order: no atomics, one write.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "args/vocab.h"
#include "cpu/dispatch.h"
#include "kernels/scalar.h"

namespace tp_ext {
namespace {

constexpr int64_t kColumns = 1024;

// Calls f(index type) for int64 and int32 ids
template <typename F>
void dispatch_ids(const at::Tensor& ids, F f) {
  ids.scalar_type() == at::kLong ? f(int64_t{}) : f(int32_t{});
}

at::Tensor fwd_cpu(const at::Tensor& weight_any, const at::Tensor& ids_any, int64_t vocab_start,
                   int64_t vocab_local, int64_t vocab_size) {
  check_embedding(weight_any, ids_any, vocab_start, vocab_local, vocab_size);
  const at::Tensor weight = weight_any.contiguous(), ids = ids_any.contiguous();
  const int64_t tokens = ids.numel();
  const size_t row_bytes = weight.size(1) * weight.element_size();
  auto shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  const at::Tensor result = at::empty(shape, weight.options());
  dispatch_ids(ids, [&](auto type) {
    const auto* id = in<decltype(type)>(ids);
    for (int64_t i = 0; i < tokens; ++i) {
      TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < vocab_size, "ids: ", id[i],
                        " must be in [0, vocab_size), [0, ", vocab_size, ")");
    }
    if (row_bytes == 0) return;
    const char* rows = in<char>(weight);
    char* y = out<char>(result);
    at::parallel_for(0, tokens, rows_per_thread(weight.size(1)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = id[i] - vocab_start;
        if (row >= 0 && row < vocab_local) {
          std::memcpy(y + i * row_bytes, rows + row * row_bytes, row_bytes);
        } else {
          std::memset(y + i * row_bytes, 0, row_bytes);
        }
      }
    });
  });
  return result;
}

// dw = sum of the rows grad[positions[0]], grad[positions[1]], ..., in this order, in fp32 (fp64
// for fp64)
template <typename T>
TP_MULTIVERSION void sum_rows(const T* grad, const int64_t* positions, int64_t count,
                              int64_t hidden, T* dw) {
  using A = acc_t<T>;
  A sum[kColumns];
  for (int64_t start = 0; start < hidden; start += kColumns) {
    const int64_t size = std::min(kColumns, hidden - start);
    for (int64_t j = 0; j < size; ++j) sum[j] = 0;
    for (int64_t k = 0; k < count; ++k) {
      const T* g = grad + positions[k] * hidden + start;
      for (int64_t j = 0; j < size; ++j) sum[j] += to_acc(g[j]);
    }
    for (int64_t j = 0; j < size; ++j) dw[start + j] = from_acc<T>(sum[j]);
  }
}

at::Tensor bwd_cpu(const at::Tensor& grad_any, const at::Tensor& ids_any, int64_t num_rows,
                   int64_t vocab_start, int64_t vocab_local) {
  const at::Tensor grad =
      check_embedding_grad(grad_any, ids_any, num_rows, vocab_start, vocab_local);
  const at::Tensor ids = ids_any.contiguous();
  const int64_t tokens = ids.numel(), hidden = grad.size(-1);
  const at::Tensor dweight = at::empty({num_rows, hidden}, grad.options());

  // positions[first[row] .. first[row + 1]) are the tokens of a row
  std::vector<int64_t> first(vocab_local + 2, 0), positions(tokens);
  dispatch_ids(ids, [&](auto type) {
    const auto* id = in<decltype(type)>(ids);
    const auto local_row = [&](int64_t i) {
      const int64_t row = id[i] - vocab_start;
      return row >= 0 && row < vocab_local ? row : -1;
    };
    // Counts are stored two slots up; after the prefix sums first[row + 1] is the start of row, and
    // filling advances it to its end
    for (int64_t i = 0; i < tokens; ++i) {
      if (local_row(i) >= 0) ++first[local_row(i) + 2];
    }
    for (int64_t row = 2; row <= vocab_local; ++row) first[row] += first[row - 1];
    for (int64_t i = 0; i < tokens; ++i) {
      if (local_row(i) >= 0) positions[first[local_row(i) + 1]++] = i;
    }
  });

  dispatch_floating(grad.scalar_type(), "vocab_parallel_embedding", [&](auto type) {
    using T = decltype(type);
    const T* g = in<T>(grad);
    T* dw = out<T>(dweight);
    at::parallel_for(0, num_rows, rows_per_thread(hidden), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t start = row < vocab_local ? first[row] : 0;
        const int64_t count = row < vocab_local ? first[row + 1] - start : 0;
        if (count == 0) {
          std::fill_n(dw + row * hidden, hidden, T(0));
        } else {
          sum_rows(g, positions.data() + start, count, hidden, dw + row * hidden);
        }
      }
    });
  });
  return dweight;
}

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_vocab_embedding_fwd", fwd_cpu);
  m.impl("_vocab_embedding_bwd", bwd_cpu);
}

}  // namespace
}  // namespace tp_ext
