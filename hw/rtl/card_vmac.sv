// VMAC-VE table: finds the virtual environment (VE) and vport of a segment and MAC address.
//
// Latency: 2 cycles; `*_o` is selected behind the last register. One look-up per cycle.
//
// Four ways, each a RAM with its own index out of one hash (see vmac_chi), and a stash of eight
// entries in registers. The driver chooses the place of an entry. To move one, it writes the new
// place before it erases the old one, so that each look-up finds it. Entries with equal keys must
// also have equal values. A reset empties the stash and sets the seed to zero. A new seed takes
// effect one cycle later than an entry, and moves all entries.
module card_vmac
  import card_pkg::*;
#(
    // Entries without those of the stash: 8 to 1,024.
    parameter int VMACS = 1024,
    parameter int VES   = 32
) (
    input  logic         clk,
    input  logic         rst,
    input  vmac_key_t    key_i,
    output logic         hit_o,
    output ve_t          ve_o,
    output vport_t       vport_o,
    // Write bus; `wr_refused_o` is in the same cycle.
    input  logic         wr_valid_i,
    input  table_t       wr_table_i,
    input  table_index_t wr_index_i,
    input  vmac_entry_t  wr_entry_i,
    output logic         wr_refused_o
);

  localparam int WAYS = 4;
  localparam int STASH = 8;
  localparam int SETS = VMACS / WAYS;
  localparam int SET_BITS = $clog2(SETS);
  // Pieces of a key that are compared before the last register.
  localparam int PIECES = 15;

  // ---------------------------------------------------------------------------------------------
  // Writes.

  vmac_key_t seed_q;
  vmac_entry_t [STASH-1:0] stash_q;
  logic wr_ram, wr_stash, wr_seed, wr_bounds;

  always_comb begin
    case (wr_table_i)
      TABLE_VMAC:       wr_bounds = wr_index_i[31:8] < 24'(WAYS) && 9'(wr_index_i[7:0]) < 9'(SETS);
      TABLE_VMAC_STASH: wr_bounds = wr_index_i < 32'(STASH);
      default:          wr_bounds = wr_index_i == '0;
    endcase
    // An erased entry may name any VE.
    if (wr_table_i != TABLE_VMAC_SEED && wr_entry_i.valid && {1'b0, wr_entry_i.ve} >= 9'(VES))
      wr_bounds = 1'b0;
    wr_ram = wr_valid_i && wr_bounds && wr_table_i == TABLE_VMAC;
    wr_stash = wr_valid_i && wr_bounds && wr_table_i == TABLE_VMAC_STASH;
    wr_seed = wr_valid_i && wr_bounds && wr_table_i == TABLE_VMAC_SEED;
    wr_refused_o = wr_valid_i && !wr_bounds
        && wr_table_i inside {TABLE_VMAC, TABLE_VMAC_STASH, TABLE_VMAC_SEED};
  end

  always_ff @(posedge clk) begin
    // The key of the seed is right-aligned in the data.
    if (wr_seed) seed_q <= {wr_entry_i[59:0]};
    if (wr_stash) stash_q[wr_index_i[2:0]] <= wr_entry_i;
    if (rst) begin
      seed_q <= '0;
      for (int i = 0; i < STASH; i++) stash_q[i].valid <= 1'b0;
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Ways: cycle 0: hash; cycle 1: comparison in pieces; cycle 2: selection.

  // Small tables use less of it.
  // verilator lint_off UNUSEDSIGNAL
  logic [31:0] hash;
  // verilator lint_on UNUSEDSIGNAL
  vmac_key_t key_q;
  vmac_entry_t way[WAYS];

  // The CRC's bits are sums of the data's bits: as sums, they have four levels of gates instead of
  // twenty. The seed's part of a sum is ready before the key comes.
  typedef logic [31:0][59:0] masks_t;
  function automatic masks_t masks();
    for (int i = 0; i < 60; i++) begin
      logic [31:0] column;
      column = vmac_crc(60'd1 << i);
      for (int j = 0; j < 32; j++) masks[j][i] = column[j];
    end
  endfunction
  localparam masks_t MASKS = masks();

  // The place of the n-th bit that is set in a mask.
  function automatic int place_of(input logic [59:0] mask, input int n);
    int left = n;
    place_of = 0;
    for (int i = 0; i < 60; i++)
      if (mask[i]) begin
        if (left == 0) place_of = i;
        left--;
      end
  endfunction

  logic [59:0] chi;
  logic [31:0] seed_hash_q;
  assign chi = vmac_chi(key_i ^ seed_q);

  for (genvar j = 0; j < 32; j++) begin : gen_hash
    localparam int COUNT = $countones(MASKS[j]);
    logic [COUNT-1:0] term, seed_term;
    for (genvar n = 0; n < COUNT; n++) begin : gen_term
      localparam int PLACE = place_of(MASKS[j], n);
      assign term[n] = key_i[PLACE] ^ chi[PLACE];
      assign seed_term[n] = seed_q[PLACE];
    end
    always_ff @(posedge clk) seed_hash_q[j] <= ^seed_term;
    assign hash[j] = ^term ^ seed_hash_q[j];
  end

  always_ff @(posedge clk) key_q <= key_i;

  for (genvar w = 0; w < WAYS; w++) begin : gen_way
    card_ram #(
        .WIDTH($bits(vmac_entry_t)),
        .DEPTH(SETS)
    ) ram (
        .clk,
        .wr_en_i  (wr_ram && wr_index_i[9:8] == 2'(w)),
        .wr_addr_i(wr_index_i[SET_BITS-1:0]),
        .wr_data_i(wr_entry_i),
        .rd_addr_i(hash[8*w+:SET_BITS]),
        .rd_data_o(way[w])
    );
  end

  logic [WAYS-1:0][PIECES-1:0] equal_q;
  logic [WAYS-1:0] valid_q;
  ve_t [WAYS-1:0] ve_q;
  vport_t [WAYS-1:0] vport_q;

  // The stash waits for no memory: it is compared in cycle 0 and selected in cycle 1.
  logic [STASH-1:0][PIECES-1:0] stash_equal_q;
  logic [STASH-1:0] stash_known_q;
  ve_t [STASH-1:0] stash_ve_q;
  vport_t [STASH-1:0] stash_vport_q;
  logic stash_hit, stash_hit_q;
  ve_t stash_ve, found_ve_q;
  vport_t stash_vport, found_vport_q;

  always_comb begin
    stash_hit = 1'b0;
    stash_ve = '0;
    stash_vport = '0;
    for (int i = 0; i < STASH; i++)
      if (stash_known_q[i] && &stash_equal_q[i]) begin
        stash_hit = 1'b1;
        stash_ve |= stash_ve_q[i];
        stash_vport |= stash_vport_q[i];
      end
  end

  always_ff @(posedge clk) begin
    for (int i = 0; i < STASH; i++) begin
      for (int j = 0; j < PIECES; j++)
        stash_equal_q[i][j] <= stash_q[i].key[4*j+:4] == key_i[4*j+:4];
      stash_known_q[i] <= stash_q[i].valid;
      stash_ve_q[i] <= stash_q[i].ve;
      stash_vport_q[i] <= stash_q[i].vport;
    end
    stash_hit_q <= stash_hit;
    found_ve_q <= stash_ve;
    found_vport_q <= stash_vport;
    for (int i = 0; i < WAYS; i++) begin
      for (int j = 0; j < PIECES; j++) equal_q[i][j] <= way[i].key[4*j+:4] == key_q[4*j+:4];
      valid_q[i] <= way[i].valid;
      ve_q[i] <= way[i].ve;
      vport_q[i] <= way[i].vport;
    end
  end

  always_comb begin
    hit_o = stash_hit_q;
    ve_o = found_ve_q;
    vport_o = found_vport_q;
    for (int i = 0; i < WAYS; i++)
      if (valid_q[i] && &equal_q[i]) begin
        hit_o = 1'b1;
        ve_o |= ve_q[i];
        vport_o |= vport_q[i];
      end
  end

endmodule
