"""What tests/python.rs has clients/python/pdp_slowpath.py do, told by lines on standard input."""

import sys
import time

import pdp_slowpath as sp


def step(words: str) -> None:
    """Says what was done, and waits until the other side has looked."""
    print(words, flush=True)
    assert sys.stdin.readline(), "the test has ended"


def patterns() -> None:
    """Reads texts, and writes what is meant by them."""
    names = ("eth0", "eth1", "eth10", "9")
    for line in sys.stdin:
        try:
            of = sp.pattern(line.rstrip("\n"), names)
            words = (sp.text(of, names), sp.text(of, names, 1))
            print(of.value.hex(), of.mask.hex(), " | ".join(words))
        except ValueError:
            print("wrong")


def drive(path: str) -> None:
    slow_path = sp.SlowPath(path)
    assert slow_path.welcome.vports == 4, slow_path.welcome
    filters = [
        sp.Filter(1, 10, "ip proto udp dport 53", sp.discard(counter=3)),
        sp.Filter(2, 20, "ip6 in 1", sp.send(2, "02:00:00:00:00:09", queue=1, copies=(1, 3))),
        sp.Filter(3, 20, "ip", sp.punt()),
    ]
    with slow_path.batch() as batch:
        for it in filters:
            batch.set(it)
    there = slow_path.list()
    assert [sp.text(it.match) for it in there] == [it.match for it in filters], there
    assert there[1].action.copies == (1, 3) and there[1].action.vport == 2, there
    try:
        slow_path.batch().remove(1).set(sp.Filter(4, 1, "ip", sp.send(9, "02:00:00:00:00:09"))).commit()
        raise AssertionError("it was not refused")
    except sp.Refused as refused:
        assert (refused.id, refused.reason) == (4, "there is no such vport"), refused
    for wrong in (sp.Filter(-1, 1, "ip"), sp.Filter(1, 1, "ip", sp.Action(copies=(0,) * 9))):
        try:
            slow_path.batch().set(wrong)
            raise AssertionError(wrong)
        except ValueError:
            pass
    assert sorted(slow_path.wanted) == [1, 2, 3]
    assert slow_path.batch().remove(3).commit() == 2
    step("changed")
    # A new mux, which has nothing.
    slow_path.keep(0.05)
    step("kept")
    # And another, while many are changed.
    batch = slow_path.batch()
    for number in range(3000):
        batch.set(sp.Filter(10 + number, 1, f"ip dport {number}"))
    assert batch.commit() == 3002
    assert len(slow_path.list()) == 3002
    assert slow_path.batch().clear().set(filters[0]).commit() == 1
    slow_path.batch().queue(1, 1, weight=5).queue(1, 2, frames=9).commit()
    slow_path.batch().queue(1, 2).queue(1, 600, 8, 7, 6).commit()
    try:
        slow_path.batch().queue(1, 601, weight=8).commit()
        raise AssertionError("it was not refused")
    except sp.Refused as refused:
        assert str(refused) == "queue 601 does not exist", refused
    queues = slow_path.queues(1)
    assert (len(queues), queues[599]) == (600, sp.Queue(3, 7, 0, 0, 0, 0, 0, 0, 0)), queues[599]
    assert slow_path.queues(0) == []
    step("many")
    counters = slow_path.counters(3, 4000)
    assert (len(counters), counters[0]) == (4000, sp.Counter(7, 700, 5, 500)), counters[0]
    try:
        slow_path.counters(4999, 2)
        raise AssertionError("there are not so many")
    except ValueError:
        pass
    slow_path.send(b"\1" * 60, out=2, queue=5)
    slow_path.send(b"\2" * 60, into=3)
    slow_path.counters(0, 0)
    step("sent")
    for act in (lambda: slow_path.keep(60), lambda: slow_path.counters(0, 1), lambda: flood(slow_path)):
        try:
            act()
            raise AssertionError("it was not disconnected")
        except sp.Bye as bye:
            assert str(bye) == "as asked", bye
        assert len(slow_path.list()) == 1
        step("disconnected")
    # By one that has not read what it was told.
    try:
        slow_path.counters(0, 1)
        raise AssertionError("it was not disconnected")
    except sp.Bye as bye:
        assert str(bye) == "at once", bye
    step("disconnected at once")
    slow_path.timeout = 0.2
    begin = time.monotonic()
    try:
        slow_path.counters(0, 1)
        raise AssertionError("there is no mux")
    except sp.Gone:
        pass
    assert time.monotonic() - begin < 60
    slow_path.close()


def flood(slow_path: sp.SlowPath) -> None:
    while True:
        slow_path.send(b"\0" * 1500, into=0)


if __name__ == "__main__":
    drive(sys.argv[1]) if len(sys.argv) > 1 else patterns()
