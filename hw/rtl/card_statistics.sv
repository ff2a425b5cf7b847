// Counters of frames, bytes, and refused writes, per port, virtual environment (VE), and verdict.
//
// Latency: 3 cycles from an event to its counter, 2 cycles from `rd_*_i` to `rd_*_o`. Each kind of
// counter takes one event per cycle. Slot VES of a counter is for frames of no VE, and for refused
// writes to the super page.
// After a reset, `ready_o` is 0 until all counters are 0: for the cycles of the largest memory.
// Invariants: received = oversize + verdicts + frames whose verdict is to come, in frames and, with
// no bytes for oversize, in bytes. Verdicts 0 to 5 = sent + frames that wait, in frames.
module card_statistics
  import card_pkg::*;
  import card_frame_pkg::*;
  import card_registers_pkg::*;
#(
    parameter  int PORTS      = 4,
    parameter  int VES        = 32,
    localparam int OUT_BITS   = $clog2(PORTS + 1),
    localparam int SLOT_BITS  = $clog2(VES + 1),
    localparam int QUEUE_BITS = OUT_BITS + SLOT_BITS
) (
    input  logic clk,
    input  logic rst,
    output logic ready_o,

    // Events of card_top.
    input logic                  accepted_i,
    input ingress_t              accepted_ingress_i,
    input logic                  oversize_i,
    input port_t                 oversize_port_i,
    input logic                  dropped_i,
    input logic                  unqueued_i,
    input logic                  queued_i,
    // verilator lint_off UNUSEDSIGNAL
    input frame_meta_t           meta_i,
    // verilator lint_on UNUSEDSIGNAL
    input ingress_t              ingress_i,
    input logic                  sent_i,
    input logic [QUEUE_BITS-1:0] sent_queue_i,
    input length_t               sent_length_i,
    input logic                  fault_i,
    input logic                  excess_i,
    // verilator lint_off UNUSEDSIGNAL
    input ve_t                   header_ve_i,  // VE of these two
    // verilator lint_on UNUSEDSIGNAL
    // Event of card_registers.
    input logic                  refused_i,
    input logic [ SLOT_BITS-1:0] refused_slot_i,

    input  logic       clear_i,       // only without `clearing_o`
    input  logic [8:0] clear_slot_i,
    output logic       clearing_o,

    // Counter at an offset of the register map.
    input  logic    [SLOT_BITS-1:0] rd_slot_i,
    input  offset_t                 rd_offset_i,
    output logic    [         63:0] rd_frames_o,
    output logic    [         63:0] rd_bytes_o
);

  localparam int SLOTS = VES + 1;
  typedef logic [SLOT_BITS-1:0] slot_t;

  logic [6:0] clearing;
  assign clearing_o = clearing != '0;
  always_ff @(posedge clk) begin
    if (rst) ready_o <= 1'b0;
    else if (!clearing_o) ready_o <= 1'b1;
  end

  // Counters per port of the card. They are cleared by a reset only.
  logic [63:0] received_frames, received_bytes, oversize_frames;
  card_counters #(
      .SLOTS   (1),
      .PER_SLOT(8),
      .BYTES   (1)
  ) received (
      .clk,
      .rst,
      .event_i     (accepted_i || oversize_i),
      .index_i     (accepted_i ? accepted_ingress_i.port : oversize_port_i),
      .length_i    (accepted_i ? accepted_ingress_i.length : '0),
      .clear_i     (1'b0),
      .clear_slot_i('0),
      .clearing_o  (clearing[0]),
      .rd_index_i  (rd_offset_i[6:4]),
      .rd_frames_o (received_frames),
      .rd_bytes_o  (received_bytes)
  );

  // verilator lint_off UNUSEDSIGNAL
  logic [63:0] no_bytes[4];
  // verilator lint_on UNUSEDSIGNAL
  card_counters #(
      .SLOTS   (1),
      .PER_SLOT(8),
      .BYTES   (0)
  ) oversize (
      .clk,
      .rst,
      .event_i     (oversize_i),
      .index_i     (oversize_port_i),
      .length_i    ('0),
      .clear_i     (1'b0),
      .clear_slot_i('0),
      .clearing_o  (clearing[1]),
      .rd_index_i  (rd_offset_i[6:4]),
      .rd_frames_o (oversize_frames),
      .rd_bytes_o  (no_bytes[0])
  );

  // Counters per slot.
  slot_t verdict_slot;
  verdict_t verdict;
  logic [63:0] verdict_frames, verdict_bytes;
  assign verdict_slot = meta_i.owned ? slot_t'(meta_i.ve) : slot_t'(VES);
  assign verdict = unqueued_i ? DROP_QUEUE : meta_i.verdict;
  card_counters #(
      .SLOTS   (SLOTS),
      .PER_SLOT(128),
      .BYTES   (1)
  ) verdicts (
      .clk,
      .rst,
      .event_i     (dropped_i || unqueued_i || queued_i),
      .index_i     ({verdict_slot, ingress_i.port, verdict}),
      .length_i    (ingress_i.length),
      .clear_i,
      .clear_slot_i,
      .clearing_o  (clearing[2]),
      .rd_index_i  ({rd_slot_i, rd_offset_i[10:4]}),
      .rd_frames_o (verdict_frames),
      .rd_bytes_o  (verdict_bytes)
  );

  logic [OUT_BITS-1:0] sent_out;
  slot_t sent_slot;
  logic [63:0] sent_frames, sent_bytes;
  assign {sent_out, sent_slot} = sent_queue_i;
  card_counters #(
      .SLOTS   (SLOTS),
      .PER_SLOT(8),
      .BYTES   (1)
  ) sent (
      .clk,
      .rst,
      .event_i     (sent_i),
      .index_i     ({sent_slot, sent_out == OUT_BITS'(PORTS) ? HOST : port_t'(sent_out)}),
      .length_i    (sent_length_i),
      .clear_i,
      .clear_slot_i,
      .clearing_o  (clearing[3]),
      .rd_index_i  ({rd_slot_i, rd_offset_i[6:4]}),
      .rd_frames_o (sent_frames),
      .rd_bytes_o  (sent_bytes)
  );

  logic [2:0] lone_events;
  slot_t [2:0] lone_slots;
  logic [2:0][63:0] lone_frames;
  assign lone_events = {refused_i, excess_i, fault_i};
  assign lone_slots  = {refused_slot_i, slot_t'(header_ve_i), slot_t'(header_ve_i)};
  for (genvar i = 0; i < 3; i++) begin : gen_lone
    card_counters #(
        .SLOTS   (SLOTS),
        .PER_SLOT(1),
        .BYTES   (0)
    ) lone (
        .clk,
        .rst,
        .event_i     (lone_events[i]),
        .index_i     (lone_slots[i]),
        .length_i    ('0),
        .clear_i,
        .clear_slot_i,
        .clearing_o  (clearing[4+i]),
        .rd_index_i  (rd_slot_i),
        .rd_frames_o (lone_frames[i]),
        .rd_bytes_o  (no_bytes[1+i])
    );
  end

  offset_t offset_q;
  always_ff @(posedge clk) begin
    offset_q <= rd_offset_i;
    rd_bytes_o <= '0;
    case (offset_q) inside
      [R_VERDICT : R_VERDICT_END]: {rd_frames_o, rd_bytes_o} <= {verdict_frames, verdict_bytes};
      [R_SENT : R_SENT_END]: {rd_frames_o, rd_bytes_o} <= {sent_frames, sent_bytes};
      [R_RECEIVED : R_RECEIVED_END]: {rd_frames_o, rd_bytes_o} <= {received_frames, received_bytes};
      [R_OVERSIZE : R_OVERSIZE_END]: rd_frames_o <= oversize_frames;
      [R_FAULTS : R_FAULTS_END]: rd_frames_o <= lone_frames[0];
      [R_EXCESS : R_EXCESS_END]: rd_frames_o <= lone_frames[1];
      default: rd_frames_o <= lone_frames[2];
    endcase
  end

endmodule
