// Shared by the test programs of the shared-memory core: random numbers, data that every rank can
// compute for every other, exact checks.

#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "shm/core/data_movement.h"
#include "shm/core/engine.h"
#include "shm/core/reductions.h"

namespace tp_ext::shm::test {

#define EXPECT(condition, ...)                                             \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::fflush(stderr);                                                 \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

inline uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed)) {}
  uint64_t next() { return mix(state_++); }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

// Element types, with an operation each. The sum of floats depends on the order of the ranks.
struct Type {
  int64_t size;
  Combine combine;
};

template <typename T>
void sum(void* out, const void* const* in, int n, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T total = static_cast<const T*>(in[0])[i];
    for (int k = 1; k < n; ++k) total = static_cast<T>(total + static_cast<const T*>(in[k])[i]);
    static_cast<T*>(out)[i] = total;
  }
}
constexpr Type kTypes[] = {{1, sum<uint8_t>}, {8, sum<uint64_t>}, {4, sum<float>}};
constexpr uint32_t kFloat = 2;

using Bytes = std::vector<char>;

// What `rank` contributes to the operation with this key
inline Bytes data(uint64_t key, int rank, uint32_t type, int64_t count) {
  const int64_t bytes = count * kTypes[type].size;
  Bytes result(static_cast<size_t>((bytes + 7) / 8 * 8));
  uint64_t word = mix(key + static_cast<uint64_t>(rank) * 0x51ed2701);
  for (size_t at = 0; at < result.size(); at += 8, word = mix(word)) {
    if (type == kFloat) {  // of different sizes, so that sums are rounded
      const float two[2] = {static_cast<float>(word & 0xffffff) * (word >> 63 ? 1e-4f : 1.0f),
                            static_cast<float>(word >> 32 & 0xffff) * 1e-2f};
      std::memcpy(result.data() + at, two, 8);
    } else {
      std::memcpy(result.data() + at, &word, 8);
    }
  }
  result.resize(static_cast<size_t>(bytes));
  return result;
}

inline Bytes combined(uint64_t key, int ranks, uint32_t type, int64_t count) {
  std::vector<Bytes> all;
  const void* in[kMaxRanks];
  for (int rank = 0; rank < ranks; ++rank) all.push_back(data(key, rank, type, count));
  for (int rank = 0; rank < ranks; ++rank) in[rank] = all[static_cast<size_t>(rank)].data();
  Bytes out(all[0].size());
  kTypes[type].combine(out.data(), in, ranks, count);
  return out;
}

// Memory of threads that are ranks
class Memory {
 public:
  explicit Memory(const Geometry& geometry) : geometry_(geometry) {
    base_ = mmap(nullptr, static_cast<size_t>(geometry.bytes()), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(base_ != MAP_FAILED, "mmap");
  }
  ~Memory() { munmap(base_, static_cast<size_t>(geometry_.bytes())); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Shared shared() const { return Shared(base_, geometry_); }
  std::shared_ptr<Engine> engine(int rank) const {
    return std::make_shared<Engine>(shared(), rank, "test", nullptr);
  }

 private:
  Geometry geometry_;
  void* base_;
};

// Prints each test's name, so that a failure, or a hang, can be located
struct Case {
  const char* name;
  void (*body)();
};
inline void run_all(const std::vector<Case>& cases) {
  for (const Case& one : cases) {
    std::printf("%s\n", one.name);
    std::fflush(stdout);
    one.body();
  }
}

template <typename F>
void on_threads(int ranks, F f) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([f, rank] { f(rank); });
  for (auto& thread : threads) thread.join();
}

inline TaskPtr task_of(std::unique_ptr<Collective> call, std::chrono::milliseconds limit) {
  auto task = std::make_shared<Task>();
  task->call = std::move(call);
  task->deadline = Clock::now() + limit;
  return task;
}
inline TaskPtr task_of(Message message, bool receives, std::chrono::milliseconds limit) {
  auto task = std::make_shared<Task>();
  task->message = std::make_shared<Message>(message);
  task->receives = receives;
  task->deadline = Clock::now() + limit;
  return task;
}

}  // namespace tp_ext::shm::test
