// Counter-based random numbers: every draw is a pure function of (seed, index of the element in the
// full tensor), so a rank draws exactly its slice. Philox4x32-10, Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC'11. One counter gives four 32-bit words. Weights use whole
// words: element i has word i % 4 of counter i / 4; dropout uses 16 bits per element (dropout.h).

#pragma once

#include "scalar.h"

namespace tp_ext {

struct PhiloxWords {
  uint32_t w[4];
};

// Words of several counters at once, which share the keys of the rounds. Another stream gives the
// same counters other words.
template <int kCounters>
TP_HD void philox4x32(uint64_t seed, const uint64_t (&counter)[kCounters], uint32_t stream,
                      PhiloxWords (&words)[kCounters]) {
  for (int i = 0; i < kCounters; ++i)
    words[i] = {
        {static_cast<uint32_t>(counter[i]), static_cast<uint32_t>(counter[i] >> 32), stream, 0}};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCounters; ++i) {
      uint32_t(&c)[4] = words[i].w;
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c[0];
      const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
      c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
      c[1] = static_cast<uint32_t>(p1);
      c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
      c[3] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}
TP_HD PhiloxWords philox4x32(uint64_t seed, uint64_t counter, uint32_t stream = 0) {
  const uint64_t counters[] = {counter};
  PhiloxWords words[1];
  philox4x32(seed, counters, stream, words);
  return words[0];
}

// Position of a local element in the full tensor: a slice of one dim of a contiguous tensor, viewed
// as [outer, inner] with local_inner of the full_inner elements of each row, from `offset` on.
// Row r is row r of the full tensor, or rows[r] if there is such a table.
struct GlobalIndex {
  int64_t local_inner, full_inner, offset;
  const int64_t* rows = nullptr;
  TP_HD uint64_t operator()(int64_t i) const {
    const int64_t r = i / local_inner;
    return static_cast<uint64_t>((rows ? rows[r] : r) * full_inner + offset + i % local_inner);
  }
};

// What a seed of dropout consists of: the seed alone; the seed and the number, in the full tensor,
// of the first row; or the seed and the number of each row. It is read where the kernel runs, so
// compiled code serves every microbatch.
struct SeedAndRows {
  const int64_t* data;
  int64_t size;
  TP_HD uint64_t seed() const { return static_cast<uint64_t>(data[0]); }
  TP_HD int64_t row(int64_t r) const {
    return size == 1 ? r : size == 2 ? data[1] + r : data[1 + r];
  }
};

// Uniform on (0, 1): never 0 or 1, so that its logarithm is finite
TP_HD double unit_uniform(uint32_t word) { return (word + 0.5) * 2.3283064365386963e-10; }

}  // namespace tp_ext
