#include "shm/reduce_op.h"

#include <algorithm>
#include <type_traits>

#include "cpu/dispatch.h"

namespace tp_ext::shm {
namespace {

template <typename T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<at::BFloat16> {
  using type = float;
};
template <>
struct Accumulator<at::Half> {
  using type = float;
};

// Integers wrap around, as torch's do
struct Sum {
  template <typename A>
  A operator()(A a, A b) const {
    if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    else
      return a + b;
  }
};
struct Product {
  template <typename A>
  A operator()(A a, A b) const {
    if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    else
      return a * b;
  }
};
// NaN in, NaN out
struct Min {
  template <typename A>
  A operator()(A a, A b) const {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <typename A>
  A operator()(A a, A b) const {
    return b > a || b != b ? b : a;
  }
};
struct And {
  template <typename A>
  A operator()(A a, A b) const {
    return static_cast<A>(a & b);
  }
};
struct Or {
  template <typename A>
  A operator()(A a, A b) const {
    return static_cast<A>(a | b);
  }
};
struct Xor {
  template <typename A>
  A operator()(A a, A b) const {
    return static_cast<A>(a ^ b);
  }
};

constexpr int64_t kBlock = 1024;

template <typename T, typename F>
TP_MULTIVERSION void combine_two(T* out, const T* a, const T* b, int64_t count) {
  using A = typename Accumulator<T>::type;
  const F f;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<T>(f(static_cast<A>(a[i]), static_cast<A>(b[i])));
}

template <typename T, typename F>
TP_MULTIVERSION void combine_block(typename Accumulator<T>::type* sum, const T* in, int64_t count) {
  using A = typename Accumulator<T>::type;
  const F f;
  for (int64_t i = 0; i < count; ++i) sum[i] = f(sum[i], static_cast<A>(in[i]));
}

template <typename T, typename F, bool average>
void combine(void* to, const void* const* from, int n, int64_t count) {
  using A = typename Accumulator<T>::type;
  auto* out = static_cast<T*>(to);
  const auto in = [from](int k) { return static_cast<const T*>(from[k]); };
  if (n == 2 && !average) return combine_two<T, F>(out, in(0), in(1), count);
  A sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = std::min(kBlock, count - begin);
    for (int64_t i = 0; i < length; ++i) sum[i] = static_cast<A>(in(0)[begin + i]);
    for (int k = 1; k < n; ++k) combine_block<T, F>(sum, in(k) + begin, length);
    for (int64_t i = 0; i < length; ++i) {
      if constexpr (average)
        out[begin + i] = static_cast<T>(sum[i] / static_cast<A>(n));
      else
        out[begin + i] = static_cast<T>(sum[i]);
    }
  }
}

template <typename T>
TP_MULTIVERSION void add_four(T* out, const T* a, const T* b, const T* c, const T* d,
                              int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = (a[i] + b[i]) + (c[i] + d[i]);
}

// Elements [begin, begin + length) of the tree over n inputs: of the largest power of two that is
// less than n, and of the others
template <typename T>
void add_tree(T* out, const void* const* from, int n, int64_t begin, int64_t length) {
  const auto in = [from, begin](int k) { return static_cast<const T*>(from[k]) + begin; };
  if (n == 1) return static_cast<void>(std::copy_n(in(0), length, out));
  if (n == 2) return combine_two<T, Sum>(out, in(0), in(1), length);
  if (n == 4) return add_four(out, in(0), in(1), in(2), in(3), length);
  int half = 1;
  while (2 * half < n) half *= 2;
  T right[kBlock];
  add_tree(out, from, half, begin, length);
  add_tree(right, from + half, n - half, begin, length);
  combine_two<T, Sum>(out, out, right, length);
}

template <typename T>
void combine_tree(void* to, const void* const* from, int n, int64_t count) {
  if (n == 2 || n == 4) return add_tree(static_cast<T*>(to), from, n, 0, count);
  T sum[kBlock];  // `to` may be an input that is read later
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = std::min(kBlock, count - begin);
    add_tree(sum, from, n, begin, length);
    std::copy_n(sum, length, static_cast<T*>(to) + begin);
  }
}

template <typename T>
Combine choose(Operation operation) {
  constexpr bool whole = std::is_integral_v<T>;
  switch (operation) {
    case Operation::kSum:
      return combine<T, Sum, false>;
    case Operation::kProduct:
      return combine<T, Product, false>;
    case Operation::kMin:
      return combine<T, Min, false>;
    case Operation::kMax:
      return combine<T, Max, false>;
    case Operation::kAverage:
      if constexpr (!whole) return combine<T, Sum, true>;
      return nullptr;
    case Operation::kAnd:
      if constexpr (whole) return combine<T, And, false>;
      return nullptr;
    case Operation::kOr:
      if constexpr (whole) return combine<T, Or, false>;
      return nullptr;
    case Operation::kXor:
      if constexpr (whole) return combine<T, Xor, false>;
      return nullptr;
    case Operation::kTreeSum:
      if constexpr (std::is_floating_point_v<T>) return combine_tree<T>;
      return nullptr;
  }
  return nullptr;
}

Combine choose(at::ScalarType dtype, Operation operation) {
  switch (dtype) {
    case at::kDouble:
      return choose<double>(operation);
    case at::kFloat:
      return choose<float>(operation);
    case at::kBFloat16:
      return choose<at::BFloat16>(operation);
    case at::kHalf:
      return choose<at::Half>(operation);
    case at::kLong:
      return choose<int64_t>(operation);
    case at::kInt:
      return choose<int32_t>(operation);
    case at::kShort:
      return choose<int16_t>(operation);
    case at::kChar:
      return choose<int8_t>(operation);
    case at::kByte:
      return choose<uint8_t>(operation);
    case at::kBool:  // sums of bools are their or, products their and
      switch (operation) {
        case Operation::kSum:
        case Operation::kMax:
        case Operation::kOr:
          return choose<uint8_t>(Operation::kOr);
        case Operation::kProduct:
        case Operation::kMin:
        case Operation::kAnd:
          return choose<uint8_t>(Operation::kAnd);
        default:
          return operation == Operation::kXor ? choose<uint8_t>(operation) : nullptr;
      }
    default:
      return nullptr;
  }
}

}  // namespace

Combine combine_for(at::ScalarType dtype, Operation operation) {
  static constexpr const char* kNames[] = {"SUM",  "AVG", "MIN",  "MAX", "PRODUCT",
                                           "BAND", "BOR", "BXOR", "tree"};
  const Combine combine = choose(dtype, operation);
  TORCH_CHECK_VALUE(combine != nullptr, "op: ReduceOp.", kNames[static_cast<int>(operation)],
                    " must be one that tensors of dtype ", dtype, " have");
  return combine;
}

}  // namespace tp_ext::shm
