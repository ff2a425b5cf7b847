// The card with a master on its AXI-Lite bus, sources and sinks of frames, and a model of its
// counters. Checks in every cycle: the rules of AXI, and that all counters are the model's.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

#include "Vcard.h"
#include "Vcard___024root.h"
#include "bits.h"
#include "verilated.h"

constexpr int BYTES = DATA_BITS / 8, BYTES_BITS = DATA_BITS == 512 ? 7 : 4, LINES = 5, VES = 8;
constexpr int SLOT_BITS = 4, META = 30, HOST = 7, MAX_LENGTH = 1714, NONE = VES;
constexpr u32 OKAY = 0, SLVERR = 2, ANY = 9;

inline u64 random_state = 1;
inline u64 rnd() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x9e3779b97f4a7c15ull >> 16;
}
inline int below(int n) { return static_cast<int>(rnd() % n); }
inline bool chance(int in_256) { return below(256) < in_256; }

inline int failures = 0;
__attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  if (++failures > 10) return;
  va_list args;
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  printf("\n");
}

// Memories of the counters in the model.
#define CARD(kind, copy) card__DOT__statistics__DOT__##kind##__DOT__##copy##__DOT__words_q
#define LONE(n, copy) CARD(gen_lone__BRA__##n##__KET____DOT__lone, copy)

// For a card that hangs.
[[noreturn]] inline void stop(const char* what) {
  printf("%s: the card hangs\n", what);
  exit(1);
}

using Bytes = std::vector<u8>;

enum Verdict {
  OUT, PUNT_LOCAL, PUNT_NEIGHBOUR, PUNT_EXCEPTION, PUNT_HOOK, PUNT_CONTROL, NOT_FOR_US = 8,
  MALFORMED, POLICY, BLACKHOLE, NO_VE, RATE, SPOOF, QUEUE, OVERSIZE,
};

// A frame and what must become of it.
struct Frame {
  int line = 0, user = 0;
  Bytes bytes, sent;  // as it arrives, as it leaves
  int verdict = 0, slot = NONE, out = LINES - 1, segment = 0, vport = 0;
  bool fault = false, excess = false;
  int port() const { return line == LINES - 1 ? HOST : line; }
};

// An access by the bus and the answer: SLVERR, OKAY, or either.
struct Access {
  bool write;
  u32 address, data;
  int strobe = 15;
  u32 answer = OKAY;
  bool check = false;  // `data` is what a read returns
  u32 got = 0;
};

struct Count { u64 frames = 0, bytes = 0; };
using Lone = u64;

// Counters by index, as in memory.
struct Counters {
  Count received[8], verdicts[(VES + 1) * 128], sent[(VES + 1) * 8];
  Lone oversize[8], lone[3][VES + 1];  // faults, excess, refused
};

class Card {
 public:
  Vcard dut;
  u64 cycle = 0;
  std::deque<Frame> source[LINES];  // frames to send
  // Chances in 256 of a valid beat, of an output's ready, of the bus's valid and ready.
  int valid_chance = 256, ready_chance = 256, bus_chance = 256, answer_chance = 256;
  int outstanding = 8;              // writes of the bus without an answer
  bool watching = true;             // compares the counters in every cycle
  Counters counts{};
  bool changed = true;              // `counts` has changed since the last cycle began
  u64 frames_in = 0, frames_out = 0;
  u64 last_accepted = 0, last_verdict = 0, unqueued = 0;

  Card() {
    dut.clk = dut.rst = 0;
    dut.valid_i = dut.ready_i = 0;
    dut.awvalid_i = dut.wvalid_i = dut.bready_i = dut.arvalid_i = dut.rready_i = 0;
    dut.now_i = 0;
  }

  // Resets in the middle of whatever goes on, and waits until the card is open.
  void reset() {
    dut.rst = 1;
    for (int i = 0; i < 3; i++) edge();
    dut.rst = 0;
    dut.awvalid_i = dut.wvalid_i = dut.arvalid_i = 0;
    dut.valid_i = 0;
    for (int i = 0; i < LINES; i++) {
      source[i].clear();
      at_[i] = 0;
      partial_[i].clear();
      arriving_[i].clear();
    }
    accepted_.clear(); pending_.clear(); accesses_.clear();
    for (auto& queue : waiting_) queue.clear();
    for (auto& queue : leaving_) queue.clear();
    aw_ = w_ = b_ = issued_ = 0;
    b_held_ = r_held_ = false;
    counts = {};
    changed = true;
    memset(lone_due_, 0, sizeof lone_due_);
    watching = false;
    int wait = 0;
    for (;; wait++) {
      dut.awvalid_i = dut.arvalid_i = 1;
      dut.valid_i = (1 << LINES) - 1;
      dut.eval();
      if (dut.awready_o) break;
      if (dut.wready_o || dut.arready_o || dut.ready_o) fail("the card opens in part");
      if (wait > 4000) { fail("the card does not open"); break; }
      edge();
    }
    dut.awvalid_i = dut.arvalid_i = 0;
    dut.valid_i = 0;
    if (wait < (VES + 1) * 128) fail("the card opens %d cycles after a reset", wait);
    edge();  // the last counters are on the way to their memories
    edge();
    watching = true;
  }

  // Queues an access; it takes place during step().
  void put(const Access& access) {
    if (!busy()) answered_ = cycle;
    accesses_.push_back(access);
  }
  bool busy() const { return b_ < accesses_.size(); }
  // Answers since the last call.
  std::vector<Access> finish() {
    while (busy()) step();
    for (int due : lone_due_[2]) if (due) fail("refused writes are not counted");
    std::vector<Access> all(accesses_.begin(), accesses_.end());
    accesses_.clear();
    aw_ = w_ = b_ = issued_ = 0;
    return all;
  }

  // Lets all frames out. Then nothing may be left.
  void drain(const char* where) {
    int old = ready_chance;
    u64 limit = cycle + 400000;
    for (bool left = true; left && cycle < limit;) {
      left = false;
      for (auto& queue : source) left |= !queue.empty();
      if (!left) ready_chance = 256;
      left |= in_flight() + waiting() != 0;
      for (auto& queue : leaving_) left |= !queue.empty();
      step();
      if (cycle == limit) stop(where);
    }
    ready_chance = old;
    for (int i = 0; i < 8; i++) step();
    for (int kind : {0, 1})
      for (int due : lone_due_[kind])
        if (due) fail("%s: faults or excess routes are not counted", where);
  }

  size_t in_flight() const {
    size_t count = accepted_.size();
    for (auto& line : arriving_) count += line.size();
    return count;
  }
  size_t waiting() const {
    size_t count = 0;
    for (auto& queue : waiting_) count += queue.size();
    return count;
  }

  void step() {
    if (busy() && cycle - answered_ > 50000) stop("an access has no answer");
    drive();
    dut.eval();
    if (chance(8)) no_paths();
    observe();
    bool aw = dut.awvalid_i && dut.awready_o, w = dut.wvalid_i && dut.wready_o;
    bool ar = dut.arvalid_i && dut.arready_o;
    u32 taken = dut.valid_i & dut.ready_o;
    edge();
    if (aw) { dut.awvalid_i = 0; aw_++; }
    if (w) { dut.wvalid_i = 0; w_++; }
    if (ar) { dut.arvalid_i = 0; aw_++; w_++; }
    dut.valid_i &= ~taken;
    for (int i = 0; i < LINES; i++) {
      if (!(taken >> i & 1)) continue;
      at_[i] += BYTES;
      if (at_[i] < source[i].front().bytes.size()) continue;
      at_[i] = 0;
      frames_in++;
      last_accepted = cycle;
      arriving_[i].push_back(source[i].front());
      source[i].pop_front();
    }
  }

  // Sets all counters to values that carry into the high word, in the model and in the card.
  void preset() {
    auto& r = *dut.rootp;
    for (auto& count : counts.received) count = high();
    for (auto& count : counts.verdicts) count = high();
    for (auto& count : counts.sent) count = high();
    for (auto& count : counts.oversize) count = high().frames;
    for (auto& all : counts.lone) for (auto& count : all) count = high().frames;
    changed = true;
    memory(counts.received, &r.CARD(received, counters));
    memory(counts.received, &r.CARD(received, readers));
    memory(counts.verdicts, &r.CARD(verdicts, counters));
    memory(counts.verdicts, &r.CARD(verdicts, readers));
    memory(counts.sent, &r.CARD(sent, counters));
    memory(counts.sent, &r.CARD(sent, readers));
    memory(counts.oversize, &r.CARD(oversize, counters));
    memory(counts.oversize, &r.CARD(oversize, readers));
    memory(counts.lone[0], &r.LONE(0, counters));
    memory(counts.lone[0], &r.LONE(0, readers));
    memory(counts.lone[1], &r.LONE(1, counters));
    memory(counts.lone[1], &r.LONE(1, readers));
    memory(counts.lone[2], &r.LONE(2, counters));
    memory(counts.lone[2], &r.LONE(2, readers));
  }

 private:
  size_t at_[LINES] = {};
  std::deque<Frame> arriving_[LINES];   // up to `accepted` or `oversize`
  std::deque<Frame> accepted_;          // up to the verdict
  std::deque<Frame> waiting_[LINES << SLOT_BITS], leaving_[LINES << SLOT_BITS];
  Bytes partial_[LINES];
  // Additions to the counters: cycle in which the memories have them.
  struct Addition { u64 due; u64* frames; u64* bytes; u64 length; };
  std::deque<Addition> pending_;
  Counters counts_before_{};  // without the last cycle's additions
  std::deque<Access> accesses_;
  size_t aw_ = 0, w_ = 0, b_ = 0, issued_ = 0;  // accesses with an address, with data, answered
  int lone_due_[3][VES + 1] = {};  // faults, excess routes, and refused writes without an event
  u64 answered_ = 0;  // cycle of the last answer
  bool b_held_ = false, r_held_ = false;
  u32 b_was_ = 0, r_was_ = 0, d_was_ = 0;

  static Count high() { return {rnd() << 32 | (0xffffffff - below(40)), rnd() << 32 | 0xfffff000}; }
  template <class Model, class Memory>
  static void memory(const Model& model, Memory* words) {
    static_assert(sizeof model == sizeof *words);
    memcpy(words, &model, sizeof model);
  }

  void edge() {
    dut.now_i = cycle;
    dut.clk = 1;
    dut.eval();
    dut.clk = 0;
    dut.eval();
    cycle++;
  }

  void drive() {
    for (int i = 0; i < LINES; i++) {
      put_bit(dut.ready_i, i, chance(ready_chance));
      if (dut.valid_i >> i & 1 || source[i].empty() || !chance(valid_chance)) continue;
      const Frame& frame = source[i].front();
      size_t left = frame.bytes.size() - at_[i], now = left < BYTES ? left : BYTES;
      u8* data = reinterpret_cast<u8*>(&dut.data_i) + BYTES * i;
      for (size_t k = 0; k < BYTES; k++) data[k] = k < now ? frame.bytes[at_[i] + k] : u8(rnd());
      ::put(dut.bytes_i, BYTES_BITS * i, BYTES_BITS, now);
      ::put(dut.last_i, i, 1, left <= BYTES);
      ::put(dut.user_i, 12 * i, 12, frame.user);
      put_bit(dut.valid_i, i, true);
    }
    // Reads wait for the writes before them, and writes for the reads.
    while (issued_ < accesses_.size() && issued_ - b_ < static_cast<size_t>(outstanding)
           && (issued_ == b_ || accesses_[issued_].write == accesses_[issued_ - 1].write))
      issued_++;
    dut.bready_i = chance(answer_chance);
    dut.rready_i = chance(answer_chance);
    if (!dut.awvalid_i && aw_ < issued_ && accesses_[aw_].write && chance(bus_chance)) {
      dut.awvalid_i = 1;
      dut.awaddr_i = accesses_[aw_].address;
    }
    if (!dut.wvalid_i && w_ < issued_ && accesses_[w_].write && chance(bus_chance)) {
      dut.wvalid_i = 1;
      dut.wdata_i = accesses_[w_].data;
      dut.wstrb_i = accesses_[w_].strobe;
    }
    if (!dut.arvalid_i && aw_ < issued_ && !accesses_[aw_].write && chance(bus_chance)) {
      dut.arvalid_i = 1;
      dut.araddr_i = accesses_[aw_].address;
    }
  }
  template <class Port>
  static void put_bit(Port& port, int bit, bool value) {
    port = (port & ~(1 << bit)) | value << bit;
  }

  // No input of the bus reaches an output of it within a cycle.
  void no_paths() {
    auto outputs = [&] {
      return u64(dut.rdata_o) << 16 | dut.awready_o << 9 | dut.wready_o << 8 | dut.bvalid_o << 7
          | dut.bresp_o << 5 | dut.arready_o << 4 | dut.rvalid_o << 3 | dut.rresp_o;
    };
    u64 before = outputs();
    auto flip = [&] {
      dut.awvalid_i ^= 1; dut.wvalid_i ^= 1; dut.bready_i ^= 1; dut.arvalid_i ^= 1;
      dut.rready_i ^= 1; dut.awaddr_i ^= 0x1ffffff; dut.araddr_i ^= 0x1ffffff;
      dut.wdata_i = ~dut.wdata_i; dut.wstrb_i ^= 15;
      dut.eval();
    };
    flip();
    if (outputs() != before) fail("an input of the bus reaches an output in the same cycle");
    flip();
  }

  void add(u64* frames, u64* bytes, u64 length) {
    pending_.push_back({cycle + 3, frames, bytes, length});
  }
  void add(Count& count, u64 length) { add(&count.frames, &count.bytes, length); }

  void observe() {
    if (changed) counts_before_ = counts;
    changed = false;
    while (!pending_.empty() && pending_.front().due <= cycle) {
      changed = true;
      Addition& one = pending_.front();
      ++*one.frames;
      if (one.bytes) *one.bytes += one.length;
      pending_.pop_front();
    }
    if (watching) compare();
    events();
    for (int i = 0; i < LINES; i++) output(i);
    bus();
  }

  // A memory may take a word one cycle later.
  void compare() {
    auto& r = *dut.rootp;
    const Counters &now = counts, &old = counts_before_;
    same("received", now.received, old.received, &r.CARD(received, counters));
    same("received", now.received, old.received, &r.CARD(received, readers));
    same("verdict", now.verdicts, old.verdicts, &r.CARD(verdicts, counters));
    same("verdict", now.verdicts, old.verdicts, &r.CARD(verdicts, readers));
    same("sent", now.sent, old.sent, &r.CARD(sent, counters));
    same("sent", now.sent, old.sent, &r.CARD(sent, readers));
    same("oversize", now.oversize, old.oversize, &r.CARD(oversize, counters));
    same("oversize", now.oversize, old.oversize, &r.CARD(oversize, readers));
    same("fault", now.lone[0], old.lone[0], &r.LONE(0, counters));
    same("fault", now.lone[0], old.lone[0], &r.LONE(0, readers));
    same("excess", now.lone[1], old.lone[1], &r.LONE(1, counters));
    same("excess", now.lone[1], old.lone[1], &r.LONE(1, readers));
    same("refused", now.lone[2], old.lone[2], &r.LONE(2, counters));
    same("refused", now.lone[2], old.lone[2], &r.LONE(2, readers));
  }
  template <class Model, class Memory>
  void same(const char* name, const Model& now, const Model& old, const Memory* words) {
    static_assert(sizeof now == sizeof *words);
    if (!memcmp(&now, words, sizeof now) || !memcmp(&old, words, sizeof old)) return;
    fail("cycle %llu: a counter of kind %s differs", (unsigned long long)cycle, name);
    watching = false;
  }

  void events() {
    auto& r = *dut.rootp;
    if (r.card__DOT__accepted && r.card__DOT__oversize) fail("a frame is accepted and too long");
    if (r.card__DOT__accepted || r.card__DOT__oversize) {
      bool accepted = r.card__DOT__accepted;
      u32 ingress = r.card__DOT__accepted_ingress;
      int port = accepted ? ingress >> 11 : u32(r.card__DOT__oversize_port);
      int line = port == HOST ? LINES - 1 : port;
      if (line >= LINES || arriving_[line].empty()) {
        fail("port %d received no frame", port);
      } else {
        Frame frame = arriving_[line].front();
        arriving_[line].pop_front();
        if ((frame.verdict == OVERSIZE) == accepted)
          fail("a frame of %zu bytes is taken for another", frame.bytes.size());
        u64 length = frame.bytes.size();
        if (accepted && (ingress & 0x7ff) != length) fail("an accepted frame's length differs");
        add(counts.received[port], accepted ? length : 0);
        if (!accepted) add(&counts.oversize[port], nullptr, 0);
        else accepted_.push_back(frame);
      }
    }
    int verdicts = r.card__DOT__dropped + r.card__DOT__unqueued + r.card__DOT__queued;
    if (verdicts > 1) fail("two verdicts on a frame");
    if (verdicts == 1) verdict();
    if (r.card__DOT__sent) {
      int queue = r.card__DOT__sent_queue;
      if (queue >= LINES << SLOT_BITS || waiting_[queue].empty()) {
        fail("queue %d has no frame", queue);
      } else {
        Frame frame = waiting_[queue].front();
        waiting_[queue].pop_front();
        int out = queue >> SLOT_BITS, slot = queue & ((1 << SLOT_BITS) - 1);
        add(counts.sent[8 * slot + (out == LINES - 1 ? HOST : out)], frame.sent.size());
        leaving_[queue].push_back(frame);
      }
    }
    int ve = r.card__DOT__header_ve;
    if (r.card__DOT__fault) { add(&counts.lone[0][ve], nullptr, 0); lone_due_[0][ve]--; }
    if (r.card__DOT__excess) { add(&counts.lone[1][ve], nullptr, 0); lone_due_[1][ve]--; }
  }

  void verdict() {
    auto& r = *dut.rootp;
    if (accepted_.empty()) { fail("a verdict on no frame"); return; }
    Frame frame = accepted_.front();
    accepted_.pop_front();
    last_verdict = cycle;
    u32 meta = r.card__DOT__meta, ingress = r.card__DOT__ingress;
    bool owned = meta >> 24 & 1;
    int verdict = meta >> 26, slot = owned ? meta >> 16 & 255 : NONE;
    if (verdict != frame.verdict || slot != frame.slot)
      fail("cycle %llu: verdict %d of slot %d, not %d of slot %d", (unsigned long long)cycle,
           verdict, slot, frame.verdict, frame.slot);
    if (ingress != (u32(frame.port()) << 11 | frame.bytes.size()))
      fail("cycle %llu: a verdict's ingress differs", (unsigned long long)cycle);
    lone_due_[0][frame.slot] += frame.fault;
    lone_due_[1][frame.slot] += frame.excess;
    if (frame.verdict >= 8 && !r.card__DOT__dropped) fail("a dropped frame goes on");
    if (frame.verdict < 8 && r.card__DOT__dropped) fail("a frame is dropped");
    int counted = r.card__DOT__unqueued ? int(QUEUE) : frame.verdict;
    add(counts.verdicts[frame.slot * 128 + frame.port() * 16 + counted], frame.bytes.size());
    unqueued += r.card__DOT__unqueued;
    if (r.card__DOT__queued) waiting_[frame.out << SLOT_BITS | frame.slot].push_back(frame);
  }

  void output(int i) {
    if (!(dut.valid_o >> i & 1) || !(dut.ready_i >> i & 1)) return;
    int count = get(dut.bytes_o, BYTES_BITS * i, BYTES_BITS);
    const u8* data = reinterpret_cast<const u8*>(&dut.data_o) + BYTES * i;
    partial_[i].insert(partial_[i].end(), data, data + count);
    if (!(dut.last_o >> i & 1)) return;
    u32 meta = get(dut.meta_o, META * i, META);
    int slot = meta >> 24 & 1 ? meta >> 16 & 255 : NONE, queue = i << SLOT_BITS | slot;
    if (slot > VES || leaving_[queue].empty()) {
      fail("output %d: a frame of slot %d comes from nowhere", i, slot);
    } else {
      Frame frame = leaving_[queue].front();
      leaving_[queue].pop_front();
      frames_out++;
      if (partial_[i] != frame.sent || int(meta & 0xfff) != frame.segment
          || int(meta >> 12 & 15) != frame.vport)
        fail("cycle %llu: output %d: a frame of %zu bytes differs from %zu bytes",
             (unsigned long long)cycle, i, partial_[i].size(), frame.sent.size());
    }
    partial_[i].clear();
  }

  void bus() {
    auto& r = *dut.rootp;
    if (b_held_ && (!dut.bvalid_o || dut.bresp_o != b_was_)) fail("a write's answer changes");
    if (r_held_ && (!dut.rvalid_o || dut.rresp_o != r_was_ || dut.rdata_o != d_was_))
      fail("a read's answer changes");
    b_held_ = dut.bvalid_o && !dut.bready_i;
    r_held_ = dut.rvalid_o && !dut.rready_i;
    b_was_ = dut.bresp_o;
    r_was_ = dut.rresp_o;
    d_was_ = dut.rdata_o;
    if (r.card__DOT__refused) {
      add(&counts.lone[2][r.card__DOT__refused_slot], nullptr, 0);
      lone_due_[2][r.card__DOT__refused_slot]--;
    }
    if (dut.bvalid_o && dut.bready_i) {
      size_t both = aw_ < w_ ? aw_ : w_;
      if (b_ >= both || !accesses_[b_].write) { fail("an answer without a write"); return; }
      answer(dut.bresp_o);
    }
    if (dut.rvalid_o && dut.rready_i) {
      if (b_ >= aw_ || accesses_[b_].write) { fail("an answer without a read"); return; }
      Access& one = accesses_[b_];
      one.got = dut.rdata_o;
      if (one.check && one.got != (dut.rresp_o == OKAY ? one.data : 0))
        fail("cycle %llu: register %07x is %08x, not %08x", (unsigned long long)cycle, one.address,
             one.got, one.data);
      answer(dut.rresp_o);
    }
  }
  void answer(u32 response) {
    Access& one = accesses_[b_++];
    answered_ = cycle;
    if (one.answer == ANY ? response != OKAY && response != SLVERR : response != one.answer)
      fail("cycle %llu: %s %07x, data %08x, strobe %x: answer %u", (unsigned long long)cycle,
           one.write ? "write to" : "read of", one.address, one.data, one.strobe, response);
    one.answer = response;
    int page = one.address >> 16;
    if (one.write && response == SLVERR) lone_due_[2][page && page <= VES ? page - 1 : NONE]++;
  }
};
