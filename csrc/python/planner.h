// The planner as a submodule of the extension module.

#pragma once

#include <pybind11/pybind11.h>

namespace tp_ext::planner {

void bind(pybind11::module_& m);

}  // namespace tp_ext::planner
