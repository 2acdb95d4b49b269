#include "optim/newton_schulz.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

#include "check.h"

namespace tp_ext {

using at::Tensor;

Tensor orthogonalized(const Tensor& update, const std::array<double, 3>& coefficients,
                      int64_t steps, double eps) {
  TORCH_CHECK_VALUE(update.dim() == 2, "update: shape ", update.sizes(), " must have two dims");
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto [a, b, c] = coefficients;
  const bool tall = update.size(0) > update.size(1);
  // The Gram matrix is then that of the short side: fewer products for the same result
  Tensor x = tall ? update.t() : update;
  x = x.div(at::linalg_vector_norm(x).clamp_min(eps));
  for (int64_t step = 0; step < steps; ++step) {
    const Tensor gram = at::mm(x, x.t());
    const Tensor polynomial = at::addmm(gram, gram, gram, b, c);
    x = at::addmm(x, polynomial, x, a, 1);
  }
  return tall ? x.t() : x;
}

}  // namespace tp_ext
