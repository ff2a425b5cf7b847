// Writes a World into the tables of a card_header. Builds the trie by brute force.
#pragma once
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "Vcard_header.h"
#include "model.h"
#include "verilated.h"

constexpr int VES = 8, NODES = 1024, LEAVES = 16384, GROUPS = 512, BLOCKS = 32, HOPS = 512,
              ARPS = 1024, VMACS = 256, LEVELS = 20;
constexpr int LATENCY = 56;
// LPM_WRITE_LATENCY of card_lpm_pkg, from the Makefile.
constexpr int WRITE_LATENCY = CARD_WRITE_LATENCY;

enum Table {
  T_VMAC, T_STASH, T_SEED, T_METER, T_CONTROL, T_ATTACHMENT, T_HOP_SEGMENTS, T_LPM_SEGMENTS,
  T_OPTIONS, T_CONTEXT, T_OWN, T_GROUP, T_BUCKET, T_HOP, T_ARP, T_ROOT, T_NODE, T_LEAF,
};

// A number of many bits, filled from the most significant field on.
template <int BITS>
struct Packed {
  std::vector<bool> bits;
  Packed& put(u128 value, int count) {
    for (int i = count - 1; i >= 0; i--) bits.push_back(value >> i & 1);
    return *this;
  }
  template <class Wide>
  void to(Wide& wide) const {
    for (int i = 0; i < (BITS + 31) / 32; i++) wide[i] = 0;
    int count = static_cast<int>(bits.size());
    for (int i = 0; i < count; i++)
      if (bits[count - 1 - i]) wide[i / 32] |= 1u << (i % 32);
  }
};

template <class Wide>
u64 get(const Wide& wide, int low, int count) {
  u64 value = 0;
  for (int i = count - 1; i >= 0; i--)
    value = value << 1 | (wide[(low + i) / 32] >> ((low + i) % 32) & 1);
  return value;
}

inline u32 vmac_hash(u64 key, u64 seed) {
  u64 mixed = key ^ seed, spread = 0;
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

using Write = Packed<192>;

// Queue of writes: table, VE, index, data, and whether it must be refused.
struct Writes {
  struct One {
    int table, ve;
    u32 index;
    Write data;
    bool refused;
  };
  std::vector<One> all;
  void put(int table, int ve, u32 index, const Write& data, bool refused = false) {
    all.push_back({table, ve, index, data, refused});
  }
};

// Trie of one VE: nodes per level, shared by both families.
class Trie {
 public:
  Trie(int ve, Writes& writes) : ve_(ve), writes_(writes) {}

  void build(const std::vector<Route>& routes, bool v6) {
    for (u32 top = 0; top < 256; top++) {
      u128 key = static_cast<u128>(top) << 120;
      auto [kind, index] = place(routes, key, 8, 1);
      writes_.put(T_ROOT, ve_, v6 << 8 | top, Write().put(kind, 2).put(index, 32));
    }
  }

 private:
  static bool covers(u128 key, int length, const Route& route) {
    return route.length > length && (length == 0 || (route.prefix ^ key) >> (128 - length) == 0);
  }

  // Root kind and index of the part of the trie below a prefix.
  std::pair<u32, u32> place(const std::vector<Route>& routes, u128 key, int length, int level) {
    for (const Route& route : routes)
      if (covers(key, length, route)) {
        u32 index = next_node_[level]++;
        node(routes, key, length, level, index);
        return {2, index};
      }
    Leaf one = look_up(routes, key);
    auto found = shared_.find(one);
    if (found == shared_.end()) found = shared_.emplace(one, leaf(one)).first;
    return {1, found->second};
  }

  u32 leaf(Leaf leaf) {
    assert(next_leaf_ < LEAVES / VES);
    writes_.put(T_LEAF, ve_, next_leaf_, Write().put(leaf.kind, 3).put(leaf.group, 10));
    return next_leaf_++;
  }

  void node(const std::vector<Route>& routes, u128 key, int length, int level, u32 index) {
    assert(index < NODES / VES && level <= LEVELS);
    u64 child_map = 0, leaf_map = 1;
    std::vector<Leaf> leaves;
    std::vector<u128> children;
    for (int slot = 0; slot < 64; slot++) {
      u128 below = key | static_cast<u128>(slot) << (122 - length);
      bool child = false;
      for (const Route& route : routes) child |= covers(below, length + 6, route);
      if (child) {
        child_map |= 1ull << slot;
        children.push_back(below);
        continue;
      }
      Leaf one = look_up(routes, below);
      if (leaves.empty() || !(leaves.back() == one)) {
        if (!leaves.empty()) leaf_map |= 1ull << slot;
        leaves.push_back(one);
      }
    }
    if (leaves.empty()) leaves.push_back(Leaf{});
    u32 leaf_base = next_leaf_;
    for (Leaf one : leaves) leaf(one);
    u32 child_base = next_node_[level + 1];
    next_node_[level + 1] += static_cast<u32>(children.size());
    for (size_t i = 0; i < children.size(); i++)
      node(routes, children[i], length + 6, level + 1, child_base + static_cast<u32>(i));
    writes_.put(T_NODE, ve_, static_cast<u32>(level) << 27 | index,
                Write().put(leaf_base, 32).put(child_base, 32).put(leaf_map, 64).put(child_map, 64));
  }

  int ve_;
  Writes& writes_;
  u32 next_node_[LEVELS + 2] = {};
  u32 next_leaf_ = 0;
  std::map<Leaf, u32> shared_;
};

inline Write segments_of(int ve, u32 arps, u32 hops, u32 blocks, u32 groups) {
  auto number = static_cast<u32>(ve);
  return Write()
      .put(number * (ARPS / VES), 16).put(arps, 16)
      .put(number * (HOPS / VES), 16).put(hops, 16)
      .put(number * (BLOCKS / VES), 16).put(blocks, 16)
      .put(number * (GROUPS / VES), 16).put(groups, 16);
}

inline Write lpm_segments_of(int ve, u32 leaves) {
  auto number = static_cast<u32>(ve);
  return Write()
      .put(leaves, 32).put(number * (LEAVES / VES), 32)
      .put(NODES / VES, 32).put(number * (NODES / VES), 32);
}

// All writes that make an empty card hold `world`.
inline Writes writes_of(World& world, u64 seed, std::function<u32(u32)> random) {
  Writes writes;
  for (u32 i = 0; i < VMACS; i++)
    writes.put(T_VMAC, 0, i / (VMACS / 4) << 8 | i % (VMACS / 4), Write());
  writes.put(T_SEED, 0, 0, Write().put(seed, 60));
  std::set<std::pair<u32, u32>> used;
  u32 stashed = 0;
  for (auto& [key, to] : world.vmacs) {
    u64 packed = static_cast<u64>(key.first) << 48 | key.second;
    u32 hash = vmac_hash(packed, seed);
    Write entry = Write().put(1, 1).put(packed, 60).put(static_cast<u32>(to.first), 8)
                      .put(static_cast<u32>(to.second), 4);
    u32 way = random(16) == 0 && stashed < 8 ? 4 : 0;
    while (way < 4 && used.count({way, hash >> (8 * way) & (VMACS / 4 - 1)})) way++;
    if (way < 4) {
      u32 set = hash >> (8 * way) & (VMACS / 4 - 1);
      used.insert({way, set});
      writes.put(T_VMAC, 0, way << 8 | set, entry);
    } else {
      assert(stashed < 8);
      writes.put(T_STASH, 0, stashed++, entry);
    }
  }
  for (int number = 0; number < VES; number++) {
    Ve& ve = world.ves[number];
    writes.put(T_HOP_SEGMENTS, number, 0,
               segments_of(number, ARPS / VES, HOPS / VES, BLOCKS / VES, GROUPS / VES));
    writes.put(T_LPM_SEGMENTS, number, 0, lpm_segments_of(number, LEAVES / VES));
    for (int i = 0; i < WRITE_LATENCY; i++)  // as card_lpm wants
      writes.put(T_CONTROL, number, 0, Write().put(ve.enabled, 1));
    writes.put(T_METER, number, 0,
               Write().put(ve.limits.limited, 1).put(ve.limits.rate, 28).put(ve.limits.burst, 20));
    writes.put(T_OPTIONS, number, 0,
               Write().put(ve.forwards_v4, 1).put(ve.forwards_v6, 1).put(ve.chooses_v4, 1)
                   .put(ve.chooses_v6, 1).put(ve.seed, 32));
    for (u32 i = 0; i < 16; i++) {
      const Vport& vport = ve.vports[i];
      const Hooks& hooks = vport.hooked;
      writes.put(T_ATTACHMENT, number, i,
                 Write().put(vport.attached, 1).put(static_cast<u32>(vport.port), 3)
                     .put(vport.segment, 12).put(vport.mac, 48));
      writes.put(T_CONTEXT, number, i,
                 Write().put(vport.named, 1).put(vport.up, 1).put(vport.forwards_v4, 1)
                     .put(hooks.all, 1).put(hooks.v4, 1).put(hooks.v6, 1).put(hooks.out, 1)
                     .put(hooks.back_v4, 1).put(hooks.back_v6, 1).put(vport.mtu, 14));
    }
    u32 slot = 0;
    assert(ve.own_v4.size() <= 16);
    for (u32 address : ve.own_v4)
      writes.put(T_OWN, number, slot++, Write().put(1, 1).put(address, 32));
    for (; slot < 16; slot++) writes.put(T_OWN, number, slot, Write());
    for (u32 i = 0; i < ve.neighbours.size(); i++)
      writes.put(T_ARP, number, i,
                 Write().put(ve.neighbours[i].has_value(), 1).put(ve.neighbours[i].value_or(0), 48));
    for (u32 i = 0; i < ve.hops.size(); i++) {
      const Hop& hop = ve.hops[i];
      writes.put(T_HOP, number, i,
                 Write().put(hop.exists, 1).put(static_cast<u32>(hop.vport), 4)
                     .put(ve.chosen[i], 1).put(hop.arp.has_value(), 1).put(hop.arp.value_or(0), 12)
                     .put(hop.mtu, 14));
    }
    for (u32 i = 0; i < ve.groups.size(); i++) {
      const Group& group = ve.groups[i];
      bool multi = group.hops.size() > 1;
      u32 index = multi ? ve.block_of[i] : group.hops.empty() ? 0 : group.hops[0];
      if (multi)
        for (u32 bucket = 0; bucket < 256; bucket++)
          writes.put(T_BUCKET, number, index << 8 | bucket,
                     Write().put(group.hops[bucket % group.hops.size()], 12));
      writes.put(T_GROUP, number, i, Write().put(!group.hops.empty(), 1).put(multi, 1).put(index, 12));
    }
    Trie trie(number, writes);
    trie.build(ve.v4, false);
    trie.build(ve.v6, true);
    // Shorter parts make entries that were written before unreachable.
    writes.put(T_HOP_SEGMENTS, number, 0,
               segments_of(number, ve.arps_length, ve.hops_length, ve.blocks_length,
                           ve.groups_length));
    if (ve.no_leaves) writes.put(T_LPM_SEGMENTS, number, 0, lpm_segments_of(number, 0));
  }
  return writes;
}

// The card, cycle by cycle.
class Card {
 public:
  struct Result {
    u64 cycle;
    Output output;  // the frame is its first 64 bytes at most
    u16 token;
    u32 length;
  };

  Card() {
    top.clk = 0;
    top.rst = 0;
    idle();
  }

  void idle() {
    top.valid_i = 0;
    top.wr_valid_i = 0;
  }

  // One cycle with the inputs that are set. Results go to `results`.
  void step() {
    top.now_i = now;
    top.clk = 0;
    top.eval();
    if (top.valid_o) results.push_back(read());
    refused = top.wr_refused_o;
    top.clk = 1;
    top.eval();
    cycle++;
    now = (now + 1) & ((1ull << 48) - 1);
  }

  void reset() {
    idle();
    top.rst = 1;
    for (int i = 0; i < 3; i++) step();
    top.rst = 0;
  }

  void set(const Input& input) {
    top.valid_i = 1;
    Packed<566> packed;
    for (int i = 63; i >= 0; i--)
      packed.put(i < static_cast<int>(input.frame.size()) ? input.frame[i] : 0, 8);
    packed.put(input.frame.size(), 11).put(static_cast<u32>(input.port), 3).put(input.segment, 12)
        .put(static_cast<u32>(input.ve), 8).put(static_cast<u32>(input.vport), 4)
        .put(input.token, 16);
    packed.to(top.header_i);
  }

  void set(const Writes::One& one) {
    top.wr_valid_i = 1;
    top.wr_table_i = static_cast<u8>(one.table);
    top.wr_ve_i = static_cast<u8>(one.ve);
    top.wr_index_i = one.index;
    one.data.to(top.wr_data_i);
  }

  // As `set`, outside of `apply`.
  void set_once(const Writes::One& one) {
    held_.erase({one.table, one.ve, one.index});
    set(one);
  }

  // Applies all writes, one per cycle; false if one was refused or accepted wrongly. Leaves out those
  // of entries that a RAM has already.
  bool apply(const Writes& wanted) {
    bool right = true;
    Writes writes;
    for (const Writes::One& one : wanted.all) {
      bool always = one.refused || one.table == T_STASH || one.table == T_SEED ||
                    one.table == T_METER || one.table == T_CONTROL ||
                    one.table == T_HOP_SEGMENTS || one.table == T_LPM_SEGMENTS;
      if (!always) {
        auto [held, is_first] = held_.try_emplace({one.table, one.ve, one.index}, one.data.bits);
        if (!is_first && held->second == one.data.bits) continue;
        held->second = one.data.bits;
      }
      writes.all.push_back(one);
    }
    for (size_t i = 0; i < writes.all.size() + WRITE_LATENCY; i++) {
      idle();
      if (i < writes.all.size()) set(writes.all[i]);
      step();
      if (i < WRITE_LATENCY) continue;
      const auto& one = writes.all[i - WRITE_LATENCY];
      if (refused != one.refused) {
        printf("write to table %d, VE %d, index %#x: %s\n", one.table, one.ve, one.index,
               refused ? "refused" : "not refused");
        right = false;
      }
    }
    idle();
    step();
    return right;
  }

  Vcard_header top;
  u64 cycle = 0, now = 0;
  bool refused = false;
  std::vector<Result> results;

 private:
  std::map<std::tuple<int, int, u32>, std::vector<bool>> held_;

  Result read() {
    const auto& wide = top.header_o;
    Result result;
    result.cycle = cycle;
    result.token = static_cast<u16>(get(wide, 0, 16));
    Output& output = result.output;
    output.segment = static_cast<u32>(get(wide, 16, 12));
    output.port = static_cast<int>(get(wide, 28, 3));
    output.vport = static_cast<int>(get(wide, 31, 4));
    output.ve = static_cast<int>(get(wide, 35, 8));
    output.owned = get(wide, 43, 1);
    output.group = get(wide, 44, 1);
    output.verdict = static_cast<Verdict>(get(wide, 45, 4));
    result.length = static_cast<u32>(get(wide, 49, 11));
    for (u32 i = 0; i < 64 && i < result.length; i++)
      output.frame.push_back(static_cast<u8>(get(wide, 60 + 8 * static_cast<int>(i), 8)));
    output.fault = top.fault_o;
    output.excess = top.excess_o;
    return result;
  }
};
