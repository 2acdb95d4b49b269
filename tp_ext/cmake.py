"""The folder in which CMake finds the library for C++: ``python -m tp_ext.cmake`` prints it, as
``-D CMAKE_PREFIX_PATH=$(python -m tp_ext.cmake)`` takes it.
"""

from pathlib import Path

cmake_prefix_path = str(Path(__file__).parent / "share" / "cmake")
"""The value of ``CMAKE_PREFIX_PATH`` with which ``find_package(tp_ext REQUIRED)`` finds the package."""

if __name__ == "__main__":
    print(cmake_prefix_path)
