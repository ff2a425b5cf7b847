// The cells of the queues. A frame takes cells of its queue only within the queue's guarantee, or
// cells of the pool only within the queue's share and the pool. The queues never hold more than
// CELLS, and no count overflows or underflows. If pool + guarantees <= CELLS and they stay as they
// are (`steady_i`), a queue always gets its guaranteed cells.
//
// The proof follows any queue. `own_q` and `pooled_q` are its cells: those of its frames that were
// accepted and not yet released. A decision takes the cells that were released in the last two
// cycles as not yet free. As the proof shows of any queue that its own cells are within its
// guarantee, it assumes this of the sum of all others.
//
// The proof has five parts: the sums, the memories, the registers of a decision, the decision, and
// the guarantee. A part may assume what those before have shown.
`define PROVE(part, fact) \
  begin \
    if (PART == part) assert (fact); \
    else if (PART > part) assume (fact); \
  end
module admission
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS  = 512,
    parameter  int PORTS      = 4,
    parameter  int VES        = 32,
    parameter  int CELLS      = 2040,
    parameter  int PART       = 1,
    localparam int QUEUE_BITS = $clog2(PORTS + 1) + $clog2(VES + 1)
) (
    input logic                         clk,
    input logic                         rst,
    input logic        [QUEUE_BITS-1:0] queue_i,         // the one that the proof follows
    input logic                         steady_i,
    input logic        [          15:0] others_i,        // pool, and guarantees of all other queues
    input logic                         valid_i,
    input header_out_t                  header_i,
    input logic                         take_i,
    input logic                         release_i,
    input logic        [QUEUE_BITS-1:0] release_queue_i,
    input beats_t                       release_beats_i,
    input logic                         release_pooled_i,
    input logic        [          15:0] pool_i,
    input logic                         wr_quota_i,
    input logic        [QUEUE_BITS-1:0] wr_queue_i,
    input quota_t                       wr_quota_data_i
);

  typedef logic [15:0] count_t;
  typedef logic [$clog2(CELLS+1):0] used_t;

  logic ready, queued, unqueued;
  card_admission #(
      .DATA_BITS(DATA_BITS),
      .PORTS    (PORTS),
      .VES      (VES),
      .CELLS    (CELLS)
  ) dut (
      .clk,
      .rst,
      .ready_o   (ready),
      .valid_i,
      .header_i,
      .take_i,
      .accept_o  (),
      .pooled_o  (),
      .queue_o   (),
      .dropped_o (),
      .unqueued_o(unqueued),
      .queued_o  (queued),
      .meta_o    (),
      .token_o   (),
      .release_i,
      .release_queue_i,
      .release_beats_i,
      .release_pooled_i,
      .pool_i,
      .wr_quota_i,
      .wr_queue_i,
      .wr_quota_data_i
  );

  // Decision on a frame.
  logic decides, accepts, takes_own, mine, releases_mine;
  beats_t beats;
  quota_t quota;
  assign decides = dut.valid_q[2] && !dut.drop_q[2] && dut.known_q[2];
  assign accepts = dut.accept;
  assign takes_own = dut.own_fits;
  assign mine = dut.queue_q[2] == queue_i;
  assign beats = dut.beats_q[2];
  assign releases_mine = release_i && release_queue_i == queue_i;
  assign quota = quota_t'(dut.quotas.word_q);

  logic started_q = 1'b0, steady_q, queued_q, unqueued_q;
  logic [QUEUE_BITS-1:0] queue_q;
  count_t pool_q, others_q;
  used_t own_q, pooled_q;       // cells of the queue
  // Cells of the pool; these and own ones of other queues; all.
  used_t pool_used_q, not_own_q, used_q;
  quota_t [2:1] quota_q;         // from the cycle in which the frame came
  beats_t [2:1] lag_own_q, lag_pooled_q;  // released in the cycles before
  beats_t last_beats_q, last_own_q, last_pooled_q;  // taken in the cycle before
  beats_t last_pool_q;                              // of any queue from the pool
  used_t seen_own_q, seen_pooled_q, seen_pool_q;    // what the decision counts, but for the last
  logic [QUEUE_BITS-1:0] wrote_queue_q;             // of the frame that was decided before

  function automatic beats_t if_true(input logic condition, input beats_t cells);
    return condition ? cells : '0;
  endfunction

  beats_t more_own, more_pooled, less, less_own, less_pooled;
  assign more_own = if_true(accepts && mine && takes_own, beats);
  assign more_pooled = if_true(accepts && mine && !takes_own, beats);
  assign less = if_true(release_i, release_beats_i);
  assign less_own = if_true(releases_mine && !release_pooled_i, release_beats_i);
  assign less_pooled = if_true(releases_mine && release_pooled_i, release_beats_i);

  always_ff @(posedge clk) begin
    started_q <= 1'b1;
    {queue_q, steady_q, pool_q, others_q} <= {queue_i, steady_i, pool_i, others_i};
    queued_q <= accepts && !rst;
    unqueued_q <= dut.valid_q[2] && !dut.drop_q[2] && !accepts && !rst;
    quota_q <= {quota_q[1], quota};
    lag_own_q <= {lag_own_q[1], less_own};
    lag_pooled_q <= {lag_pooled_q[1], less_pooled};
    last_beats_q <= beats;
    last_own_q <= more_own;
    last_pooled_q <= more_pooled;
    last_pool_q <= if_true(accepts && !takes_own && !rst, beats);
    seen_pool_q <= pool_used_q;
    wrote_queue_q <= dut.queue_q[2];
    seen_own_q <= own_q + used_t'(lag_own_q[1]);
    seen_pooled_q <= pooled_q + used_t'(lag_pooled_q[1]);
    own_q <= own_q - used_t'(less_own) + used_t'(more_own);
    pooled_q <= pooled_q - used_t'(less_pooled) + used_t'(more_pooled);
    not_own_q <= not_own_q
        - used_t'(if_true(release_i && (release_pooled_i || !releases_mine), release_beats_i))
        + used_t'(if_true(accepts && (!takes_own || !mine), beats));
    used_q <= used_q - used_t'(less) + used_t'(if_true(accepts, beats));
    pool_used_q <= pool_used_q - used_t'(if_true(release_i && release_pooled_i, release_beats_i))
        + used_t'(if_true(accepts && !takes_own, beats));
    if (rst) {own_q, pooled_q, used_q, pool_used_q, not_own_q, lag_own_q, lag_pooled_q} <= '0;
  end

  // The driver and the queues.
  always_comb begin
    assume (dut.quotas.row == queue_i && dut.taken_ram.row == queue_i);
    assume (dut.freed_in.row == queue_i && dut.freed_out.row == queue_i);
    assume ({1'b0, queue_i} < (QUEUE_BITS + 1)'(dut.QUEUES));
    if (!started_q) assume (rst);
    else begin
      assume (queue_i == queue_q && steady_i == steady_q);
      if (steady_i) assume (!wr_quota_i && pool_i == pool_q && others_i == others_q);
    end
    if (steady_i) begin
      assume (18'(quota.guarantee) + 18'(others_i) <= 18'(CELLS));
      assume (count_t'(not_own_q) <= others_i);
    end
    if (valid_i) assume (ready);
    assume (header_i.length != '0 && 32'(header_i.length) <= MAX_LENGTH);
    if (release_i) begin
      assume (release_beats_i != '0);
      if (releases_mine)
        assume (used_t'(release_beats_i) <= (release_pooled_i ? pooled_q : own_q));
      else if (release_pooled_i) assume (pooled_q + used_t'(release_beats_i) <= pool_used_q);
      else assume (pool_used_q + used_t'(release_beats_i) <= not_own_q);
    end
  end

  always_comb
    if (started_q) begin
      `PROVE(1, queued == queued_q && unqueued == unqueued_q)
      // No count overflows or underflows.
      `PROVE(1, used_q <= used_t'(CELLS))
      `PROVE(1, pooled_q <= pool_used_q && pool_used_q <= not_own_q && not_own_q <= used_q)
      `PROVE(1, used_q == not_own_q + own_q && own_q <= used_q)
      `PROVE(1, dut.free_q == count_t'(used_t'(CELLS) - used_q))
      `PROVE(1, dut.pool_used_q == count_t'(pool_used_q))
      // A decision.
      if (accepts) `PROVE(1, decides && used_q + used_t'(beats) <= used_t'(CELLS))
      if (dut.valid_q[2]) begin
        `PROVE(1, dut.beats_after_q == 9'(beats) + 9'(last_beats_q))
        `PROVE(1, dut.pool_rest_q == 17'(pool_q) - 17'(seen_pool_q))
        `PROVE(1, last_pool_q == if_true(dut.wrote_q && dut.wrote_pooled_q, last_beats_q))
        `PROVE(1, pool_used_q <= seen_pool_q + used_t'(last_pool_q))
      end
      if (accepts && !takes_own) `PROVE(1, 18'(pool_used_q) + 18'(beats) <= 18'(pool_q))
      if (decides && mine) begin
        `PROVE(4, takes_own == (18'(seen_own_q) + 18'(last_own_q) + 18'(beats)
            <= 18'(quota_q[2].guarantee)))
        if (accepts && takes_own)
          `PROVE(4, 18'(own_q) + 18'(beats) <= 18'(quota_q[2].guarantee))
        if (accepts && !takes_own)
          `PROVE(4, 18'(pooled_q) + 18'(beats) <= 18'(quota_q[2].share))
        if (steady_i && takes_own) `PROVE(5, accepts)
      end
      if (steady_i) begin
        `PROVE(5, count_t'(own_q) <= quota.guarantee)
        `PROVE(5, count_t'(pool_used_q) <= pool_i)
      end
    end

  // The memories hold the cells taken and freed, modulo 2^16. A release takes a cycle to its
  // memory.
  typedef struct packed {
    count_t own;
    count_t pooled;
  } cells_t;
  cells_t taken, freed, written;
  assign taken = dut.taken_ram.word_q;
  assign freed = dut.freed_out.word_q;
  assign written = dut.written_q;
  always_comb
    if (started_q) begin
      if (ready || dut.clear_q > queue_i) begin
        `PROVE(2, dut.freed_in.word_q == freed)
        `PROVE(2, taken.own == count_t'(own_q) + count_t'(lag_own_q[1]) + freed.own)
        `PROVE(2, taken.pooled == count_t'(pooled_q) + count_t'(lag_pooled_q[1]) + freed.pooled)
      end
      // No cells are taken or freed before the counts are cleared.
      if (!ready) begin
        `PROVE(1, used_q == '0 && lag_own_q == '0 && lag_pooled_q == '0)
        `PROVE(1, dut.valid_q == '0 && !dut.freeing_q && !dut.wrote_q)
      end
      // Releases.
      `PROVE(2, lag_own_q[1] == if_true(dut.freeing_q && dut.queue_freeing_q == queue_i
          && !dut.pooled_freeing_q, dut.beats_freeing_q))
      `PROVE(2, lag_pooled_q[1] == if_true(dut.freeing_q && dut.queue_freeing_q == queue_i
          && dut.pooled_freeing_q, dut.beats_freeing_q))
      if (dut.freeing_q && dut.queue_freeing_q == queue_i) `PROVE(2, dut.freed_old == freed)
      // A frame in its second cycle.
      if (dut.valid_q[1]) begin
        `PROVE(2, dut.same_q[1] == (dut.valid_q[2] && dut.queue_q[2] == dut.queue_q[1]))
        if (steady_i) `PROVE(3, quota_q[1] == quota)
        `PROVE(2, dut.again_q == (wrote_queue_q == dut.queue_q[1]))
        if (dut.queue_q[1] == queue_i) begin
          `PROVE(2, dut.taken == taken && dut.quota == quota_q[1])
          `PROVE(2, dut.freed == freed)
        end
      end
      // In its third cycle, that of the decision.
      if (dut.wrote_q) begin
        if (wrote_queue_q == queue_i) `PROVE(2, written == taken)
        `PROVE(3, last_own_q == if_true(wrote_queue_q == queue_i && !dut.wrote_pooled_q,
                                      last_beats_q))
        `PROVE(3, last_pooled_q == if_true(wrote_queue_q == queue_i && dut.wrote_pooled_q,
                                         last_beats_q))
      end
      if (dut.valid_q[2]) begin
        if (steady_i) `PROVE(3, quota_q[2] == quota)
        if (!dut.wrote_q) `PROVE(3, last_own_q == '0 && last_pooled_q == '0)
        if (mine) begin
          if (dut.wrote_q) `PROVE(2, dut.same_q[2] == (wrote_queue_q == queue_i))
          `PROVE(2, dut.taken_now == taken)
          `PROVE(3, dut.own_rest_q == 17'(quota_q[2].guarantee) - 17'(seen_own_q))
          `PROVE(3, dut.pooled_rest_q == 17'(quota_q[2].share) - 17'(seen_pooled_q))
          `PROVE(3, seen_own_q + used_t'(last_own_q) == own_q + used_t'(lag_own_q[1])
              + used_t'(lag_own_q[2]))
          `PROVE(3, seen_pooled_q + used_t'(last_pooled_q) == pooled_q + used_t'(lag_pooled_q[1])
              + used_t'(lag_pooled_q[2]))
        end
      end
    end

endmodule
