// Queues of whole frames in cells of one memory: one queue per output and VE. Output PORTS is the
// host. Slot VES of an output holds the frames of no VE.
//
// A cell holds a beat; the cells of a queue are a linked list. A frame is admitted at its first
// beat or dropped whole. It may leave while its later beats arrive. Admission: a queue
// may hold `guarantee` cells. It may hold `share` more while all queues together hold at most
// `pool_i` cells above their guarantees. The driver keeps pool + guarantees <= CELLS - SPARE. A
// quota takes effect when its queue is empty, so that the pool's count stays exact.
//
// Latency: 1 cycle from a frame's first beat to `waiting_o`, 2 if it has more beats; 1 cycle from
// `start_i` to the first beat at the output. One beat in and one beat out per cycle. The beats of a
// frame arrive without a gap.
// Invariants: each cell is free or in one frame; `pool_used_q` counts the cells above guarantees.
module card_queues
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS  = 512,
    parameter  int PORTS      = 4,
    parameter  int VES        = 32,
    parameter  int CELLS      = 2048,                       // a power of two, at most 32,768
    localparam int OUTPUTS    = PORTS + 1,
    localparam int SLOT_BITS  = $clog2(VES + 1),
    localparam int SLOTS      = 1 << SLOT_BITS,
    localparam int OUT_BITS   = $clog2(OUTPUTS),
    localparam int QUEUE_BITS = OUT_BITS + SLOT_BITS,
    localparam int BYTES_BITS = $clog2(DATA_BITS / 8 + 1)
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  valid_i,
    input  logic                  first_i,
    input  logic                  last_i,
    input  logic [ DATA_BITS-1:0] data_i,
    input  logic [BYTES_BITS-1:0] bytes_i,
    input  length_t               length_i,
    input  port_t                 port_i,
    input  frame_meta_t           meta_i,
    output logic                  queued_o,   // events of the frame at the input
    output logic                  dropped_o,

    output logic    [OUTPUTS-1:0][SLOTS-1:0] waiting_o,  // queues that hold a frame
    output logic                             idle_o,     // a frame may start
    input  logic                             start_i,    // only with `idle_o` and `waiting_o`
    input  logic    [   OUT_BITS-1:0]        start_out_i,
    input  logic    [  SLOT_BITS-1:0]        start_slot_i,
    output length_t                          start_length_o,  // of the frame that `start_*` chooses

    output logic                  valid_o,
    output logic [  OUT_BITS-1:0] out_o,
    output logic                  last_o,
    output logic [ DATA_BITS-1:0] data_o,
    output logic [BYTES_BITS-1:0] bytes_o,
    output frame_meta_t           meta_o,

    input logic [          15:0] pool_i,
    input logic                  wr_quota_i,
    input logic [QUEUE_BITS-1:0] wr_queue_i,  // {output, slot}
    input quota_t                wr_quota_data_i
);

  localparam int BYTES = DATA_BITS / 8;
  localparam int CELL_BITS = $clog2(CELLS);
  localparam int QUEUES = OUTPUTS << SLOT_BITS;
  localparam int SPARE = 8;  // cells that are never in use: those on the way out of the free list

  typedef logic [CELL_BITS-1:0] cell_t;
  typedef logic [QUEUE_BITS-1:0] queue_t;
  typedef logic [15:0] count_t;
  // Reference to a cell; `length` counts if the cell is the first one of a frame.
  typedef struct packed {
    cell_t   at;
    length_t length;
  } link_t;

  // Cells of `used` above the guarantee.
  function automatic count_t above(input count_t used, input count_t guarantee);
    return used > guarantee ? used - guarantee : '0;
  endfunction

  // State per queue. The bit vectors make the contents of the other arrays valid.
  logic [QUEUES-1:0] waiting_q;   // holds a frame
  logic [QUEUES-1:0] fresh_q;     // its first frame is `first_q`, else `head_q`
  link_t first_q[QUEUES];         // first frame; written by the input
  link_t head_q[QUEUES];          // first frame; written by the output
  cell_t newest_q[QUEUES];        // first cell of the last frame
  cell_t tail_q[QUEUES];          // last cell
  count_t taken_q[QUEUES];        // cells taken so far
  count_t freed_q[QUEUES];        // cells freed so far
  quota_t wanted_q[QUEUES];       // as the driver wrote it
  quota_t quota_q[QUEUES];        // in effect
  count_t pool_used_q;

  // ---------------------------------------------------------------------------------------------
  // Free cells. Before the list in memory, it hands out all cells once, in order.

  logic take, give;
  cell_t give_at, this_q, previous_q, after, free_read, free_rd_q, free_rd_next, free_wr_q;
  logic initial_q;
  count_t free_q;

  assign after = initial_q ? free_rd_q : free_read;
  assign free_rd_next = free_rd_q + cell_t'(take);

  card_ram #(
      .WIDTH(CELL_BITS),
      .DEPTH(CELLS)
  ) free (
      .clk,
      .wr_en_i  (give),
      .wr_addr_i(free_wr_q),
      .wr_data_i(give_at),
      .rd_addr_i(free_rd_next),
      .rd_data_o(free_read)
  );

  always_ff @(posedge clk) begin
    if (rst) begin
      this_q <= cell_t'(0);
      free_rd_q <= cell_t'(1);
      free_wr_q <= '0;
      initial_q <= 1'b1;
      free_q <= count_t'(CELLS - SPARE);
    end else begin
      if (take) begin
        this_q <= after;
        free_rd_q <= free_rd_next;
        if (free_rd_q == cell_t'(CELLS - 1)) initial_q <= 1'b0;
      end
      free_wr_q <= free_wr_q + cell_t'(give);
      free_q <= free_q + count_t'(give) - count_t'(take);
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Input: admission, then one cell per beat.

  logic known, admit, accept, accepted_q, enqueue, linked;
  queue_t in_queue;
  count_t in_beats, in_used, in_above, in_above_after;
  quota_t in_quota;
  logic early_q;  // `early_queue_q` was empty: the output must not overtake the links
  queue_t early_queue_q;
  logic emptied;  // the output takes the last frame of its queue
  queue_t out_queue;

  assign known = port_i == HOST || {1'b0, port_i} < 4'(PORTS);
  assign in_queue = {
    port_i == HOST || !known ? OUT_BITS'(PORTS) : OUT_BITS'(port_i),
    meta_i.owned ? SLOT_BITS'(meta_i.ve) : SLOT_BITS'(VES)
  };
  assign in_beats = count_t'(beats_of(length_i, BYTES));
  assign in_quota = waiting_q[in_queue] ? quota_q[in_queue] : wanted_q[in_queue];
  assign in_used = waiting_q[in_queue] ? taken_q[in_queue] - freed_q[in_queue] : '0;
  assign in_above = above(in_used, in_quota.guarantee);
  assign in_above_after = above(in_used + in_beats, in_quota.guarantee);
  assign admit = known && in_beats <= free_q && (in_above_after == '0 ||
      (in_above_after <= in_quota.share
       && {1'b0, pool_used_q} + 17'(in_above_after - in_above) <= {1'b0, pool_i}));
  assign accept = valid_i && (first_i ? admit : accepted_q);
  assign take = accept;
  assign enqueue = accept && first_i;
  assign queued_o = enqueue && !rst;
  assign dropped_o = valid_i && first_i && !admit && !rst;
  // The queue has a frame that the new one follows.
  assign linked = waiting_q[in_queue] && !(emptied && out_queue == in_queue);

  always_ff @(posedge clk) begin
    if (valid_i && first_i) accepted_q <= admit;
    previous_q <= this_q;
    early_q <= enqueue && !linked && !last_i && !rst;
    early_queue_q <= in_queue;
    if (enqueue) begin
      taken_q[in_queue] <= (waiting_q[in_queue] ? taken_q[in_queue] : freed_q[in_queue])
          + in_beats;
      quota_q[in_queue] <= in_quota;
      newest_q[in_queue] <= this_q;
      if (!linked) first_q[in_queue] <= '{at: this_q, length: length_i};
    end
    if (accept && last_i) tail_q[in_queue] <= this_q;
    if (wr_quota_i && wr_queue_i < queue_t'(QUEUES)) wanted_q[wr_queue_i] <= wr_quota_data_i;
  end

  // ---------------------------------------------------------------------------------------------
  // Output: one cell per cycle from the start of a frame on.

  queue_t queue_q;
  beats_t left_q, left;       // beats of the frame that are to be read
  count_t out_beats_q, out_beats;
  logic step, ends, chain_q;  // `chain_q`: `link` is the next frame of `queue_q`
  link_t start_link, link;
  cell_t at, at_q, begin_q, begins;  // `begins`: first cell of the frame
  count_t out_used;
  // verilator lint_off UNUSEDSIGNAL
  quota_t out_quota;  // without the share
  // verilator lint_on UNUSEDSIGNAL
  count_t release_;

  assign idle_o = left_q == '0;
  assign out_queue = start_i ? {start_out_i, start_slot_i} : queue_q;
  always_comb begin
    start_link = head_q[{start_out_i, start_slot_i}];
    if (chain_q && queue_q == {start_out_i, start_slot_i}) start_link = link;
    else if (fresh_q[{start_out_i, start_slot_i}])
      start_link = first_q[{start_out_i, start_slot_i}];
  end
  assign start_length_o = start_link.length;
  assign left = start_i ? beats_of(start_link.length, BYTES) : left_q;
  assign out_beats = start_i ? count_t'(left) : out_beats_q;
  assign step = start_i || left_q != '0;
  assign ends = step && left == 8'd1;
  assign at = start_i ? start_link.at : step ? link.at : at_q;
  assign begins = start_i ? start_link.at : begin_q;
  assign emptied = ends && begins == newest_q[out_queue];
  assign give = step;
  assign give_at = at;

  // Cells of the queue after the admission of this cycle.
  assign out_used = taken_q[out_queue] - freed_q[out_queue]
      + (enqueue && in_queue == out_queue ? in_beats : '0);
  assign out_quota = quota_q[out_queue];
  assign release_ = above(out_used, out_quota.guarantee)
      - above(out_used - out_beats, out_quota.guarantee);

  card_ram #(
      .WIDTH(DATA_BITS + BYTES_BITS + 1 + $bits(frame_meta_t)),
      .DEPTH(CELLS)
  ) cells (
      .clk,
      .wr_en_i  (accept),
      .wr_addr_i(this_q),
      .wr_data_i({data_i, bytes_i, last_i, meta_i}),
      .rd_addr_i(at),
      .rd_data_o({data_o, bytes_o, last_o, meta_o})
  );
  // Each beat writes the link that leads to it.
  card_ram #(
      .WIDTH($bits(link_t)),
      .DEPTH(CELLS)
  ) links (
      .clk,
      .wr_en_i  (accept && (!first_i || linked)),
      .wr_addr_i(first_i ? tail_q[in_queue] : previous_q),
      .wr_data_i({this_q, length_i}),
      .rd_addr_i(at),
      .rd_data_o(link)
  );

  always_ff @(posedge clk) begin
    at_q <= at;
    begin_q <= begins;
    queue_q <= out_queue;
    out_beats_q <= out_beats;
    out_o <= out_queue[QUEUE_BITS-1:SLOT_BITS];
    valid_o <= step && !rst;
    chain_q <= ends && !emptied && !rst;
    if (chain_q) head_q[queue_q] <= link;
    if (ends) freed_q[out_queue] <= freed_q[out_queue] + out_beats;

    if (rst) begin
      left_q <= '0;
      waiting_q <= '0;
      fresh_q <= '0;
      pool_used_q <= '0;
    end else begin
      left_q <= step ? left - 8'd1 : 8'd0;
      pool_used_q <= pool_used_q
          + (enqueue ? in_above_after - in_above : '0)
          - (ends ? release_ : '0);
      if (ends) fresh_q[out_queue] <= 1'b0;
      if (emptied) waiting_q[out_queue] <= 1'b0;
      if (enqueue) begin
        waiting_q[in_queue] <= 1'b1;
        if (!linked) fresh_q[in_queue] <= 1'b1;
      end
    end
  end

  always_comb begin
    waiting_o = waiting_q;
    if (early_q) waiting_o[early_queue_q[QUEUE_BITS-1:SLOT_BITS]][early_queue_q[SLOT_BITS-1:0]] =
        1'b0;
  end

endmodule
