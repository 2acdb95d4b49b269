#include "shm/calls.h"

#include <algorithm>

#include "shm/pieces.h"

namespace tp_ext::shm {
namespace {

std::string described(const Signature& s) {
  return std::string(name_of(static_cast<Kind>(s.kind))) + " number " + std::to_string(s.call) +
         " (type " + std::to_string(s.type) + ", operation " + std::to_string(s.op) + ", root " +
         std::to_string(s.root) + ", " + std::to_string(s.count) + " elements" +
         (s.parts ? ", parts #" + std::to_string(s.parts % 10000) : "") + ")";
}

}  // namespace

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kReduce:
      return "reduce";
    case Kind::kGather:
      return "gather";
    case Kind::kScatter:
      return "scatter";
    case Kind::kBarrier:
      return "barrier";
  }
  return "unknown call";
}

void Call::check(int rank, const Signature& theirs, const Signature& expected) const {
  if (theirs == expected) return;
  throw Failure("rank " + std::to_string(rank) + " calls " + described(theirs) + " where rank " +
                std::to_string(party_.rank) + " calls " + described(expected));
}

Steps::Steps(const Party& party, Kind kind, int64_t steps, Signature signature)
    : Call(party, kind), steps_(steps), signature_(signature) {
  signature_.kind = static_cast<uint32_t>(kind);
  for (int rank = 0; rank < party.ranks(); ++rank) sources_.push_back(rank);
}

void Steps::begin(uint64_t number) {
  signature_.call = number;
  base_ = lane().begun;
}

bool Steps::advance() {
  for (bool moved = true; moved;) {
    moved = false;
    if (writes_ && written_ < std::min(steps_, read_ + kAhead) && lane().free(base_ + written_)) {
      write(written_, lane().own(base_ + written_));
      lane().post(base_ + written_, signature_);
      ++written_;
      moved = ++moves_;
    }
    const bool may_read = read_ < (writes_ ? written_ : steps_);
    if (may_read && std::all_of(sources_.begin(), sources_.end(),
                                [this](int rank) { return lane().posted(base_ + read_, rank); })) {
      for (const int rank : sources_) {
        Signature want = expected(rank);
        want.kind = signature_.kind;
        want.call = signature_.call;
        check(rank, lane().signature(base_ + read_, rank), want);
      }
      read(read_);
      lane().finish(base_ + read_);
      ++read_;
      moved = ++moves_;
    }
  }
  if (read_ < steps_) return false;
  lane().begun = base_ + steps_;
  return true;
}

std::vector<int> Steps::missing() const {
  std::vector<int> ranks;
  if (writes_ && written_ <= read_ && written_ < steps_) {  // cannot write
    for (int rank = 0; rank < party_.ranks(); ++rank)
      if (base_ + written_ >= kSlots && !lane().finished(base_ + written_ - kSlots, rank))
        ranks.push_back(rank);
    return ranks;
  }
  for (const int rank : sources_)
    if (!lane().posted(base_ + read_, rank)) ranks.push_back(rank);
  return ranks;
}

}  // namespace tp_ext::shm
