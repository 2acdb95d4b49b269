// The products of a chunk of tokens with the rows of a vocabulary: on the CPU, in fp32 and for few
// tokens, by few_rows_gemm.h; else ATen's. A weight gradient of half types may be summed in fp32.

#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "args/vocab_chunk.h"
#include "cpu/dispatch.h"
#include "cpu/few_rows_gemm.h"
#include "cpu/half_convert.h"
#include "cpu/multiversion.h"

namespace tp_ext {
namespace {

bool rows_contiguous(const Tensor& t) { return t.stride(1) == 1 && t.stride(0) >= t.size(1); }

// Whether few_rows_gemm.h computes the products of these tokens, with weight, or its gradient,
// [vocab, hidden]
bool uses_few_rows_gemm(const Tensor& logits, const Tensor& x, const Tensor& weight) {
  constexpr int64_t fewest = 32;  // the blocks of logits are computed for kMaxTokens
  const int64_t tokens = logits.size(0), hidden = weight.size(1);
  return weight.is_cpu() && weight.scalar_type() == at::kFloat &&
         logits.scalar_type() == at::kFloat && x.scalar_type() == at::kFloat && tokens >= fewest &&
         tokens <= few_rows::kMaxTokens && hidden > 0 && hidden % few_rows::kColumns == 0 &&
         weight.size(0) >= few_rows::kColumns && weight.is_contiguous() &&
         rows_contiguous(logits) && few_rows::supported();
}

// Calls f(begin, end) for blocks of kColumns of n, a multiple of it
template <typename F>
void in_blocks(int64_t n, const F& f) {
  at::parallel_for(0, n / few_rows::kColumns, 1, [&](int64_t begin, int64_t end) {
    f(begin * few_rows::kColumns, end * few_rows::kColumns);
  });
}

void chunk_logits_(const Tensor& logits, const Tensor& x, const Tensor& weight,
                   const OptionalTensor& bias) {
  composed::check_vocab_chunk(logits, x, weight);
  if (!uses_few_rows_gemm(logits, x, weight))
    return composed::vocab_chunk_logits_(logits, x, weight, bias);
  Tensor out = logits;
  const int64_t tokens = x.size(0), hidden = x.size(1), vocab = weight.size(0);
  const int64_t whole = vocab / few_rows::kColumns * few_rows::kColumns;
  const Tensor columns = at::zeros({hidden, few_rows::kMaxTokens}, x.options());
  columns.narrow(1, 0, tokens).copy_(x.t());
  in_blocks(whole, [&](int64_t begin, int64_t end) {
    few_rows::logits(columns.const_data_ptr<float>(), weight.const_data_ptr<float>(),
                     out.mutable_data_ptr<float>(), out.stride(0), {tokens, vocab, hidden},
                     {begin, end});
  });
  if (whole < vocab) {
    Tensor rest = out.narrow(1, whole, vocab - whole);
    at::mm_out(rest, x, weight.narrow(0, whole, vocab - whole).t());
  }
  if (bias.has_value()) out.add_(*bias);
}

Tensor chunk_input_grad(const Tensor& dlogits, const Tensor& weight) {
  const int64_t tokens = dlogits.size(0), hidden = weight.size(1);
  if (!uses_few_rows_gemm(dlogits, weight, weight))
    return composed::vocab_chunk_input_grad(dlogits, weight);
  const int64_t rows = (tokens + few_rows::kRows - 1) / few_rows::kRows * few_rows::kRows;
  const Tensor blocks =
      at::zeros({hidden / few_rows::kColumns, rows, few_rows::kColumns}, weight.options());
  in_blocks(hidden, [&](int64_t begin, int64_t end) {
    few_rows::input_grad(dlogits.const_data_ptr<float>(), dlogits.stride(0),
                         weight.const_data_ptr<float>(), blocks.mutable_data_ptr<float>(),
                         {tokens, weight.size(0), hidden}, {begin, end});
  });
  return blocks.narrow(1, 0, tokens).transpose(0, 1).reshape({tokens, hidden});
}

// y = x, or y += x
template <typename T>
TP_MULTIVERSION void put_widened(const T* x, float* y, int64_t n, bool add) {
  float buffer[kBufferLength];
  for (int64_t i = 0; i < n; i += kBufferLength) {
    const int64_t length = std::min(kBufferLength, n - i);
    widen(x + i, add ? buffer : y + i, length);
    if (!add) continue;
    for (int64_t k = 0; k < length; ++k) y[i + k] += buffer[k];
  }
}

// dw in fp32 of half types: a product in fp32 would be slow. In blocks of rows that stay in the
// cache, rounded to the half type, summed in fp32.
void sum_half_products(const Tensor& dw, const Tensor& dlogits, const Tensor& x, bool add) {
  TORCH_CHECK_VALUE(dw.is_contiguous(), "dw: must be contiguous");
  constexpr int64_t rows = 1024;
  for (int64_t start = 0; start < dw.size(0); start += rows) {
    const int64_t length = std::min(rows, dw.size(0) - start);
    const Tensor product = at::mm(dlogits.narrow(1, start, length).t(), x).contiguous();
    float* const to = dw.mutable_data_ptr<float>() + start * dw.size(1);
    dispatch_floating(x.scalar_type(), "_vocab_chunk_weight_grad_", [&](auto tag) {
      using T = decltype(tag);
      if constexpr (kIsHalf<T>)
        at::parallel_for(0, product.numel(), kGrain, [&](int64_t begin, int64_t end) {
          put_widened(in<T>(product) + begin, to + begin, end - begin, add);
        });
    });
  }
}

void chunk_weight_grad_(const Tensor& dw, const Tensor& dlogits, const Tensor& x, bool add) {
  composed::check_vocab_chunk(dlogits, x, dw);
  if (dw.scalar_type() != x.scalar_type()) return sum_half_products(dw, dlogits, x, add);
  if (!uses_few_rows_gemm(dlogits, x, dw))
    return composed::vocab_chunk_weight_grad_(dw, dlogits, x, add);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  const Tensor blocks = x.unflatten(1, {-1, few_rows::kColumns}).transpose(0, 1).contiguous();
  at::parallel_for(0, dw.size(0), 192, [&](int64_t begin, int64_t end) {
    few_rows::weight_grad(dlogits.const_data_ptr<float>(), dlogits.stride(0),
                          blocks.const_data_ptr<float>(), dw.mutable_data_ptr<float>(),
                          {tokens, dw.size(0), hidden}, add, {begin, end});
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_vocab_chunk_logits_", chunk_logits_);
  m.impl("_vocab_chunk_input_grad", chunk_input_grad);
  m.impl("_vocab_chunk_weight_grad_", chunk_weight_grad_);
}

}  // namespace tp_ext
