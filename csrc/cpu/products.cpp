#include "products.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>

#include "check.h"
#include "tiled_attention.h"

// MKL's own function, which torch's library exports where it contains MKL
extern "C" int mkl_serv_cbwr_get(int option) __attribute__((weak));

namespace tp_ext::products {
namespace {

namespace fs = std::filesystem;

// torch's own call of oneDNN for Inductor: x w^T + b of plain tensors, of any strides
using Pointwise = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                         c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);

const std::optional<c10::TypedOperatorHandle<Pointwise>>& pointwise() {
  static const auto handle = []() -> std::optional<c10::TypedOperatorHandle<Pointwise>> {
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!found.has_value()) return std::nullopt;
    try {
      return found->typed<Pointwise>();
    } catch (const c10::Error&) {
      return std::nullopt;  // it is no public operator: another torch may give it other types
    }
  }();
  return handle;
}

Tensor by_onednn(const Tensor& a, const Tensor& b_t, const OptionalTensor& bias) {
  return pointwise()->call(a, b_t, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// Products of fewer multiplications are torch's: a call of oneDNN takes some us more
constexpr int64_t kFewest = int64_t{1} << 21, kMany = int64_t{1} << 24, kShortest = 16;

struct Table {
  std::array<bool, 2> onednn{};  // of fewer than kMany multiplications, and of more
  std::string reason;
};

double seconds(const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// oneDNN must be this much faster: where both are as fast, the choice must not be noise
constexpr double kMargin = 1.25;
constexpr int kRepeats = 7;

bool is_faster(int64_t rows, int64_t size) {
  const Tensor x = at::ones({rows, size}), w = at::ones({size, size});
  double torch = 1e9, onednn = 1e9;
  for (int i = 0; i < kRepeats; ++i) {
    torch = std::min(torch, seconds([&] { at::linear(x, w); }));
    onednn = std::min(onednn, seconds([&] { by_onednn(x, w, std::nullopt); }));
  }
  return onednn * kMargin < torch;
}

// What the choice depends on: the processor, by what the system says of it, and the libraries
std::string key() {
  std::ifstream cpus("/proc/cpuinfo");
  std::string line, name;
  while (std::getline(cpus, line) && !line.empty())  // of the first processor
    for (const char* field : {"vendor_id", "cpu family", "model\t", "flags"})
      if (line.rfind(field, 0) == 0) name += line;
  std::ostringstream text;
  text << std::hex << std::hash<std::string>{}(name) << "-torch-" << TORCH_VERSION;
  return text.str();
}

std::optional<fs::path> file() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  if (cache == nullptr && home == nullptr) return std::nullopt;
  const fs::path base = cache != nullptr && *cache ? fs::path(cache) : fs::path(home) / ".cache";
  return base / "tp_ext" / ("products-" + key());
}

std::optional<Table> read(const fs::path& path) {
  std::ifstream in(path);
  std::string few, many;
  const auto known = [](const std::string& name) { return name == "torch" || name == "onednn"; };
  if (!(in >> few >> many) || !known(few) || !known(many)) return std::nullopt;
  return Table{{few == "onednn", many == "onednn"}, "as measured before, in " + path.string()};
}

Table measured() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return {{is_faster(64, 256), is_faster(128, 512)}, "as measured in this process"};
}

const char* name_of(bool onednn) { return onednn ? "onednn" : "torch"; }

// The first of several processes to measure decides for all: link() fails where there is a file
Table shared(const fs::path& path) {
  if (const auto table = read(path)) return *table;
  const Table table = measured();
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  const fs::path own = path.string() + "." + std::to_string(::getpid());
  {
    std::ofstream out(own);
    out << name_of(table.onednn[0]) << " " << name_of(table.onednn[1]) << "\n";
  }
  fs::create_hard_link(own, path, error);
  const auto first = read(path);
  if (!first) fs::rename(own, path, error);  // over one that was cut off
  fs::remove(own, error);
  return !first || first->onednn == table.onednn ? table : *first;
}

Table chosen() {
  const char* const given = std::getenv("TP_EXT_GEMM");
  const std::string choice = given == nullptr ? "auto" : given;
  TORCH_CHECK_VALUE(choice == "auto" || choice == "torch" || choice == "onednn", "TP_EXT_GEMM: '",
                    choice, "' must be one of 'auto', 'torch', 'onednn'");
  if (!pointwise().has_value() || !at::globalContext().hasMKLDNN())
    return {{}, "this torch has no oneDNN"};
  if (are_strict()) return {{}, "by MKL_CBWR, or as there is no MKL"};
  if (choice != "auto") return {{choice == "onednn", choice == "onednn"}, "by TP_EXT_GEMM"};
  const auto path = file();
  return path ? shared(*path) : measured();
}

const Table& table() {
  static const Table result = chosen();
  return result;
}

// Of [m, k] by [k, n]
bool is_onednn(int64_t m, int64_t k, int64_t n) {
  if (std::min({m, k, n}) < kShortest || m * k * n < kFewest) return false;
  if (!table().onednn[m * k * n >= kMany]) return false;
  return at::globalContext().userEnabledMkldnn();
}

// Whether no mode or wrapper, such as a compiler's, must see the product
bool is_plain(const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  return a.is_cpu() && b.is_cpu() && a.scalar_type() == at::kFloat &&
         b.scalar_type() == at::kFloat && !c10::impl::dispatch_mode_enabled() &&
         !at::areAnyTensorSubclassLike({a, b, bias.value_or(a)});
}

// Outside of a Function torch's products build the graph
bool is_recorded() {
  return !c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
}

bool mm_is_onednn(const Tensor& a, const Tensor& b, const OptionalTensor& bias = std::nullopt) {
  return is_plain(a, b, bias) && a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) &&
         !is_recorded() && is_onednn(a.size(0), a.size(1), b.size(1));
}

}  // namespace

bool are_strict() {
  constexpr int kAll = ~0, kStrict = 0x10000;  // MKL_CBWR_ALL, MKL_CBWR_STRICT
  return !mkl_serv_cbwr_get || (mkl_serv_cbwr_get(kAll) & kStrict) != 0;
}

bool differs(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  if (!is_plain(x, weight, bias) || x.dim() < 2 || weight.dim() != 2) return false;
  const int64_t in = x.size(-1);
  return in > 0 && weight.size(1) == in && is_onednn(x.numel() / in, in, weight.size(0));
}

bool attend(const Tensor& q, const Tensor& k, const Tensor& v) {
  constexpr int64_t kFewestTokens = 64;  // a tile; of fewer it is slower
  if (!is_plain(q, k, v) || v.scalar_type() != at::kFloat || !q.numel() || !k.numel()) return false;
  if (std::min(q.size(2), k.size(2)) < kFewestTokens) return false;
  // Its threads share heads of k, torch's in forward queries, too. A user may ask for torch's formula
  if (q.size(0) * k.size(1) < at::get_num_threads() || !at::globalContext().userEnabledFlashSDP())
    return false;
  return is_onednn(q.numel() / q.size(3), q.size(3), k.size(2)) && has_tiled_attention_cpu();
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  if (differs(x, weight, bias) && !is_recorded()) return by_onednn(x, weight, bias);
  return at::linear(x, weight, bias);
}

Tensor mm(const Tensor& a, const Tensor& b) {
  return mm_is_onednn(a, b) ? by_onednn(a, b.t(), std::nullopt) : at::mm(a, b);
}

void mm_out(const Tensor& out, const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  Tensor result = out;
  if (mm_is_onednn(a, b, bias))
    result.copy_(by_onednn(a, b.t(), bias));
  else if (bias.has_value())
    at::addmm_out(result, *bias, a, b);
  else
    at::mm_out(result, a, b);
}

Tensor add_mm_(const Tensor& c, const Tensor& a, const Tensor& b) {
  return mm_is_onednn(a, b) ? c.add_(by_onednn(a, b.t(), std::nullopt)) : c.addmm_(a, b);
}

std::string describe() {
  const Table& t = table();
  const std::string few = name_of(t.onednn[0]), many = name_of(t.onednn[1]);
  return (few == many ? few : few + ", of more than 2^24 multiplications " + many) + ", " +
         t.reason;
}

}  // namespace tp_ext::products
