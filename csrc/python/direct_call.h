// A Python function that calls one operator without boxing: its arguments are read from Python one
// by one and passed to the typed operator, still through the dispatcher. torch.ops parses the
// schema, fills a stack of IValues and unpacks it again, which costs a fifth of a small linear.
//
// It reads the arguments that layers pass: plain tensors, None, str, bool, int, float and lists of
// int, by position, one per argument of the schema. Everything else (tensor subclasses, symbolic
// integers, keywords, a torch function mode, wrong arguments) goes to torch.ops.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "types.h"

namespace tp_ext {

// Storage of one argument during the call. read() returns whether this type can hold the object;
// the value may point into the Python object, which the caller keeps alive.
template <typename T>
struct Argument;

template <>
struct Argument<const Tensor&> {
  const Tensor* held = nullptr;
  bool read(PyObject* object) {
    if (!THPVariable_CheckExact(object)) return false;
    held = &THPVariable_Unpack(object);
    return true;
  }
  const Tensor& pass() const { return *held; }
};

template <>
struct Argument<const OptionalTensor&> {
  OptionalTensor held;
  bool read(PyObject* object) {
    if (object == Py_None) return true;
    if (!THPVariable_CheckExact(object)) return false;
    held = THPVariable_Unpack(object);
    return true;
  }
  const OptionalTensor& pass() const { return held; }
};

template <>
struct Argument<std::string_view> {
  std::string_view held;
  bool read(PyObject* object) {
    if (!PyUnicode_CheckExact(object)) return false;
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &length);
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    held = {text, static_cast<size_t>(length)};
    return true;
  }
  std::string_view pass() const { return held; }
};

template <>
struct Argument<const std::string&> {
  std::string held;
  bool read(PyObject* object) {
    Argument<std::string_view> view;
    if (!view.read(object)) return false;
    held = view.held;
    return true;
  }
  const std::string& pass() const { return held; }
};

template <>
struct Argument<bool> {
  bool held = false;
  bool read(PyObject* object) {
    held = object == Py_True;
    return held || object == Py_False;
  }
  bool pass() const { return held; }
};

template <>
struct Argument<int64_t> {
  int64_t held = 0;
  bool read(PyObject* object) {
    if (!PyLong_CheckExact(object)) return false;
    int overflow = 0;
    held = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
  }
  int64_t pass() const { return held; }
};

template <>
struct Argument<c10::SymInt> : Argument<int64_t> {
  c10::SymInt pass() const { return held; }
};

template <>
struct Argument<double> {
  double held = 0;
  bool read(PyObject* object) {
    if (!PyFloat_CheckExact(object)) return false;
    held = PyFloat_AS_DOUBLE(object);
    return true;
  }
  double pass() const { return held; }
};

template <typename Number>
struct Argument<std::optional<Number>> {
  std::optional<Number> held;
  bool read(PyObject* object) {
    if (object == Py_None) return true;
    Argument<Number> number;
    if (!number.read(object)) return false;
    held = number.held;
    return true;
  }
  std::optional<Number> pass() const { return held; }
};

template <>
struct Argument<Sizes> {
  std::vector<c10::SymInt> held;
  bool given = false;
  bool read(PyObject* object) {
    if (object == Py_None) return true;
    if (!PyList_CheckExact(object)) return false;
    given = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
      Argument<int64_t> size;
      if (!size.read(PyList_GET_ITEM(object, i))) return false;
      held.emplace_back(size.held);
    }
    return true;
  }
  Sizes pass() const { return given ? Sizes(held) : Sizes(); }
};

inline PyObject* wrapped(const Tensor& result) { return THPVariable_Wrap(result); }
inline PyObject* wrapped(const std::tuple<Tensor, Tensor>& results) {
  const auto first = pybind11::reinterpret_steal<pybind11::object>(wrapped(std::get<0>(results)));
  const auto second = pybind11::reinterpret_steal<pybind11::object>(wrapped(std::get<1>(results)));
  return PyTuple_Pack(2, first.ptr(), second.ptr());
}

// The targets of a Python function made here: the typed operator, and `overload`, the same operator
// of torch.ops
template <typename Signature>
struct Target;

template <typename Result, typename... Args>
struct Target<Result(Args...)> {
  c10::TypedOperatorHandle<Result(Args...)> op;
  PyObject* overload;
  PyMethodDef definition;

  static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count,
                        PyObject* keywords) {
    HANDLE_TH_ERRORS
    const auto& target = *static_cast<const Target*>(PyCapsule_GetPointer(self, nullptr));
    std::tuple<Argument<Args>...> arguments;
    if (keywords != nullptr || count != sizeof...(Args) ||
        at::impl::torch_function_mode_enabled() ||
        !read(arguments, args, std::index_sequence_for<Args...>()))
      return PyObject_Vectorcall(target.overload, args, count, keywords);
    return wrapped(target.run(arguments));
    END_HANDLE_TH_ERRORS
  }

 private:
  template <size_t... i>
  static bool read(std::tuple<Argument<Args>...>& arguments, PyObject* const* args,
                   std::index_sequence<i...>) {
    return (std::get<i>(arguments).read(args[i]) && ...);
  }

  Result run(const std::tuple<Argument<Args>...>& arguments) const {
    const pybind11::gil_scoped_release no_gil;  // a collective waits for other ranks
    return std::apply([&](const auto&... each) { return op.call(each.pass()...); }, arguments);
  }
};

// The function for "tp_ext::<name>", a new reference. It is never freed, and neither is the data
// that it refers to.
template <typename Signature>
PyObject* direct_call(const char* name, PyObject* overload) {
  const auto call = &Target<Signature>::call;
  Py_INCREF(overload);
  auto* target = new Target<Signature>{
      find_op<Signature>((std::string("tp_ext::") + name).c_str()),
      overload,
      {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
       METH_FASTCALL | METH_KEYWORDS, nullptr}};
  const auto self =
      pybind11::reinterpret_steal<pybind11::object>(PyCapsule_New(target, nullptr, nullptr));
  if (!self) throw pybind11::error_already_set();
  return PyCFunction_NewEx(&target->definition, self.ptr(), nullptr);
}

}  // namespace tp_ext
