// Decides which frames the queues take, and counts their cells.
//
// A queue may hold `guarantee` cells of its own, and `share` cells of the common pool while the
// pool has them. A frame takes all its cells from one of the two, from its own first. The driver
// keeps pool + guarantees <= CELLS. A new quota applies from the next frame on.
//
// Latency: `accept_o` has the decision 2 cycles after `valid_i`, or later, until `take_i` takes it
// for the frame's first beat; the events come 3 cycles after `valid_i`. One frame per cycle.
// Decisions are in the order of the frames, and wait in a FIFO. A reset clears the counts: for
// QUEUES cycles, `ready_o` is 0 and no frame may come.
// Invariant: own[queue] <= guarantee and pooled[queue] <= share when a frame is accepted, and
// free_q >= 0 is CELLS less the cells of all frames accepted and not yet released.
//
// A decision needs those of the two frames before. The one of 2 cycles ago is on its way to the
// memory and replaces what was read; for the one of 1 cycle ago, both results are computed.
module card_admission
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS    = 512,
    parameter  int PORTS        = 4,
    parameter  int VES          = 32,
    parameter  int CELLS        = 2040,
    parameter  int RESULTS      = 128,
    parameter  bit SINGLE_QUEUE = 1'b0,              // one queue per output for all VEs
    localparam int OUT_BITS     = $clog2(PORTS + 1),
    localparam int SLOT_BITS    = $clog2(VES + 1),
    localparam int QUEUE_BITS   = OUT_BITS + SLOT_BITS
) (
    input  logic        clk,
    input  logic        rst,
    output logic        ready_o,
    input  logic        valid_i,
    // The bytes are elsewhere.
    // verilator lint_off UNUSEDSIGNAL
    input  header_out_t header_i,
    // verilator lint_on UNUSEDSIGNAL

    input  logic                  take_i,
    output logic                  accept_o,
    output logic                  pooled_o,  // its cells are the pool's
    output logic [QUEUE_BITS-1:0] queue_o,   // {output, slot}

    output logic        dropped_o,   // by the verdict
    output logic        unqueued_o,  // no cells or no such port
    output logic        queued_o,
    output frame_meta_t meta_o,      // of these events
    output token_t      token_o,

    input logic                  release_i,  // a frame left
    input logic [QUEUE_BITS-1:0] release_queue_i,
    input beats_t                release_beats_i,  // cells
    input logic                  release_pooled_i,

    input logic [          15:0] pool_i,
    input logic                  wr_quota_i,
    input logic [QUEUE_BITS-1:0] wr_queue_i,
    input quota_t                wr_quota_data_i
);

  localparam int CELL_BYTES = cell_bytes(DATA_BITS);
  localparam int QUEUES = (PORTS + 1) << SLOT_BITS;

  typedef logic [QUEUE_BITS-1:0] queue_t;
  typedef logic [15:0] count_t;
  typedef struct packed {
    count_t own;
    count_t pooled;
  } cells_t;
  // Cells that a queue may still take, by its quota; below 0 if the quota shrank.
  typedef logic signed [16:0] rest_t;

  // Queue of the frame.
  logic known;
  queue_t queue;
  assign known = header_i.port == HOST || {1'b0, header_i.port} < 4'(PORTS);
  assign queue = {
    header_i.port == HOST || !known ? OUT_BITS'(PORTS) : OUT_BITS'(header_i.port),
    SINGLE_QUEUE ? SLOT_BITS'(0) : header_i.owned ? SLOT_BITS'(header_i.ve) : SLOT_BITS'(VES)
  };

  // ---------------------------------------------------------------------------------------------
  // Cells released so far. A reset clears these counts and those of the cells taken.

  logic clearing_q, wr_freed, freeing_q, repeated_q;
  queue_t clear_q, freed_queue;
  beats_t beats_freeing_q;
  logic pooled_freeing_q;
  queue_t queue_freeing_q;
  cells_t freed_read, freed_before_q, freed_old, freed_new, freed_in_read, freed;
  logic freed_meets_q;  // `freed_in` was read while it was written

  assign ready_o = !clearing_q;
  assign wr_freed = clearing_q || freeing_q;
  assign freed_queue = clearing_q ? clear_q : queue_freeing_q;
  assign freed_old = repeated_q ? freed_before_q : freed_read;
  always_comb begin
    freed_new = freed_old;
    if (pooled_freeing_q) freed_new.pooled = freed_old.pooled + count_t'(beats_freeing_q);
    else freed_new.own = freed_old.own + count_t'(beats_freeing_q);
    if (clearing_q) freed_new = '0;
  end

  card_ram #(
      .WIDTH   ($bits(cells_t)),
      .DEPTH   (QUEUES),
      .COLLIDES(1'b0)
  ) freed_out (
      .clk,
      .wr_en_i  (wr_freed),
      .wr_addr_i(freed_queue),
      .wr_data_i(freed_new),
      .rd_addr_i(release_queue_i),
      .rd_data_o(freed_read)
  );
  card_ram #(
      .WIDTH   ($bits(cells_t)),
      .DEPTH   (QUEUES),
      .COLLIDES(1'b0)
  ) freed_in (
      .clk,
      .wr_en_i  (wr_freed),
      .wr_addr_i(freed_queue),
      .wr_data_i(freed_new),
      .rd_addr_i(queue),
      .rd_data_o(freed_in_read)
  );
  assign freed = freed_meets_q ? freed_before_q : freed_in_read;

  always_ff @(posedge clk) begin
    freeing_q <= release_i && !rst;
    queue_freeing_q <= release_queue_i;
    beats_freeing_q <= release_beats_i;
    pooled_freeing_q <= release_pooled_i;
    repeated_q <= freeing_q && queue_freeing_q == release_queue_i;
    freed_before_q <= freed_new;
    freed_meets_q <= wr_freed && freed_queue == queue;
    clear_q <= clear_q + 1'b1;
    if (clear_q == queue_t'(QUEUES - 1)) clearing_q <= 1'b0;
    if (rst) begin
      clearing_q <= 1'b1;
      clear_q <= '0;
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Cycle 0: counts and quota. Cycle 1: what the quota leaves. Cycle 2: decision.

  logic [2:1] valid_q, drop_q, known_q, same_q;  // `same_q`: queue of the frame right before
  queue_t [2:1] queue_q;
  beats_t [2:1] beats_q;  // cells
  cells_t taken_read, taken, taken_q, taken_now, taken_new, written_q;
  quota_t quota;
  rest_t own_rest_q, pooled_rest_q, pool_rest_q;
  logic [8:0] beats_after_q;  // with those of the frame before
  logic own_fits, pooled_fits, pool_fits, free_fits, accept;
  logic wrote_q, wrote_pooled_q;
  logic again_q;  // queue of the frame 2 cycles before
  count_t pool_used_q, pool_kept, free_q, free_more;

  card_ram #(
      .WIDTH($bits(quota_t)),
      .DEPTH(QUEUES)
  ) quotas (
      .clk,
      .wr_en_i  (wr_quota_i && {1'b0, wr_queue_i} < (QUEUE_BITS + 1)'(QUEUES)),
      .wr_addr_i(wr_queue_i),
      .wr_data_i(wr_quota_data_i),
      .rd_addr_i(queue),
      .rd_data_o(quota)
  );
  card_ram #(
      .WIDTH   ($bits(cells_t)),
      .DEPTH   (QUEUES),
      .COLLIDES(1'b0)
  ) taken_ram (
      .clk,
      .wr_en_i  (clearing_q || accept),
      .wr_addr_i(clearing_q ? clear_q : queue_q[2]),
      .wr_data_i(clearing_q ? '0 : taken_new),
      .rd_addr_i(queue),
      .rd_data_o(taken_read)
  );
  assign taken = wrote_q && again_q ? written_q : taken_read;

  // The frame's cells with those of the frame before, if that one took its cells here.
  function automatic logic fits(input rest_t rest, input logic also);
    return also ? rest >= rest_t'({1'b0, beats_after_q}) : rest >= rest_t'({1'b0, beats_q[2]});
  endfunction

  always_comb begin
    own_fits = fits(own_rest_q, same_q[2] && wrote_q && !wrote_pooled_q);
    pooled_fits = fits(pooled_rest_q, same_q[2] && wrote_q && wrote_pooled_q);
    pool_fits = fits(pool_rest_q, wrote_q && wrote_pooled_q);
    free_fits = count_t'(beats_q[2]) <= free_q;
    accept = valid_q[2] && !drop_q[2] && known_q[2] && free_fits
        && (own_fits || (pooled_fits && pool_fits));
    taken_now = same_q[2] && wrote_q ? written_q : taken_q;
    taken_new = taken_now;
    if (own_fits) taken_new.own = taken_now.own + count_t'(beats_q[2]);
    else taken_new.pooled = taken_now.pooled + count_t'(beats_q[2]);
    pool_kept = pool_used_q - (release_i && release_pooled_i ? count_t'(release_beats_i) : '0);
    free_more = free_q + (release_i ? count_t'(release_beats_i) : '0);
  end

  always_ff @(posedge clk) begin
    valid_q <= rst ? '0 : {valid_q[1], valid_i};
    drop_q <= {drop_q[1], header_i.verdict[3]};
    known_q <= {known_q[1], known};
    queue_q <= {queue_q[1], queue};
    beats_q <= {beats_q[1], beats_of(header_i.length, CELL_BYTES)};
    same_q <= {same_q[1], valid_q[1] && queue_q[1] == queue};
    again_q <= queue_q[2] == queue;

    own_rest_q <= rest_t'({1'b0, quota.guarantee}) - rest_t'({1'b0, taken.own - freed.own});
    pooled_rest_q <= rest_t'({1'b0, quota.share}) - rest_t'({1'b0, taken.pooled - freed.pooled});
    taken_q <= taken;
    // Without the frame of 1 cycle ago, and without what was released 1 cycle ago.
    pool_rest_q <= rest_t'({1'b0, pool_i}) - rest_t'({1'b0, pool_used_q});
    beats_after_q <= 9'(beats_q[1]) + 9'(beats_q[2]);

    wrote_q <= accept && !rst;
    wrote_pooled_q <= !own_fits;
    written_q <= taken_new;
    if (rst) begin
      pool_used_q <= '0;
      free_q <= count_t'(CELLS);
    end else begin
      pool_used_q <= accept && !own_fits ? pool_kept + count_t'(beats_q[2]) : pool_kept;
      free_q <= accept ? free_more - count_t'(beats_q[2]) : free_more;
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Decisions on their way to the first beats, and the events.

  typedef struct packed {
    frame_meta_t meta;
    token_t      token;
  } event_t;

  event_t [2:1] event_q;
  logic decided, waits;
  // The credits of card_store keep space.
  // verilator lint_off UNUSEDSIGNAL
  logic room;
  // verilator lint_on UNUSEDSIGNAL
  logic [QUEUE_BITS+1:0] decision, oldest;
  assign decided = valid_q[2] && !drop_q[2];
  assign decision = {accept, !own_fits, queue_q[2]};
  assign {accept_o, pooled_o, queue_o} = waits ? oldest : decision;

  card_fifo #(
      .WIDTH(QUEUE_BITS + 2),
      .DEPTH(RESULTS)
  ) decisions (
      .clk,
      .rst,
      .push_i (decided && (waits || !take_i)),
      .data_i (decision),
      .room_o (room),
      .valid_o(waits),
      .data_o (oldest),
      .pop_i  (take_i && waits)
  );

  always_ff @(posedge clk) begin
    event_q[1] <= '{
        meta: '{
            verdict: header_i.verdict,
            group: header_i.group,
            owned: header_i.owned,
            ve: header_i.ve,
            vport: header_i.vport,
            segment: header_i.segment
        },
        token: header_i.token
    };
    event_q[2] <= event_q[1];
    {meta_o, token_o} <= event_q[2];
    dropped_o <= valid_q[2] && drop_q[2] && !rst;
    unqueued_o <= decided && !accept && !rst;
    queued_o <= decided && accept && !rst;
  end

endmodule
