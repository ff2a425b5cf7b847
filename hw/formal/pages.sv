// Registers: a write to a VE's page reaches only tables of that VE, only those that a VE may write,
// with the data that this page has staged. It changes nothing that belongs to the super page. After
// a super page's write, no write enters before its answer.
module pages
  import card_pkg::*;
  import card_frame_pkg::*;
  import card_lpm_pkg::*;
  import card_registers_pkg::*;
#(
    parameter  int VES        = 8,
    parameter  int PORTS      = 4,
    localparam int QUEUE_BITS = $clog2(PORTS + 1) + $clog2(VES + 1)
) (
    input logic        clk,
    input logic        rst,
    input logic        open_i,
    input logic        awvalid_i,
    input logic [24:0] awaddr_i,
    input logic        wvalid_i,
    input logic [31:0] wdata_i,
    input logic [ 3:0] wstrb_i,
    input logic        bready_i,
    input logic        arvalid_i,
    input logic [24:0] araddr_i,
    input logic        rready_i,
    input logic        wr_refused_i,
    input logic        clearing_i,
    input logic [63:0] rd_frames_i,
    input logic [63:0] rd_bytes_i
);

  logic awready, wready, bvalid, arready, rvalid, wr_valid, wr_quota, wr_weight, refused, clear;
  logic [1:0] bresp, rresp;
  logic [31:0] rdata;
  logic [15:0] pool, pool_q;
  table_t wr_table;
  ve_t wr_ve;
  table_index_t wr_index;
  table_data_t wr_data;
  logic [QUEUE_BITS-1:0] wr_queue;
  quota_t wr_quota_data;
  logic [7:0] wr_weight_data;
  logic [$clog2(VES + 1)-1:0] refused_slot, rd_slot;
  logic [8:0] clear_slot;
  offset_t rd_offset;
  card_registers #(
      .VES  (VES),
      .PORTS(PORTS)
  ) dut (
      .clk,
      .rst,
      .open_i,
      .awvalid_i,
      .awready_o       (awready),
      .awaddr_i,
      .wvalid_i,
      .wready_o        (wready),
      .wdata_i,
      .wstrb_i,
      .bvalid_o        (bvalid),
      .bready_i,
      .bresp_o         (bresp),
      .arvalid_i,
      .arready_o       (arready),
      .araddr_i,
      .rvalid_o        (rvalid),
      .rready_i,
      .rdata_o         (rdata),
      .rresp_o         (rresp),
      .wr_valid_o      (wr_valid),
      .wr_table_o      (wr_table),
      .wr_ve_o         (wr_ve),
      .wr_index_o      (wr_index),
      .wr_data_o       (wr_data),
      .wr_refused_i,
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
      .clearing_i,
      .rd_slot_o       (rd_slot),
      .rd_offset_o     (rd_offset),
      .rd_frames_i,
      .rd_bytes_i
  );

  localparam int WRITE_CYCLES = 2 + LPM_WRITE_LATENCY;
  logic [2:1] taken_q = '0;
  logic [WRITE_CYCLES:1] super_q = '0;  // a super page's write, until its answer
  logic [2:1][8:0] page_q;  // of the write that entered 1 and 2 cycles ago
  logic started_q = 1'b0, rst_q;
  logic [$clog2(VES + 1)-1:0] target_q;
  always_ff @(posedge clk) begin
    started_q <= 1'b1;
    rst_q <= rst;
    taken_q <= rst ? '0 : {taken_q[1], dut.take};
    super_q <= rst ? '0 : {super_q[WRITE_CYCLES-1:1], dut.take && dut.aw_q.page == '0};
    page_q <= {page_q[1], dut.aw_q.page};
    pool_q <= pool;
    target_q <= dut.target_q;
  end

  always_comb begin
    if (!started_q) assume (rst);
    if (started_q) begin
      assert (super_q == '0 || !dut.take);
      // Invariants.
      assert ($onehot0(super_q) && dut.alone_q == (super_q != '0));
      for (int i = 1; i <= WRITE_CYCLES; i++)
        assert (super_q[i] == (dut.valid_q[i] && dut.address_q[i].page == '0));
    end
    if (started_q && !rst_q) begin
      if (wr_valid || wr_quota || wr_weight) assert (taken_q[2]);
      if (taken_q[2] && page_q[2] != '0) begin
        assert (!wr_quota && !wr_weight);
        if (wr_valid)
          assert (wr_ve == ve_t'(page_q[2] - 1'b1) && page_q[2] <= 9'(VES)
              && wr_table >= TABLE_VE_OPTIONS);
      end
      if (!(taken_q[1] && page_q[1] == '0))
        assert (!clear && pool == pool_q && dut.target_q == target_q);
    end
  end

  // The staged words are those of the page.
  for (genvar i = 0; i < 6; i++) begin : gen_words
    always_comb begin
      if (dut.gen_words[i].word.wr_en_i)
        assert (9'(dut.gen_words[i].word.wr_addr_i) == dut.aw_q.page);
      if (dut.take && dut.allowed)
        assert (9'(dut.gen_words[i].word.rd_addr_i) == dut.aw_q.page);
    end
  end

endmodule
