#include "shm/engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace tp_ext::shm {
namespace {

using namespace std::chrono_literals;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

// How to wait: at first on the spot, since an answer takes microseconds; then give the core to
// others, since there may be more ranks than cores; at last asleep. Looks after the peers now and
// then.
class Engine::Patience {
 public:
  explicit Patience(int ranks) : spins_(ranks <= cores() ? 200 : 0) {}

  // Whether it is time to look whether the others are still there
  bool pause() {
    if (turn_ < spins_) {
      ++turn_;
      relax();
      return false;
    }
    const auto now = Clock::now();
    if (turn_ == spins_) {
      ++turn_;
      since_ = looked_ = now;
    }
    if (now - since_ < 2ms) {
      sched_yield();
      return false;
    }
    std::this_thread::sleep_for(now - since_ < 100ms ? 50us : 500us);
    if (now - looked_ < 10ms) return false;
    looked_ = now;
    return true;
  }
  void progress() { turn_ = 0; }

 private:
  static int cores() {
    static const auto n = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    return n;
  }
  const int spins_;
  int turn_ = 0;
  Clock::time_point since_, looked_;
};

Engine::Engine(Shared shared, int rank, std::string name, std::shared_ptr<Segment> segment)
    : shared_(shared),
      rank_(rank),
      name_(std::move(name)),
      segment_(std::move(segment)),
      lanes_{{shared_, 0, rank}, {shared_, 1, rank}},
      messages_(shared_, rank, [this](int64_t offset, int64_t bytes) {
        if (segment_) segment_->reserve(offset, bytes);
      }) {}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    fail_all("the group is being destroyed");
    shared_.header().left.fetch_or(uint64_t(1) << rank_, std::memory_order_release);
  }
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (const auto& notify : to_notify_) notify();
}

std::string Engine::prefix() const {
  return "tp_shm: rank " + std::to_string(rank_) + " of " + std::to_string(shared_.ranks()) +
         " in group '" + name_ + "': ";
}

void Engine::start(const TaskPtr& task, bool background) {
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  if (task->call) {
    calls_.push_back(task);
  } else {
    transfers_.push_back(task);
    if (task->receives)
      messages_.receive(task->message);
    else
      messages_.send(task->message);
  }
  advance();  // what need not wait is sent at once, so that others do not wait for it
  const bool leave = background && !task->done;
  if (leave && !thread_.joinable()) thread_ = std::thread([this] { serve(); });
  tell(lock);
  if (leave) work_.notify_one();
}

void Engine::wait(const TaskPtr& task) {
  Patience patience(shared_.ranks());
  while (!task->done.load(std::memory_order_acquire)) {
    std::unique_lock lock(mutex_);
    if (task->done) break;
    advance();
    tell(lock);
    if (task->done) break;
    if (lock.owns_lock()) lock.unlock();
    if (patience.pause()) {
      lock.lock();
      if (!task->done) check_peers(*task);
      tell(lock);
    }
  }
  if (task->error) std::rethrow_exception(task->error);
}

bool Engine::poll(const TaskPtr& task) {
  if (task->done.load(std::memory_order_acquire)) return true;
  std::unique_lock lock(mutex_);
  advance();
  tell(lock);
  return task->done;
}

void Engine::on_done(const TaskPtr& task, std::function<void()> notify) {
  std::unique_lock lock(mutex_);
  if (!task->done) {
    task->notify = std::move(notify);
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    work_.notify_one();
    return;
  }
  lock.unlock();
  notify();
}

void Engine::end(const TaskPtr& task, std::exception_ptr error) {
  try {
    if (!error && task->finish) task->finish();
  } catch (...) {
    error = std::current_exception();
  }
  task->error = error;
  task->finish = nullptr;
  if (task->notify) to_notify_.push_back(std::move(task->notify));
  task->notify = nullptr;
  task->done.store(true, std::memory_order_release);
}

void Engine::advance() {
  if (failure_) return;
  try {
    while (!calls_.empty()) {
      Call& call = *calls_.front()->call;
      if (!begun_) {
        call.begin(number_++);
        begun_ = true;
      }
      if (!call.advance()) break;
      const TaskPtr task = calls_.front();
      calls_.pop_front();
      begun_ = false;
      end(task, nullptr);
    }
    if (transfers_.empty()) return;
    messages_.advance();
    for (auto it = transfers_.begin(); it != transfers_.end();) {
      if ((*it)->message->done) {
        end(*it, nullptr);
        it = transfers_.erase(it);
      } else {
        ++it;
      }
    }
  } catch (const std::exception& error) {
    fail_all(error.what());
  }
}

// Callbacks may come back to this engine: they run without the lock
void Engine::tell(std::unique_lock<std::mutex>& lock) {
  if (to_notify_.empty()) return;
  const auto notify = std::exchange(to_notify_, {});
  lock.unlock();
  for (const auto& one : notify) one();
}

void Engine::fail_all(const std::string& reason, bool timed_out) {
  if (!failure_) {
    Header& header = shared_.header();
    uint32_t nobody = 0;
    if (!stop_ && header.given_up.compare_exchange_strong(nobody, uint32_t(rank_) + 1)) {
      std::strncpy(header.reason, reason.c_str(), sizeof header.reason - 1);
      header.reason_ready.store(1, std::memory_order_release);
    }
    failure_ = timed_out ? std::make_exception_ptr(TimedOut(prefix() + reason))
                         : std::make_exception_ptr(Failure(prefix() + reason));
  }
  for (const auto& task : calls_) end(task, failure_);
  for (const auto& task : transfers_) end(task, failure_);
  calls_.clear();
  transfers_.clear();
}

void Engine::give_up(const std::string& reason) {
  std::unique_lock lock(mutex_);
  fail_all(reason);
  tell(lock);
}

void Engine::check_peers(const Task& task) {
  const Header& header = shared_.header();
  if (const uint32_t who = header.given_up.load(std::memory_order_acquire)) {
    std::string reason = "it is about to say why";
    if (header.reason_ready.load(std::memory_order_acquire)) reason = header.reason;
    return fail_all("rank " + std::to_string(who - 1) + " gave up: " + reason);
  }
  // Who is gone has posted all it ever will: only then look what is still missing
  const uint64_t left = header.left.load(std::memory_order_acquire);
  uint64_t dead = 0;
  for (int rank = 0; rank < shared_.ranks(); ++rank)
    if (segment_ && rank != rank_ && !segment_->alive(rank)) dead |= uint64_t(1) << rank;
  advance();
  if (task.done || failure_) return;
  const Call* call = task.call ? calls_.front()->call.get() : nullptr;
  const std::vector<int> missing = call ? call->missing() : messages_.missing();
  const std::string doing = call ? name_of(call->kind()) : task.what();
  for (const int rank : missing) {
    if (rank == rank_) continue;
    if (left >> rank & 1)
      return fail_all(doing + ": rank " + std::to_string(rank) + " has left the group");
    if (dead >> rank & 1) return fail_all(doing + ": rank " + std::to_string(rank) + " has died");
  }
  if (Clock::now() >= task.deadline)
    fail_all(doing + " (call " + std::to_string(number_) + ") timed out waiting for " +
                 (missing.empty() ? "nobody" : listed(missing)),
             true);
}

void Engine::serve() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (calls_.empty() && transfers_.empty()) {
      work_.wait(lock);
      continue;
    }
    const size_t before = calls_.size() + transfers_.size();
    advance();
    tell(lock);
    if (!lock.owns_lock()) lock.lock();
    if (calls_.size() + transfers_.size() < before) continue;
    if (!calls_.empty()) check_peers(*calls_.front());
    if (!transfers_.empty()) check_peers(*transfers_.front());
    tell(lock);
    if (!lock.owns_lock()) lock.lock();
    work_.wait_for(lock, 100us);  // somebody who computes, meanwhile, keeps the core
  }
}

}  // namespace tp_ext::shm
