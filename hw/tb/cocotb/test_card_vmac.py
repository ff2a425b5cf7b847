"""card_vmac: places, stash, seed, moves without a gap, refused writes, reset."""

import random

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge
from scapy.layers.l2 import Ether
from scapy.utils import mac2str
from scapy.volatile import RandMAC

VMAC, STASH, SEED = 0, 1, 2
SETS, VES = 16, 8


def vmac_hash(key, seed):
    """vmac_hash of card_pkg: chi of Keccak over rows of five bits, then a CRC-32."""
    bits = [(key ^ seed) >> at & 1 for at in range(60)]
    spread = [bits[at] ^ ((1 - bits[at - at % 5 + (at + 1) % 5]) & bits[at - at % 5 + (at + 2) % 5])
              for at in range(60)]
    crc = 0
    for bit in reversed(spread):
        crc = (crc << 1 ^ (0x04c11db7 if crc >> 31 ^ bit else 0)) & 0xffffffff
    return crc


class Table:
    """Drives the ports; `now` in cycles."""

    def __init__(self, dut):
        self.dut = dut
        cocotb.start_soon(Clock(dut.clk, 2, unit="ns").start(start_high=False))

    async def start(self):
        self.dut.rst.value = 1
        self.dut.wr_valid_i.value = 0
        self.dut.key_i.value = 0
        await FallingEdge(self.dut.clk)
        await FallingEdge(self.dut.clk)
        self.dut.rst.value = 0

    async def write(self, table, index, entry):
        """Writes; returns True if the write was refused."""
        self.set_write(table, index, entry)
        await cocotb.triggers.Timer(100, unit="ps")
        refused = bool(self.dut.wr_refused_o.value)
        await FallingEdge(self.dut.clk)
        self.dut.wr_valid_i.value = 0
        return refused

    def set_write(self, table, index, entry):
        self.dut.wr_valid_i.value = 1
        self.dut.wr_table_i.value = table
        self.dut.wr_index_i.value = index
        self.dut.wr_entry_i.value = entry

    async def clear(self):
        for way in range(4):
            for place in range(SETS):
                assert not await self.write(VMAC, way << 8 | place, 0)

    async def look_up(self, keys):
        """Looks up one key per cycle; returns (ve, vport) or None of each."""
        found = []
        for cycle in range(len(keys) + 2):
            self.dut.key_i.value = keys[min(cycle, len(keys) - 1)]
            if cycle >= 2:
                found.append(self.result())
            await FallingEdge(self.dut.clk)
        return found

    def result(self):
        if not int(self.dut.hit_o.value):
            return None
        return int(self.dut.ve_o.value), int(self.dut.vport_o.value)


def entry(key, ve, vport):
    return 1 << 72 | key << 12 | ve << 4 | vport


def key_of(segment, mac):
    """Key as the header pipeline makes it out of a frame."""
    frame = bytes(Ether(dst=mac, src="02:00:00:00:00:01") / b"")
    assert frame[:6] == mac2str(mac)
    return segment << 48 | int.from_bytes(frame[:6], "big")


def some_keys(rng, count):
    macs = {str(RandMAC("02:*:*:*:*:*")) for _ in range(count)}
    return [key_of(rng.randrange(1 << 12), mac) for mac in sorted(macs)]


@cocotb.test()
async def finds_entries_in_all_places(dut):
    rng = random.Random(1)
    table = Table(dut)
    await table.start()
    await table.clear()
    seed = rng.getrandbits(60)
    await table.write(SEED, 0, seed)
    used, want, stashed = set(), {}, 0
    for key in some_keys(rng, 48):
        value = rng.randrange(VES), rng.randrange(16)
        places = [(way, vmac_hash(key, seed) >> 8 * way & SETS - 1) for way in range(4)]
        free = [place for place in places if place not in used]
        if free and not (stashed < 8 and rng.random() < 0.2):
            way, place = rng.choice(free)
            used.add((way, place))
            assert not await table.write(VMAC, way << 8 | place, entry(key, *value))
        elif stashed < 8:
            assert not await table.write(STASH, stashed, entry(key, *value))
            stashed += 1
        else:
            continue
        want[key] = value
    assert stashed == 8 and len(want) > 40 and {way for way, _ in used} == {0, 1, 2, 3}
    # Keys that differ in one bit are other keys.
    keys = list(want) + [key ^ 1 << bit for bit in range(60) for key in rng.sample(list(want), 4)]
    rng.shuffle(keys)
    for key, found in zip(keys, await table.look_up(keys)):
        assert found == want.get(key), hex(key)


@cocotb.test()
async def moves_entries_without_a_gap(dut):
    rng = random.Random(2)
    table = Table(dut)
    await table.start()
    await table.clear()
    seed = rng.getrandbits(60)
    await table.write(SEED, 0, seed)
    key = some_keys(rng, 1)[0]
    places = [(VMAC, way << 8 | vmac_hash(key, seed) >> 8 * way & SETS - 1) for way in range(4)]
    places += [(STASH, at) for at in range(8)]
    await table.write(*places[0], entry(key, 3, 9))
    assert await table.look_up([key]) == [(3, 9)]
    at = places[0]
    dut.key_i.value = key
    for _ in range(3):
        await FallingEdge(dut.clk)
    for _ in range(60):
        to = rng.choice([place for place in places if place != at])
        for place, value in ((to, entry(key, 3, 9)), (at, 0)):
            table.set_write(*place, value)
            await FallingEdge(dut.clk)
            assert table.result() == (3, 9)
        at = to
    dut.wr_valid_i.value = 0
    await table.write(*at, 0)
    assert await table.look_up([key]) == [None]


@cocotb.test()
async def refuses_writes_out_of_bounds(dut):
    table = Table(dut)
    await table.start()
    await table.clear()
    one = entry(5, 0, 0)
    for kind, index in ((VMAC, 4 << 8), (VMAC, SETS), (VMAC, 1 << 31), (STASH, 8), (SEED, 1)):
        assert await table.write(kind, index, one), (kind, index)
    assert await table.write(VMAC, 0, entry(5, VES, 0))
    assert await table.write(STASH, 0, entry(5, VES, 0))
    assert not await table.write(STASH, 0, entry(5, VES, 0) & ~(1 << 72)), "an erased entry"
    assert await table.look_up([5]) == [None]
    # Tables of others.
    assert not await table.write(3, 1 << 20, one)
    assert await table.look_up([5]) == [None]


@cocotb.test()
async def reset_empties_the_stash(dut):
    table = Table(dut)
    await table.start()
    await table.clear()
    await table.write(STASH, 7, entry(5, 1, 2))
    assert await table.look_up([5]) == [(1, 2)]
    await table.start()
    assert await table.look_up([5]) == [None]
