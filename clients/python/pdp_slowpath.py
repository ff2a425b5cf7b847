"""A slow path's side of the channel to PdP's mux: filters, counters and frames of a fast path.

One file, the standard library alone, Python 3.9 or later. docs/slowpath.md of PdP is the guide; the wire format is there
too.

    from pdp_slowpath import Filter, SlowPath, discard, send

    slow_path = SlowPath()
    with slow_path.batch() as batch:
        batch.set(Filter(1, 100, "ip proto udp dport 53", send(2, "02:00:00:00:00:09")))
        batch.set(Filter(2, 200, "ip src 198.51.100.0/24", discard(counter=0)))
    while True:
        slow_path.keep(1.0)
        print(slow_path.counters(0, 1)[0].packets, "packets dropped")

Everything blocks, for a bounded time. What a program wants is brought back after the mux was replaced.
"""

import ipaddress
import socket
import struct
import time
from dataclasses import dataclass, replace
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

__all__ = [
    "SOCKET", "Action", "Batch", "Bye", "Counter", "Error", "Filter", "Gone", "Pattern", "Queue", "Refused", "SlowPath",
    "Unexpected", "Welcome", "discard", "pass_", "pattern", "punt", "send", "text",
]

SOCKET = "/run/pdp/slowpath/control.sock"
"""Where the mux listens, in a control guest."""

VERSION = 2
PACKET_BYTES_MAX = 1 << 16
COPIES_MAX = 8
DATA_BYTES = 16
NO_COUNTER = 0xFFFFFFFF
NO_FILTER = 0xFFFFFFFF
QUEUES_MAX = 4096
FRAME_BYTES_MAX = 2048
SHORT_BYTES = 16
LONG_BYTES = 40
TEXT_BYTES_MAX = 512

TIMEOUT = 30.0
"""Longest time that a call takes, in seconds, with the wait for a mux that is away."""

# Time that a mux which listens has for its greeting, and pauses between two attempts to connect, seconds.
_GREETING = 5.0
_PAUSE_MIN = 0.01
_PAUSE_MAX = 1.0

_VERDICTS = ("drop", "pass", "send", "punt")

_PROTOCOLS = {
    "icmp": 1, "igmp": 2, "tcp": 6, "udp": 17, "dccp": 33, "gre": 47, "esp": 50, "ah": 51, "icmp6": 58, "icmpv6": 58,
    "ipv6-icmp": 58, "ospf": 89, "pim": 103, "vrrp": 112, "sctp": 132, "udplite": 136,
}

_T = TypeVar("_T")


class Error(Exception):
    """Something was not done."""


class Gone(Error):
    """Nobody listens, or who did went away, or gave no answer in time."""


class _Late(Gone):
    """There was no time left."""


class Refused(Error):
    """The mux refused a batch: nothing of it is in force. `id` is the filter that it is about, NO_FILTER if none; `reason` why."""

    def __init__(self, id: int, reason: str) -> None:
        super().__init__(reason if id == NO_FILTER else f"filter {id}: {reason}")
        self.id = id
        self.reason = reason


class Bye(Error):
    """The mux disconnected this program; the text says why. The next call connects again."""


class Unexpected(Error):
    """An answer that is none: another version."""


class Pattern(NamedTuple):
    """What a filter looks at: 16 bytes each (IPv4), or 40 (IPv6)."""

    value: bytes
    mask: bytes


def pattern(words: str, names: Sequence[str] = ()) -> Pattern:
    """Reads a pattern, `ip src 10.0.0.0/8 proto udp dport 53 in 2`.

    `names` are those of the interfaces, in the order of their vports. A ValueError says what is wrong.
    """
    if len(words.encode()) > TEXT_BYTES_MAX:
        raise ValueError(f"{len(words.encode())} bytes, {TEXT_BYTES_MAX} at most")
    first, *rest = words.split() or [""]
    if first not in ("ip", "ip6", "raw"):
        raise ValueError(f"{first!r} at its begin; say ip, ip6 or raw first")
    address = 16 if first == "ip6" else 4
    value, mask = bytearray(2 * address + 8), bytearray(2 * address + 8)
    known: Iterable[str] = _PLACES
    if first == "raw":
        value, mask = _raw("".join(rest[:1]))
        address, known, rest = (len(value) - 8) // 2, ("in",), rest[1:]
    said = set()
    while rest:
        word, text_of, rest = rest[0], "".join(rest[1:2]), rest[2:]
        if word not in known:
            raise ValueError(f"unknown word {word!r}; known: {', '.join(known)}")
        start, size = _place(word, address)
        if start in said:
            raise ValueError(f"{word} appears twice")
        said.add(start)
        try:
            bits, under = _value(word, text_of, size, names)
        except (ValueError, OverflowError):
            raise ValueError(f"{word} {text_of!r}") from None
        value[start:start + size] = bytes(a & b for a, b in zip(bits, under))
        mask[start:start + size] = under
    return Pattern(bytes(value), bytes(mask))


# Words, with the place behind both addresses and the size of what they say; None: an address.
_PLACES: Dict[str, Optional[Tuple[int, int]]] = {
    "src": None, "dst": None, "proto": (4, 1), "sport": (0, 2), "dport": (2, 2), "tos": (5, 1), "dscp": (5, 1),
    "in": (6, 2),
}


def _place(word: str, address: int) -> Tuple[int, int]:
    place = _PLACES[word]
    if place is None:
        return (0 if word == "src" else address), address
    return 2 * address + place[0], place[1]


def _digits(words: str, base: int) -> int:
    if not words.isascii() or not words.isalnum():
        raise ValueError
    return int(words, base)


def _number(words: str, size: int) -> Tuple[bytes, bytes]:
    def one(part: str) -> bytes:
        number = _digits(part[2:], 16) if part.startswith("0x") else _digits(part, 10)
        return number.to_bytes(size, "big")

    value, slash, mask = words.partition("/")
    return one(value), one(mask) if slash else b"\xff" * size


def _value(word: str, words: str, size: int, names: Sequence[str]) -> Tuple[bytes, bytes]:
    """Value and mask of what a word says."""
    if _PLACES[word] is None:
        return _address(words, size)
    if word == "proto" and words in _PROTOCOLS:
        return bytes([_PROTOCOLS[words]]), b"\xff"
    if word == "in" and words in names:
        return list(names).index(words).to_bytes(2, "big"), b"\xff\xff"
    if word == "dscp":
        code_point = _digits(words, 10)
        if code_point > 63:
            raise ValueError
        return bytes([code_point << 2]), b"\xfc"
    return _number(words, size)


def _octets(words: str, size: int) -> bytes:
    kind = ipaddress.IPv4Address if size == 4 else ipaddress.IPv6Address
    if "%" in words:
        raise ValueError
    return kind(words).packed


def _prefix_mask(length: int, size: int) -> bytes:
    if length > 8 * size:
        raise ValueError
    return ((1 << 8 * size) - (1 << 8 * size - length)).to_bytes(size, "big")


def _address(words: str, size: int) -> Tuple[bytes, bytes]:
    value, slash, mask = words.partition("/")
    if not slash:
        return _octets(value, size), b"\xff" * size
    if mask.isdigit():
        return _octets(value, size), _prefix_mask(_digits(mask, 10), size)
    return _octets(value, size), _octets(mask, size)


def _raw(words: str) -> Tuple[bytearray, bytearray]:
    value, slash, mask = words.partition("/")
    try:
        bits = bytes.fromhex(value)
        under = bytes.fromhex(mask) if slash else b"\xff" * len(bits)
    except ValueError:
        raise ValueError("use raw BYTES or raw BYTES/MASK, in hexadecimal") from None
    if len(bits) != len(under) or not 1 <= len(bits) <= LONG_BYTES - 2:
        most = LONG_BYTES - 2
        raise ValueError(f"raw value of {len(bits)} bytes, mask of {len(under)}; use 1 to {most} bytes for both")
    size = SHORT_BYTES if len(bits) <= SHORT_BYTES - 2 else LONG_BYTES
    bits = bytes(a & b for a, b in zip(bits, under))
    return bytearray(bits.ljust(size, b"\0")), bytearray(under.ljust(size, b"\0"))


def text(of: Pattern, names: Sequence[str] = (), code: int = 0) -> str:
    """Writes a pattern of this code (0 `ip`, 1 `fields`) so that `pattern` reads it."""
    address = 4 if len(of.value) == SHORT_BYTES else 16
    fields: Iterable[str] = ("src", "dst", "proto", "sport", "dport", "tos", "in")
    out = ["ip" if address == 4 else "ip6"]
    if code:
        size = len(of.mask) - 2
        # As many as say how long it is.
        used = max(len(of.mask[:size].rstrip(b"\0")), 1 if address == 4 else SHORT_BYTES - 1)
        under = of.mask[:used]
        words = bytes(a & b for a, b in zip(of.value, under)).hex()
        out, fields = ["raw", words if under == b"\xff" * used else f"{words}/{under.hex()}"], ("in",)
    for word in fields:
        start, size = _place(word, address)
        value, mask = of.value[start:start + size], of.mask[start:start + size]
        value = bytes(a & b for a, b in zip(value, mask))
        if not any(mask):
            continue
        whole = mask == b"\xff" * size
        number, under_mask = int.from_bytes(value, "big"), int.from_bytes(mask, "big")
        words = f"{number}" if whole else f"{number}/{under_mask:#x}"
        if _PLACES[word] is None:
            words = _address_text(value, mask)
        elif word == "proto" and whole:
            words = next((name for name, known in _PROTOCOLS.items() if known == number), words)
        elif word == "tos" and under_mask == 0xFC:
            word, words = "dscp", f"{number >> 2}"
        elif word == "tos":
            words = f"{number:#x}" if whole else f"{number:#x}/{under_mask:#x}"
        elif word == "in" and whole and number < len(names):
            words = names[number]
        elif word == "in" and words in names:
            words += "/0xffff"
        out += [word, words]
    return " ".join(out)


def _address_text(value: bytes, mask: bytes) -> str:
    under = int.from_bytes(mask, "big")
    length = bin(under).count("1")
    if mask != _prefix_mask(length, len(mask)):
        return f"{ipaddress.ip_address(value)}/{ipaddress.ip_address(mask)}"
    host = length == 8 * len(mask)
    return str(ipaddress.ip_address(value)) + ("" if host else f"/{length}")


@dataclass(frozen=True)
class Action:
    """What a filter has done to packets.

    `verdict` is drop, pass, send or punt. `vport` and `data` are of what is sent: by which vport, and what is written
    into its header (code `ip`: the link address). `queue` is that of the port that it leaves by, counted from 1; 0: the
    port chooses. Copies leave by the vports of `copies`, 8 at most.
    """

    verdict: str = "pass"
    vport: int = 0
    queue: int = 0
    counter: Optional[int] = None
    copies: Tuple[int, ...] = ()
    data: bytes = b""


def discard(counter: Optional[int] = None) -> Action:
    """The packet is dropped."""
    return Action("drop", counter=counter)


def pass_(counter: Optional[int] = None) -> Action:
    """What would become of the packet without the filter."""
    return Action("pass", counter=counter)


def punt(counter: Optional[int] = None) -> Action:
    """The packet goes to the control guest."""
    return Action("punt", counter=counter)


def send(vport: int, to: str, counter: Optional[int] = None, queue: int = 0, copies: Iterable[int] = ()) -> Action:
    """The packet leaves by a vport, to a link address."""
    data = bytes.fromhex(to.replace(":", ""))
    if len(data) != 6:
        raise ValueError(f"{to!r} is not a MAC address")
    return Action("send", vport, queue, counter, tuple(copies), data)


@dataclass(frozen=True)
class Filter:
    """A filter: of those that a packet meets the one with the highest priority counts. `match` may be text."""

    id: int
    priority: int
    match: Union[Pattern, str]
    action: Action = Action()

    def _packed(self) -> bytes:
        of, action = self.match, self.action
        if isinstance(of, str):
            of = pattern(of)
        if len(of.value) != len(of.mask) or len(of.value) not in (SHORT_BYTES, LONG_BYTES):
            raise ValueError("a pattern has 16 bytes, or 40, as many of value and mask")
        if len(action.copies) > COPIES_MAX or len(action.data) > DATA_BYTES:
            raise ValueError(f"{COPIES_MAX} copies at most, and {DATA_BYTES} bytes of data")
        counter = NO_COUNTER if action.counter is None else action.counter
        copies, data = bytes(action.copies).ljust(COPIES_MAX, b"\0"), action.data.ljust(DATA_BYTES, b"\0")
        head = _FILTER.pack(self.id, self.priority, _VERDICTS.index(action.verdict), action.vport, action.queue,
                            counter, len(action.copies), copies, data)
        return head + of.value + of.mask

    @staticmethod
    def _unpacked(packed: bytes) -> "Filter":
        size = {_FILTER.size + 2 * SHORT_BYTES: SHORT_BYTES, _FILTER.size + 2 * LONG_BYTES: LONG_BYTES}.get(len(packed))
        if size is None:
            raise Unexpected("a filter of another length")
        id, priority, verdict, vport, queue, counter, count, copies, data = _FILTER.unpack_from(packed)
        if verdict >= len(_VERDICTS) or count > COPIES_MAX:
            raise Unexpected("a filter that is none")
        of = Pattern(packed[_FILTER.size:][:size], packed[_FILTER.size + size:])
        action = Action(_VERDICTS[verdict], vport, queue, None if counter == NO_COUNTER else counter,
                        tuple(copies[:count]), data)
        return Filter(id, priority, of, action)


_FILTER = struct.Struct("!IIBBHIB3x8s16s")
_HEADER = struct.Struct("!HBB")

_HELLO, _SET, _REMOVE, _COMMIT, _COUNTERS, _LIST, _FRAME, _QUEUE, _ASK_QUEUES = range(1, 10)
_WELCOME, _DONE, _REFUSED, _COUNTED, _FILTERS, _BYE, _QUEUES = range(129, 136)


class Counter(NamedTuple):
    """What a counter has: packets that met its filters, and those of them that left, after their queue."""

    packets: int
    bytes: int
    sent: int = 0
    sent_bytes: int = 0


class Queue(NamedTuple):
    """How a queue is: what holds, what waits, and what it counted. `bytes_max` 0: as many as its frames have."""

    weight: int
    frames_max: int
    bytes_max: int
    buffers: int
    waiting: int
    waiting_bytes: int
    sent: int
    sent_bytes: int
    dropped: int


class Welcome(NamedTuple):
    """What there is: the code (0 `ip`, 1 `fields`), vports, which tables, and how many filters and counters."""

    version: int
    code: int
    vports: int
    tables: int
    filters_max: int
    counters: int


def _message(kind: int, body: bytes = b"", flags: int = 0) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags) + body


class _Connection:
    """One connection; nothing waits beyond `deadline`, on the monotonic clock."""

    def __init__(self, path: str, deadline: float) -> None:
        self.deadline = deadline
        self._number = 0
        self._replies: List[Tuple[int, int, bytes]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            while True:
                try:
                    self._in_time(lambda: self._socket.connect(path))
                    break
                except _Late:
                    # Its queue of connections is full.
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.005)
            self._say([_message(_HELLO, struct.pack("!H", VERSION))])
            _, body = self._expect(_WELCOME)
            if len(body) != 24:
                raise Unexpected("a welcome of another length")
            self.welcome = Welcome(*struct.unpack("!HBxH2xQII", body))
            if self.welcome.version != VERSION:
                raise Unexpected(f"the mux speaks version {self.welcome.version}, this program {VERSION}")
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise Gone(f"no mux at {path}: {error}") from error
            raise

    def close(self) -> None:
        self._socket.close()

    def commit(self, changes: Iterable[bytes], sweep: bool) -> int:
        number = self._next()
        self._say([*changes, _message(_COMMIT, struct.pack("!Q", number), int(sweep))])
        _, body = self._expect(_DONE, number)
        return int.from_bytes(body[8:12], "big")

    def counters(self, first: int, count: int) -> List[Counter]:
        number = self._next()
        self._say([_message(_COUNTERS, struct.pack("!QII", number, first, count))])
        found: List[Counter] = []
        more = 1
        while more:
            more, body = self._expect(_COUNTED, number)
            if len(body) % 32 != 12 or len(found) > count:
                raise Unexpected("counters of another length")
            found += map(Counter._make, struct.iter_unpack("!QQQQ", body[12:]))
        return found

    def queues(self, vport: int) -> List[Queue]:
        number = self._next()
        self._say([_message(_ASK_QUEUES, struct.pack("!QBxH", number, vport, 1))])
        found: List[Queue] = []
        more = 1
        while more:
            more, body = self._expect(_QUEUES, number)
            if len(body) % 48 != 12 or len(found) > QUEUES_MAX:
                raise Unexpected("queues of another length")
            found += map(Queue._make, struct.iter_unpack("!IIIIIIQQQ", body[12:]))
        return found

    def list(self) -> List[Filter]:
        number = self._next()
        self._say([_message(_LIST, struct.pack("!QI", number, 0))])
        found: List[Filter] = []
        more = 1
        while more:
            more, body = self._expect(_FILTERS, number)
            at = 8
            while at < len(body):
                size = int.from_bytes(body[at:at + 2], "big")
                found.append(Filter._unpacked(body[at + 2:at + 2 + size]))
                at += 2 + size
        return found

    def frame(self, body: bytes) -> None:
        self._say([_message(_FRAME, body)])

    def wait(self) -> None:
        """Until the deadline, or until the mux says or does something that nobody asked for."""
        try:
            self._expect(0)
        except _Late:
            pass

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _in_time(self, act: Callable[[], _T]) -> _T:
        """Does something with the socket that waits no longer than until the deadline."""
        self._socket.settimeout(max(0.0, self.deadline - time.monotonic()))
        try:
            return act()
        except (BlockingIOError, socket.timeout) as error:
            raise _Late("no answer of the mux in time") from error

    def _say(self, messages: Iterable[bytes]) -> None:
        packet = b""
        for message in messages:
            if len(packet) + len(message) > PACKET_BYTES_MAX:
                self._send(packet)
                packet = b""
            packet += message
        self._send(packet)

    def _send(self, packet: bytes) -> None:
        try:
            self._in_time(lambda: self._socket.send(packet))
        except (BrokenPipeError, ConnectionResetError) as error:
            # It may have said why before it went.
            while True:
                kind, _, body = self._reply()
                if kind == _BYE:
                    raise Bye(body.decode(errors="replace")) from error

    def _expect(self, wanted: int, number: Optional[int] = None) -> Tuple[int, bytes]:
        """Flags and body of the next answer, which is to be this one."""
        kind, flags, body = self._reply()
        if kind == _BYE:
            raise Bye(body.decode(errors="replace"))
        of = int.from_bytes(body[:8], "big")
        if kind == _REFUSED and of == number:
            raise Refused(int.from_bytes(body[8:12], "big"), body[12:].decode(errors="replace"))
        if kind != wanted or number not in (None, of):
            raise Unexpected(f"unsolicited answer of kind {kind}")
        return flags, body

    def _reply(self) -> Tuple[int, int, bytes]:
        while not self._replies:
            packet = self._receive()
            while packet:
                if len(packet) < _HEADER.size:
                    raise Unexpected("a message without header")
                size, kind, flags = _HEADER.unpack_from(packet)
                if not _HEADER.size <= size <= len(packet):
                    raise Unexpected("a message of another length")
                self._replies.append((kind, flags, packet[_HEADER.size:size]))
                packet = packet[size:]
        return self._replies.pop(0)

    def _receive(self) -> bytes:
        def receive() -> bytes:
            return self._in_time(lambda: self._socket.recv(PACKET_BYTES_MAX))

        try:
            try:
                packet = receive()
            except ConnectionResetError:
                # It went without having read all; what it said before is still to be had.
                packet = receive()
        except ConnectionResetError as error:
            raise Gone("the mux went away") from error
        if not packet:
            raise Gone("the mux went away")
        return packet


class SlowPath:
    """A slow path's side of the channel, with the filters that it wants.

    After its first batch the mux has these filters and no others: they are said again, all in one batch that sweeps
    what is not among them, wherever a connection is new. All calls do that by themselves; a program that has nothing to do
    calls `keep` in place of sleeping. Where the mux disconnects this program, the call that finds out raises Bye, and
    the next one connects again. A mux that is away is waited for, for `timeout` seconds; then Gone is raised.
    """

    def __init__(self, path: str = SOCKET, timeout: float = TIMEOUT) -> None:
        self.path = path
        self.timeout = timeout
        self.wanted: Dict[int, Filter] = {}
        self._queues: Dict[Tuple[int, int], bytes] = {}
        self._connection: Optional[_Connection] = None
        self._is_told = False
        self._wants = False
        self._pause = 0.0
        self._connected(time.monotonic() + timeout)

    def close(self) -> None:
        """Disconnects. The filters stay in force."""
        if self._connection:
            self._connection.close()
        self._connection = None

    @property
    def welcome(self) -> Welcome:
        """What there was at the last connection."""
        return self._welcome

    def batch(self) -> "Batch":
        """Begins changes that come into force together, at the end of a `with` block or by `commit`."""
        return Batch(self)

    def counters(self, first: int, count: int) -> List[Counter]:
        """What counters have, `count` from `first` on, all at one moment. A new mux counts from 0."""

        def ask(end: float) -> List[Counter]:
            connection = self._told(end)
            there = connection.welcome.counters
            if first < 0 or count < 0 or first + count > there:
                raise ValueError(f"{count} counters from {first} do not exist: the router has {there}, numbered from 0")
            return connection.counters(first, count)

        return self._until(self._end(), ask)

    def queues(self, vport: int) -> List[Queue]:
        """How the queues of a vport are, in their order; none, where frames have one for all."""

        def ask(end: float) -> List[Queue]:
            connection = self._told(end)
            if not 0 <= vport < connection.welcome.vports:
                vports = connection.welcome.vports
                raise ValueError(f"vport {vport} does not exist: the router has {vports}, numbered from 0")
            return connection.queues(vport)

        return self._until(self._end(), ask)

    def list(self) -> List[Filter]:
        """The filters that are in force, with their patterns as bytes; `text` makes words of those."""
        return self._until(self._end(), lambda end: self._told(end).list())

    def send(self, frame: bytes, out: Optional[int] = None, into: Optional[int] = None, queue: int = 0) -> None:
        """Sends a frame, from Ethernet's header on: out of a vport, or as if it came in by one.

        It is not answered: one that there is no room for is dropped.
        """
        if (out is None) == (into is None):
            raise ValueError("a frame goes out of a vport, or into one")
        if not 14 <= len(frame) <= FRAME_BYTES_MAX:
            raise ValueError(f"frame of {len(frame)} bytes (send 14 to {FRAME_BYTES_MAX})")
        vport = into if out is None else out
        body = struct.pack("!BBH", int(out is not None), vport, queue) + frame
        self._until(self._end(), lambda end: self._told(end).frame(body))

    def keep(self, seconds: float) -> None:
        """For so long, keeps the mux at what is wanted. Raises Gone at the end, where no mux is there."""

        def wait(end: float) -> None:
            self._connected(end)
            self._told(max(end, self._end()))
            self._connected(end).wait()

        self._until(time.monotonic() + seconds, wait)

    def _end(self) -> float:
        return time.monotonic() + self.timeout

    def _lost(self) -> None:
        self.close()
        self._pause = min(max(2 * self._pause, _PAUSE_MIN), _PAUSE_MAX)

    def _until(self, end: float, act: Callable[[float], _T]) -> _T:
        """Acts, again on a new connection where the one that it was on is gone."""
        while True:
            try:
                result = act(end)
            except (Refused, ValueError):
                self._pause = 0.0
                raise
            except Gone:
                self._lost()
                if time.monotonic() + self._pause >= end:
                    raise
            except BaseException:
                self._lost()
                raise
            else:
                self._pause = 0.0
                return result

    def _connected(self, end: float) -> _Connection:
        while not self._connection:
            self._is_told = False
            time.sleep(max(0.0, min(self._pause, end - time.monotonic())))
            greeted = time.monotonic() + min(self.timeout, _GREETING)
            try:
                self._connection = _Connection(self.path, max(end, greeted))
                self._welcome = self._connection.welcome
            except Gone:
                self._lost()
                if time.monotonic() + self._pause >= end:
                    raise
        self._connection.deadline = end
        return self._connection

    def _told(self, end: float) -> _Connection:
        connection = self._connected(end)
        if self._wants and not self._is_told:
            said = [_message(_SET, it._packed()) for it in self.wanted.values()]
            connection.commit([*said, *self._queues.values()], True)
            self._is_told = True
        return connection

    def _commit(self, changes: Dict[int, Optional[Filter]], queues: Dict[Tuple[int, int], bytes]) -> int:
        wanted = {**self.wanted, **changes}
        all_queues = {**self._queues, **queues}

        def commit(end: float) -> int:
            connection = self._connected(end)
            sweep = not self._is_told
            said = []
            for id, filter in (wanted if sweep else changes).items():
                if filter is not None:
                    said.append(_message(_SET, filter._packed()))
                elif not sweep:
                    said.append(_message(_REMOVE, struct.pack("!I", id)))
            said += (all_queues if sweep else queues).values()
            filters = connection.commit(said, sweep)
            self._is_told = True
            return filters

        filters = self._until(self._end(), commit)
        self._wants = True
        self.wanted = {id: filter for id, filter in sorted(wanted.items()) if filter is not None}
        self._queues = all_queues
        return filters


class Batch:
    """Changes that come into force together, or not at all. Of one number the last one counts."""

    def __init__(self, slow_path: SlowPath) -> None:
        self._slow_path = slow_path
        self._changes: Dict[int, Optional[Filter]] = {}
        self._queues: Dict[Tuple[int, int], bytes] = {}

    def set(self, filter: Filter) -> "Batch":
        """This filter, new or in the place of the one with its number."""
        if isinstance(filter.match, str):
            filter = replace(filter, match=pattern(filter.match))
        try:
            filter._packed()
        except struct.error as error:
            raise ValueError(f"filter {filter.id}: {error}") from error
        self._changes[filter.id] = filter
        return self

    def remove(self, id: int) -> "Batch":
        """No filter with this number."""
        self._changes[id] = None
        return self

    def queue(self, vport: int, queue: int, weight: int = 0, frames: int = 0, bytes: int = 0) -> "Batch":
        """A queue of a vport, counted from 1, is to be so within what its spec says; what is 0 is as there."""
        try:
            packed = struct.pack("!BxHIII", vport, queue, weight, frames, bytes)
        except struct.error as error:
            raise ValueError(f"queue {queue} of vport {vport}: {error}") from error
        self._queues[vport, queue] = _message(_QUEUE, packed)
        return self

    def clear(self) -> "Batch":
        """None of the filters that are wanted now."""
        self._changes = dict.fromkeys(self._slow_path.wanted)
        return self

    def commit(self) -> int:
        """Has them in force, and returns once they are: how many filters there are then.

        Raises Refused where nothing was changed; what is wanted is as it was before.
        """
        return self._slow_path._commit(self._changes, self._queues)

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.commit()
