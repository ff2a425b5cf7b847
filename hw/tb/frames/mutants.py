#!/usr/bin/env python3
"""Breaks the frame path in one place at a time and expects frames_tb to fail.

All mutants are in one build; the plusarg `mutant` chooses one of them, 0 none.
Usage: mutants.py VERILATOR WORK_FOLDER [BITS [number ...]]
"""

import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
RTL = HERE.parent.parent / "rtl"

# Module, expression, expression instead.
MUTANTS = [
    ("card_fifo", "push_i && wr_q == rd_next", "1'b0"),
    ("card_fifo", "count_q <= (BITS+1)'(DEPTH - MARGIN)", "1'b1"),
    ("card_arbiter", "open = ~room_i;", "1'b1"),
    ("card_arbiter", "within_q <= ~!last_i[source];", "1'b0"),
    ("card_arbiter", "valid_i[source] && open && !rst", "valid_i[source] && !rst"),
    ("card_arbiter", "source == INDEX_BITS'(PORTS) ? HOST : port_t'(source)", "port_t'(source)"),
    ("card_store", "used <= (BITS+1)'(DEPTH - MAX_BEATS - SLACK)", "1'b1"),
    ("card_store", "oversize_q || length > 12'(MAX_LENGTH)", "length > 12'(MAX_LENGTH + 1)"),
    ("card_store", "BYTES_BITS'(i) < bytes_i", "1'b1"),
    ("card_store", "wr_q <= ~start_q;", "wr_q"),
    ("card_store", "bytes = ~first_q ? '0 : bytes_q;", "bytes_q"),
    ("card_merge", "!result.meta.verdict[3]", "1'b1"),
    ("card_merge", "valid && forward && !ended_q && !rst", "valid && forward && !rst"),
    ("card_merge", "ended_q <= ~(ended_q || ends) && !last_i;", "1'b0"),
    ("card_merge", "left <= length_t'(BYTES)", "left < length_t'(BYTES)"),
    ("card_merge", "frame_done_o = ~valid && last_i;", "last_i"),
    ("card_queues", "initial_q ? free_rd_q : free_read", "free_rd_q"),
    ("card_queues", "known = ~port_i == HOST || {1'b0, port_i} < 4'(PORTS);", "1'b1"),
    ("card_queues", "meta_i.owned ? SLOT_BITS'(meta_i.ve) : SLOT_BITS'(VES)",
     "SLOT_BITS'(meta_i.ve)"),
    ("card_queues", "first_i ? admit : accepted_q", "admit"),
    ("card_queues", "in_above_after <= in_quota.share", "1'b1"),
    ("card_queues", "{1'b0, pool_used_q} + 17'(in_above_after - in_above) <= {1'b0, pool_i}",
     "1'b1"),
    ("card_queues", "in_above_after == '0", "1'b0"),
    ("card_queues", "waiting_q[in_queue] && !(emptied && out_queue == in_queue)",
     "waiting_q[in_queue]"),
    ("card_queues", "chain_q && queue_q == {start_out_i, start_slot_i}", "1'b0"),
    ("card_queues", "waiting_q[in_queue] ? taken_q[in_queue] : freed_q[in_queue]",
     "taken_q[in_queue]"),
    ("card_queues", "enqueue && in_queue == out_queue ? in_beats : '0",
     "16'd0"),
    ("card_queues", "fresh_q[{start_out_i, start_slot_i}]", "1'b0"),
    ("card_queues", "waiting_q[in_queue] ? quota_q[in_queue] : wanted_q[in_queue]",
     "wanted_q[in_queue]"),
    ("card_queues", "give = ~step;", "step && !ends"),
    ("card_queues", "ends && begins == newest_q[out_queue]", "ends"),
    ("card_queues", "early_q <= ~enqueue && !linked && !last_i && !rst;", "1'b0"),
    ("card_queues", "ends && begins == newest_q[out_queue]",
     "ends && at == tail_q[out_queue]"),
    ("card_scheduler", "waiting[turn] && balance > 0", "1'b0"),
    ("card_scheduler", "waiting[turn] && balance > 0", "waiting[turn]"),
    ("card_scheduler", "waiting[turn] && balance > 0", "balance > 0"),
    ("card_scheduler", "weight == '0 ? 8'd1 : weight", "8'd1"),
    ("card_scheduler", "waiting[i] && SLOT_BITS'(i) > turn", "1'b0"),
    ("card_scheduler", "room_i[i] && waiting_i[i] != '0", "waiting_i[i] != '0"),
    ("card_scheduler", "start_o = ~able != '0 && idle_i && !rst;", "able != '0 && !rst"),
    ("card_scheduler", "owes_q[{out_o, slot_o}]", "1'b0"),
    ("card_scheduler", "start_balance - balance_t'({1'b0, length_i})",
     "start_balance - balance_t'(64)"),
    ("card_frames", "queue_valid && queue_out == OUT_BITS'(i)", "queue_valid"),
]
# Reset: each needs the condition `rst` to be false.
for module in ("card_fifo", "card_arbiter", "card_store", "card_merge", "card_queues",
               "card_scheduler"):
    MUTANTS.append((module, "if (~rst) ", "1'b0"))

PACKAGE = """package card_mutant_pkg;
  function automatic int given();
    int number = 0;
    if (!$value$plusargs("mutant=%d", number)) number = 0;
    return number;
  endfunction
  int mutant = given();
endpackage
"""


def changed(text, number, old, new):
    """Source in which mutant `number` has `new`; in `old`, the expression begins behind a ~."""
    head, sign, body = old.partition("~")
    if not sign:
        head, body = "", old
    tail = next((tail for tail in (";", ") ") if sign and body.endswith(tail)), "")
    body = body.removesuffix(tail)
    if head + body + tail not in text:
        sys.exit(f"mutant {number}: no {old!r}")
    return text.replace(head + body + tail, f"{head}(card_mutant_pkg::mutant == {number} ? "
                        f"({new}) : ({body})){tail}")


def main():
    verilator, work = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    bits = sys.argv[3] if len(sys.argv) > 3 else "512"
    numbers = [int(number) for number in sys.argv[4:]] or list(range(1, len(MUTANTS) + 1))
    rtl = work / "rtl"
    shutil.rmtree(rtl, ignore_errors=True)
    shutil.copytree(RTL, rtl)
    # From the last one on, so that a mutant does not change the text of one before.
    for number, (module, old, new) in enumerate(MUTANTS, 1):
        path = rtl / f"{module}.sv"
        path.write_text(changed(path.read_text(), number, old, new))
    package = rtl / "card_pkg.sv"
    package.write_text(PACKAGE + package.read_text())
    subprocess.run(["make", "-C", HERE, f"VERILATOR={verilator}", f"RTL={rtl}", f"OUT={work}/obj",
                    "WARNINGS=-Wno-fatal", f"{work}/obj/{bits}/Vcard_frames"],
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    survivors = []
    for number in [0, *numbers]:
        try:
            done = subprocess.run([work / f"obj/{bits}/Vcard_frames", "40", "1",
                                   f"+mutant={number}"], capture_output=True, text=True,
                                  check=False, timeout=60 if number else 300)
            lines, code = done.stdout.splitlines(), done.returncode
        except subprocess.TimeoutExpired:
            lines, code = ["no end"], 1
        first = next((line for line in lines[1:] if ":" in line and not line.startswith(
            ("latency of", "all queues: 8000", "one queue", "random traffic", "flood,"))), "")
        if number == 0:
            print("none:", lines[-1], flush=True)
            if code:
                return 1
            continue
        state = "caught" if code == 1 else f"SURVIVED {code}"
        module, old, new = MUTANTS[number - 1]
        print(f"{number:2} {state}: {module}: {old} -> {new}: {first[:70]}", flush=True)
        if code != 1:
            survivors.append(number)
    print(f"{len(survivors)} of {len(numbers)} not caught: {survivors}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
