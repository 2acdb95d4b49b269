#include "memory/keep_memory.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

// [Note: freed memory is kept by an allocator]
namespace tp_ext::memory {
namespace {

constexpr size_t kSmallest = 1 << 19;  // glibc's heap serves smaller blocks without new pages
constexpr size_t kHugePage = 2 << 20;

// Sizes in steps of an eighth of a power of two, so that an eighth of a block at most is unused
size_t step_of(size_t bytes) { return (size_t{1} << (63 - __builtin_clzll(bytes))) / 8; }
size_t rounded_up(size_t bytes) {
  const size_t step = step_of(bytes);
  return (bytes + step - 1) / step * step;
}
size_t rounded_down(size_t bytes) { return bytes / step_of(bytes) * step_of(bytes); }

// Blocks are malloc's, whose size it knows: any allocator of torch may free any of them, as oneDNN
// does that asks for torch's allocator at each call.
class Pool {
 public:
  void* take(size_t size) {
    std::unique_lock lock(mutex_);
    live_ += size;
    most_ = std::max(most_, live_);
    if (auto found = blocks_.find(size); found != blocks_.end()) {
      void* const block = found->second.back();
      remove_from(found);
      sizes_[block] = size;
      return block;
    }
    // Other sizes are needed now: what was live at once is kept, and a quarter, but no more
    const auto freed = shrink(most_ + most_ / 4 - live_);
    lock.unlock();
    for (void* block : freed) std::free(block);
    void* const block = allocate(size);
    lock.lock();
    if (block != nullptr) sizes_[block] = size;
    return block;
  }

  void give(void* block) {
    if (const size_t usable = malloc_usable_size(block); usable >= kSmallest) {
      const std::lock_guard lock(mutex_);
      size_t size = rounded_down(usable);
      // malloc's blocks are longer than asked for: by 2 MiB where they are aligned so
      if (const auto ours = sizes_.extract(block)) {
        size = std::min(size, ours.mapped());
        live_ -= size;
      }
      if (enabled_) {
        blocks_[size].push_back(block);
        kept_ += size;
        return;
      }
    }
    std::free(block);
  }

  void enable(bool enabled) {
    std::unique_lock lock(mutex_);
    enabled_ = enabled;
    if (enabled) return;
    most_ = live_;
    const auto freed = shrink(0);
    lock.unlock();
    for (void* block : freed) std::free(block);
  }

  size_t kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  using Blocks = std::map<size_t, std::vector<void*>>;  // by size

  static void* allocate(size_t size) {
    void* block = nullptr;
    const size_t alignment = size >= 2 * kHugePage ? kHugePage : 64;
    if (posix_memalign(&block, alignment, size) != 0) return nullptr;
    if (alignment == kHugePage) madvise(block, size, MADV_HUGEPAGE);  // an advice: it may fail
    return block;
  }

  // Takes the largest blocks out until at most `bytes` are kept
  std::vector<void*> shrink(size_t bytes) {
    std::vector<void*> freed;
    while (kept_ > bytes) {
      freed.push_back(std::prev(blocks_.end())->second.back());
      remove_from(std::prev(blocks_.end()));
    }
    return freed;
  }

  void remove_from(Blocks::iterator of_size) {
    of_size->second.pop_back();
    kept_ -= of_size->first;
    if (of_size->second.empty()) blocks_.erase(of_size);
  }

  std::mutex mutex_;
  bool enabled_ = false;
  size_t live_ = 0, most_ = 0, kept_ = 0;
  Blocks blocks_;                            // that are kept
  std::unordered_map<void*, size_t> sizes_;  // of those that tensors have
};

Pool& pool() {
  static Pool* const only = [] {
    auto* const made = new Pool();  // outlives threads that still free at exit
    // A worker of a DataLoader is a fork: another thread may hold the lock at that moment
    pthread_atfork([] { pool().mutex().lock(); }, [] { pool().mutex().unlock(); },
                   [] { pool().mutex().unlock(); });
    return made;
  }();
  return *only;
}

void release(void* block) {
  if (block == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(block);
  pool().give(block);
}

class KeepingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest || !enabled) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* const block = pool().take(rounded_up(bytes));
    if (block == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);  // with its error
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  std::atomic<bool> enabled = false;
};

KeepingAllocator& allocator() {
  static auto* const only = new KeepingAllocator();  // storages keep a pointer to it
  return *only;
}

}  // namespace

void keep(bool enabled) {
  pool().enable(enabled);
  allocator().enabled = enabled;
  c10::SetAllocator(c10::DeviceType::CPU, enabled ? &allocator() : c10::GetDefaultCPUAllocator());
}

bool keeps() { return allocator().enabled; }

int64_t kept_bytes() { return static_cast<int64_t>(pool().kept()); }

}  // namespace tp_ext::memory
