// A broadcast frame crosses an idle card_top to the host, unchanged, in at most 64 cycles.
#include <cstdio>

#include "Vcard_top.h"
#include "bits.h"
#include "verilated.h"

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
  dut.wr_quota_data_i = 100u << 16;
  for (int queue = 0; queue < 5 * 16; queue++) { dut.wr_queue_i = queue; tick(); }
  dut.wr_quota_i = dut.wr_weight_i = 0;
  int worst = 0;
  for (int port = 0; port < 4; port++) {
    u8* data = reinterpret_cast<u8*>(&dut.data_i) + 64 * port;
    for (int i = 0; i < 64; i++) data[i] = i < 6 ? 0xff : i * 7 + port;
    put(dut.bytes_i, 7 * port, 7, 64);
    dut.last_i = dut.valid_i = 1 << port;
    put(dut.user_i, 12 * port, 12, 0x123);
    dut.eval();
    if (!get(dut.ready_o, port, 1)) failures++;
    tick();
    dut.valid_i = 0;
    int cycles = 1;
    for (; cycles < 200 && !dut.valid_o; cycles++) tick();
    if (cycles > worst) worst = cycles;
    const u8* out = reinterpret_cast<const u8*>(&dut.data_o) + 64 * 4;
    bool same = dut.valid_o == 16 && dut.last_o >> 4 & 1 && get(dut.bytes_o, 28, 7) == 64
        && memcmp(out, data, 64) == 0 && get(dut.meta_o, 30 * 4 + 25, 1) == 1
        && get(dut.meta_o, 30 * 4, 12) == 0x123;
    if (!same) { printf("port %d: the frame at the host differs\n", port); failures++; }
    tick();
    if (dut.valid_o) { printf("port %d: a second frame\n", port); failures++; }
  }
  if (worst > 64) failures++;
  printf("card_top: at most %d cycles from beat to beat, %d failures\n", worst, failures);
  return failures != 0;
}
