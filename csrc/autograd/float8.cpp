#include "autograd/float8.h"

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "args/float8.h"
#include "check.h"
#include "comm/collectives.h"
#include "operators.h"

namespace tp_ext {

Tensor amax_of(const Tensor& x, std::optional<int64_t> dim) {
  static const auto op = TP_OP(_finite_amax);
  return op.call(x, dim);
}

Scaled quantized(const Tensor& x, const Tensor& amax, at::ScalarType format) {
  static const auto op = TP_OP(_float8_quantize);
  auto [values, inverse] = op.call(x, amax, format);
  return {values, inverse};
}

std::vector<Tensor> max_over(const std::string& group, std::vector<Tensor> all) {
  if (comm::size(group) == 1 || all.empty()) return all;
  std::vector<Tensor> flat;
  std::vector<SymInt> sizes;
  for (const auto& one : all) {
    flat.push_back(one.reshape(-1));
    sizes.push_back(one.sym_numel());
  }
  const auto found = comm::all_reduce_max(at::cat(flat), group).split_with_sizes_symint(sizes);
  for (size_t i = 0; i < all.size(); ++i) all[i] = found[i].view_symint(all[i].sym_sizes());
  return all;
}

namespace {

// An operand as torch's product on CUDA takes it, and as Inductor's takes it: the left one in rows,
// the right one in columns. padded: sums and columns are multiples of 16, too
Scaled laid_out(Scaled x, bool left, bool padded, bool by_row) {
  const auto missing = [](int64_t n) { return (16 - n % 16) % 16; };
  const Tensor rows = left ? x.values : x.values.t();  // the summed dim is the last
  const int64_t k = padded ? missing(rows.size(1)) : 0;
  const int64_t n = padded && !left ? missing(rows.size(0)) : 0;
  Tensor values = rows.contiguous();
  if (k > 0 || n > 0)
    values = at::constant_pad_nd(values.view(at::kByte), {0, k, 0, n}).view(values.scalar_type());
  x.values = left ? values : values.t();
  if (n > 0 && by_row) x.inverse = at::constant_pad_nd(x.inverse, {0, n}, 1);
  x.inverse = x.inverse.contiguous();
  return x;
}

}  // namespace

Tensor scaled_product(Scaled a, Scaled b, bool by_row, at::ScalarType dtype) {
  // The product of the CPU has one inside, which autocast around a backward would round
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const bool padded = a.values.is_cuda() || a.values.is_meta();  // torch has CUDA's rules for meta
  const auto columns = b.values.sym_size(1);
  if (padded || comm::traced(a.values)) {
    a = laid_out(std::move(a), true, padded, by_row);
    b = laid_out(std::move(b), false, padded, by_row);
  }
  const auto product = [&](const Tensor& of_a, const Tensor& of_b, at::ScalarType result) {
    const Tensor y =
        at::_scaled_mm(a.values, b.values, of_a, of_b, std::nullopt, std::nullopt, result);
    // A view as a result could not be changed in place where autograd sees it
    return padded ? y.narrow_symint(1, 0, columns).contiguous() : y;
  };
  if (!by_row) return product(a.inverse.reshape({}), b.inverse.reshape({}), dtype);
  // CUDA takes scales per row for a product in bf16, the CPU from some torch after 2.11 on. Else
  // they multiply the sums
  if (a.values.is_cuda() && dtype == at::kBFloat16) return product(a.inverse, b.inverse, dtype);
  const Tensor one = at::ones({}, a.inverse.options());
  // A large scale of a last: codes times it may overflow where the product does not
  const Tensor small = a.inverse.clamp_max(1), large = a.inverse.clamp_min(1);
  const Tensor scaled = product(one, one, at::kFloat) * small;
  return (scaled * b.inverse.narrow_symint(1, 0, columns) * large).to(dtype);
}

void check_float8(const Tensor& x, const Tensor& weight, at::ScalarType forward,
                  at::ScalarType gradient) {
  check_up_to_float32(x, "x", " with float8");
  check_up_to_float32(weight, "weight", " with float8");
  check_same_device(x, "x", weight, "weight");
  check_float8_format(forward, "forward");
  check_float8_format(gradient, "gradient");
  TORCH_CHECK_VALUE(
      !x.is_cuda() || forward == at::kFloat8_e4m3fn,
      "forward: float8_e5m2 must be float8_e4m3fn on CUDA, which has no product of two "
      "float8_e5m2");
}

}  // namespace tp_ext
