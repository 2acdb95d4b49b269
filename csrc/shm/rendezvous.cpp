#include "shm/rendezvous.h"

#include <algorithm>
#include <memory>
#include <thread>

#include "shm/core/engine.h"

namespace tp_ext::shm {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string word_key(int rank) { return "tp_shm/rank/" + std::to_string(rank); }
std::string offer_key(const std::string& number) { return "tp_shm/offer/" + number; }

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

// Containers have different host names, and may share the memory nevertheless
std::string machine(const std::string& host) { return host.substr(0, host.rfind(':')); }
std::string shown(const std::string& host) { return host.substr(host.rfind(':') + 1); }

class Rendezvous {
 public:
  Rendezvous(c10d::Store& store, int rank, int size, milliseconds timeout, const Geometry& geometry,
             const std::string& name)
      : store_(store),
        rank_(rank),
        timeout_(timeout),
        deadline_(deadline_in(timeout)),
        geometry_(geometry),
        name_(name),
        peers_(size) {
    for (int peer = 1; peer < size; ++peer) words_.push_back(word_key(peer));
  }

  Segment lead();
  Segment join();

 private:
  // Rank 0's knowledge of another rank
  struct Peer {
    std::string number;   // the last one answered
    std::string trouble;  // its reply if it cannot join
  };

  int size() const { return geometry_.ranks; }
  static Header& header(const Segment& segment) { return *static_cast<Header*>(segment.base()); }
  std::string cannot(const std::string& troubles) const {
    return "tp_shm: group '" + name_ + "' cannot be made: " + troubles;
  }
  std::string waited(const std::vector<int>& ranks, const std::string& more) const {
    return "tp_shm: waited " + std::to_string(timeout_.count()) + " ms for " + listed(ranks) +
           (ranks.size() == 1 ? ", which has" : ", which have") + " not come to make the group" +
           more;
  }
  // Ranks that have not joined, or have died since
  std::vector<int> absent(const Segment& segment) const {
    const uint64_t joined = header(segment).joined.load(std::memory_order_acquire);
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank)
      if (!(joined >> rank & 1) || !segment.alive(rank)) ranks.push_back(rank);
    return ranks;
  }

  std::vector<std::string> words_now();
  void answer(const std::vector<std::string>& words, const std::string& offer);
  void wait_for_words();
  void wait_for_all(const Segment& segment);
  void refuse(const std::string& why) noexcept;

  std::string await_offer(const std::string& number);
  Segment open(const std::string& offer) const;
  void await_made(const Segment& segment) const;

  c10d::Store& store_;
  const int rank_;
  const milliseconds timeout_;
  const Clock::time_point deadline_;
  const Geometry geometry_;
  const std::string name_;
  std::vector<std::string> words_;  // keys of the ranks from 1 on
  std::vector<Peer> peers_;
};

// The keys of ranks 1 and up, "" where a rank has not written one yet; does not wait
std::vector<std::string> Rendezvous::words_now() {
  std::vector<std::string> words;
  for (const auto& key : words_)
    words.push_back(store_.check({key}) ? text_of(store_.get(key)) : "");
  return words;
}

// The message of a store's error, without the stack of calls that torch appends
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

std::vector<int> silent(const std::vector<std::string>& words) {
  std::vector<int> ranks;
  for (size_t i = 0; i < words.size(); ++i)
    if (words[i].empty()) ranks.push_back(static_cast<int>(i) + 1);
  return ranks;
}

// Makes the offer to each new number
void Rendezvous::answer(const std::vector<std::string>& words, const std::string& offer) {
  std::vector<std::string> keys;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    Peer& peer = peers_[i + 1];
    if (word.empty() || word == peer.number) continue;
    if (word[0] != '!') {
      peer = {word, ""};
      keys.push_back(offer_key(word));
    } else if (!peer.number.empty() && word.compare(1, peer.number.size(), peer.number) == 0) {
      peer.trouble = word.substr(1 + peer.number.size());
    }
  }
  if (!keys.empty()) store_.multiSet(keys, {keys.size(), bytes_of(offer)});
}

// Waits until each rank has written a key; in a store that knows the group from before that is at
// once
void Rendezvous::wait_for_words() {
  try {
    store_.wait(words_, timeout_);
  } catch (const std::exception& error) {
    throw Failure(waited(silent(words_now()), ": " + first_line(error)));
  }
}

// Offers the segment until all have joined. After the first rank that cannot, the other ranks with
// an offer get another second to reply, so that the error names all causes.
void Rendezvous::wait_for_all(const Segment& segment) {
  const std::string offer = host_identity() + "\n" + segment.name();
  auto until = deadline_;
  for (milliseconds interval = 2ms;; interval = std::min(2 * interval, milliseconds(64))) {
    std::vector<std::string> words;
    for (const auto& word : store_.multiGet(words_)) words.push_back(text_of(word));
    answer(words, offer);
    const auto next = std::min(until, Clock::now() + interval);
    std::vector<int> missing = absent(segment);
    while (!missing.empty() && Clock::now() < next) {
      std::this_thread::sleep_for(50us);
      missing = absent(segment);
    }
    if (missing.empty()) return;
    if (const auto reason = reason_of(header(segment)); !reason.empty()) throw Failure(reason);
    std::string troubles;
    bool complete = true;
    for (const int rank : missing) {
      const Peer& peer = peers_[rank];
      if (!peer.trouble.empty())
        troubles += (troubles.empty() ? "" : "; ") + peer.trouble;
      else if (!peer.number.empty())
        complete = false;
    }
    if (!troubles.empty()) until = std::min(until, Clock::now() + 1s);
    const bool late = Clock::now() >= until;
    if (!troubles.empty() && (complete || late)) throw Failure(cannot(troubles));
    if (late) throw Failure(waited(missing, ""));
  }
}

// Answers the ranks without an answer, before the deadline; those with one find the reason in the
// segment
void Rendezvous::refuse(const std::string& why) noexcept {
  try {
    for (;;) {
      answer(words_now(), "!" + why);
      const bool all = std::all_of(peers_.begin() + 1, peers_.end(),
                                   [](const Peer& peer) { return !peer.number.empty(); });
      if (all || Clock::now() >= deadline_) return;
      std::this_thread::sleep_for(10ms);
    }
  } catch (const std::exception&) {  // the store is gone: the other ranks will notice themselves
  }
}

Segment Rendezvous::lead() {
  std::unique_ptr<Segment> segment;
  try {
    try {
      segment = std::make_unique<Segment>(Segment::create(geometry_.bytes(), geometry_.reserved()));
      segment->mark_alive(0);
    } catch (const Failure& error) {
      throw Failure(cannot(std::string("rank 0: ") + error.what()));
    }
    Header& head = header(*segment);
    head.bytes = static_cast<uint64_t>(geometry_.bytes());
    head.ranks = static_cast<uint32_t>(size());
    head.magic = kMagic;
    head.joined.fetch_or(1, std::memory_order_release);
    if (size() > 1) {
      wait_for_words();
      wait_for_all(*segment);
    }
    segment->unlink();
    head.made.store(1, std::memory_order_release);
    return std::move(*segment);
  } catch (const std::exception& error) {
    if (segment) abort_group(header(*segment), 0, error.what());
    refuse(error.what());
    throw;
  }
}

std::string Rendezvous::await_offer(const std::string& number) {
  const std::string key = offer_key(number);
  try {
    store_.wait({key}, timeout_);
  } catch (const std::exception& error) {
    std::vector<int> ranks = silent(words_now());
    if (ranks.empty()) ranks.push_back(0);
    throw Failure(waited(ranks, ": " + first_line(error)));
  }
  const std::string offer = text_of(store_.get(key));
  store_.set(word_key(rank_), bytes_of(""));
  try {
    store_.deleteKey(key);
  } catch (const std::exception&) {  // a Python store may lack delete; no rank reads the key again
  }
  if (!offer.empty() && offer[0] == '!') throw Failure(offer.substr(1));
  return offer;
}

Segment Rendezvous::open(const std::string& offer) const {
  const std::string host = offer.substr(0, offer.find('\n')), own = host_identity();
  if (machine(host) != machine(own))
    throw Failure("rank 0 runs on host " + shown(host) + ", rank " + std::to_string(rank_) +
                  " on host " + shown(own) +
                  ", or they do not share /dev/shm: all ranks must share the memory of one host; "
                  "use gloo between hosts");
  try {
    Segment segment =
        Segment::open(offer.substr(std::min(host.size() + 1, offer.size())), geometry_.bytes());
    const Header& head = header(segment);
    if (head.magic != kMagic || head.ranks != static_cast<uint32_t>(size()) ||
        head.bytes != static_cast<uint64_t>(geometry_.bytes()))
      throw Failure("shared memory " + segment.name() + ": is not of a group of " +
                    std::to_string(size()));
    segment.mark_alive(rank_);
    return segment;
  } catch (const Failure& error) {
    throw Failure("rank " + std::to_string(rank_) + ": " + error.what());
  }
}

// Waits until rank 0 has seen all of them
void Rendezvous::await_made(const Segment& segment) const {
  Header& head = header(segment);
  const auto fail = [&](const std::string& why) {
    abort_group(head, rank_, why);
    throw Failure(why);
  };
  while (!head.made.load(std::memory_order_acquire)) {
    if (const auto reason = reason_of(head); !reason.empty()) throw Failure(reason);
    if (!segment.alive(0) && !head.made.load(std::memory_order_acquire))
      fail(cannot("rank 0 has died"));
    if (Clock::now() >= deadline_) fail(waited(absent(segment), ""));
    std::this_thread::sleep_for(50us);
  }
}

Segment Rendezvous::join() {
  const std::string number = random_number(), word = word_key(rank_);
  store_.set(word, bytes_of(number));
  std::string last;
  try {
    const std::string offer = await_offer(number);
    std::unique_ptr<Segment> segment;
    try {
      segment = std::make_unique<Segment>(open(offer));
    } catch (const Failure& error) {
      last = "!" + number + error.what();
      throw Failure(cannot(error.what()));
    }
    header(*segment).joined.fetch_or(uint64_t(1) << rank_, std::memory_order_release);
    await_made(*segment);
    return std::move(*segment);
  } catch (const std::exception&) {
    try {
      store_.set(word, bytes_of(last));
      store_.check({word});
    } catch (const std::exception&) {  // the first error says more
    }
    throw;
  }
}

}  // namespace

Geometry geometry_for(int ranks) { return {ranks, 128 << 10, 256 << 10}; }

Segment meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::chrono::milliseconds timeout, const Geometry& geometry, const std::string& name) {
  Rendezvous rendezvous(*store, rank, size, timeout, geometry, name);
  return rank == 0 ? rendezvous.lead() : rendezvous.join();
}

}  // namespace tp_ext::shm
