# Finds libtp_ext.so, its headers, and the torch beside the package: the target tp_ext::tp_ext.
#
#   TP_EXT_TORCH  the folder of another torch; default: the one beside the package, or that of a build in the sources
#
# It does not include torch's own TorchConfig.cmake, which needs the CUDA toolkit wherever torch was built with CUDA.

get_filename_component(_tp_ext_package "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

macro(_tp_ext_refuse)
  string(CONCAT tp_ext_NOT_FOUND_MESSAGE ${ARGN})
  set(tp_ext_FOUND FALSE)
  return()
endmacro()

# The value of a variable in a file of Python
function(_tp_ext_read file name result)
  set(value "")
  if(EXISTS "${file}")
    file(STRINGS "${file}" line REGEX "^${name}(: [^=]*)? = " LIMIT_COUNT 1)
    if(line MATCHES "= '([^']*)'")
      set(value "${CMAKE_MATCH_1}")
    endif()
  endif()
  set(${result} "${value}" PARENT_SCOPE)
endfunction()

function(_tp_ext_minor version result)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  set(${result} "${minor}" PARENT_SCOPE)
endfunction()

_tp_ext_read("${_tp_ext_package}/_built_for.py" TORCH_FOLDER _tp_ext_of_sources)
set(_tp_ext_torch "")
foreach(_tp_ext_folder IN ITEMS "${TP_EXT_TORCH}" "${_tp_ext_package}/../torch" "${_tp_ext_of_sources}")
  if(NOT _tp_ext_torch AND EXISTS "${_tp_ext_folder}/lib/libtorch.so")
    get_filename_component(_tp_ext_torch "${_tp_ext_folder}" ABSOLUTE)
  endif()
endforeach()
if(NOT _tp_ext_torch)
  _tp_ext_refuse("there is no torch beside ${_tp_ext_package}: set TP_EXT_TORCH to the folder of one")
endif()
_tp_ext_read("${_tp_ext_torch}/version.py" __version__ _tp_ext_running)
_tp_ext_read("${_tp_ext_torch}/version.py" cuda _tp_ext_running_cuda)
_tp_ext_minor("${_tp_ext_running}" _tp_ext_minor_running)

# A wheel has a library for each minor version of torch
set(_tp_ext_libraries "${_tp_ext_package}")
if(IS_DIRECTORY "${_tp_ext_package}/_libs")
  set(_tp_ext_libraries "${_tp_ext_package}/_libs/torch${_tp_ext_minor_running}")
  if(NOT IS_DIRECTORY "${_tp_ext_libraries}")
    file(GLOB _tp_ext_known RELATIVE "${_tp_ext_package}/_libs" "${_tp_ext_package}/_libs/torch*")
    _tp_ext_refuse("this tp_ext is for ${_tp_ext_known}, and ${_tp_ext_torch} is torch ${_tp_ext_running}")
  endif()
endif()
if(NOT EXISTS "${_tp_ext_libraries}/libtp_ext.so")
  _tp_ext_refuse("tp_ext is not built: there is no ${_tp_ext_libraries}/libtp_ext.so")
endif()
_tp_ext_read("${_tp_ext_libraries}/_built_for.py" TORCH _tp_ext_built)
_tp_ext_read("${_tp_ext_libraries}/_built_for.py" TORCH_CUDA _tp_ext_built_cuda)
_tp_ext_minor("${_tp_ext_built}" _tp_ext_minor_built)
if(NOT _tp_ext_minor_built STREQUAL _tp_ext_minor_running)
  _tp_ext_refuse("tp_ext was built for torch ${_tp_ext_built}, and ${_tp_ext_torch} is torch ${_tp_ext_running}")
endif()
string(REGEX MATCH "^[0-9]+" _tp_ext_major_built "${_tp_ext_built_cuda}")
string(REGEX MATCH "^[0-9]+" _tp_ext_major_running "${_tp_ext_running_cuda}")
if(_tp_ext_built_cuda AND NOT _tp_ext_major_built STREQUAL "${_tp_ext_major_running}")
  _tp_ext_refuse("tp_ext was built for torch ${_tp_ext_built}, CUDA ${_tp_ext_built_cuda}, and ${_tp_ext_torch} is "
                 "torch ${_tp_ext_running}, CUDA '${_tp_ext_running_cuda}'")
endif()

set(tp_ext_FOUND TRUE)
if(NOT TARGET tp_ext::tp_ext)
  set(_tp_ext_names torch torch_cpu c10)
  if(_tp_ext_built_cuda)
    list(APPEND _tp_ext_names torch_cuda c10_cuda)
  endif()
  set(_tp_ext_links "")
  foreach(_tp_ext_name IN LISTS _tp_ext_names)
    add_library(tp_ext::${_tp_ext_name} SHARED IMPORTED)
    set_target_properties(tp_ext::${_tp_ext_name} PROPERTIES
      IMPORTED_LOCATION "${_tp_ext_torch}/lib/lib${_tp_ext_name}.so" IMPORTED_NO_SONAME FALSE)
    list(APPEND _tp_ext_links tp_ext::${_tp_ext_name})
  endforeach()
  add_library(tp_ext::tp_ext SHARED IMPORTED)
  set_target_properties(tp_ext::tp_ext PROPERTIES
    IMPORTED_LOCATION "${_tp_ext_libraries}/libtp_ext.so"
    INTERFACE_INCLUDE_DIRECTORIES
      "${_tp_ext_package}/include;${_tp_ext_torch}/include;${_tp_ext_torch}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_LINK_LIBRARIES "${_tp_ext_links}"
    # Torch's libraries may need those of CUDA, which are found when the program runs, or never used
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined")
endif()
