// The product of matrices sharded on both dims: rows over one group (x), columns over another (y).
//
//   a [.., m_local, k / y]    b [k / x, n_local]    c = a b [.., m_local, n_local]
//
//        gather                                        SUMMA: over panels of k
//   c    (gather a over y) (gather b over x)           c += (broadcast a_t over y) (.. b_t over x)
//   da   reduce-scatter over y of dc (gather b)^T      ring over y: da_t += dc (broadcast b_t)^T
//   db   reduce-scatter over x of (gather a)^T dc      ring over x: db_t += (broadcast a_t)^T dc
//
// Saved: the shards a and b, each only if the other's gradient may be needed. The gather form holds
// the rows of a and the columns of b that its product needs, y and x times a shard. SUMMA (van de
// Geijn and Watts, 1997) holds two panels of each at a time: the next ones come while the present
// ones are multiplied. In its backward the sum for each rank travels once around the ring, and
// every rank on its way adds its own term. Double backward and forward mode are composed of regions
// and matmuls, in the gather form.

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <algorithm>

#include "autograd/autocast.h"
#include "autograd/function.h"
#include "check.h"
#include "comm/broadcast.h"
#include "comm/collectives.h"
#include "comm/rotate.h"
#include "operators.h"
#include "products.h"

namespace tp_ext {
namespace {

// A dim that is sharded over a group
struct Shards {
  std::string group;
  int64_t p, rank;
  Split split;

  Shards(const std::string& group, int64_t n)
      : group(group), p(comm::size(group)), rank(comm::rank(group)), split(tensor_split(n, p)) {}
  int64_t start(int64_t of) const { return split.start(of).guard_int(__FILE__, __LINE__); }
  int64_t length(int64_t of) const { return split.sizes[of].guard_int(__FILE__, __LINE__); }
};

struct Range {
  int64_t start, length;
};

// A range of the full dim that is in one rank's shard, on its way to all ranks. x: this rank's
// shard, a matrix.
comm::Pending panel(const Tensor& x, int64_t dim, const Shards& shards, Range range) {
  int64_t owner = 0;
  while (shards.start(owner) + shards.length(owner) <= range.start) ++owner;
  const Tensor own =
      owner == shards.rank ? x.narrow(dim, range.start - shards.start(owner), range.length) : x;
  if (shards.p == 1) return comm::Pending(own, nullptr);
  auto shape = x.sym_sizes().vec();
  shape[dim] = range.length;
  return comm::broadcast_async(own, shards.group, owner, shape);
}

// Ranges of k, each in one shard of a and one of b
std::vector<Range> panels_of(const Shards& a, const Shards& b) {
  std::vector<int64_t> edges;
  for (const Shards* shards : {&a, &b})
    for (int64_t k = 0; k < shards->p; ++k) edges.push_back(shards->start(k) + shards->length(k));
  std::sort(edges.begin(), edges.end());
  std::vector<Range> panels;
  int64_t start = 0;
  for (const int64_t end : edges) {
    if (end > start) panels.push_back({start, end - start});
    start = std::max(start, end);
  }
  return panels;
}

// a and b are matrices
Tensor summa(const Tensor& a, const Tensor& b, const Shards& of_a, const Shards& of_b) {
  const auto panels = panels_of(of_a, of_b);
  Tensor c;
  std::optional<std::pair<comm::Pending, comm::Pending>> next;
  const auto fetch = [&](Range range) {
    next.emplace(panel(a, 1, of_a, range), panel(b, 0, of_b, range));
  };
  if (!panels.empty()) fetch(panels[0]);
  for (size_t t = 0; t < panels.size(); ++t) {
    const Tensor a_t = next->first.wait(), b_t = next->second.wait();
    next.reset();
    if (t + 1 < panels.size()) fetch(panels[t + 1]);
    if (!c.defined())
      c = products::mm(a_t, b_t);
    else
      c = comm::traced(c) ? at::addmm(c, a_t, b_t) : products::add_mm_(c, a_t, b_t);
  }
  return c.defined() ? c : at::zeros_symint({a.sym_size(0), b.sym_size(1)}, a.options());
}

// The gradient of this rank's shard of an operand, along `dim`: the sum over the ranks of `sharded`
// of their terms. fetch(range) is a panel of the other operand, term(panel) the gradient of that
// range, shape(length) the shape of one.
template <typename Fetch, typename Term, typename Shape>
Tensor around(const Tensor& dc, int64_t dim, const Shards& sharded,
              const std::vector<Range>& panels, const Fetch& fetch, const Term& term,
              const Shape& shape) {
  const int64_t p = sharded.p;
  const auto shard_at = [&](int64_t step) { return (sharded.rank + 2 * p - 1 - step) % p; };
  std::vector<std::vector<Range>> steps(p);
  std::vector<Range> order;
  for (int64_t step = 0; step < p; ++step) {
    const int64_t start = sharded.start(shard_at(step));
    for (const Range& range : panels)
      if (range.start >= start && range.start < start + sharded.length(shard_at(step)))
        steps[step].push_back(range), order.push_back(range);
  }
  std::optional<comm::Pending> arriving, next;
  size_t fetched = 0;
  const auto fetch_next = [&] {
    next.reset();
    if (fetched < order.size()) next.emplace(fetch(order[fetched++]));
  };
  Tensor sum;
  fetch_next();
  for (int64_t step = 0; step < p; ++step) {
    std::vector<Tensor> terms;
    for (size_t i = 0; i < steps[step].size(); ++i) {
      const Tensor present = next->wait();
      fetch_next();
      terms.push_back(term(present));
    }
    if (terms.empty()) terms.push_back(dc.new_empty_symint(shape(0)));
    sum = terms.size() == 1 ? terms[0] : at::cat(terms, dim);
    if (arriving) sum = sum.add(arriving->wait());
    arriving.reset();
    if (step + 1 < p)
      arriving.emplace(
          comm::rotate_async(sum, sharded.group, shape(sharded.length(shard_at(step + 1)))));
  }
  return sum;
}

Tensor as_matrix(const Tensor& x) {
  return x.dim() == 2 ? x : x.reshape_symint({-1, x.sym_size(-1)});
}
Tensor of_shape(const Tensor& rows, const Tensor& like, const SymInt& columns) {
  if (like.dim() == 2) return rows;
  auto shape = like.sym_sizes().vec();
  shape.back() = columns;
  return rows.reshape_symint(shape);
}

struct Matmul2d : Function<Matmul2d> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b,
                        const std::string& rows, const std::string& columns, int64_t k,
                        bool by_summa) {
    ctx->save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
    auto& data = ctx->saved_data;
    data["rows"] = rows, data["columns"] = columns, data["k"] = k, data["summa"] = by_summa;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Shards of_a(columns, k), of_b(rows, k);
    const Tensor a_rows = as_matrix(a);
    if (by_summa) return of_shape(summa(a_rows, b, of_a, of_b), a, b.sym_size(1));
    auto a_full = gathered(a_rows, 1, of_a), b_full = gathered(b, 0, of_b);
    const Tensor left = a_full.wait(), right = b_full.wait();
    return of_shape(products::mm(left, right), a, b.sym_size(1));
  }

  static comm::Pending gathered(const Tensor& x, int64_t dim, const Shards& shards) {
    if (shards.p == 1) return comm::Pending(x, nullptr);
    return comm::all_gather_async(x, shards.group, dim, shards.split);
  }

  static comm::Pending scattered(const Tensor& x, int64_t dim, const Shards& shards) {
    if (shards.p == 1) return comm::Pending(x, nullptr);
    return comm::reduce_scatter_async(x, shards.group, dim, shards.split);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all = gradients();
    const auto saved = ctx->get_saved_variables();
    const Tensor &dc = grads[0], &a = saved[0], &b = saved[1];
    const auto& data = ctx->saved_data;
    const int64_t k = data.at("k").toInt();
    const Shards of_a(data.at("columns").toStringRef(), k), of_b(data.at("rows").toStringRef(), k);
    const bool wants_a = ctx->needs_input_grad(0), wants_b = ctx->needs_input_grad(1);
    if (at::GradMode::is_enabled() || has_tangent(dc)) {
      const auto [da, db] = differentiable(dc, a, b, of_a, of_b, wants_a, wants_b);
      all[0] = da, all[1] = db;
      return all;
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor rows = as_matrix(dc);
    if (data.at("summa").toBool()) {
      if (wants_a) all[0] = of_shape(ring_of_a(rows, b, of_a, of_b), dc, of_a.length(of_a.rank));
      if (wants_b) all[1] = ring_of_b(rows, as_matrix(a), of_a, of_b);
      return all;
    }
    std::optional<comm::Pending> a_full, b_full, da, db;
    if (wants_a) b_full.emplace(gathered(b, 0, of_b));
    if (wants_b) a_full.emplace(gathered(as_matrix(a), 1, of_a));
    if (wants_a) da.emplace(scattered(products::mm(rows, b_full->wait().t()), 1, of_a));
    if (wants_b) db.emplace(scattered(products::mm(a_full->wait().t(), rows), 0, of_b));
    if (wants_a) all[0] = of_shape(da->wait(), dc, of_a.length(of_a.rank));
    if (wants_b) all[1] = db->wait();
    return all;
  }

  static Tensor ring_of_a(const Tensor& dc, const Tensor& b, const Shards& of_a,
                          const Shards& of_b) {
    return around(
        dc, 1, of_a, panels_of(of_a, of_b), [&](Range range) { return panel(b, 0, of_b, range); },
        [&](const Tensor& b_t) { return products::mm(dc, b_t.t()); },
        [&](int64_t length) {
          return std::vector<SymInt>{dc.sym_size(0), length};
        });
  }
  static Tensor ring_of_b(const Tensor& dc, const Tensor& a, const Shards& of_a,
                          const Shards& of_b) {
    return around(
        dc, 0, of_b, panels_of(of_a, of_b), [&](Range range) { return panel(a, 1, of_a, range); },
        [&](const Tensor& a_t) { return products::mm(a_t.t(), dc); },
        [&](int64_t length) {
          return std::vector<SymInt>{length, dc.sym_size(1)};
        });
  }

  static std::pair<Tensor, Tensor> differentiable(const Tensor& dc, const Tensor& a,
                                                  const Tensor& b, const Shards& of_a,
                                                  const Shards& of_b, bool wants_a, bool wants_b) {
    Tensor da, db;
    if (wants_a) {
      const Tensor b_full = all_gather_region(b, of_b.group, 0, sizes(of_b));
      da = reduce_scatter_region(at::matmul(dc, b_full.t()), of_a.group, -1, sizes(of_a));
    }
    if (wants_b) {
      const Tensor a_full = all_gather_region(a, of_a.group, -1, sizes(of_a));
      db = reduce_scatter_region(at::mm(as_matrix(a_full).t(), as_matrix(dc)), of_b.group, 0,
                                 sizes(of_b));
    }
    return {da, db};
  }
  static c10::SymIntArrayRef sizes(const Shards& shards) { return shards.split.sizes; }
};

void check(const Tensor& a, const Tensor& b) {
  check_floating(a, "a");
  check_same_dtype(b, "b", a, "a");
  check_same_device(b, "b", a, "a");
  TORCH_CHECK_VALUE(a.dim() >= 2, "a: shape ", a.sym_sizes(), " must have at least 2 dims");
  TORCH_CHECK_VALUE(b.dim() == 2, "b: shape ", b.sym_sizes(), " must have 2 dims");
}

void check_share(const char* name, const SymInt& own, const Shards& shards, int64_t k) {
  TORCH_CHECK_VALUE(own == shards.split.sizes[shards.rank], name, ": ", own,
                    " elements of the contracted dim must be ", shards.split.sizes[shards.rank],
                    ", the share of rank ", shards.rank, " of ", shards.p, " in k = ", k);
}

}  // namespace

Tensor matmul_2d(const Tensor& a, const Tensor& b, const std::string& rows,
                 const std::string& columns, std::optional<int64_t> k_or_none, bool by_summa) {
  check(a, b);
  const int64_t k =
      k_or_none.value_or(a.sym_size(-1).guard_int(__FILE__, __LINE__) * comm::size(columns));
  const Shards of_a(columns, k), of_b(rows, k);
  check_share("a", a.sym_size(-1), of_a, k);
  check_share("b", b.sym_size(0), of_b, k);
  if (of_a.p == 1 && of_b.p == 1) return at::matmul(a, b);
  if (any_tangent(a, b))
    return at::matmul(TP_OP(all_gather_region).call(a, columns, -1, Matmul2d::sizes(of_a)),
                      TP_OP(all_gather_region).call(b, rows, 0, Matmul2d::sizes(of_b)));
  return Matmul2d::apply(a, b, rows, columns, k, by_summa);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) { autocast_to_low_precision<matmul_2d, 0, 1>(m, "matmul_2d"); }

}  // namespace tp_ext
