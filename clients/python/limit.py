#!/usr/bin/env python3
"""A small slow path: drops for ten seconds what comes from a source that sends more packets a second than it may.

limit.py PPS SOURCE..., in the control guest; sources are prefixes of IPv4. Each has a filter and a counter with its
number, and the fast path forwards, counts and drops by itself.
"""

import sys

from pdp_slowpath import Counter, Error, Filter, SlowPath, discard, pass_

DROPPED_FOR = 10
"""Seconds."""


def rule(number: int, source: str, is_dropped: bool) -> Filter:
    return Filter(number, 100, f"ip src {source}", (discard if is_dropped else pass_)(counter=number))


def main() -> None:
    limit, sources = int(sys.argv[1]), sys.argv[2:]
    slow_path = SlowPath()
    with slow_path.batch() as batch:
        for number, source in enumerate(sources):
            batch.set(rule(number, source, False))
    print("ready", flush=True)
    before = [Counter(0, 0)] * len(sources)
    # Seconds for which each goes on to be dropped.
    dropped = [0] * len(sources)
    while True:
        # Instead of sleeping: so a mux that is new has the filters at once.
        try:
            slow_path.keep(1.0)
        except Error as error:
            print(error, flush=True)
            continue
        now = slow_path.counters(0, len(sources))
        with slow_path.batch() as batch:
            for number, source in enumerate(sources):
                # A new mux counts from 0.
                packets = now[number].packets - before[number].packets
                is_much = (packets if packets >= 0 else now[number].packets) > limit
                left = DROPPED_FOR if is_much else max(0, dropped[number] - 1)
                if (left > 0) != (dropped[number] > 0):
                    print(source, "dropped" if left else "passes", flush=True)
                    batch.set(rule(number, source, left > 0))
                dropped[number] = left
        before = now


if __name__ == "__main__":
    main()
