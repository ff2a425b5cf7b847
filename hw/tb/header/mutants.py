#!/usr/bin/env python3
"""Breaks the header pipeline in one place at a time and expects header_tb to fail.

All mutants are in one build; the plusarg `mutant` chooses one of them, 0 none.
Usage: mutants.py VERILATOR WORK_FOLDER [number ...]
"""

import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
RTL = HERE.parent.parent / "rtl"

# Module, expression, expression instead.
MUTANTS = [
    ("card_parse", "total_s1 > {5'd0, payload_s1}", "1'b0"),
    ("card_parse", "v6_payload_s1 > {5'd0, payload_v6_s1}", "1'b0"),
    ("card_parse", "total_s1 < {10'd0, header_bytes_s1}", "1'b0"),
    ("card_parse", "at[15] >= CS6", "at[15] >= 8'd184"),
    ("card_parse", "length_i > ETHER + 11'd1", "1'b1"),
    ("card_parse", "6'(j) < {1'b0, header_words, 1'b0}", "j < 10"),
    ("card_parse", "at[54] <= 8'd137", "at[54] <= 8'd138"),
    ("card_parse", "v6_payload_s1 != '0", "1'b1"),
    ("card_parse", "first >= 8'd224", "first >= 8'd240"),
    ("card_parse", "v6_destination[127:118] == LINK_LOCAL", "v6_destination[127:119] == 9'h1fd"),
    ("card_parse", "v6_source_low ||", "1'b0 ||"),
    ("card_parse", "at[22] <= 8'd1", "at[22] == 8'd0"),
    ("card_parse", "header_words > 4'(HALFWORDS / 2)", "1'b0"),
    ("card_vmac", "&equal_q[i]", "&equal_q[i][13:0]"),
    ("card_vmac", "valid_q[i] &&", "1'b1 &&"),
    ("card_vmac", "if (wr_stash)", "if (1'b0)"),
    ("card_meter", "ahead_by_1_q ? level_s11 : level_s10", "level_s10"),
    ("card_meter", "ahead_by_2_q ? level_s11 : level_read", "level_read"),
    ("card_meter", "valid_q[2] && ve_q[2] == ve_q[1]", "1'b0"),
    ("card_meter", "!fresh_s9", "1'b1"),
    ("card_meter", "if (fresh_s9)", "if (1'b0)"),
    ("card_meter", "{1'b0, length_i} + OVERHEAD", "{1'b0, length_i} + 12'd23"),
    ("card_meter", "coarse_q[5] <= coarse_q[4]", "coarse_q[5] <= 1'b0"),
    ("card_meter", "full = !over_burst[41]", "full = 1'b0"),
    ("card_meter", "elapsed_s3[47:36] != '0", "1'b0"),
    ("card_lpm", "index_q < INDEX_BITS'(leaf_end_late)", "1'b1"),
    ("card_lpm_level", "index_r >= INDEX_BITS'(end_r)", "1'b0"),
    ("card_lpm_level", "kind_r == WALK_NODE ? SUM_BITS'(leaf_base) : SUM_BITS'(index_r)",
     "SUM_BITS'(leaf_base)"),
    ("card_lpm_level", "wr_en_q[1] && wr_addr_q[1] == addr_q", "1'b0"),
    ("card_ram", "late_en_q && late_addr_q == rd_addr_q", "1'b0"),
    ("card_flow", "{bytes_i[8*20+:6], bytes_i[8*21+:8]} == '0", "1'b1"),
    ("card_flow", "if (!v6_3)", "if (1'b0)"),
    ("card_flow", "length_i >= PORTS_V6", "1'b1"),
    ("card_flow_step", "{state_i[40:0], state_i[63:41]}", "{state_i[39:0], state_i[63:40]}"),
    ("card_nexthop", "fault_q[0] <= !group_ok_q[1]", "fault_q[0] <= 1'b0"),
    ("card_nexthop", "16'(group_q.index) >= bucket_range_q[1].length", "1'b0"),
    ("card_nexthop", "16'(hop_index) < hop_range_q[3].length", "1'b1"),
    ("card_nexthop", "segments_i.group.base + 16'(group_i)", "16'(group_i)"),
    ("card_nexthop", "found_q && hop_read.valid", "found_q"),
    ("card_nexthop", "16'(wr_bucket) < wr_segments_i.hop.length", "1'b1"),
    ("card_arp", "16'(index_i) < range_i.length", "1'b1"),
    ("card_arp", "wr_index_i < 32'(wr_range_i.length)", "1'b1"),
    ("card_context", "ROW_BITS'({ve_i, egress_i})", "ROW_BITS'(egress_i)"),
    ("card_context", "ROW_BITS'({ve_i, ingress_i})", "ROW_BITS'({ve_i, egress_i})"),
    ("card_ve", "if (rst)", "if (1'b0)"),
    ("card_ve", "own_q[i].address == source_q[1]", "own_q[i].address == source_q[0]"),
    ("card_verdict", "!punt.applies && chosen_q", "chosen_q"),
    ("card_verdict", "if (!punt.applies) punt = route_q", "punt = route_q"),
    ("card_verdict", "!punt.applies && big", "big"),
    ("card_verdict", "!punt.applies && (egress_i.hook_out || back)", "egress_i.hook_out || back"),
    ("card_verdict", "!punt.applies && !arp_hit_i", "!arp_hit_i"),
    ("card_verdict", "!hooked && (refuses_q", "(refuses_q"),
    ("card_verdict", "same_vport_i;", "1'b1;"),
    ("card_verdict", "v4 && !parsed_i.dont_fragment", "!parsed_i.dont_fragment"),
    ("card_verdict", "v4 && own_source_i", "own_source_i"),
    ("card_verdict", "host_ok_q && up", "host_ok_q"),
    ("card_verdict", "host_ok_q && up", "up"),
    ("card_verdict", "local_ && parsed_i.discovery", "parsed_i.discovery"),
    ("card_verdict", "else if (over_i)", "else if (1'b0)"),
    ("card_verdict", "ingress_port_i != port_i", "1'b0"),
    ("card_verdict", "routed && route_q.applies && excess_q", "excess_q"),
    ("card_rewrite", "more >= 17'h0_ffff", "more > 17'h0_ffff"),
    ("card_rewrite", "packet_bytes_i + 11'd14", "packet_bytes_i + 11'd18"),
    ("card_header", "valid_line_q <= rst", "valid_line_q <= 1'b0"),
    ("card_header", "frame_6.from_host", "1'b0"),
    ("card_header", "!header_i.bytes[0]", "1'b1"),
    ("card_header", "wr_q[LPM_WRITE_LATENCY-2].ve[VE_BITS-1:0]", "wr.ve[VE_BITS-1:0]"),
    ("card_header", "assign wr_exists = {1'b0, wr.ve} < 9'(VES)", "assign wr_exists = 1'b1"),
    ("card_header", "{1'b0, host_ve_q[3]} < 9'(VES)", "1'b1"),
]

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
    """Source in which mutant `number` has `new` instead of `old`."""
    if old not in text:
        sys.exit(f"mutant {number}: no {old!r}")
    if old.endswith(")") and old.startswith(("if (", "else if (")):
        # Only the condition is an expression.
        head, condition = old.split("(", 1)
        other = new.split("(", 1)[1]
        return text.replace(old, f"{head}({chosen(number)} ? ({other} : ({condition})", 1)
    if old.startswith("if (!punt.applies) "):
        return text.replace(old, f"if ({chosen(number)} || !punt.applies) punt = route_q", 1)
    for sign in (" <= ", " = "):
        # Only the right side is an expression.
        left, found, right = old.partition(sign)
        if found and new.startswith(left + sign):
            return text.replace(old, left + sign + f"({chosen(number)} ? "
                                f"({new[len(left + sign):]}) : ({right}))", 1)
    tail = next((tail for tail in (";", "||", "&&") if old.endswith(tail)), "")
    old_all, old, new = old, old.removesuffix(tail).strip(), new.removesuffix(tail).strip()
    if old.count("(") > old.count(")"):
        # `a && (b ...`: without `a`.
        rest = old[old.index("(") + 1:]
        kept = old[:old.index(" && (")]
        return text.replace(old_all, f"({chosen(number)} || {kept}) && ({rest}{tail}", 1)
    return text.replace(old_all, f"({chosen(number)} ? ({new}) : ({old})) {tail}", 1)


def chosen(number):
    return f"card_mutant_pkg::mutant == {number}"


def main():
    verilator, work = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    numbers = [int(number) for number in sys.argv[3:]] or list(range(1, len(MUTANTS) + 1))
    rtl = work / "rtl"
    shutil.rmtree(rtl, ignore_errors=True)
    shutil.copytree(RTL, rtl)
    for number, (module, old, new) in enumerate(MUTANTS, 1):
        path = rtl / f"{module}.sv"
        path.write_text(changed(path.read_text(), number, old, new))
    package = rtl / "card_pkg.sv"
    package.write_text(PACKAGE + package.read_text())
    subprocess.run(["make", "-C", HERE, f"VERILATOR={verilator}", f"RTL={rtl}", f"OUT={work}/obj",
                    "WARNINGS=-Wno-fatal", f"{work}/obj/Vcard_header"],
                   stdout=subprocess.DEVNULL, check=True)
    survivors = []
    for number in [0, *numbers]:
        done = subprocess.run([work / "obj/Vcard_header", "24", "3000", "1", f"+mutant={number}"], capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        first = next((line for line in lines if any(sign in line for sign in (
            ": frame of", ": the ", "write to", "isolation:", "frames in"))), "")
        if number == 0:
            print("none:", lines[-1], flush=True)
            if done.returncode:
                return 1
            continue
        state = "caught" if done.returncode == 1 else f"SURVIVED {done.returncode}"
        module, old, new = MUTANTS[number - 1]
        print(f"{number:2} {state}: {module}: {old} -> {new}: {first[:60]}", flush=True)
        if done.returncode != 1:
            survivors.append(number)
    print(f"{len(survivors)} of {len(numbers)} not caught: {survivors}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
