// Processes as ranks, over a segment as in real use: who may open it, what remains of it when a
// process is killed at any moment, and how the other ranks notice.

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "plan.h"

using namespace std::chrono_literals;

namespace tp_ext::shm::test::processes {

constexpr int kDied = 42;  // exit status of a process that saw the death of rank `victim`

template <typename F>
pid_t child(F f) {
  std::fflush(stdout);
  const pid_t pid = fork();
  EXPECT(pid >= 0, "fork");
  if (pid > 0) return pid;
  try {
    f();
    _exit(0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "process %d: %s\n", int(getpid()), error.what());
    _exit(std::string(error.what()).find("has died") != std::string::npos ? kDied : 1);
  }
}

int status_of(pid_t pid) {
  int status = 0;
  EXPECT(waitpid(pid, &status, 0) == pid, "waitpid");
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// What a process has left in /dev/shm
std::vector<std::string> names_of(pid_t pid) {
  std::vector<std::string> names;
  DIR* folder = opendir("/dev/shm");
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name.rfind("tp_shm.", 0) == 0 &&
        name.find("." + std::to_string(pid) + ".") != std::string::npos)
      names.push_back(name);
  }
  closedir(folder);
  return names;
}

// In memory shared by all the processes: stands in for torch's store
struct Meeting {
  std::atomic<int> named, joined, at_work, forked;
  char name[256];
};
Meeting& meeting() {
  void* page =
      mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT(page != MAP_FAILED, "mmap");
  return *static_cast<Meeting*>(page);
}

void wait_until(const std::atomic<int>& value, int least) {
  while (value < least) std::this_thread::sleep_for(200us);
}

std::shared_ptr<Engine> join(Meeting& meeting, const Geometry& geometry, int rank) {
  std::shared_ptr<Segment> segment;
  if (rank == 0) {
    segment = std::make_shared<Segment>(Segment::create(geometry.bytes(), geometry.reserved()));
    std::strcpy(meeting.name, segment->name().c_str());
    meeting.named = 1;
  } else {
    wait_until(meeting.named, 1);
    segment = std::make_shared<Segment>(Segment::open(meeting.name, geometry.bytes()));
  }
  segment->mark_alive(rank);
  ++meeting.joined;
  wait_until(meeting.joined, geometry.ranks);
  segment->unlink();
  return std::make_shared<Engine>(Shared(segment->base(), geometry), rank, "test", segment);
}

void barrier(Engine& engine) {
  const auto task = task_of(std::make_unique<Barrier>(engine.member()), 30s);
  engine.start(task, false);
  engine.wait(task);
}

bool refused(const std::string& name, int64_t bytes) {
  try {
    Segment::open(name, bytes);
    return false;
  } catch (const Failure&) {
    return true;
  }
}

void only_its_owner_can_open_it() {
  umask(0);
  Segment segment = Segment::create(8192, 4096);
  const std::string path = "/dev/shm" + segment.name();
  struct stat status;
  EXPECT(stat(path.c_str(), &status) == 0 && (status.st_mode & 07777) == 0600, "mode %o",
         status.st_mode);
  EXPECT(fcntl(open(path.c_str(), O_RDONLY | O_CLOEXEC), F_GETFD) == FD_CLOEXEC, "no file");
  EXPECT(Segment::open(segment.name(), 8192).base() != segment.base(), "mapped once only");
  EXPECT(refused(segment.name(), 4096) && refused(segment.name(), 16384), "other sizes");
  EXPECT(refused("/other.1", 8192) && refused("/tp_shm.1/../x", 8192), "other names");
  for (const mode_t mode : {0644, 0660, 01600, 0400}) {
    chmod(path.c_str(), mode);
    EXPECT(refused(segment.name(), 8192), "mode %o", mode);
  }
  chmod(path.c_str(), 0600);
  const std::string link = "/tp_shm.link." + std::to_string(getpid()) + ".";
  EXPECT(symlink(path.c_str(), ("/dev/shm" + link).c_str()) == 0, "symlink");
  EXPECT(refused(link, 8192), "a link");
  unlink(("/dev/shm" + link).c_str());
  Segment other = Segment::create(8192, 4096);
  EXPECT(other.name() != segment.name() && segment.name().size() > 40, "names");
  other.unlink();
  segment.unlink();
  segment.unlink();
  EXPECT(refused(segment.name(), 8192) && names_of(getpid()).empty(), "still there");
  static_cast<char*>(segment.base())[8191] = 1;  // it lives on without a name
}

void a_mark_goes_with_its_process() {
  Meeting& meet = meeting();
  Segment segment = Segment::create(8192, 4096);
  EXPECT(!segment.alive(1), "not yet");
  const pid_t pid = child([&] {
    {
      const Segment own = Segment::open(segment.name(), 8192);
      own.mark_alive(1);
      own.mark_alive(3);
      const pid_t forked = fork();  // as data loaders do: it must not keep the lock
      if (forked > 0) meet.forked = forked;
      ++meet.joined;
      pause();
    }
  });
  wait_until(meet.joined, 2);
  segment.mark_alive(0);
  EXPECT(segment.alive(0) && segment.alive(1) && !segment.alive(2) && segment.alive(3), "marks");
  Segment::create(8192, 4096).unlink();  // removes stale names, which must not touch locks
  EXPECT(segment.alive(0) && segment.alive(1), "marks after a sweep");
  kill(pid, SIGKILL);
  status_of(pid);
  EXPECT(segment.alive(0) && !segment.alive(1) && !segment.alive(3), "marks of the dead");
  EXPECT(kill(meet.forked, SIGKILL) == 0, "the forked child was to live longer");
  segment.unlink();
}

// At each entry to and return from each system call
void what_the_killed_leave_is_swept() {
  int left = 0, moments = 0;
  for (bool ended = false; !ended; ++moments) {
    const pid_t pid = child([] {
      ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
      raise(SIGSTOP);
      Segment segment = Segment::create(1 << 16, 1 << 14);
      segment.mark_alive(0);
      segment.unlink();
    });
    int status = 0;
    waitpid(pid, &status, 0);
    if (!WIFSTOPPED(status)) {
      std::printf("  no ptrace here: left out\n");
      return;
    }
    for (int step = 0; step < moments && !ended; ++step) {
      ptrace(PTRACE_SYSCALL, pid, nullptr, nullptr);
      waitpid(pid, &status, 0);
      ended = WIFEXITED(status);
    }
    if (!ended) {
      kill(pid, SIGKILL);
      status_of(pid);
    }
    const auto names = names_of(pid);
    EXPECT(names.size() <= (ended ? 0 : 1), "%zu names", names.size());
    left += static_cast<int>(names.size());
    Segment::create(4096, 4096).unlink();
    EXPECT(names_of(pid).empty(), "not swept after step %d", moments);
  }
  EXPECT(moments > 20 && left > 5, "%d moments, %d with a name left", moments, left);
}

const Geometry kGeometry{3, 64 * 8, 256};

void ranks_follow_a_plan() {
  Meeting& meet = meeting();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank)
    pids.push_back(child([&] {
      follow({3, 3000, 11, 3000}, {join(meet, kGeometry, rank)}, rank);
    }));
  for (const pid_t pid : pids) {
    EXPECT(status_of(pid) == 0, "process %d", pid);
    EXPECT(names_of(pid).empty(), "something is left");
  }
}

void one_is_killed(uint64_t seed) {
  Meeting& meet = meeting();
  Random random(seed);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank)
    pids.push_back(child([&] {
      const auto engine = join(meet, kGeometry, rank);
      ++meet.at_work;
      follow({3, int64_t(1) << 40, seed, 3000}, {engine}, rank);
    }));
  wait_until(meet.at_work, 3);
  std::this_thread::sleep_for(std::chrono::microseconds(random.below(30000)));
  const auto victim = size_t(random.below(3));
  kill(pids[victim], SIGKILL);
  const auto begun = Clock::now();
  for (size_t rank = 0; rank < 3; ++rank) {
    const int status = status_of(pids[rank]);
    EXPECT(status == (rank == victim ? -SIGKILL : kDied), "rank %zu: %d", rank, status);
    EXPECT(names_of(pids[rank]).empty(), "something is left");
  }
  EXPECT(Clock::now() - begun < 10s, "noticed late");
}

void the_others_learn_who_was_killed() {
  for (uint64_t seed = 0; seed < 8; ++seed) one_is_killed(seed);
}

bool refuses(const std::function<void()>& use) {
  try {
    use();
    return false;
  } catch (const Failure& error) {
    return std::strstr(error.what(), "forked") != nullptr;
  }
}

// A child that a rank forks, its engine's thread alive: it may let the engine go, and ask for what
// was done before; all else is refused, and the parent's group knows nothing of it
void a_forked_child_leaves_the_group_alone() {
  Meeting& meet = meeting();
  const Geometry geometry{2, 256, 256};
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank)
    pids.push_back(child([&] {
      auto engine = join(meet, geometry, rank);
      Bytes data(4000);
      const auto task = task_of(Message{1 - rank, 0, data.data(), 4000, 0}, rank == 0, 30s);
      const auto done = task_of(std::make_unique<Barrier>(engine->member()), 30s);
      engine->start(done, false);
      engine->wait(done);
      if (rank == 0) engine->start(task, true);  // its thread is at work
      std::this_thread::sleep_for(5ms);
      const pid_t pid = child([&] {
        bool notified = false;
        engine->wait(done);
        engine->on_done(done, [&] { notified = true; });
        EXPECT(notified && engine->poll(done) && engine->calls() == 1, "what is done");
        EXPECT(refuses([&] { barrier(*engine); }), "a call");
        if (rank == 0) {
          EXPECT(refuses([&] { engine->wait(task); }), "wait");
          EXPECT(refuses([&] { engine->poll(task); }), "poll");
          EXPECT(refuses([&] { engine->on_done(task, [] {}); }), "on_done");
        }
        engine->abort_group("a child is to have no say");
        engine.reset();
      });
      EXPECT(status_of(pid) == 0, "the forked child");
      if (rank == 1) engine->start(task, true);
      engine->wait(task);
      barrier(*engine);
    }));
  for (const pid_t pid : pids) EXPECT(status_of(pid) == 0, "process %d", pid);
}

int program(char**) {
  alarm(120);
#define CASE(name) {#name, name}
  run_all({CASE(only_its_owner_can_open_it), CASE(a_mark_goes_with_its_process),
           CASE(what_the_killed_leave_is_swept), CASE(ranks_follow_a_plan),
           CASE(the_others_learn_who_was_killed), CASE(a_forked_child_leaves_the_group_alone)});
  return 0;
}

}  // namespace tp_ext::shm::test::processes
