// Fields of the model's ports. Verilator stores them with the least significant byte first.
#pragma once
#include <cstdint>
#include <cstring>

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

template <class Port>
u64 get(const Port& port, int low, int count) {
  const u8* bytes = reinterpret_cast<const u8*>(&port);
  u64 value = 0;
  for (int i = count - 1; i >= 0; i--)
    value = value << 1 | (bytes[(low + i) / 8] >> ((low + i) % 8) & 1);
  return value;
}

template <class Port>
void put(Port& port, int low, int count, u64 value) {
  u8* bytes = reinterpret_cast<u8*>(&port);
  for (int i = 0; i < count; i++) {
    u8 mask = 1 << ((low + i) % 8);
    u8& byte = bytes[(low + i) / 8];
    byte = (value >> i & 1) ? byte | mask : byte & ~mask;
  }
}
