#include "comm/split.h"

namespace tp_ext {
namespace {

std::vector<c10::SymInt> checked(at::SymIntArrayRef sizes, int64_t p, const char* name) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == p, name, ": ", sizes,
                    " must have one length per rank, ", p);
  for (const auto& size : sizes)
    TORCH_CHECK_VALUE(size >= 0, name, ": ", sizes, " must not hold a negative length");
  return sizes.vec();
}

}  // namespace

c10::SymInt Split::start(int64_t rank) const {
  c10::SymInt sum = 0;
  for (int64_t k = 0; k < rank; ++k) sum = sum + sizes[k];
  return sum;
}

c10::SymInt Split::longest() const {
  c10::SymInt most = sizes[0];
  for (const auto& size : sizes) most = most.max(size);
  return most;
}

bool Split::even() const {
  for (const auto& size : sizes)
    if (size != sizes[0]) return false;
  return true;
}

Split tensor_split(const c10::SymInt& n, int64_t p) {
  Split split;
  split.sizes.reserve(p);
  for (int64_t k = 0; k < p; ++k) split.sizes.push_back((n + (p - 1 - k)) / p);
  return split;
}

Split split_full(const c10::SymInt& n, int64_t p, Sizes sizes, const char* name) {
  if (!sizes.has_value()) return tensor_split(n, p);
  Split split{checked(*sizes, p, name)};
  TORCH_CHECK_VALUE(split.total() == n, name, ": ", *sizes, " must sum to the length of the dim, ",
                    n);
  return split;
}

Split split_local(const c10::SymInt& n, int64_t rank, int64_t p, Sizes sizes, const char* name) {
  if (!sizes.has_value()) return Split{std::vector<c10::SymInt>(p, n)};
  Split split{checked(*sizes, p, name)};
  TORCH_CHECK_VALUE(split.sizes[rank] == n, name, ": entry ", rank, " of ", *sizes,
                    " must be the length of the dim on this rank, ", n);
  return split;
}

}  // namespace tp_ext
