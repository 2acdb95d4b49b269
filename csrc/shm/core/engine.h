// What runs a group's calls and messages: in the thread that waits for them, and, for what nobody
// waits for, in one thread of its own.

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

// In `limit` from now, or never if the clock does not reach that far
Clock::time_point deadline_in(std::chrono::milliseconds limit);

struct TimedOut : Failure {
  using Failure::Failure;
};

// A call, or a message, under way
struct Task {
  std::unique_ptr<Call> call;
  std::shared_ptr<Message> message;
  bool receives = false;
  std::function<void()> finish;  // run once, when the data is there; keeps buffers alive
  std::function<void()> notify;  // run once after that, or after a failure; must not throw
  Clock::time_point deadline;

  std::atomic<bool> done{false};
  std::exception_ptr error;  // to be read once done

  const char* what() const { return call ? name_of(call->kind()) : receives ? "recv" : "send"; }
};
using TaskPtr = std::shared_ptr<Task>;

class Engine {
 public:
  // `name` of the group is for messages; segment may be none (tests), then nobody is ever dead
  Engine(Shared shared, int rank, std::string name, std::shared_ptr<Segment> segment);
  ~Engine();

  Party party() { return {&shared_, lanes_, rank_}; }
  uint64_t calls() const;

  // Queues the task; with `background` its own thread cares for it if nobody waits. Raises if the
  // group has failed before; what goes wrong with this task is wait's to raise.
  void start(const TaskPtr& task, bool background);
  // Until it is done; raises what went wrong. After the deadline, if that is before the task's own,
  // it gives up waiting: the work goes on.
  void wait(const TaskPtr& task, Clock::time_point deadline = Clock::time_point::max());
  // Whether it is done; waits for nobody, not even for another thread that is at it
  bool poll(const TaskPtr& task);
  void on_done(const TaskPtr& task, std::function<void()> notify);
  void give_up(const std::string& reason);

  // Whether this is a child that was forked from the rank. There the group is out of reach: what is
  // done is known, all else raises Failure and leaves shared memory alone; give_up and the
  // destructor do nothing.
  bool forked() const { return process_generation() != process_; }
  void refuse_fork() const;  // raises Failure there

 private:
  class Patience;
  // Apart, so that a forked child, which has its parent's handles but not its threads, can leave
  // them alone: joining, and destroying what somebody sleeps on, would wait for ever
  struct Service {
    std::condition_variable work;
    std::thread thread;
  };

  void advance();  // under the lock; tells nobody
  void tell(std::unique_lock<std::mutex>& lock);
  void fail_all(const std::string& reason, bool timed_out = false);
  bool alive(int rank) const;
  void check_given_up();
  void check_peers(TaskPtr task);
  void end(const TaskPtr& task, std::exception_ptr error);
  bool needs_service() const;
  void call_service();
  void serve();
  uint64_t moves() const;
  std::string prefix() const;
  std::string timed_out(const Task& task) const;

  const Shared shared_;
  const int rank_;
  const std::string name_;
  const std::shared_ptr<Segment> segment_;
  const uint64_t process_;  // its generation
  Lane lanes_[kLanes];
  Messages messages_;

  mutable std::mutex mutex_;
  std::deque<TaskPtr> calls_;
  std::list<TaskPtr> transfers_;
  std::vector<TaskPtr> ended_;  // whose buffers are to be let go, and who wants to know
  bool begun_ = false;          // the call at the front
  uint64_t number_ = 0, history_ = 0, ends_ = 0;
  int awaited_ = 0;  // tasks that somebody wants to be told of
  std::exception_ptr failure_;

  bool stop_ = false;
  bool* gone_ = nullptr;  // set for the service if it destroys the engine itself
  std::unique_ptr<Service> service_;
};

}  // namespace tp_ext::shm
