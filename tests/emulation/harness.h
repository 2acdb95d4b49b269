// Shared by the drivers of the kernels: guarded tensors, values, comparison, the run of one case in
// every order of threads.

#pragma once

#include <cfloat>
#include <tuple>
#include <type_traits>

#include "cuda_on_host.h"
#include "storage_types.h"

namespace emulation {

inline std::string current_case;
inline int cases = 0;

[[noreturn]] inline void wrong(const std::string& what) { fail(current_case + ": " + what); }

// n elements that begin `shift` elements after a boundary of 64 bytes. An access past the end stops
// in the address sanitizer; the memory before the start, and elements not written, are NaN.
template <typename T>
class Tensor {
 public:
  explicit Tensor(int64_t n, int64_t shift = 0) : n_(n), head_(shift * sizeof(T)) {
    const size_t bytes = head_ + n * sizeof(T);
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes) != 0) fail("no memory");
    memory_.reset(static_cast<unsigned char*>(memory));
    std::memset(memory, 0xff, bytes);
  }
  T* data() const { return reinterpret_cast<T*>(memory_.get() + head_); }
  operator T*() const { return data(); }
  int64_t size() const { return n_; }
  T& operator[](int64_t i) const { return data()[i]; }
  Tensor copy() const {
    Tensor result(n_, head_ / sizeof(T));
    std::memcpy(result.data(), data(), n_ * sizeof(T));
    return result;
  }
  void check_head() const {
    for (size_t i = 0; i < head_; ++i)
      if (memory_.get()[i] != 0xff) wrong("written in front of a tensor");
  }
  bool same_bits(const Tensor& other) const {
    return n_ == other.n_ && (n_ == 0 || std::memcmp(data(), other.data(), n_ * sizeof(T)) == 0);
  }

 private:
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  int64_t n_;
  size_t head_;
  std::unique_ptr<unsigned char, Free> memory_;
};

// Values of about 1 in size, of both signs, the same in every run
template <typename T>
Tensor<T> values(int64_t n, int64_t shift = 0, unsigned seed = 1, double low = -3,
                 double high = 3) {
  Tensor<T> result(n, shift);
  Random random{seed * uint64_t{1} << 32};
  T* const to = result.data();
  for (int64_t i = 0; i < n; ++i)
    to[i] = T(static_cast<float>(low + (high - low) * 0x1p-53 * (random() >> 11)));
  return result;
}

template <typename T>
double as_double(T x) {
  if constexpr (std::is_arithmetic_v<T>)
    return x;
  else
    return static_cast<float>(x);
}

// Unit in the last place of 1
template <typename T>
constexpr double kEps = std::is_same_v<T, double>     ? DBL_EPSILON
                        : std::is_same_v<T, float>    ? FLT_EPSILON
                        : std::is_same_v<T, BFloat16> ? 1.0 / 128
                                                      : 1.0 / 1024;
// Half a step next to 0
template <typename T>
constexpr double kTiny = std::is_same_v<T, Half> ? 0.5 / (1 << 24) : 0;

// got == want to the bit. For kernels that apply a formula to each element.
template <typename T>
void expect_equal(const char* what, const Tensor<T>& got, const Tensor<T>& want) {
  got.check_head();
  if (got.same_bits(want)) return;
  for (int64_t i = 0; i < want.size(); ++i)
    if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0)
      wrong(std::string(what) + "[" + std::to_string(i) + "] is " +
            std::to_string(as_double(got[i])) + ", not " + std::to_string(as_double(want[i])));
}

// |got - want(i)| <= bound(i) and one rounding to T
template <typename T>
void expect_near(const char* what, const Tensor<T>& got, const Call<double(int64_t)>& want,
                 const Call<double(int64_t)>& bound) {
  got.check_head();
  for (int64_t i = 0; i < got.size(); ++i) {
    const double w = want(i), error = std::fabs(as_double(got[i]) - w);
    if (!(error <= bound(i) + kEps<T> / 2 * std::fabs(w) + kTiny<T>))
      wrong(std::string(what) + "[" + std::to_string(i) + "] is " +
            std::to_string(as_double(got[i])) + ", not " + std::to_string(w) + ", bound " +
            std::to_string(bound(i)));
  }
}

template <typename... T>
std::tuple<Tensor<T>...> results(Tensor<T>&... tensors) {
  return {std::move(tensors)...};
}

template <typename... T, size_t... k>
bool same_bits(const std::tuple<Tensor<T>...>& a, const std::tuple<Tensor<T>...>& b,
               std::index_sequence<k...>) {
  return (std::get<k>(a).same_bits(std::get<k>(b)) && ...);
}
template <typename... T>
bool same_bits(const std::tuple<Tensor<T>...>& a, const std::tuple<Tensor<T>...>& b) {
  return same_bits(a, b, std::index_sequence_for<T...>());
}

// Runs `kernels`, which launches them and returns their outputs, as results(..), in every order of
// threads and blocks; all must give the same bits
template <typename F>
auto run_in_every_order(const std::string& name, F kernels) {
  current_case = name;
  ++cases;
  order = Order::kAscending;
  auto result = kernels();
  for (const Order other : {Order::kDescending, Order::kShuffled}) {
    order = other;
    if (!same_bits(result, kernels())) wrong("another order of the threads gives other bits");
  }
  return result;
}

// Address space for a tensor of more than 2^31 elements, of which only the pages touched exist
template <typename T>
T* vast(int64_t n) {
  void* const p = mmap(nullptr, n * sizeof(T), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("no address space for a vast tensor");
  return static_cast<T*>(p);
}
template <typename T>
void unmap(T* p, int64_t n) {
  munmap(p, n * sizeof(T));
}

template <typename T>
const char* type_name() {
  return std::is_same_v<T, double>     ? "fp64"
         : std::is_same_v<T, float>    ? "fp32"
         : std::is_same_v<T, BFloat16> ? "bf16"
                                       : "fp16";
}
// fp32 and bf16 differ in vectors and accumulate types; EVERY_TYPE adds the other two, which takes
// as long to compile again
template <typename F>
void for_all_types(F f) {
  f(float{}), f(BFloat16{});
#ifdef EVERY_TYPE
  f(double{}), f(Half{});
#endif
}

inline int done() {
  std::printf("%d cases\n", cases);
  return 0;
}

}  // namespace emulation
