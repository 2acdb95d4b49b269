#include "shm/core/collective.h"

#include <algorithm>
#include <iterator>

#include "shm/core/chunking.h"

namespace tp_ext::shm {
namespace {

const char* operation_name(uint32_t op) {
  constexpr const char* kNames[] = {"SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"};
  return op < std::size(kNames) ? kNames[op] : "another operation";
}

std::string described(const Signature& s) {
  const auto kind = static_cast<Kind>(s.kind);
  std::string text = std::string(name_of(kind)) + " (call " + std::to_string(s.call);
  if (kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter)
    text += ", " + std::to_string(s.count) + " " + type_name(s.type) + ", " + operation_name(s.op);
  else if (kind == Kind::kAllToAll)
    text += std::string(", ") + type_name(s.type);
  else if (kind != Kind::kBarrier)
    text += ", " + std::to_string(s.count) + " bytes of " + type_name(s.type);
  if (kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather ||
      kind == Kind::kScatter)
    text += ", root " + std::to_string(s.root);
  if (s.parts != 0)
    text += (kind == Kind::kReduceScatter ? ", divided as #" : ", shape #") +
            std::to_string(s.parts % 10000);
  return text + ")";
}

}  // namespace

const char* type_name(uint32_t type) {
  constexpr const char* kNames[] = {"uint8",     "int8",      "int16",      "int32",
                                    "int64",     "float16",   "float32",    "float64",
                                    "complex32", "complex64", "complex128", "bool"};
  if (type < std::size(kNames)) return kNames[type];
  return type == 15 ? "bfloat16" : "elements of another dtype";
}

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

void Collective::check(int rank, const Signature& theirs, const Signature& expected) const {
  if (theirs == expected) return;
  if (theirs.same_call(expected))
    throw Failure("rank " + std::to_string(rank) + " and rank " + std::to_string(member_.rank) +
                  " both call " + described(theirs) +
                  ", but not the same before it: a broadcast or scatter with another root, say");
  throw Failure("rank " + std::to_string(rank) + " calls " + described(theirs) + " where rank " +
                std::to_string(member_.rank) + " calls " + described(expected));
}

uint64_t Collective::continued(const Signature& s) {
  uint64_t hash = s.history;
  for (const uint64_t word :
       {uint64_t(s.kind) << 32 | s.type, uint64_t(s.op) << 32 | s.root, s.count, s.parts})
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u + (hash >> 29);
  return hash;
}

SteppedCollective::SteppedCollective(const Member& member, Kind kind, int64_t steps,
                                     Signature signature)
    : Collective(member, kind), steps_(steps), signature_(signature) {
  signature_.kind = static_cast<uint32_t>(kind);
  for (int rank = 0; rank < member.ranks(); ++rank) sources_.push_back(rank);
}

void SteppedCollective::only_from(int root) {
  writes_ = member_.rank == root;
  sources_.clear();
  if (!writes_) sources_.push_back(root);
}

void SteppedCollective::begin(uint64_t number, uint64_t history) {
  signature_.call = number;
  signature_.history = history;
  base_ = lane().begun;
}

bool SteppedCollective::advance() {
  for (bool moved = true; moved;) {
    moved = false;
    if (writes_ && written_ < std::min(steps_, read_ + kAhead) && lane().free(base_ + written_)) {
      write(written_, lane().own(base_ + written_));
      lane().post(base_ + written_, signature_);
      ++written_;
      moved = ++progress_;
    }
    const bool may_read = read_ < (writes_ ? written_ : steps_);
    if (may_read && std::all_of(sources_.begin(), sources_.end(),
                                [this](int rank) { return lane().arrived(base_ + read_, rank); })) {
      for (const int rank : sources_) {
        Signature want = expected(rank);
        want.kind = signature_.kind;
        want.call = signature_.call;
        want.history = signature_.history;
        check(rank, lane().signature(base_ + read_, rank), want);
      }
      read(read_);
      lane().finish(base_ + read_);
      ++read_;
      moved = ++progress_;
    }
  }
  if (read_ < steps_) return false;
  lane().begun = base_ + steps_;
  return true;
}

std::vector<int> SteppedCollective::missing() const {
  std::vector<int> ranks;
  if (writes_ && written_ <= read_ && written_ < steps_) {  // cannot write
    for (int rank = 0; rank < member_.ranks(); ++rank)
      if (base_ + written_ >= kSlots && !lane().finished(base_ + written_ - kSlots, rank))
        ranks.push_back(rank);
    return ranks;
  }
  for (const int rank : sources_)
    if (!lane().posted(base_ + read_, rank)) ranks.push_back(rank);
  return ranks;
}

}  // namespace tp_ext::shm
