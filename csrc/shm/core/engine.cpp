#include "shm/core/engine.h"

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

}  // namespace

Clock::time_point deadline_in(std::chrono::milliseconds limit) {
  const auto now = Clock::now();
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - now);
  return limit < left ? now + limit : Clock::time_point::max();
}

// Waiting strategy: spins first, since an answer takes microseconds; then yields the core, since
// there may be more ranks than cores; then sleeps. Asks for a check of the peers from time to time.
class Engine::Backoff {
 public:
  explicit Backoff(int ranks) : spins_(ranks <= cores() ? 200 : 0) {}

  // Returns whether it is time to check that the other ranks are alive
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
      process_(process_generation()),
      lanes_{{shared_, 0, rank}, {shared_, 1, rank}},
      point_to_point_(shared_, rank, [this](int64_t offset, int64_t bytes) {
        if (segment_) segment_->reserve(offset, bytes);
      }) {
  if (!shared.geometry().valid()) throw Failure("tp_shm: geometry: slots or rings are too small");
}

Engine::~Engine() {
  if (forked()) {  // the group continues in the parent, unaware of this child
    static_cast<void>(service_.release());
    return;
  }
  std::unique_lock lock(mutex_);
  stop_ = true;
  fail_all("the group is being destroyed");
  shared_.header().left.fetch_or(uint64_t(1) << rank_, std::memory_order_release);
  if (service_ && service_->thread.get_id() == std::this_thread::get_id()) {
    *gone_ = true;  // called by a callback that held the last reference to the engine
    service_->thread.detach();
  } else if (service_) {
    service_->work.notify_all();
    lock.unlock();
    service_->thread.join();
    lock.lock();
  }
  notify_ended(lock);
}

std::string Engine::prefix() const {
  return "tp_shm: rank " + std::to_string(rank_) + " of " + std::to_string(shared_.ranks()) +
         " in group '" + name_ + "': ";
}

void Engine::refuse_fork() const {
  if (forked()) throw Failure(prefix() + "this process was forked from the one that is the rank");
}

// In a forked child no thread may be left to unlock the mutex
uint64_t Engine::calls() const {
  if (forked()) return number_;
  const std::lock_guard lock(mutex_);
  return number_;
}

void Engine::start(const TaskPtr& task, bool background) {
  refuse_fork();
  std::unique_lock lock(mutex_);
  // A rank that comes after an abort may find all posts that it needs, and would continue alone
  if (!failure_) check_aborted();
  notify_ended(lock);
  if (!lock.owns_lock()) lock.lock();
  if (failure_) std::rethrow_exception(failure_);
  if (task->call) {
    calls_.push_back(task);
  } else {
    transfers_.push_back(task);
    try {
      if (task->receives)
        point_to_point_.receive(task->message);
      else
        point_to_point_.send(task->message);
    } catch (const std::exception& error) {
      fail_all(error.what());
    }
  }
  advance();  // sends what needs no waiting at once, so that others do not wait for it
  if (background && !task->done && needs_service()) call_service();
  notify_ended(lock);
}

// Waking a thread costs more than a small call: if the others need nothing more from this rank, the
// call can wait for its wait()
bool Engine::needs_service() const {
  return !transfers_.empty() || calls_.size() > 1 || !calls_.front()->call->given();
}

void Engine::wait(const TaskPtr& task, Clock::time_point deadline) {
  Backoff backoff(shared_.ranks());
  uint64_t before = 0;
  if (!task->done.load(std::memory_order_acquire)) refuse_fork();
  while (!task->done.load(std::memory_order_acquire)) {
    std::unique_lock lock(mutex_);
    if (task->done) break;
    advance();
    if (const uint64_t now = progress(); now != before) {
      backoff.progress();
      before = now;
    }
    notify_ended(lock);
    if (task->done) break;
    if (lock.owns_lock()) lock.unlock();
    if (backoff.pause()) {
      lock.lock();
      if (!task->done) check_peers(task);
      const bool late = !task->done && Clock::now() >= deadline;
      const std::string reason = late ? prefix() + timed_out(*task) : "";
      notify_ended(lock);
      if (late) throw TimedOut(reason);
    }
  }
  if (task->error) std::rethrow_exception(task->error);
}

bool Engine::poll(const TaskPtr& task) {
  if (task->done.load(std::memory_order_acquire)) return true;
  refuse_fork();
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  advance();
  notify_ended(lock);
  return task->done;
}

void Engine::on_done(const TaskPtr& task, std::function<void()> notify) {
  if (task->done.load(std::memory_order_acquire)) return notify();
  refuse_fork();
  std::unique_lock lock(mutex_);
  if (!task->done) {
    task->notify = std::move(notify);
    ++awaited_;
    return call_service();
  }
  lock.unlock();
  notify();
}

// A task left in the queue gets a thread that serves it
void Engine::call_service() {
  if (!service_) {
    service_ = std::make_unique<Service>();
    service_->thread = std::thread([this] { serve(); });
  }
  service_->work.notify_one();
}

void Engine::end(const TaskPtr& task, std::exception_ptr error) {
  try {
    if (!error && task->finish) task->finish();
  } catch (...) {
    error = std::current_exception();
  }
  task->error = error;
  if (task->notify) --awaited_;
  ++ends_;
  ended_.push_back(task);
  task->done.store(true, std::memory_order_release);
}

void Engine::advance() {
  if (failure_) return;
  try {
    while (!calls_.empty()) {
      Collective& call = *calls_.front()->call;
      if (!begun_) {
        call.begin(number_++, history_);
        history_ = call.history();
        begun_ = true;
      }
      if (!call.advance()) break;
      const TaskPtr task = calls_.front();
      calls_.pop_front();
      begun_ = false;
      end(task, nullptr);
    }
    if (transfers_.empty()) return;
    point_to_point_.advance();
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

// Without the lock: callbacks may call this engine, and freeing a buffer may take other locks
// (Python's), whose holders may be waiting for this one
void Engine::notify_ended(std::unique_lock<std::mutex>& lock) {
  if (ended_.empty()) return;
  const auto ended = std::exchange(ended_, {});
  lock.unlock();
  for (const auto& task : ended) {
    task->finish = nullptr;
    if (const auto notify = std::exchange(task->notify, nullptr)) notify();
  }
}

}  // namespace tp_ext::shm
