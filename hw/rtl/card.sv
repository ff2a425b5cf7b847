// The card without its port adapters: card_top, its registers, and its counters.
//
// Latency: that of card_top for frames and that of card_registers for the bus. After a reset, the
// card takes neither frames nor register accesses until its counters are zero: (VES + 1) * 128
// cycles.
module card
  import card_pkg::*;
  import card_frame_pkg::*;
  import card_registers_pkg::*;
#(
    parameter  int DATA_BITS     = 512,
    parameter  int PORTS         = 4,
    parameter  int VES           = 32,
    parameter  int CELLS         = 2048,
    parameter  int VMACS         = 1024,
    parameter  int LEVELS        = 20,
    parameter  int NODES         = 8192,
    parameter  int LEAVES        = 65536,
    parameter  int EXT_FROM      = 21,
    parameter  int EXT_LATENCY   = 4,
    parameter  int GROUPS        = 8192,
    parameter  int BUCKET_BLOCKS = 64,
    parameter  int HOPS          = 8192,
    parameter  int ARPS          = 16384,
    localparam int LINES         = PORTS + 1,
    localparam int SLOT_BITS     = $clog2(VES + 1),
    localparam int QUEUE_BITS    = $clog2(LINES) + SLOT_BITS,
    localparam int BYTES_BITS    = $clog2(DATA_BITS / 8 + 1)
) (
    input logic   clk,
    input logic   rst,
    input ticks_t now_i,

    // Frames; the last line is the host. See card_arbiter and card_frames.
    input  logic        [LINES-1:0]                 valid_i,
    output logic        [LINES-1:0]                 ready_o,
    input  logic        [LINES-1:0][ DATA_BITS-1:0] data_i,
    input  logic        [LINES-1:0][BYTES_BITS-1:0] bytes_i,
    input  logic        [LINES-1:0]                 last_i,
    input  logic        [LINES-1:0][          11:0] user_i,
    output logic        [LINES-1:0]                 valid_o,
    input  logic        [LINES-1:0]                 ready_i,
    output logic        [LINES-1:0][ DATA_BITS-1:0] data_o,
    output logic        [LINES-1:0][BYTES_BITS-1:0] bytes_o,
    output logic        [LINES-1:0]                 last_o,
    output frame_meta_t [LINES-1:0]                 meta_o,

    // The verdict on each frame that entered, in the order of the frames: what a completion queue
    // to the host would hold. Frames that are too long have none.
    output logic        decided_o,
    output port_t       decided_port_o,  // ingress port
    output frame_meta_t decided_meta_o,

    // Registers: AXI-Lite. Address: page in bits 24:16, offset in bits 15:0.
    input  logic        awvalid_i,
    output logic        awready_o,
    input  logic [24:0] awaddr_i,
    input  logic        wvalid_i,
    output logic        wready_o,
    input  logic [31:0] wdata_i,
    input  logic [ 3:0] wstrb_i,
    output logic        bvalid_o,
    input  logic        bready_i,
    output logic [ 1:0] bresp_o,
    input  logic        arvalid_i,
    output logic        arready_o,
    input  logic [24:0] araddr_i,
    output logic        rvalid_o,
    input  logic        rready_i,
    output logic [31:0] rdata_o,
    output logic [ 1:0] rresp_o
);

  logic open;
  logic [LINES-1:0] ready;
  assign ready_o = open ? ready : '0;

  logic wr_valid, wr_refused, wr_quota, wr_weight;
  table_t wr_table;
  ve_t wr_ve;
  table_index_t wr_index;
  table_data_t wr_data;
  logic [15:0] pool;
  logic [QUEUE_BITS-1:0] wr_queue;
  quota_t wr_quota_data;
  logic [7:0] wr_weight_data;

  logic accepted, oversize, dropped, unqueued, queued, sent, fault, excess;
  ingress_t accepted_ingress, ingress;
  port_t oversize_port;
  frame_meta_t meta;
  logic [QUEUE_BITS-1:0] sent_queue;
  length_t sent_length;
  ve_t header_ve;

  assign decided_o = dropped || unqueued || queued;
  assign decided_port_o = ingress.port;
  always_comb begin
    decided_meta_o = meta;
    if (unqueued) decided_meta_o.verdict = DROP_QUEUE;
  end

  card_top #(
      .DATA_BITS    (DATA_BITS),
      .PORTS        (PORTS),
      .VES          (VES),
      .CELLS        (CELLS),
      .VMACS        (VMACS),
      .LEVELS       (LEVELS),
      .NODES        (NODES),
      .LEAVES       (LEAVES),
      .EXT_FROM     (EXT_FROM),
      .EXT_LATENCY  (EXT_LATENCY),
      .GROUPS       (GROUPS),
      .BUCKET_BLOCKS(BUCKET_BLOCKS),
      .HOPS         (HOPS),
      .ARPS         (ARPS)
  ) top (
      .clk,
      .rst,
      .valid_i                 (open ? valid_i : '0),
      .ready_o                 (ready),
      .data_i,
      .bytes_i,
      .last_i,
      .user_i,
      .valid_o,
      .ready_i,
      .data_o,
      .bytes_o,
      .last_o,
      .meta_o,
      .pool_i                  (pool),
      .wr_quota_i              (wr_quota),
      .wr_weight_i             (wr_weight),
      .wr_queue_i              (wr_queue),
      .wr_quota_data_i         (wr_quota_data),
      .wr_weight_data_i        (wr_weight_data),
      .event_accepted_o        (accepted),
      .event_accepted_ingress_o(accepted_ingress),
      .event_oversize_o        (oversize),
      .event_oversize_port_o   (oversize_port),
      .event_dropped_o         (dropped),
      .event_unqueued_o        (unqueued),
      .event_queued_o          (queued),
      .event_meta_o            (meta),
      .event_ingress_o         (ingress),
      .event_sent_o            (sent),
      .event_sent_queue_o      (sent_queue),
      .event_sent_length_o     (sent_length),
      .event_fault_o           (fault),
      .event_excess_o          (excess),
      .event_header_ve_o       (header_ve),
      .now_i,
      .wr_valid_i              (wr_valid),
      .wr_table_i              (wr_table),
      .wr_ve_i                 (wr_ve),
      .wr_index_i              (wr_index),
      .wr_data_i               (wr_data),
      .wr_refused_o            (wr_refused)
  );

  logic refused, clear, clearing;
  logic [8:0] clear_slot;
  logic [SLOT_BITS-1:0] refused_slot, rd_slot;
  offset_t rd_offset;
  logic [63:0] rd_frames, rd_bytes;

  card_registers #(
      .DATA_BITS    (DATA_BITS),
      .PORTS        (PORTS),
      .VES          (VES),
      .CELLS        (CELLS),
      .VMACS        (VMACS),
      .LEVELS       (LEVELS),
      .NODES        (NODES),
      .LEAVES       (LEAVES),
      .EXT_FROM     (EXT_FROM),
      .EXT_LATENCY  (EXT_LATENCY),
      .GROUPS       (GROUPS),
      .BUCKET_BLOCKS(BUCKET_BLOCKS),
      .HOPS         (HOPS),
      .ARPS         (ARPS)
  ) registers (
      .clk,
      .rst,
      .open_i          (open),
      .awvalid_i,
      .awready_o,
      .awaddr_i,
      .wvalid_i,
      .wready_o,
      .wdata_i,
      .wstrb_i,
      .bvalid_o,
      .bready_i,
      .bresp_o,
      .arvalid_i,
      .arready_o,
      .araddr_i,
      .rvalid_o,
      .rready_i,
      .rdata_o,
      .rresp_o,
      .wr_valid_o      (wr_valid),
      .wr_table_o      (wr_table),
      .wr_ve_o         (wr_ve),
      .wr_index_o      (wr_index),
      .wr_data_o       (wr_data),
      .wr_refused_i    (wr_refused),
      .pool_o          (pool),
      .wr_quota_o      (wr_quota),
      .wr_weight_o     (wr_weight),
      .wr_queue_o      (wr_queue),
      .wr_quota_data_o (wr_quota_data),
      .wr_weight_data_o(wr_weight_data),
      .refused_o       (refused),
      .refused_slot_o  (refused_slot),
      .clear_o         (clear),
      .clear_slot_o    (clear_slot),
      .clearing_i      (clearing),
      .rd_slot_o       (rd_slot),
      .rd_offset_o     (rd_offset),
      .rd_frames_i     (rd_frames),
      .rd_bytes_i      (rd_bytes)
  );

  card_statistics #(
      .PORTS(PORTS),
      .VES  (VES)
  ) statistics (
      .clk,
      .rst,
      .ready_o           (open),
      .accepted_i        (accepted),
      .accepted_ingress_i(accepted_ingress),
      .oversize_i        (oversize),
      .oversize_port_i   (oversize_port),
      .dropped_i         (dropped),
      .unqueued_i        (unqueued),
      .queued_i          (queued),
      .meta_i            (meta),
      .ingress_i         (ingress),
      .sent_i            (sent),
      .sent_queue_i      (sent_queue),
      .sent_length_i     (sent_length),
      .fault_i           (fault),
      .excess_i          (excess),
      .header_ve_i       (header_ve),
      .refused_i         (refused),
      .refused_slot_i    (refused_slot),
      .clear_i           (clear),
      .clear_slot_i      (clear_slot),
      .clearing_o        (clearing),
      .rd_slot_i         (rd_slot),
      .rd_offset_i       (rd_offset),
      .rd_frames_o       (rd_frames),
      .rd_bytes_o        (rd_bytes)
  );

endmodule
