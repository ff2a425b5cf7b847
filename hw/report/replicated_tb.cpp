// Compares replicated_header with a search through lists of routes and neighbours, for random
// tables and frames. The design is only for resource reports, but it must be a router.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

#include "Vreplicated_header.h"
#include "bits.h"
#include "verilated.h"

constexpr int VES = 4, ENTRIES = 32, VMACS = 4 * VES, LATENCY = 10, HOST = 7;
enum Table { VMAC_WORD, VMAC_ENTRY, ROUTE_BITS, ROUTE_HOP, ARP_WORD, ARP_MAC, SOURCE_MAC };
enum { OUT = 0, LOCAL = 1, NEIGHBOUR = 2, EXCEPTION = 3, NOT_FOR_US = 8, MALFORMED = 9, NO_VE = 12 };

static u64 random_state = 1;
static u64 rnd() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x9e3779b97f4a7c15ull >> 16;
}
static u32 below(u32 n) { return static_cast<u32>(rnd() % n); }

struct Route { u32 prefix; int length; bool local, direct; u32 port, next_hop; };
struct Neighbour { u32 address; u64 mac; };
struct Tables {
  std::vector<Route> routes;  // longer prefixes first
  std::vector<Neighbour> neighbours;
  u64 source[4];
};
static Tables tables[VES];
static u64 vmacs[VMACS];  // of VE i / 4, port i % 4

static u32 mask(int length) { return length ? ~0u << (32 - length) : 0; }
// Few distinct bytes, so that prefixes overlap and associative memories match in parts.
static u32 address() {
  static const u32 bytes[] = {10, 11, 0x80, 0xff};
  u32 value = 0;
  for (int i = 0; i < 4; i++) value = value << 8 | bytes[below(4)];
  return value;
}
static u64 mac() { return u64(0x02) << 40 | (rnd() & 0x0303030303); }

struct Expected { u32 verdict, ve, port; bool owned, group; std::vector<u8> bytes; u32 length; };

struct Bench {
  Vreplicated_header dut;
  std::deque<Expected> expected;
  int failures = 0;
  u64 cycle = 0, checked = 0, seen[16] = {};
  std::deque<u64> entered;

  void step() {
    dut.clk = 0;
    dut.eval();
    if (dut.valid_o) check();
    dut.clk = 1;
    dut.eval();
    cycle++;
    dut.valid_i = dut.wr_en_i = 0;
  }
  void write(int table, int ve, u32 index, std::vector<u64> data) {
    dut.wr_en_i = 1;
    dut.wr_table_i = table;
    dut.wr_ve_i = ve;
    dut.wr_index_i = index;
    data.resize(4);
    for (int i = 0; i < 4; i++) put(dut.wr_data_i, 64 * i, 64, data[i]);
    step();
  }
  // Words of an associative memory for these keys.
  void write_words(int table, int ve, int parts, const std::vector<u64>& keys) {
    for (int part = 0; part < parts; part++)
      for (u32 value = 0; value < 256; value++) {
        u64 word = 0;
        for (size_t i = 0; i < keys.size(); i++)
          word |= u64((keys[i] >> (8 * part) & 255) == value) << i;
        write(table, ve, part << 8 | value, {word});
      }
  }

  void fill() {
    dut.rst = 1;
    step();
    dut.rst = 0;
    std::vector<u64> keys;
    for (int i = 0; i < VMACS; i++) {
      u64 one = mac();
      for (int j = 0; j < i; j++)
        if (vmacs[j] == one) { one = mac(); j = -1; }
      vmacs[i] = one;
      keys.push_back(one);
      write(VMAC_ENTRY, 0, i, {u64(i / 4) << 2 | u64(i % 4)});
    }
    write_words(VMAC_WORD, 0, 6, keys);
    for (int ve = 0; ve < VES; ve++) fill(ve);
  }
  void fill(int number) {
    Tables& ve = tables[number];
    ve.routes.clear();
    ve.neighbours.clear();
    std::vector<u64> keys;
    for (u32 i = 0; i < ENTRIES; i++) {
      u32 one = address();
      for (u32 j = 0; j < i; j++)
        if (ve.neighbours[j].address == one) { one = address(); j = ~0u; }
      ve.neighbours.push_back({one, mac()});
      keys.push_back(one);
      write(ARP_MAC, number, i, {ve.neighbours[i].mac});
    }
    write_words(ARP_WORD, number, 4, keys);
    u32 count = below(ENTRIES + 1);
    for (u32 i = 0; i < count; i++) {
      int length = below(8) ? 8 + below(25) : below(8);
      u32 next_hop = below(4) ? ve.neighbours[below(ENTRIES)].address : address();
      ve.routes.push_back({address() & mask(length), length, below(8) == 0, below(4) == 0,
                           below(4), next_hop});
    }
    for (size_t i = 0; i < ve.routes.size(); i++)
      for (size_t j = i + 1; j < ve.routes.size(); j++)
        if (ve.routes[j].length > ve.routes[i].length) std::swap(ve.routes[i], ve.routes[j]);
    for (u32 i = 0; i < count; i++) {
      const Route& route = ve.routes[i];
      for (int value = 15; value >= 0; value--) {
        u64 row = 0;
        for (int digit = 0; digit < 8; digit++)
          row |= u64(((u32(value) << (4 * digit) ^ route.prefix) & mask(route.length)
                      & 15u << (4 * digit)) == 0) << digit;
        write(ROUTE_BITS, number, i, {row});
      }
      write(ROUTE_HOP, number, i, {u64(1) << 36 | u64(route.local) << 35 | u64(route.direct) << 34
                                   | u64(route.port) << 32 | route.next_hop});
    }
    for (int port = 0; port < 4; port++) {
      ve.source[port] = mac();
      write(SOURCE_MAC, number, port, {ve.source[port]});
    }
  }

  static void set(std::vector<u8>& frame, int at, u64 value, int bytes) {
    for (int i = 0; i < bytes; i++) frame[at + i] = u8(value >> (8 * (bytes - 1 - i)));
  }
  void frame() {
    u32 from = below(16) ? below(4) : HOST, length = 60 + below(5);
    int vmac = below(VMACS), ve = vmac / 4;
    std::vector<u8> f(64);
    for (u8& byte : f) byte = u8(rnd());
    if (from != HOST && below(8)) from = vmac % 4;
    u64 to = below(16) ? vmacs[vmac] : below(2) ? mac() : rnd() | u64(1) << 40;
    set(f, 0, to, 6);
    set(f, 6, mac(), 6);
    u32 kind = below(16) == 0 ? 0x0806 : below(16) == 0 ? 0x88b5 : 0x0800;
    set(f, 12, kind, 2);
    u32 packet = 20 + below(length - 33), ttl = below(8) ? 2 + below(254) : below(2);
    bool options = below(16) == 0 && packet >= 24;
    const Tables& t = tables[ve];
    u32 to_ip = t.routes.empty() || below(4) == 0 ? address()
        : t.routes[below(static_cast<u32>(t.routes.size()))].prefix | (below(2) ? below(4) : 0);
    set(f, 14, (options ? 0x4600 : 0x4500), 2);
    set(f, 16, packet, 2);
    f[22] = u8(ttl);
    set(f, 24, 0, 2);
    set(f, 30, to_ip, 4);
    u32 sum = 0;
    for (int i = 14; i < (options ? 38 : 34); i += 2) sum += f[i] << 8 | f[i + 1];
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    set(f, 24, ~sum, 2);
    bool broken = below(16) == 0;
    if (broken) f[24] ^= 1;
    if (below(32) == 0) length = 1 + below(13);
    for (u32 i = length; i < 64; i++) f[i] = 0;
    u32 host_vport = below(4);

    Expected e{OUT, u32(ve), HOST, true, false, f, length};
    int hit = -1;
    for (int i = 0; i < VMACS; i++) if (vmacs[i] == to) hit = i;
    if (hit >= 0) e.ve = hit / 4;
    const Tables& at = tables[e.ve];
    const Route* best = nullptr;
    for (const Route& route : at.routes)
      if (!best && ((to_ip ^ route.prefix) & mask(route.length)) == 0) best = &route;
    u32 next_hop = best && !best->direct ? best->next_hop : to_ip;
    const Neighbour* neighbour = nullptr;
    for (const Neighbour& one : at.neighbours) if (one.address == next_hop) neighbour = &one;
    if (length < 14) e.verdict = MALFORMED, e.owned = false;
    else if (from == HOST) e.port = host_vport, e.ve = ve;
    else if (to >> 40 & 1) {
      e.verdict = kind == 0x0806 ? NEIGHBOUR : LOCAL;
      e.owned = false;
      e.group = true;
    } else if (hit < 0) e.verdict = NO_VE, e.owned = false;
    else if (u32(hit % 4) != from) e.verdict = NOT_FOR_US;
    else if (kind == 0x0806) e.verdict = NEIGHBOUR;
    else if (kind != 0x0800) e.verdict = LOCAL;
    else if (broken) e.verdict = MALFORMED;
    else if (best && best->local) e.verdict = LOCAL;
    else if (options || ttl < 2 || !best) e.verdict = EXCEPTION;
    else if (!neighbour) e.verdict = NEIGHBOUR;
    else {
      e.port = best->port;
      e.length = 14 + packet;
      set(e.bytes, 0, neighbour->mac, 6);
      set(e.bytes, 6, at.source[best->port], 6);
      e.bytes[22]--;
      u32 more = (e.bytes[24] << 8 | e.bytes[25]) + 0x100;
      set(e.bytes, 24, more + (more >= 0xffff), 2);
    }
    expected.push_back(e);
    entered.push_back(cycle);
    dut.valid_i = 1;
    auto& in = dut.header_i;
    for (int i = 0; i < 64; i++) put(in, 54 + 8 * i, 8, f[i]);
    put(in, 43, 11, length);
    put(in, 40, 3, from);
    put(in, 28, 12, 0x123);
    put(in, 20, 8, ve);
    put(in, 16, 4, host_vport);
    put(in, 0, 16, 0);
    step();
  }
  void check() {
    const auto& out = dut.header_o;
    Expected e = expected.front();
    expected.pop_front();
    u32 verdict = static_cast<u32>(get(out, 45, 4));
    bool same = verdict == e.verdict && get(out, 28, 3) == e.port && get(out, 43, 1) == e.owned
        && get(out, 44, 1) == e.group && (!e.owned || get(out, 35, 8) == e.ve)
        && get(out, 49, 11) == e.length && cycle - entered.front() == LATENCY;
    for (u32 i = 0; i < 64 && i < e.length; i++) same &= get(out, 60 + 8 * i, 8) == e.bytes[i];
    entered.pop_front();
    checked++;
    seen[verdict]++;
    if (!same && ++failures <= 5)
      printf("frame %llu: verdict %u, expected %u\n", (unsigned long long)checked, verdict,
             e.verdict);
  }
};

int main(int argc, char** argv) {
  int frames = argc > 1 ? atoi(argv[1]) : 100000;
  random_state = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  static Bench bench;
  bench.dut.valid_i = bench.dut.wr_en_i = 0;
  for (int round = 0; round < 10; round++) {
    bench.fill();
    for (int i = 0; i < frames / 10; i++) {
      bench.frame();
      if (below(8) == 0) bench.step();
    }
    for (int i = 0; i < LATENCY + 1; i++) bench.step();
  }
  int never = 0;
  for (int verdict : {OUT, LOCAL, NEIGHBOUR, EXCEPTION, NOT_FOR_US, MALFORMED, NO_VE})
    never += bench.seen[verdict] == 0;
  printf("replicated_header: %llu frames, %llu forwarded, %d failures, %d verdicts never seen\n",
         (unsigned long long)bench.checked, (unsigned long long)bench.seen[OUT], bench.failures,
         never);
  return bench.failures || never || !bench.expected.empty();
}
