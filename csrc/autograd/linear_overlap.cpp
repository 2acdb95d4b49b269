#include "autograd/linear_overlap.h"

#include <ATen/ops/mm.h>
#include <algorithm>
#include <deque>
#include <vector>

#include "autograd/token_chunks.h"
#include "comm/collectives.h"
#include "products.h"

namespace tp_ext {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor empty_output(const Tensor& x, int64_t tokens, int64_t features) {
  auto shape = x.sizes().vec();
  shape.front() = tokens;
  shape.back() = features;
  return x.new_empty(shape);
}

// y = x factor + bias; y: rows of a larger tensor
void multiply(const Tensor& x, const Tensor& factor, const OptionalTensor& bias, Tensor y) {
  if (y.numel() == 0) return;
  Tensor out = y.view({-1, y.size(-1)});
  products::mm_out(out, as_rows(x), factor, bias);
}

// y = (concatenation of the ranks' x) factor + bias; x_full, if defined, gets the concatenation
Tensor gather_multiply(const Tensor& x, const Tensor& factor, const OptionalTensor& bias,
                       const std::string& group, const Split& tokens, int64_t chunks,
                       Tensor x_full) {
  const auto& lengths = tokens.sizes;
  const int64_t p = static_cast<int64_t>(lengths.size()), rank = comm::rank(group);
  Tensor y = empty_output(x, tokens.total().expect_int(), factor.size(1));
  std::deque<std::pair<TokenChunk, comm::Pending>> coming;
  auto top_up = [&, issued = int64_t{0}]() mutable {
    for (; issued < chunks && coming.size() < 2; ++issued) {
      const Tensor own = tokens_of(x, chunk_of(lengths[rank], issued, chunks));
      const TokenChunk chunk(lengths, issued, chunks);
      coming.emplace_back(chunk, comm::all_gather_async(own, group, 0, chunk.tokens));
    }
  };
  top_up();
  const Range own{tokens.start(rank), lengths[rank]};
  multiply(x, factor, bias, tokens_of(y, own));
  if (x_full.defined()) tokens_of(x_full, own).copy_(x);
  while (!coming.empty()) {
    const TokenChunk chunk = coming.front().first;
    const Tensor there = coming.front().second.wait();
    coming.pop_front();
    top_up();
    for (int64_t k = 0; k < p; ++k) {
      if (k == rank) continue;
      const Tensor block = tokens_of(there, chunk.gathered[k]);
      multiply(block, factor, bias, tokens_of(y, chunk.full[k]));
      if (x_full.defined()) tokens_of(x_full, chunk.full[k]).copy_(block);
    }
  }
  return y;
}

}  // namespace

Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  c10::SymInt rows = 1;  // -1 would be ambiguous where a rank has no features
  for (int64_t dim = 0; dim < x.dim() - 1; ++dim) rows *= x.sym_size(dim);
  return x.reshape_symint({rows, x.sym_size(-1)});
}

Tensor input_grad(const Tensor& dy, const Tensor& weight) {
  if (dy.dim() == 2) return products::mm(dy, weight);
  auto shape = dy.sym_sizes().vec();
  shape.back() = weight.sym_size(1);
  return products::mm(as_rows(dy), weight).view_symint(shape);
}

Tensor weight_grad(const Tensor& dy, const Tensor& x) {
  return products::mm(as_rows(dy).t(), as_rows(x));
}

int64_t chunks_of(const Tensor& x, const c10::SymInt& tokens, int64_t chunks) {
  constexpr int64_t fewest = 64;  // tokens worth a collective: decoding uses one chunk
  if (chunks <= 1 || comm::traced(x)) return 1;
  return std::clamp<int64_t>(tokens.expect_int() / fewest, 1, chunks);
}

Tensor gather_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const std::string& group, const Split& tokens, int64_t chunks) {
  return gather_multiply(x, weight.t(), bias, group, tokens, chunks, Tensor());
}

std::pair<Tensor, Tensor> gather_mm(const Tensor& dy, const Tensor& weight,
                                    const std::string& group, const Split& tokens, int64_t chunks,
                                    bool keep) {
  const Tensor dy_full =
      keep ? empty_output(dy, tokens.total().expect_int(), dy.size(-1)) : Tensor();
  Tensor dx = gather_multiply(dy, weight, std::nullopt, group, tokens, chunks, dy_full);
  return {std::move(dx), dy_full};
}

Tensor linear_reduce_scatter(const Tensor& x, const Tensor& weight, const std::string& group,
                             const Split& tokens, int64_t chunks) {
  const auto& lengths = tokens.sizes;
  const int64_t p = static_cast<int64_t>(lengths.size()), rank = comm::rank(group);
  Tensor y = empty_output(x, lengths[rank].expect_int(), weight.size(0));
  std::deque<std::pair<comm::Pending, Range>> coming;
  const auto take = [&] {
    tokens_of(y, coming.front().second).copy_(coming.front().first.wait());
    coming.pop_front();
  };
  for (int64_t i = 0; i < chunks; ++i) {
    if (coming.size() == 2) take();
    const TokenChunk chunk(lengths, i, chunks);
    Tensor partials = empty_output(x, chunk.tokens.total().expect_int(), weight.size(0));
    for (int64_t k = 0; k < p; ++k)
      multiply(tokens_of(x, chunk.full[k]), weight.t(), std::nullopt,
               tokens_of(partials, chunk.gathered[k]));
    coming.emplace_back(comm::reduce_scatter_async(partials, group, 0, chunk.tokens),
                        chunk_of(lengths[rank], i, chunks));
  }
  while (!coming.empty()) take();
  return y;
}

Tensor linear_all_reduce(const Tensor& x, const Tensor& weight, const std::string& group,
                         int64_t chunks) {
  auto shape = x.sizes().vec();
  shape.back() = weight.size(0);
  Tensor y = x.new_empty(shape);
  const Tensor x_rows = as_rows(x), y_rows = y.view({x_rows.size(0), weight.size(0)});
  std::deque<comm::Pending> coming;
  for (int64_t i = 0; i < chunks; ++i) {
    if (coming.size() == 2) {
      coming.front().wait();
      coming.pop_front();
    }
    const auto range = chunk_of(x_rows.size(0), i, chunks);
    const Tensor part = tokens_of(y_rows, range);  // contiguous: summed in place
    multiply(tokens_of(x_rows, range), weight.t(), std::nullopt, part);
    coming.push_back(comm::all_reduce_async(part, group));
  }
  for (auto& one : coming) one.wait();
  return y;
}

}  // namespace tp_ext
