#!/usr/bin/env python3
"""Breaks the registers and counters in one place at a time and expects registers_tb to fail.

All mutants are in one build; the plusarg `mutant` chooses one of them, 0 none.
Usage: mutants.py VERILATOR WORK_FOLDER [number ...]
"""

import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
RTL = HERE.parent.parent / "rtl"

# Module, text with the expression in {{ }}, expression instead.
MUTANTS = [
    ("card_counters", "step = {{clearing_o && !event_i}};", "clearing_o"),
    ("card_counters", "end_q <= {{index_t'(DEPTH - 1)}};", "index_t'(DEPTH - 2)"),
    ("card_counters", "clearing_o <= {{sweep_q != end_q}};", "1'b0"),
    ("card_counters", "{{index_t'(int'(clear_slot_i) * PER_SLOT + PER_SLOT - 1)}}",
     "index_t'(int'(clear_slot_i) * PER_SLOT + PER_SLOT)"),
    ("card_counters", "sum = {{ahead_by_1_q ? sum_q : operand_q}};", "operand_q"),
    ("card_counters", "{{ahead_by_2_q ? sum_q : read}}", "read"),
    ("card_counters", "ahead_by_1_q <= {{valid_q[2] && index_q[2] == index_q[1]}};",
     "index_q[2] == index_q[1]"),
    ("card_counters", "ahead_by_2_q <= {{valid_q[2] && index_q[2] == index}};",
     "index_q[2] == index"),
    ("card_counters", "{{64'(length_q[2])}}", "64'(length_q[2] & 11'h3ff)"),
    ("card_counters", "if ({{clear_q[2]}})", "1'b0"),
    ("card_counters", "index = {{event_i ? index_i : sweep_q}};", "index_i"),
    ("card_counters", "valid_q <= {{rst ? '0 : {valid_q[1], event_i || step}}};",
     "rst ? '0 : {valid_q[1], event_i}"),
    ("card_counters", "if ({{rst}}) begin", "1'b0"),
    ("card_statistics", "{{accepted_i || oversize_i}}", "accepted_i"),
    ("card_statistics", "{{accepted_i ? accepted_ingress_i.length : '0}}",
     "accepted_ingress_i.length"),
    ("card_statistics", "{{meta_i.owned ? slot_t'(meta_i.ve) : slot_t'(VES)}}",
     "slot_t'(meta_i.ve)"),
    ("card_statistics", "{{unqueued_i ? DROP_QUEUE : meta_i.verdict}}", "meta_i.verdict"),
    ("card_statistics", "{{dropped_i || unqueued_i || queued_i}}", "dropped_i || queued_i"),
    ("card_statistics", "{{sent_out == OUT_BITS'(PORTS) ? HOST : port_t'(sent_out)}}",
     "port_t'(sent_out)"),
    ("card_statistics", "else if ({{!clearing_o}})", "1'b1"),
    ("card_statistics", "{{{rd_slot_i, rd_offset_i[10:4]}}}",
     "{rd_slot_i ^ slot_t'(1), rd_offset_i[10:4]}"),
    ("card_statistics", "lone_events = {{{refused_i, excess_i, fault_i}}};",
     "{refused_i, fault_i, excess_i}"),
    ("card_registers", "&& {{strobe_q == '1}};", "1'b1"),
    ("card_registers", "allowed = {{aw_q.page <= page_t'(VES)}} &&", "1'b1"),
    ("card_registers", "{{page == '0 ? target : slot_t'(page - 1'b1)}}", "target"),
    ("card_registers", "{{page == '0 ? target : slot_t'(page - 1'b1)}}", "slot_t'(page - 1'b1)"),
    ("card_registers", "if ({{is_queue && !known_queue}})", "1'b0"),
    ("card_registers", "{{data_q[15:0] <= 16'(VES)}}", "1'b1"),
    ("card_registers", "R_TARGET: if ({{data_q > 32'(VES)}})", "1'b0"),
    ("card_registers", "{{data_q > 32'(VES) || clearing_i}}", "data_q > 32'(VES)"),
    ("card_registers", "{{data_q > 32'(VES) || clearing_i}}", "clearing_i"),
    ("card_registers", "R_POOL: if ({{data_q[31:16] != '0}})", "1'b0"),
    ("card_registers", "if ({{is_commit && kind == TABLE_LPM_SEGMENTS && data_q != '0}})", "1'b0"),
    ("card_registers", "|| ({{take && super_page}});", "1'b0"),
    ("card_registers", "alone_q && {{!super_ended}})", "!ended"),
    ("card_registers", "{{room}} && !alone_q", "1'b1"),
    ("card_registers", "take = aw_full_q && {{w_full_q}}", "1'b1"),
    ("card_registers", "awready_o = !aw_full_q && {{open_i}}", "1'b1"),
    ("card_registers", "arready_o = {{!reading_q}} &&", "1'b1"),
    ("card_registers", "wready_o = {{!w_full_q}} &&", "(!w_full_q || wvalid_i)"),
    ("card_registers", "commit_1 <= {{take && allowed && is_commit && !is_queue && !rst}};",
     "take && is_commit && !is_queue && !rst"),
    ("card_registers", "if ({{take && allowed}}) begin", "take"),
    ("card_registers", "wr_ve_o <= {{ve_t'(slot_1)}};", "ve_t'(slot_1 ^ slot_t'(1))"),
    ("card_registers", "wr_table_o <= {{table_t'(kind_1)}};", "table_t'(kind_1 ^ 5'd8)"),
    ("card_registers", ".wr_addr_i({{aw_q.page[SLOT_BITS-1:0]}})", "slot_t'(1)"),
    ("card_registers", ".wr_addr_i({{ar_q.page[SLOT_BITS-1:0]}})", "slot_t'(1)"),
    ("card_registers", "{{!allowed_q[WRITE_CYCLES] || wr_refused_i}}",
     "!allowed_q[WRITE_CYCLES]"),
    ("card_registers", "{{!allowed_q[WRITE_CYCLES] || wr_refused_i}}", "wr_refused_i"),
    ("card_registers", "refused_o <= {{ended && refused && !rst}};", "ended && !rst"),
    ("card_registers", "else if ({{ended && refused}})", "ended"),
    ("card_registers", ": {{slot_t'(address_q[WRITE_CYCLES].page - 1'b1)}};", "slot_t'(VES)"),
    ("card_registers", "can = {{ar_q.page <= page_t'(VES)}} &&", "1'b1"),
    ("card_registers", "can_read({{ar_q.page == '0}}, ar_q.offset)", "1'b1"),
    ("card_registers", "can_write({{super_page}}, aw_q.offset)", "1'b1"),
    ("card_registers", "word = {{high ? latched_q : counter[31:0]}};", "counter[31:0]"),
    ("card_registers", "rvalid_o <= {{step_q[3] || (rvalid_o && !rready_i)}};", "step_q[3]"),
    ("card_registers", "pop_i  ({{bvalid_o && bready_i}})", "bvalid_o"),
    ("card_registers", "if ({{rst}}) {epoch_q", "1'b0"),
    ("card_registers", "if ({{rst}}) refused_address_q", "1'b0"),
    ("card_registers_pkg", "R_OVERSIZE_END]: can_read = {{super_page && word && !offset[3]}};",
     "super_page && word"),
    ("card_registers_pkg", "R_TARGET: can_read = {{super_page}};", "1'b1"),
    ("card_registers_pkg", "R_COMMIT_METER: can_write = {{super_page}};", "1'b1"),
    ("card", "ready_o = {{open ? ready : '0}};", "ready"),
    ("card", "{{open ? valid_i : '0}}", "valid_i"),
    ("card_top", "event_fault_o = {{fault && result_valid}};", "fault"),
    ("card_top", "event_excess_o = {{excess && result_valid}};", "excess"),
    ("card_store", "port: {{port_i}}, length: length[10:0]}", "port_i ^ port_t'(1)"),
    ("card_admission", "token: {{header_i.token}}", "header_i.token ^ 16'd1"),
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


def changed(text, number, where, new):
    """Source in which mutant `number` has `new` instead of the expression in {{ }}."""
    before, old, after = re.fullmatch(r"(.*?)\{\{(.*)\}\}(.*)", where, re.DOTALL).groups()
    if before + old + after not in text:
        sys.exit(f"mutant {number}: no {where!r}")
    return text.replace(before + old + after, f"{before}(card_mutant_pkg::mutant == {number} ? "
                        f"({new}) : ({old})){after}")


def main():
    verilator, work = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    numbers = [int(number) for number in sys.argv[3:]] or list(range(1, len(MUTANTS) + 1))
    rtl = work / "rtl"
    shutil.rmtree(rtl, ignore_errors=True)
    shutil.copytree(RTL, rtl)
    # From the last one on, so that a mutant does not change the text of one before.
    for number, (module, where, new) in reversed(list(enumerate(MUTANTS, 1))):
        path = rtl / f"{module}.sv"
        path.write_text(changed(path.read_text(), number, where, new))
    package = rtl / "card_pkg.sv"
    package.write_text(PACKAGE + package.read_text())
    subprocess.run(["make", "-C", HERE, f"VERILATOR={verilator}", f"RTL={rtl}", f"OUT={work}/obj",
                    "WARNINGS=-Wno-fatal", f"{work}/obj/512/Vcard"],
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    survivors = []
    for number in [0, *numbers]:
        try:
            done = subprocess.run([work / "obj/512/Vcard", "8", "1", f"+mutant={number}"],
                                  capture_output=True, text=True, check=False, timeout=200)
            lines, code = done.stdout.splitlines(), done.returncode
        except subprocess.TimeoutExpired:
            lines, code = ["no end"], 1
        if number == 0:
            print("none:", lines[-1], flush=True)
            if code:
                return 1
            continue
        first = next((line for line in lines if not line.startswith(("20 nodes", "EPOCH:"))), "")
        state = "caught" if code == 1 else f"SURVIVED {code}"
        module, where, new = MUTANTS[number - 1]
        print(f"{number:2} {state}: {module}: {where} -> {new}: {first[:70]}", flush=True)
        if code != 1:
            survivors.append(number)
    print(f"{len(survivors)} of {len(numbers)} not caught: {survivors}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
