// How the tokens of each sequence are cut over the ranks of a context group, and the rectangles of
// queries and keys that a rank computes against another rank's block of keys and values.
//
// A sequence consists of chunks; rank r holds chunk r and, if there are 2 p, chunk 2 p - 1 - r. A
// rank's block holds its chunks of sequence 0, 1, .., those of a sequence in their order.

#pragma once

#include <c10/util/ArrayRef.h>
#include <algorithm>
#include <optional>
#include <vector>

namespace tp_ext {

struct SequenceChunk {
  int64_t row, start, length;  // its first token's row in the block, and place in the sequence
};

// Queries [q_row, + queries) of this rank's block against keys [k_row, + keys) of another
struct Tile {
  int64_t sequence, first, count;  // the queries are `count` chunks from the `first` held on
  int64_t q_row, queries, q_start;
  int64_t k_row, keys, k_start;
  bool diagonal;  // the same tokens, causal; otherwise every query attends to every key
};

class ContextTiles {
 public:
  // lengths: of all chunks, per_sequence = p or 2 p of each sequence (1 if p = 1)
  ContextTiles(c10::IntArrayRef lengths, int64_t per_sequence, int64_t p)
      : per_rank_(per_sequence / p), tokens_(p, 0) {
    const auto count = static_cast<int64_t>(lengths.size()) / per_sequence;
    chunks_.resize(p);
    for (int64_t s = 0; s < count; ++s) {
      lengths_.push_back(0);
      for (int64_t c = 0; c < per_sequence; ++c) {
        const int64_t n = lengths[s * per_sequence + c], owner = c < p ? c : per_sequence - 1 - c;
        chunks_[owner].push_back({tokens_[owner], lengths_.back(), n});
        tokens_[owner] += n;
        lengths_.back() += n;
      }
    }
  }

  int64_t sequences() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t length(int64_t sequence) const { return lengths_[sequence]; }
  int64_t per_rank() const { return per_rank_; }  // chunks of a sequence that a rank holds
  int64_t tokens(int64_t rank) const { return tokens_[rank]; }
  bool empty() const {
    return std::all_of(tokens_.begin(), tokens_.end(), [](int64_t n) { return n == 0; });
  }
  const SequenceChunk& chunk(int64_t rank, int64_t sequence, int64_t i) const {
    return chunks_[rank][sequence * per_rank_ + i];
  }

  // One tile for each sequence with something to compute: all tokens of two ranks' chunks stand in
  // one order, so what may be attended to is a rectangle, or this rank's triangle
  std::vector<Tile> rectangles(int64_t rank, int64_t owner, bool causal) const {
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < sequences(); ++s) {
      int64_t first = 0, k_count = per_rank_;
      if (causal && owner < rank) k_count = 1;
      if (causal && owner > rank) first = 1;
      add(tiles, s, {rank, first, per_rank_ - first}, {owner, 0, k_count}, causal && owner == rank);
    }
    return tiles;
  }

  // One tile for each pair of chunks, whose tokens are neighbours in their sequence, of which some
  // query may attend to some key: j <= i if causal, i - window < j < i + window
  std::vector<Tile> pairs(int64_t rank, int64_t owner, bool causal,
                          std::optional<int64_t> window) const {
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < sequences(); ++s)
      for (int64_t i = 0; i < per_rank_; ++i)
        for (int64_t j = 0; j < per_rank_; ++j) {
          const SequenceChunk &q = chunk(rank, s, i), &k = chunk(owner, s, j);
          const int64_t q_last = q.start + q.length - 1, k_last = k.start + k.length - 1;
          if (causal && k.start > q_last) continue;
          if (window && (k_last <= q.start - *window || k.start >= q_last + *window)) continue;
          add(tiles, s, {rank, i, 1}, {owner, j, 1}, false);
        }
    return tiles;
  }

 private:
  // Consecutive chunks of a sequence in the block of a rank
  struct Chunks {
    int64_t rank, first, count;
  };

  void add(std::vector<Tile>& tiles, int64_t s, Chunks queries, Chunks keys, bool diagonal) const {
    Tile tile{s, queries.first, queries.count, 0, 0, 0, 0, 0, 0, diagonal};
    if (queries.count == 0 || keys.count == 0) return;
    const SequenceChunk &q = chunk(queries.rank, s, queries.first),
                        &k = chunk(keys.rank, s, keys.first);
    tile.q_row = q.row, tile.q_start = q.start, tile.k_row = k.row, tile.k_start = k.start;
    for (int64_t i = 0; i < queries.count; ++i)
      tile.queries += chunk(queries.rank, s, queries.first + i).length;
    for (int64_t i = 0; i < keys.count; ++i)
      tile.keys += chunk(keys.rank, s, keys.first + i).length;
    if (tile.queries > 0 && tile.keys > 0) tiles.push_back(tile);
  }

  int64_t per_rank_;
  std::vector<int64_t> tokens_, lengths_;
  std::vector<std::vector<SequenceChunk>> chunks_;  // of each rank, in the order of its block
};

}  // namespace tp_ext
