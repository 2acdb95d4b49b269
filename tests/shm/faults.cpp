// Ranks that disagree, are late, leave or drop tasks: every rank gets an error that names the
// cause, and nothing hangs. One process, threads as ranks.

#include "harness.h"

using namespace std::chrono_literals;

namespace tp_ext::shm::test::faults {

const Geometry kSmall{2, 512, 128};
Geometry of_ranks(int ranks) { return {ranks, 64 * ranks + 256, 128}; }

// The message of the E that `f` raises; aborts if it raises nothing, or something else
template <typename E = Failure, typename F>
std::string raised(F f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    EXPECT(false, "not that error: %s", error.what());
  }
  EXPECT(false, "no error");
  return "";
}

void expect_in(const std::string& text, const std::string& part) {
  EXPECT(text.find(part) != std::string::npos, "'%s' in '%s'", part.c_str(), text.c_str());
}

void run(Engine& engine, std::unique_ptr<Collective> call, std::chrono::milliseconds limit = 20s) {
  const auto task = task_of(std::move(call), limit);
  engine.start(task, false);
  engine.wait(task);
}
void barrier(Engine& engine, std::chrono::milliseconds limit = 20s) {
  run(engine, std::make_unique<Barrier>(engine.member()), limit);
}
TaskPtr send(Engine& engine, int to, int tag, Bytes& data, uint32_t type = 0) {
  const auto task = task_of(Message{to, tag, data.data(), int64_t(data.size()), type}, false, 20s);
  engine.start(task, true);
  return task;
}
TaskPtr receive(Engine& engine, int from, int tag, Bytes& data, uint32_t type = 0) {
  const auto task = task_of(Message{from, tag, data.data(), int64_t(data.size()), type}, true, 20s);
  engine.start(task, true);
  return task;
}
const Elements kBytes{40, 1, kTypes[0].combine, 0, 0};

void different_calls_are_named_by_all() {
  const Memory memory(of_ranks(3));
  on_threads(3, [&](int rank) {
    const auto engine = memory.engine(rank);
    Bytes data(40);
    const std::string error = raised([&] {
      if (rank == 1) return barrier(*engine);
      run(*engine, std::make_unique<AllReduce>(engine->member(), data.data(), data.data(), kBytes));
    });
    expect_in(error, "barrier (call 0");
    expect_in(error, "all_reduce (call 0");
    raised([&] { barrier(*engine); });  // and it stays failed
  });
}

void different_sizes_are_named() {
  const Memory memory(kSmall);
  on_threads(2, [&](int rank) {
    const auto engine = memory.engine(rank);
    Bytes data(40);
    Elements elements = kBytes;
    elements.count -= rank;
    const std::string error = raised([&] {
      run(*engine,
          std::make_unique<AllReduce>(engine->member(), data.data(), data.data(), elements));
    });
    expect_in(error, "40 uint8");
    expect_in(error, "39 uint8");
  });
}

// Equal totals, other parts: no rank may read data meant for another
void different_parts_are_found() {
  const Memory memory(kSmall);
  on_threads(2, [&](int rank) {
    const auto engine = memory.engine(rank);
    Bytes in(40), out(40);
    const std::vector<int64_t> counts =
        rank == 0 ? std::vector<int64_t>{10, 30} : std::vector<int64_t>{30, 10};
    const std::vector<const void*> parts{in.data(), in.data() + counts[0]};
    expect_in(raised([&] {
                run(*engine, std::make_unique<ReduceScatter>(engine->member(), parts, out.data(),
                                                             counts, kBytes));
              }),
              "divided as #");
  });
  on_threads(2, [&](int rank) {
    const Memory own(kSmall);
    const auto engine = own.engine(0);
    Bytes data(40);
    expect_in(
        raised([&] {
          AllGather(engine->member(), data.data(), {data.data(), data.data()}, {10, 20}, 0, rank);
        }),
        "gather: 20 bytes");
  });
}

void all_to_all_sizes_are_compared() {
  const Memory memory(kSmall);
  on_threads(2, [&](int rank) {
    const auto engine = memory.engine(rank);
    Bytes in(40), out(40);
    const std::string error = raised([&] {
      run(*engine, std::make_unique<AllToAll>(
                       engine->member(), blocks_at({in.data(), in.data()}, {20, 20}),
                       blocks_at({out.data(), out.data()}, {20, rank == 0 ? 19 : 20}), 0));
    });
    expect_in(error, "all_to_all: rank 1 sends 20 bytes to rank 0, which expects 19");
  });
}

void a_late_rank_is_named() {
  const Memory memory(of_ranks(3));
  std::atomic<int> done{0};
  on_threads(3, [&](int rank) {
    const auto engine = memory.engine(rank);
    if (rank == 1) {
      while (done < 2) std::this_thread::sleep_for(1ms);
      expect_in(raised([&] { barrier(*engine); }), "gave up: barrier (call 1) timed out");
      return;
    }
    const auto begun = Clock::now();
    // The first one to give up notifies the other
    expect_in(raised([&] { barrier(*engine, rank == 0 ? 100ms : 20s); }), "waiting for rank 1");
    EXPECT(Clock::now() - begun < 10s, "rank %d noticed late", rank);
    ++done;
  });
  Memory again(kSmall);
  const auto engine = again.engine(0);
  raised<TimedOut>([&] { barrier(*engine, 20ms); });
}

void a_waiter_may_have_less_time() {
  const Memory memory(kSmall);
  const auto engine = memory.engine(0);
  const auto task = task_of(std::make_unique<Barrier>(engine->member()), 60s);
  engine->start(task, true);
  raised<TimedOut>([&] { engine->wait(task, deadline_in(50ms)); });
  EXPECT(deadline_in(std::chrono::milliseconds::max()) == Clock::time_point::max(), "overflow");
}

void a_background_call_has_a_deadline() {
  const Memory memory(kSmall);
  const auto engine = memory.engine(0);
  const auto task = task_of(std::make_unique<Barrier>(engine->member()), 50ms);
  std::atomic<bool> notified{false};
  engine->start(task, true);
  engine->on_done(task, [&] { notified = true; });
  while (!notified) std::this_thread::sleep_for(1ms);
  raised<TimedOut>([&] { engine->wait(task); });
}

void who_has_left_is_named_but_what_it_said_counts() {
  const Memory memory(of_ranks(3));
  std::atomic<bool> left{false};
  std::atomic<int> received{0};
  on_threads(3, [&](int rank) {
    auto engine = memory.engine(rank);
    Bytes data(100, static_cast<char>(rank == 0 ? 7 : 0));
    const auto broadcast = [&] {
      return std::make_unique<Broadcast>(engine->member(), data.data(), int64_t(data.size()), 0, 0);
    };
    if (rank == 0) {
      run(*engine, broadcast());
      send(*engine, 1, 5, data);
      engine.reset();
      left = true;
      return;
    }
    while (!left) std::this_thread::yield();
    std::this_thread::sleep_for(30ms);  // long enough to look for it
    run(*engine, broadcast());
    EXPECT(data[99] == 7, "not what rank 0 sent");
    if (rank == 1) {
      Bytes message(100);
      engine->wait(receive(*engine, 0, 5, message));
      EXPECT(message[99] == 7, "not what rank 0 sent");
    }
    for (++received; received < 2;) std::this_thread::yield();  // the first reports to all
    expect_in(raised([&] { barrier(*engine); }), "rank 0 has left the group");
  });
}

// One dead rank is no reason to fail a receive from any
void receives_from_any_outlive_one_rank() {
  const Memory memory(of_ranks(3));
  std::atomic<int> left{0};
  on_threads(3, [&](int rank) {
    auto engine = memory.engine(rank);
    Bytes data(500, static_cast<char>(rank));
    if (rank == 0) {
      const auto task = receive(*engine, -1, 1, data);
      engine->wait(task);
      EXPECT(data[499] == 2 && task->message->peer == 2, "from %d", task->message->peer);
      expect_in(raised([&] { engine->wait(receive(*engine, -1, 1, data)); }), "has left");
      return;
    }
    if (rank == 2) {
      while (left == 0) std::this_thread::yield();
      std::this_thread::sleep_for(60ms);
      engine->wait(send(*engine, 0, 1, data));
    }
    engine.reset();
    ++left;
  });
}

void lengths_of_messages_are_compared() {
  for (const bool kept : {false, true}) {
    const Memory memory(kSmall);
    on_threads(2, [&](int rank) {
      const auto engine = memory.engine(rank);
      Bytes data(20), other(30), third(1);
      if (rank == 0) {
        send(*engine, 1, 1, data);
        engine->wait(send(*engine, 1, 2, third));
        return;
      }
      if (kept) engine->wait(receive(*engine, 0, 2, third));  // the first message is kept meanwhile
      const auto wrong = receive(*engine, 0, 1, other);
      expect_in(raised([&] { engine->wait(wrong); }),
                "send of 20 bytes of uint8 by rank 0 with tag 1 meets a recv of 30");
    });
  }
}

void dtypes_of_messages_are_compared() {
  const Memory memory(kSmall);
  on_threads(2, [&](int rank) {
    const auto engine = memory.engine(rank);
    Bytes data(20);
    if (rank == 0) return engine->wait(send(*engine, 1, 1, data, 3));
    const auto wrong = receive(*engine, 0, 1, data, 6);
    expect_in(raised([&] { engine->wait(wrong); }),
              "20 bytes of int32 by rank 0 with tag 1 meets a recv of 20 bytes of float32");
  });
}

void what_is_under_way_ends_with_its_engine() {
  const Memory memory(kSmall);
  auto engine = memory.engine(0);
  std::vector<TaskPtr> tasks;
  Bytes data(4000);
  std::atomic<int> notified{0};
  for (int i = 0; i < 3; ++i)
    tasks.push_back(task_of(std::make_unique<Barrier>(engine->member()), 60s));
  for (const auto& task : tasks) engine->start(task, true);
  tasks.push_back(send(*engine, 1, 0, data));
  tasks.push_back(receive(*engine, 1, 0, data));
  for (const auto& task : tasks) engine->on_done(task, [&] { ++notified; });
  engine.reset();
  EXPECT(notified == 5, "%d notified", notified.load());
  for (const auto& task : tasks) EXPECT(task->done && task->error, "no error");
}

// The last reference to an engine may be in a callback that its own thread runs
void an_engine_is_destroyed_by_its_own_thread() {
  const Memory memory(kSmall);
  std::atomic<int> destroyed{0};
  on_threads(2, [&](int rank) {
    auto engine = memory.engine(rank);
    const auto task = task_of(std::make_unique<Barrier>(engine->member()), 20s);
    if (rank == 1) std::this_thread::sleep_for(20ms);
    engine->start(task, true);
    Engine& raw = *engine;
    std::shared_ptr<void> after(nullptr, [&](void*) { ++destroyed; });  // destroyed last
    raw.on_done(task, [after = std::move(after), engine = std::move(engine)] {});
  });
  for (int turn = 0; destroyed < 2 && turn < 10000; ++turn) std::this_thread::sleep_for(1ms);
  EXPECT(destroyed == 2, "the engine was not destroyed");
}

void a_callback_may_use_the_engine() {
  const Memory memory(kSmall);
  on_threads(2, [&](int rank) {
    const auto engine = memory.engine(rank);
    const auto first = task_of(std::make_unique<Barrier>(engine->member()), 20s);
    std::atomic<bool> done{false};
    engine->start(first, true);
    engine->on_done(first, [&] {
      barrier(*engine);
      done = true;
    });
    while (!done) std::this_thread::sleep_for(1ms);
  });
}

void a_failing_finish_is_its_tasks_alone() {
  const Memory memory(kSmall);
  on_threads(2, [&](int rank) {
    const auto engine = memory.engine(rank);
    const auto task = task_of(std::make_unique<Barrier>(engine->member()), 20s);
    task->finish = [] { throw std::runtime_error("no copy"); };
    engine->start(task, false);
    expect_in(raised<std::runtime_error>([&] { engine->wait(task); }), "no copy");
    barrier(*engine);
  });
}

// Freeing buffers may need locks whose holders wait for the engine's
void buffers_are_let_go_without_the_lock() {
  const Memory memory(kSmall);
  on_threads(2, [&](int rank) {
    const auto engine = memory.engine(rank);
    std::atomic<bool> let_go{false};
    const auto task = task_of(std::make_unique<Barrier>(engine->member()), 20s);
    std::shared_ptr<void> buffer(nullptr, [&](void*) {
      std::thread([&] { engine->calls(); }).join();  // takes the engine's lock
      let_go = true;
    });
    task->finish = [buffer = std::move(buffer)] {};
    engine->start(task, true);
    engine->on_done(task, [] {});  // the service thread must end it
    while (!let_go) std::this_thread::sleep_for(1ms);
  });
}

void geometry_is_checked() {
  for (const Geometry bad : {Geometry{2, 64, 128}, Geometry{2, 200, 128}, Geometry{2, 256, 8},
                             Geometry{kMaxRanks + 1, 8192, 128}}) {
    const Memory memory(bad);
    raised([&] { memory.engine(0); });
  }
}

int program(char**) {
#define CASE(name) {#name, name}
  run_all({CASE(different_calls_are_named_by_all), CASE(different_sizes_are_named),
           CASE(different_parts_are_found), CASE(all_to_all_sizes_are_compared),
           CASE(a_late_rank_is_named), CASE(a_waiter_may_have_less_time),
           CASE(a_background_call_has_a_deadline),
           CASE(who_has_left_is_named_but_what_it_said_counts),
           CASE(receives_from_any_outlive_one_rank), CASE(lengths_of_messages_are_compared),
           CASE(dtypes_of_messages_are_compared), CASE(what_is_under_way_ends_with_its_engine),
           CASE(an_engine_is_destroyed_by_its_own_thread), CASE(a_callback_may_use_the_engine),
           CASE(a_failing_finish_is_its_tasks_alone), CASE(buffers_are_let_go_without_the_lock),
           CASE(geometry_is_checked)});
  return 0;
}

}  // namespace tp_ext::shm::test::faults
