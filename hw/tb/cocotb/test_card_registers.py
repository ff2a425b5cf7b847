"""card_registers with cocotbext-axi's master: identity, pages, entries, refused writes."""

import itertools
import os
import pathlib
import random
import re

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge, RisingEdge
from cocotbext.axi import AxiLiteBus, AxiLiteMaster
from cocotbext.axi.axil_channels import (AxiLiteARBus, AxiLiteAWBus, AxiLiteBBus, AxiLiteRBus,
                                         AxiLiteWBus)
from cocotbext.axi.constants import AxiResp

VES = 8
RTL = pathlib.Path(os.environ.get("CARD_RTL", pathlib.Path(__file__).parent.parent.parent / "rtl"))
PACKAGE = (RTL / "card_lpm_pkg.sv").read_text()
WRITE_LATENCY = int(re.search(r" LPM_WRITE_LATENCY = (\d+);", PACKAGE)[1])
ID, EPOCH, TARGET, POOL, REFUSED_ADDRESS = 0, 0x40, 0x44, 0x48, 0x4c
WRITE_DATA, COMMIT, SENT, VERDICT = 0x100, 0x200, 0x1100, 0x1800
VMAC, METER, CONTEXT, NODE, QUOTA = 0, 3, 9, 16, 18
BAD_INDEX = 0x1234  # card_header refuses it here


def channel(base, dut, inputs, outputs):
    """A channel of the bus whose ports end in _i and _o."""
    names = {name: f"{name}_i" for name in inputs} | {name: f"{name}_o" for name in outputs}
    own = type(base.__name__, (base,), {"_signals": names, "_optional_signals": []})
    return own.from_entity(dut)


class Card:
    """The module with its master; keeps the entries of the write bus."""

    def __init__(self, dut, seed):
        self.dut, self.entries = dut, []
        cocotb.start_soon(Clock(dut.clk, 2, unit="ns").start(start_high=False))
        bus = AxiLiteBus.from_channels(
            channel(AxiLiteAWBus, dut, ["awaddr", "awvalid"], ["awready"]),
            channel(AxiLiteWBus, dut, ["wdata", "wstrb", "wvalid"], ["wready"]),
            channel(AxiLiteBBus, dut, ["bready"], ["bvalid", "bresp"]),
            channel(AxiLiteARBus, dut, ["araddr", "arvalid"], ["arready"]),
            channel(AxiLiteRBus, dut, ["rready"], ["rvalid", "rdata", "rresp"]))
        self.master = AxiLiteMaster(bus, dut.clk, dut.rst)
        pause = random.Random(seed)
        for part in (self.master.write_if.aw_channel, self.master.write_if.w_channel,
                     self.master.write_if.b_channel, self.master.read_if.ar_channel,
                     self.master.read_if.r_channel):
            part.set_pause_generator(pause.random() < 0.3 for _ in itertools.count())

    async def start(self):
        self.dut.rst.value = 1
        self.dut.open_i.value = 1
        self.dut.wr_refused_i.value = 0
        self.dut.clearing_i.value = 0
        self.dut.rd_frames_i.value = 0x0123456789abcdef
        self.dut.rd_bytes_i.value = 0xfedcba9876543210
        for _ in range(4):
            await FallingEdge(self.dut.clk)
        self.dut.rst.value = 0
        await FallingEdge(self.dut.clk)
        cocotb.start_soon(self.tables())

    async def tables(self):
        """Answers the write bus as card_header does."""
        late = [False] * WRITE_LATENCY
        while True:
            await FallingEdge(self.dut.clk)
            bad = False
            if int(self.dut.wr_valid_o.value):
                entry = tuple(int(port.value) for port in (
                    self.dut.wr_table_o, self.dut.wr_ve_o, self.dut.wr_index_o, self.dut.wr_data_o))
                self.entries.append(entry)
                bad = entry[2] == BAD_INDEX
            late.append(bad)
            await RisingEdge(self.dut.clk)
            late.pop(0)
            self.dut.wr_refused_i.value = late[0]

    async def write(self, page, offset, data, size=4):
        answer = await self.master.write(page << 16 | offset, data.to_bytes(size, "little"))
        return answer.resp

    async def read(self, page, offset):
        answer = await self.master.read(page << 16 | offset, 4)
        return answer.resp, int.from_bytes(answer.data, "little")


@cocotb.test()
async def identity_is_on_the_super_page(dut):
    card = Card(dut, 1)
    await card.start()
    assert await card.read(0, ID) == (AxiResp.OKAY, 0x50645063)
    assert await card.read(0, 0x10) == (AxiResp.OKAY, VES)
    for page in (1, VES, VES + 1, 511):
        assert await card.read(page, ID) == (AxiResp.SLVERR, 0)
    assert (await card.read(VES, EPOCH))[0] == AxiResp.OKAY
    assert (await card.read(VES + 1, EPOCH))[0] == AxiResp.SLVERR


@cocotb.test()
async def the_page_names_the_ve(dut):
    card = Card(dut, 2)
    await card.start()
    expected = []
    words = {page: [random.getrandbits(32) for _ in range(6)] for page in range(VES + 1)}
    for at in range(6):
        for page, entry in words.items():
            assert await card.write(page, WRITE_DATA + 4 * at, entry[at]) == AxiResp.OKAY
    assert await card.write(0, TARGET, 5) == AxiResp.OKAY
    for page, entry in words.items():
        assert await card.write(page, COMMIT + 4 * NODE, 7 + page) == AxiResp.OKAY
        data = sum(word << (32 * at) for at, word in enumerate(entry))
        expected.append((NODE, page - 1 if page else 5, 7 + page, data))
    assert card.entries == expected


@cocotb.test()
async def refused_writes_have_no_effect(dut):
    card = Card(dut, 3)
    await card.start()
    assert await card.write(0, POOL, 77) == AxiResp.OKAY
    wrong = [(1, POOL, 1), (1, TARGET, 1), (1, COMMIT + 4 * VMAC, 0), (1, COMMIT + 4 * METER, 0),
             (1, COMMIT + 4 * QUOTA, 0), (0, POOL, 0x10000), (0, TARGET, VES + 1), (0, ID, 1),
             (0, COMMIT + 4 * QUOTA, VES + 1), (0, COMMIT + 4 * QUOTA, 4 << 16), (1, SENT, 0),
             (VES + 1, COMMIT + 4 * CONTEXT, 0), (1, 0x3000, 0), (1, WRITE_DATA + 24, 0)]
    for page, offset, data in wrong:
        assert await card.write(page, offset, data) == AxiResp.SLVERR, (page, offset)
        assert await card.read(0, REFUSED_ADDRESS) == (AxiResp.OKAY, page << 16 | offset)
    for size in (1, 2, 3):
        assert await card.write(1, COMMIT + 4 * CONTEXT, 0, size) == AxiResp.SLVERR
    assert card.entries == []
    assert await card.write(1, COMMIT + 4 * CONTEXT, BAD_INDEX) == AxiResp.SLVERR
    assert await card.write(1, COMMIT + 4 * CONTEXT, 3) == AxiResp.OKAY
    assert [entry[:3] for entry in card.entries] == [(CONTEXT, 0, BAD_INDEX), (CONTEXT, 0, 3)]
    assert await card.read(0, POOL) == (AxiResp.OKAY, 77)
    assert await card.read(0, TARGET) == (AxiResp.OKAY, 0)


@cocotb.test()
async def each_page_keeps_the_high_word_of_its_counter(dut):
    card = Card(dut, 4)
    await card.start()
    assert await card.read(1, VERDICT) == (AxiResp.OKAY, 0x89abcdef)
    card.dut.rd_frames_i.value = 0x55555555_66666666
    assert await card.read(2, VERDICT) == (AxiResp.OKAY, 0x66666666)
    assert await card.read(1, VERDICT + 4) == (AxiResp.OKAY, 0x01234567)
    assert await card.read(2, VERDICT + 4) == (AxiResp.OKAY, 0x55555555)
    assert await card.read(2, VERDICT + 8) == (AxiResp.OKAY, 0x76543210)
    assert await card.read(2, VERDICT + 12) == (AxiResp.OKAY, 0xfedcba98)


@cocotb.test()
async def many_writes_at_once_keep_their_order(dut):
    card = Card(dut, 5)
    await card.start()
    jobs = []
    for at in range(60):
        address = 3 << 16 | COMMIT + 4 * CONTEXT
        index = BAD_INDEX if at % 7 == 3 else at
        jobs.append((index, card.master.init_write(address, index.to_bytes(4, "little"))))
    for index, job in jobs:
        await job.wait()
        wanted = AxiResp.SLVERR if index == BAD_INDEX else AxiResp.OKAY
        assert job.data.resp == wanted, index
    assert [entry[2] for entry in card.entries] == [index for index, _ in jobs]
