// Orders what several streams do with one thing that they share, as NCCL orders the calls of one
// communicator. Free of torch, so that tests can give it streams and events of their own.

#pragma once

#include <optional>

namespace tp_ext::comm {

template <typename Stream, typename Event>
class StreamOrder {
 public:
  // Before a use on `stream`, which waits for the last use if that was on another stream. False:
  // it cannot be used there now.
  //
  // An event must not cross the border of a CUDA-graph capture, and need not: what is captured does
  // not run, and its replays are the caller's to order. Captures use one stream, since streams of
  // one capture, which would have to wait, cannot be told from those of several, which must not.
  bool begin(const Stream& stream, bool capturing) {
    if (capturing) return !captured_ || *captured_ == stream;
    if (last_ && *last_ != stream) event_->block(stream);
    return true;
  }

  // After the use
  void end(const Stream& stream, bool capturing) {
    if (capturing) {
      captured_ = stream;
      return;
    }
    if (!event_) event_.emplace(stream.device_type());
    event_->record(stream);
    last_ = stream;
    captured_.reset();  // the capture is over
  }

 private:
  std::optional<Event> event_;  // recorded after the last use on last_
  std::optional<Stream> last_, captured_;
};

}  // namespace tp_ext::comm
