// Attention over tiles of 64 queries and 128 keys, whose scores stay in the second cache. Tiles of
// which a causal mask hides all are left out. A microkernel of oneDNN multiplies without a copy of
// its operands into blocks, but knows no transposed ones: those are transposed here, once a head.

#include "tiled_attention.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention_rows.h"
#include "cpu/multiversion.h"
#include "cpu/vectors.h"

namespace tp_ext {
namespace {

constexpr int64_t kQueriesOfTile = 64;

// Rows of a matrix, `row` elements apart
struct Rows {
  float* data;
  int64_t row;
  Rows from(int64_t i) const { return {data + i * row, row}; }
};

// The rows of a head of [batch, heads, tokens, width]
Rows rows_of(const Tensor& x, int64_t batch, int64_t head) {
  return {x.mutable_data_ptr<float>() + batch * x.stride(0) + head * x.stride(1), x.stride(2)};
}

Tensor of_whole_rows(const Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

// c [m, n] = a [m, k] b [k, n], or added to it
void multiply(int64_t m, int64_t n, int64_t k, Rows a, Rows b, Rows c, bool add) {
  at::native::cpublas::brgemm(m, n, k, a.row, b.row, c.row, add, a.data, b.data, c.data);
}

TP_MULTIVERSION void write_transposed(Rows from, int64_t rows, int64_t columns, Rows to) {
  constexpr int64_t kSquare = kLanes<float>;
  for (int64_t i = 0; i < rows; i += kSquare)
    for (int64_t j = 0; j < columns; j += kSquare) {
      if (i + kSquare > rows || j + kSquare > columns) {
        for (int64_t r = i; r < std::min(rows, i + kSquare); ++r)
          for (int64_t c = j; c < std::min(columns, j + kSquare); ++c)
            to.data[c * to.row + r] = from.data[r * from.row + c];
        continue;
      }
      Vector<float> square[kSquare];
      for (int64_t r = 0; r < kSquare; ++r) square[r] = load(from.from(i + r).data + j);
      transpose(square);
      for (int64_t c = 0; c < kSquare; ++c)
        std::memcpy(to.from(j + c).data + i, &square[c], sizeof square[c]);
    }
}

// The rows of each tile of keys as columns [width, kTileKeys], and back
void to_columns(Rows x, int64_t keys, int64_t width, float* columns) {
  for (int64_t j = 0; j < keys; j += kTileKeys)
    write_transposed(x.from(j), std::min(kTileKeys, keys - j), width,
                     {columns + j * width, kTileKeys});
}
void from_columns(float* columns, int64_t keys, int64_t width, Rows x) {
  for (int64_t j = 0; j < keys; j += kTileKeys)
    write_transposed({columns + j * width, kTileKeys}, width, std::min(kTileKeys, keys - j),
                     x.from(j));
}

struct Shape {
  int64_t batch, heads, kv_heads, queries, keys, width, v_width;
  bool causal;

  Shape(const Tensor& q, const Tensor& k, const Tensor& v, bool causal)
      : batch(q.size(0)),
        heads(q.size(1)),
        kv_heads(k.size(1)),
        queries(q.size(2)),
        keys(k.size(2)),
        width(q.size(3)),
        v_width(v.size(3)),
        causal(causal) {}

  int64_t padded_keys() const { return (keys + kTileKeys - 1) / kTileKeys * kTileKeys; }
  // The keys that a query sees
  int64_t seen(int64_t query) const { return causal ? query + 1 : keys; }

  // f(batch, kv_head) in parallel
  template <typename F>
  void for_each_kv_head(const F& f) const {
    at::parallel_for(0, batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) f(i / kv_heads, i % kv_heads);
    });
  }
  // f(head, query, number of queries)
  template <typename F>
  void for_each_row_of_tiles(int64_t kv_head, const F& f) const {
    const int64_t share = heads / kv_heads;
    for (int64_t h = kv_head * share; h < (kv_head + 1) * share; ++h)
      for (int64_t i = 0; i < queries; i += kQueriesOfTile)
        f(h, i, std::min(kQueriesOfTile, queries - i));
  }
  // f(key, number of keys), of those that some query before `end` sees
  template <typename F>
  void for_each_tile(int64_t end, const F& f) const {
    for (int64_t j = 0; j < seen(end - 1); j += kTileKeys)
      f(j, std::min(kTileKeys, seen(end - 1) - j));
  }
};

}  // namespace

// torch's function raises where it has none
bool has_tiled_attention_cpu() {
  static const bool result = [] {
    float a = 1, b = 1, c = 0;
    try {
      at::native::cpublas::brgemm(1, 1, 1, 1, 1, 1, false, &a, &b, &c);
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }();
  return result;
}

std::tuple<Tensor, Tensor> tiled_attention_cpu(const Tensor& q_given, const Tensor& k_given,
                                               const Tensor& v_given, double scale, bool causal) {
  const Tensor q = of_whole_rows(q_given), k = of_whole_rows(k_given), v = of_whole_rows(v_given);
  const Shape s(q, k, v, causal);
  const Tensor y = at::empty({s.batch, s.queries, s.heads, s.v_width}, q.options()).transpose(1, 2);
  const Tensor lse = at::empty({s.batch, s.heads, s.queries}, q.options());
  const ScoreOptions<float> options{static_cast<float>(scale), 0};
  s.for_each_kv_head([&](int64_t b, int64_t kv_head) {
    std::vector<float> keys(s.width * s.padded_keys()), scores(kQueriesOfTile * kTileKeys),
        sums(kQueriesOfTile * s.v_width);
    const Rows tile{scores.data(), kTileKeys}, out{sums.data(), s.v_width},
        values = rows_of(v, b, kv_head);
    to_columns(rows_of(k, b, kv_head), s.keys, s.width, keys.data());
    s.for_each_row_of_tiles(kv_head, [&](int64_t h, int64_t i, int64_t rows) {
      std::fill(sums.begin(), sums.end(), 0.f);
      SoftmaxRow<float> state[kQueriesOfTile];
      std::fill_n(state, rows, SoftmaxRow<float>{-std::numeric_limits<float>::infinity(), 0});
      s.for_each_tile(i + rows, [&](int64_t j, int64_t count) {
        multiply(rows, count, s.width, rows_of(q, b, h).from(i),
                 {keys.data() + j * s.width, kTileKeys}, tile, false);
        for (int64_t r = 0; r < rows; ++r)
          tile_weights<float>(tile.from(r).data, nullptr, {0, std::min(s.seen(i + r) - j, count)},
                              options, state[r], out.from(r).data, s.v_width);
        multiply(rows, s.v_width, count, tile, values.from(j), out, true);
      });
      for (int64_t r = 0; r < rows; ++r) {
        const Rows to = rows_of(y, b, h).from(i + r);
        for (int64_t d = 0; d < s.v_width; ++d) to.data[d] = out.from(r).data[d] / state[r].sum;
        lse.mutable_data_ptr<float>()[(b * s.heads + h) * s.queries + i + r] =
            state[r].max + std::log(state[r].sum);
      }
    });
  });
  return {y, lse};
}

std::tuple<Tensor, Tensor, Tensor> tiled_attention_backward_cpu(
    const Tensor& dy_given, const Tensor& q_given, const Tensor& k_given, const Tensor& v_given,
    const Tensor& y, const Tensor& lse_given, double scale, bool causal) {
  const Tensor q = of_whole_rows(q_given), k = of_whole_rows(k_given), v = of_whole_rows(v_given);
  const Tensor dy = of_whole_rows(dy_given), lse = lse_given.contiguous();
  const Tensor dots = dy.mul(y).sum(3).contiguous();
  const Shape s(q, k, v, causal);
  const auto like = [&](const Tensor& x) {
    return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
  };
  const Tensor dq = like(q), dk = like(k), dv = like(v);
  const ScoreOptions<float> options{static_cast<float>(scale), 0};
  s.for_each_kv_head([&](int64_t b, int64_t kv_head) {
    const int64_t width = s.width + s.v_width, padded = s.padded_keys();
    std::vector<float> columns(2 * width * padded), rows_t(width * kQueriesOfTile),
        tiles(2 * kQueriesOfTile * kTileKeys);
    float *const k_t = columns.data(), *const v_t = k_t + s.width * padded;
    float *const dk_t = v_t + s.v_width * padded, *const dv_t = dk_t + s.width * padded;
    const Rows q_t{rows_t.data(), kQueriesOfTile}, dy_t = q_t.from(s.width);
    const Rows weights{tiles.data(), kTileKeys}, grads = weights.from(kQueriesOfTile);
    const auto keys = rows_of(k, b, kv_head);
    to_columns(keys, s.keys, s.width, k_t);
    to_columns(rows_of(v, b, kv_head), s.keys, s.v_width, v_t);
    s.for_each_row_of_tiles(kv_head, [&](int64_t h, int64_t i, int64_t rows) {
      const auto queries = rows_of(q, b, h).from(i), out = rows_of(dy, b, h).from(i);
      write_transposed(queries, rows, s.width, q_t);
      write_transposed(out, rows, s.v_width, dy_t);
      const int64_t first = (b * s.heads + h) * s.queries + i;
      const auto *shift = lse.const_data_ptr<float>() + first,
                 *dot = dots.const_data_ptr<float>() + first;
      s.for_each_tile(i + rows, [&](int64_t j, int64_t count) {
        const Rows k_j{k_t + j * s.width, kTileKeys}, v_j{v_t + j * s.v_width, kTileKeys};
        const Rows dk_j{dk_t + j * s.width, kTileKeys}, dv_j{dv_t + j * s.v_width, kTileKeys};
        multiply(rows, count, s.width, queries, k_j, weights, false);
        multiply(rows, count, s.v_width, out, v_j, grads, false);
        for (int64_t r = 0; r < rows; ++r)
          weight_grads<float>(weights.from(r).data, grads.from(r).data, nullptr,
                              {0, std::min(s.seen(i + r) - j, count)}, count, options, shift[r],
                              dot[r]);
        multiply(rows, s.width, count, grads, keys.from(j), rows_of(dq, b, h).from(i), j > 0);
        multiply(s.width, count, rows, q_t, grads, dk_j, true);
        multiply(s.v_width, count, rows, dy_t, weights, dv_j, true);
      });
    });
    from_columns(dk_t, s.keys, s.width, rows_of(dk, b, kv_head));
    from_columns(dv_t, s.keys, s.v_width, rows_of(dv, b, kv_head));
  });
  return {dq, dk, dv};
}

}  // namespace tp_ext
