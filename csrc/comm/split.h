// The lengths of the shards of a dim of n elements: as torch.tensor_split, or given by `sizes`.

#pragma once

#include <c10/core/SymInt.h>
#include <vector>

#include "types.h"

namespace tp_ext {

struct Split {
  std::vector<c10::SymInt> sizes;  // one length per rank

  c10::SymInt start(int64_t rank) const;
  c10::SymInt total() const { return start(static_cast<int64_t>(sizes.size())); }
  c10::SymInt longest() const;
  bool even() const;
};

// The first n mod p ranks get one element more
Split tensor_split(const c10::SymInt& n, int64_t p);

// From full to sharded: a dim of n; `sizes` must sum to n
Split split_full(const c10::SymInt& n, int64_t p, Sizes sizes, const char* name = "sizes");

// From sharded to full: n on this rank; without `sizes` all ranks have n, with `sizes` its entry
// `rank` must be n
Split split_local(const c10::SymInt& n, int64_t rank, int64_t p, Sizes sizes,
                  const char* name = "sizes");

}  // namespace tp_ext
