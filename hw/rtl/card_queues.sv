// Queues of whole frames in cells of one memory: one queue per output and VE. Output PORTS is the
// host. Slot VES of an output holds the frames of no VE. See card_scheduler for an output's queues.
//
// A cell holds 64 bytes of one frame. The cells of a frame are a linked list, and so are the frames
// of a queue. A frame of `accept_i` has cells: card_admission counts them. A frame may leave while
// its later beats arrive. The outputs take turns by frame, round robin.
//
// Latency: 3 cycles from a frame's first beat to the first beat at the output if the queues are
// empty. One beat in and one beat out per cycle. The beats of a frame arrive without a gap.
// Invariant: each cell is free or in one frame.
//
// No frame's start waits for a choice: each output has its next frame in a register, and so has the
// memory (`next_q`). So an output starts a frame every third cycle. If a cell is one beat, it may
// also start the successor of the frame that it started one cycle ago, straight from the memory. So
// a queue sends a frame of one beat each cycle.
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
    input  length_t               length_i,
    input  frame_meta_t           meta_i,
    // With the first beat.
    input  logic                  accept_i,
    input  logic                  pooled_i,
    input  logic [QUEUE_BITS-1:0] queue_i,

    input  logic [OUTPUTS-1:0] room_i,  // the output has space for two of the longest frames

    output logic                  valid_o,
    output logic [  OUT_BITS-1:0] out_o,
    output logic                  last_o,
    output logic [ DATA_BITS-1:0] data_o,
    output logic [BYTES_BITS-1:0] bytes_o,
    output frame_meta_t           meta_o,

    output logic                  sent_o,           // a frame started one cycle ago
    output logic [QUEUE_BITS-1:0] sent_queue_o,
    output length_t               sent_length_o,
    output logic                  release_o,        // the last beat of a frame was read
    output logic [QUEUE_BITS-1:0] release_queue_o,
    output beats_t                release_cells_o,
    output logic                  release_pooled_o,

    input logic                  wr_weight_i,
    input logic [QUEUE_BITS-1:0] wr_queue_i,       // {output, slot}
    input logic [           7:0] wr_weight_data_i
);

  localparam int BYTES = DATA_BITS / 8;
  localparam int CELL_BYTES = cell_bytes(DATA_BITS);
  localparam int CELL_BEATS = CELL_BYTES / BYTES;
  localparam int CELL_BITS = $clog2(CELLS);
  localparam int BEAT_BITS = $clog2(CELL_BEATS);

  typedef logic [CELL_BITS-1:0] place_t;
  typedef logic [BEAT_BITS:0] beat_t;  // of a cell; the highest bit is 0
  typedef logic [CELL_BITS+BEAT_BITS-1:0] address_t;

  localparam beat_t LAST_BEAT = beat_t'(CELL_BEATS - 1);

  // ---------------------------------------------------------------------------------------------
  // Free cells: a ring in memory, which begins with all cells in order. As a frame's acceptance
  // comes late in the cycle, the next four cells are in registers, and a read fills them up later:
  // the first two registers are always valid.

  localparam int AHEAD = 4;

  logic take, take_q, give_q, initial_q, fill_q, fill_initial_q;
  place_t give_at_q, this_place, behind_this, free_read, free_rd_q, free_wr_q, fill_place_q;
  place_t [AHEAD-1:0] ahead_q;  // `this_place` is the first one
  logic [$clog2(AHEAD)-1:0] ahead_rd, ahead_rd_q, ahead_wr_q;

  assign this_place = ahead_q[ahead_rd];
  assign behind_this = ahead_q[ahead_rd+1'b1];
  assign ahead_rd = ahead_rd_q + 2'(take_q);

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
    ahead_rd_q <= ahead_rd;
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
  // Input. What is written at `this_place` counts only if the cell is taken. Frames get cells in the
  // order of the free ones, so the link to the next cell is written with a cell's first beat.

  logic accept, accepted_q, insert_q, opens;
  beat_t wr_beat_q;
  logic [OUT_BITS-1:0] insert_out_q;
  logic [SLOT_BITS-1:0] insert_slot_q;
  queued_t insert_frame_q, recent_q;  // `recent_q`: the one inserted one cycle ago

  assign accept = first_i ? accept_i : accepted_q;
  assign take = valid_i && accept && (last_i || wr_beat_q == LAST_BEAT);
  assign opens = valid_i && wr_beat_q == '0;

  always_ff @(posedge clk) begin
    if (valid_i) accepted_q <= accept;
    if (valid_i) wr_beat_q <= last_i || wr_beat_q == LAST_BEAT ? '0 : wr_beat_q + 1'b1;
    if (rst) wr_beat_q <= '0;
    insert_q <= valid_i && accept && first_i && !rst;
    {insert_out_q, insert_slot_q} <= queue_i;
    insert_frame_q <= '{
        at: cell_t'(this_place),
        length: length_i,
        single: last_i,
        pooled: pooled_i
    };
    recent_q <= insert_frame_q;
  end

  // ---------------------------------------------------------------------------------------------
  // The outputs' queues.

  logic [OUTPUTS-1:0] able, direct, start, chain, recent, start_chain, linked;
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
        .direct_o        (direct[i]),
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
  // The frame that starts next: that of the first output that can send behind the last one chosen,
  // else of the first one of all, else one that comes into empty queues.

  logic next_valid_q, begins, busy_q;
  logic [OUTPUTS-1:0] next_hot_q, behind_q, able_other, choice;
  logic [OUT_BITS-1:0] next_out_q, choice_out;
  logic [SLOT_BITS-1:0] next_slot_q, slot_chosen;
  queued_t next_q, chosen;

  assign begins = next_valid_q && !busy_q;
  assign start = begins && !rst ? next_hot_q : '0;
  assign able_other = able & ~next_hot_q;

  card_turn #(
      .LINES(OUTPUTS)
  ) turn (
      .waiting_i(able_other),
      .behind_i (behind_q),
      .next_o   (choice)
  );

  always_comb begin
    {slot_chosen, chosen} = able_other == '0 ? {insert_slot_q, insert_frame_q} : '0;
    choice_out = able_other == '0 ? insert_out_q : '0;
    for (int i = 0; i < OUTPUTS; i++) begin
      {slot_chosen, chosen} |= {slot[i], frame[i]} & {SLOT_BITS + $bits(queued_t) {choice[i]}};
      choice_out |= OUT_BITS'(i) & {OUT_BITS{choice[i]}};
    end
  end

  always_ff @(posedge clk) begin
    if (begins || !next_valid_q) begin
      next_valid_q <= able_other != '0 || direct != '0;
      next_hot_q <= able_other != '0 ? choice : direct;
      {next_out_q, next_slot_q, next_q} <= {choice_out, slot_chosen, chosen};
    end
    for (int i = 0; i < OUTPUTS; i++)
      if (next_valid_q) behind_q[i] <= OUT_BITS'(i) > next_out_q;
    if (rst) begin
      next_valid_q <= 1'b0;
      next_hot_q <= '0;
      behind_q <= '0;
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Output: one beat per cycle from the start of a frame on.

  logic chains, reads, began_q, closes, ends, ends_q;
  logic linked_begin;             // the frame in `successor` is next
  logic [OUT_BITS-1:0] out_q;
  logic [SLOT_BITS-1:0] slot_q;
  queued_t begin_frame;
  length_t length_q;              // of the frame that is read
  logic pooled_q;
  beats_t left_q, left;           // beats of the frame from this one on
  beat_t beat, beat_q;
  place_t at, at_q, cell_link;
  frame_meta_t meta_read, meta_q;

  assign chains = CELL_BEATS == 1 && chain != '0 && !next_valid_q && !busy_q;
  assign start_chain = chains && !rst ? chain : '0;
  assign linked_begin = chains && (recent & chain) == '0;
  assign reads = begins || chains || busy_q;

  always_comb begin
    begin_frame = next_q;
    if (chains) begin_frame = linked_begin ? successor : recent_q;
    at = place_t'(begin_frame.at);
    beat = '0;
    if (busy_q) begin
      at = CELL_BEATS == 1 ? cell_link : at_q;
      beat = beat_q;
    end
    left = began_q ? beats_t'((length_q - 1'b1) / length_t'(BYTES)) : left_q;
    ends = busy_q ? left == 8'd1 : begin_frame.single;
    closes = ends || beat == LAST_BEAT;
  end

  card_ram #(
      .WIDTH   (DATA_BITS),
      .DEPTH   (CELLS * CELL_BEATS),
      .COLLIDES(1'b0)
  ) beats (
      .clk,
      .wr_en_i  (valid_i),
      .wr_addr_i((address_t'(this_place) << BEAT_BITS) | address_t'(wr_beat_q)),
      .wr_data_i(data_i),
      .rd_addr_i((address_t'(at) << BEAT_BITS) | address_t'(beat)),
      .rd_data_o(data_o)
  );
  // The next cell of the frame.
  card_ram #(
      .WIDTH   (CELL_BITS),
      .DEPTH   (CELLS),
      .COLLIDES(1'b0)
  ) cell_links (
      .clk,
      .wr_en_i  (opens),
      .wr_addr_i(this_place),
      .wr_data_i(behind_this),
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
  card_ram #(
      .WIDTH   ($bits(frame_meta_t)),
      .DEPTH   (CELLS),
      .COLLIDES(1'b0)
  ) metas (
      .clk,
      .wr_en_i  (opens),
      .wr_addr_i(this_place),
      .wr_data_i(meta_i),
      .rd_addr_i(at),
      .rd_data_o(meta_read)
  );

  assign out_o = out_q;
  assign last_o = ends_q;
  assign bytes_o = ends_q ? BYTES_BITS'((length_q - 1'b1) % length_t'(BYTES)) + 1'b1
      : BYTES_BITS'(BYTES);
  assign meta_o = began_q ? meta_read : meta_q;
  assign sent_o = began_q;
  assign sent_queue_o = {out_q, slot_q};
  assign sent_length_o = length_q;

  always_ff @(posedge clk) begin
    if (begins || chains) {length_q, pooled_q} <= {begin_frame.length, begin_frame.pooled};
    // A successor has the same queue.
    if (begins) {out_q, slot_q} <= {next_out_q, next_slot_q};
    left_q <= left - 8'd1;
    beat_q <= beat == LAST_BEAT ? '0 : beat + 1'b1;
    at_q <= beat == LAST_BEAT ? cell_link : at;
    meta_q <= meta_o;
    give_at_q <= at;
    give_q <= reads && closes && !rst;
    valid_o <= reads && !rst;
    began_q <= (begins || chains) && !rst;
    ends_q <= reads && ends && !rst;
    busy_q <= reads && !ends && !rst;
    release_o <= ends_q && !rst;
    release_queue_o <= sent_queue_o;
    release_cells_o <= beats_of(length_q, CELL_BYTES);
    release_pooled_o <= pooled_q;
  end

endmodule
