// Collectives that combine elements of all ranks: in the order of the ranks, by one rank or by all
// alike.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "shm/core/collective.h"

namespace tp_ext::shm {

// out[i] = in[0][i] + in[1][i] + .., or another operation, rounded once; out may be one of in
using Combine = void (*)(void* out, const void* const* in, int n, int64_t count);

struct Elements {
  int64_t count, size;  // number, bytes of one
  Combine combine;
  uint32_t type, op;   // for the signature
  uint64_t shape = 0;  // likewise, a hash

  int64_t bytes() const { return count * size; }
};

// in -> out on all ranks, combined; may be the same memory. At most one slot.
class AllReduce : public SteppedCollective {
 public:
  static constexpr int64_t kMaxBytes = 64 << 10;  // above, ChunkedAllReduce is faster
  AllReduce(const Member& member, const void* in, void* out, const Elements& elements);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;
  // This rank's own is not read back from its slot, which no cache has
  const char* input(int64_t step, int rank) const {
    return rank == member_.rank ? in_ : of(step, rank);
  }

  const Elements elements_;

 private:
  const char* in_;
  char* out_;
};

// The same, but the sums of each row go to `end`, from memory that the next row overwrites
class AllReduceRows : public AllReduce {
 public:
  using End = std::function<void(int64_t row, const void* sums)>;
  AllReduceRows(const Member& member, const void* in, const Elements& elements, int64_t row_length,
                End end);

 protected:
  void read(int64_t step) override;

 private:
  const int64_t row_length_;
  std::vector<char> row_;
  const End end_;
};

// AllReduce for many elements: chunk by chunk, each rank combines a part of the chunk and
// distributes it. Lane 0 carries the partials, lane 1 the sums; the next chunk is written while
// this one is awaited.
class ChunkedAllReduce : public Collective {
 public:
  ChunkedAllReduce(const Member& member, const void* in, void* out, const Elements& elements);
  void begin(uint64_t number, uint64_t history) override;
  uint64_t history() const override { return continued(signature_); }
  bool advance() override;
  bool given() const override { return combined_ == chunks_; }
  std::vector<int> missing() const override;

 private:
  struct Range {
    int64_t begin, end;  // elements of the tensor
  };
  Range chunk(int64_t index) const;
  Range part(int64_t index, int rank) const;
  void write(int64_t index);
  void combine(int64_t index);
  void spread(int64_t index);

  const char* in_;
  char* out_;
  const Elements elements_;
  int64_t per_chunk_, chunks_;
  Signature signature_;
  uint64_t base_[kLanes] = {0, 0};
  int64_t written_ = 0, combined_ = 0, spread_ = 0;
};

// Part r of every rank's input, combined -> out on rank r. in[r] has counts[r] elements.
class ReduceScatter : public SteppedCollective {
 public:
  ReduceScatter(const Member& member, std::vector<const void*> in, void* out,
                std::vector<int64_t> counts, const Elements& like);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const std::vector<const void*> in_;
  char* out_;
  const std::vector<int64_t> counts_;
  const Elements like_;
  const int64_t share_;  // elements of one destination in a slot
};

// Combined on root only
class Reduce : public SteppedCollective {
 public:
  Reduce(const Member& member, const void* in, void* out, const Elements& elements, int root);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const char* in_;
  char* out_;
  const Elements elements_;
  const int root_;
  const int64_t share_;
};

}  // namespace tp_ext::shm
