#include "shm/core/reductions.h"

#include <algorithm>
#include <utility>

#include "shm/core/chunking.h"
#include "shm/core/stream.h"

namespace tp_ext::shm {
namespace {

Signature signature_of(const Elements& elements, int root = 0) {
  Signature s;
  s.type = elements.type;
  s.op = elements.op;
  s.root = static_cast<uint32_t>(root);
  s.count = static_cast<uint64_t>(elements.count);
  s.parts = elements.shape;
  return s;
}

// Ranks that divide differently would read elements that no rank wrote for them
Signature signature_of(const Elements& elements, const std::vector<int64_t>& parts) {
  Signature s = signature_of(elements);
  s.parts = 14695981039346656037u;  // FNV-1a
  for (const int64_t n : parts) s.parts = (s.parts ^ static_cast<uint64_t>(n)) * 1099511628211u;
  return s;
}

}  // namespace

AllReduce::AllReduce(const Member& member, const void* in, void* out, const Elements& elements)
    : SteppedCollective(member, Kind::kAllReduce, 1, signature_of(elements)),
      elements_(elements),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)) {
  if (elements.bytes() > member.slot_bytes())
    throw Failure("all_reduce: " + std::to_string(elements.bytes()) + " bytes in one step");
}

void AllReduce::write(int64_t, char* slot) { stream(slot, in_, elements_.bytes()); }

void AllReduce::read(int64_t step) {
  const void* in[kMaxRanks];
  for (int rank = 0; rank < member_.ranks(); ++rank) in[rank] = input(step, rank);
  elements_.combine(out_, in, member_.ranks(), elements_.count);
}

AllReduceRows::AllReduceRows(const Member& member, const void* in, const Elements& elements,
                             int64_t row_length, End end)
    : AllReduce(member, in, nullptr, elements),
      row_length_(row_length),
      row_(row_length * elements.size),
      end_(std::move(end)) {}

void AllReduceRows::read(int64_t step) {
  const void* in[kMaxRanks];
  const int64_t bytes = row_length_ * elements_.size;
  for (int64_t row = 0; row * row_length_ < elements_.count; ++row) {
    for (int rank = 0; rank < member_.ranks(); ++rank) in[rank] = input(step, rank) + row * bytes;
    elements_.combine(row_.data(), in, member_.ranks(), row_length_);
    end_(row, row_.data());
  }
}

ChunkedAllReduce::ChunkedAllReduce(const Member& member, const void* in, void* out,
                                   const Elements& elements)
    : Collective(member, Kind::kAllReduce),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      elements_(elements),
      per_chunk_(member.slot_bytes() / elements.size),
      chunks_(divide_up(elements.count, per_chunk_)),
      signature_(signature_of(elements)) {
  signature_.kind = static_cast<uint32_t>(Kind::kAllReduce);
}

void ChunkedAllReduce::begin(uint64_t number, uint64_t history) {
  signature_.call = number;
  signature_.history = history;
  for (int lane = 0; lane < kLanes; ++lane) {
    base_[lane] = member_.lanes[lane].begun;
    member_.lanes[lane].begun += static_cast<uint64_t>(chunks_);
  }
}

ChunkedAllReduce::Range ChunkedAllReduce::chunk(int64_t index) const {
  return {index * per_chunk_, std::min((index + 1) * per_chunk_, elements_.count)};
}

// In whole lines, so that no two ranks write to the same line
ChunkedAllReduce::Range ChunkedAllReduce::part(int64_t index, int rank) const {
  const Range all = chunk(index);
  const int64_t n = all.end - all.begin, line = kLine / elements_.size;
  const int64_t each = divide_up(divide_up(n, member_.ranks()), line) * line;
  return {all.begin + std::min(rank * each, n), all.begin + std::min((rank + 1) * each, n)};
}

// The other ranks' parts of the chunk: this rank's part is combined from the input itself
void ChunkedAllReduce::write(int64_t index) {
  const Lane& lane = member_.lanes[0];
  const uint64_t step = base_[0] + static_cast<uint64_t>(index);
  const Range all = chunk(index), own = part(index, member_.rank);
  const int64_t size = elements_.size;
  char* slot = lane.own(step);
  copy(slot, in_ + all.begin * size, (own.begin - all.begin) * size);
  copy(slot + (own.end - all.begin) * size, in_ + own.end * size, (all.end - own.end) * size);
  lane.post(step, signature_);
}

void ChunkedAllReduce::combine(int64_t index) {
  const Lane &partials = member_.lanes[0], &sums = member_.lanes[1];
  const uint64_t from = base_[0] + static_cast<uint64_t>(index),
                 to = base_[1] + static_cast<uint64_t>(index);
  const Range all = chunk(index), own = part(index, member_.rank);
  const int64_t size = elements_.size, offset = (own.begin - all.begin) * size;
  const void* in[kMaxRanks];
  for (int rank = 0; rank < member_.ranks(); ++rank) {
    check(rank, partials.signature(from, rank), signature_);
    in[rank] = rank == member_.rank ? in_ + own.begin * size : partials.of(from, rank) + offset;
  }
  char* result = out_ + own.begin * size;
  elements_.combine(result, in, member_.ranks(), own.end - own.begin);
  copy(sums.own(to), result, (own.end - own.begin) * size);
  sums.post(to, signature_);
  partials.finish(from);
}

void ChunkedAllReduce::spread(int64_t index) {
  const Lane& sums = member_.lanes[1];
  const uint64_t step = base_[1] + static_cast<uint64_t>(index);
  for (int rank = 0; rank < member_.ranks(); ++rank) {
    const Range theirs = part(index, rank);
    if (rank != member_.rank)
      copy(out_ + theirs.begin * elements_.size, sums.of(step, rank),
           (theirs.end - theirs.begin) * elements_.size);
  }
  sums.finish(step);
}

bool ChunkedAllReduce::advance() {
  const Lane &partials = member_.lanes[0], &sums = member_.lanes[1];
  for (bool moved = true; moved;) {
    moved = false;
    if (written_ < std::min(chunks_, combined_ + kAhead) &&
        partials.free(base_[0] + static_cast<uint64_t>(written_))) {
      write(written_++);
      moved = ++progress_;
    }
    const auto next = static_cast<uint64_t>(combined_);
    if (combined_ < written_ && partials.all_arrived(base_[0] + next) &&
        sums.free(base_[1] + next)) {
      combine(combined_++);
      moved = ++progress_;
    }
    if (spread_ < combined_ && sums.all_arrived(base_[1] + static_cast<uint64_t>(spread_))) {
      spread(spread_++);
      moved = ++progress_;
    }
  }
  return spread_ == chunks_;
}

std::vector<int> ChunkedAllReduce::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < member_.ranks(); ++rank) {
    const bool late = spread_ < combined_
                          ? !member_.lanes[1].posted(base_[1] + uint64_t(spread_), rank)
                          : !member_.lanes[0].posted(base_[0] + uint64_t(combined_), rank);
    if (late) ranks.push_back(rank);
  }
  return ranks;
}

ReduceScatter::ReduceScatter(const Member& member, std::vector<const void*> in, void* out,
                             std::vector<int64_t> counts, const Elements& like)
    : SteppedCollective(
          member, Kind::kReduceScatter,
          steps_for(largest(counts), share_of(member.slot_bytes(), member.ranks()) / like.size),
          signature_of(like, counts)),
      in_(std::move(in)),
      out_(static_cast<char*>(out)),
      counts_(std::move(counts)),
      like_(like),
      share_(share_of(member.slot_bytes(), member.ranks()) / like.size) {}

void ReduceScatter::write(int64_t step, char* slot) {
  for (int rank = 0; rank < member_.ranks(); ++rank) {
    if (rank == member_.rank) continue;
    const Chunk chunk(step, share_, counts_[rank]);
    copy(slot + rank * share_ * like_.size,
         static_cast<const char*>(in_[rank]) + chunk.begin * like_.size, chunk.length * like_.size);
  }
}

void ReduceScatter::read(int64_t step) {
  const int own = member_.rank;
  const Chunk chunk(step, share_, counts_[own]);
  const void* in[kMaxRanks];
  for (int rank = 0; rank < member_.ranks(); ++rank)
    in[rank] = rank == own ? static_cast<const char*>(in_[own]) + chunk.begin * like_.size
                           : of(step, rank) + own * share_ * like_.size;
  like_.combine(out_ + chunk.begin * like_.size, in, member_.ranks(), chunk.length);
}

Reduce::Reduce(const Member& member, const void* in, void* out, const Elements& elements, int root)
    : SteppedCollective(member, Kind::kReduce,
                        steps_for(elements.count, member.slot_bytes() / elements.size),
                        signature_of(elements, root)),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      elements_(elements),
      root_(root),
      share_(member.slot_bytes() / elements.size) {
  if (member.rank != root) sources_.clear();
}

void Reduce::write(int64_t step, char* slot) {
  if (member_.rank == root_) return;
  const Chunk chunk(step, share_, elements_.count);
  copy(slot, in_ + chunk.begin * elements_.size, chunk.length * elements_.size);
}

void Reduce::read(int64_t step) {
  if (member_.rank != root_) return;
  const Chunk chunk(step, share_, elements_.count);
  const void* in[kMaxRanks];
  for (int rank = 0; rank < member_.ranks(); ++rank)
    in[rank] = rank == root_ ? in_ + chunk.begin * elements_.size : of(step, rank);
  elements_.combine(out_ + chunk.begin * elements_.size, in, member_.ranks(), chunk.length);
}

}  // namespace tp_ext::shm
