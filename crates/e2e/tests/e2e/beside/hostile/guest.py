"""A forwarding guest that does harm, of the kind that is its argument, until it is ended.

It speaks memif by itself, written from the protocol (DPDK 22.11, drivers/net/memif/memif.h): one
region with two rings and some buffers. As a guest of PdP's runtime it has interface 0, with tags in the
metadata word of descriptors (docs/guests.md).
"""
import array
import fcntl
import mmap
import os
import random
import socket
import struct
import sys
import time

SLOTS_LOG2 = 7
SLOTS = 1 << SLOTS_LOG2
RING_BYTES = 128 + 16 * SLOTS
BUFFER_BYTES = 2048
TO_MUX, TO_GUEST = 0, 0x1000
BUFFERS = 0x2000
SIZE = BUFFERS + 2 * SLOTS * BUFFER_BYTES
COOKIE = 0x3E31F20
ACK, HELLO, INIT, ADD_REGION, ADD_RING, CONNECT, CONNECTED = 1, 2, 3, 4, 5, 6, 7
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
NEXT = 1
OUT, PUNT, LAST = 2, 3, 1 << 4


class Connection:
    def __init__(self, seals=F_SEAL_SHRINK):
        self.memory = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.memory, SIZE)
        self.map = mmap.mmap(self.memory, SIZE)
        # Each index is written whole: struct.pack_into would clear it first.
        self.halves = memoryview(self.map).cast("H")
        for ring in (TO_MUX, TO_GUEST):
            struct.pack_into("<I", self.map, ring, COOKIE)
        if seals:
            fcntl.fcntl(self.memory, F_ADD_SEALS, seals)
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        self.socket.connect(os.environ["PDP_MEMIF"])
        self.hear(HELLO)
        self.say(struct.pack("<HHIB", INIT, 0x200, 0, 0))
        self.say(struct.pack("<HHQ", ADD_REGION, 0, SIZE), self.memory)
        for flags, ring, bell in ((1, TO_MUX, 0), (0, TO_GUEST, 1)):
            ring = struct.pack("<HHHHIB", ADD_RING, flags, 0, 0, ring, SLOTS_LOG2)
            self.say(ring, self.bells[bell])
        self.say(struct.pack("<H", CONNECT), heard=CONNECTED)
        # Buffers for what comes.
        for slot in range(SLOTS):
            self.describe(TO_GUEST, slot, 0, 0, BUFFER_BYTES, BUFFERS + slot * BUFFER_BYTES)
        self.set_head(TO_GUEST, SLOTS)

    def say(self, words, descriptor=None, heard=ACK):
        more = []
        if descriptor is not None:
            more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        self.socket.sendmsg([words.ljust(128, b"\0")], more)
        self.hear(heard)

    def hear(self, wanted):
        words = self.socket.recv(128)
        if len(words) != 128 or struct.unpack_from("<H", words)[0] != wanted:
            raise ConnectionError(words[6:].split(b"\0")[0].decode(errors="replace"))

    def describe(self, ring, slot, flags, region, length, offset, word=0):
        at = ring + 128 + 16 * (slot % SLOTS)
        struct.pack_into("<HHIII", self.map, at, flags, region, length, offset, word)

    def set_head(self, ring, head):
        self.halves[(ring + 6) // 2] = head & 0xFFFF

    def tail(self, ring):
        return self.halves[(ring + 64) // 2]

    def head(self, ring):
        return self.halves[(ring + 6) // 2]

    def ring_bell(self):
        try:
            os.eventfd_write(self.bells[0], 1)
        except BlockingIOError:
            pass

    def frame(self, slot):
        """The buffer of a frame that looks like one between the tenant's hosts."""
        at = BUFFERS + (SLOTS + slot % SLOTS) * BUFFER_BYTES
        self.map[at : at + 14] = bytes.fromhex("020000000002020000000001" "88b5")
        return at

    def send(self, word, length=60):
        """Announces one frame; whether there was room."""
        head = self.head(TO_MUX)
        if (head - self.tail(TO_MUX)) & 0xFFFF >= SLOTS:
            return False
        self.describe(TO_MUX, head, 0, 0, length, self.frame(head), word)
        self.set_head(TO_MUX, head + 1)
        return True

    def ended(self, seconds=2.0):
        """Waits until the mux hangs up."""
        self.socket.settimeout(seconds)
        try:
            words = self.socket.recv(128)
        except (TimeoutError, socket.timeout):
            return False
        except OSError:
            return True
        return True

    def close(self):
        self.socket.close()
        self.halves.release()
        self.map.close()
        for descriptor in [self.memory, *self.bells]:
            os.close(descriptor)


def tell(*words):
    print(*words, flush=True)


def again_and_again(act, **settings):
    """Connects, does one wrong, sees the connection end, and comes again."""
    while True:
        try:
            connection = Connection(**settings)
        except OSError as error:
            tell("refused:", error)
            time.sleep(0.2)
            continue
        act(connection)
        connection.ring_bell()
        tell("thrown out" if connection.ended() else "still there")
        connection.close()


def index(c):
    c.set_head(TO_MUX, c.tail(TO_MUX) + SLOTS + random.choice([1, 7, 0x7000]))


def bounds(c):
    offset = random.choice([SIZE - 10, SIZE, 0xFFFFFFFF, 0x80000000])
    c.describe(TO_MUX, c.head(TO_MUX), 0, 0, 60, offset)
    c.set_head(TO_MUX, c.head(TO_MUX) + 1)


def region(c):
    c.describe(TO_MUX, c.head(TO_MUX), 0, random.choice([1, 16, 0xFFFF]), 60, BUFFERS)
    c.set_head(TO_MUX, c.head(TO_MUX) + 1)


def chain(c):
    for slot in range(SLOTS):
        c.describe(TO_MUX, slot, NEXT, 0, 60, BUFFERS)
    c.set_head(TO_MUX, c.tail(TO_MUX) + SLOTS)


def tags(c):
    lies = [0, 0xFFFFFFFF, OUT | 200 << 16, OUT | LAST, PUNT | LAST | 9 << 8, 0x63636363]
    c.send(random.choice(lies))


def duplicates(c):
    """One completion for each frame, and then another for the same."""
    end = time.time() + 5
    while c.tail(TO_GUEST) == 0 and time.time() < end:
        time.sleep(0.001)
    for _ in range(c.tail(TO_GUEST) + 1):
        c.send(OUT | LAST)


def posted(c):
    """Buffers to fill that are not in the region."""
    for slot in range(SLOTS):
        c.describe(TO_GUEST, slot, 0, 0, BUFFER_BYTES, SIZE - 100)
    c.set_head(TO_GUEST, c.tail(TO_GUEST) + SLOTS)
    while c.ended(0.1) is False:
        c.ring_bell()


def control_socket(c):
    c.socket.send(os.urandom(random.choice([1, 127, 128, 4096])))


def cookie():
    c = Connection()
    while True:
        struct.pack_into("<I", c.map, TO_MUX, random.getrandbits(32))
        struct.pack_into("<I", c.map, TO_GUEST, random.getrandbits(32))
        c.send(OUT)
        c.ring_bell()
        time.sleep(0.001)


def silent():
    c = Connection()
    tell("connected")
    while True:
        time.sleep(1)


def flood():
    c = Connection()
    tell("connected")
    while True:
        for _ in range(64):
            c.send(OUT | random.choice([0, 1]) << 16, 1500)
        c.ring_bell()


def scribble():
    """Changes frames, descriptors and lengths while the mux reads them."""
    c = Connection()
    tell("connected")
    if os.fork() == 0:
        noise = os.urandom(1 << 16)
        while True:
            at = random.randrange(0, 1 << 15)
            for slot in range(SLOTS):
                buffer = BUFFERS + (SLOTS + slot) * BUFFER_BYTES
                c.map[buffer : buffer + 100] = noise[at : at + 100]
                length = random.choice([0, 14, 60, 1500, 2048])
                c.describe(TO_MUX, slot, 0, 0, length, c.frame(slot), OUT)
    while True:
        c.send(OUT, 60)
        c.ring_bell()


def punch():
    """Wants to take memory away that is sealed against shrinking, or out of the machine's memory."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    c = Connection()
    at = ctypes.addressof(ctypes.c_char.from_buffer(c.map))
    # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, behind the rings.
    done = libc.fallocate(c.memory, 3, BUFFERS, SIZE - BUFFERS) == 0
    # MADV_REMOVE, MADV_COLD, MADV_PAGEOUT, MADV_COLLAPSE
    done |= any(libc.madvise(at + BUFFERS, SIZE - BUFFERS, how) == 0 for how in (9, 20, 21, 25))
    tell("memory taken away" if done else "no memory taken away")
    while True:
        for _ in range(32):
            c.send(OUT, 1500)
        libc.fallocate(c.memory, 3, BUFFERS, SIZE - BUFFERS)
        libc.madvise(at + BUFFERS, SIZE - BUFFERS, 9)
        c.ring_bell()


def descriptors():
    """Opens all that it may, and waits with each for the mux's doorbell."""
    import select

    c = Connection()
    opened = []
    try:
        while len(opened) < 100_000:
            waiter = select.epoll()
            waiter.register(c.bells[1])
            opened.append(waiter)
    except OSError:
        pass
    tell("opened", len(opened))
    while True:
        c.send(OUT)
        c.ring_bell()
        time.sleep(0.001)


def bell():
    c = Connection()
    tell("connected")
    while True:
        c.ring_bell()


def fork():
    tell("forks")
    while True:
        try:
            if os.fork() == 0:
                time.sleep(1000)
        except OSError:
            time.sleep(0.01)


def memory():
    tell("eats")
    eaten = []
    while True:
        eaten.append(bytearray(os.urandom(4096) * 256))


def reconnect():
    count = 0
    while True:
        try:
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            s.setblocking(False)
            s.connect(os.environ["PDP_MEMIF"])
        except OSError:
            pass
        s.close()
        count += 1
        if count % 10000 == 0:
            tell("connected", count, "times")


def connect_whole():
    while True:
        try:
            Connection().close()
        except OSError:
            pass


def main(kind):
    breaches = [index, bounds, region, chain, tags, duplicates, posted, control_socket]
    for act in breaches:
        if act.__name__ == kind:
            again_and_again(act)
    if kind == "unsealed":
        again_and_again(lambda c: None, seals=0)
    globals()[kind]()


main(sys.argv[1])
