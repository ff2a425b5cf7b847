"""Breaks the card in one place at a time and expects a C++ test bench to fail.

All mutants are in one build; the plusarg `mutant` chooses one of them, 0 none. The file `mutants.py`
of a bench lists its mutants and calls `main`.
Usage: mutants.py VERILATOR WORK_FOLDER [number ...]
"""

import pathlib
import re
import shutil
import subprocess
import sys

RTL = pathlib.Path(__file__).resolve().parent.parent / "rtl"
SECONDS_MAX = 200  # of a broken card, which may hang

PACKAGE = """package card_mutant_pkg;
  function automatic int given();
    int number = 0;
    if (!$value$plusargs("mutant=%d", number)) number = 0;
    return number;
  endfunction
  int mutant = given();
endpackage
"""


def changed(text, number, where, new):
    """Source in which mutant `number` has `new` instead of the expression in {{ }}."""
    before, old, after = re.fullmatch(r"(.*?)\{\{(.*)\}\}(.*)", where, re.DOTALL).groups()
    if before + old + after not in text:
        sys.exit(f"mutant {number}: no {where!r}")
    return text.replace(before + old + after, f"{before}(card_mutant_pkg::mutant == {number} ? "
                        f"({new}) : ({old})){after}")


def run(program, arguments, number):
    """Exit code of the bench, and its last line."""
    try:
        done = subprocess.run([program, *arguments, f"+mutant={number}"], capture_output=True,
                              text=True, check=False, timeout=SECONDS_MAX if number else None)
    except subprocess.TimeoutExpired:
        return 1, "no end"
    return done.returncode, (done.stdout.splitlines() or [""])[-1]


def main(bench, mutants, targets, arguments):
    """Runs `targets`, programs that the Makefile in the folder `bench` makes, with each mutant.

    A mutant is a module, text of it with the expression in {{ }}, and the expression instead. One
    program that fails catches it. Returns true if a mutant survives.
    """
    verilator, work = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    numbers = [int(number) for number in sys.argv[3:]] or range(1, len(mutants) + 1)
    rtl = work / "rtl"
    shutil.rmtree(rtl, ignore_errors=True)
    shutil.copytree(RTL, rtl)
    # From the last one on, so that a mutant does not change the text of one before.
    for number, (module, where, new) in reversed(list(enumerate(mutants, 1))):
        path = rtl / f"{module}.sv"
        path.write_text(changed(path.read_text(), number, where, new))
    package = rtl / "card_pkg.sv"
    package.write_text(PACKAGE + package.read_text())
    programs = [work / "obj" / target for target in targets]
    subprocess.run(["make", "-C", bench, f"VERILATOR={verilator}", f"RTL={rtl}", f"OUT={work}/obj",
                    "WARNINGS=-Wno-fatal", *programs],
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    for program in programs:
        code, line = run(program, arguments, 0)
        print(f"none: {line}", flush=True)
        if code:
            return True
    survivors = []
    for number in numbers:
        results = (run(program, arguments, number) for program in programs)
        line = next((line for code, line in results if code == 1), None)
        module, where, new = mutants[number - 1]
        print(f"{number:2} {'SURVIVED' if line is None else 'caught'}: {module}: {where} -> {new}: "
              f"{line}", flush=True)
        if line is None:
            survivors.append(number)
    print(f"{len(survivors)} of {len(numbers)} not caught: {survivors}")
    return bool(survivors)
