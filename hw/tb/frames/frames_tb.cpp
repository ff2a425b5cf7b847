// Tests of card_frames. The header pipeline is a delay of LATENCY cycles with random results. With
// SINGLE, the model has one queue per output for all VEs.
//
// The model follows each frame by its place: ports keep the order of frames, results keep the order
// of header records, and each queue keeps the order of its frames.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "Vcard_frames.h"
#include "bits.h"
#include "verilated.h"

constexpr int slots(int used) { return used > 1 ? 2 * slots((used + 1) / 2) : 1; }
constexpr int BYTES = DATA_BITS / 8, LINES = 5, SLOTS = slots(VES + 1), LATENCY = 56, HOST = 7;
constexpr int USED = LINES * (VES + 1);  // queues
constexpr int BYTES_BITS = DATA_BITS == 512 ? 7 : 4, MAX_LENGTH = 1714, META = 30;
constexpr int MAX_BEATS = (MAX_LENGTH + BYTES - 1) / BYTES, PER_64 = 64 / BYTES;

static u64 random_state = 1;
static u64 rnd() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x9e3779b97f4a7c15ull >> 16;
}
static int below(int n) { return static_cast<int>(rnd() % n); }

static int failures = 0;
template <class... Args>
static void fail(const char* format, Args... args) {
  if (++failures <= 10) { printf(format, args...); printf("\n"); }
}

static int cells(int length) { return (length + 63) / 64; }

struct Frame {
  u64 id;
  int length, user, ve, out, verdict, cut;  // `out`: 0..4; 5: no such port
  bool owned;
  std::vector<u8> bytes() const {  // the first 8 bytes are the id
    std::vector<u8> all(length);
    u64 state = id;
    for (int i = 0; i < length; i++) {
      if (i % 8 == 0 && i) state = state * 6364136223846793005ull + 1442695040888963407ull;
      all[i] = state >> (8 * (i % 8));
    }
    return all;
  }
  int queue() const { return out * SLOTS + (SINGLE ? 0 : owned ? ve : VES); }
};

struct Quota { int guarantee = 0, share = 0; };

struct Bench {
  Vcard_frames dut;
  u64 cycle = 0, next_id = 1;
  // Traffic: the next frame of an input, or none; the chance in 256 of valid and of ready.
  std::function<bool(int, Frame&)> source;
  int valid_chance[LINES], pause_chance = 0;
  int delay = LATENCY;  // of the header pipeline; a longer one fills card_store
  std::function<bool(int)> ready = [](int) { return true; };

  struct Input { bool busy = false; Frame frame; std::vector<u8> bytes; int at = 0; };
  Input input[LINES];
  std::deque<Frame> sent[LINES];                        // on the way to the header record
  std::deque<std::pair<u64, Frame>> header;             // in the header pipeline
  std::deque<Frame> results;                            // on the way to the queues
  std::map<int, std::deque<Frame>> queued;              // per queue, up to the output
  std::map<int, std::deque<Frame>> waiting;             // per queue, up to the scheduler
  std::vector<u8> partial[LINES];
  Quota quota[LINES * SLOTS];
  int pool = 0;
  // Cells per queue: `low` without and `high` with those that may be free already.
  int low[LINES * SLOTS] = {}, high[LINES * SLOTS] = {};
  std::deque<std::pair<u64, std::pair<int, int>>> freeing;
  u64 all_in = 0, all_out = 0, all_lost = 0;
  u64 in = 0, out = 0, oversize = 0, by_verdict = 0, by_queue = 0, out_bytes[LINES][VES + 1] = {};
  u64 lost[VES] = {}, accepted_beats = 0, out_beats = 0, last_in = 0, first_out = 0;
  bool held[LINES] = {};
  std::vector<u8> held_data[LINES];

  Bench() {
    dut.clk = 0;
    dut.valid_i = dut.result_valid_i = dut.wr_quota_i = dut.wr_weight_i = dut.ready_i = 0;
    for (int& chance : valid_chance) chance = 256;
    source = [](int, Frame&) { return false; };
    reset();
  }

  void forget() {
    for (int i = 0; i < LINES; i++) {
      input[i] = Input();
      sent[i].clear();
      partial[i].clear();
      held[i] = false;
    }
    header.clear(); results.clear(); queued.clear(); waiting.clear(); freeing.clear();
    memset(low, 0, sizeof low);
    memset(high, 0, sizeof high);
    in = out = oversize = by_verdict = by_queue = 0;
  }

  void reset() { dut.rst = 1; step(); dut.rst = 0; forget(); }

  void set(int queue, Quota q, int weight) {
    if (pool <= CELLS) quota[queue] = q;
    dut.wr_quota_i = dut.wr_weight_i = 1;
    dut.wr_queue_i = queue;
    dut.wr_quota_data_i = u32(q.guarantee) << 16 | q.share;
    dut.wr_weight_data_i = weight;
    step();
    dut.wr_quota_i = dut.wr_weight_i = 0;
  }
  void set_all(Quota q, int pool_cells) {
    pool = pool_cells;
    dut.pool_i = pool_cells;
    for (int queue = 0; queue < LINES * SLOTS; queue++) set(queue, q, 1 + below(4));
  }

  void drive() {
    for (int i = 0; i < LINES; i++) {
      Input& line = input[i];
      bool was = dut.valid_i >> i & 1;
      if (!line.busy && below(256) < valid_chance[i] && source(i, line.frame)) {
        line.frame.id = next_id++ * 0x9e3779b97f4a7c15ull;
        line.busy = true;
        line.bytes = line.frame.bytes();
        line.at = 0;
        was = true;
      }
      bool valid = line.busy && (was || below(256) >= pause_chance);
      put(dut.valid_i, i, 1, valid);
      if (!valid) continue;
      int left = static_cast<int>(line.bytes.size()) - line.at, now = std::min(left, BYTES);
      u8* data = reinterpret_cast<u8*>(&dut.data_i) + BYTES * i;
      for (int k = 0; k < BYTES; k++) data[k] = k < now ? line.bytes[line.at + k] : u8(rnd());
      put(dut.bytes_i, BYTES_BITS * i, BYTES_BITS, now);
      put(dut.last_i, i, 1, left <= BYTES);
      put(dut.user_i, 12 * i, 12, line.frame.user);
      put(dut.ready_i, i, 1, 0);
    }
    for (int i = 0; i < LINES; i++) put(dut.ready_i, i, 1, ready(i));
    bool result = !header.empty() && header.front().first <= cycle;
    dut.result_valid_i = result;
    if (!result) return;
    Frame frame = header.front().second;
    header.pop_front();
    auto& port = dut.result_i;
    std::vector<u8> bytes = frame.bytes();
    for (int i = 0; i < 64; i++)
      put(port, 60 + 8 * i, 8, i < frame.length ? rewritten(bytes, i) : 0);
    put(port, 49, 11, frame.cut);
    put(port, 45, 4, frame.verdict);
    put(port, 44, 1, !frame.owned);
    put(port, 43, 1, frame.owned);
    put(port, 35, 8, frame.ve);
    put(port, 31, 4, frame.id & 15);
    put(port, 28, 3, frame.out == 4 ? HOST : frame.out);
    put(port, 16, 12, frame.user ^ 0x555);
    results.push_back(frame);
  }
  static u8 rewritten(const std::vector<u8>& bytes, int i) {
    return i >= 8 && i < 64 ? bytes[i] ^ 0x5a : bytes[i];
  }

  void observe() {
    while (!freeing.empty() && freeing.front().first <= cycle) {
      high[freeing.front().second.first] -= freeing.front().second.second;
      freeing.pop_front();
    }
    for (int i = 0; i < LINES; i++) {
      Input& line = input[i];
      if (!(dut.valid_i >> i & 1) || !(dut.ready_o >> i & 1)) continue;
      accepted_beats++;
      line.at += BYTES;
      put(dut.valid_i, i, 1, 0);
      taken |= 1 << i;
      if (line.at < static_cast<int>(line.bytes.size())) continue;
      line.busy = false;
      in++;
      all_in++;
      last_in = cycle;
      sent[i].push_back(line.frame);
    }
    if (dut.event_oversize_o) {
      int i = dut.event_oversize_port_o;
      i = i == HOST ? 4 : i < 4 ? i : LINES;
      if (i > 4 || sent[i].empty() || sent[i].front().length <= MAX_LENGTH)
        fail("cycle %llu: a frame of port %d is not too long", (unsigned long long)cycle, i);
      else sent[i].pop_front(), oversize++;
    }
    if (dut.header_valid_o) record();
    if (dut.event_dropped_o + dut.event_unqueued_o + dut.event_queued_o > 1) fail("two events");
    if (dut.event_dropped_o || dut.event_unqueued_o || dut.event_queued_o) admitted();
    if (dut.event_sent_o) {
      int queue = dut.event_sent_queue_o;
      if (waiting[queue].empty()) fail("queue %d sends without a frame", queue);
      else {
        Frame frame = waiting[queue].front();
        waiting[queue].pop_front();
        int n = cells(frame.cut);
        if (int(dut.event_sent_length_o) != frame.cut) fail("the length of a sent frame differs");
        low[queue] -= n;
        freeing.push_back({cycle + MAX_BEATS * 2 + 4, {queue, n}});
      }
    }
    for (int i = 0; i < LINES; i++) output(i);
  }

  void record() {
    auto& port = dut.header_o;
    int from = get(port, 40, 3), i = from == HOST ? 4 : from < 4 ? from : LINES;
    if (i > 4 || sent[i].empty()) { fail("a header record of port %d without a frame", i); return; }
    Frame frame = sent[i].front();
    sent[i].pop_front();
    std::vector<u8> bytes = frame.bytes();
    bool same = int(get(port, 43, 11)) == frame.length;
    for (int k = 0; k < 64; k++)
      same &= int(get(port, 54 + 8 * k, 8)) == (k < frame.length ? bytes[k] : 0);
    same &= i == 4 ? int(get(port, 16, 12)) == frame.user : int(get(port, 28, 12)) == frame.user;
    if (!same) fail("cycle %llu: the header record of a frame of %d bytes differs",
                    (unsigned long long)cycle, frame.length);
    header.push_back({cycle + delay, frame});
  }

  void admitted() {
    if (results.empty()) { fail("a frame without a result"); return; }
    Frame frame = results.front();
    results.pop_front();
    if (frame.verdict >= 8) {
      if (!dut.event_dropped_o) fail("a dropped frame goes on");
      by_verdict++;
      return;
    }
    int n = cells(frame.cut), queue = frame.queue();
    if (dut.event_dropped_o) fail("a frame of verdict %d is dropped", frame.verdict);
    if (dut.event_unqueued_o) {
      by_queue++;
      all_lost++;
      if (frame.out > 4) return;
      if (frame.owned) lost[frame.ve]++;
      if (high[queue] + n <= quota[queue].guarantee)
        fail("queue %d: a frame within the guarantee is dropped", queue);
      return;
    }
    if (frame.out > 4) { fail("a frame of an unknown port is queued"); return; }
    low[queue] += n;
    high[queue] += n;
    if (low[queue] > quota[queue].guarantee + quota[queue].share)
      fail("queue %d: %d cells, above guarantee and share", queue, low[queue]);
    int above = 0;
    for (int q = 0; q < LINES * SLOTS; q++) above += std::max(0, low[q] - quota[q].guarantee);
    if (above > pool) fail("%d cells of the pool are in use of %d", above, pool);
    queued[queue].push_back(frame);
    waiting[queue].push_back(frame);
  }

  void output(int i) {
    bool valid = dut.valid_o >> i & 1, take = valid && (dut.ready_i >> i & 1);
    int count = get(dut.bytes_o, BYTES_BITS * i, BYTES_BITS);
    bool last = dut.last_o >> i & 1;
    const u8* data = reinterpret_cast<const u8*>(&dut.data_o) + BYTES * i;
    std::vector<u8> beat(data, data + std::min(count, BYTES));
    if (held[i] && (!valid || beat != held_data[i])) fail("output %d: a beat changes", i);
    held[i] = valid && !take;
    held_data[i] = beat;
    if (valid && !first_out) first_out = cycle;
    if (!take) return;
    out_beats++;
    if (!last && count != BYTES) fail("output %d: a short beat", i);
    partial[i].insert(partial[i].end(), beat.begin(), beat.end());
    if (!last) return;
    int low_bit = META * i;
    bool owned = get(dut.meta_o, low_bit + 24, 1);
    int ve = get(dut.meta_o, low_bit + 16, 8);
    int queue = i * SLOTS + (SINGLE ? 0 : owned ? ve : VES);
    if ((owned && ve >= VES) || queued[queue].empty()) {
      fail("output %d: a frame of VE %d that is not in the queue", i, ve);
    } else {
      Frame frame = queued[queue].front();
      queued[queue].pop_front();
      std::vector<u8> bytes = frame.bytes();
      bool same = int(partial[i].size()) == frame.cut;
      for (int k = 0; same && k < frame.cut; k++) same = partial[i][k] == rewritten(bytes, k);
      same &= int(get(dut.meta_o, low_bit, 12)) == (frame.user ^ 0x555)
          && int(get(dut.meta_o, low_bit + 12, 4)) == int(frame.id & 15)
          && int(get(dut.meta_o, low_bit + 26, 4)) == frame.verdict;
      if (!same) fail("cycle %llu, output %d: a frame of %d bytes differs (%d came)",
                      (unsigned long long)cycle, i, frame.cut, int(partial[i].size()));
      out++;
      all_out++;
      out_bytes[i][owned ? ve : VES] += frame.cut;
    }
    partial[i].clear();
  }

  int taken = 0;
  void step() {
    taken = 0;
    if (!dut.rst) drive();
    dut.eval();
    if (!dut.rst) observe();
    // The handshake is over, but the inputs must stay until the edge.
    dut.valid_i |= taken;
    dut.clk = 1;
    dut.eval();
    dut.clk = 0;
    dut.valid_i &= ~taken;
    cycle++;
  }
  void run(u64 cycles) { while (cycles--) step(); }

  // Lets everything out; then no frame may be missing.
  void drain(const char* where) {
    auto old_source = source;
    auto old_ready = ready;
    source = [](int, Frame&) { return false; };
    ready = [](int) { return true; };
    run(CELLS * PER_64 * 2 + 4000);
    bool empty = results.empty() && header.empty();
    for (auto& line : sent) empty &= line.empty();
    for (auto& line : input) empty &= !line.busy;
    for (auto& [queue, frames] : queued) empty &= frames.empty();
    if (!empty || in != out + oversize + by_verdict + by_queue)
      fail("%s: %llu frames in, %llu out, %llu too long, %llu and %llu dropped", where,
           (unsigned long long)in, (unsigned long long)out, (unsigned long long)oversize,
           (unsigned long long)by_verdict, (unsigned long long)by_queue);
    source = old_source;
    ready = old_ready;
  }
};

static Frame plain(int length, int ve, int out, int user = 0) {
  return {0, length, user, ve, out, out == 4 ? 1 : 0, length, true};
}

static int random_length() {
  switch (below(8)) {
    case 0: return 1 + below(MAX_LENGTH);
    case 1: return MAX_LENGTH - below(3);
    case 2: return MAX_LENGTH + 1 + below(600);
    case 3: return BYTES * (1 + below(4)) + below(3) - 1;
    default: return 1 + below(200);
  }
}

static int hot = -1;  // output that gets half of the frames, or -1

static bool random_frame(int, Frame& frame) {
  static const int verdicts[] = {0, 0, 0, 0, 1, 3, 8, 11, 12, 15};
  int length = random_length();
  frame = plain(length, below(VES), below(5), below(4096));
  frame.verdict = verdicts[below(10)];
  if (hot >= 0 && below(2)) frame.out = hot, frame.ve = below(2);
  if (frame.verdict >= 1 && frame.verdict < 8) frame.out = 4;
  if (below(60) == 0 && frame.verdict == 0) frame.out = 5;
  if (frame.out == 4 && below(4) == 0) frame.owned = false;
  if (below(3) == 0) frame.cut = 1 + below(length);
  return true;
}

// Frames that a blocked queue takes: finds lost cells and a wrong count of the pool.
static u64 capacity(Bench& bench, int queue_out) {
  bench.drain("before the capacity");
  bench.source = [](int, Frame&) { return false; };
  bench.set_all({0, CELLS - 8}, CELLS - 8);
  u64 before = bench.out + bench.by_queue;
  bench.ready = [](int) { return false; };
  bench.source = [=](int i, Frame& frame) { frame = plain(64, 3, queue_out); return i == 0; };
  bench.valid_chance[0] = 256;
  bench.pause_chance = 0;
  bench.delay = LATENCY;
  bench.run(u64(CELLS) * PER_64 * 3 / 2 + 3000);
  u64 held = bench.queued[plain(64, 3, queue_out).queue()].size();
  bench.drain("the capacity");
  bench.source = [](int, Frame&) { return false; };
  if (bench.out + bench.by_queue == before) fail("the capacity: nothing came out");
  return held;
}

// A quota that changes while its queue holds frames leaves the pool's count exact.
static void quota_change() {
  Bench bench;
  u64 full = capacity(bench, 1);
  bench.set_all({0, CELLS - 8}, CELLS - 8);
  bench.ready = [](int) { return false; };
  bench.source = [](int i, Frame& frame) { frame = plain(64, 0, 1); return i == 0; };
  bench.run(400 * PER_64);
  bench.set(SLOTS, {300, CELLS / 2}, 1);
  bench.quota[SLOTS] = {0, CELLS - 8};  // the old one is in effect
  bench.run(400 * PER_64);
  bench.drain("a change of a quota");
  if (capacity(bench, 1) != full) fail("a change of a quota changes the capacity");
}

// After a reset within a frame of input 0, which stays silent, input 1 sends.
static void reset_within_frame() {
  for (int cycles = 1; cycles < 20; cycles++) {
    Bench bench;
    bench.set_all({CELLS / USED, 0}, 0);
    bench.source = [](int i, Frame& frame) { frame = plain(1700, 0, 1); return i == 0; };
    bench.run(cycles);
    bench.reset();
    int count = 0;
    bench.source = [&](int i, Frame& frame) {
      frame = plain(64, 1, 1);
      return i == 1 && !count++;
    };
    bench.run(200 + MAX_BEATS + LINES * SLOTS);  // the card clears its counts
    if (bench.out != 1) fail("a reset within a frame holds up the next one");
    bench.drain("a reset within a frame");
  }
}

static void random_traffic(int rounds) {
  Bench bench;
  u64 full = capacity(bench, 2);
  u64 resets = 0, ins = bench.all_in, outs = bench.all_out, drops = bench.all_lost;
  for (int round = 0; round < rounds; round++) {
    bench.source = [](int, Frame&) { return false; };
    bench.drain("the round before");
    bench.delay = below(3) ? LATENCY : LATENCY + below(2000);
    // Guarantees of the used queues and the pool fit into the cells.
    int guarantee = below(CELLS / USED);
    int pool = std::min(below(CELLS / 2), CELLS - 8 - USED * guarantee);
    int share = below(2) ? below(std::min(pool, 4) + 1) : below(pool + 1);
    bench.set_all({guarantee, share}, pool);
    bench.source = random_frame;
    for (int& chance : bench.valid_chance) chance = below(3) ? 256 : 1 + below(256);
    bench.pause_chance = below(2) ? 0 : below(200);
    int busy[LINES];
    for (int& chance : busy) chance = below(3) ? 256 : below(200);
    hot = below(2) ? below(LINES) : -1;
    if (hot >= 0) busy[hot] = 1 + below(100);
    bench.ready = [busy](int i) { return below(256) < busy[i]; };
    bench.run(4000 + below(8000));
    // Quotas change under traffic: only the capacity afterwards is checked.
    if (below(3) == 0) {
      bench.pool = 2 * CELLS;
      for (Quota& quota : bench.quota) quota = {0, 2 * CELLS};
      for (int i = 0; i < 200; i++) {
        int queue = below(LINES * SLOTS);
        bench.set(queue, {below(CELLS / USED), below(CELLS)}, below(256));
        bench.quota[queue] = {0, 2 * CELLS};
        bench.run(below(50));
      }
    }
    if (below(3) == 0) {
      for (int i = 1 + below(8); i; i--) {
        bench.reset();
        resets++;
        bench.run(below(600));
      }
    } else {
      bench.drain("random traffic");
      u64 now = capacity(bench, below(LINES));
      if (now != full) fail("the capacity was %d frames and is %d", int(full), int(now));
    }
    if (failures) break;
  }
  ins = bench.all_in - ins, outs = bench.all_out - outs, drops = bench.all_lost - drops;
  printf("random traffic: %llu frames in, %llu out, %llu dropped by queues, %llu resets; "
         "capacity %llu frames; %d failures\n", (unsigned long long)ins, (unsigned long long)outs,
         (unsigned long long)drops, (unsigned long long)resets, (unsigned long long)full, failures);
}

// A guarantee holds although the pool has become smaller than its use.
static void smaller_pool() {
  Bench bench;
  bench.set_all({10, 200}, 200);
  bench.ready = [](int) { return false; };
  bench.source = [](int i, Frame& frame) { frame = plain(64, 0, 1); return i == 0; };
  bench.run(1000 * PER_64);
  bench.dut.pool_i = 0;
  int count = 0;
  bench.source = [&](int i, Frame& frame) {
    frame = plain(64, 1, 1);
    return i == 1 && count++ < 10;
  };
  bench.pool = CELLS;
  bench.run(1000);
  if (bench.lost[1]) fail("a smaller pool takes a guarantee");
  bench.drain("a smaller pool");
}

// One 64-byte frame per cycle, or per 64 bytes of the bus: mixed, through one queue, and through
// two queues of an output. There, 512 bits idle for 4 cycles after each turn of at least 32 frames.
static void rate() {
  const char* names[] = {"all queues", "one queue", "two queues of an output"};
  for (int kind = 0; kind < 3; kind++) {
    Bench bench;
    bench.set_all({CELLS / USED - 1, CELLS / 8}, CELLS / 8);
    bench.source = [kind](int, Frame& frame) {
      if (kind == 0) frame = plain(64, below(VES), below(5));
      else frame = plain(64, kind == 1 ? 5 : below(2), 2);
      return true;
    };
    bench.run(1000);
    u64 beats_in = bench.accepted_beats, beats_out = bench.out_beats;
    bench.run(8000);
    u64 taken = bench.accepted_beats - beats_in, given = bench.out_beats - beats_out;
    bool idles = kind == 2 && PER_64 == 1 && !SINGLE;
    u64 least = idles ? 8000 * 32 / 36 - 32 : kind == 0 ? 8000 - 64 : 8000;
    if (taken != 8000 || given < least || (!idles && bench.by_queue))
      fail("rate: %llu beats in, %llu out in 8000 cycles, %llu frames dropped",
           (unsigned long long)taken, (unsigned long long)given,
           (unsigned long long)bench.by_queue);
    printf("%s: %llu beats in, %llu out in 8000 cycles, %d beats a frame\n",
           names[kind], (unsigned long long)taken,
           (unsigned long long)given, PER_64);
    bench.drain("rate");
  }
}

// Two outputs with a backlog send equally often.
static void turns() {
  Bench bench;
  bench.set_all({0, CELLS / 4}, CELLS / 2);
  bench.ready = [](int) { return false; };
  int count = 0;
  bench.source = [&](int i, Frame& frame) {
    frame = plain(64, 0, count % LINES);
    return i == 0 && ++count <= 800;
  };
  bench.run(900 * PER_64 + LINES * SLOTS);
  bench.ready = [](int) { return true; };
  bench.run(LINES * 60 * PER_64);
  for (int i = 0; i < LINES; i++)
    if (bench.out_bytes[i][0] < 48 * 64)
      fail("output %d sent %llu bytes", i, (unsigned long long)bench.out_bytes[i][0]);
  bench.drain("turns of the outputs");
}

// Quotas of more cells than there are: no frame gets another one's cells.
static void overcommitted() {
  Bench bench;
  bench.set_all({CELLS, CELLS}, CELLS);
  bench.pool = LINES * CELLS;
  for (Quota& quota : bench.quota) quota = {0, 2 * CELLS};  // frames may be dropped
  bench.ready = [](int) { return false; };
  bench.source = [](int i, Frame& frame) { frame = plain(64, 0, i); return true; };
  bench.run(CELLS * PER_64 * 3 / 2);
  bench.drain("quotas of too many cells");
}

static void latency() {
  u64 worst = 0;
  for (int i = 0; i < LINES; i++) for (int out = 0; out < LINES; out++) {
    Bench bench;
    bench.set_all({CELLS / USED, 0}, 0);
    bench.run(below(40));
    bool done = false;
    bench.source = [&](int line, Frame& frame) {
      if (line != i || done) return false;
      frame = plain(64, 1, out);
      return done = true;
    };
    bench.run(200);
    worst = std::max(worst, bench.first_out - bench.last_in);
    bench.drain("latency");
  }
  printf("latency of a 64-byte frame: %llu cycles, %d of them in the header pipeline\n",
         (unsigned long long)worst, LATENCY);
  int limit = 64;
  if (worst > static_cast<u64>(limit)) fail("the latency is above %d cycles", limit);
}

// Ports 0 and 1 flood port 2 from 8 VEs. `quiet` is a VE that sends 80 % of its share, or -1. It
// loses nothing if it has a queue of its own. In one queue for all, it loses frames as the others.
static void flood(bool long_frames, int quiet) {
  Bench bench;
  int total = 0, room = CELLS / 2048;
  bench.set_all({0, 0}, 280 * room);
  for (int ve = 0; ve < VES; ve++) {
    bench.set(2 * SLOTS + ve, {220 * room, 60 * room}, ve + 1);
    total += ve + 1;
  }
  if (SINGLE) bench.set(2 * SLOTS, {220 * VES * room, 60 * room}, 1);
  auto length = [&] { return long_frames ? 8 + below(1500) : 64; };
  // The output takes half of the beats.
  bench.ready = [&](int i) { return i != 2 || (bench.cycle & 1); };
  double allowance = 0;
  u64 quiet_last = 0, quiet_sent = 0;
  int next = 0;  // VE
  bench.source = [&](int i, Frame& frame) {
    if (i > 1) return false;
    if (quiet >= 0) {
      allowance += (bench.cycle - quiet_last) * (BYTES * 0.5 * (quiet + 1) / total * 0.8);
      quiet_last = bench.cycle;
      int n = length();
      if (allowance > n) {
        allowance -= n;
        quiet_sent++;
        frame = plain(n, quiet, 2);
        return true;
      }
    }
    // Each of the others offers about twice its share.
    do {
      int at = below(total);
      for (next = 0; at > next; next++) at -= next + 1;
    } while (next == quiet);
    frame = plain(length(), next, 2);
    return true;
  };
  bench.run(20000 * PER_64);
  u64 begin[VES], sum = 0, weights = 0;
  for (int ve = 0; ve < VES; ve++) begin[ve] = bench.out_bytes[2][ve];
  bench.run((long_frames ? 1000000 : 300000) * PER_64);
  for (int ve = 0; ve < VES; ve++) {
    begin[ve] = bench.out_bytes[2][ve] - begin[ve];
    if (ve != quiet) sum += begin[ve], weights += ve + 1;
  }
  double worst = 0;
  for (int ve = 0; ve < VES; ve++) {
    if (ve == quiet) continue;
    double error = double(begin[ve]) * weights / (double(sum) * (ve + 1)) - 1;
    worst = std::max(worst, error < 0 ? -error : error);
  }
  u64 lost = quiet >= 0 ? bench.lost[quiet] : 0;
  auto number = [](u64 value) { return static_cast<unsigned long long>(value); };
  printf("flood, %s frames, quiet VE %d: shares within %.3f %% of the weights, "
         "%llu frames dropped, %llu of the quiet VE's %llu\n",
         long_frames ? "8 to 1507-byte" : "64-byte", quiet, 100 * worst,
         number(bench.by_queue), number(lost), number(quiet_sent));
  bool right = SINGLE ? lost * 10 > quiet_sent : worst < 0.01 && !lost;
  if (!right || bench.by_queue < 1000) fail("flood: the shares or losses are wrong");
  bench.drain("flood");
}

int main(int argc, char** argv) {
  Verilated::commandArgs(argc, argv);
  int rounds = argc > 1 ? atoi(argv[1]) : 40;
  random_state = (argc > 2 ? strtoull(argv[2], nullptr, 0) : 1) | 1;
  printf("%d bits, %d VEs%s\n", DATA_BITS, VES, SINGLE ? ", one queue per output" : "");
  latency();
  rate();
  turns();
  if (!SINGLE) smaller_pool();
  quota_change();
  overcommitted();
  reset_within_frame();
  random_traffic(rounds);
  for (int quiet : {-1, 3})
    for (bool long_frames : {false, true})
      if (!failures && VES == 8 && (quiet >= 0 || !SINGLE)) flood(long_frames, quiet);
  printf("%d failures\n", failures);
  return failures != 0;
}
