"""Prints frames that scapy builds, one a line in hexadecimal. Arguments: their number, the seed."""

import random
import sys

from scapy.config import conf
from scapy.layers.dns import DNS, DNSQR
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_Router_Alert, IPOption_RR
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6ND_RA,
    ICMPv6ND_RS,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import ARP, GRE, LLC, STP, Dot1Q, Dot3, Ether
from scapy.layers.vrrp import VRRP
from scapy.packet import Raw, fuzz

MOST_BYTES = 1714


def v4():
    return f"10.{random.randrange(3)}.{random.randrange(3)}.{random.randrange(4)}"


def v6():
    return f"2001:db8:{random.randrange(3)}::{random.randrange(3)}:{random.randrange(4)}"


def payload():
    return Raw(random.randbytes(random.choice([0, 1, 18, 46, random.randrange(1600)])))


def ipv4():
    options = random.choice([[], [], [], [IPOption_Router_Alert()], [IPOption_RR(length=39)]])
    return IP(
        src=v4(),
        dst=v4(),
        ttl=random.choice([0, 1, 2, 64, 255]),
        tos=random.choice([0, 0, 0xC0, 0xE0, 0xB8]),
        flags=random.choice(["", "DF", "MF"]),
        frag=random.choice([0, 0, 0, 185]),
        options=options,
    )


def ipv6():
    headers = [
        IPv6ExtHdrHopByHop(),
        IPv6ExtHdrDestOpt(),
        IPv6ExtHdrRouting(addresses=[v6()]),
        IPv6ExtHdrFragment(offset=random.randrange(8)),
    ]
    packet = IPv6(src=v6(), dst=v6(), hlim=random.choice([0, 1, 2, 64, 255]))
    return packet / random.choice(headers) if random.randrange(3) == 0 else packet


def transport():
    port = random.randrange(1 << 16)
    return random.choice(
        [
            lambda: UDP(sport=port, dport=53) / DNS(qd=DNSQR(qname="pdp.example")),
            lambda: UDP(sport=port) / payload(),
            lambda: TCP(sport=port, flags=random.choice(["S", "A", "PA"])) / payload(),
            lambda: GRE() / IP(src=v4(), dst=v4()) / UDP() / payload(),
            payload,
        ]
    )()


def frame():
    ether = Ether(dst="02:00:5c:00:9d:31", src="02:07:07:07:07:07")
    build = random.choice(
        [
            lambda: ether / ipv4() / transport(),
            lambda: ether / ipv4() / transport(),
            lambda: ether / ipv6() / transport(),
            lambda: ether / ipv6() / transport(),
            lambda: ether / ipv4() / ICMP() / payload(),
            lambda: ether / ipv6() / ICMPv6EchoRequest(data=random.randbytes(20)),
            lambda: ether / ipv6() / random.choice([ICMPv6ND_NS, ICMPv6ND_NA])(tgt=v6()),
            lambda: ether / ipv6() / random.choice([ICMPv6ND_RS, ICMPv6ND_RA])(),
            lambda: ether / ARP(psrc=v4(), pdst=v4()),
            lambda: ether / Dot1Q(vlan=7) / ipv4() / UDP(),
            lambda: ether / ipv4() / VRRP(),
            lambda: Dot3(dst="01:80:c2:00:00:00") / LLC() / STP(),
            lambda: ether / fuzz(IP(src=v4(), dst=v4())) / UDP(),
            lambda: ether / fuzz(IPv6(src=v6(), dst=v6())) / UDP(),
        ]
    )
    return bytes(build())[:MOST_BYTES]


def main():
    count, seed = (int(argument) for argument in sys.argv[1:])
    conf.verb = 0
    random.seed(seed)
    for _ in range(count):
        print(frame().hex())


main()
