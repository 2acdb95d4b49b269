// Runs a group's calls and messages: in the thread that waits for them, and in one service thread
// if no thread waits.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shm/core/collective.h"
#include "shm/core/point_to_point.h"
#include "shm/core/process.h"
#include "shm/core/segment.h"

namespace tp_ext::shm {

using Clock = std::chrono::steady_clock;

// Now plus `limit`, or never if that is out of the clock's range
Clock::time_point deadline_in(std::chrono::milliseconds limit);

struct TimedOut : Failure {
  using Failure::Failure;
};

// A call or message in progress
struct Task {
  std::unique_ptr<Collective> call;
  std::shared_ptr<Message> message;
  bool receives = false;
  std::function<void()> finish;  // runs once, when the data is there; keeps buffers alive
  std::function<void()> notify;  // runs once after that, or after a failure; must not throw
  Clock::time_point deadline;

  std::atomic<bool> done{false};
  std::exception_ptr error;  // valid once done

  const char* what() const { return call ? name_of(call->kind()) : receives ? "recv" : "send"; }
};
using TaskPtr = std::shared_ptr<Task>;

class Engine {
 public:
  // `name` of the group is for messages; segment may be null (tests), then no rank counts as dead
  Engine(Shared shared, int rank, std::string name, std::shared_ptr<Segment> segment);
  ~Engine();

  Member member() { return {&shared_, lanes_, rank_}; }
  uint64_t calls() const;

  // Queues the task; with `background` the service thread runs it if no thread waits. Raises if the
  // group has failed before; an error of this task is raised by wait().
  void start(const TaskPtr& task, bool background);
  // Waits until it is done; raises its error. At `deadline`, if earlier than the task's own, it
  // stops waiting: the task continues.
  void wait(const TaskPtr& task, Clock::time_point deadline = Clock::time_point::max());
  // Whether it is done; never blocks, not even on another thread that is running it
  bool poll(const TaskPtr& task);
  void on_done(const TaskPtr& task, std::function<void()> notify);
  void abort_group(const std::string& reason);

  // Whether this process is a child forked from the rank. The group is out of reach there: finished
  // tasks can be queried, everything else raises Failure and leaves shared memory alone;
  // abort_group and the destructor do nothing.
  bool forked() const { return process_generation() != process_; }
  void refuse_fork() const;  // raises Failure in a forked child

 private:
  class Backoff;
  // A separate object, so that a forked child, which has its parent's handles but not its threads,
  // can leave it alone: joining the thread, or destroying a condition variable that it sleeps on,
  // would wait for ever
  struct Service {
    std::condition_variable work;
    std::thread thread;
  };

  void advance();  // under the lock; runs no callback
  void notify_ended(std::unique_lock<std::mutex>& lock);
  void fail_all(const std::string& reason, bool timed_out = false);
  bool alive(int rank) const;
  void check_aborted();
  void check_peers(TaskPtr task);
  void end(const TaskPtr& task, std::exception_ptr error);
  bool needs_service() const;
  void call_service();
  void serve();
  uint64_t progress() const;
  std::string prefix() const;
  std::string timed_out(const Task& task) const;

  const Shared shared_;
  const int rank_;
  const std::string name_;
  const std::shared_ptr<Segment> segment_;
  const uint64_t process_;  // the generation that created it
  Lane lanes_[kLanes];
  PointToPoint point_to_point_;

  mutable std::mutex mutex_;
  std::deque<TaskPtr> calls_;
  std::list<TaskPtr> transfers_;
  std::vector<TaskPtr> ended_;  // their buffers are still to be freed, their callbacks to be run
  bool begun_ = false;          // whether the call at the front has begun
  uint64_t number_ = 0, history_ = 0, ends_ = 0;
  int awaited_ = 0;  // tasks with a callback
  std::exception_ptr failure_;

  bool stop_ = false;
  bool* gone_ = nullptr;  // set for the service thread if it destroys the engine itself
  std::unique_ptr<Service> service_;
};

}  // namespace tp_ext::shm
