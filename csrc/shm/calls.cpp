#include "shm/calls.h"

#include <algorithm>

namespace tp_ext::shm {
namespace {

// How far a rank writes ahead of what it has read: enough to hide that others are late, little
// enough that the slots stay in the cache
constexpr int64_t kAhead = 2;

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// At least one, so that every call meets every rank
int64_t steps_for(int64_t n, int64_t per_step) {
  return std::max<int64_t>(1, divide_up(n, per_step));
}

// Bytes for each of `ranks` in a slot, a whole number of lines
int64_t share_of(int64_t slot_bytes, int ranks) { return slot_bytes / ranks / kLine * kLine; }

void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// The piece of [0, n) that step k of per_step covers
struct Piece {
  int64_t begin, length;
  Piece(int64_t step, int64_t per_step, int64_t n)
      : begin(std::min(step * per_step, n)), length(std::min(per_step, n - begin)) {}
};

std::string described(const Signature& s) {
  return std::string(name_of(static_cast<Kind>(s.kind))) + " number " + std::to_string(s.call) +
         " (type " + std::to_string(s.type) + ", operation " + std::to_string(s.op) + ", root " +
         std::to_string(s.root) + ", " + std::to_string(s.count) + " elements" +
         (s.parts ? ", parts #" + std::to_string(s.parts % 10000) : "") + ")";
}

Signature signature_of(const Elements& elements, int root = 0) {
  Signature s;
  s.type = elements.type;
  s.op = elements.op;
  s.root = static_cast<uint32_t>(root);
  s.count = static_cast<uint64_t>(elements.count);
  return s;
}

Signature signature_of(int64_t bytes, int root = 0) {
  Signature s;
  s.root = static_cast<uint32_t>(root);
  s.count = static_cast<uint64_t>(bytes);
  return s;
}

// Ranks that divide differently would read what nobody wrote for them
Signature signature_of(const Elements& elements, const std::vector<int64_t>& parts) {
  Signature s = signature_of(elements);
  s.parts = 14695981039346656037u;  // FNV-1a
  for (const int64_t n : parts) s.parts = (s.parts ^ static_cast<uint64_t>(n)) * 1099511628211u;
  return s;
}

int64_t largest(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
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

AllReduce::AllReduce(const Party& party, const void* in, void* out, const Elements& elements)
    : Steps(party, Kind::kAllReduce, 1, signature_of(elements)),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      elements_(elements) {
  if (elements.bytes() > party.slot_bytes())
    throw Failure("all_reduce: " + std::to_string(elements.bytes()) + " bytes in one step");
}

void AllReduce::write(int64_t, char* slot) { copy(slot, in_, elements_.bytes()); }

void AllReduce::read(int64_t step) {
  const void* in[kMaxRanks];
  for (int rank = 0; rank < party_.ranks(); ++rank) in[rank] = of(step, rank);
  elements_.combine(out_, in, party_.ranks(), elements_.count);
}

ChunkedAllReduce::ChunkedAllReduce(const Party& party, const void* in, void* out,
                                   const Elements& elements)
    : Call(party, Kind::kAllReduce),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      elements_(elements),
      per_chunk_(party.slot_bytes() / elements.size),
      chunks_(divide_up(elements.count, per_chunk_)),
      signature_(signature_of(elements)) {
  signature_.kind = static_cast<uint32_t>(Kind::kAllReduce);
}

void ChunkedAllReduce::begin(uint64_t number) {
  signature_.call = number;
  for (int lane = 0; lane < kLanes; ++lane) {
    base_[lane] = party_.lanes[lane].begun;
    party_.lanes[lane].begun += static_cast<uint64_t>(chunks_);
  }
}

ChunkedAllReduce::Range ChunkedAllReduce::chunk(int64_t index) const {
  return {index * per_chunk_, std::min((index + 1) * per_chunk_, elements_.count)};
}

// In whole lines, so that no two ranks write into one
ChunkedAllReduce::Range ChunkedAllReduce::part(int64_t index, int rank) const {
  const Range all = chunk(index);
  const int64_t n = all.end - all.begin, line = kLine / elements_.size;
  const int64_t each = divide_up(divide_up(n, party_.ranks()), line) * line;
  return {all.begin + std::min(rank * each, n), all.begin + std::min((rank + 1) * each, n)};
}

// The others' parts of the chunk: the own one is combined from the input itself
void ChunkedAllReduce::write(int64_t index) {
  const Lane& lane = party_.lanes[0];
  const uint64_t step = base_[0] + static_cast<uint64_t>(index);
  const Range all = chunk(index), own = part(index, party_.rank);
  const int64_t size = elements_.size;
  char* slot = lane.own(step);
  copy(slot, in_ + all.begin * size, (own.begin - all.begin) * size);
  copy(slot + (own.end - all.begin) * size, in_ + own.end * size, (all.end - own.end) * size);
  lane.post(step, signature_);
}

void ChunkedAllReduce::combine(int64_t index) {
  const Lane &addends = party_.lanes[0], &sums = party_.lanes[1];
  const uint64_t from = base_[0] + static_cast<uint64_t>(index),
                 to = base_[1] + static_cast<uint64_t>(index);
  const Range all = chunk(index), own = part(index, party_.rank);
  const int64_t size = elements_.size, offset = (own.begin - all.begin) * size;
  const void* in[kMaxRanks];
  for (int rank = 0; rank < party_.ranks(); ++rank) {
    check(rank, addends.signature(from, rank), signature_);
    in[rank] = rank == party_.rank ? in_ + own.begin * size : addends.of(from, rank) + offset;
  }
  char* result = out_ + own.begin * size;
  elements_.combine(result, in, party_.ranks(), own.end - own.begin);
  copy(sums.own(to), result, (own.end - own.begin) * size);
  sums.post(to, signature_);
  addends.finish(from);
}

void ChunkedAllReduce::spread(int64_t index) {
  const Lane& sums = party_.lanes[1];
  const uint64_t step = base_[1] + static_cast<uint64_t>(index);
  for (int rank = 0; rank < party_.ranks(); ++rank) {
    const Range theirs = part(index, rank);
    if (rank != party_.rank)
      copy(out_ + theirs.begin * elements_.size, sums.of(step, rank),
           (theirs.end - theirs.begin) * elements_.size);
  }
  sums.finish(step);
}

bool ChunkedAllReduce::advance() {
  const Lane &addends = party_.lanes[0], &sums = party_.lanes[1];
  for (bool moved = true; moved;) {
    moved = false;
    if (written_ < std::min(chunks_, combined_ + kAhead) &&
        addends.free(base_[0] + static_cast<uint64_t>(written_))) {
      write(written_++);
      moved = ++moves_;
    }
    const auto next = static_cast<uint64_t>(combined_);
    if (combined_ < written_ && addends.all_posted(base_[0] + next) && sums.free(base_[1] + next)) {
      combine(combined_++);
      moved = ++moves_;
    }
    if (spread_ < combined_ && sums.all_posted(base_[1] + static_cast<uint64_t>(spread_))) {
      spread(spread_++);
      moved = ++moves_;
    }
  }
  return spread_ == chunks_;
}

std::vector<int> ChunkedAllReduce::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < party_.ranks(); ++rank) {
    const bool late = spread_ < combined_
                          ? !party_.lanes[1].posted(base_[1] + uint64_t(spread_), rank)
                          : !party_.lanes[0].posted(base_[0] + uint64_t(combined_), rank);
    if (late) ranks.push_back(rank);
  }
  return ranks;
}

AllGather::AllGather(const Party& party, const void* in, std::vector<void*> out,
                     std::vector<int64_t> bytes, int root)
    : Steps(party, root < 0 ? Kind::kAllGather : Kind::kGather,
            steps_for(largest(bytes), party.slot_bytes()),
            signature_of(bytes[party.rank], std::max(root, 0))),
      in_(static_cast<const char*>(in)),
      out_(std::move(out)),
      bytes_(std::move(bytes)),
      root_(root) {
  if (root < 0) return;
  for (const int64_t n : bytes_)
    if (n != bytes_[party.rank])
      throw Failure("gather: " + std::to_string(n) + " bytes of one rank and " +
                    std::to_string(bytes_[party.rank]) + " of another must be the same");
  if (root != party.rank) sources_.clear();
}

Signature AllGather::expected(int rank) const {
  return signature_of(bytes_[rank], std::max(root_, 0));
}

void AllGather::write(int64_t step, char* slot) {
  const Piece piece(step, party_.slot_bytes(), bytes_[party_.rank]);
  copy(slot, in_ + piece.begin, piece.length);
}

void AllGather::read(int64_t step) {
  for (const int rank : sources_) {
    const Piece piece(step, party_.slot_bytes(), bytes_[rank]);
    const char* from = rank == party_.rank ? in_ + piece.begin : of(step, rank);
    copy(static_cast<char*>(out_[rank]) + piece.begin, from, piece.length);
  }
}

ReduceScatter::ReduceScatter(const Party& party, std::vector<const void*> in, void* out,
                             std::vector<int64_t> counts, const Elements& like)
    : Steps(party, Kind::kReduceScatter,
            steps_for(largest(counts), share_of(party.slot_bytes(), party.ranks()) / like.size),
            signature_of(like, counts)),
      in_(std::move(in)),
      out_(static_cast<char*>(out)),
      counts_(std::move(counts)),
      like_(like),
      share_(share_of(party.slot_bytes(), party.ranks()) / like.size) {}

void ReduceScatter::write(int64_t step, char* slot) {
  for (int rank = 0; rank < party_.ranks(); ++rank) {
    if (rank == party_.rank) continue;
    const Piece piece(step, share_, counts_[rank]);
    copy(slot + rank * share_ * like_.size,
         static_cast<const char*>(in_[rank]) + piece.begin * like_.size, piece.length * like_.size);
  }
}

void ReduceScatter::read(int64_t step) {
  const int own = party_.rank;
  const Piece piece(step, share_, counts_[own]);
  const void* in[kMaxRanks];
  for (int rank = 0; rank < party_.ranks(); ++rank)
    in[rank] = rank == own ? static_cast<const char*>(in_[own]) + piece.begin * like_.size
                           : of(step, rank) + own * share_ * like_.size;
  like_.combine(out_ + piece.begin * like_.size, in, party_.ranks(), piece.length);
}

Reduce::Reduce(const Party& party, const void* in, void* out, const Elements& elements, int root)
    : Steps(party, Kind::kReduce, steps_for(elements.count, party.slot_bytes() / elements.size),
            signature_of(elements, root)),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      elements_(elements),
      root_(root),
      share_(party.slot_bytes() / elements.size) {
  if (party.rank != root) sources_.clear();
}

void Reduce::write(int64_t step, char* slot) {
  if (party_.rank == root_) return;
  const Piece piece(step, share_, elements_.count);
  copy(slot, in_ + piece.begin * elements_.size, piece.length * elements_.size);
}

void Reduce::read(int64_t step) {
  if (party_.rank != root_) return;
  const Piece piece(step, share_, elements_.count);
  const void* in[kMaxRanks];
  for (int rank = 0; rank < party_.ranks(); ++rank)
    in[rank] = rank == root_ ? in_ + piece.begin * elements_.size : of(step, rank);
  elements_.combine(out_ + piece.begin * elements_.size, in, party_.ranks(), piece.length);
}

Broadcast::Broadcast(const Party& party, void* data, int64_t bytes, int root)
    : Steps(party, Kind::kBroadcast, steps_for(bytes, party.slot_bytes()),
            signature_of(bytes, root)),
      data_(static_cast<char*>(data)),
      bytes_(bytes),
      root_(root) {
  writes_ = party.rank == root;
  if (writes_)
    sources_.clear();
  else
    sources_ = {root};
}

void Broadcast::write(int64_t step, char* slot) {
  const Piece piece(step, party_.slot_bytes(), bytes_);
  copy(slot, data_ + piece.begin, piece.length);
}

void Broadcast::read(int64_t step) {
  if (party_.rank == root_) return;
  const Piece piece(step, party_.slot_bytes(), bytes_);
  copy(data_ + piece.begin, of(step, root_), piece.length);
}

Scatter::Scatter(const Party& party, std::vector<const void*> in, void* out, int64_t bytes,
                 int root)
    : Steps(party, Kind::kScatter, steps_for(bytes, share_of(party.slot_bytes(), party.ranks())),
            signature_of(bytes, root)),
      in_(std::move(in)),
      out_(static_cast<char*>(out)),
      bytes_(bytes),
      share_(share_of(party.slot_bytes(), party.ranks())),
      root_(root) {
  writes_ = party.rank == root;
  if (writes_)
    sources_.clear();
  else
    sources_ = {root};
}

void Scatter::write(int64_t step, char* slot) {
  const Piece piece(step, share_, bytes_);
  for (int rank = 0; rank < party_.ranks(); ++rank) {
    const char* from = static_cast<const char*>(in_[rank]) + piece.begin;
    copy(rank == root_ ? out_ + piece.begin : slot + rank * share_, from, piece.length);
  }
}

void Scatter::read(int64_t step) {
  if (party_.rank == root_) return;
  const Piece piece(step, share_, bytes_);
  copy(out_ + piece.begin, of(step, root_) + party_.rank * share_, piece.length);
}

AllToAll::AllToAll(const Party& party, std::vector<const void*> in, std::vector<int64_t> in_bytes,
                   std::vector<void*> out, std::vector<int64_t> out_bytes)
    : Steps(party, Kind::kAllToAll, 1, {}),
      in_(std::move(in)),
      in_bytes_(std::move(in_bytes)),
      out_(std::move(out)),
      out_bytes_(std::move(out_bytes)),
      share_(share_of(party.slot_bytes(), party.ranks())) {}

void AllToAll::write(int64_t step, char* slot) {
  if (step == 0) return copy(slot, in_bytes_.data(), party_.ranks() * int64_t(sizeof(int64_t)));
  for (int rank = 0; rank < party_.ranks(); ++rank) {
    if (rank == party_.rank) continue;
    const Piece piece(step - 1, share_, in_bytes_[rank]);
    copy(slot + rank * share_, static_cast<const char*>(in_[rank]) + piece.begin, piece.length);
  }
}

void AllToAll::read(int64_t step) {
  const int own = party_.rank;
  if (step == 0) {
    int64_t most = 0;
    for (int rank = 0; rank < party_.ranks(); ++rank) {
      const auto* sent = reinterpret_cast<const int64_t*>(of(0, rank));
      if (sent[own] != out_bytes_[rank])
        throw Failure("all_to_all: rank " + std::to_string(rank) + " sends " +
                      std::to_string(sent[own]) + " bytes to rank " + std::to_string(own) +
                      ", which expects " + std::to_string(out_bytes_[rank]));
      for (int to = 0; to < party_.ranks(); ++to)
        if (to != rank) most = std::max(most, sent[to]);
    }
    steps_ = 1 + divide_up(most, share_);
    return copy(out_[own], in_[own], out_bytes_[own]);
  }
  for (int rank = 0; rank < party_.ranks(); ++rank) {
    if (rank == own) continue;
    const Piece piece(step - 1, share_, out_bytes_[rank]);
    copy(static_cast<char*>(out_[rank]) + piece.begin, of(step, rank) + own * share_, piece.length);
  }
}

}  // namespace tp_ext::shm
