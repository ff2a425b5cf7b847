// Tests of the registers and counters on the whole card: eight virtual environments (VEs) with a
// few routes each, frames of all of them, and random accesses to all pages.
#include <cstdlib>
#include <map>

#include "card.h"

// Register map: offsets in a page, as in hw/registers.toml.
enum Offset : u32 {
  ID = 0, VERSION = 4, PARAMETERS = 8, EPOCH = 0x40, TARGET = 0x44, POOL = 0x48,
  REFUSED_ADDRESS = 0x4c, CLEAR = 0x50, CLEARING = 0x54, WRITE_DATA = 0x100, COMMIT = 0x200,
  FAULTS = 0x1000, EXCESS = 0x1010, REFUSED = 0x1020, SENT = 0x1100, RECEIVED = 0x1200,
  OVERSIZES = 0x1300, VERDICTS = 0x1800, END = 0x2000,
};
enum Table {
  T_VMAC, T_STASH, T_SEED, T_METER, T_CONTROL, T_ATTACHMENT, T_HOP_SEGMENTS, T_LPM_SEGMENTS,
  T_OPTIONS, T_CONTEXT, T_OWN, T_GROUP, T_BUCKET, T_HOP, T_ARP, T_ROOT, T_NODE, T_LEAF, T_QUOTA,
  T_WEIGHT, TABLES,
};
constexpr u32 SETS = 64, NODES = 64, LEAVES = 256, GROUPS = 64, BLOCKS = 4, HOPS = 64, ARPS = 64;
constexpr u32 PARAMETER[] = {DATA_BITS, 4, VES, CELLS - 8, 4 * SETS, 20, NODES, LEAVES, GROUPS,
                             BLOCKS, HOPS, ARPS};
// Parts of a VE.
constexpr u32 VE_NODES = NODES / VES, VE_LEAVES = LEAVES / VES, VE_GROUPS = GROUPS / VES,
              VE_HOPS = HOPS / VES, VE_ARPS = ARPS / VES;
static u32 ve_blocks(int ve) { return ve < int(BLOCKS); }
constexpr int DISABLED = 6, LIMITED = 7;  // VEs without a route to a port

// A number of up to 192 bits, filled from the most significant field on.
struct Entry {
  u32 words[6] = {};
  Entry& put(u64 value, int count) {
    for (int i = count - 1; i >= 0; i--) {
      for (int w = 5; w > 0; w--) words[w] = words[w] << 1 | words[w - 1] >> 31;
      words[0] = words[0] << 1 | (value >> i & 1);
    }
    return *this;
  }
};

static u64 mac_of(int ve, int vport) { return 0x020000000000ull | u64(ve) << 8 | vport; }
static u64 neighbour_of(int ve, int arp) { return 0x0600000a0000ull | u64(ve) << 8 | arp; }
static int port_of(int ve, int vport) { return (ve + vport) % 4; }
static int segment_of(int ve, int vport) { return 100 + ve * 16 + vport; }

// ------------------------------------------------------------------------------------------------
// Frames and their fate.

static void big(Bytes& bytes, size_t at, u64 value, int count) {
  for (int i = 0; i < count; i++) bytes[at + i] = value >> (8 * (count - 1 - i));
}
static void checksum(Bytes& bytes) {
  u32 sum = 0;
  bytes[24] = bytes[25] = 0;
  for (int i = 14; i < 34; i += 2) sum += bytes[i] << 8 | bytes[i + 1];
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  big(bytes, 24, ~sum & 0xffff, 2);
}

enum Kind {
  DIRECT, CHOSEN, BY_NODE, DROPPED, UNROUTED, LOCAL, TOO_MANY, BROKEN_LEAF, OLD, CORRUPT, STRANGER,
  BROADCAST, RUNT, OTHER_PORT, LONG, BY_HOST, SPOOFED, KINDS,
};
static const int OCTET[] = {10, 20, 30, 40, 50, 60, 70, 80, 10, 10, 10, 10, 10, 10, 10};

static Frame frame_of(int ve, int kind) {
  Frame frame;
  frame.line = port_of(ve, 0);
  frame.user = frame.segment = segment_of(ve, 0);
  int packet = 20 + below(chance(32) ? 1681 : 80), padding = below(4) ? 0 : below(20);
  if (packet + padding > 1700) padding = 0;
  Bytes& bytes = frame.bytes;
  bytes.resize(14 + packet + padding);
  for (u8& byte : bytes) byte = rnd();
  big(bytes, 0, mac_of(ve, 0), 6);
  big(bytes, 6, 0x0a0000000000 | (rnd() & 0xffffffff), 6);
  big(bytes, 12, 0x0800, 2);
  bytes[14] = 0x45;
  big(bytes, 16, packet, 2);
  big(bytes, 20, 0, 2);
  bytes[22] = kind == OLD ? 1 : 2 + below(250);
  bytes[15] = 0;  // no class of control packets
  big(bytes, 26, 0xc0000200 | below(256), 4);
  big(bytes, 30, u32(OCTET[kind < BY_HOST ? kind : 0]) << 24 | below(1 << 24), 4);
  checksum(bytes);
  frame.slot = ve;
  frame.verdict = PUNT_EXCEPTION;
  bool out = kind == DIRECT || kind == BY_NODE || (kind == CHOSEN && ve_blocks(ve));
  if (out) frame.verdict = OUT;
  if (kind == DROPPED) frame.verdict = BLACKHOLE;
  if (kind == LOCAL) frame.verdict = PUNT_LOCAL;
  if (kind == CORRUPT) { bytes[24] ^= 1; frame.verdict = MALFORMED; }
  frame.excess = kind == TOO_MANY;
  frame.fault = kind == BROKEN_LEAF;
  if (kind == OTHER_PORT) { frame.line = (frame.line + 1) % 4; frame.verdict = NOT_FOR_US; }
  if (ve == DISABLED || ve == LIMITED) {
    frame.verdict = ve == DISABLED ? NO_VE : RATE;
    frame.fault = frame.excess = false;
  }
  frame.sent = bytes;
  if (frame.verdict == OUT) {
    frame.out = port_of(ve, 1);
    frame.segment = segment_of(ve, 1);
    frame.vport = 1;
    Bytes& sent = frame.sent;
    sent.resize(14 + packet);
    big(sent, 0, neighbour_of(ve, kind == CHOSEN), 6);
    big(sent, 6, mac_of(ve, 1), 6);
    sent[22]--;
    checksum(sent);
  }
  switch (kind) {
    case STRANGER:
      big(bytes, 0, 0x0e0000000000, 6);
      frame.verdict = NO_VE;
      frame.slot = NONE;
      break;
    case BROADCAST:
      big(bytes, 0, 0xffffffffffff, 6);
      big(bytes, 12, 0x0806, 2);
      frame.verdict = PUNT_NEIGHBOUR;
      frame.slot = NONE;
      frame.sent = bytes;
      break;
    case RUNT:
      bytes.resize(1 + below(13));
      frame.verdict = MALFORMED;
      frame.slot = NONE;
      break;
    case LONG:
      bytes.resize(MAX_LENGTH + 1 + below(2000));
      frame.verdict = OVERSIZE;
      break;
    case BY_HOST:
    case SPOOFED:
      frame.line = LINES - 1;
      frame.user = ve << 4 | 1;
      big(bytes, 6, mac_of(ve, 1), 6);
      frame.out = port_of(ve, 1);
      frame.segment = segment_of(ve, 1);
      frame.vport = 1;
      frame.verdict = OUT;
      if (kind == SPOOFED) bytes[11]++;
      if (kind == SPOOFED || ve == DISABLED) frame.verdict = SPOOF;
      frame.sent = bytes;
      break;
    default:
      break;
  }
  if (frame.slot == NONE || kind == LONG || kind >= BY_HOST) frame.fault = frame.excess = false;
  return frame;
}

// ------------------------------------------------------------------------------------------------
// The register file as it must be.

struct Bench {
  Card card;
  u32 target = 0, pool = 0, refused_address = 0;
  u32 words[VES + 1][6] = {};

  static u32 address(int page, u32 offset) { return u32(page) << 16 | offset; }
  static bool of_ve(int table) { return table >= T_OPTIONS && table <= T_LEAF; }

  // What a write of the index to COMMIT_<table> answers.
  u32 commit(int page, int table, u32 index) const {
    const u32* entry = words[page];
    int ve = page ? page - 1 : int(target);
    if (page && !of_ve(table)) return SLVERR;
    if (table == T_QUOTA || table == T_WEIGHT) {
      u32 out = index >> 16;
      return (index & 0xffff) <= VES && (out < 4 || out == HOST) ? OKAY : SLVERR;
    }
    if (table > T_SEED && ve == NONE) return SLVERR;
    auto field = [&](int low, int count) {
      u64 all = u64(entry[1]) << 32 | entry[0];
      return u32(all >> low & ((1ull << count) - 1));
    };
    auto fits = [&](int word, u32 entries) {
      return (entry[word] >> 16) + (entry[word] & 0xffff) <= entries;
    };
    auto range = [&](u32 base, u32 length, u32 entries) {
      return entry[base] < entries && u64(entry[base]) + entry[length] <= entries;
    };
    bool good = false;
    switch (table) {
      case T_VMAC: good = index >> 8 < 4 && (index & 255) < SETS; break;
      case T_STASH: good = index < 8; break;
      case T_ATTACHMENT: case T_CONTEXT: case T_OWN: good = index < 16; break;
      case T_HOP_SEGMENTS:
        good = index == 0 && fits(0, GROUPS) && fits(1, BLOCKS) && fits(2, HOPS) && fits(3, ARPS);
        break;
      case T_LPM_SEGMENTS: good = index == 0 && range(0, 1, NODES) && range(2, 3, LEAVES); break;
      case T_GROUP:
        good = index < VE_GROUPS
            && (!field(13, 1) || field(0, 12) < (field(12, 1) ? ve_blocks(ve) : VE_HOPS));
        break;
      case T_BUCKET: good = index >> 8 < ve_blocks(ve) && field(0, 12) < VE_HOPS; break;
      case T_HOP:
        good = index < VE_HOPS && (!field(32, 1) || !field(26, 1) || field(14, 12) < VE_ARPS);
        break;
      case T_ARP: good = index < VE_ARPS; break;
      case T_ROOT:
        good = index < 512 && (field(32, 2) != 1 || entry[0] < VE_LEAVES)
            && (field(32, 2) != 2 || entry[0] < VE_NODES);
        break;
      case T_NODE:
        return index >> 27 && index >> 27 <= 20 && (index & 0x7ffffff) < VE_NODES ? ANY : SLVERR;
      case T_LEAF: good = index < VE_LEAVES && field(10, 3) <= 5; break;
      default: good = index == 0;
    }
    if (table <= T_STASH && (entry[2] >> 8 & 1) && (entry[0] >> 4 & 255) >= VES) good = false;
    return good ? OKAY : SLVERR;
  }

  // Queues a write and keeps what must come of it.
  u32 write(int page, u32 offset, u32 data, int strobe = 15) {
    u32 answer = SLVERR;
    int word = (offset - WRITE_DATA) / 4, table = (offset - COMMIT) / 4;
    bool known = page <= VES && strobe == 15 && offset % 4 == 0;
    if (known && offset >= WRITE_DATA && word < 6) {
      words[page][word] = data;
      answer = OKAY;
    } else if (known && offset >= COMMIT && table < TABLES) {
      answer = commit(page, table, data);
    } else if (known && page == 0 && offset == TARGET && data <= VES) {
      target = data;
      answer = OKAY;
    } else if (known && page == 0 && offset == POOL && data < 0x10000) {
      pool = data;
      answer = OKAY;
    }
    if (answer == SLVERR) refused_address = address(page, offset);
    card.put({true, address(page, offset), data, strobe, answer});
    return answer;
  }

  void entry(int page, int table, u32 index, const Entry& entry, int count) {
    for (int i = 0; i < count; i++) write(page, WRITE_DATA + 4 * i, entry.words[i]);
    if (write(page, COMMIT + 4 * table, index) == SLVERR)
      fail("the entry %d of table %d is not one", index, table);
  }

  // Queues a read of a register; true if its value is known.
  bool read(int page, u32 offset) {
    Access access = {false, address(page, offset), 0, 0, SLVERR, true};
    auto found = value(page, offset);
    if (found.first) access.answer = OKAY;
    access.data = found.second;
    if (found.first && offset == EPOCH) access.check = false;
    card.put(access);
    return access.check;
  }

  // Whether a page has a readable register there, and its value.
  std::pair<bool, u32> value(int page, u32 offset) const {
    if (page > VES || offset % 4) return {false, 0};
    int slot = page ? page - 1 : int(target);
    const Counters& all = card.counts;
    auto word = [&](u64 frames, u64 bytes) {
      return u32((offset & 8 ? bytes : frames) >> (offset & 4 ? 32 : 0));
    };
    auto half = [&](u64 frames) {
      return std::make_pair(!(offset & 8), offset & 8 ? 0 : word(frames, 0));
    };
    auto whole = [&](const Count& count) {
      return std::make_pair(true, word(count.frames, count.bytes));
    };
    auto at = [&](u32 first) { return (offset - first) / 16; };
    if (offset == EPOCH) return {true, 0};
    if (offset >= FAULTS && offset < FAULTS + 0x30) return half(all.lone[at(FAULTS)][slot]);
    if (offset >= SENT && offset < SENT + 128) return whole(all.sent[slot * 8 + at(SENT)]);
    if (offset >= VERDICTS && offset < END) return whole(all.verdicts[slot * 128 + at(VERDICTS)]);
    if (page) return {false, 0};
    if (offset >= RECEIVED && offset < RECEIVED + 128) return whole(all.received[at(RECEIVED)]);
    if (offset >= OVERSIZES && offset < OVERSIZES + 128) return half(all.oversize[at(OVERSIZES)]);
    if (offset >= PARAMETERS && offset < PARAMETERS + 4 * 12)
      return {true, PARAMETER[(offset - PARAMETERS) / 4]};
    switch (offset) {
      case ID: return {true, 0x50645063};
      case VERSION: return {true, 1};
      case TARGET: return {true, target};
      case POOL: return {true, pool};
      case REFUSED_ADDRESS: return {true, refused_address};
      case CLEARING: return {true, 0};
      default: return {false, 0};
    }
  }

  // Reads all offsets of a page, also those without a register; the card is idle.
  void read_page(int page) {
    for (u32 offset = 0; offset < END + 64; offset += 4) read(page, offset);
    for (u32 offset : {1u, 2u, 0x1002u, 0x1801u, 0x8000u, 0xf040u, 0xfffcu}) read(page, offset);
    card.finish();
  }
  void read_all() {
    u32 old = target;
    for (int slot : {0, 3, NONE}) { write(0, TARGET, slot); read_page(0); }
    for (int page = 1; page <= VES; page++) read_page(page);
    for (int page : {VES + 1, 16, 256, 511}) { read(page, EPOCH); read(page, VERDICTS); }
    write(0, TARGET, old);
    card.finish();
  }

  // --- set-up ---

  void set_up() {
    write(0, POOL, 64);
    for (int out : {0, 1, 2, 3, HOST})
      for (int slot = 0; slot <= VES; slot++) {
        u32 queue = u32(out) << 16 | slot;
        entry(0, T_QUOTA, queue, Entry().put(8, 16).put(0xff, 16), 1);
        entry(0, T_WEIGHT, queue, Entry().put(1 + slot, 8), 1);
      }
    entry(0, T_SEED, 0, Entry(), 2);
    std::map<u32, Entry> places;
    for (int ve = 0; ve < VES; ve++)
      for (int vport = 0; vport < 2; vport++) {
        u64 mac = mac_of(ve, vport);
        u64 key = u64(segment_of(ve, vport)) << 48 | mac;
        u32 set = hash(key), place = 0;
        while (places.count(place << 8 | (set >> (8 * place) & (SETS - 1)))) place++;
        places[place << 8 | (set >> (8 * place) & (SETS - 1))] = Entry().put(1, 1).put(key, 60)
            .put(ve, 8).put(vport, 4);
      }
    for (u32 place = 0; place < 4; place++)
      for (u32 set = 0; set < SETS; set++)
        entry(0, T_VMAC, place << 8 | set, places[place << 8 | set], 3);
    for (u32 place = 0; place < 8; place++) entry(0, T_STASH, place, Entry(), 3);
    for (int ve = 0; ve < VES; ve++) set_up(ve);
    card.finish();
  }

  void grant(int ve) {
    write(0, TARGET, ve);
    auto range = [](u32 base, u32 length) { return u64(base) << 16 | length; };
    entry(0, T_HOP_SEGMENTS, 0,
          Entry().put(range(ve * VE_ARPS, VE_ARPS), 32).put(range(ve * VE_HOPS, VE_HOPS), 32)
              .put(range(ve_blocks(ve) ? ve : 0, ve_blocks(ve)), 32)
              .put(range(ve * VE_GROUPS, VE_GROUPS), 32), 4);
    entry(0, T_LPM_SEGMENTS, 0,
          Entry().put(VE_LEAVES, 32).put(ve * VE_LEAVES, 32).put(VE_NODES, 32)
              .put(ve * VE_NODES, 32), 4);
    entry(0, T_CONTROL, 0, Entry().put(ve != DISABLED, 1), 1);
    entry(0, T_METER, 0, Entry().put(ve == LIMITED, 1).put(0, 28).put(0, 20), 2);
    for (u32 vport = 0; vport < 16; vport++) {
      Entry place;
      if (vport < 2)
        place.put(1, 1).put(port_of(ve, vport), 3).put(segment_of(ve, vport), 12)
            .put(mac_of(ve, vport), 48);
      entry(0, T_ATTACHMENT, vport, place, 2);
    }
  }

  // A VE's own tables, by its page.
  void own_tables(int ve) {
    int page = 1 + ve;
    auto leaf = [](int kind, u32 group) { return Entry().put(kind, 3).put(group, 10); };
    auto root = [](int kind, u32 index) { return Entry().put(kind, 2).put(index, 32); };
    entry(page, T_OPTIONS, 0, Entry().put(15, 4).put(ve, 32), 2);
    for (u32 vport = 0; vport < 16; vport++) {
      Entry context;
      if (vport < 2) context.put(7, 3).put(0, 6).put(9000, 14);
      entry(page, T_CONTEXT, vport, context, 1);
    }
    for (u32 i = 0; i < 16; i++) entry(page, T_OWN, i, Entry(), 2);
    for (u32 i = 0; i < VE_ARPS; i++)
      entry(page, T_ARP, i, Entry().put(1, 1).put(neighbour_of(ve, i), 48), 2);
    for (u32 i = 0; i < VE_HOPS; i++)
      entry(page, T_HOP, i,
            Entry().put(1, 1).put(1, 4).put(i == 1, 1).put(1, 1).put(i, 12).put(9000, 14), 2);
    for (u32 i = 0; i < 256 * ve_blocks(ve); i++) entry(page, T_BUCKET, i, Entry().put(1, 12), 1);
    for (u32 i = 0; i < VE_GROUPS; i++) {
      bool multi = i == 1 && ve_blocks(ve);
      entry(page, T_GROUP, i, Entry().put(i == 0 || multi, 1).put(multi, 1).put(0, 12), 1);
    }
    for (u32 i = 0; i < VE_LEAVES; i++) {
      Entry entries[] = {leaf(1, 0), leaf(1, 1), leaf(2, 0), leaf(4, 0), leaf(1, 1000)};
      entry(page, T_LEAF, i, i < 5 ? entries[i] : leaf(0, 0), 1);
    }
    entry(page, T_NODE, 1u << 27, Entry(), 6);
    std::map<u32, Entry> roots = {{10, root(1, 0)}, {20, root(1, 1)}, {30, root(2, 0)},
                                  {40, root(1, 2)}, {60, root(1, 3)}, {70, root(3, 0)},
                                  {80, root(1, 4)}};
    for (u32 i = 0; i < 512; i++) entry(page, T_ROOT, i, roots[i], 2);
  }
  void set_up(int ve) { grant(ve); own_tables(ve); }

  static u32 hash(u64 mixed) {
    u64 spread = 0;
    for (int row = 0; row < 12; row++)
      for (int bit = 0; bit < 5; bit++) {
        auto at = [&](int n) { return mixed >> (5 * row + n % 5) & 1; };
        spread |= (at(bit) ^ ((at(bit + 1) ^ 1) & at(bit + 2))) << (5 * row + bit);
      }
    u32 crc = 0;
    for (int at = 59; at >= 0; at--) {
      bool carry = (crc >> 31 & 1) ^ (spread >> at & 1);
      crc = crc << 1 ^ (carry ? 0x04c11db7 : 0);
    }
    return crc;
  }

  // --- traffic ---

  void send(const Frame& frame) { card.source[frame.line].push_back(frame); }
  void probe(int ve) {
    for (int kind = 0; kind < KINDS; kind++) send(frame_of(ve, kind));
  }

  // A random access to a page. `harm`: also commits to the VE's tables.
  void random_write(int page, bool harm) {
    u32 data = below(3) ? below(40) : rnd(), offset;
    int strobe = 15;
    switch (below(harm ? 4 : 3)) {
      case 0: offset = below(2) ? below(0x3000) : rnd() & 0xffff; break;
      case 1: offset = WRITE_DATA + 4 * below(6); break;
      case 2: offset = COMMIT + 4 * below(T_OPTIONS); break;
      default:
        offset = COMMIT + 4 * (T_OPTIONS + below(T_LEAF - T_OPTIONS + 1));
        if (offset == COMMIT + 4 * T_NODE) data |= (1 + below(22)) << 27;
        if (offset == COMMIT + 4 * T_ROOT && below(2)) data = 10 * below(9);
    }
    if (chance(32)) strobe = below(15);
    bool commits = offset >= COMMIT && offset < COMMIT + 4 * TABLES && strobe == 15;
    if (commits && !harm && page <= VES && page && offset >= COMMIT + 4 * T_OPTIONS) strobe = 7;
    write(page, offset, data, strobe);
  }
};

// ------------------------------------------------------------------------------------------------

static void pace(Bench& bench) {
  Card& card = bench.card;
  u64 begin = card.cycle;
  for (int i = 0; i < 20; i++) bench.entry(1, T_NODE, (2u << 27) + i % VE_NODES, Entry(), 6);
  card.finish();
  u64 cycles = card.cycle - begin;
  printf("20 nodes of a VE: %llu cycles of the bus\n", (unsigned long long)cycles);
  if (cycles > 2 * 20 * 7 + 20) fail("writes are too slow");
}

// A step of EPOCH is longer than a frame's time in the header pipeline.
static void epoch(Bench& bench) {
  Card& card = bench.card;
  u64 worst = 0;
  for (int ve = 0; ve < 4; ve++) {
    bench.send(frame_of(ve, OLD));
    u64 begin = card.cycle;
    card.drain("epoch");
    if (card.last_verdict < begin) fail("no verdict");
    worst = std::max(worst, card.last_verdict - card.last_accepted);
  }
  u64 steps[9];
  for (u64& step : steps) {
    auto epoch = [&] {
      card.put({false, EPOCH, 0, 0, OKAY});
      return card.finish()[0].got;
    };
    for (u32 first = epoch(); epoch() == first;) {}
    step = card.cycle;
  }
  u64 step = (steps[8] - steps[0] + 4) / 8;  // to a cycle or two
  printf("EPOCH: a step is %llu cycles, a frame's verdict takes %llu\n", (unsigned long long)step,
         (unsigned long long)worst);
  if (step < worst) fail("a step of EPOCH is too short");
}

// Frames of all VEs and kinds under back-pressure, and accesses to the registers.
static void traffic(Bench& bench, int frames) {
  Card& card = bench.card;
  card.valid_chance = 60 + below(197);
  card.ready_chance = below(2) ? 2 + below(20) : 40 + below(217);
  card.bus_chance = 30 + below(227);
  card.answer_chance = below(2) ? 2 + below(10) : 30 + below(227);
  card.outstanding = 1 + below(80);
  for (int i = 0; i < frames; i++)
    bench.send(frame_of(below(VES), chance(8) ? below(KINDS) : below(DROPPED)));
  for (int line = 0; line < LINES; line++)
    for (int i = 0; i < 20; i++) bench.send(frame_of(below(VES), below(KINDS)));
  int left = frames;
  while (card.busy() || left > 0) {
    if (!card.busy()) {
      card.finish();
      for (int i = 0; i < 80; i++) {
        int page = below(VES + 4);
        if (below(16)) bench.random_write(page ? page : VES + 1, false);
        else
          card.put({false, Bench::address(below(VES + 1), VERDICTS + 4 * below(512)), 0, 0, OKAY});
      }
    }
    card.step();
    left--;
  }
  card.finish();
  card.drain("traffic");
  card.valid_chance = card.ready_chance = card.bus_chance = card.answer_chance = 256;
}

// Two ports flood one queue, in frames of one beat: each cycle has an event of the same counter.
static void flood(Bench& bench) {
  Card& card = bench.card;
  for (int i = 0; i < 800; i++) {
    Frame frame = frame_of(2, i % 3 ? DROPPED : DIRECT);
    if (frame.bytes.size() > 64) { i--; continue; }
    bench.send(frame);
  }
  card.drain("flood");
}

// Frames to one VE's address come from one port; the host sends for it besides.
static void isolation(Bench& bench) {
  Card& card = bench.card;
  int a = below(VES), b = (a + 1 + below(VES - 1)) % VES;
  bool harm = below(4) != 0;
  card.bus_chance = 100 + below(157);
  // b begins an entry, and ends it when a is done. A high word waits to be read.
  Entry half = Entry().put(1, 1).put(neighbour_of(b, 0), 48);
  for (int i = 0; i < 2; i++) bench.write(1 + b, WRITE_DATA + 4 * i, half.words[i]);
  bench.read(1 + b, SENT + 16 * port_of(b, 1));
  card.finish();
  u32 target = bench.target, pool = bench.pool;
  for (int i = 0; i < 120; i++) {
    bench.random_write(chance(20) ? VES + 1 + below(500) : 1 + a, harm);
    if (chance(40)) bench.read(1 + a, SENT + 16 * below(8));
  }
  card.finish();
  if (target != bench.target || pool != bench.pool) fail("the model changes the super page");
  bench.read(1 + b, SENT + 16 * port_of(b, 1) + 4);
  bench.write(1 + b, COMMIT + 4 * T_ARP, 0);
  for (u32 offset = 0; offset < 0x60; offset += 4) bench.read(0, offset);
  card.finish();
  for (int ve = 0; ve < VES; ve++) if (ve != a || !harm) bench.probe(ve);
  card.drain("isolation");
  if (harm) bench.own_tables(a);
  card.finish();
  bench.probe(a);
  card.drain("isolation, own tables");
  card.bus_chance = 256;
}

// Clears a slot's counters while frames of the others pass.
static void clearing(Bench& bench) {
  Card& card = bench.card;
  card.preset();
  int slot = below(VES + 1);
  card.watching = false;
  for (int i = 0; i < 400; i++) {
    Frame frame = frame_of(below(VES), below(BY_NODE));
    if (frame.slot != slot) bench.send(frame);
  }
  for (int i = 0; i < 80; i++) card.step();
  // The first one's answer comes before the sweep ends.
  card.put({true, CLEAR, u32(slot)});
  card.put({true, CLEAR, u32(slot), 15, SLVERR});
  card.put({true, CLEAR, VES + 1, 15, SLVERR});
  card.put({false, CLEARING, 1, 0, OKAY, true});
  bench.refused_address = CLEAR;
  card.finish();
  card.drain("clearing");
  for (int i = 0; i < 300; i++) card.step();
  Counters& counts = card.counts;
  for (int i = 0; i < 128; i++) counts.verdicts[slot * 128 + i] = {};
  for (int i = 0; i < 8; i++) counts.sent[slot * 8 + i] = {};
  for (auto& kind : counts.lone) kind[slot] = 0;
  // The counter of refused writes was cleared before them, or after.
  if (slot == NONE) counts.lone[2][NONE] = card.dut.rootp->LONE(2, counters)[NONE] & 3;
  card.watching = card.changed = true;
  card.step();
  bench.write(0, CLEAR, VES + 1);
  bench.read_all();
}

// Accesses of the super page with values at and beyond their bounds. None changes what frames meet.
static void super_page(Bench& bench) {
  Card& card = bench.card;
  card.bus_chance = 60 + below(197);
  auto read = [&] {
    for (u32 offset = TARGET; offset <= CLEARING; offset += 4) bench.read(0, offset);
  };
  for (int i = 0; i < 150; i++) {
    u32 out = below(9) << 16, slot = below(VES + 3);
    switch (below(8)) {
      case 0: bench.write(0, TARGET, below(4) ? below(VES + 3) : rnd()); break;
      case 1:
        bench.write(0, POOL, below(3) ? rnd() & 0x1ffff : rnd(), below(8) ? 15 : below(15));
        break;
      case 2: bench.write(0, rnd() & 0x7c, rnd(), below(15)); break;
      case 3: bench.write(0, COMMIT + 4 * below(TABLES), 0x80000 | (rnd() & 0x1ffff)); break;
      case 4: bench.write(0, 4 * below(T_HOP), rnd()); break;
      case 5: read(); break;
      default:
        // Queues that do not exist, and tables of no VE.
        if (out < 4u << 16 || out == u32(HOST) << 16) slot = VES + 1 + below(1000);
        bench.write(0, COMMIT + 4 * (T_QUOTA + below(2)), out | slot);
        if (bench.target == NONE)
          bench.write(0, COMMIT + 4 * (T_METER + below(T_LEAF - T_METER)), 0);
    }
  }
  read();
  bench.write(0, POOL, 64);
  // A VE writes right behind a change of its parts: the new ones bind it. Two older writes of the
  // VE are on their way when the change comes.
  int ve = below(VES);
  bench.write(0, TARGET, ve);
  for (u32 word = 0; word < 2; word++) bench.write(1 + ve, WRITE_DATA + 4 * word, 0);
  for (u32 word = 0; word < 4; word++)
    bench.write(0, WRITE_DATA + 4 * word, word == 2 ? ve * VE_LEAVES : 0);
  card.finish();
  card.bus_chance = 256;
  card.answer_chance = 256;
  for (u32 word = 4; word < 6; word++) bench.write(1 + ve, WRITE_DATA + 4 * word, 0);
  card.put({true, COMMIT + 4 * T_LPM_SEGMENTS, 0});
  card.put({true, Bench::address(1 + ve, COMMIT + 4 * T_LEAF), 7, 15, SLVERR});
  bench.refused_address = Bench::address(1 + ve, COMMIT + 4 * T_LEAF);
  card.finish();
  card.bus_chance = 256;
  bench.grant(ve);
  bench.write(1 + ve, COMMIT + 4 * T_LEAF, 7);
  read();
  card.finish();
  for (ve = 0; ve < VES; ve++) bench.probe(ve);
  card.drain("super page");
}

static void reset(Bench& bench) {
  bench.card.reset();
  bench.target = bench.pool = bench.refused_address = 0;
  bench.card.put({false, EPOCH, 0, 0, OKAY});
  u32 epoch = bench.card.finish()[0].got;
  if (epoch > (VES + 1) * 128 / 64 + 1) fail("EPOCH is %u after a reset", epoch);
  bench.read_all();
}

int main(int argc, char** argv) {
  Verilated::commandArgs(argc, argv);
  int rounds = argc > 1 ? atoi(argv[1]) : 10;
  random_state = argc > 2 ? strtoull(argv[2], nullptr, 10) * 0x9e3779b97f4a7c15ull : 1;
  Bench bench;
  Card& card = bench.card;
  reset(bench);
  bench.set_up();
  for (int ve = 0; ve < VES; ve++) bench.probe(ve);
  card.drain("first frames");
  pace(bench);
  epoch(bench);
  for (int round = 0; round < rounds && !failures; round++) {
    card.preset();
    traffic(bench, 300);
    flood(bench);
    for (int i = 0; i < 6 && !failures; i++) isolation(bench);
    super_page(bench);
    bench.read_all();
    clearing(bench);
    if (round % 4 == 3) {  // a reset in the middle of frames and accesses
      for (int i = 0; i < 200; i++) bench.send(frame_of(below(VES), below(KINDS)));
      for (int i = 0; i < 40; i++) bench.random_write(1 + below(VES), false);
      for (int i = below(300); i > 0; i--) card.step();
      reset(bench);
      bench.set_up();
    }
  }
  printf("registers, %d bits: %llu frames in, %llu out, %llu lost in queues, %llu cycles, "
         "%d failures\n", DATA_BITS, (unsigned long long)card.frames_in,
         (unsigned long long)card.frames_out, (unsigned long long)card.unqueued,
         (unsigned long long)card.cycle, failures);
  return failures != 0;
}
