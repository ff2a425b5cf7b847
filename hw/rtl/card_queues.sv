// Queues of whole frames in cells of one memory: one queue per output and VE. Output PORTS is the
// host. Slot VES of an output holds the frames of no VE. See card_scheduler for an output's queues.
//
// A cell holds a beat; the cells of a frame are a linked list, and so are the frames of a queue. A
// frame of `accept_i` has cells: card_admission counts them. A frame may leave while its later
// beats arrive. The outputs take turns by frame, round robin.
//
// Latency: 3 cycles from a frame's first beat to the first beat at the output if that has no other
// frame. One beat in and one beat out per cycle. The beats of a frame arrive without a gap.
// Invariant: each cell is free or in one frame.
//
// No frame's start waits for the choice among queues, as each output has its next frame in a
// register. If no other output has a frame, an output starts the successor of the frame that it
// started one cycle ago straight from the memory. So a queue sends a frame of one beat each cycle.
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
    input  frame_meta_t           meta_i,
    // With the first beat.
    input  logic                  accept_i,
    input  logic                  pooled_i,
    input  logic [QUEUE_BITS-1:0] queue_i,

    input  logic [OUTPUTS-1:0] room_i,  // the output has space for the longest frame and 2 beats

    output logic                  valid_o,
    output logic [  OUT_BITS-1:0] out_o,
    output logic                  last_o,
    output logic [ DATA_BITS-1:0] data_o,
    output logic [BYTES_BITS-1:0] bytes_o,
    output frame_meta_t           meta_o,

    output logic                  sent_o,           // a frame started one cycle ago
    output logic [QUEUE_BITS-1:0] sent_queue_o,
    output length_t               sent_length_o,
    output logic                  release_o,        // the last beat of the frame `sent_*` was read
    output beats_t                release_beats_o,
    output logic                  release_pooled_o,

    input logic                  wr_weight_i,
    input logic [QUEUE_BITS-1:0] wr_queue_i,       // {output, slot}
    input logic [           7:0] wr_weight_data_i
);

  localparam int BYTES = DATA_BITS / 8;
  localparam int CELL_BITS = $clog2(CELLS);

  typedef logic [CELL_BITS-1:0] place_t;

  // ---------------------------------------------------------------------------------------------
  // Free cells: a ring in memory, which begins with all cells in order. As a frame's acceptance
  // comes late in the cycle, the next four cells are in registers, and a read fills them up later.

  localparam int AHEAD = 4;

  logic take, take_q, give_q, initial_q, fill_q, fill_initial_q;
  place_t give_at_q, this_q, previous_q, free_read, free_rd_q, free_wr_q, fill_place_q;
  place_t [AHEAD-1:0] ahead_q;  // `this_q` is the first one
  logic [$clog2(AHEAD)-1:0] ahead_rd_q, ahead_wr_q;

  assign this_q = ahead_q[ahead_rd_q];

  card_ram #(
      .WIDTH   (CELL_BITS),
      .DEPTH   (CELLS),
      .COLLIDES(1'b0)
  ) free (
      .clk,
      .wr_en_i  (give_q),
      .wr_addr_i(free_wr_q),
      .wr_data_i(give_at_q),
      .rd_addr_i(free_rd_q),
      .rd_data_o(free_read)
  );

  always_ff @(posedge clk) begin
    take_q <= take && !rst;
    fill_q <= take_q && !rst;
    fill_initial_q <= initial_q;
    fill_place_q <= free_rd_q;
    if (take) ahead_rd_q <= ahead_rd_q + 1'b1;
    if (take_q) begin
      free_rd_q <= free_rd_q + 1'b1;
      if (free_rd_q == place_t'(CELLS - 1)) initial_q <= 1'b0;
    end
    if (fill_q) begin
      ahead_q[ahead_wr_q] <= fill_initial_q ? fill_place_q : free_read;
      ahead_wr_q <= ahead_wr_q + 1'b1;
    end
    free_wr_q <= free_wr_q + place_t'(give_q);
    if (rst) begin
      for (int i = 0; i < AHEAD; i++) ahead_q[i] <= place_t'(i);
      ahead_rd_q <= '0;
      ahead_wr_q <= '0;
      free_rd_q <= place_t'(AHEAD);
      free_wr_q <= '0;
      initial_q <= 1'b1;
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Input: one cell per beat. What is written at `this_q` counts only if the cell is taken.

  logic accept, accepted_q, insert_q;
  logic [OUT_BITS-1:0] insert_out_q;
  logic [SLOT_BITS-1:0] insert_slot_q;
  queued_t insert_frame_q, recent_q;  // `recent_q`: the one inserted one cycle ago

  assign accept = first_i ? accept_i : accepted_q;
  assign take = valid_i && accept;

  always_ff @(posedge clk) begin
    if (valid_i) accepted_q <= accept;
    previous_q <= this_q;
    insert_q <= take && first_i && !rst;
    {insert_out_q, insert_slot_q} <= queue_i;
    insert_frame_q <= '{
        at: cell_t'(this_q),
        length: length_i,
        single: last_i,
        pooled: pooled_i
    };
    recent_q <= insert_frame_q;
  end

  // ---------------------------------------------------------------------------------------------
  // The outputs' queues.

  logic [OUTPUTS-1:0] able, start, chain, recent, start_chain, linked;
  queued_t [OUTPUTS-1:0] frame;
  logic [OUTPUTS-1:0][SLOT_BITS-1:0] slot;
  cell_t [OUTPUTS-1:0] newest;
  queued_t successor;  // of the frame that started one cycle ago

  for (genvar i = 0; i < OUTPUTS; i++) begin : gen_output
    card_scheduler #(
        .SLOTS(SLOTS)
    ) scheduler (
        .clk,
        .rst,
        .early_slot_i    (queue_i[SLOT_BITS-1:0]),
        .insert_i        (insert_q && insert_out_q == OUT_BITS'(i)),
        .insert_slot_i   (insert_slot_q),
        .insert_frame_i  (insert_frame_q),
        .linked_o        (linked[i]),
        .newest_o        (newest[i]),
        .room_i          (room_i[i]),
        .valid_o         (able[i]),
        .frame_o         (frame[i]),
        .slot_o          (slot[i]),
        .start_i         (start[i]),
        .next_i          (successor),
        .recent_i        (recent_q),
        .chain_o         (chain[i]),
        .recent_o        (recent[i]),
        .start_chain_i   (start_chain[i]),
        .wr_weight_i     (wr_weight_i && wr_queue_i[QUEUE_BITS-1:SLOT_BITS] == OUT_BITS'(i)),
        .wr_slot_i       (wr_queue_i[SLOT_BITS-1:0]),
        .wr_weight_data_i
    );
  end

  // ---------------------------------------------------------------------------------------------
  // Output: one cell per cycle from the start of a frame on.

  logic busy_q, begins, chains, began_q, single, ends_q;
  logic [OUT_BITS-1:0] out, out_q;
  logic [OUTPUTS-1:0] behind_q;   // mask of the outputs behind `out_q`
  logic [OUTPUTS-1:0] able_behind, choice;
  logic [SLOT_BITS-1:0] slot_chosen;
  logic linked_begin;             // the frame in `successor` is next

  // Mask of the outputs in front of output i. A mask, as a subtraction would take longer.
  function automatic logic [OUTPUTS-1:0] below(input int i);
    return (OUTPUTS'(1) << i) - 1'b1;
  endfunction
  queued_t begin_frame;
  length_t length_q;              // of the frame that is read
  logic pooled_q;
  logic [SLOT_BITS-1:0] slot_q;
  beats_t left_q, left;           // beats of the frame from this one on
  place_t at, cell_link;

  always_comb begin
    // First output behind the last one that can send, else the first one of all.
    able_behind = able & behind_q;
    for (int i = 0; i < OUTPUTS; i++)
      choice[i] = able_behind != '0 ? able_behind[i] && (able_behind & below(i)) == '0
          : able[i] && (able & below(i)) == '0;
    chains = able == '0 && chain != '0 && !busy_q;
    begins = !busy_q && (able != '0 || chains);
    start = !busy_q && !rst ? choice : '0;
    start_chain = chains && !rst ? chain : '0;
    out = '0;
    slot_chosen = '0;
    begin_frame = '0;
    for (int i = 0; i < OUTPUTS; i++) begin
      if (choice[i]) begin
        out |= OUT_BITS'(i);
        slot_chosen |= slot[i];
        begin_frame |= frame[i];
      end
    end
    // The memories' words come late: one gate behind them.
    linked_begin = able == '0 && (recent & chain) == '0;
    if (able == '0) begin_frame = recent_q;
    at = busy_q || linked_begin ? (busy_q ? cell_link : place_t'(successor.at))
        : place_t'(begin_frame.at);
    if (linked_begin) begin_frame = successor;
    left = began_q ? beats_of(length_q, BYTES) - 8'd1 : left_q;
  end

  card_ram #(
      .WIDTH   (DATA_BITS + BYTES_BITS + 1 + $bits(frame_meta_t)),
      .DEPTH   (CELLS),
      .COLLIDES(1'b0)
  ) cells (
      .clk,
      .wr_en_i  (valid_i),
      .wr_addr_i(this_q),
      .wr_data_i({data_i, bytes_i, last_i, meta_i}),
      .rd_addr_i(at),
      .rd_data_o({data_o, bytes_o, last_o, meta_o})
  );
  // The next cell of the frame.
  card_ram #(
      .WIDTH   (CELL_BITS),
      .DEPTH   (CELLS),
      .COLLIDES(1'b0)
  ) cell_links (
      .clk,
      .wr_en_i  (valid_i && !first_i),
      .wr_addr_i(previous_q),
      .wr_data_i(this_q),
      .rd_addr_i(at),
      .rd_data_o(cell_link)
  );
  // The next frame of the queue, in the word of a frame's first cell.
  card_ram #(
      .WIDTH   ($bits(queued_t)),
      .DEPTH   (CELLS),
      .COLLIDES(1'b0)
  ) frame_links (
      .clk,
      .wr_en_i  (insert_q && linked[insert_out_q]),
      .wr_addr_i(place_t'(newest[insert_out_q])),
      .wr_data_i(insert_frame_q),
      .rd_addr_i(at),
      .rd_data_o(successor)
  );

  assign single = begins && begin_frame.single;
  assign out_o = out_q;
  assign sent_o = began_q;
  assign sent_queue_o = {out_q, slot_q};
  assign sent_length_o = length_q;
  assign release_o = ends_q;
  assign release_beats_o = beats_of(length_q, BYTES);
  assign release_pooled_o = pooled_q;

  always_ff @(posedge clk) begin
    if (begins) {length_q, pooled_q} <= {begin_frame.length, begin_frame.pooled};
    // The successor has the same queue.
    if (begins && !chains) begin
      out_q <= out;
      slot_q <= slot_chosen;
      for (int i = 0; i < OUTPUTS; i++) behind_q[i] <= OUT_BITS'(i) > out;
    end
    left_q <= left - 8'd1;
    give_at_q <= at;
    valid_o <= (begins || busy_q) && !rst;
    give_q <= (begins || busy_q) && !rst;
    began_q <= begins && !rst;
    ends_q <= (busy_q ? left == 8'd1 : single) && !rst;
    busy_q <= (busy_q ? left != 8'd1 : begins && !begin_frame.single) && !rst;
    if (rst) behind_q <= '0;
  end

endmodule
