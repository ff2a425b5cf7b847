// Sends ten frames through a small card and writes a waveform of them. Fails if one of them ends
// otherwise than its line says.
#include <cstdio>
#include <string>
#include <vector>

#include "Vcard_top.h"
#include "bits.h"
#include "verilated.h"
#include "verilated_vcd_c.h"

constexpr int HOST = 4;  // input and output of the host
constexpr u64 SEGMENT = 0x123, NEIGHBOUR_MAC = 0x02'00'00'00'99'01;
// Tables of card_pkg.
enum Table {
  STASH = 1, CONTROL = 4, ATTACHMENT = 5, HOP_SEGMENTS = 6, LPM_SEGMENTS = 7, OPTIONS = 8,
  CONTEXT = 9, GROUP = 11, HOP = 13, ARP = 14, ROOT = 15, NODE = 16, LEAF = 17,
};
enum Leaf { NONE, TO_GROUP, BLACKHOLE, HOOK, LOCAL };

static u64 vmac(int ve, int vport) { return 0x02'00'00'00'00'00 | u64(ve << 8 | vport); }

// A number of many bits, filled from the most significant field on.
struct Fields {
  std::vector<bool> bits;
  Fields& put(u64 value, int count) {
    for (int i = count - 1; i >= 0; i--) bits.push_back(value >> i & 1);
    return *this;
  }
};

struct Frame {
  const char* what;
  int in, out, verdict;  // `out` -1: dropped
  int user;              // segment, or of the host {ve, vport}
  std::vector<u8> bytes;
};

static void set(std::vector<u8>& bytes, int at, u64 value, int count) {
  for (int i = 0; i < count; i++) bytes[at + i] = u8(value >> (8 * (count - 1 - i)));
}

// An Ethernet frame with a UDP packet to 10.x.
static std::vector<u8> packet(u64 to, u32 destination, int length = 64, int ttl = 64) {
  std::vector<u8> bytes(length);
  set(bytes, 0, to, 6);
  set(bytes, 6, NEIGHBOUR_MAC, 6);
  set(bytes, 12, 0x0800, 2);
  set(bytes, 14, 0x4500, 2);
  set(bytes, 16, length - 14, 2);
  bytes[22] = u8(ttl);
  bytes[23] = 17;
  set(bytes, 26, 0xc0000201, 4);
  set(bytes, 30, destination, 4);
  u32 sum = 0;
  for (int i = 14; i < 34; i += 2) sum += bytes[i] << 8 | bytes[i + 1];
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  set(bytes, 24, ~sum, 2);
  for (int i = 34; i < length; i++) bytes[i] = u8(i);
  return bytes;
}

struct Bench {
  VerilatedContext context;
  Vcard_top dut{&context, "TOP"};
  VerilatedVcdC trace;
  u64 cycle = 0;
  int refused = 0;

  // One clock cycle takes 8 ns, as at 125 MHz.
  void tick() {
    dut.clk = 0;
    dut.eval();
    trace.dump(8 * cycle);
    refused += dut.wr_refused_o;
    dut.clk = 1;
    dut.eval();
    trace.dump(8 * cycle++ + 4);
  }

  void write(int table, int ve, u32 index, const Fields& fields) {
    dut.wr_valid_i = 1;
    dut.wr_table_i = table;
    dut.wr_ve_i = ve;
    dut.wr_index_i = index;
    int count = static_cast<int>(fields.bits.size());
    for (int i = 0; i < 192; i += 64) put(dut.wr_data_i, i, 64, 0);
    for (int i = 0; i < count; i++) put(dut.wr_data_i, i, 1, fields.bits[count - 1 - i]);
    tick();
    dut.wr_valid_i = 0;
  }

  // Vports 0 to 3 of a VE are on the ports 0 to 3. Routes: 10.0.0.0/14 to its neighbour by vport 1
  // or 2, 10.8.0.0/14 to a neighbour without an address, 10.12.0.0/14 dropped, 11.0.0.0/8 local.
  void fill(int ve) {
    u64 four = u64(4 * ve) << 16 | 4;
    write(HOP_SEGMENTS, ve, 0, Fields().put(four, 32).put(four, 32).put(u64(ve) << 16 | 1, 32)
          .put(four, 32));
    write(LPM_SEGMENTS, ve, 0, Fields().put(64, 32).put(64 * ve, 32).put(32, 32).put(32 * ve, 32));
    for (int i = 0; i < 8; i++) tick();
    write(OPTIONS, ve, 0, Fields().put(0xf, 4).put(0, 32));
    for (int vport = 0; vport < 4; vport++) {
      write(STASH, ve, 4 * ve + vport, Fields().put(1, 1).put(SEGMENT, 12).put(vmac(ve, vport), 48)
            .put(ve, 8).put(vport, 4));
      write(ATTACHMENT, ve, vport, Fields().put(1, 1).put(vport, 3).put(SEGMENT, 12)
            .put(vmac(ve, vport), 48));
      write(CONTEXT, ve, vport, Fields().put(7, 3).put(0, 6).put(1500, 14));
    }
    write(ARP, ve, 0, Fields().put(1, 1).put(NEIGHBOUR_MAC, 48));
    write(HOP, ve, 0, Fields().put(1, 1).put(1 + ve, 4).put(0, 1).put(1, 1).put(0, 12).put(1500, 14));
    write(HOP, ve, 1, Fields().put(1, 1).put(1, 4).put(0, 2).put(0, 12).put(1500, 14));
    for (int group = 0; group < 2; group++)
      write(GROUP, ve, group, Fields().put(2, 2).put(group, 12));
    int group = 0;
    for (Leaf leaf : {TO_GROUP, NONE, TO_GROUP, BLACKHOLE, NONE, LOCAL}) {
      write(LEAF, ve, group, Fields().put(leaf, 3).put(group == 2, 10));
      group++;
    }
    for (u32 top = 0; top < 512; top++) {
      Fields root;
      if (top == 10) root.put(2, 2).put(0, 32);
      else if (top == 11) root.put(1, 2).put(5, 32);
      else root.put(0, 2).put(0, 32);
      write(ROOT, ve, top, root);
    }
    // One node: the slots 0, 1, 2, 3 have leaves of their own, and the others one together.
    write(NODE, ve, 1u << 27, Fields().put(0, 32).put(0, 32).put(0x1f, 64).put(0, 64));
    write(CONTROL, ve, 0, Fields().put(1, 1));
  }

  void start() {
    dut.wr_valid_i = dut.wr_quota_i = dut.wr_weight_i = dut.valid_i = 0;
    dut.ready_i = 31;
    dut.pool_i = 64;
    dut.rst = 1;
    for (int i = 0; i < 3; i++) tick();
    dut.rst = 0;
    dut.wr_quota_i = dut.wr_weight_i = 1;
    dut.wr_weight_data_i = 1;
    dut.wr_quota_data_i = 8u << 16 | 8;
    for (int queue = 0; queue < 5 * 4; queue++) { dut.wr_queue_i = queue; tick(); }
    dut.wr_quota_i = dut.wr_weight_i = 0;
    for (int ve = 0; ve < 2; ve++) fill(ve);
    for (int i = 0; i < 8; i++) tick();
  }

  void offer(const Frame& frame, size_t at) {
    size_t left = frame.bytes.size() - at, now = left < 64 ? left : 64;
    u8* data = reinterpret_cast<u8*>(&dut.data_i) + 64 * frame.in;
    memset(data, 0, 64);
    memcpy(data, &frame.bytes[at], now);
    put(dut.bytes_i, 7 * frame.in, 7, now);
    dut.last_i = left <= 64 ? 1 << frame.in : 0;
    dut.valid_i = 1 << frame.in;
    put(dut.user_i, 12 * frame.in, 12, frame.user);
  }

  // Sends a frame and waits for its end. True if it ended as expected.
  bool send(const Frame& frame) {
    u64 since = cycle;
    int out = -1, verdict = -1;
    u64 first = 0;
    size_t at = 0;
    for (int i = 0; i < 100; i++) {
      dut.valid_i = 0;
      if (at < frame.bytes.size()) {
        offer(frame, at);
        dut.clk = 0;
        dut.eval();
        if (dut.ready_o >> frame.in & 1) at += 64;
      }
      dut.clk = 0;
      dut.eval();
      if (dut.event_queued_o || dut.event_dropped_o)
        verdict = static_cast<int>(get(dut.event_meta_o, 26, 4));
      for (int port = 0; port < 5; port++)
        if ((dut.valid_o >> port & 1) && out < 0) { out = port; first = cycle; }
      tick();
    }
    bool right = out == frame.out && verdict == frame.verdict;
    printf("%6llu ns  %-44s verdict %2d, ", (unsigned long long)(8 * since), frame.what, verdict);
    if (out < 0) printf("dropped");
    else if (out == HOST) printf("host at %llu ns", (unsigned long long)(8 * first));
    else printf("port %d at %llu ns", out, (unsigned long long)(8 * first));
    printf("%s\n", right ? "" : "  WRONG");
    return right;
  }
};

int main(int, char** argv) {
  static Bench bench;
  bench.context.traceEverOn(true);
  bench.dut.trace(&bench.trace, 99);
  bench.trace.set_time_unit("1ns");
  bench.trace.set_time_resolution("1ns");
  bench.start();
  // The waveform begins when the tables are full.
  bench.trace.open(argv[1]);
  std::vector<u8> broken = packet(vmac(0, 0), 0x0a000001), arp(64), out = packet(0, 0x0a000001);
  broken[24] ^= 1;
  set(arp, 0, 0xffffffffffff, 6);
  set(arp, 6, NEIGHBOUR_MAC, 6);
  set(arp, 12, 0x0806, 2);
  set(out, 6, vmac(0, 3), 6);
  const Frame frames[] = {
      {"routed by VE 0", 0, 1, 0, SEGMENT, packet(vmac(0, 0), 0x0a000001)},
      {"routed by VE 1, same addresses", 0, 2, 0, SEGMENT, packet(vmac(1, 0), 0x0a000001)},
      {"routed, 300 bytes", 3, 1, 0, SEGMENT, packet(vmac(0, 3), 0x0a000002, 300)},
      {"punted: TTL 1", 0, HOST, 3, SEGMENT, packet(vmac(0, 0), 0x0a000001, 64, 1)},
      {"punted: the neighbour is unknown", 0, HOST, 2, SEGMENT, packet(vmac(0, 0), 0x0a080001)},
      {"punted: the router's own address", 0, HOST, 1, SEGMENT, packet(vmac(0, 0), 0x0b000001)},
      {"group: ARP request", 2, HOST, 2, SEGMENT, arp},
      {"dropped: broken checksum", 0, -1, 9, SEGMENT, broken},
      {"dropped: no VE has this MAC address", 0, -1, 12, SEGMENT, packet(0x02ffff, 0x0a000001)},
      {"from the host by vport 3", HOST, 3, 0, 0 << 4 | 3, out},
  };
  int failures = bench.refused;
  if (failures) printf("%d writes were refused\n", failures);
  for (const Frame& frame : frames) failures += !bench.send(frame);
  bench.trace.close();
  return failures != 0;
}
