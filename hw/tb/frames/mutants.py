#!/usr/bin/env python3
"""Mutants of the frame path, which frames_tb must catch; see mutation.py."""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import mutation  # noqa: E402

# Module, text with the expression in {{ }}, expression instead.
MUTANTS = [
    ("card_fifo", "{{push_i && wr_q == rd_next}}", "1'b0"),
    ("card_fifo", "{{count_q <= (BITS+1)'(DEPTH - MARGIN)}}", "1'b1"),
    ("card_arbiter", "open = {{room_i}};", "1'b1"),
    ("card_arbiter", "within_q <= {{!last_i[source]}};", "1'b0"),
    ("card_arbiter", "{{valid_i[source] && open && !rst}}", "valid_i[source] && !rst"),
    ("card_arbiter", "{{source == INDEX_BITS'(PORTS) ? HOST : port_t'(source)}}",
     "port_t'(source)"),
    ("card_store", "{{used <= (BITS+1)'(DEPTH - MAX_BEATS - SLACK)}}", "1'b1"),
    ("card_store", "{{oversize_q || length > 12'(MAX_LENGTH)}}", "length > 12'(MAX_LENGTH + 1)"),
    ("card_store", "{{BYTES_BITS'(i) < bytes_i}}", "1'b1"),
    ("card_store", "wr_q <= {{start_q}};", "wr_q"),
    ("card_store", "bytes = {{first_q ? '0 : bytes_q}};", "bytes_q"),
    ("card_merge", "{{!result.meta.verdict[3]}}", "1'b1"),
    ("card_merge", "{{valid && forward && !ended_q && !rst}}", "valid && forward && !rst"),
    ("card_merge", "ended_q <= {{(ended_q || ends) && !last_i}};", "1'b0"),
    ("card_merge", "{{left_q <= length_t'(BYTES)}}", "left_q < length_t'(BYTES)"),
    ("card_merge", "{{header_i.length <= length_t'(BYTES)}}", "header_i.length < length_t'(BYTES)"),
    ("card_merge", "frame_done_o = {{valid && last_i}};", "last_i"),
    ("card_admission", "{{repeated_q ? freed_before_q : freed_read}}", "freed_read"),
    ("card_admission", "!drop_q[2] && {{known_q[2]}}", "1'b1"),
    ("card_admission", "{{header_i.owned ? SLOT_BITS'(header_i.ve) : SLOT_BITS'(VES)}}",
     "SLOT_BITS'(header_i.ve)"),
    ("card_admission", "{{wrote_q && wrote_queue_q == queue_q[1] ? written_q : taken_read}}",
     "taken_read"),
    ("card_admission", "{{same_q[2] && wrote_q && !wrote_pooled_q}}", "1'b0"),
    ("card_admission", "{{same_q[2] && wrote_q && wrote_pooled_q}}", "1'b0"),
    ("card_admission", "{{same_q[2] && wrote_q ? written_q : taken_q}}", "taken_q"),
    ("card_admission", "{{{1'b0, pool_used_q} + 17'(beats_q[2]) <= {1'b0, pool_i}}}", "1'b1"),
    ("card_admission", "{{count_t'(beats_q[2]) <= free_q}}", "1'b1"),
    ("card_admission", "{{own_fits || (pooled_fits && pool_fits)}}", "own_fits || pool_fits"),
    ("card_admission", "{{own_fits || (pooled_fits && pool_fits)}}", "pooled_fits && pool_fits"),
    ("card_admission", "{{waits ? oldest : decision}}", "decision"),
    ("card_admission", "{{decided && (waits || !take_i)}}", "decided && !take_i"),
    ("card_admission", "{{release_i && release_pooled_i}}", "release_i"),
    ("card_admission", "{{accept && !own_fits ? pool_kept + count_t'(beats_q[2]) : pool_kept}}",
     "pool_kept"),
    ("card_admission", "{{clearing_q || accept}}", "accept"),
    ("card_admission", "{{clearing_q || freeing_q}}", "freeing_q"),
    ("card_store", "{{took_q ? last_ahead_q : last_q}}", "last_q"),
    ("card_store", "{{took_q ? last_ahead_q : last_q}}", "last_ahead_q"),
    ("card_queues", "{{fill_initial_q ? fill_place_q : free_read}}", "fill_place_q"),
    ("card_queues", "{{first_i ? accept_i : accepted_q}}", "accept_i"),
    ("card_queues", "{{able == '0 && (recent & chain) == '0}}", "able == '0"),
    ("card_queues", "chains = {{able == '0 && chain != '0 && !busy_q}};", "1'b0"),
    ("card_queues", "{{able & behind_q}}", "'0"),
    ("card_queues", "give_q <= {{(begins || busy_q) && !rst}};", "begins && !rst"),
    ("card_queues", "{{busy_q ? left == 8'd1 : single}}", "busy_q && left == 8'd1"),
    ("card_scheduler", "{{!spent || alone_q}}", "!spent"),
    ("card_scheduler", "{{!spent || alone_q}}", "1'b1"),
    ("card_scheduler", "{{!spent || alone_q}}", "1'b0"),
    ("card_scheduler", "{{inserted_q && inserted_slot_q == insert_slot_i}}", "1'b0"),
    ("card_scheduler", "{{inserted_q && inserted_slot_q == turn_q ? inserted_at_q : newest_out}}",
     "newest_out"),
    ("card_scheduler", "{{!last_q || hits}}", "!last_q"),
    ("card_scheduler", "{{!next_is_last || hits}}", "!next_is_last"),
    ("card_scheduler", "{{recent_q || next_i.at == newest_q}}", "next_i.at == newest_q"),
    ("card_scheduler", "able_q <= {{have && room_i && !rst}};", "have && !rst"),
    ("card_scheduler", "{{started_q && more_q && stays && room_q}}",
     "started_q && more_q && stays"),
    ("card_scheduler", "{{last_q && hits}}", "1'b0"),
    ("card_scheduler", "{{next_is_last && hits}}", "1'b0"),
    ("card_scheduler", "if ({{empties}}) ", "1'b0"),
    ("card_scheduler", "{{fresh_read_q ? first : head}}", "first"),
    ("card_scheduler", "{{fresh_read_q ? first : head}}", "head"),
    ("card_scheduler", "if ({{hits && !direct}}) ", "1'b0"),
    ("card_scheduler", "if ({{hits || direct}}) ", "direct"),
    ("card_scheduler", "if ({{leaves_}}) ", "1'b0"),
    ("card_scheduler", "{{weight == '0 ? 8'd1 : weight}}", "8'd1"),
    ("card_scheduler", "{{owes_read_q ? -balance_t'({1'b0, debt}) : '0}}", "'0"),
    ("card_scheduler", "{{balance_q - balance_t'({1'b0, length_q})}}",
     "balance_q - balance_t'(64)"),
    ("card_scheduler", "{{waiting_left[i] && slot_t'(i) > turn_q}}", "1'b0"),
    ("card_scheduler", "{{idle && !other_valid_q && waiting_q == '0 && insert_i}}", "1'b0"),
    ("card_frames", "{{queue_valid && queue_out == OUT_BITS'(i)}}", "queue_valid"),
    # Reset: each needs the condition `rst` to be false.
    *((module, "if ({{rst}}) ", "1'b0")
      for module in ("card_fifo", "card_arbiter", "card_store", "card_merge", "card_admission",
                     "card_queues", "card_scheduler")),
]

if __name__ == "__main__":
    sys.exit(mutation.main(
        HERE, MUTANTS, ["512-8-0/Vcard_frames", "64-8-0/Vcard_frames"], ["40", "1"]))
