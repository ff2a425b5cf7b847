"""card_parse against scapy: frames of each kind, whole and cut at each length."""

import ipaddress
import random

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_Router_Alert, IPOption_RR
from scapy.layers.inet6 import (ICMPv6EchoRequest, ICMPv6MLReport2, ICMPv6ND_NA, ICMPv6ND_NS,
                                ICMPv6ND_Redirect, ICMPv6ND_RS, IPv6, IPv6ExtHdrFragment,
                                IPv6ExtHdrHopByHop, RouterAlert)
from scapy.layers.l2 import ARP, LLC, STP, Dot1Q, Dot3, Ether
from scapy.packet import Raw
from scapy.utils import checksum

MAC = "02:00:00:00:01:00"
# Fields of parsed_t from bit 0 on, with their width.
FIELDS = [("packet_bytes", 11), ("dont_fragment", 1), ("options", 1), ("expired", 1),
          ("from_link_local", 1), ("never", 1), ("to_router", 1), ("control", 1), ("discovery", 1),
          ("unknown", 1), ("malformed", 1), ("to_group", 1), ("runt", 1), ("kind", 2)]
OTHER, IPV4, IPV6, ARP_ = range(4)


def frames():
    """Products of headers."""
    ether = Ether(src="02:00:00:00:00:99", dst=MAC)
    addresses = ["10.0.0.1", "0.1.2.3", "127.0.0.1", "224.0.0.5", "240.0.0.1", "255.255.255.255"]
    for source in addresses:
        for destination in addresses:
            yield ether / IP(src=source, dst=destination) / UDP(sport=7, dport=9) / b"payload"
    for ttl in (0, 1, 2, 255):
        for tos in (0, 0xbf, 0xc0, 0xff):
            yield ether / IP(dst="10.0.0.2", ttl=ttl, tos=tos) / TCP()
    for flags, offset in (("DF", 0), ("MF", 0), (0, 185), ("MF+DF", 3)):
        yield ether / IP(dst="10.0.0.2", flags=flags, frag=offset) / ICMP()
    for options in ([IPOption_Router_Alert()], [IPOption_RR(length=35, routers=["0.0.0.0"] * 8)],
                    [IPOption_RR(length=39, routers=["0.0.0.0"] * 9)],
                    [IPOption_RR(length=23, routers=["0.0.0.0"] * 5)],
                    [IPOption_RR(length=27, routers=["0.0.0.0"] * 6)]):
        yield ether / IP(dst="10.0.0.2", options=options) / UDP() / b"options"
    six = ["2001:db8::1", "::", "::1", "::2", "1::", "fe80::1", "febf::1", "fec0::1", "ff02::1"]
    for source in six:
        for destination in six:
            yield ether / IPv6(src=source, dst=destination) / UDP() / b"payload"
    for payload in (ICMPv6ND_RS(), ICMPv6ND_NS(tgt="fe80::1"), ICMPv6ND_NA(tgt="fe80::1"),
                    ICMPv6ND_Redirect(tgt="fe80::1"), ICMPv6EchoRequest(), ICMPv6MLReport2(),
                    IPv6ExtHdrHopByHop(options=[RouterAlert()]) / ICMPv6EchoRequest(),
                    IPv6ExtHdrFragment(offset=3) / UDP()):
        for class_ in (0, 0xbf, 0xc0):
            for hops in (0, 1, 2, 255):
                yield ether / IPv6(src="fe80::2", dst="ff02::1", tc=class_, hlim=hops) / payload
    yield ether / ARP(pdst="10.0.0.1")
    yield Ether(dst="ff:ff:ff:ff:ff:ff") / ARP(pdst="10.0.0.1")
    yield Ether(dst="01:00:5e:00:00:05") / IP(dst="224.0.0.5", proto=89, tos=0xc0) / b"OSPF"
    yield ether / Dot1Q(vlan=5) / IP(dst="10.0.0.2") / UDP()
    yield Dot3(dst="01:80:c2:00:00:00") / LLC() / STP()
    yield Dot3(dst="01:80:c2:00:00:14", len=1497) / LLC(dsap=0xfe, ssap=0xfe) / (b"IS-IS" * 9)
    yield Ether(dst=MAC, type=0x0600) / (b"x" * 46)
    yield Ether(dst=MAC, type=0x05ff) / (b"x" * 46)


def mutations(rng):
    """Bytes of the frames: whole, padded, with a changed byte, and cut."""
    for frame in frames():
        data = bytes(frame)
        yield data
        yield data + bytes(rng.randrange(1, 60))
        for _ in range(4):
            changed = bytearray(data)
            changed[rng.randrange(12, min(len(data), 64))] ^= 1 << rng.randrange(8)
            yield bytes(changed)
        yield data[:rng.randrange(1, len(data))]
    for frame in rng.sample(list(frames()), 8):
        data = bytes(frame)
        for length in range(1, len(data) + 1):
            yield data[:length]


def expected(data):
    """Fields of parsed_t that are defined for a frame, and its destination address."""
    want = {"runt": len(data) < 14}
    if len(data) < 14:
        return want, None
    ether = Ether(data) if int.from_bytes(data[12:14], "big") >= 0x600 else None
    kind = int.from_bytes(data[12:14], "big")
    packet = data[14:]
    want["to_group"] = data[0] & 1
    want["kind"] = {0x0800: IPV4, 0x86dd: IPV6, 0x0806: ARP_}.get(kind, OTHER)
    if kind == 0x0800:
        return ipv4(want, ether, packet)
    if kind == 0x86dd:
        return ipv6(want, packet)
    want["control"] = kind < 0x600
    return want, None


def ipv4(want, ether, packet):
    want["control"] = len(packet) > 1 and packet[1] >= 0xc0
    ip = IP(packet) if len(packet) >= 20 else None
    if ip is None or ip.version != 4 or ip.ihl < 5 or not ip.ihl * 4 <= ip.len <= len(packet):
        return {**want, "malformed": 1}, None
    assert ether is not None
    if ip.ihl > 12:
        return {**want, "malformed": 0, "unknown": 1}, None
    if checksum(packet[:ip.ihl * 4]) != 0:
        return {**want, "malformed": 1}, None
    source, destination = (ipaddress.IPv4Address(text) for text in (ip.src, ip.dst))

    def never(address):
        first = int(address) >> 24
        return first in (0, 127) or first >= 224

    return {
        **want, "malformed": 0, "unknown": 0, "discovery": 0, "from_link_local": 0,
        "to_router": destination.is_multicast or int(destination) == 0xffffffff,
        "never": never(source) or never(destination), "expired": ip.ttl <= 1,
        "options": ip.ihl > 5, "dont_fragment": "DF" in ip.flags, "packet_bytes": ip.len,
    }, int(destination) << 96


def ipv6(want, packet):
    class_ = (packet[0] << 4 | packet[1] >> 4) & 0xff if len(packet) > 1 else 0
    want["control"] = class_ >= 0xc0
    ip = IPv6(packet) if len(packet) >= 40 else None
    if ip is None or ip.version != 6 or 40 + ip.plen > len(packet):
        return {**want, "malformed": 1}, None
    source, destination = (ipaddress.IPv6Address(packet[at:at + 16]) for at in (8, 24))
    discovery = ip.nh == 58 and ip.plen > 0 and 133 <= packet[40] <= 137
    return {
        **want, "malformed": 0, "unknown": 0, "discovery": discovery, "dont_fragment": 0,
        "to_router": destination.is_multicast or destination.is_link_local,
        "never": int(source) <= 1 or int(destination) <= 1 or source.is_multicast,
        "from_link_local": source.is_link_local, "expired": ip.hlim <= 1, "options": ip.nh == 0,
        "packet_bytes": 40 + ip.plen,
    }, int(destination)


@cocotb.test()
async def parses_scapy_frames(dut):
    """One frame per cycle; parsed_o comes 4 cycles later, key_o 2 cycles later."""
    cocotb.start_soon(Clock(dut.clk, 2, unit="ns").start(start_high=False))
    data = list(mutations(random.Random(1)))
    await FallingEdge(dut.clk)
    seen = set()
    for cycle in range(len(data) + 4):
        frame = data[min(cycle, len(data) - 1)]
        # Outputs of this falling edge belong to frames that entered 2 and 4 rising edges ago.
        if 2 <= cycle < len(data) + 2:
            _, key = expected(data[cycle - 2])
            if key is not None:
                assert int(dut.key_o.value) == key, data[cycle - 2].hex()
        if cycle >= 4:
            want, key = expected(data[cycle - 4])
            value = int(dut.parsed_o.value)
            for name, width in FIELDS:
                have, value = value & ((1 << width) - 1), value >> width
                if name in want:
                    assert have == int(want[name]), (name, have, data[cycle - 4].hex())
                    seen.add((name, have))
        dut.bytes_i.value = int.from_bytes(frame[:64].ljust(64, b"\0"), "little")
        dut.length_i.value = len(frame)
        await FallingEdge(dut.clk)
    for name, width in FIELDS:
        if width == 1:
            assert {(name, 0), (name, 1)} <= seen, f"{name} had one value only"
    dut._log.info("%d frames", len(data))
