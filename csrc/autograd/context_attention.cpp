// Attention over a context group: each rank has the queries, keys and values of some tokens of
// every sequence, and computes the results of its own queries.
//
//   ring     the blocks of keys and values travel from rank to rank, the next one while the present
//            one is computed. Backward: so do their gradients, which each rank adds to
//   gather   one all-gather of the blocks, in forward and backward; one reduce-scatter of gradients
//
// KV heads travel as they are, also when several query heads share one. The results for each block
// are merged by lse (attention_tile.h). Saved: q, this rank's k | v, the result and lse. Gradients
// travel in the dtype of k and v. No second derivative, no forward mode.

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include "autograd/attention_tile.h"
#include "autograd/call.h"
#include "check.h"
#include "comm/rotate.h"
#include "operators.h"

namespace tp_ext {
namespace {

struct Options : TileOptions {
  std::string group;
  bool ring = false;
  std::vector<int64_t> chunks;
  int64_t per_sequence = 0;

  auto fields() {
    return std::tie(group, ring, chunks, per_sequence, causal, window, num_heads, first_head, scale,
                    softcap, dropout);
  }
};

// One rank's work on the blocks of the others. Tensors are [batch, tokens, heads, head_dim].
class Work {
 public:
  Work(const Options& options, const Tensor& q, const SymInt& kv_heads, const Tensor& seeds)
      : options_(options),
        p_(comm::size(options.group)),
        rank_(comm::rank(options.group)),
        tiles_(options.chunks, options.per_sequence, p_),
        q_(q),
        kv_heads_(kv_heads),
        seeds_(seeds) {}

  int64_t p() const { return p_; }
  int64_t rank() const { return rank_; }
  const ContextTiles& tiles() const { return tiles_; }

  // Shape of a rank's k | v
  std::vector<SymInt> block_shape(int64_t owner) const {
    return {q_.sym_size(0), tiles_.tokens(owner), kv_heads_ * 2, q_.sym_size(3)};
  }

  // The results of this rank's queries for the keys of one block join those for the blocks before
  void attend(int64_t owner, const Tensor& kv) {
    if (parts_.empty()) parts_.resize(tiles_.sequences() * tiles_.per_rank());
    for (const auto& tile : tiles_of(owner)) {
      const auto part = tile_forward({queries(q_, tile), keys(kv, tile), values(kv, tile)}, tile,
                                     options_, tiles_.length(tile.sequence), seed(tile));
      int64_t row = 0;
      for (int64_t i = tile.first; i < tile.first + tile.count; ++i) {
        const int64_t n = tiles_.chunk(rank_, tile.sequence, i).length;
        const Attended own{part.out.narrow(2, row, n), part.lse.narrow(2, row, n)};
        auto& all = parts_[tile.sequence * tiles_.per_rank() + i];
        if (n > 0) all = all.out.defined() ? merged(all, own) : own;
        row += n;
      }
    }
  }

  // [batch, tokens, heads, head_dim] in q's dtype, and lse [batch, heads, tokens]
  Attended result() const {
    const auto dtype = sum_dtype(q_);
    std::vector<Tensor> outs, lses;
    for (const auto& part : parts_)
      if (part.out.defined()) {
        outs.push_back(part.out.transpose(1, 2).to(q_.scalar_type()));
        lses.push_back(part.lse);
      }
    if (outs.empty())
      return {q_.new_empty_symint(q_.sym_sizes()),
              q_.new_empty_symint({q_.sym_size(0), q_.sym_size(2), 0}, dtype)};
    return {at::cat(outs, 1), at::cat(lses, 2)};
  }

  // The gradient of the block k | v, of this rank's queries alone; adds to that of q
  Tensor gradient(int64_t owner, const Tensor& kv, const Tensor& dout, const Attended& result) {
    const int64_t per_rank = tiles_.per_rank();
    std::vector<Tensor> dkv(tiles_.sequences() * per_rank);  // [batch, keys, 2 heads, head_dim]
    if (dq_.empty()) dq_.resize(dkv.size());
    for (const auto& tile : tiles_of(owner)) {
      const Attended own{queries(result.out, tile), result.lse.narrow(2, tile.q_row, tile.queries)};
      const auto [dq, dk, dv] =
          tile_backward(queries(dout, tile), {queries(q_, tile), keys(kv, tile), values(kv, tile)},
                        own, tile, options_, tiles_.length(tile.sequence), seed(tile));
      add(dq_, dq.transpose(1, 2), rank_, tile.sequence, tile.q_row);
      add(dkv, at::cat({dk, dv}, 1).transpose(1, 2), owner, tile.sequence, tile.k_row);
    }
    return joined(dkv, owner, block_shape(owner), kv.scalar_type());
  }

  Tensor gradient_of_q() const {
    return joined(dq_, rank_, q_.sym_sizes().vec(), q_.scalar_type());
  }

 private:
  std::vector<Tile> tiles_of(int64_t owner) const {
    return options_.is_explicit() ? tiles_.pairs(rank_, owner, options_.causal, options_.window)
                                  : tiles_.rectangles(rank_, owner, options_.causal);
  }
  static Tensor queries(const Tensor& x, const Tile& tile) {
    return x.narrow(1, tile.q_row, tile.queries).transpose(1, 2);
  }
  Tensor keys(const Tensor& kv, const Tile& tile) const {
    return kv.narrow(1, tile.k_row, tile.keys).narrow_symint(2, 0, kv_heads_).transpose(1, 2);
  }
  Tensor values(const Tensor& kv, const Tile& tile) const {
    return kv.narrow(1, tile.k_row, tile.keys)
        .narrow_symint(2, kv_heads_, kv_heads_)
        .transpose(1, 2);
  }
  Tensor seed(const Tile& tile) const {
    return seeds_.defined() ? seeds_.select(0, tile.sequence) : Tensor();
  }

  // Adds the gradient of rows of a block, from `row` on, to the chunks that they are
  void add(std::vector<Tensor>& sums, const Tensor& gradient, int64_t rank, int64_t sequence,
           int64_t row) const {
    const auto dtype = sum_dtype(gradient);
    const int64_t end = row + gradient.sym_size(1).guard_int(__FILE__, __LINE__);
    for (int64_t i = 0; i < tiles_.per_rank(); ++i) {
      const SequenceChunk& chunk = tiles_.chunk(rank, sequence, i);
      if (chunk.length == 0 || chunk.row < row || chunk.row >= end) continue;
      const auto own = gradient.narrow(1, chunk.row - row, chunk.length).to(dtype);
      auto& sum = sums[sequence * tiles_.per_rank() + i];
      sum = sum.defined() ? sum.add(own) : own;
    }
  }

  // The chunks of a rank, one after the other; zeros for those that no tile has reached
  Tensor joined(const std::vector<Tensor>& sums, int64_t rank, std::vector<SymInt> shape,
                at::ScalarType dtype) const {
    std::vector<Tensor> rows;
    for (int64_t s = 0; s < tiles_.sequences(); ++s)
      for (int64_t i = 0; i < tiles_.per_rank(); ++i) {
        const SequenceChunk& chunk = tiles_.chunk(rank, s, i);
        const size_t place = s * tiles_.per_rank() + i;
        if (chunk.length == 0) continue;
        shape[1] = chunk.length;
        rows.push_back(place < sums.size() && sums[place].defined()
                           ? sums[place].to(dtype)
                           : at::zeros_symint(shape, q_.options().dtype(dtype)));
      }
    shape[1] = 0;
    return rows.empty() ? at::zeros_symint(shape, q_.options().dtype(dtype)) : at::cat(rows, 1);
  }

  const Options& options_;
  const int64_t p_, rank_;
  const ContextTiles tiles_;
  const Tensor q_;
  const SymInt kv_heads_;
  const Tensor seeds_;
  std::vector<Attended> parts_;  // of each chunk of this rank, out [batch, heads, rows, head_dim]
  std::vector<Tensor> dq_;       // the same, [batch, rows, heads, head_dim]
};

Split split_of(const Work& work) {
  Split split;
  for (int64_t k = 0; k < work.p(); ++k) split.sizes.push_back(work.tiles().tokens(k));
  return split;
}

// Calls `compute` with each rank's block: this rank's first, then that of the rank before, ..
template <typename Compute>
void around(const Work& work, const std::string& group, Tensor kv, const Compute& compute) {
  const int64_t p = work.p();
  for (int64_t step = 0; step < p; ++step) {
    std::optional<comm::Pending> next;
    if (step + 1 < p)
      next.emplace(
          comm::rotate_async(kv, group, work.block_shape((work.rank() + 2 * p - step - 1) % p)));
    compute((work.rank() + p - step) % p, kv);
    if (next) kv = next->wait();
  }
}

// Calls `compute` with each rank's block, all of which come at once
template <typename Compute>
void at_once(const Work& work, const std::string& group, const Tensor& kv, const Compute& compute) {
  const auto split = split_of(work);
  const auto all = comm::all_gather(kv, group, 1, split);
  for (int64_t step = 0; step < work.p(); ++step) {
    const int64_t owner = (work.rank() + step) % work.p();
    compute(owner, all.narrow_symint(1, split.start(owner), split.sizes[owner]));
  }
}

// The gradient of this rank's k | v
Tensor ring_gradient(Work& work, const std::string& group, const Tensor& kv, const Tensor& dout,
                     const Attended& result) {
  Tensor own;
  std::optional<comm::Pending> arriving;  // the sum over the ranks before, while this one computes
  around(work, group, kv, [&](int64_t owner, const Tensor& block) {
    auto sum = work.gradient(owner, block, dout, result);
    if (owner == work.rank()) {
      own = sum;
      return;
    }
    if (arriving) sum = sum.add(arriving->wait());
    const int64_t next = (owner + work.p() - 1) % work.p();  // the last one brings home this rank's
    arriving.reset();
    arriving.emplace(comm::rotate_async(sum, group, work.block_shape(next)));
  });
  return arriving ? own.add(arriving->wait()) : own;
}

Tensor gathered_gradient(Work& work, const std::string& group, const Tensor& kv, const Tensor& dout,
                         const Attended& result) {
  std::vector<Tensor> blocks(work.p());
  at_once(work, group, kv, [&](int64_t owner, const Tensor& block) {
    blocks[owner] = work.gradient(owner, block, dout, result);
  });
  return comm::reduce_scatter_fresh(at::cat(blocks, 1), group, 1, split_of(work));
}

struct ContextAttention : Function<ContextAttention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const OptionalTensor& seeds, const Options& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto kv = at::cat({k, v}, 2);
    const Tensor seeds_or_none = seeds.value_or(Tensor());
    Work work(options, q, k.sym_size(2), seeds_or_none);
    const auto attend = [&](int64_t owner, const Tensor& block) { work.attend(owner, block); };
    if (work.p() == 1 || work.tiles().empty())
      attend(work.rank(), kv);
    else if (options.ring)
      around(work, options.group, kv, attend);
    else
      at_once(work, options.group, kv, attend);
    const auto result = work.result();
    put_call(ctx, options);
    ctx->save_for_backward({q, kv, result.out, result.lse, seeds_or_none});
    return result.out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("context_attention", grads);
    variable_list all = gradients();
    if (!grads[0].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    const auto options = get_call<Options>(ctx);
    const Tensor &q = saved[0], &kv = saved[1];
    const auto kv_heads = kv.sym_size(2) / 2;
    const Attended result{saved[2], saved[3]};
    Work work(options, q, kv_heads, saved[4]);
    const Tensor dout = grads[0].contiguous();
    Tensor dkv;
    if (work.p() == 1 || work.tiles().empty())
      dkv = work.gradient(work.rank(), kv, dout, result);
    else if (options.ring)
      dkv = ring_gradient(work, options.group, kv, dout, result);
    else
      dkv = gathered_gradient(work, options.group, kv, dout, result);
    if (ctx->needs_input_grad(0)) all[0] = work.gradient_of_q();
    if (ctx->needs_input_grad(1)) all[1] = dkv.narrow_symint(2, 0, kv_heads);
    if (ctx->needs_input_grad(2)) all[2] = dkv.narrow_symint(2, kv_heads, kv_heads);
    return all;
  }
};

void check(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  check_floating(q, "q");
  TORCH_CHECK_VALUE(q.dim() == 4, "q: ", q.dim(),
                    " dims must be [batch, tokens_local, heads_local, head_dim]");
  for (const auto& [name, t] : {std::pair("k", k), std::pair("v", v)}) {
    check_same_dtype(t, name, q, "q");
    check_same_device(t, name, q, "q");
    TORCH_CHECK_VALUE(t.dim() == 4 && t.sym_size(0) == q.sym_size(0) &&
                          t.sym_size(1) == q.sym_size(1) && t.sym_size(3) == q.sym_size(3),
                      name, ": shape ", t.sym_sizes(), " must be that of q, ", q.sym_sizes(),
                      ", but for the number of heads");
  }
  TORCH_CHECK_VALUE(
      k.sym_size(2) == v.sym_size(2) && k.sym_size(2) > 0 && q.sym_size(2) % k.sym_size(2) == 0,
      "k: ", k.sym_size(2), " heads must be those of v, ", v.sym_size(2), ", and divide the ",
      q.sym_size(2), " of q");
  const int64_t p = comm::size(options.group), n = options.per_sequence;
  TORCH_CHECK_VALUE(n == p || (p > 1 && n == 2 * p), "chunks_per_sequence: ", n,
                    " must be p or 2 p, p = ", p);
  TORCH_CHECK_VALUE(static_cast<int64_t>(options.chunks.size()) % n == 0,
                    "chunks: ", options.chunks.size(), " lengths must be chunks_per_sequence = ", n,
                    " for each sequence");
  const int64_t own = ContextTiles(options.chunks, n, p).tokens(comm::rank(options.group));
  TORCH_CHECK_VALUE(q.sym_size(1) == own, "q: ", q.sym_size(1), " tokens must be the ", own,
                    " of this rank, by the layout");
}

}  // namespace

Tensor context_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                         const OptionalTensor& seeds, const std::string& group, bool ring,
                         at::IntArrayRef chunks, int64_t chunks_per_sequence, bool causal,
                         double scale, std::optional<int64_t> sliding_window,
                         std::optional<double> softcap, double dropout, int64_t num_heads,
                         int64_t first_head) {
  refuse_forward_mode("context_attention", q, k, v);
  Options options;
  options.causal = causal, options.scale = scale, options.window = sliding_window;
  options.softcap = softcap, options.dropout = dropout;
  options.num_heads = num_heads, options.first_head = first_head;
  options.group = group, options.ring = ring;
  options.chunks = chunks.vec(), options.per_sequence = chunks_per_sequence;
  check(q, k, v, options);
  TORCH_CHECK_VALUE(dropout == 0 || seeds.has_value(),
                    "seeds: must be given with dropout = ", dropout);
  return ContextAttention::apply(q, k, v, seeds, options);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<context_attention>(m, "context_attention");
}

}  // namespace tp_ext
