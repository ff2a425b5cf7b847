#!/usr/bin/env python3
"""Fails if a signal of a GTKWave save file is not in a waveform: check.py SAVE_FILE WAVEFORM."""

import re
import sys


def names(vcd):
    scopes, found = [], set()
    for line in vcd:
        words = line.split()
        if words[:1] == ["$scope"]:
            scopes.append(words[2])
        elif words[:1] == ["$upscope"]:
            scopes.pop()
        elif words[:1] == ["$var"]:
            found.add(".".join([*scopes, "".join(words[4:-1])]))
        elif words[:1] == ["$enddefinitions"]:
            break
    return found


def main():
    with open(sys.argv[1], encoding="utf-8") as save:
        wanted = re.findall(r"^\+\{.*\} (\S+)$", save.read(), re.M)
    with open(sys.argv[2], encoding="utf-8") as vcd:
        missing = sorted(set(wanted) - names(vcd))
    if missing or not wanted:
        sys.exit(f"{sys.argv[1]}: not in the waveform: {' '.join(missing) or 'any signal'}")


if __name__ == "__main__":
    main()
