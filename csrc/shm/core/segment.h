// A segment of POSIX shared memory that the ranks of one group map. Its name cannot be guessed,
// only its owner can open it, and it is gone from /dev/shm once all ranks have opened it: a killed
// process leaves nothing behind.

#pragma once

#include <cstdint>
#include <string>

namespace tp_ext::shm {

class Segment {
 public:
  // Makes a new one: `bytes` of address space, the first `reserved` of them backed by memory
  static Segment create(int64_t bytes, int64_t reserved);
  // Opens the segment of another rank; raises unless it belongs to this user and has that size
  static Segment open(const std::string& name, int64_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  void* base() const { return base_; }
  const std::string& name() const { return name_; }
  void reserve(int64_t offset, int64_t bytes) const;
  void unlink();  // removes the name, as its maker's destructor does; no error if it is gone

  // A lock on byte `rank` that the system releases when this process ends, for any reason
  void mark_alive(int rank) const;
  bool alive(int rank) const;  // whether that lock is held

 private:
  Segment(std::string name, int file, void* base, int64_t bytes, bool named)
      : name_(std::move(name)), file_(file), base_(base), bytes_(bytes), named_(named) {}

  std::string name_;
  int file_;
  void* base_;
  int64_t bytes_;
  bool named_;  // whether the destructor must remove the name
};

std::string random_number();  // 128 bits, in 32 digits

// Identifies a host: the kernel's boot and the mount that holds shared memory
std::string host_identity();

}  // namespace tp_ext::shm
