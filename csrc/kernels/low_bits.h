// Rows of a frozen weight of 8 or 4 bits, and their blocks, each of which has a scale.

#pragma once

#include "scalar.h"

namespace tp_ext {

struct LowBitsRows {
  int64_t count, bytes, bytes_of_block;
  int values;  // of a byte: 1 of int8, whose rows are one block, 2 of int4

  TP_HD bool four() const { return values == 2; }
  TP_HD int64_t inputs() const { return bytes * values; }
  // A row of int8 without inputs has a scale, too
  TP_HD int64_t blocks() const { return four() ? bytes / bytes_of_block : 1; }
};

}  // namespace tp_ext
