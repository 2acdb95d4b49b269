#include "shm/core/point_to_point.h"

#include <algorithm>
#include <string>

#include "shm/core/collective.h"

namespace tp_ext::shm {
namespace {

std::string described(const char* what, uint64_t bytes, uint32_t type) {
  return std::string(what) + " of " + std::to_string(bytes) + " bytes of " + type_name(type);
}

// Bytes at a position of the stream, which wraps around the ring
void put(char* ring, int64_t size, uint64_t position, const void* from, int64_t bytes) {
  const int64_t at = static_cast<int64_t>(position % size), first = std::min(bytes, size - at);
  std::memcpy(ring + at, from, first);
  std::memcpy(ring, static_cast<const char*>(from) + first, bytes - first);
}
void take(const char* ring, int64_t size, uint64_t position, void* to, int64_t bytes) {
  const int64_t at = static_cast<int64_t>(position % size), first = std::min(bytes, size - at);
  std::memcpy(to, ring + at, first);
  std::memcpy(static_cast<char*>(to) + first, ring, bytes - first);
}

}  // namespace

void PointToPoint::send(std::shared_ptr<Message> message) {
  const int to = message->peer;
  if (!reserved_[to]) {
    reserve_(shared_->ring_offset(rank_, to), shared_->geometry().ring_bytes);
    reserved_[to] = true;
  }
  sends_[to].push_back(std::move(message));
}

void PointToPoint::receive(std::shared_ptr<Message> message) {
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    const bool match = !kept->taker && kept->head.tag == message->tag &&
                       (message->peer < 0 || message->peer == kept->from);
    if (!match) continue;
    check(kept->head, *message, kept->from);
    message->peer = kept->from;
    kept->taker = std::move(message);
    if (kept->complete) {
      deliver(*kept);
      kept_.erase(kept);
    }
    return;
  }
  receives_.push_back(std::move(message));
}

void PointToPoint::deliver(Kept& kept) {
  std::copy(kept.data.begin(), kept.data.end(), kept.taker->data);
  kept.taker->done = true;
}

void PointToPoint::check(const Head& head, const Message& message, int from) {
  if (head.bytes != static_cast<uint64_t>(message.bytes) || head.type != message.type)
    throw Failure(described("send", head.bytes, head.type) + " by rank " + std::to_string(from) +
                  " with tag " + std::to_string(head.tag) + " meets a " +
                  described("recv", static_cast<uint64_t>(message.bytes), message.type));
}

bool PointToPoint::push(int to, Message& message) {
  Ring& ring = shared_->ring(rank_, to);
  char* bytes = shared_->ring_bytes(rank_, to);
  const int64_t size = shared_->geometry().ring_bytes;
  uint64_t& at = written_[to];
  const uint64_t start = at, read = ring.read.value.load(std::memory_order_acquire);
  if (at - read > static_cast<uint64_t>(size)) damaged("the number of bytes read", to, read);
  auto room = [&] { return size - static_cast<int64_t>(at - read); };
  if (message.moved < 0) {
    const Head head{static_cast<uint64_t>(message.bytes), message.tag, message.type};
    if (room() < static_cast<int64_t>(sizeof head)) return false;
    put(bytes, size, at, &head, sizeof head);
    at += sizeof head;
    message.moved = 0;
  }
  const int64_t chunk = std::min(room(), message.bytes - message.moved);
  if (chunk > 0) {
    put(bytes, size, at, message.data + message.moved, chunk);
    message.moved += chunk;
    at += static_cast<uint64_t>(chunk);
  }
  ring.written.value.store(at, std::memory_order_release);
  message.done = message.moved == message.bytes;
  return at != start || message.done;
}

// Finds the destination of the message at the front of the stream; false: no receive wants it
bool PointToPoint::open(int from, Stream& stream) {
  bool waited_for = false;
  for (auto it = receives_.begin(); it != receives_.end(); ++it) {
    Message& message = **it;
    if (message.peer >= 0 && message.peer != from) continue;
    waited_for = true;
    if (message.tag != stream.head.tag) continue;
    check(stream.head, message, from);
    message.peer = from;
    stream.message = std::move(*it);
    receives_.erase(it);
    return true;
  }
  if (!waited_for) return false;
  kept_.emplace_back();
  stream.kept = &kept_.back();
  stream.kept->from = from;
  stream.kept->head = stream.head;
  return true;
}

bool PointToPoint::pull(int from) {
  Ring& ring = shared_->ring(from, rank_);
  const char* bytes = shared_->ring_bytes(from, rank_);
  const int64_t size = shared_->geometry().ring_bytes;
  Stream& stream = streams_[from];
  uint64_t& at = stream.read;
  const uint64_t start = at, written = ring.written.value.load(std::memory_order_acquire);
  if (written - at > static_cast<uint64_t>(size))
    damaged("the number of bytes written", from, written);
  if (!stream.inside) {
    if (written - at < sizeof(Head)) return false;
    take(bytes, size, at, &stream.head, sizeof(Head));
    if (!open(from, stream)) return false;
    at += sizeof(Head);
    stream.inside = true;
    stream.position = 0;
  }
  const auto chunk =
      static_cast<int64_t>(std::min<uint64_t>(written - at, stream.head.bytes - stream.position));
  if (stream.kept) stream.kept->data.resize(stream.position + static_cast<uint64_t>(chunk));
  char* to = stream.kept ? stream.kept->data.data() : stream.message->data;
  if (chunk > 0) take(bytes, size, at, to + stream.position, chunk);
  at += static_cast<uint64_t>(chunk);
  stream.position += static_cast<uint64_t>(chunk);
  ring.read.value.store(at, std::memory_order_release);
  if (stream.position == stream.head.bytes) {
    if (stream.kept) {
      stream.kept->complete = true;
      if (stream.kept->taker) {
        deliver(*stream.kept);
        kept_.remove_if([&](const Kept& kept) { return &kept == stream.kept; });
      }
    } else {
      stream.message->done = true;
    }
    stream.inside = false;
    stream.message = nullptr;
    stream.kept = nullptr;
  }
  return at != start;
}

void PointToPoint::advance() {
  for (int to = 0; to < shared_->ranks(); ++to) {
    auto& queue = sends_[to];
    while (!queue.empty() && push(to, *queue.front())) {
      ++progress_;
      if (!queue.front()->done) break;
      queue.pop_front();
    }
  }
  const bool wanted = !receives_.empty();
  for (int from = 0; from < shared_->ranks(); ++from)
    if (wanted || streams_[from].inside)
      while (pull(from)) ++progress_;
}

std::vector<int> PointToPoint::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < shared_->ranks(); ++rank) {
    const bool sending = !sends_[rank].empty();
    const bool receiving =
        streams_[rank].inside ||
        std::any_of(receives_.begin(), receives_.end(), [rank](const auto& message) {
          return message->peer == rank || message->peer < 0;
        });
    if (sending || receiving) ranks.push_back(rank);
  }
  return ranks;
}

// A receive from any rank needs one rank that is still there, and none that died: the sender might
// have been that one
int PointToPoint::lost(uint64_t gone, uint64_t died) const {
  const auto is_gone = [gone](int rank) { return gone >> rank & 1; };
  bool from_any = false, anybody = false;
  for (const auto& message : receives_) {
    if (message->peer >= 0 && is_gone(message->peer)) return message->peer;
    from_any = from_any || message->peer < 0;
  }
  int last = -1;
  for (int rank = 0; rank < shared_->ranks(); ++rank) {
    if (is_gone(rank)) {
      if (!sends_[rank].empty() || streams_[rank].inside) return rank;
      last = rank;
    } else if (rank != rank_) {
      anybody = true;
    }
  }
  for (int rank = 0; from_any && rank < shared_->ranks(); ++rank)
    if (died >> rank & 1) return rank;
  return from_any && !anybody ? last : -1;
}

}  // namespace tp_ext::shm
