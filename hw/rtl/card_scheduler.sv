// Chooses the frame that leaves card_queues next: round robin over the outputs, and on each output
// deficit round robin over its queues, by weights, in bytes.
//
// A turn of a queue adds QUANTUM bytes times its weight to its balance. It sends while the balance
// is positive. What the last frame took too much is a debt, which the next turn pays. The quantum
// exceeds the longest frame, so each turn sends a frame: no queue starves. Weight 0 counts as 1.
//
// Latency: none; the choice is combinational. One frame per cycle.
module card_scheduler
  import card_pkg::*;
#(
    parameter  int PORTS      = 4,
    parameter  int VES        = 32,
    localparam int OUTPUTS    = PORTS + 1,
    localparam int SLOT_BITS  = $clog2(VES + 1),
    localparam int SLOTS      = 1 << SLOT_BITS,
    localparam int OUT_BITS   = $clog2(OUTPUTS),
    localparam int QUEUE_BITS = OUT_BITS + SLOT_BITS
) (
    input  logic                             clk,
    input  logic                             rst,
    input  logic    [OUTPUTS-1:0][SLOTS-1:0] waiting_i,
    input  logic    [OUTPUTS-1:0]            room_i,    // the output has space for a frame
    input  logic                             idle_i,
    output logic                             start_o,
    output logic    [   OUT_BITS-1:0]        out_o,
    output logic    [  SLOT_BITS-1:0]        slot_o,
    input  length_t                          length_i,  // of the frame that the outputs choose

    input logic                  wr_weight_i,
    input logic [QUEUE_BITS-1:0] wr_queue_i,  // {output, slot}
    input logic [           7:0] wr_weight_data_i
);

  localparam int QUANTUM_BITS = 11;  // QUANTUM = 2,048
  localparam int QUEUES = OUTPUTS << SLOT_BITS;

  typedef logic [QUEUE_BITS-1:0] queue_t;
  typedef logic signed [QUANTUM_BITS+9:0] balance_t;

  logic [7:0] weight_q[QUEUES];
  length_t debt_q[QUEUES];
  logic [QUEUES-1:0] owes_q;              // `debt_q` is valid
  logic [OUTPUTS-1:0][SLOT_BITS-1:0] turn_q;
  balance_t [OUTPUTS-1:0] balance_q;      // of the queue whose turn it is
  logic [OUT_BITS-1:0] last_out_q;

  logic [SLOT_BITS-1:0] turn, other;
  logic [SLOTS-1:0] waiting;
  logic [OUTPUTS-1:0] able;
  logic stay;
  balance_t balance, start_balance, top_up, owed;
  logic [7:0] weight;

  always_comb begin
    out_o = last_out_q;
    for (int i = 0; i < OUTPUTS; i++) able[i] = room_i[i] && waiting_i[i] != '0;
    // First output behind the last one that can send, else the first one of all.
    for (int i = OUTPUTS - 1; i >= 0; i--) if (able[i]) out_o = OUT_BITS'(i);
    for (int i = OUTPUTS - 1; i >= 0; i--)
      if (able[i] && OUT_BITS'(i) > last_out_q) out_o = OUT_BITS'(i);
    start_o = able != '0 && idle_i && !rst;
    waiting = waiting_i[out_o];
    turn = turn_q[out_o];
    balance = balance_q[out_o];
    stay = waiting[turn] && balance > 0;
    // First waiting queue behind `turn`, else the first one of all.
    other = '0;
    for (int i = SLOTS - 1; i >= 0; i--) if (waiting[i]) other = SLOT_BITS'(i);
    for (int i = SLOTS - 1; i >= 0; i--)
      if (waiting[i] && SLOT_BITS'(i) > turn) other = SLOT_BITS'(i);
    slot_o = stay ? turn : other;

    weight = weight_q[{out_o, slot_o}];
    top_up = balance_t'({weight == '0 ? 8'd1 : weight, QUANTUM_BITS'(0)});
    if (slot_o == turn) owed = balance > 0 ? '0 : balance;
    else owed = owes_q[{out_o, slot_o}] ? -balance_t'({1'b0, debt_q[{out_o, slot_o}]}) : '0;
    start_balance = stay ? balance : top_up + owed;
  end

  always_ff @(posedge clk) begin
    if (start_o && slot_o != turn)
      debt_q[{out_o, turn}] <= balance > 0 ? '0 : length_t'(-balance);
    if (wr_weight_i && wr_queue_i < queue_t'(QUEUES)) weight_q[wr_queue_i] <= wr_weight_data_i;
    if (rst) begin
      owes_q <= '0;
      turn_q <= '0;
      balance_q <= '0;
      last_out_q <= '0;
    end else if (start_o) begin
      if (slot_o != turn) owes_q[{out_o, turn}] <= 1'b1;
      turn_q[out_o] <= slot_o;
      balance_q[out_o] <= start_balance - balance_t'({1'b0, length_i});
      last_out_q <= out_o;
    end
  end

endmodule
