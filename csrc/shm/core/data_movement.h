// Collectives that move bytes between ranks unchanged. `type` is c10's number of the elements'
// dtype, which the ranks compare.

#pragma once

#include <cstdint>
#include <vector>

#include "shm/core/collective.h"
#include "shm/core/rows.h"

namespace tp_ext::shm {

// Bytes of rank r -> out[r] on all ranks
class AllGather : public SteppedCollective {
 public:
  // root: gather to it, equal lengths (a rank knows only its own length); -1: to all
  AllGather(const Member& member, const void* in, std::vector<void*> out,
            std::vector<int64_t> bytes, uint32_t type, int root = -1);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;
  Signature expected(int rank) const override;
  Signature common() const override;

 private:
  const char* in_;
  const std::vector<void*> out_;
  const std::vector<int64_t> bytes_;  // of each rank
  const uint32_t type_;
  const int root_;
};

// data of root -> data of all
class Broadcast : public SteppedCollective {
 public:
  Broadcast(const Member& member, void* data, int64_t bytes, uint32_t type, int root);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  char* data_;
  const int64_t bytes_;
  const int root_;
};

// in[r] of root -> out of rank r
class Scatter : public SteppedCollective {
 public:
  Scatter(const Member& member, std::vector<const void*> in, void* out, int64_t bytes,
          uint32_t type, int root);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const std::vector<const void*> in_;
  char* out_;
  const int64_t bytes_, share_;
  const int root_;
};

// in[r] -> rank r, from rank r -> out[r]. The first step exchanges the sizes.
class AllToAll : public SteppedCollective {
 public:
  AllToAll(const Member& member, std::vector<Rows> in, std::vector<Rows> out, uint32_t type);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const std::vector<Rows> in_, out_;
  const int64_t share_;
};

}  // namespace tp_ext::shm
