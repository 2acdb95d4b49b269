// Calls that move bytes from rank to rank as they are. `type` is the elements' dtype by c10's number,
// which the ranks compare.

#pragma once

#include <cstdint>
#include <vector>

#include "shm/core/collective.h"

namespace tp_ext::shm {

// Bytes of rank r -> out[r] on all ranks
class AllGather : public Steps {
 public:
  // root: gather to it, equal lengths (others' are known to nobody else); -1: to all
  AllGather(const Party& party, const void* in, std::vector<void*> out, std::vector<int64_t> bytes,
            uint32_t type, int root = -1);

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
class Broadcast : public Steps {
 public:
  Broadcast(const Party& party, void* data, int64_t bytes, uint32_t type, int root);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  char* data_;
  const int64_t bytes_;
  const int root_;
};

// in[r] of root -> out of rank r
class Scatter : public Steps {
 public:
  Scatter(const Party& party, std::vector<const void*> in, void* out, int64_t bytes, uint32_t type,
          int root);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const std::vector<const void*> in_;
  char* out_;
  const int64_t bytes_, share_;
  const int root_;
};

// in[r] -> rank r, from rank r -> out[r]. The first step tells who sends how much.
class AllToAll : public Steps {
 public:
  AllToAll(const Party& party, std::vector<const void*> in, std::vector<int64_t> in_bytes,
           std::vector<void*> out, std::vector<int64_t> out_bytes, uint32_t type);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const std::vector<const void*> in_;
  const std::vector<int64_t> in_bytes_;
  const std::vector<void*> out_;
  const std::vector<int64_t> out_bytes_;
  const int64_t share_;
};

}  // namespace tp_ext::shm
