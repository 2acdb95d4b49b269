#include "shm/core/data_movement.h"

#include <algorithm>

#include "shm/core/chunking.h"

namespace tp_ext::shm {
namespace {

constexpr int64_t kMaxBytes = int64_t(1) << 62;  // so that the number of steps cannot overflow

}  // namespace

AllGather::AllGather(const Member& member, const void* in, std::vector<void*> out,
                     std::vector<int64_t> bytes, uint32_t type, int root)
    : SteppedCollective(member, root < 0 ? Kind::kAllGather : Kind::kGather,
                        steps_for(largest(bytes), member.slot_bytes()),
                        signature_of(bytes[member.rank], type, std::max(root, 0))),
      in_(static_cast<const char*>(in)),
      out_(std::move(out)),
      bytes_(std::move(bytes)),
      type_(type),
      root_(root) {
  if (root < 0) return;
  for (const int64_t n : bytes_)
    if (n != bytes_[member.rank])
      throw Failure("gather: " + std::to_string(n) + " bytes of one rank and " +
                    std::to_string(bytes_[member.rank]) + " of another must be the same");
  if (root != member.rank) sources_.clear();
}

Signature AllGather::expected(int rank) const {
  return signature_of(bytes_[rank], type_, std::max(root_, 0));
}

// Without the length, which differs from rank to rank
Signature AllGather::common() const {
  Signature common = signature();
  common.count = 0;
  return common;
}

void AllGather::write(int64_t step, char* slot) {
  const Chunk chunk(step, member_.slot_bytes(), bytes_[member_.rank]);
  copy(slot, in_ + chunk.begin, chunk.length);
}

void AllGather::read(int64_t step) {
  for (const int rank : sources_) {
    const Chunk chunk(step, member_.slot_bytes(), bytes_[rank]);
    const char* from = rank == member_.rank ? in_ + chunk.begin : of(step, rank);
    copy(static_cast<char*>(out_[rank]) + chunk.begin, from, chunk.length);
  }
}

Broadcast::Broadcast(const Member& member, void* data, int64_t bytes, uint32_t type, int root)
    : SteppedCollective(member, Kind::kBroadcast, steps_for(bytes, member.slot_bytes()),
                        signature_of(bytes, type, root)),
      data_(static_cast<char*>(data)),
      bytes_(bytes),
      root_(root) {
  only_from(root);
}

void Broadcast::write(int64_t step, char* slot) {
  const Chunk chunk(step, member_.slot_bytes(), bytes_);
  copy(slot, data_ + chunk.begin, chunk.length);
}

void Broadcast::read(int64_t step) {
  if (member_.rank == root_) return;
  const Chunk chunk(step, member_.slot_bytes(), bytes_);
  copy(data_ + chunk.begin, of(step, root_), chunk.length);
}

Scatter::Scatter(const Member& member, std::vector<const void*> in, void* out, int64_t bytes,
                 uint32_t type, int root)
    : SteppedCollective(member, Kind::kScatter,
                        steps_for(bytes, share_of(member.slot_bytes(), member.ranks())),
                        signature_of(bytes, type, root)),
      in_(std::move(in)),
      out_(static_cast<char*>(out)),
      bytes_(bytes),
      share_(share_of(member.slot_bytes(), member.ranks())),
      root_(root) {
  only_from(root);
}

void Scatter::write(int64_t step, char* slot) {
  const Chunk chunk(step, share_, bytes_);
  for (int rank = 0; rank < member_.ranks(); ++rank) {
    const char* from = static_cast<const char*>(in_[rank]) + chunk.begin;
    copy(rank == root_ ? out_ + chunk.begin : slot + rank * share_, from, chunk.length);
  }
}

void Scatter::read(int64_t step) {
  if (member_.rank == root_) return;
  const Chunk chunk(step, share_, bytes_);
  copy(out_ + chunk.begin, of(step, root_) + member_.rank * share_, chunk.length);
}

AllToAll::AllToAll(const Member& member, std::vector<Rows> in, std::vector<Rows> out, uint32_t type)
    : SteppedCollective(member, Kind::kAllToAll, 1, signature_of(0, type)),
      in_(std::move(in)),
      out_(std::move(out)),
      share_(share_of(member.slot_bytes(), member.ranks())) {
  sized_ = false;
}

void AllToAll::write(int64_t step, char* slot) {
  if (step == 0) {
    std::vector<int64_t> sizes;
    for (const Rows& rows : in_) sizes.push_back(rows.bytes);
    return copy(slot, sizes.data(), member_.ranks() * int64_t(sizeof(int64_t)));
  }
  for (int rank = 0; rank < member_.ranks(); ++rank) {
    if (rank == member_.rank) continue;
    in_[rank].read({step - 1, share_, in_[rank].bytes}, slot + rank * share_);
  }
}

void AllToAll::read(int64_t step) {
  const int own = member_.rank;
  if (step == 0) {
    int64_t most = 0;
    for (int rank = 0; rank < member_.ranks(); ++rank) {
      for (int to = 0; to < member_.ranks(); ++to) {
        const auto bytes = read_once<int64_t>(of(0, rank) + to * sizeof(int64_t));
        if (bytes < 0 || bytes > kMaxBytes)
          damaged("a size in an all_to_all", rank, static_cast<uint64_t>(bytes));
        if (to == own && bytes != out_[rank].bytes)
          throw Failure("all_to_all: rank " + std::to_string(rank) + " sends " +
                        std::to_string(bytes) + " bytes to rank " + std::to_string(own) +
                        ", which expects " + std::to_string(out_[rank].bytes));
        if (to != rank) most = std::max(most, bytes);
      }
    }
    steps_ = 1 + divide_up(most, share_);
    sized_ = true;
    return out_[own].write(in_[own]);
  }
  for (int rank = 0; rank < member_.ranks(); ++rank) {
    if (rank == own) continue;
    out_[rank].write({step - 1, share_, out_[rank].bytes}, of(step, rank) + own * share_);
  }
}

}  // namespace tp_ext::shm
