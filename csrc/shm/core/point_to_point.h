// Send and receive: a stream of messages through the ring of each ordered pair of ranks. Any number
// may be under way; advance() moves what can be moved without waiting.
//
// Messages of one pair and tag arrive in order. A message whose tag nobody asks for, before one that
// somebody waits for, is kept in memory of the receiver's own.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "shm/core/layout.h"

namespace tp_ext::shm {

struct Message {
  int peer;  // receiver or sender; of a receive -1: any
  int tag;
  char* data;
  int64_t bytes;
  uint32_t type;  // dtype of the elements by c10's number, which both ends compare
  bool done = false;
  int64_t moved = -1;  // of a send: bytes in the ring so far, -1 without the head
};

class Messages {
 public:
  // reserve(offset, bytes): makes a part of the shared memory usable, or raises
  Messages(const Shared& shared, int rank, std::function<void(int64_t, int64_t)> reserve)
      : shared_(&shared),
        rank_(rank),
        reserve_(std::move(reserve)),
        reserved_(shared.ranks()),
        written_(shared.ranks()),
        sends_(shared.ranks()),
        streams_(shared.ranks()) {}

  void send(std::shared_ptr<Message> message);
  void receive(std::shared_ptr<Message> message);
  void advance();                    // raises Failure if lengths or dtypes differ
  std::vector<int> missing() const;  // the peers of what is not done
  int lost(uint64_t gone,
           uint64_t died) const;  // one of those ranks (bits) without which it never will; or -1
  uint64_t moves() const { return moves_; }  // grows whenever something has been done

 private:
  struct Head {
    uint64_t bytes;
    int32_t tag;
    uint32_t type;
  };
  static_assert(sizeof(Head) == kMessageHead);
  struct Kept {  // came before it was asked for
    int from;
    Head head;
    std::vector<char> data;          // grows as it comes in: the head's length is only a claim
    std::shared_ptr<Message> taker;  // asked for while it comes in
    bool complete = false;
  };
  struct Stream {       // what comes in from one rank
    uint64_t read = 0;  // bytes of the ring since the beginning
    bool inside = false;
    uint64_t position = 0;  // bytes of the message so far
    Head head{};
    std::shared_ptr<Message> message;  // where it goes,
    Kept* kept = nullptr;              // or here
  };

  bool push(int to, Message& message);
  bool pull(int from);
  bool open(int from, Stream& stream);
  void deliver(Kept& kept);
  static void check(const Head& head, const Message& message, int from);

  const Shared* shared_;
  int rank_;
  std::function<void(int64_t, int64_t)> reserve_;
  std::vector<bool> reserved_;
  std::vector<uint64_t> written_;  // bytes of each ring since the beginning
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;
  std::list<std::shared_ptr<Message>> receives_;
  std::vector<Stream> streams_;
  std::list<Kept> kept_;
  uint64_t moves_ = 0;
};

}  // namespace tp_ext::shm
