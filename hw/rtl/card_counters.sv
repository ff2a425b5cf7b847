// Counters in memory: frames and, if BYTES is 1, their bytes.
//
// Latency: the memories have an event three cycles after it; `rd_*_o` has the counter at
// `rd_index_i` one cycle later. One event per cycle, of any index. After a reset, a sweep clears
// all counters, one per cycle. `clear_i` clears those of a slot: PER_SLOT of them from
// `clear_slot_i` * PER_SLOT on. Each waits for a cycle without an event.
// Invariant: each event that comes after the sweep of its counter adds once.
module card_counters #(
    parameter  int SLOTS      = 33,
    parameter  int PER_SLOT   = 8,                               // a power of two
    parameter  bit BYTES      = 1,
    localparam int DEPTH      = SLOTS * PER_SLOT,
    localparam int INDEX_BITS = DEPTH > 1 ? $clog2(DEPTH) : 1
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  event_i,
    input  logic [INDEX_BITS-1:0] index_i,
    input  logic [          10:0] length_i,
    input  logic                  clear_i,       // only without `clearing_o`
    input  logic [           8:0] clear_slot_i,
    output logic                  clearing_o,
    input  logic [INDEX_BITS-1:0] rd_index_i,
    output logic [          63:0] rd_frames_o,
    output logic [          63:0] rd_bytes_o
);

  localparam int LANES = BYTES ? 2 : 1;
  typedef logic [INDEX_BITS-1:0] index_t;
  typedef logic [LANES-1:0][63:0] counter_t;  // frames in lane 0

  // ---------------------------------------------------------------------------------------------
  // Stage 0: an event, or a step of the sweep.

  index_t sweep_q, end_q, index;
  logic step;
  assign step = clearing_o && !event_i;
  assign index = event_i ? index_i : sweep_q;

  always_ff @(posedge clk) begin
    if (rst) begin
      clearing_o <= 1'b1;
      sweep_q <= '0;
      end_q <= index_t'(DEPTH - 1);
    end else if (clear_i) begin
      clearing_o <= 1'b1;
      sweep_q <= index_t'(int'(clear_slot_i) * PER_SLOT);
      end_q <= index_t'(int'(clear_slot_i) * PER_SLOT + PER_SLOT - 1);
    end else if (step) begin
      clearing_o <= sweep_q != end_q;
      sweep_q <= sweep_q + 1'b1;
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Stages 0 to 2: read, add, write. The memory does not have the sums of the two events before;
  // they come from `sum_q`, in stage 1 for the older and in stage 2 for the younger.

  logic [2:1] valid_q, clear_q;
  index_t [2:1] index_q;
  logic [2:1][10:0] length_q;
  logic ahead_by_2_q, ahead_by_1_q;
  counter_t read, operand_q, sum, sum_q;

  always_comb begin
    sum = ahead_by_1_q ? sum_q : operand_q;
    sum[0] = sum[0] + 64'd1;
    if (BYTES) sum[LANES-1] = sum[LANES-1] + 64'(length_q[2]);
    if (clear_q[2]) sum = '0;
  end

  always_ff @(posedge clk) begin
    valid_q <= rst ? '0 : {valid_q[1], event_i || step};
    clear_q <= {clear_q[1], step};
    index_q <= {index_q[1], index};
    length_q <= {length_q[1], length_i};
    ahead_by_2_q <= valid_q[2] && index_q[2] == index;
    ahead_by_1_q <= valid_q[2] && index_q[2] == index_q[1];
    operand_q <= ahead_by_2_q ? sum_q : read;
    sum_q <= sum;
  end

  // Two copies of the counters: the events' and the reader's.
  card_ram #(
      .WIDTH($bits(counter_t)),
      .DEPTH(DEPTH)
  ) counters (
      .clk,
      .wr_en_i  (valid_q[2]),
      .wr_addr_i(index_q[2]),
      .wr_data_i(sum),
      .rd_addr_i(index),
      .rd_data_o(read)
  );

  counter_t reader;
  card_ram #(
      .WIDTH($bits(counter_t)),
      .DEPTH(DEPTH)
  ) readers (
      .clk,
      .wr_en_i  (valid_q[2]),
      .wr_addr_i(index_q[2]),
      .wr_data_i(sum),
      .rd_addr_i(rd_index_i),
      .rd_data_o(reader)
  );
  assign rd_frames_o = reader[0];
  assign rd_bytes_o  = BYTES ? reader[LANES-1] : '0;

endmodule
