// A broadcast frame crosses an idle card_top to the host, unchanged, in at most 64 cycles from its
// last beat to the first beat at the host.
#include <cstdio>
#include <vector>

#include "Vcard_top.h"
#include "bits.h"
#include "verilated.h"

constexpr int slots(int used) { return used > 1 ? 2 * slots((used + 1) / 2) : 1; }
constexpr int BYTES = DATA_BITS / 8, BYTES_BITS = DATA_BITS == 512 ? 7 : 4;
constexpr int QUEUES = 5 * slots(VES + 1);

int main(int argc, char** argv) {
  Verilated::commandArgs(argc, argv);
  Vcard_top dut;
  int failures = 0;
  auto tick = [&] { dut.clk = 1; dut.eval(); dut.clk = 0; dut.eval(); };
  dut.clk = 0;
  dut.wr_valid_i = dut.wr_quota_i = dut.wr_weight_i = dut.valid_i = 0;
  dut.ready_i = 31;
  dut.pool_i = 1000;
  dut.rst = 1;
  for (int i = 0; i < 3; i++) tick();
  dut.rst = 0;
  dut.wr_quota_i = dut.wr_weight_i = 1;
  dut.wr_weight_data_i = 1;
  dut.wr_quota_data_i = 8u << 16;
  for (int queue = 0; queue < QUEUES; queue++) { dut.wr_queue_i = queue; tick(); }
  dut.wr_quota_i = dut.wr_weight_i = 0;
  tick();
  int worst = 0;
  for (int port = 0; port < 4; port++) {
    std::vector<u8> sent(64), got;
    for (int i = 0; i < 64; i++) sent[i] = i < 6 ? 0xff : i * 7 + port;
    dut.valid_i = 1 << port;
    put(dut.user_i, 12 * port, 12, 0x123);
    put(dut.bytes_i, BYTES_BITS * port, BYTES_BITS, BYTES);
    for (int at = 0; at < 64; at += BYTES) {
      memcpy(reinterpret_cast<u8*>(&dut.data_i) + BYTES * port, &sent[at], BYTES);
      dut.last_i = (at + BYTES == 64) << port;
      dut.eval();
      if (!get(dut.ready_o, port, 1)) failures++;
      tick();
    }
    dut.valid_i = 0;
    int cycles = 1;
    for (; cycles < 200 && !dut.valid_o; cycles++) tick();
    if (cycles > worst) worst = cycles;
    bool last = false;
    for (; dut.valid_o == 16 && !last; tick()) {
      const u8* data = reinterpret_cast<const u8*>(&dut.data_o) + BYTES * 4;
      got.insert(got.end(), data, data + get(dut.bytes_o, 4 * BYTES_BITS, BYTES_BITS));
      last = dut.last_o >> 4 & 1;
      // Group, segment.
      if (get(dut.meta_o, 30 * 4 + 25, 1) != 1 || get(dut.meta_o, 30 * 4, 12) != 0x123) failures++;
    }
    if (!last || got != sent) {
      printf("port %d: the frame at the host differs\n", port);
      failures++;
    }
    if (dut.valid_o) { printf("port %d: a second frame\n", port); failures++; }
  }
  if (worst > 64) failures++;
  printf("card_top, %d bits, %d VEs: at most %d cycles from beat to beat, %d failures\n", DATA_BITS,
         VES, worst, failures);
  return failures != 0;
}
