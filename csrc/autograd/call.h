// How a Function was called, kept for its backward: a struct that names its fields once,
//
//   struct Mask {
//     double p;
//     SymInt offset;
//     auto fields() { return std::tie(p, offset); }
//   };
//   put_call(ctx, mask);  // in forward
//   const auto mask = get_call<Mask>(ctx);
//
// A field is an entry of saved_data under its number. Every entry costs time, so those that are as
// in Mask{} are not written. A tensor here is no saved variable: it may be written between forward
// and backward, as main_grad is in every microbatch.

#pragma once

#include <string>
#include <tuple>
#include <utility>

#include "autograd/function.h"
#include "comm/split.h"

namespace tp_ext {
namespace fields {

template <typename T>
bool is_default(const T& field, const T& value) {
  return field == value;
}
// Without a comparison, which would guard the size
inline bool is_default(const SymInt&, const SymInt&) { return false; }
inline bool is_default(const Split& field, const Split&) { return field.sizes.empty(); }
inline bool is_default(const OptionalTensor& field, const OptionalTensor&) { return !field; }

template <typename T>
at::IValue packed(const T& field) {
  return field;
}
inline at::IValue packed(const Split& field) { return c10::SymIntArrayRef(field.sizes); }

template <typename T>
void unpack(const at::IValue& value, T& field) {
  field = value.to<T>();
}
inline void unpack(const at::IValue& value, Split& field) { field.sizes = value.toSymIntVector(); }

inline std::string key(size_t number) { return std::string(1, static_cast<char>('a' + number)); }

template <typename Tuple, size_t... i>
void put(AutogradContext* ctx, const Tuple& call, const Tuple& defaults,
         std::index_sequence<i...>) {
  const auto put_one = [&](size_t number, const auto& field, const auto& value) {
    if (!is_default(field, value)) ctx->saved_data[key(number)] = packed(field);
  };
  (put_one(i, std::get<i>(call), std::get<i>(defaults)), ...);
}
template <typename Tuple, size_t... i>
void get(AutogradContext* ctx, const Tuple& call, std::index_sequence<i...>) {
  const auto get_one = [&](size_t number, auto& field) {
    const auto found = ctx->saved_data.find(key(number));
    if (found != ctx->saved_data.end()) unpack(found->second, field);
  };
  (get_one(i, std::get<i>(call)), ...);
}

template <typename Call>
using Indices =
    std::make_index_sequence<std::tuple_size_v<decltype(std::declval<Call&>().fields())>>;

}  // namespace fields

template <typename Call>
void put_call(AutogradContext* ctx, const Call& call) {
  Call defaults{};
  fields::put(ctx, const_cast<Call&>(call).fields(), defaults.fields(), fields::Indices<Call>());
}

template <typename Call>
Call get_call(AutogradContext* ctx) {
  Call call{};
  fields::get(ctx, call.fields(), fields::Indices<Call>());
  return call;
}

// Two operands of a product, each kept only if the other's gradient may be needed
inline variable_list operands(const Tensor& a, const Tensor& b) {
  return {b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()};
}

}  // namespace tp_ext
