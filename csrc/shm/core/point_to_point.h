// Send and receive: a stream of messages through the ring of each ordered pair of ranks. Any number
// may be in flight; advance() moves all data that needs no waiting.
//
// Messages of one pair and tag arrive in order. A message that no receive wants yet, in front of
// one that is awaited, is kept in memory of the receiver.

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
  int peer;  // receiver or sender; of a receive, -1: any
  int tag;
  char* data;
  int64_t bytes;
  uint32_t type;  // dtype of the elements by c10's number, which both ends compare
  bool done = false;
  int64_t moved = -1;  // of a send: bytes in the ring so far, -1 before the head
};

class PointToPoint {
 public:
  // reserve(offset, bytes): backs a range of the shared memory with pages, or raises
  PointToPoint(const Shared& shared, int rank, std::function<void(int64_t, int64_t)> reserve)
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
  std::vector<int> missing() const;  // the peers of unfinished messages
  int lost(uint64_t gone,
           uint64_t died) const;  // a rank (bits) without which a message can never finish, or -1
  uint64_t progress() const { return progress_; }  // grows with every step made

 private:
  struct Head {
    uint64_t bytes;
    int32_t tag;
    uint32_t type;
  };
  static_assert(sizeof(Head) == kMessageHead);
  struct Kept {  // arrived before its receive
    int from;
    Head head;
    std::vector<char> data;  // grows with the arriving data: the head's length is only a claim
    std::shared_ptr<Message> taker;  // the receive that wants it, if posted while it arrives
    bool complete = false;
  };
  struct Stream {       // incoming data of one rank
    uint64_t read = 0;  // bytes of the ring since the beginning
    bool inside = false;
    uint64_t position = 0;  // bytes of the message so far
    Head head{};
    std::shared_ptr<Message> message;  // destination: this receive,
    Kept* kept = nullptr;              // or this
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
  uint64_t progress_ = 0;
};

}  // namespace tp_ext::shm
