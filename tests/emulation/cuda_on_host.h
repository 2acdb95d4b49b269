// CUDA's keywords and built-ins for a host compiler, so that the kernels of csrc/kernels run
// without a GPU. Include this before any of them.
//
// A thread of a block is a fiber. It runs until it has to wait (a barrier, a shuffle) or ends;
// blocks run one after the other. `order` sets the order in which threads and blocks run: a result
// that depends on it lacks a barrier. Undefined behaviour of CUDA is an error here: a barrier that
// not all threads reach, or not at the same line, a shuffle with lanes that have ended, a launch
// beyond the limits. Compiled with -fsanitize=address,undefined, an access outside a buffer, a
// vector access at an odd address and an int that overflows are errors too.
//
// Not covered: speed, the order of memory accesses between barriers within a warp, the GPU's own
// e^x (kernels take the host branch of the maths headers).

#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static  // one block at a time
#define __syncthreads() emulation::sync_threads(__FILE__, __LINE__)
#define __syncwarp(...) emulation::sync_warp(emulation::full_mask(__VA_ARGS__), __FILE__, __LINE__)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulation {

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s (block %u,%u thread %u,%u)\n", what.c_str(), blockIdx.x,
               blockIdx.y, threadIdx.x, threadIdx.y);
  std::fflush(stderr);
  std::_Exit(1);
}
inline unsigned full_mask(unsigned mask = 0xffffffffu) { return mask; }

enum class Order { kAscending, kDescending, kShuffled };
inline Order order = Order::kAscending;

// Random numbers and references to functions that cost less to compile, and to run unoptimized,
// than those of the standard library
struct Random {
  uint64_t state;
  uint64_t operator()() {  // splitmix64
    uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
};

template <typename Signature>
class Call;
template <typename R, typename... A>
class Call<R(A...)> {
 public:
  Call() = default;
  template <typename F>
  Call(const F& f)
      : f_(&f),
        call_([](const void* f, A... a) -> R { return (*static_cast<const F*>(f))(a...); }) {}
  R operator()(A... a) const { return call_(f_, a...); }

 private:
  const void* f_ = nullptr;
  R (*call_)(const void*, A...) = nullptr;
};

inline void arrange(std::vector<int>& sequence, Random& random) {
  std::iota(sequence.begin(), sequence.end(), 0);
  if (order == Order::kDescending) std::reverse(sequence.begin(), sequence.end());
  if (order == Order::kShuffled)
    for (size_t n = sequence.size(); n > 1; --n) std::swap(sequence[n - 1], sequence[random() % n]);
}

constexpr size_t kStack = 64 << 10;

struct Fiber {
  ucontext_t context;
};

enum class State { kReady, kAtBarrier, kInWarp, kEnded };

// A copy to shared memory; of zeros without `from`
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  void operator()() const { from ? std::memcpy(to, from, bytes) : std::memset(to, 0, bytes); }
};

struct Thread {
  State state = State::kReady;
  Fiber* fiber = nullptr;  // none before its first turn
  const char* file = "";   // where it waits
  int line = 0;
  unsigned mask = 0;  // the lanes that it waits for
  unsigned long shuffles = 0;
  std::vector<std::vector<Copy>> copies;  // batches on their way; the last one is open
};

// The block that is running
struct Block {
  Call<void()> body;
  std::vector<Thread> threads;
  std::vector<uint64_t> slots;  // values exchanged by lanes: [2][threads], alternating
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> idle;
  ucontext_t scheduler;
  int current = -1;
  std::vector<int> sequence;  // order of the turns, `turn` the next one
  size_t turn = 0, ended = 0;
  std::vector<char> dynamic_shared;
};
inline Block block;

inline Thread& me() { return block.threads[block.current]; }

inline void set_thread(int index) {
  block.current = index;
  threadIdx =
      dim3(index % blockDim.x, index / blockDim.x % blockDim.y, index / blockDim.x / blockDim.y);
}

inline void fiber_main() {
  for (;;) {
    block.body();
    Fiber* const fiber = me().fiber;
    me().state = State::kEnded;
    ++block.ended;
    // The next thread on the same stack, unless that keeps another one waiting
    if (block.turn < block.sequence.size()) {
      Thread& next = block.threads[block.sequence[block.turn]];
      if (next.state == State::kReady && next.fiber == nullptr) {
        next.fiber = fiber;
        set_thread(block.sequence[block.turn++]);
        continue;
      }
    }
    block.idle.push_back(fiber);
    swapcontext(&fiber->context, &block.scheduler);
  }
}

inline Fiber* take_fiber() {
  if (block.idle.empty()) {
    auto fiber = std::make_unique<Fiber>();
    void* const stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for a stack");
    mprotect(stack, 4096, PROT_NONE);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack;
    fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, fiber_main, 0);
    block.idle.push_back(fiber.get());
    block.fibers.push_back(std::move(fiber));
  }
  Fiber* const fiber = block.idle.back();
  block.idle.pop_back();
  return fiber;
}

inline void wait(State state, unsigned mask, const char* file, int line) {
  Thread& thread = me();
  thread.state = state;
  thread.mask = mask;
  thread.file = file;
  thread.line = line;
  swapcontext(&thread.fiber->context, &block.scheduler);
}
inline void sync_threads(const char* file, int line) { wait(State::kAtBarrier, 0, file, line); }
inline void sync_warp(unsigned mask, const char* file, int line) {
  wait(State::kInWarp, mask, file, line);
}
inline std::string where(const Thread& thread) {
  return thread.line ? std::string(thread.file) + ":" + std::to_string(thread.line) : thread.file;
}
inline bool together(const Thread& a, const Thread& b) {
  return a.file == b.file && a.line == b.line;
}

// value of `source`, a lane of this warp, at the shuffle that all lanes of `mask` take part in
template <typename T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const int lane = block.current % warpSize, first = block.current - lane;
  if (!(mask >> lane & 1)) fail("a shuffle whose mask lacks the lane itself");
  if (!(mask >> source & 1)) fail("a shuffle from a lane that takes no part");
  uint64_t* const turn = &block.slots[(me().shuffles++ % 2) * block.threads.size()];
  std::memcpy(turn + block.current, &value, sizeof value);
  wait(State::kInWarp, mask, "a shuffle", 0);
  std::memcpy(&value, turn + first + source, sizeof value);
  return value;
}

// Lets threads go on whose partners have all arrived. False if none can.
inline bool release() {
  auto& threads = block.threads;
  const int n = static_cast<int>(threads.size());
  bool any = false;
  if (std::all_of(threads.begin(), threads.end(),
                  [](const Thread& thread) { return thread.state == State::kAtBarrier; })) {
    for (Thread& thread : threads) {
      if (!together(thread, threads[0]))
        fail("a divergent barrier: " + where(thread) + " and " + where(threads[0]));
      thread.state = State::kReady;
    }
    return true;
  }
  for (int first = 0; first < n; first += warpSize) {
    for (int t = first; t < std::min(first + warpSize, n); ++t) {
      if (threads[t].state != State::kInWarp) continue;
      bool complete = true;
      for (int lane = 0; lane < warpSize && complete; ++lane) {
        if (!(threads[t].mask >> lane & 1)) continue;
        if (first + lane >= n) fail("a shuffle with lanes that the block lacks");
        const Thread& other = threads[first + lane];
        if (other.state == State::kEnded) fail("a shuffle with a lane that has ended");
        complete = other.state == State::kInWarp && other.mask == threads[t].mask;
        if (complete && !together(other, threads[t]))
          fail("lanes of a warp at " + where(other) + " and " + where(threads[t]));
      }
      if (!complete) continue;
      any = true;
      const unsigned mask = threads[t].mask;
      for (int lane = 0; lane < warpSize; ++lane)
        if (mask >> lane & 1) threads[first + lane].state = State::kReady;
    }
  }
  return any;
}

inline void run_block(Random& random) {
  for (Thread& thread : block.threads) thread = Thread();
  block.ended = 0;
  for (;;) {
    arrange(block.sequence, random);
    bool any = false;
    for (block.turn = 0; block.turn < block.sequence.size();) {
      const int index = block.sequence[block.turn++];
      Thread& thread = block.threads[index];
      if (thread.state != State::kReady) continue;
      any = true;
      if (thread.fiber == nullptr) thread.fiber = take_fiber();
      set_thread(index);
      swapcontext(&block.scheduler, &thread.fiber->context);
    }
    if (block.ended == block.threads.size()) return;
    if (!release() && !any) {
      std::string what = "threads wait for others that never come:";
      for (const Thread& thread : block.threads)
        if (what.find(where(thread)) == std::string::npos) what += " " + where(thread);
      fail(what);
    }
  }
}

// kernel<<<grid, threads, shared_bytes>>>; of a huge grid only the blocks of `only`, as (x, y)
inline void launch(dim3 grid, dim3 threads, const Call<void()>& kernel, size_t shared_bytes = 0,
                   const std::vector<dim3>& only = {}) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535)
    fail("a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " blocks");
  const unsigned size = threads.x * threads.y * threads.z;
  if (size == 0 || size > 1024 || threads.z > 64)
    fail("a block of " + std::to_string(size) + " threads");
  if (shared_bytes > (227u << 10)) fail("more shared memory than a block can have");
  gridDim = grid;
  blockDim = threads;
  block.body = kernel;
  block.threads.assign(size, Thread());
  block.slots.assign(2 * size, 0);
  Random random{1};
  block.sequence.resize(size);
  const size_t blocks = only.empty() ? size_t{1} * grid.x * grid.y * grid.z : only.size();
  std::vector<int> which(blocks);
  arrange(which, random);
  for (const int b : which) {
    blockIdx = only.empty() ? dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y) : only[b];
    // Contents as on a GPU: arbitrary
    block.dynamic_shared = std::vector<char>(shared_bytes, '\xff');
    run_block(random);
  }
}

}  // namespace emulation

inline unsigned char* dynamic_shared() {
  return reinterpret_cast<unsigned char*>(emulation::block.dynamic_shared.data());
}
// Made at once or when the thread waits, by the order: both are allowed, so that what differs lacks
// a wait or a place of its own
template <typename V>
void copy_async(V* to, const V* from, bool owns) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(V)) emulation::fail("a copy to an odd address");
  const emulation::Copy copy{to, owns ? from : nullptr, sizeof(V)};
  if (emulation::order == emulation::Order::kDescending) return copy();
  auto& copies = emulation::me().copies;
  if (copies.empty()) copies.emplace_back();
  copies.back().push_back(copy);
}
inline void end_copies() {
  auto& copies = emulation::me().copies;
  if (copies.empty()) copies.emplace_back();
  copies.emplace_back();
}
template <int kLater>
void wait_for_copies() {
  auto& copies = emulation::me().copies;
  for (; copies.size() > kLater + 1; copies.erase(copies.begin()))
    for (const emulation::Copy& copy : copies[0]) copy();
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const int lane = emulation::block.current % warpSize;
  return emulation::shuffle(mask, value, lane / width * width + (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize) {
  const int lane = emulation::block.current % warpSize, source = lane ^ lanes;
  return emulation::shuffle(mask, value, source / width > lane / width ? lane : source);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = warpSize) {
  const int lane = emulation::block.current % warpSize, source = lane + delta;
  return emulation::shuffle(mask, value, source / width == lane / width ? source : lane);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = warpSize) {
  const int lane = emulation::block.current % warpSize, source = lane - delta;
  return emulation::shuffle(mask, value, lane % width >= delta ? source : lane);
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
