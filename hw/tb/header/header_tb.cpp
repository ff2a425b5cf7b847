// Tests of card_header against the model: directed vectors for each rule, random frames in random
// worlds, isolation of VEs, refused writes, and reset. Usage: header_tb [worlds] [frames] [seed].
#include <cstring>
#include <deque>

#include "driver.h"

namespace {

u64 random_state = 1;
u64 random64() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545f4914f6cdd1d;
}
u32 below(u32 bound) { return static_cast<u32>((random64() >> 32) % bound); }
bool one_in(u32 count) { return below(count) == 0; }
template <class T>
const T& one_of(const std::vector<T>& all) {
  return all[below(static_cast<u32>(all.size()))];
}

int failures = 0;
// After a reset, the RAM of the VMAC-VE table still has entries, and their places are not defined:
// the VE of a frame that is dropped because no VE is enabled may be known or not.
bool any_owner = false;
u64 counts[16] = {}, faults = 0, excesses = 0;

const char* const NAMES[16] = {"out", "local", "neighbour", "exception", "hook", "control", "6", "7",
                               "not-for-us", "malformed", "policy", "blackhole", "no-ve", "rate",
                               "spoof", "queue"};

void print(const char* what, const Output& output) {
  printf("  %s: %s group %d owned %d ve %d vport %d port %d segment %u fault %d excess %d, %zu bytes:",
         what, NAMES[output.verdict], output.group, output.owned, output.ve, output.vport,
         output.port, output.segment, output.fault, output.excess, output.frame.size());
  for (size_t i = 0; i < output.frame.size() && i < 64; i++) printf(" %02x", output.frame[i]);
  printf("\n");
}

void check(const char* test, const Input& input, const Output& want, const Card::Result& got,
           u64 entered) {
  size_t length = want.frame.size();
  Bytes shown(want.frame.begin(), want.frame.begin() + static_cast<long>(length < 64 ? length : 64));
  Output have = got.output;
  if (any_owner && have.verdict == DROP_NO_VE)
    have.owned = want.owned, have.ve = want.ve, have.vport = want.vport;
  // The flow of IPv4 with options is not defined in the card, so neither is their hop. They are
  // punted in any case.
  if (want.any_hop) have.fault = want.fault;
  bool same = want.verdict == have.verdict && want.group == have.group && want.owned == have.owned &&
              want.ve == have.ve && want.vport == have.vport && want.port == have.port &&
              want.segment == have.segment && want.fault == have.fault &&
              want.excess == have.excess && got.length == length && shown == have.frame &&
              got.token == input.token && got.cycle == entered + LATENCY;
  counts[want.verdict]++;
  faults += want.fault, excesses += want.excess;
  if (same) return;
  failures++;
  if (failures > 10) return;
  printf("%s: frame of %zu bytes, port %d, segment %u, ve %d, vport %d; %llu cycles\n", test,
         input.frame.size(), input.port, input.segment, input.ve, input.vport,
         static_cast<unsigned long long>(got.cycle - entered));
  Output entering;
  entering.frame = input.frame;
  print("in  ", entering);
  print("want", want);
  print("got ", have);
}

// Sends frames, with pauses if `pauses`, and compares them with the model.
void run(const char* test, Card& card, World& world, const std::vector<Input>& inputs, bool pauses) {
  struct Sent {
    const Input* input;
    u64 cycle;
  };
  std::deque<Sent> to_model, to_check;
  std::deque<Output> wanted;
  size_t next = 0, checked = 0;
  card.results.clear();
  u64 idle_cycles = 0;
  while (checked < inputs.size() && idle_cycles < 2 * LATENCY) {
    card.idle();
    if (next < inputs.size() && (!pauses || !one_in(4))) {
      card.set(inputs[next]);
      to_model.push_back({&inputs[next], card.cycle});
      to_check.push_back({&inputs[next], card.cycle});
      next++;
      idle_cycles = 0;
    } else {
      idle_cycles++;
    }
    // The meter has the time two cycles after the frame.
    if (!to_model.empty() && to_model.front().cycle + 2 == card.cycle) {
      wanted.push_back(world.process(*to_model.front().input, card.now));
      to_model.pop_front();
    }
    card.step();
    if (pauses && one_in(50)) {
      u64 pause = random64() >> (12 + below(52));
      card.now = (card.now + pause) & ((1ull << 48) - 1);
    }
    for (; checked < card.results.size() && !wanted.empty(); checked++) {
      check(test, *to_check.front().input, wanted.front(), card.results[checked],
            to_check.front().cycle);
      to_check.pop_front();
      wanted.pop_front();
    }
  }
  if (checked != inputs.size() || card.results.size() != inputs.size()) {
    printf("%s: %zu frames in, %zu out\n", test, inputs.size(), card.results.size());
    failures++;
  }
}

void load(const char* test, Card& card, World& world) {
  if (!card.apply(writes_of(world, random64() & ((1ull << 60) - 1), below))) {
    printf("%s: a write was answered wrongly\n", test);
    failures++;
  }
}

// ------------------------------------------------------------------------------------------------
// Frames.

void put(Bytes& bytes, size_t at, u64 value, int count) {
  for (int i = 0; i < count; i++)
    bytes[at + static_cast<size_t>(i)] = static_cast<u8>(value >> (8 * (count - 1 - i)));
}

void sum_v4(Bytes& frame) {
  size_t header_bytes = (frame[14] & 0xf) * 4u;
  if (frame.size() < 14 + header_bytes || header_bytes < 20) return;
  put(frame, 24, 0, 2);
  u64 sum = 0;
  for (size_t at = 0; at < header_bytes; at += 2) sum += be(frame, 14 + at, 2);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  put(frame, 24, ~sum, 2);
}

struct Ip {
  u64 to = 0, from = 0x020000000099;
  u128 source = 0, destination = 0;
  u8 ttl = 64, next = 17, tos = 0, words = 5;
  u16 fragment = 0;
  u32 payload = 20, padding = 0;
  u8 first = 0xaa;  // first byte of the payload
};

Bytes v4(const Ip& ip) {
  u32 header_bytes = ip.words * 4u;
  Bytes frame(14 + header_bytes + ip.payload + ip.padding);
  for (u8& byte : frame) byte = static_cast<u8>(random64());
  put(frame, 0, ip.to, 6);
  put(frame, 6, ip.from, 6);
  put(frame, 12, 0x0800, 2);
  frame[14] = 0x40 | ip.words;
  frame[15] = ip.tos;
  put(frame, 16, header_bytes + ip.payload, 2);
  put(frame, 20, ip.fragment, 2);
  frame[22] = ip.ttl;
  frame[23] = ip.next;
  put(frame, 26, static_cast<u64>(ip.source), 4);
  put(frame, 30, static_cast<u64>(ip.destination), 4);
  sum_v4(frame);
  return frame;
}

Bytes v6(const Ip& ip) {
  Bytes frame(54 + ip.payload + ip.padding);
  for (u8& byte : frame) byte = static_cast<u8>(random64());
  put(frame, 0, ip.to, 6);
  put(frame, 6, ip.from, 6);
  put(frame, 12, 0x86dd, 2);
  frame[14] = static_cast<u8>(0x60 | ip.tos >> 4);
  frame[15] = static_cast<u8>(ip.tos << 4);
  put(frame, 18, ip.payload, 2);
  frame[20] = ip.next;
  frame[21] = ip.ttl;
  for (int i = 0; i < 16; i++) {
    frame[22 + static_cast<size_t>(i)] = static_cast<u8>(ip.source >> (120 - 8 * i));
    frame[38 + static_cast<size_t>(i)] = static_cast<u8>(ip.destination >> (120 - 8 * i));
  }
  if (ip.payload > 0) frame[54] = ip.first;
  return frame;
}

Bytes plain(u64 to, u16 kind, size_t length = 60) {
  Bytes frame(length);
  put(frame, 0, to, 6);
  put(frame, 6, 0x020000000099, 6);
  put(frame, 12, kind, 2);
  return frame;
}

constexpr u128 V6(u64 high, u64 low) { return static_cast<u128>(high) << 64 | low; }

// ------------------------------------------------------------------------------------------------
// Directed vectors.

constexpr int A = 1;  // the VE of most vectors
constexpr u64 MAC0 = 0x020000000100, MAC1 = 0x020000000101, GATEWAY = 0x02000000aa01;
constexpr u32 NET = 0x0a000000;  // 10/8

World plain_world() {
  World world;
  world.ves.resize(VES);
  for (int number = 0; number < VES; number++) {
    Ve& ve = world.ves[number];
    ve.groups_length = GROUPS / VES, ve.blocks_length = BLOCKS / VES;
    ve.hops_length = HOPS / VES, ve.arps_length = ARPS / VES;
  }
  Ve& ve = world.ves[A];
  ve.enabled = ve.forwards_v4 = ve.forwards_v6 = true;
  ve.seed = 0x12345678;
  for (int i = 0; i < 2; i++) {
    Vport& vport = ve.vports[i];
    vport.attached = vport.named = vport.up = vport.forwards_v4 = true;
    vport.mtu = 1500;
    vport.mac = MAC0 + static_cast<u64>(i);
    vport.port = i;
    vport.segment = 10 + static_cast<u32>(i);
    world.vmacs[{vport.segment, vport.mac}] = {A, i};
  }
  // Hops: 0 by vport 1; 1 by vport 0; 2 and 3 the same as one of two; 4 unresolved; 5 with a small
  // MTU; 6 does not exist; 7 by a vport that does not exist.
  ve.neighbours = {GATEWAY, GATEWAY + 1, {}};
  ve.hops = {{true, 1, 0, 0x3fff}, {true, 0, 1, 0x3fff}, {true, 1, 0, 0x3fff}, {true, 0, 1, 0x3fff},
             {true, 1, {}, 0x3fff}, {true, 1, 0, 1000}, {false, 1, 0, 0x3fff},
             {true, 9, 0, 0x3fff}, {true, 1, 2, 0x3fff}};
  ve.chosen.assign(ve.hops.size(), false);
  ve.chosen[2] = ve.chosen[3] = true;
  ve.groups = {{{0}}, {{1}}, {{2, 3}}, {{4}}, {{5}}, {{}}, {{6}}, {{7}}, {{8}}};
  ve.block_of.assign(ve.groups.size(), 0);
  auto v4_route = [&](u32 prefix, int length, Leaf leaf) {
    ve.v4.push_back({static_cast<u128>(prefix) << 96, length, leaf});
  };
  auto v6_route = [&](u64 high, u64 low, int length, Leaf leaf) {
    ve.v6.push_back({V6(high, low), length, leaf});
  };
  // 10.n/16 has group n; 10.100/16 and above the other kinds.
  for (u32 n = 0; n < ve.groups.size(); n++) {
    v4_route(NET | n << 16, 16, {GROUP, n});
    v6_route(0x20010db800000000 | n << 16, 0, 48, {GROUP, n});
  }
  LeafKind kinds[] = {BLACKHOLE, HOOK, EXCESS};
  for (u32 n = 0; n < 3; n++) {
    v4_route(NET | (100 + n) << 16, 16, {kinds[n], 0});
    v6_route(0x20010db800000000 | (100 + n) << 16, 0, 48, {kinds[n], 0});
  }
  v4_route(NET | 0x000001, 32, {LOCAL, 0});
  v4_route(NET | 0x0000ff, 32, {LOCAL, 0});  // a broadcast address: local, and not own
  v6_route(0x20010db800000000, 1, 128, {LOCAL, 0});
  ve.own_v4 = {NET | 0x000001};
  return world;
}

Ip to_v4(u32 group) {
  Ip ip;
  ip.to = MAC0;
  ip.source = NET | 0x0705;
  ip.destination = NET | group << 16 | 0x0203;
  return ip;
}

Ip to_v6(u64 group) {
  Ip ip;
  ip.to = MAC0;
  ip.source = V6(0x20010db800000000, 0x705);
  ip.destination = V6(0x20010db800000000 | group << 16, 0x203);
  return ip;
}

int vectors = 0;
void vector(const char* name, const Bytes& frame, Verdict verdict, bool forwarded = false,
            std::function<void(World&)> change = nullptr, int port = 0, u32 segment = 10,
            int ve = 0, int vport = 0) {
  static Card card;
  World world = plain_world();
  if (change) change(world);
  card.reset();
  load(name, card, world);
  Input input{frame, port, segment, ve, vport, static_cast<u16>(random64())};
  World checked = world;
  Output output = checked.process(input, card.now + 2);
  if (output.verdict != verdict || output.rewritten != forwarded) {
    printf("%s: the model says %s\n", name, NAMES[output.verdict]);
    failures++;
  }
  run(name, card, world, {input}, false);
  vectors++;
}

template <class F>
Ip with(Ip ip, F change) {
  change(ip);
  return ip;
}

void directed() {
  using W = World&;
  auto hooks = [](auto change) { return [change](W w) { change(w.ves[A].vports[0].hooked); }; };
  auto egress = [](auto change) { return [change](W w) { change(w.ves[A].vports[1].hooked); }; };
  Bytes four = v4(to_v4(0)), six = v6(to_v6(0));

  vector("IPv4", four, OUT, true);
  vector("IPv6", six, OUT, true);
  vector("IPv4 back out of its vport", v4(to_v4(1)), OUT, true);
  vector("padding is cut", v4(with(to_v4(0), [](Ip& ip) { ip.payload = 2, ip.padding = 24; })), OUT,
         true);
  vector("1,500 bytes", v4(with(to_v4(0), [](Ip& ip) { ip.payload = 1480; })), OUT, true);
  vector("TTL 2", v4(with(to_v4(0), [](Ip& ip) { ip.ttl = 2; })), OUT, true);
  vector("TTL 255", v4(with(to_v4(0), [](Ip& ip) { ip.ttl = 255; })), OUT, true);
  // RFC 1624 section 4: checksums around the end-around carry.
  for (u32 sum : {0xfefeu, 0xfeffu, 0xff00u, 0xffffu, 0x0000u}) {
    Bytes frame = four;
    // The identification takes up what the sum is to be more or less.
    u32 word = be(frame, 18, 2) + be(frame, 24, 2) + (0xffff - sum);
    while (word >> 16) word = (word & 0xffff) + (word >> 16);
    put(frame, 18, word, 2);
    put(frame, 24, sum, 2);
    vector("checksum", frame, OUT, true);
  }

  // The card's own rules.
  for (size_t length : {1, 6, 13}) {
    Bytes runt(four.begin(), four.begin() + static_cast<long>(length));
    vector("runt", runt, DROP_MALFORMED);
  }
  vector("another MAC address", v4(with(to_v4(0), [](Ip& ip) { ip.to = MAC0 + 7; })), DROP_NO_VE);
  vector("the MAC address on another segment", four, DROP_NO_VE, false, nullptr, 0, 11);
  vector("disabled VE", four, DROP_NO_VE, false, [](W w) { w.ves[A].enabled = false; });
  vector("beyond the rate", four, DROP_RATE, false, [](W w) { w.ves[A].limits = {true, 0, 77}; });
  vector("within the rate", four, OUT, true, [](W w) { w.ves[A].limits = {true, 0, 78}; });
  vector("another port", four, DROP_NOT_FOR_US, false, nullptr, 1);
  vector("another port, hooked", four, DROP_NOT_FOR_US, false, hooks([](Hooks& h) { h.all = true; }),
         1);

  // Frames from the host.
  Bytes host = plain(0xffffffffffff, 0x0806);
  put(host, 6, MAC1, 6);
  vector("from the host", host, OUT, false, nullptr, HOST, 0, A, 1);
  vector("from the host, another MAC address", host, DROP_SPOOF, false, nullptr, HOST, 0, A, 0);
  vector("from the host, another VE", host, DROP_SPOOF, false, nullptr, HOST, 0, 0, 1);
  vector("from the host, no such VE", host, DROP_SPOOF, false, nullptr, HOST, 0, A + VES, 1);
  vector("from the host, disabled VE", host, DROP_SPOOF, false,
         [](W w) { w.ves[A].enabled = false; }, HOST, 0, A, 1);
  vector("from the host, down", host, DROP_SPOOF, false,
         [](W w) { w.ves[A].vports[1].up = false; }, HOST, 0, A, 1);
  vector("from the host, not attached", host, DROP_SPOOF, false,
         [](W w) { w.ves[A].vports[1].attached = false; }, HOST, 0, A, 1);
  vector("from the host, hooked", host, OUT, false, egress([](Hooks& h) { h.all = h.out = true; }),
         HOST, 0, A, 1);
  vector("from the host, beyond the rate", host, OUT, false,
         [](W w) { w.ves[A].limits = {true, 0, 0}; }, HOST, 0, A, 1);

  // Ingress vport.
  vector("vport not named", four, PUNT_LOCAL, false, [](W w) { w.ves[A].vports[0].named = false; });
  vector("vport not attached", four, PUNT_LOCAL, false,
         [](W w) { w.ves[A].vports[0].attached = false; });
  vector("hooked entirely", four, PUNT_HOOK, false, hooks([](Hooks& h) { h.all = true; }));
  vector("hooked entirely, malformed", plain(MAC0, 0x0800), PUNT_HOOK, false,
         hooks([](Hooks& h) { h.all = true; }));
  vector("ingress vport down", four, OUT, true, [](W w) { w.ves[A].vports[0].up = false; });

  // Group addresses.
  auto grouped = [](u64 to) { return [to](Ip& ip) { ip.to = to; }; };
  vector("broadcast ARP", plain(0xffffffffffff, 0x0806), PUNT_NEIGHBOUR);
  vector("short broadcast ARP", plain(0xffffffffffff, 0x0806, 14), PUNT_NEIGHBOUR);
  vector("OSPF", v4(with(to_v4(0), [](Ip& ip) { ip.to = 0x01005e000005, ip.tos = 0xc0; })),
         PUNT_CONTROL);
  vector("DHCP", v4(with(to_v4(0), grouped(0xffffffffffff))), PUNT_LOCAL);
  vector("IS-IS", plain(0x0180c2000014, 0x05dc), PUNT_CONTROL);
  vector("LLDP", plain(0x0180c200000e, 0x88cc), PUNT_LOCAL);
  auto solicitation = [](u64 to, u8 kind) {
    return [to, kind](Ip& ip) { ip.to = to, ip.next = 58, ip.first = kind, ip.tos = 0xc0; };
  };
  for (u8 kind : {133, 137})
    vector("group neighbour discovery", v6(with(to_v6(0), solicitation(0x3333ff000001, kind))),
           PUNT_NEIGHBOUR);
  for (u8 kind : {132, 138})
    vector("group ICMPv6", v6(with(to_v6(0), solicitation(0x3333ff000001, kind))), PUNT_CONTROL);
  Bytes cut = v6(with(to_v6(0), solicitation(0x3333ff000001, 135)));
  cut.resize(60);
  vector("group neighbour discovery, cut", cut, PUNT_CONTROL);
  vector("group IPv6, one byte", Bytes(cut.begin(), cut.begin() + 15), PUNT_LOCAL);

  // Kinds, headers.
  vector("ARP", plain(MAC0, 0x0806), PUNT_NEIGHBOUR);
  vector("LLC", plain(MAC0, 0x0026), PUNT_CONTROL);
  vector("smallest type", plain(MAC0, 0x0600), PUNT_LOCAL);
  vector("VLAN tag", plain(MAC0, 0x8100), PUNT_LOCAL);
  auto changed = [](Bytes frame, size_t at, u8 mask) {
    frame[at] ^= mask;
    return frame;
  };
  vector("IPv4 version", changed(four, 14, 0x10), DROP_MALFORMED);
  vector("IPv4 header length", changed(four, 14, 0x01), DROP_MALFORMED);
  vector("IPv4 checksum", changed(four, 30, 0x80), DROP_MALFORMED);
  vector("IPv6 version", changed(six, 14, 0x20), DROP_MALFORMED);
  vector("IPv4 cut", Bytes(four.begin(), four.end() - 1), DROP_MALFORMED);
  vector("IPv6 cut", Bytes(six.begin(), six.end() - 1), DROP_MALFORMED);
  vector("IPv4 of 19 bytes", Bytes(four.begin(), four.begin() + 33), DROP_MALFORMED);
  vector("IPv6 of 39 bytes", Bytes(six.begin(), six.begin() + 53), DROP_MALFORMED);
  Bytes short_total = four;
  put(short_total, 16, 19, 2);
  sum_v4(short_total);
  vector("IPv4 total below the header", short_total, DROP_MALFORMED);
  for (u8 words : {6, 12, 13, 15}) {
    Bytes options = v4(with(to_v4(0), [&](Ip& ip) { ip.words = words; }));
    vector("IPv4 options", options, PUNT_EXCEPTION);
    vector("IPv4 options, checksum", changed(options, words * 4 + 13, 1),
           words > 12 ? PUNT_EXCEPTION : DROP_MALFORMED);
  }

  // Addresses.
  auto destination = [](u128 to) { return [to](Ip& ip) { ip.destination = to; }; };
  auto source = [](u128 from) { return [from](Ip& ip) { ip.source = from; }; };
  vector("IPv4 local", v4(with(to_v4(0), destination(NET | 1))), PUNT_LOCAL);
  vector("IPv4 local control",
         v4(with(to_v4(0), [](Ip& ip) { ip.destination = NET | 1, ip.tos = 0xc0; })), PUNT_CONTROL);
  vector("IPv4 local, CS5",
         v4(with(to_v4(0), [](Ip& ip) { ip.destination = NET | 1, ip.tos = 0xbf; })), PUNT_LOCAL);
  vector("IPv4 local from itself",
         v4(with(to_v4(0), [](Ip& ip) { ip.destination = ip.source = NET | 1; })), PUNT_LOCAL);
  vector("IPv4 multicast", v4(with(to_v4(0), destination(0xe0000005))), PUNT_LOCAL);
  vector("IPv4 broadcast", v4(with(to_v4(0), destination(0xffffffff))), PUNT_LOCAL);
  for (u32 address : {0x00000000u, 0x7f000001u, 0xf0000001u, 0xfffffffeu})
    vector("IPv4 to nobody", v4(with(to_v4(0), destination(address))), DROP_POLICY);
  for (u32 address : {0x00000000u, 0x7f000001u, 0xe0000001u, 0xffffffffu})
    vector("IPv4 from nobody", v4(with(to_v4(0), source(address))), DROP_POLICY);
  vector("IPv4 from an own address", v4(with(to_v4(0), source(NET | 1))), DROP_POLICY);
  vector("IPv4 from a local broadcast address", v4(with(to_v4(0), source(NET | 0xff))), OUT, true);
  u128 router = V6(0x20010db800000000, 1);
  vector("IPv6 local", v6(with(to_v6(0), destination(router))), PUNT_LOCAL);
  vector("IPv6 from a local address", v6(with(to_v6(0), source(router))), OUT, true);
  vector("IPv6 multicast", v6(with(to_v6(0), destination(V6(0xff02000000000000, 5)))), PUNT_LOCAL);
  vector("IPv6 link-local", v6(with(to_v6(0), destination(V6(0xfe80000000000000, 5)))), PUNT_LOCAL);
  vector("IPv6 end of link-local", v6(with(to_v6(0), destination(V6(0xfebf000000000000, 5)))),
         PUNT_LOCAL);
  vector("IPv6 beyond link-local", v6(with(to_v6(0), destination(V6(0xfec0000000000000, 5)))),
         PUNT_EXCEPTION);
  for (u128 address : {V6(0, 0), V6(0, 1)}) {
    vector("IPv6 to nobody", v6(with(to_v6(0), destination(address))), DROP_POLICY);
    vector("IPv6 from nobody", v6(with(to_v6(0), source(address))), DROP_POLICY);
  }
  vector("IPv6 from ::2", v6(with(to_v6(0), source(2))), OUT, true);
  vector("IPv6 to 1::", v6(with(to_v6(0), destination(V6(1, 0)))), PUNT_EXCEPTION);
  vector("IPv6 from multicast", v6(with(to_v6(0), source(V6(0xff02000000000000, 1)))), DROP_POLICY);
  vector("IPv6 from link-local", v6(with(to_v6(0), source(V6(0xfe80000000000000, 1)))),
         PUNT_EXCEPTION);
  for (u128 to : {router, V6(0xfe80000000000000, 5), V6(0xff02000000000000, 1)})
    vector("neighbour discovery to the router",
           v6(with(to_v6(0), [&](Ip& ip) { ip.destination = to, ip.next = 58, ip.first = 135; })),
           PUNT_NEIGHBOUR);
  vector("neighbour discovery through the router",
         v6(with(to_v6(0), [&](Ip& ip) { ip.next = 58, ip.first = 135; })), OUT, true);
  Bytes empty = v6(with(to_v6(0), [&](Ip& ip) {
    ip.destination = router, ip.next = 58, ip.payload = 0, ip.padding = 6;
  }));
  empty[54] = 135;  // padding
  vector("ICMPv6 without payload", empty, PUNT_LOCAL);

  // Treatment by the kernel.
  vector("hooked IPv4", four, PUNT_HOOK, false, hooks([](Hooks& h) { h.v4 = true; }));
  vector("IPv6 where IPv4 is hooked", six, OUT, true, hooks([](Hooks& h) { h.v4 = true; }));
  vector("hooked IPv6", six, PUNT_HOOK, false, hooks([](Hooks& h) { h.v6 = true; }));
  vector("IPv4 where IPv6 is hooked", four, OUT, true, hooks([](Hooks& h) { h.v6 = true; }));
  vector("hooked, TTL 1", v4(with(to_v4(0), [](Ip& ip) { ip.ttl = 1; })), PUNT_HOOK, false,
         hooks([](Hooks& h) { h.v4 = true; }));
  vector("hooked, blackhole", v4(to_v4(100)), PUNT_HOOK, false,
         hooks([](Hooks& h) { h.v4 = true; }));
  vector("hooked, own source", v4(with(to_v4(0), source(NET | 1))), DROP_POLICY, false,
         hooks([](Hooks& h) { h.v4 = true; }));
  vector("IPv4 not forwarded", four, PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].forwards_v4 = false; });
  vector("IPv4 not forwarded by the vport", four, PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].vports[0].forwards_v4 = false; });
  vector("IPv6 not forwarded", six, PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].forwards_v6 = false; });
  vector("IPv6 whatever the vport says of IPv4", six, OUT, true,
         [](W w) { w.ves[A].vports[0].forwards_v4 = w.ves[A].forwards_v4 = false; });
  for (u8 ttl : {0, 1}) {
    vector("IPv4 TTL", v4(with(to_v4(0), [&](Ip& ip) { ip.ttl = ttl; })), PUNT_EXCEPTION);
    vector("IPv6 hop limit", v6(with(to_v6(0), [&](Ip& ip) { ip.ttl = ttl; })), PUNT_EXCEPTION);
    vector("TTL, blackhole",
           v4(with(to_v4(100), [&](Ip& ip) { ip.ttl = ttl; })), PUNT_EXCEPTION);
  }
  vector("IPv6 hop-by-hop", v6(with(to_v6(0), [](Ip& ip) { ip.next = 0; })), PUNT_EXCEPTION);
  vector("options, blackhole", v4(with(to_v4(100), [](Ip& ip) { ip.words = 6; })), PUNT_EXCEPTION);
  vector("options, hooked route", v4(with(to_v4(101), [](Ip& ip) { ip.words = 6; })),
         PUNT_EXCEPTION);
  vector("options, unknown neighbour", v4(with(to_v4(3), [](Ip& ip) { ip.words = 6; })),
         PUNT_EXCEPTION);

  // Routes.
  vector("no IPv4 route", v4(with(to_v4(0), destination(0x0b000001))), PUNT_EXCEPTION);
  vector("no IPv6 route", v6(with(to_v6(0), destination(V6(0x3000000000000000, 1)))),
         PUNT_EXCEPTION);
  Verdict kinds[] = {DROP_BLACKHOLE, PUNT_HOOK, PUNT_EXCEPTION};
  for (u32 n = 0; n < 3; n++) {
    vector("IPv4 route without hop", v4(to_v4(100 + n)), kinds[n]);
    vector("IPv6 route without hop", v6(to_v6(100 + n)), kinds[n]);
  }
  vector("leaf out of its part", four, PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].no_leaves = true; });
  vector("group out of its part", v4(to_v4(1)), PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].groups_length = 1; });
  vector("last group of its part", v4(to_v4(1)), OUT, true,
         [](W w) { w.ves[A].groups_length = 2; });
  vector("block out of its part", v4(to_v4(2)), PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].blocks_length = 0; });
  vector("hop out of its part", v4(to_v4(1)), PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].hops_length = 1; });
  vector("neighbour out of its part", v4(to_v4(1)), PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].arps_length = 1; });
  vector("neighbour out of its part, egress down", v4(to_v4(1)), PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].arps_length = 1, w.ves[A].vports[0].up = false; });
  vector("group without hops", v4(to_v4(5)), PUNT_EXCEPTION);
  vector("hop that does not exist", v4(to_v4(6)), PUNT_EXCEPTION);

  // Next hops.
  vector("one of two", v4(to_v4(2)), OUT, true);
  for (u16 port = 0; port < 8; port++) {
    Bytes frame = v4(to_v4(2));
    put(frame, 34, port, 2);
    vector("one of two by port", frame, OUT, true);
  }
  vector("the kernel chooses IPv4", v4(to_v4(2)), PUNT_HOOK, false,
         [](W w) { w.ves[A].chooses_v4 = false; });
  vector("the kernel chooses IPv6 only", v4(to_v4(2)), OUT, true,
         [](W w) { w.ves[A].chooses_v6 = false; });
  vector("the kernel chooses IPv6", v6(to_v6(2)), PUNT_HOOK, false,
         [](W w) { w.ves[A].chooses_v6 = false; });
  vector("the kernel would choose, one hop", four, OUT, true,
         [](W w) { w.ves[A].chooses_v4 = false; });
  vector("egress down", four, PUNT_EXCEPTION, false, [](W w) { w.ves[A].vports[1].up = false; });
  vector("egress not named", four, PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].vports[1].named = false; });
  vector("egress not attached", four, PUNT_EXCEPTION, false,
         [](W w) { w.ves[A].vports[1].attached = false; });
  vector("egress that does not exist", v4(to_v4(7)), PUNT_EXCEPTION);
  vector("the kernel chooses, egress down", v4(to_v4(2)), PUNT_HOOK, false, [](W w) {
    w.ves[A].chooses_v4 = false;
    w.ves[A].vports[0].up = w.ves[A].vports[1].up = false;
  });
  auto big = [](u16 fragment) {
    return [fragment](Ip& ip) { ip.payload = 1481, ip.fragment = fragment; };
  };
  vector("too big, fragmented by the kernel", v4(with(to_v4(0), big(0))), PUNT_HOOK);
  vector("too big, DF", v4(with(to_v4(0), big(0x4000))), PUNT_EXCEPTION);
  vector("too big, IPv6", v6(with(to_v6(0), big(0))), PUNT_EXCEPTION);
  vector("too big for the route", v4(with(to_v4(4), [](Ip& ip) { ip.payload = 981; })), PUNT_HOOK);
  vector("as big as the route", v4(with(to_v4(4), [](Ip& ip) { ip.payload = 980; })), OUT, true);
  vector("too big, padding does not count",
         v4(with(to_v4(4), [](Ip& ip) { ip.payload = 980, ip.padding = 99; })), OUT, true);
  vector("too big, DF, hooked egress", v4(with(to_v4(0), big(0x4000))), PUNT_EXCEPTION, false,
         egress([](Hooks& h) { h.out = true; }));
  vector("hooked egress", four, PUNT_HOOK, false, egress([](Hooks& h) { h.out = true; }));
  vector("hooked egress, unknown neighbour", v4(to_v4(3)), PUNT_HOOK, false,
         egress([](Hooks& h) { h.out = true; }));
  vector("egress hook for the way back only", four, OUT, true,
         egress([](Hooks& h) { h.back_v4 = true; }));
  vector("back, hooked", v4(to_v4(1)), PUNT_HOOK, false, hooks([](Hooks& h) { h.back_v4 = true; }));
  vector("back, hooked for IPv6", v4(to_v4(1)), OUT, true,
         hooks([](Hooks& h) { h.back_v6 = true; }));
  vector("back, IPv6 hooked", v6(to_v6(1)), PUNT_HOOK, false,
         hooks([](Hooks& h) { h.back_v6 = true; }));
  vector("unknown neighbour", v4(to_v4(3)), PUNT_NEIGHBOUR);
  vector("neighbour without MAC address", v4(to_v4(8)), PUNT_NEIGHBOUR);
  vector("unknown IPv6 neighbour", v6(to_v6(3)), PUNT_NEIGHBOUR);
}

// ------------------------------------------------------------------------------------------------
// Random worlds and frames.

u32 some_v4() {
  if (one_in(12))
    return one_of<u32>({0, 1, 0x7f000001, 0xe0000005, 0xefffffff, 0xf0000000, 0xfffffffe, 0xffffffff,
                        0xa9fe0101});
  if (one_in(12)) return static_cast<u32>(random64());
  return 0x0a000000 | below(2) << 20 | below(4) << 8 | below(8);
}

u128 some_v6() {
  if (one_in(10))
    return one_of<u128>({0, 1, 2, V6(0xff02000000000000, 1), V6(0xfe80000000000000, 1),
                         V6(0xfebf000000000000, 9), V6(0xfec0000000000000, 9), V6(1, 0)});
  if (one_in(12)) return V6(random64(), random64());
  return V6(0x20010db800000000 | below(2) << 16 | below(3), below(2) ? below(4) : 0);
}

World some_world() {
  World world;
  world.ves.resize(VES);
  for (int number = 0; number < VES; number++) {
    Ve& ve = world.ves[number];
    ve.enabled = !one_in(20);
    ve.forwards_v4 = !one_in(8), ve.forwards_v6 = !one_in(8);
    ve.chooses_v4 = !one_in(3), ve.chooses_v6 = !one_in(3);
    ve.seed = static_cast<u32>(random64());
    if (one_in(4)) ve.limits = {true, random64() >> (36 + below(28)), below(1 << (8 + below(12)))};
    ve.groups_length = GROUPS / VES, ve.blocks_length = BLOCKS / VES;
    ve.hops_length = HOPS / VES, ve.arps_length = ARPS / VES;
    for (int i = 0; i < 16; i++) {
      Vport& vport = ve.vports[i];
      if (i >= 5 && !one_in(4)) continue;
      bool strange = one_in(6);
      vport.attached = !strange || !one_in(5), vport.named = !strange || !one_in(5);
      vport.up = !strange || !one_in(3), vport.forwards_v4 = !strange || !one_in(3);
      if (strange) {
        auto rarely = [] { return one_in(5); };
        vport.hooked = {one_in(9), rarely(), rarely(), rarely(), rarely(), rarely()};
      }
      vport.mtu = one_of<u32>({1500, 1500, 1280, 68, 200, 0x3fff});
      vport.mac = 0x020000000000 | static_cast<u64>(number) << 8 | static_cast<u64>(i);
      vport.port = static_cast<int>(below(4));
      vport.segment = one_of<u32>({0, 1, 0x801});
      if (i < 5) {
        world.vmacs[{vport.segment, vport.mac}] = {number, i};
        // A macvlan.
        if (one_in(3)) world.vmacs[{vport.segment, 0x00005e000100 | below(256)}] = {number, i};
      }
    }
    for (int i = 0; i < 12; i++)
      ve.neighbours.push_back(one_in(5) ? std::nullopt : std::optional(random64() >> 16));
    for (int i = 0; i < 12; i++) {
      Hop hop;
      hop.exists = !one_in(16);
      hop.vport = static_cast<int>(below(one_in(10) ? 16 : 5));
      if (!one_in(8)) hop.arp = below(12);
      hop.mtu = one_of<u32>({0x3fff, 0x3fff, 1500, 100});
      ve.hops.push_back(hop);
      ve.chosen.push_back(one_in(3));
    }
    u32 blocks = 0;
    for (int i = 0; i < 10; i++) {
      Group group;
      u32 count = one_in(8) ? 0 : one_in(2) ? 1 : 2 + below(5);
      if (count > 1 && blocks == BLOCKS / VES) count = 1;
      for (u32 hop = 0; hop < count; hop++) group.hops.push_back(below(12));
      ve.groups.push_back(group);
      ve.block_of.push_back(count > 1 ? blocks++ : 0);
    }
    auto some_leaf = [&] {
      LeafKind kind = one_in(3) ? static_cast<LeafKind>(below(6)) : GROUP;
      return Leaf{kind, kind == GROUP ? below(10) : 0};
    };
    auto add = [&](std::vector<Route>& routes, u128 address, int length) {
      u128 mask = length == 0 ? 0 : ~static_cast<u128>(0) << (128 - length);
      for (Route& route : routes)
        if (route.length == length && route.prefix == (address & mask)) return;
      routes.push_back({address & mask, length, some_leaf()});
    };
    for (u32 i = below(14); i > 0; i--)
      add(ve.v4, static_cast<u128>(some_v4()) << 96, static_cast<int>(one_in(3) ? 32 : below(33)));
    for (u32 i = below(14); i > 0; i--)
      add(ve.v6, some_v6(), static_cast<int>(one_in(3) ? 128 : below(129)));
    if (one_in(2)) add(ve.v4, 0, 0), add(ve.v6, 0, 0);
    for (u32 i = below(17); i > 0; i--) ve.own_v4.insert(some_v4());
    if (one_in(20)) ve.no_leaves = true;
    if (one_in(12)) ve.groups_length = below(10);
    if (one_in(12)) ve.blocks_length = below(BLOCKS / VES);
    if (one_in(12)) ve.hops_length = below(12);
    if (one_in(12)) ve.arps_length = below(12);
  }
  return world;
}

Input some_input(const World& world) {
  Input input;
  input.token = static_cast<u16>(random64());
  int number = static_cast<int>(below(VES)), at = static_cast<int>(below(one_in(20) ? 16 : 5));
  const Ve& ve = world.ves[static_cast<size_t>(number)];
  const Vport& vport = ve.vports[at];
  input.port = one_in(16) ? static_cast<int>(below(4)) : vport.port;
  input.segment = one_in(20) ? one_of<u32>({0, 1, 2, 0x801, 0x001}) : vport.segment;
  Ip ip;
  ip.to = vport.mac;
  if (one_in(30) && !world.vmacs.empty()) {
    auto other = world.vmacs.begin();
    std::advance(other, below(static_cast<u32>(world.vmacs.size())));
    ip.to = other->first.second;
    input.segment = other->first.first;
  }
  if (one_in(12)) ip.to = one_of<u64>({0xffffffffffff, 0x01005e000005, 0x333300000001, 0x0180c2000000});
  if (one_in(40)) ip.to ^= 1ull << below(48);
  ip.ttl = one_of<u8>({64, 64, 64, 64, 255, 2, 1, 0});
  ip.tos = one_of<u8>({0, 0, 0xc0, 0xe0, 0xbf});
  ip.payload = one_in(4) ? below(1600) : below(60);
  ip.padding = one_in(3) ? below(40) : 0;
  if (one_in(4)) ip.fragment = static_cast<u16>(random64());
  ip.first = one_of<u8>({128, 132, 133, 135, 137, 138});
  bool six = one_in(2);
  ip.next = six ? one_of<u8>({6, 17, 132, 58, 58, 0, 44, 59}) : one_of<u8>({6, 17, 132, 1, 89});
  if (!six && one_in(10)) ip.words = static_cast<u8>(5 + below(11));
  ip.source = six ? some_v6() : some_v4();
  ip.destination = six ? some_v6() : some_v4();
  auto& routes = six ? ve.v6 : ve.v4;
  if (!routes.empty() && !one_in(4)) {
    // Near a route.
    const Route& route = one_of(routes);
    u128 address = route.prefix;
    if (route.length < 128 && one_in(2))
      address |= V6(random64(), random64()) >> route.length;
    ip.destination = six ? address : address >> 96;
  }
  input.frame = six ? v6(ip) : v4(ip);
  if (one_in(12)) input.frame = plain(ip.to, one_of<u16>({0x0806, 0x8100, 0x0026, 0x05ff, 0x0600, 0x88cc}));
  if (one_in(12)) input.frame[14 + below(24)] ^= static_cast<u8>(1 << below(8));
  if (one_in(12)) input.frame.resize(1 + below(static_cast<u32>(input.frame.size())));
  if (input.frame.size() > 1714) input.frame.resize(1714);
  if (one_in(12)) {
    input.port = HOST;
    input.ve = one_in(20) ? static_cast<int>(below(256)) : number;
    input.vport = at;
    if (input.frame.size() >= 12 && !one_in(6)) put(input.frame, 6, vport.mac, 6);
  }
  return input;
}

std::vector<Input> some_inputs(const World& world, size_t count) {
  std::vector<Input> inputs;
  while (inputs.size() < count) {
    inputs.push_back(some_input(world));
    // Runs of one frame, for the meter.
    if (one_in(8))
      for (u32 more = below(6); more > 0 && inputs.size() < count; more--)
        inputs.push_back(inputs.back());
  }
  return inputs;
}

void random_worlds(u64 worlds, size_t frames) {
  Card card;
  for (u64 number = 0; number < worlds && failures == 0; number++) {
    World world = some_world();
    card.reset();
    load("random world", card, world);
    run("random frames", card, world, some_inputs(world, frames), number % 2);
  }
}

// Whatever the pages of other VEs write, the results of a VE are the same in each cycle.
void isolation(u64 worlds, size_t frames) {
  std::vector<int> tables = {T_OPTIONS, T_CONTEXT, T_OWN, T_GROUP, T_BUCKET, T_HOP,
                             T_ARP,     T_ROOT,    T_NODE, T_LEAF};
  for (u64 number = 0; number < worlds && failures == 0; number++) {
    World world = some_world();
    int victim = static_cast<int>(below(VES));
    Card quiet, noisy;
    Writes writes = writes_of(world, random64() >> 4, below);
    quiet.reset(), noisy.reset();
    quiet.apply(writes), noisy.apply(writes);
    std::vector<Input> inputs = some_inputs(world, frames);
    quiet.results.clear(), noisy.results.clear();
    u64 accepted = 0;
    for (size_t i = 0; i < frames + LATENCY + 1; i++) {
      quiet.idle(), noisy.idle();
      if (i < frames) quiet.set(inputs[i]), noisy.set(inputs[i]);
      int ve = static_cast<int>(below(one_in(8) ? 256 : VES));
      if (ve == victim) ve = (ve + 1) % VES;
      int table = one_of(tables);
      Write data;
      for (int bit = 0; bit < 192; bit++) data.put(one_in(6), 1);
      u32 index = one_in(8) ? static_cast<u32>(random64()) : below(one_in(2) ? 1024 : 16);
      if (table == T_NODE) index |= (1 + below(LEVELS)) << 27;
      noisy.set({table, ve, index, data, false});
      quiet.step(), noisy.step();
      accepted += !noisy.refused;
    }
    if (quiet.results.size() != frames || noisy.results.size() != frames || accepted < frames / 8) {
      printf("isolation: %zu and %zu results, %llu writes accepted\n", quiet.results.size(),
             noisy.results.size(), static_cast<unsigned long long>(accepted));
      failures++;
      return;
    }
    for (size_t i = 0; i < frames; i++) {
      const Output& want = quiet.results[i].output;
      // Frames of other VEs may change; which VE a frame belongs to may not.
      if (want.owned && want.ve != victim) {
        if (noisy.results[i].output.ve != want.ve) {
          printf("isolation: frame %zu changed its VE\n", i);
          failures++;
        }
        continue;
      }
      Card::Result got = noisy.results[i];
      Output full = want;
      full.frame.resize(quiet.results[i].length);
      Input input = inputs[i];
      check("isolation", input, full, got, got.cycle - LATENCY);
      if (got.cycle - noisy.results[0].cycle != quiet.results[i].cycle - quiet.results[0].cycle) {
        printf("isolation: frame %zu was late\n", i);
        failures++;
      }
    }
  }
}

// Writes out of bounds are refused and change nothing.
void refused_writes() {
  Card card;
  World world = plain_world();
  card.reset();
  load("refused writes", card, world);
  Writes writes;
  auto full = [] {
    Write data;
    return data.put(V6(~0ull, ~0ull), 64).put(V6(~0ull, ~0ull), 128);
  };
  for (int table = 0; table <= T_LEAF; table++) {
    writes.put(table, VES, 0, full(), true);
    writes.put(table, 255, 0, full(), true);
    writes.put(table, A, 0x00ffffff, full(), true);
  }
  for (int table = T_LEAF + 1; table < 32; table++) writes.put(table, A, 0, Write(), true);
  writes.put(T_VMAC, 0, 4 << 8, Write(), true);
  writes.put(T_VMAC, 0, VMACS / 4, Write(), true);
  writes.put(T_VMAC, 0, 0, Write().put(1, 1).put(0, 60).put(VES, 8).put(0, 4), true);
  writes.put(T_STASH, 0, 8, Write(), true);
  writes.put(T_SEED, 0, 1, Write(), true);
  writes.put(T_METER, A, 1, Write(), true);
  writes.put(T_CONTROL, A, 1, Write(), true);
  writes.put(T_OPTIONS, A, 1, Write(), true);
  writes.put(T_OWN, A, 16, Write(), true);
  writes.put(T_ATTACHMENT, A, 16, Write(), true);
  writes.put(T_CONTEXT, A, 16, Write(), true);
  writes.put(T_GROUP, A, GROUPS / VES, Write(), true);
  writes.put(T_GROUP, A, 0, Write().put(1, 1).put(0, 1).put(HOPS / VES, 12), true);
  writes.put(T_GROUP, A, 0, Write().put(1, 1).put(1, 1).put(BLOCKS / VES, 12), true);
  writes.put(T_BUCKET, A, BLOCKS / VES << 8, Write(), true);
  writes.put(T_BUCKET, A, 0, Write().put(HOPS / VES, 12), true);
  writes.put(T_HOP, A, HOPS / VES, Write(), true);
  writes.put(T_HOP, A, 0,
             Write().put(1, 1).put(0, 5).put(1, 1).put(ARPS / VES, 12).put(1500, 14), true);
  writes.put(T_ARP, A, ARPS / VES, Write(), true);
  for (int part = 0; part < 4; part++) {
    u32 sizes[] = {ARPS, HOPS, BLOCKS, GROUPS};
    Write data;
    for (int i = 0; i < 4; i++) data.put(i == part ? sizes[i] - 1 : 0, 16).put(i == part ? 2 : 0, 16);
    writes.put(T_HOP_SEGMENTS, A, 0, data, true);
  }
  if (!card.apply(writes)) failures++;
  std::vector<Input> inputs;
  for (u32 group : {0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 101, 102})
    for (int port = 0; port < 2; port++)
      inputs.push_back({v4(with(to_v4(group), [&](Ip& ip) { ip.to = MAC0 + static_cast<u64>(port); })),
                        port, 10 + static_cast<u32>(port), 0, 0, 7});
  run("refused writes", card, world, inputs, false);
}

// A group frame costs no VE anything, even if its address is in the VMAC-VE table.
void group_frames_are_not_metered() {
  Card card;
  World world = plain_world();
  world.vmacs[{10, 0xffffffffffff}] = {A, 0};
  world.ves[A].limits = {true, 0, 100};
  card.reset();
  load("group frames", card, world);
  Input group{plain(0xffffffffffff, 0x0806), 0, 10, 0, 0, 1}, single{v4(to_v4(0)), 0, 10, 0, 0, 2};
  run("group frames", card, world, {group, group, single, group, single}, false);
}

// The bucket refills over pauses of any length.
void pauses_refill() {
  Card card;
  for (u64 pause : {1ull, 4095ull, (1ull << 24) - 1, 1ull << 24, (1ull << 24) + 4095,
                    (1ull << 36) - 1, 1ull << 36, (1ull << 36) + 1, 1ull << 47})
    for (u64 rate : {1, 7, 4863, 1 << 20, (1 << 28) - 1}) {
      World world = plain_world();
      world.ves[A].limits = {true, rate, 78 + below(200)};
      card.reset();
      load("pauses", card, world);
      Input input{v4(to_v4(0)), 0, 10, 0, 0, 4};
      for (int i = 0; i < 6; i++) {
        run("pauses", card, world, {input, input, input}, false);
        card.now = (card.now + pause) & ((1ull << 48) - 1);
      }
    }
}

// Limits that are written while a VE's frames come in each cycle fill the bucket for the frames that
// enter from WRITE_LATENCY - 1 cycles later on.
void limits_change_while_frames_pass() {
  Card card;
  for (int number = 0; number < 50; number++) {
    World world = plain_world();
    world.ves[A].limits = {true, below(4) << 20, 500 + below(2000)};
    card.reset();
    load("limits", card, world);
    Input input{v4(to_v4(0)), 0, 10, 0, 0, 3};
    Limits later = {true, below(4) << 20, 500 + below(2000)};
    u64 first = card.cycle, change = 20 + below(40);
    std::vector<Output> wanted;
    card.results.clear();
    for (u64 i = 0; i < 100 + LATENCY; i++) {
      card.idle();
      if (i < 100) card.set(input);
      if (i == change)
        card.set({T_METER, A, 0, Write().put(1, 1).put(later.rate, 28).put(later.burst, 20), false});
      if (i >= 2 && i < 102) {
        if (i == change + WRITE_LATENCY + 1) world.ves[A].limits = later, world.ves[A].fresh = true;
        wanted.push_back(world.process(input, card.now));
      }
      card.step();
    }
    for (u64 i = 0; i < 100; i++) check("limits", input, wanted[i], card.results[i], first + i);
  }
}

// True if the card's result, of at most 64 bytes, is the model's.
bool is(const Output& got, const Output& want) {
  long length = std::min<long>(64, static_cast<long>(want.frame.size()));
  return got.verdict == want.verdict && got.port == want.port && got.ve == want.ve &&
         got.excess == want.excess &&
         got.frame == Bytes(want.frame.begin(), want.frame.begin() + length);
}

// One write while equal frames come in each cycle: the results are the old one, then the new one.
void changes_are_atomic() {
  struct Change {
    const char* name;
    std::function<void(World&)> change;
    bool back;  // frames leave by their ingress vport
  };
  auto a = [](World& world) -> Ve& { return world.ves[A]; };
  std::vector<Change> changes = {
      {"context", [&](World& w) { a(w).vports[1].mtu = 39; }, false},
      // A mixture would be punted as an exception.
      {"context of both directions",
       [&](World& w) { a(w).vports[0].hooked.all = true, a(w).vports[0].up = false; }, true},
      {"attachment",
       [&](World& w) { a(w).vports[1].mac++, a(w).vports[1].port = 3, a(w).vports[1].segment = 9; },
       false},
      {"attachment of both directions",
       [&](World& w) { a(w).vports[0].port = 3, a(w).vports[0].attached = false; }, true},
      {"neighbour", [&](World& w) { a(w).neighbours[0] = 0x02ffffffffff; }, false},
      {"neighbour gone", [&](World& w) { a(w).neighbours[0] = std::nullopt; }, false},
      {"hop", [&](World& w) { a(w).hops[0] = {true, 0, 1, 0x3fff}; }, false},
      {"group", [&](World& w) { a(w).groups[0].hops = {1}; }, false},
      {"group without hops", [&](World& w) { a(w).groups[0].hops = {}; }, false},
      {"options", [&](World& w) { a(w).forwards_v4 = false, a(w).seed++; }, false},
      {"own address", [&](World& w) { a(w).own_v4 = {NET | 0x0705}; }, false},
      {"disabled", [&](World& w) { a(w).enabled = false; }, false},
      {"parts", [&](World& w) { a(w).groups_length = 0; }, false},
      {"VMAC gone", [&](World& w) { w.vmacs.erase({10, MAC0}); }, false},
      {"VMAC of another VE", [&](World& w) { w.vmacs[{10, MAC0}] = {0, 3}; }, false},
  };
  for (const Change& change : changes) {
    Card card;
    World before = plain_world(), after = plain_world();
    change.change(after);
    // The write that differs, of those of both worlds with all entries in the same places.
    auto never = [](u32) { return 1u; };
    Writes old_writes = writes_of(before, 5, never), new_writes = writes_of(after, 5, never);
    std::map<std::tuple<int, int, u32>, std::vector<bool>> last;
    for (auto& one : old_writes.all) last[{one.table, one.ve, one.index}] = one.data.bits;
    std::map<std::tuple<int, int, u32>, Writes::One> changed;
    std::map<std::tuple<int, int, u32>, std::vector<bool>> final_bits;
    for (auto& one : new_writes.all) {
      changed[{one.table, one.ve, one.index}] = one;
      final_bits[{one.table, one.ve, one.index}] = one.data.bits;
    }
    for (auto& [key, bits] : last)
      if (final_bits[key] == bits) changed.erase(key);
    if (changed.size() != 1) {
      printf("%s: %zu writes differ\n", change.name, changed.size());
      failures++;
      continue;
    }
    card.reset();
    card.apply(old_writes);
    Input input{v4(to_v4(change.back ? 1 : 0)), 0, 10, 0, 0, 9};
    card.results.clear();
    u64 first = card.cycle;
    size_t frames = 3 * LATENCY;
    for (size_t i = 0; i < frames + LATENCY; i++) {
      card.idle();
      if (i < frames) card.set(input);
      if (i == LATENCY) card.set(changed.begin()->second);
      card.step();
    }
    Output old_output = before.process(input, 0), new_output = after.process(input, 0);
    size_t sees_old = 0;
    while (sees_old < frames && is(card.results[sees_old].output, old_output)) sees_old++;
    for (size_t i = 0; i < frames; i++)
      check(change.name, input, i < sees_old ? old_output : new_output, card.results[i], first + i);
    // Frames that enter when the memories have the entry see it. Those before may, by the stage.
    if (sees_old > LATENCY + WRITE_LATENCY + 1 || sees_old + 1 < WRITE_LATENCY) {
      printf("%s: %zu frames of the old state\n", change.name, sees_old);
      failures++;
    }
  }
}

// The route look-up of one key in VE A: random entries, made where it walks.
struct Walk {
  using Root = std::pair<u32, u32>;  // kind, index
  struct Node {
    u64 child_map, leaf_map;
    u32 child_base, leaf_base;
  };
  using Place = std::pair<int, u32>;  // level, index

  u128 key;
  bool six;
  int depth;  // further entries lead to nodes of this level
  Root root{};
  std::map<Place, Node> nodes{};
  std::map<u32, Leaf> leaves{};
  std::vector<Place> nodes_passed{};
  u32 leaf_passed = 0;

  static u32 ones(u64 bits) { return static_cast<u32>(__builtin_popcountll(bits)); }
  u64 bit(int level) const { return 1ull << (static_cast<u32>(key >> (120 - 6 * level)) & 63); }

  Root some_root() const {
    if (depth > 0) return {2, below(NODES / VES)};
    return {one_of<u32>({0, 1, 1, 3}), below(LEAVES / VES)};
  }
  Node some_node(int level) const {
    Node node{random64(), random64() | 1, 0, 0};
    if (one_in(2)) node.child_map &= random64(), node.leaf_map &= random64() | 1;
    if (level == LEVELS) node.child_map = 0;
    node.child_map = level < depth ? node.child_map | bit(level) : node.child_map & ~bit(level);
    node.child_base = below(NODES / VES + 1 - ones(node.child_map));
    node.leaf_base = below(LEAVES / VES + 1 - ones(node.leaf_map));
    return node;
  }
  static Leaf some_leaf() {
    if (!one_in(8)) return {GROUP, below(GROUPS / VES)};
    return {one_of<LeafKind>({NONE, BLACKHOLE, HOOK, LOCAL, EXCESS}), 0};
  }

  Leaf look_up() {
    nodes_passed.clear();
    auto [kind, index] = root;
    for (int level = 1; kind == 2; level++) {
      Place place{level, index};
      const Node& node = nodes.try_emplace(place, some_node(level)).first->second;
      nodes_passed.push_back(place);
      kind = node.child_map & bit(level) ? 2 : 1;
      index = kind == 2 ? node.child_base + ones(node.child_map & (bit(level) - 1))
                        : node.leaf_base + ones(node.leaf_map & (2 * bit(level) - 1) & ~1ull);
    }
    leaf_passed = index;
    if (kind == 1) return leaves.try_emplace(index, some_leaf()).first->second;
    return {kind == 3 ? EXCESS : NONE, 0};
  }

  u32 root_index() const { return static_cast<u32>(six) << 8 | static_cast<u32>(key >> 120); }
  static Writes::One write(u32 index, Root root) {
    return {T_ROOT, A, index, Write().put(root.first, 2).put(root.second, 32), false};
  }
  static Writes::One write(Place place, const Node& node) {
    return {T_NODE, A, static_cast<u32>(place.first) << 27 | place.second,
            Write().put(node.leaf_base, 32).put(node.child_base, 32).put(node.leaf_map, 64)
                .put(node.child_map, 64), false};
  }
  static Writes::One write(u32 index, Leaf leaf) {
    return {T_LEAF, A, index, Write().put(leaf.kind, 3).put(leaf.group, 10), false};
  }
  Writes all() const {
    Writes writes;
    writes.all.push_back(write(root_index(), root));
    for (auto& [place, node] : nodes) writes.all.push_back(write(place, node));
    for (auto& [index, leaf] : leaves) writes.all.push_back(write(index, leaf));
    return writes;
  }

  // Another value of the entry that the look-up passes at `level`; LEVELS + 1: its leaf.
  Writes::One change(int level) {
    if (level == 0) return write(root_index(), root = some_root());
    if (level == LEVELS + 1) return write(leaf_passed, leaves[leaf_passed] = some_leaf());
    Place place = nodes_passed[static_cast<size_t>(level) - 1];
    return write(place, nodes[place] = some_node(level));
  }
  // A write of an entry that the look-up never passes.
  Writes::One beside() const {
    while (true) {
      int level = static_cast<int>(below(LEVELS + 2));
      u32 index = below(level == 0 ? 512 : level > LEVELS ? LEAVES / VES : NODES / VES);
      if (level == 0 && index != root_index()) return write(index, some_root());
      if (level == LEVELS + 1 && !leaves.count(index)) return write(index, some_leaf());
      if (level > 0 && level <= LEVELS && !nodes.count({level, index}))
        return write({level, index}, some_node(level));
    }
  }
};

// Up to three writes in a row of one entry of the look-up, while a frame reads it in each cycle:
// the frames see the entries in their order, each in one cycle. In all other cycles, entries beside
// the frames' way are written.
void routes_change_while_frames_pass(u64 trials) {
  World world = plain_world();
  Ve& ve = world.ves[A];
  ve.groups.clear(), ve.hops.clear(), ve.neighbours.clear();
  for (u32 i = 0; i < GROUPS / VES; i++) {
    ve.groups.push_back({{i}});
    ve.hops.push_back({true, 1, i, 0x3fff});
    ve.neighbours.push_back(GATEWAY + i);
  }
  ve.chosen.assign(ve.hops.size(), false);
  ve.block_of.assign(ve.groups.size(), 0);
  Card card;
  card.reset();
  load("routes", card, world);
  for (u64 trial = 0; trial < trials && failures == 0; trial++) {
    int level = static_cast<int>(trial % (LEVELS + 2));
    bool six = !one_in(4);
    u128 key = V6(random64() >> 8 | static_cast<u64>(0x20 + below(16)) << 56, random64());
    if (!six) key = key >> 96 << 96;
    int least = level == 0 || level == LEVELS + 1 ? 1 : level;
    Walk walk{key, six, least + static_cast<int>(below(static_cast<u32>(LEVELS + 1 - least)))};
    walk.root = walk.some_root();
    std::vector<Leaf> leaves{walk.look_up()};
    Walk before = walk;
    std::vector<Writes::One> changes;
    for (u32 count = 1 + below(3); changes.size() < count;) {
      walk.depth = one_in(2) ? walk.depth : static_cast<int>(below(LEVELS + 1));
      changes.push_back(walk.change(level));
      leaves.push_back(walk.look_up());
    }
    // All entries, that which changes as it was before.
    Writes writes = walk.all(), first_writes = before.all();
    writes.all.insert(writes.all.end(), first_writes.all.begin(), first_writes.all.end());
    if (!card.apply(writes)) failures++;

    Ip ip = six ? to_v6(0) : to_v4(0);
    ip.destination = six ? key : key >> 96;
    Input input{six ? v6(ip) : v4(ip), 0, 10, 0, 0, static_cast<u16>(trial)};
    std::vector<Output> outputs;
    for (Leaf leaf : leaves) {
      (six ? ve.v6 : ve.v4) = {{key, six ? 128 : 32, leaf}};
      outputs.push_back(world.process(input, card.now));
    }
    size_t change = LATENCY + below(LATENCY), frames = change + 2 * LATENCY;
    u64 first = card.cycle;
    card.results.clear();
    for (size_t i = 0; i < frames + LATENCY; i++) {
      card.idle();
      if (i < frames) card.set(input);
      bool changes_now = i >= change && i < change + changes.size();
      card.set_once(changes_now ? changes[i - change] : walk.beside());
      card.step();
      if (i >= WRITE_LATENCY && card.refused) {
        printf("routes: a write was refused\n");
        failures++;
      }
    }
    std::vector<u64> seen(leaves.size());
    for (size_t i = 0, at = 0; i < frames; i++) {
      while (at + 1 < leaves.size() && !is(card.results[i].output, outputs[at])) at++;
      seen[at]++;
      // Frames that enter when the memories have the last entry see it.
      bool late = i > change + changes.size() - 1 + WRITE_LATENCY;
      check("routes", input, late ? outputs.back() : outputs[at], card.results[i], first + i);
    }
    for (size_t i = 1; i + 1 < leaves.size(); i++)
      if (!(leaves[i] == leaves[i - 1]) && !(leaves[i] == leaves[i + 1]) && seen[i] != 1) {
        printf("routes: %llu frames see entry %zu\n", static_cast<unsigned long long>(seen[i]), i);
        failures++;
      }
    if (failures > 0)
      printf("routes: level %d of trial %llu\n", level, static_cast<unsigned long long>(trial));
  }
}

// A reset at any time: no frame of before comes out, all VEs are disabled, and all works again.
void resets() {
  Card card;
  for (int number = 0; number < 30 && failures == 0; number++) {
    World world = some_world();
    card.reset();
    load("reset", card, world);
    std::vector<Input> inputs = some_inputs(world, 200);
    card.results.clear();
    u32 cycles = below(150);
    for (u32 i = 0; i < cycles; i++) {
      card.idle();
      card.set(inputs[i]);
      if (one_in(2)) card.set({T_CONTROL, static_cast<int>(below(VES)), 0, Write().put(1, 1), false});
      card.step();
    }
    card.idle();
    card.top.rst = 1;
    card.step();
    card.top.rst = 0;
    card.results.clear();
    for (Ve& ve : world.ves) ve.enabled = false, ve.fresh = true;
    any_owner = true;
    run("frames after a reset", card, world, inputs, false);
    any_owner = false;
    if (one_in(2)) continue;
    World other = some_world();
    load("reset", card, other);
    run("frames after a reset and writes", card, other, some_inputs(other, 200), true);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Verilated::commandArgs(argc, argv);
  u64 worlds = argc > 1 ? strtoull(argv[1], nullptr, 0) : 40;
  size_t frames = argc > 2 ? strtoull(argv[2], nullptr, 0) : 5000;
  random_state = argc > 3 ? strtoull(argv[3], nullptr, 0) | 1 : 1;
  directed();
  printf("%d directed vectors, %d failures\n", vectors, failures);
  refused_writes();
  group_frames_are_not_metered();
  pauses_refill();
  limits_change_while_frames_pass();
  changes_are_atomic();
  routes_change_while_frames_pass(11 * worlds);
  resets();
  isolation(worlds / 8 + 1, frames);
  random_worlds(worlds, frames);
  for (int i = 0; i < 16; i++)
    if (counts[i]) printf("%-12s %llu\n", NAMES[i], static_cast<unsigned long long>(counts[i]));
  printf("faults %llu, excess routes %llu, failures %d\n", static_cast<unsigned long long>(faults),
         static_cast<unsigned long long>(excesses), failures);
  return failures != 0;
}
