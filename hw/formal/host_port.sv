// A frame from the host leaves only by the port, by the segment, and from the MAC address that the
// super page attached to its VE and vport. Its length and its first 64 bytes are unmodified;
// card_merge does not touch the others.
//
// The modules that a frame from the host does not use return anything: they are black boxes.
module host_port
  import card_pkg::*;
  import card_lpm_pkg::*;
#(
    parameter  int VES     = 8,
    parameter  int LEVELS  = 15,
    // The property is stated from this cycle on: a reset may come at any cycle, also later.
    parameter  int SETTLE  = 60,
    localparam int ROUTE   = 2 + lpm_latency(LEVELS, 21, 4) + 1,
    localparam int LATENCY = ROUTE + 10
) (
    input logic         clk,
    input logic         rst,
    input ticks_t       now_i,
    // The VE and the vport of the frame.
    input ve_t          ve_i,
    input vport_t       vport_i,
    input logic         valid_i,
    input header_in_t   header_i,
    input logic         wr_valid_i,
    input table_t       wr_table_i,
    input ve_t          wr_ve_i,
    input table_index_t wr_index_i,
    input table_data_t  wr_data_i
);

  logic valid, fault, excess, refused;
  header_out_t out;
  card_header #(
      .VES   (VES),
      .LEVELS(LEVELS)
  ) dut (
      .clk,
      .rst,
      .now_i,
      .valid_i,
      .header_i,
      .valid_o     (valid),
      .header_o    (out),
      .fault_o     (fault),
      .excess_o    (excess),
      .wr_valid_i,
      .wr_table_i,
      .wr_ve_i,
      .wr_index_i,
      .wr_data_i,
      .wr_refused_o(refused)
  );

  // The attachment in force: the last one that was written. A write needs some cycles.
  attachment_t attached_q;
  attachment_t [4:1] before_q;
  logic [LPM_WRITE_LATENCY-1:0] wr_q = '0;
  attachment_t [LPM_WRITE_LATENCY-1:0] wr_data_q;
  // The first two cycles are a reset.
  logic [1:0] started_q = '0;
  ve_t ve_q;
  vport_t vport_q;
  always_ff @(posedge clk) begin
    started_q <= {started_q[0], 1'b1};
    ve_q <= ve_i;
    vport_q <= vport_i;
    wr_q <= rst ? '0 : {wr_q[LPM_WRITE_LATENCY-2:0], wr_valid_i && wr_table_i == TABLE_ATTACHMENT
        && wr_ve_i == ve_i && wr_index_i == 32'(vport_i)};
    wr_data_q <= {wr_data_q[LPM_WRITE_LATENCY-2:0], attachment_t'(wr_data_i)};
    if (wr_q[LPM_WRITE_LATENCY-1]) attached_q <= wr_data_q[LPM_WRITE_LATENCY-1];
    before_q <= {before_q[3:1], attached_q};
  end

  logic [6:0] cycle_q = '0;  // up to SETTLE
  always_ff @(posedge clk) if (cycle_q != 7'(SETTLE)) cycle_q <= cycle_q + 1'b1;

  // The frame, on its way.
  logic [LATENCY:1] mine_q = '0;
  logic [LATENCY:1][$bits(header_bytes_t)+$bits(length_t)-1:0] frame_q;
  header_bytes_t bytes;
  length_t length;
  mac_t source;
  always_ff @(posedge clk) begin
    mine_q <= {mine_q[LATENCY-1:1],
               header_i.port == HOST && header_i.ve == ve_i && header_i.vport == vport_i};
    frame_q <= {frame_q[LATENCY-1:1], {header_i.bytes, header_i.length}};
  end
  assign {bytes, length} = frame_q[LATENCY];
  assign source = {<<8{bytes[95:48]}};

  always_comb begin
    if (started_q[0]) assume (ve_i == ve_q && vport_i == vport_q);
    assume (32'(ve_i) < VES);
    assume (dut.context_.egress_attachments.row == ($clog2(VES * 16))'({ve_i, vport_i}));
    if (!started_q[1]) begin
      assume (rst);
      assume (dut.context_.egress_attachments.word_q == attached_q);
    end else assert (dut.context_.egress_attachments.word_q == attached_q);
    if (cycle_q == 7'(SETTLE) && mine_q[LATENCY] && out.verdict == OUT) begin
      assert (before_q[4].attached);
      assert (out.port == before_q[4].port);
      assert (out.segment == before_q[4].segment);
      assert (source == before_q[4].mac);
      assert (out.bytes == bytes && out.length == length);
      assert (out.owned && out.ve == ve_i && out.vport == vport_i);
    end
  end

endmodule
