// Orders the uses of one shared resource by several streams, as NCCL orders the calls of one
// communicator. Free of torch, so that tests can supply streams and events.

#pragma once

#include <optional>

namespace tp_ext::comm {

template <typename Stream, typename Event>
class StreamOrder {
 public:
  // To be called before a use on `stream`, which then waits for the last use if that was on another
  // stream. False: the resource cannot be used there now.
  //
  // An event must not cross the border of a CUDA-graph capture, and need not: captured work does
  // not run, and the caller orders its replays. Captures use one stream, since two streams of one
  // capture, which would have to wait, cannot be distinguished from streams of two captures, which
  // must not.
  bool begin(const Stream& stream, bool capturing) {
    if (capturing) return !captured_ || *captured_ == stream;
    if (last_ && *last_ != stream) event_->block(stream);
    return true;
  }

  // To be called after the use
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
