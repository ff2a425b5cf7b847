// Slow model of the header pipeline, written from crates/ip/src/forward.rs, crates/wire, and the
// card's own rules. It holds addresses, routes, and MAC addresses, and none of the card's tables.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using u128 = unsigned __int128;
using Bytes = std::vector<u8>;

enum Verdict {
  OUT = 0,
  PUNT_LOCAL = 1,
  PUNT_NEIGHBOUR = 2,
  PUNT_EXCEPTION = 3,
  PUNT_HOOK = 4,
  PUNT_CONTROL = 5,
  DROP_NOT_FOR_US = 8,
  DROP_MALFORMED = 9,
  DROP_POLICY = 10,
  DROP_BLACKHOLE = 11,
  DROP_NO_VE = 12,
  DROP_RATE = 13,
  DROP_SPOOF = 14,
};

constexpr int HOST = 7;

struct Hooks {
  bool all = false, v4 = false, v6 = false, out = false, back_v4 = false, back_v6 = false;
};

struct Vport {
  bool attached = false, named = false, up = false, forwards_v4 = false;
  Hooks hooked;
  u32 mtu = 0;
  u64 mac = 0;
  int port = 0;
  u32 segment = 0;
};

enum LeafKind { NONE, GROUP, BLACKHOLE, HOOK, LOCAL, EXCESS };

struct Leaf {
  LeafKind kind = NONE;
  u32 group = 0;
  bool operator<(const Leaf& other) const {
    return std::pair(kind, group) < std::pair(other.kind, other.group);
  }
  bool operator==(const Leaf& other) const { return kind == other.kind && group == other.group; }
};

// A prefix; the address is left-aligned.
struct Route {
  u128 prefix = 0;
  int length = 0;
  Leaf leaf;
};

struct Hop {
  bool exists = true;
  int vport = 0;
  std::optional<u32> arp;  // index of the neighbour
  u32 mtu = 0x3fff;
};

struct Group {
  std::vector<u32> hops;  // indices
};

struct Limits {
  bool limited = false;
  u64 rate = 0;   // 2^-20 bytes per tick
  u64 burst = 0;  // bytes
};

struct Ve {
  bool enabled = false;
  bool forwards_v4 = false, forwards_v6 = false, chooses_v4 = true, chooses_v6 = true;
  u32 seed = 0;
  Vport vports[16];
  std::set<u32> own_v4;
  std::vector<Route> v4, v6;
  std::vector<Group> groups;
  std::vector<Hop> hops;
  std::vector<std::optional<u64>> neighbours;
  std::vector<bool> chosen;  // by hop: one of several
  Limits limits;
  // Lengths of the VE's parts after all tables were written.
  u32 groups_length = 0, blocks_length = 0, hops_length = 0, arps_length = 0;
  std::vector<u32> block_of;  // by group
  bool no_leaves = false;     // the part of the trie's leaves is empty
  // State of the meter.
  u128 level = 0;
  u64 time = 0;
  bool fresh = true;
};

struct Input {
  Bytes frame;
  int port = 0;
  u32 segment = 0;
  int ve = 0, vport = 0;
  u16 token = 0;
};

struct Output {
  Verdict verdict = OUT;
  bool group = false, owned = false, fault = false, excess = false, rewritten = false;
  bool any_hop = false;  // the card may choose another hop
  int ve = 0, vport = 0, port = HOST;
  u32 segment = 0;
  Bytes frame;
};

inline u32 be(const Bytes& bytes, size_t at, int count) {
  u32 value = 0;
  for (int i = 0; i < count; i++) value = value << 8 | bytes[at + i];
  return value;
}

inline u64 mac_at(const Bytes& bytes, size_t at) {
  return static_cast<u64>(be(bytes, at, 2)) << 32 | be(bytes, at + 2, 4);
}

inline u128 v6_at(const Bytes& bytes, size_t at) {
  u128 value = 0;
  for (int i = 0; i < 16; i++) value = value << 8 | bytes[at + i];
  return value;
}

// crates/wire/src/flow.rs, byte by byte.
class FlowHash {
 public:
  void write(const u8* bytes, size_t count) {
    while (count > 0) {
      u64 word = 0;
      size_t now = count < 8 ? count : 8;
      for (size_t i = 0; i < now; i++) word |= static_cast<u64>(bytes[i]) << (8 * i);
      write_u64(word);
      bytes += now, count -= now;
    }
  }
  void write_u64(u64 word) {
    u64 mixed = (state_ << 23 | state_ >> 41) ^ word ^ 0x9e3779b97f4a7c15;
    u128 product = static_cast<u128>(mixed) * 0xa0761d6478bd642f;
    state_ = static_cast<u64>(product >> 64) ^ static_cast<u64>(product);
  }
  u32 of_flow() {
    write_u64(0);
    return static_cast<u32>(state_ >> 32);
  }

 private:
  u64 state_ = 0;
};

inline u32 flow_ip(const Bytes& frame) {
  FlowHash hash;
  bool has_ports = false;
  size_t ports = 0;
  auto with_ports = [](u8 protocol) { return protocol == 6 || protocol == 17 || protocol == 132; };
  if (be(frame, 12, 2) == 0x0800) {
    hash.write(&frame[26], 8);
    hash.write(&frame[23], 1);
    has_ports = (be(frame, 20, 2) & 0x3fff) == 0 && with_ports(frame[23]);
    ports = 14 + (frame[14] & 0xf) * 4;
  } else {
    hash.write(&frame[22], 32);
    hash.write(&frame[20], 1);
    has_ports = with_ports(frame[20]);
    ports = 54;
  }
  if (has_ports && ports + 4 <= frame.size()) hash.write(&frame[ports], 4);
  return hash.of_flow();
}

// A packet, as crates/wire/src/ipv4.rs and ipv6.rs parse it. `unknown`: only the card refuses it.
struct Packet {
  u32 packet_bytes = 0;
  u8 ttl = 0, next = 0;
  bool options = false, unknown = false;
  u128 source = 0, destination = 0;
};

inline std::optional<Packet> parse_v4(const Bytes& frame) {
  size_t have = frame.size() - 14;
  if (have < 20) return {};
  Packet packet;
  u32 header_bytes = (frame[14] & 0xf) * 4;
  packet.packet_bytes = be(frame, 16, 2);
  if (frame[14] >> 4 != 4 || header_bytes < 20 || packet.packet_bytes < header_bytes ||
      packet.packet_bytes > have)
    return {};
  packet.unknown = header_bytes > 48;
  u64 sum = 0;
  for (u32 at = 0; at < header_bytes; at += 2) sum += be(frame, 14 + at, 2);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  if (!packet.unknown && sum != 0xffff) return {};
  packet.ttl = frame[22];
  packet.next = frame[23];
  packet.options = header_bytes > 20;
  packet.source = be(frame, 26, 4);
  packet.destination = be(frame, 30, 4);
  return packet;
}

inline std::optional<Packet> parse_v6(const Bytes& frame) {
  size_t have = frame.size() - 14;
  if (have < 40) return {};
  Packet packet;
  packet.packet_bytes = 40 + be(frame, 18, 2);
  if (frame[14] >> 4 != 6 || packet.packet_bytes > have) return {};
  packet.next = frame[20];
  packet.ttl = frame[21];
  packet.options = packet.next == 0;
  packet.source = v6_at(frame, 22);
  packet.destination = v6_at(frame, 38);
  return packet;
}

inline bool is_discovery(const Bytes& frame, const Packet& packet) {
  return packet.next == 58 && packet.packet_bytes > 40 && frame.size() > 54 && frame[54] >= 133 &&
         frame[54] <= 137;
}

// Longest matching prefix of a left-aligned address.
inline Leaf look_up(const std::vector<Route>& routes, u128 address) {
  int best = -1;
  Leaf leaf;
  for (const Route& route : routes) {
    u128 mask = route.length == 0 ? 0 : ~static_cast<u128>(0) << (128 - route.length);
    // Of equal routes, the later one.
    if (route.length >= best && ((route.prefix ^ address) & mask) == 0) {
      best = route.length;
      leaf = route.leaf;
    }
  }
  return leaf;
}

struct World {
  std::vector<Ve> ves;
  std::map<std::pair<u32, u64>, std::pair<int, int>> vmacs;

  // True if the frame passes the VE's meter.
  static bool meter(Ve& ve, u64 now, size_t frame_bytes) {
    u128 one = static_cast<u128>(1) << 20;
    u128 full = ve.limits.burst * one;
    u64 elapsed = (now - ve.time) & ((1ull << 48) - 1);
    if (elapsed >= 1ull << 36) elapsed = (1ull << 36) - 1;
    if (elapsed >= 1ull << 24) elapsed &= ~0xfffull;
    u128 level = ve.fresh ? full : ve.level + static_cast<u128>(elapsed) * ve.limits.rate;
    if (level > full) level = full;
    ve.time = now;
    ve.fresh = false;
    if (!ve.limits.limited) return true;
    u128 cost = (frame_bytes + 24) * one;
    bool passes = level >= cost;
    ve.level = passes ? level - cost : level;
    return passes;
  }

  Output process(const Input& input, u64 now) {
    Output output;
    output.segment = input.segment;
    output.frame = input.frame;
    const Bytes& frame = input.frame;
    bool from_host = input.port == HOST;
    std::optional<std::pair<int, int>> at;
    if (from_host) {
      if (input.ve < static_cast<int>(ves.size())) at = std::pair(input.ve, input.vport);
    } else if (frame.size() >= 14 && !(frame[0] & 1)) {
      auto found = vmacs.find({input.segment, mac_at(frame, 0)});
      if (found != vmacs.end()) at = found->second;
    }
    if (at) {
      output.owned = true;
      output.ve = at->first;
      output.vport = at->second;
    }
    output.verdict = decide(input, at, now, output);
    if (output.verdict == OUT) {
      const Vport& egress = ves[output.ve].vports[output.vport];
      output.port = egress.port;
      output.segment = egress.segment;
    }
    return output;
  }

 private:
  static Verdict own(u32 kind, const Bytes& frame) {
    bool control = kind < 0x600;
    if (kind == 0x0800) control = frame.size() >= 16 && frame[15] >= 192;
    if (kind == 0x86dd)
      control = frame.size() >= 16 && static_cast<u8>(frame[14] << 4 | frame[15] >> 4) >= 192;
    return control ? PUNT_CONTROL : PUNT_LOCAL;
  }

  Verdict decide(const Input& input, std::optional<std::pair<int, int>> at, u64 now,
                 Output& output) {
    const Bytes& frame = input.frame;
    if (frame.size() < 14) return DROP_MALFORMED;
    u32 kind = be(frame, 12, 2);
    if (input.port == HOST) {
      if (!at) return DROP_SPOOF;
      Ve& ve = ves[at->first];
      Vport& vport = ve.vports[at->second];
      bool right = ve.enabled && vport.attached && vport.named && vport.up &&
                   mac_at(frame, 6) == vport.mac;
      return right ? OUT : DROP_SPOOF;
    }
    if (frame[0] & 1) {
      output.group = true;
      bool neighbour = kind == 0x0806;
      if (kind == 0x86dd)
        if (auto packet = parse_v6(frame)) neighbour = is_discovery(frame, *packet);
      return neighbour ? PUNT_NEIGHBOUR : own(kind, frame);
    }
    if (!at) return DROP_NO_VE;
    Ve& ve = ves[at->first];
    bool within = meter(ve, now, frame.size());
    if (!ve.enabled) return DROP_NO_VE;
    if (!within) return DROP_RATE;
    const Vport& vport = ve.vports[at->second];
    if (!vport.attached || !vport.named) return PUNT_LOCAL;
    if (vport.port != input.port) return DROP_NOT_FOR_US;
    if (vport.hooked.all) return PUNT_HOOK;
    if (kind == 0x0806) return PUNT_NEIGHBOUR;
    if (kind != 0x0800 && kind != 0x86dd) return own(kind, frame);
    bool v6 = kind == 0x86dd;
    auto parsed = v6 ? parse_v6(frame) : parse_v4(frame);
    if (!parsed) return DROP_MALFORMED;
    if (parsed->unknown) return PUNT_EXCEPTION;
    std::optional<Verdict> punt;
    Leaf leaf = look_up(v6 ? ve.v6 : ve.v4, v6 ? parsed->destination : parsed->destination << 96);
    bool lpm_fault = ve.no_leaves;
    if (lpm_fault) leaf = Leaf{};
    if (auto stop = v6 ? classify_v6(ve, vport, frame, *parsed, leaf, punt)
                       : classify_v4(ve, vport, frame, *parsed, leaf, punt))
      return *stop;
    return find(ve, at->second, frame, *parsed, v6, leaf, lpm_fault, punt, output);
  }

  static std::optional<Verdict> classify_v4(const Ve& ve, const Vport& vport, const Bytes& frame,
                                            const Packet& packet, Leaf leaf,
                                            std::optional<Verdict>& punt) {
    u32 source = static_cast<u32>(packet.source), destination = static_cast<u32>(packet.destination);
    auto never = [](u32 address) {
      u32 first = address >> 24;
      return first == 0 || first == 127 || first >= 224;
    };
    if (destination >> 28 == 0xe || destination == 0xffffffff || leaf.kind == LOCAL)
      return own(0x0800, frame);
    if (never(destination) || never(source) || ve.own_v4.count(source)) return DROP_POLICY;
    if (vport.hooked.v4) {
      punt = PUNT_HOOK;
      return {};
    }
    if (!ve.forwards_v4 || !vport.forwards_v4 || packet.ttl <= 1) return PUNT_EXCEPTION;
    if (packet.options) punt = PUNT_EXCEPTION;
    return {};
  }

  static std::optional<Verdict> classify_v6(const Ve& ve, const Vport& vport, const Bytes& frame,
                                            const Packet& packet, Leaf leaf,
                                            std::optional<Verdict>& punt) {
    u128 source = packet.source, destination = packet.destination;
    auto multicast = [](u128 address) { return address >> 120 == 0xff; };
    auto link_local = [](u128 address) { return address >> 118 == 0xfe80 >> 6; };
    auto never = [](u128 address) { return address <= 1; };
    bool ours = multicast(destination) || link_local(destination) || leaf.kind == LOCAL;
    if (is_discovery(frame, packet) && ours) return PUNT_NEIGHBOUR;
    if (ours) return own(0x86dd, frame);
    if (never(destination) || never(source) || multicast(source)) return DROP_POLICY;
    if (vport.hooked.v6) {
      punt = PUNT_HOOK;
      return {};
    }
    if (!ve.forwards_v6 || link_local(source) || packet.ttl <= 1) return PUNT_EXCEPTION;
    if (packet.options) punt = PUNT_EXCEPTION;
    return {};
  }

  static Verdict find(const Ve& ve, int ingress, const Bytes& frame, const Packet& packet, bool v6,
                      Leaf leaf, bool lpm_fault, std::optional<Verdict> punt, Output& output) {
    output.any_hop = !v6 && packet.options;
    if (lpm_fault) {
      output.fault = true;
      return punt.value_or(PUNT_EXCEPTION);
    }
    switch (leaf.kind) {
      case GROUP: break;
      case BLACKHOLE: return punt.value_or(DROP_BLACKHOLE);
      case HOOK: return punt.value_or(PUNT_HOOK);
      case EXCESS: output.excess = true; return punt.value_or(PUNT_EXCEPTION);
      default: return punt.value_or(PUNT_EXCEPTION);
    }
    auto fault = [&] {
      output.fault = true;
      return punt.value_or(PUNT_EXCEPTION);
    };
    if (leaf.group >= ve.groups_length) return fault();
    const Group& group = ve.groups[leaf.group];
    if (group.hops.empty()) return punt.value_or(PUNT_EXCEPTION);
    u32 index = group.hops[0];
    if (group.hops.size() > 1) {
      if (ve.block_of[leaf.group] >= ve.blocks_length) return fault();
      u32 bucket = ((flow_ip(frame) ^ ve.seed) * 0x9e3779b1u) >> 24;
      index = group.hops[bucket % group.hops.size()];
    }
    if (index >= ve.hops_length) return fault();
    const Hop& hop = ve.hops[index];
    if (!hop.exists) return punt.value_or(PUNT_EXCEPTION);
    auto also = [&](Verdict verdict) {
      if (!punt) punt = verdict;
    };
    if (ve.chosen[index] && !(v6 ? ve.chooses_v6 : ve.chooses_v4)) also(PUNT_HOOK);
    const Vport& egress = ve.vports[hop.vport];
    if (!egress.attached || !egress.named || !egress.up) return punt.value_or(PUNT_EXCEPTION);
    if (packet.packet_bytes > egress.mtu || packet.packet_bytes > hop.mtu)
      also(!v6 && !(frame[20] & 0x40) ? PUNT_HOOK : PUNT_EXCEPTION);
    bool back = (v6 ? egress.hooked.back_v6 : egress.hooked.back_v4) && hop.vport == ingress;
    if (egress.hooked.out || back) also(PUNT_HOOK);
    if (hop.arp && *hop.arp >= ve.arps_length) return fault();
    if (!hop.arp || !ve.neighbours[*hop.arp]) return punt.value_or(PUNT_NEIGHBOUR);
    if (punt) return *punt;
    // Forward.
    output.rewritten = true;
    output.vport = hop.vport;
    Bytes& out = output.frame;
    out.resize(14 + packet.packet_bytes);
    for (int i = 0; i < 6; i++) {
      out[i] = static_cast<u8>(*ve.neighbours[*hop.arp] >> (40 - 8 * i));
      out[6 + i] = static_cast<u8>(egress.mac >> (40 - 8 * i));
    }
    if (v6) {
      out[21]--;
    } else {
      out[22]--;
      u32 sum = be(out, 24, 2) + 0x0100;
      sum += sum >= 0xffff;
      out[24] = static_cast<u8>(sum >> 8), out[25] = static_cast<u8>(sum);
    }
    return OUT;
  }
};
