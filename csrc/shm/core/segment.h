// A piece of POSIX shared memory that the ranks of one group map. Its name is unguessable, only its
// owner can open it, and it is gone from /dev/shm once all have it: a process that is killed leaves
// nothing behind.

#pragma once

#include <cstdint>
#include <string>

namespace tp_ext::shm {

class Segment {
 public:
  // Makes a new one: `bytes` of addresses, the first `reserved` of them backed by memory
  static Segment create(int64_t bytes, int64_t reserved);
  // Opens what another rank has made; raises unless it is ours and has that size
  static Segment open(const std::string& name, int64_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  void* base() const { return base_; }
  const std::string& name() const { return name_; }
  void reserve(int64_t offset, int64_t bytes) const;
  void unlink();  // takes the name away, as its maker's destructor does; harmless if it is gone

  // A mark on byte `rank` that the system removes when this process ends, however it ends
  void mark_alive(int rank) const;
  bool alive(int rank) const;  // whether its mark is there

 private:
  Segment(std::string name, int file, void* base, int64_t bytes, bool named)
      : name_(std::move(name)), file_(file), base_(base), bytes_(bytes), named_(named) {}

  std::string name_;
  int file_;
  void* base_;
  int64_t bytes_;
  bool named_;  // whether the destructor is to take the name away
};

std::string random_number();  // 128 bits, in 32 digits

// Tells one host from another: the kernel's boot and the mount that holds shared memory
std::string host_identity();

}  // namespace tp_ext::shm
