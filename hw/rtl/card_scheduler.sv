// The queues of one output: lists of frames, one per slot, and the choice of the next frame by
// deficit round robin, by weights, in bytes.
//
// A turn of a queue adds QUANTUM bytes times its weight to its balance. The queue sends until the
// balance is below 0. The one or two frames that start before the balance has them, and what the
// last frame took too much, are a debt, which the next turn pays. The quantum exceeds the longest
// frame, so each turn sends a frame, and the debt stays below 4,096: no queue starves. Weight 0
// counts as 1. A queue that waits alone begins its next turn at once.
//
// A frame's successor in its queue is in the memory of card_queues, in the word of the frame's
// first cell. So a queue is its first frame and its newest one. The first one is in `heads` if the
// output left the queue with it, and in `firsts` if it came into an empty queue.
//
// Latency: 1 cycle from `insert_i` to `valid_o` if the output has no other frame; 1 cycle from one
// frame's start to the next one of the queue (`chain_o`), otherwise 2; 3 more if another queue is
// next.
// Invariant: a slot is in `waiting_q` if its queue has a frame that has not started.
module card_scheduler
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int SLOTS     = 64,  // a power of two
    localparam int SLOT_BITS = $clog2(SLOTS)
) (
    input logic clk,
    input logic rst,

    // A frame arrives. Its slot is there one cycle earlier. If it follows a frame that waits or is
    // the last one to have started, the caller writes it to the word of `newest_o`.
    input  logic [SLOT_BITS-1:0] early_slot_i,
    input  logic                 insert_i,
    input  logic [SLOT_BITS-1:0] insert_slot_i,
    input  queued_t              insert_frame_i,
    output logic                 linked_o,
    output cell_t                newest_o,

    // The next frame, and its start. `room_i`: the output has space for the longest frame, and for
    // the beats that are on their way there. It counts one cycle later.
    input  logic                 room_i,
    output logic                 valid_o,
    output logic                 direct_o,  // the frame that arrives will be in `frame_o`
    output queued_t              frame_o,
    output logic [SLOT_BITS-1:0] slot_o,
    input  logic                 start_i,

    // In the cycle after a start: `next_i` is the word of the frame that started. If `chain_o`, the
    // output may start the successor right then: `recent_o` says that it is the frame inserted one
    // cycle ago, else it is in `next_i`.
    input  queued_t next_i,
    input  queued_t recent_i,
    output logic    chain_o,
    output logic    recent_o,
    input  logic    start_chain_i,

    input logic                 wr_weight_i,
    input logic [SLOT_BITS-1:0] wr_slot_i,
    input logic [          7:0] wr_weight_data_i
);

  localparam int QUANTUM_BITS = 11;  // QUANTUM = 2,048

  typedef logic [SLOT_BITS-1:0] slot_t;
  typedef logic signed [QUANTUM_BITS+9:0] balance_t;
  typedef logic [11:0] debt_t;

  logic [SLOTS-1:0] waiting_q, fresh_q, owes_q, waiting_left, waiting_next;
  logic [SLOTS-1:0] behind_q, turn_hot, other_hot;  // masks: behind `turn_q`; `turn_q`
  logic have_q, have, able_q, room_q, started_q, pick_q, idle, goes_on;
  queued_t frame_q;
  slot_t turn_q;
  cell_t newest_q;                   // of the queue `turn_q`
  logic last;                        // `frame_q` is the newest
  logic more_q, recent_q;            // the frame that started has a successor
  length_t length_q;                 // of the frame that started
  balance_t balance_q;
  logic hits, empties, leaves_, stays;
  logic left_q;   // `leaves_` one cycle ago: the next frame of the queue is in `frame_q`
  logic spent;    // the balance is below 0
  logic alone_q;  // no other queue waits
  logic inserted_q;
  slot_t inserted_slot_q;
  cell_t inserted_at_q;
  logic choose, direct;
  logic follows_q;                   // `insert_slot_i` is `inserted_slot_q`
  logic other_valid_q;               // `other_q` waits; it is the one behind `turn_q`
  slot_t other_q, other;

  assign valid_o = able_q;
  assign direct_o = direct && room_i;
  assign frame_o = frame_q;
  assign slot_o = turn_q;
  assign recent_o = recent_q;
  assign stays = !spent || alone_q;
  assign chain_o = started_q && more_q && stays && room_q;
  assign goes_on = started_q && more_q && stays && !start_chain_i;
  assign spent = balance_q[$bits(balance_t)-1];
  assign hits = insert_i && insert_slot_i == turn_q;
  assign turn_hot = ~behind_q & {1'b1, behind_q[SLOTS-1:1]};
  assign empties = started_q && !more_q;
  assign leaves_ = started_q && more_q && !stays;
  assign idle = !have_q && !started_q && !pick_q;
  assign choose = idle && other_valid_q;
  // A frame into empty queues needs no choice.
  assign direct = idle && !other_valid_q && !inserted_q && insert_i;

  // ---------------------------------------------------------------------------------------------
  // Lists. The word that was written last comes from a register.

  cell_t newest_in, newest_out;
  queued_t first, head;
  logic fresh_read_q;
  logic waited_q;  // `insert_slot_i` is in `waiting_q`

  assign newest_o = follows_q ? inserted_at_q : newest_in;
  always_comb begin
    waiting_left = waiting_q & ~(empties ? turn_hot : '0);
    waiting_next = waiting_left;
    if (insert_i) waiting_next[insert_slot_i] = 1'b1;
  end
  assign linked_o = waited_q && !(empties && insert_slot_i == turn_q);

  card_ram #(
      .WIDTH   ($bits(cell_t)),
      .DEPTH   (SLOTS),
      .COLLIDES(1'b0)
  ) newest_in_ram (
      .clk,
      .wr_en_i  (insert_i),
      .wr_addr_i(insert_slot_i),
      .wr_data_i(insert_frame_i.at),
      .rd_addr_i(early_slot_i),
      .rd_data_o(newest_in)
  );
  card_ram #(
      .WIDTH   ($bits(cell_t)),
      .DEPTH   (SLOTS),
      .COLLIDES(1'b0)
  ) newest_out_ram (
      .clk,
      .wr_en_i  (insert_i),
      .wr_addr_i(insert_slot_i),
      .wr_data_i(insert_frame_i.at),
      .rd_addr_i(other_q),
      .rd_data_o(newest_out)
  );
  card_ram #(
      .WIDTH   ($bits(queued_t)),
      .DEPTH   (SLOTS),
      .COLLIDES(1'b0)
  ) firsts (
      .clk,
      .wr_en_i  (insert_i && !linked_o),
      .wr_addr_i(insert_slot_i),
      .wr_data_i(insert_frame_i),
      .rd_addr_i(other_q),
      .rd_data_o(first)
  );
  card_ram #(
      .WIDTH   ($bits(queued_t)),
      .DEPTH   (SLOTS),
      .COLLIDES(1'b0)
  ) heads (
      .clk,
      .wr_en_i  (left_q),
      .wr_addr_i(turn_q),
      .wr_data_i(frame_q),
      .rd_addr_i(other_q),
      .rd_data_o(head)
  );

  cell_t newest_picked;
  queued_t frame_picked, frame_other;  // `frame_other`: 0 if `next_i` is the frame
  logic next_is_last;
  assign newest_picked = inserted_q && inserted_slot_q == turn_q ? inserted_at_q : newest_out;
  assign frame_picked = fresh_read_q ? first : head;
  // The memory's word comes late.
  assign frame_other = !started_q ? insert_frame_i : recent_q ? recent_i : '0;
  assign last = frame_q.at == newest_q;
  assign next_is_last = recent_q || next_i.at == newest_q;
  assign have = have_q ? !start_i : pick_q || direct || goes_on;

  always_ff @(posedge clk) begin
    inserted_q <= insert_i;
    follows_q <= insert_i && insert_slot_i == early_slot_i;
    inserted_slot_q <= insert_slot_i;
    inserted_at_q <= insert_frame_i.at;
    fresh_read_q <= fresh_q[other_q];

    if (start_i) begin
      more_q <= !last || hits;
      recent_q <= last && hits;
      length_q <= frame_q.length;
    end else if (start_chain_i) begin
      more_q <= !next_is_last || hits;
      recent_q <= next_is_last && hits;
      length_q <= recent_q ? recent_i.length : next_i.length;
    end

    if (pick_q) begin
      frame_q <= frame_picked;
      newest_q <= newest_picked;
    end else if (!have_q) frame_q <= frame_other | (next_i & {$bits(queued_t) {started_q && !recent_q}});
    if (hits || direct) newest_q <= insert_frame_i.at;
    if (choose) turn_q <= other_q;
    if (direct) turn_q <= insert_slot_i;
    for (int i = 0; i < SLOTS; i++)
      if (choose || direct) behind_q[i] <= slot_t'(i) > (choose ? other_q : insert_slot_i);

    left_q <= leaves_ && !rst;
    started_q <= start_i || start_chain_i;
    pick_q <= choose;
    have_q <= have && !rst;
    able_q <= have && room_i && !rst;
    room_q <= room_i;
    waiting_q <= waiting_next;
    waited_q <= waiting_next[early_slot_i];
    if (leaves_) fresh_q[turn_q] <= 1'b0;
    if (insert_i && !linked_o) fresh_q[insert_slot_i] <= 1'b1;
    if (rst) begin
      started_q <= 1'b0;
      pick_q <= 1'b0;
      waiting_q <= '0;
      inserted_q <= 1'b0;
      turn_q <= '0;
      behind_q <= ~SLOTS'(1);
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Balance, debts, and the first waiting queue behind `turn_q`, else the first one of all.

  logic [7:0] weight;
  debt_t debt;
  logic owes_read_q, others, same, same_q, same_now, settles_q, renews;
  balance_t top_up_q, owed_q;
  slot_t balance_slot;

  assign same = (choose ? other_q : insert_slot_i) == turn_q;
  assign balance_slot = choose ? other_q : early_slot_i;

  card_ram #(
      .WIDTH(8),
      .DEPTH(SLOTS)
  ) weights (
      .clk,
      .wr_en_i  (wr_weight_i),
      .wr_addr_i(wr_slot_i),
      .wr_data_i(wr_weight_data_i),
      .rd_addr_i(balance_slot),
      .rd_data_o(weight)
  );
  card_ram #(
      .WIDTH   ($bits(debt_t)),
      .DEPTH   (SLOTS),
      .COLLIDES(1'b0)
  ) debts (
      .clk,
      .wr_en_i  (choose || direct),
      .wr_addr_i(turn_q),
      .wr_data_i(debt_t'(-balance_q)),
      .rd_addr_i(balance_slot),
      .rd_data_o(debt)
  );

  card_turn #(
      .LINES(SLOTS)
  ) turn (
      .waiting_i(waiting_q),
      .behind_i (behind_q),
      .next_o   (other_hot)
  );

  always_comb begin
    other = '0;
    for (int i = 0; i < SLOTS; i++) other |= slot_t'(i) & {SLOT_BITS{other_hot[i]}};
  end
  assign others = (waiting_q & ~turn_hot) != '0;
  assign same_now = pick_q ? same_q : same;
  // The next turn of a queue that is alone.
  assign renews = more_q && spent && alone_q;

  always_ff @(posedge clk) begin
    other_q <= other;
    // `other_q` is the slot `turn_q` only if no other one waits.
    other_valid_q <= (others || ((waiting_q & turn_hot) != '0 && !empties)) && !rst;
    same_q <= same;
    alone_q <= !others;
    owes_read_q <= owes_q[balance_slot];
    // A turn's balance is there one cycle after the choice, before the turn's first frame started.
    if (pick_q || direct) begin
      top_up_q <= balance_t'({weight[7:1], weight[0] || weight == '0, QUANTUM_BITS'(0)});
      owed_q <= same_now ? balance_q : owes_read_q ? -balance_t'({1'b0, debt}) : '0;
    end
    // A queue that became empty within its turn goes on with it.
    settles_q <= (pick_q || direct) && !(same_now && !spent);
    if (settles_q || started_q)
      balance_q <= (settles_q ? owed_q : balance_q)
          + (settles_q || renews ? top_up_q : '0)
          - (settles_q ? '0 : balance_t'({1'b0, length_q}));
    if (choose || direct) owes_q[turn_q] <= spent;
    if (rst) begin
      owes_q <= '0;
      balance_q <= '0;
      settles_q <= 1'b0;
    end
  end

endmodule
