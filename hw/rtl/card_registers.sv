// Registers of the card: AXI-Lite to the write bus of card_header, to the queues, and to the
// counters. docs/hardware.md has the map. The page in an address names the virtual environment
// (VE); no data does, except in the super page's TARGET.
//
// Latency: a write answers WRITE_CYCLES + 2 cycles after its address and data, a read 4 cycles
// after its address. A write enters every second cycle. After a super page's write, no write enters
// before its answer. A table has an entry before its write is answered.
// A refused write has no effect and answers SLVERR, as does a read of an address without a readable
// register.
// Invariants: the page of a VE changes only that VE's words of WRITE_DATA, counter of refused
// writes, and tables from TABLE_VE_OPTIONS on. No input of the bus reaches an output in the same
// cycle.
module card_registers
  import card_pkg::*;
  import card_frame_pkg::*;
  import card_lpm_pkg::*;
  import card_registers_pkg::*;
#(
    parameter  int DATA_BITS     = 512,
    parameter  int PORTS         = 4,
    parameter  int VES           = 32,
    parameter  int CELLS         = 2048,
    parameter  int VMACS         = 1024,
    parameter  int LEVELS        = 20,
    parameter  int NODES         = 8192,
    parameter  int LEAVES        = 65536,
    parameter  int EXT_FROM      = 21,
    parameter  int EXT_LATENCY   = 4,
    parameter  int GROUPS        = 8192,
    parameter  int BUCKET_BLOCKS = 64,
    parameter  int HOPS          = 8192,
    parameter  int ARPS          = 16384,
    localparam int OUT_BITS      = $clog2(PORTS + 1),
    localparam int SLOT_BITS     = $clog2(VES + 1),
    localparam int QUEUE_BITS    = OUT_BITS + SLOT_BITS
) (
    input logic clk,
    input logic rst,
    input logic open_i, // the bus may be used

    input  logic        awvalid_i,
    output logic        awready_o,
    input  logic [24:0] awaddr_i,
    input  logic        wvalid_i,
    output logic        wready_o,
    input  logic [31:0] wdata_i,
    input  logic [ 3:0] wstrb_i,
    output logic        bvalid_o,
    input  logic        bready_i,
    output logic [ 1:0] bresp_o,
    input  logic        arvalid_i,
    output logic        arready_o,
    input  logic [24:0] araddr_i,
    output logic        rvalid_o,
    input  logic        rready_i,
    output logic [31:0] rdata_o,
    output logic [ 1:0] rresp_o,

    output logic         wr_valid_o,
    output table_t       wr_table_o,
    output ve_t          wr_ve_o,
    output table_index_t wr_index_o,
    output table_data_t  wr_data_o,
    input  logic         wr_refused_i, // LPM_WRITE_LATENCY cycles after `wr_valid_o`

    output logic [          15:0] pool_o,
    output logic                  wr_quota_o,
    output logic                  wr_weight_o,
    output logic [QUEUE_BITS-1:0] wr_queue_o,
    output quota_t                wr_quota_data_o,
    output logic [           7:0] wr_weight_data_o,

    // Counters; see card_statistics.
    output logic                    refused_o,
    output logic    [SLOT_BITS-1:0] refused_slot_o,
    output logic                    clear_o,
    output logic    [          8:0] clear_slot_o,
    input  logic                    clearing_i,
    output logic    [SLOT_BITS-1:0] rd_slot_o,
    output offset_t                 rd_offset_o,
    input  logic    [         63:0] rd_frames_i,
    input  logic    [         63:0] rd_bytes_i
);

  localparam int PAGES = VES + 1;
  // Cycles of a write from the registers of the bus to its answer's queue.
  localparam int WRITE_CYCLES = 2 + LPM_WRITE_LATENCY;
  localparam int ANSWERS = 32;
  localparam logic [4:0] QUOTA = R_COMMIT_QUOTA[6:2];
  localparam logic [4:0] WEIGHT = R_COMMIT_WEIGHT[6:2];

  if (WRITE_CYCLES > ANSWERS / 2) begin : gen_too_few_answers
    $error("ANSWERS is too small");
  end

  typedef logic [8:0] page_t;
  typedef logic [SLOT_BITS-1:0] slot_t;
  typedef struct packed {
    page_t   page;
    offset_t offset;
  } address_t;

  slot_t target_q;

  // Slot of the VE that a page reaches, VES for no VE.
  function automatic slot_t slot_of(input page_t page, input slot_t target);
    return page == '0 ? target : slot_t'(page - 1'b1);
  endfunction

  // ---------------------------------------------------------------------------------------------
  // Write, cycle 0: address and data are here; checks.

  logic aw_full_q, w_full_q, take, room, alone_q, ended, super_ended;
  address_t aw_q;
  logic [31:0] data_q;
  logic [3:0] strobe_q;

  logic super_page, allowed, is_commit, is_queue, known_queue;
  logic [4:0] kind;
  slot_t slot;

  assign awready_o = !aw_full_q && open_i && !rst;
  assign wready_o = !w_full_q && open_i && !rst;
  assign take = aw_full_q && w_full_q && room && !alone_q;

  always_comb begin
    super_page = aw_q.page == '0;
    is_commit = aw_q.offset inside {[R_COMMIT : R_COMMIT_END]};
    kind = aw_q.offset[6:2];
    is_queue = is_commit && kind inside {QUOTA, WEIGHT};
    known_queue = data_q[15:0] <= 16'(VES)
        && (data_q[31:16] < 16'(PORTS) || data_q[31:16] == 16'(HOST));
    slot = slot_of(aw_q.page, target_q);
    // The VMAC-VE table is that of all VEs.
    if (is_commit && kind <= TABLE_VMAC_SEED) slot = '0;

    allowed = aw_q.page <= page_t'(VES) && can_write(super_page, aw_q.offset) && strobe_q == '1;
    if (is_commit && !is_queue && slot == slot_t'(VES)) allowed = 1'b0;
    if (is_queue && !known_queue) allowed = 1'b0;
    // card_lpm does not look at this index.
    if (is_commit && kind == TABLE_LPM_SEGMENTS && data_q != '0) allowed = 1'b0;
    case (aw_q.offset)
      R_TARGET: if (data_q > 32'(VES)) allowed = 1'b0;
      R_CLEAR_COUNTERS: if (data_q > 32'(VES) || clearing_i) allowed = 1'b0;
      R_POOL: if (data_q[31:16] != '0) allowed = 1'b0;
      default: ;
    endcase
  end

  always_ff @(posedge clk) begin
    if (awvalid_i && awready_o) aw_q <= awaddr_i;
    if (wvalid_i && wready_o) {data_q, strobe_q} <= {wdata_i, wstrb_i};
    clear_o <= take && allowed && aw_q.offset == R_CLEAR_COUNTERS && !rst;
    clear_slot_o <= data_q[8:0];
    if (rst) begin
      aw_full_q <= 1'b0;
      w_full_q <= 1'b0;
      alone_q <= 1'b0;
      target_q <= slot_t'(R_TARGET_RESET);
      pool_o <= R_POOL_RESET;
    end else begin
      aw_full_q <= (aw_full_q && !take) || (awvalid_i && awready_o);
      w_full_q <= (w_full_q && !take) || (wvalid_i && wready_o);
      alone_q <= (alone_q && !super_ended) || (take && super_page);
      if (take && allowed) begin
        if (aw_q.offset == R_TARGET) target_q <= slot_t'(data_q);
        if (aw_q.offset == R_POOL) pool_o <= data_q[15:0];
      end
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Write, cycle 1: the page's words of data. Cycle 2: the table's write bus. Then wait for
  // `wr_refused_i`.

  logic [WRITE_CYCLES:1] valid_q, allowed_q;
  address_t [WRITE_CYCLES:1] address_q;
  logic commit_1, queue_1;
  logic [4:0] kind_1;
  // verilator lint_off UNUSEDSIGNAL
  slot_t slot_1;  // an entry's slot is a VE
  // verilator lint_on UNUSEDSIGNAL
  logic [31:0] index_1;
  logic [OUT_BITS-1:0] queue_out;
  table_data_t words;
  logic refused;

  for (genvar i = 0; i < 6; i++) begin : gen_words
    card_ram #(
        .WIDTH(32),
        .DEPTH(PAGES)
    ) word (
        .clk,
        .wr_en_i  (take && allowed && aw_q.offset == R_WRITE_DATA_0 + 16'(4 * i)),
        .wr_addr_i(aw_q.page[SLOT_BITS-1:0]),
        .wr_data_i(data_q),
        .rd_addr_i(aw_q.page[SLOT_BITS-1:0]),
        .rd_data_o(words[32*i+:32])
    );
  end

  assign queue_out = index_1[18:16] == HOST ? OUT_BITS'(PORTS) : OUT_BITS'(index_1[18:16]);
  assign ended = valid_q[WRITE_CYCLES];
  assign super_ended = ended && address_q[WRITE_CYCLES].page == '0;
  assign refused = !allowed_q[WRITE_CYCLES] || wr_refused_i;

  always_ff @(posedge clk) begin
    valid_q <= rst ? '0 : {valid_q[WRITE_CYCLES-1:1], take};
    allowed_q <= {allowed_q[WRITE_CYCLES-1:1], allowed};
    address_q <= {address_q[WRITE_CYCLES-1:1], aw_q};

    commit_1 <= take && allowed && is_commit && !is_queue && !rst;
    queue_1 <= take && allowed && is_queue && !rst;
    {kind_1, slot_1, index_1} <= {kind, slot, data_q};

    wr_valid_o <= commit_1 && !rst;
    wr_table_o <= table_t'(kind_1);
    wr_ve_o <= ve_t'(slot_1);
    wr_index_o <= index_1;
    wr_data_o <= words;
    wr_quota_o <= queue_1 && kind_1 == QUOTA && !rst;
    wr_weight_o <= queue_1 && kind_1 == WEIGHT && !rst;
    wr_queue_o <= {queue_out, index_1[SLOT_BITS-1:0]};
    wr_quota_data_o <= words[31:0];
    wr_weight_data_o <= words[7:0];
  end

  // ---------------------------------------------------------------------------------------------
  // Write, answer.

  address_t refused_address_q;
  assign bresp_o[0] = 1'b0;
  card_fifo #(
      .WIDTH (1),
      .DEPTH (ANSWERS),
      .MARGIN(ANSWERS / 2)
  ) answers (
      .clk,
      .rst,
      .push_i (ended),
      .data_i (refused),
      .room_o (room),
      .valid_o(bvalid_o),
      .data_o (bresp_o[1]),
      .pop_i  (bvalid_o && bready_i)
  );

  always_ff @(posedge clk) begin
    refused_o <= ended && refused && !rst;
    refused_slot_o <= address_q[WRITE_CYCLES].page == '0
        || address_q[WRITE_CYCLES].page > page_t'(VES) ? slot_t'(VES)
        : slot_t'(address_q[WRITE_CYCLES].page - 1'b1);
    if (rst) refused_address_q <= R_REFUSED_ADDRESS_RESET;
    else if (ended && refused) refused_address_q <= address_q[WRITE_CYCLES];
  end

  // ---------------------------------------------------------------------------------------------
  // Epoch: a step lasts at least as long as a frame stays in card_header.

  localparam int STEP_BITS = $clog2(header_latency(LEVELS, EXT_FROM, EXT_LATENCY));
  logic [31:0] epoch_q;
  logic [STEP_BITS-1:0] cycle_q;

  always_ff @(posedge clk) begin
    if (rst) {epoch_q, cycle_q} <= {R_EPOCH_RESET, STEP_BITS'(0)};
    else {epoch_q, cycle_q} <= {epoch_q, cycle_q} + 1'b1;
  end

  // ---------------------------------------------------------------------------------------------
  // Read, one at a time: the address in cycle 1, counters in cycle 3, the answer in cycle 4. A
  // page keeps the high word of the counter whose low word it read last.

  logic reading_q, can, high, is_counter;
  address_t ar_q;
  logic [3:1] step_q;
  logic [31:0] word, latched, latched_q, register_word;
  logic [63:0] counter;

  assign arready_o = !reading_q && open_i && !rst;
  assign rd_slot_o = slot_of(ar_q.page, target_q);
  assign rd_offset_o = ar_q.offset;
  assign can = ar_q.page <= page_t'(VES) && can_read(ar_q.page == '0, ar_q.offset);
  assign is_counter = ar_q.offset >= R_FAULTS;
  assign high = ar_q.offset[2];
  assign counter = ar_q.offset[3] ? rd_bytes_i : rd_frames_i;

  always_comb begin
    register_word = '0;
    case (ar_q.offset)
      R_ID:              register_word = R_ID_RESET;
      R_VERSION:         register_word = R_VERSION_RESET;
      R_DATA_BITS:       register_word = 32'(DATA_BITS);
      R_PORTS:           register_word = 32'(PORTS);
      R_VES:             register_word = 32'(VES);
      R_CELLS:           register_word = 32'(CELLS - SPARE_CELLS);
      R_VMACS:           register_word = 32'(VMACS);
      R_LEVELS:          register_word = 32'(LEVELS);
      R_NODES:           register_word = 32'(NODES);
      R_LEAVES:          register_word = 32'(LEAVES);
      R_GROUPS:          register_word = 32'(GROUPS);
      R_BUCKET_BLOCKS:   register_word = 32'(BUCKET_BLOCKS);
      R_HOPS:            register_word = 32'(HOPS);
      R_ARPS:            register_word = 32'(ARPS);
      R_EPOCH:           register_word = epoch_q;
      R_TARGET:          register_word = 32'(target_q);
      R_POOL:            register_word = 32'(pool_o);
      R_REFUSED_ADDRESS: register_word = 32'(refused_address_q);
      R_CLEARING:        register_word = 32'(clearing_i);
      default:           ;
    endcase
    word = register_word;
    if (is_counter) word = high ? latched_q : counter[31:0];
  end

  card_ram #(
      .WIDTH(32),
      .DEPTH(PAGES)
  ) high_words (
      .clk,
      .wr_en_i  (step_q[3] && can && is_counter && !high),
      .wr_addr_i(ar_q.page[SLOT_BITS-1:0]),
      .wr_data_i(counter[63:32]),
      .rd_addr_i(ar_q.page[SLOT_BITS-1:0]),
      .rd_data_o(latched)
  );

  always_ff @(posedge clk) begin
    if (arvalid_i && arready_o) ar_q <= araddr_i;
    latched_q <= latched;
    if (step_q[3]) begin
      rdata_o <= can ? word : '0;
      rresp_o <= can ? 2'b00 : 2'b10;
    end
    if (rst) begin
      reading_q <= 1'b0;
      step_q <= '0;
      rvalid_o <= 1'b0;
    end else begin
      if (arvalid_i && arready_o) reading_q <= 1'b1;
      else if (rvalid_o && rready_i) reading_q <= 1'b0;
      step_q <= {step_q[2:1], arvalid_i && arready_o};
      rvalid_o <= step_q[3] || (rvalid_o && !rready_i);
    end
  end

endmodule
