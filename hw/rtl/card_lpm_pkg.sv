// Types of the route look-up (card_lpm) and of its write bus.
package card_lpm_pkg;

  // What a matching route does with a packet.
  typedef enum logic [2:0] {
    LEAF_NONE      = 3'd0,  // no route
    LEAF_GROUP     = 3'd1,  // send to a hop of `group`
    LEAF_BLACKHOLE = 3'd2,  // drop
    LEAF_HOOK      = 3'd3,  // to the control guest's hook
    LEAF_LOCAL     = 3'd4,  // the router's own address
    LEAF_EXCESS    = 3'd5   // a route that did not fit: to the control guest, counted
  } leaf_kind_t;

  typedef struct packed {
    leaf_kind_t kind;
    logic [9:0] group;  // relative to the VE's segment of groups
  } leaf_t;

  // What an entry of level 0 leads to.
  typedef enum logic [1:0] {
    ROOT_NONE   = 2'd0,
    ROOT_LEAF   = 2'd1,
    ROOT_NODE   = 2'd2,
    ROOT_EXCESS = 2'd3   // LEAF_EXCESS that needs no leaf
  } root_kind_t;

  // State of a look-up between two levels.
  typedef enum logic [2:0] {
    WALK_NONE   = 3'd0,
    WALK_LEAF   = 3'd1,
    WALK_NODE   = 3'd2,
    WALK_EXCESS = 3'd3,
    WALK_FAULT  = 3'd4   // an index outside the VE's segment
  } walk_kind_t;

  // Tables of the write bus.
  typedef enum logic [1:0] {
    LPM_ROOT    = 2'd0,
    LPM_NODE    = 2'd1,
    LPM_LEAF    = 2'd2,
    LPM_SEGMENT = 2'd3   // super page only
  } lpm_table_t;

  // Entries as the write bus carries them. All indices are relative to the VE's segment.
  typedef struct packed {
    logic [157:0] zero;
    root_kind_t   kind;
    logic [31:0]  index;
  } root_write_t;

  typedef struct packed {
    logic [31:0] leaf_base;
    logic [31:0] child_base;
    logic [63:0] leaf_map;
    logic [63:0] child_map;
  } node_write_t;

  typedef struct packed {
    logic [178:0] zero;
    leaf_t        leaf;
  } leaf_write_t;

  typedef struct packed {
    logic [63:0] zero;
    logic [31:0] leaf_length;
    logic [31:0] leaf_base;
    logic [31:0] node_length;
    logic [31:0] node_base;
  } segment_write_t;

  // Cycles from a look-up's `valid_i` to its `valid_o`: two for level 0, the memory's and one more
  // for each further level, and one to read the leaf.
  function automatic int lpm_latency(int levels, int ext_from, int ext_latency);
    int cycles = 3;
    for (int level = 1; level <= levels; level++)
      cycles += 1 + (level >= ext_from ? ext_latency : 1);
    return cycles;
  endfunction

  // Latency of card_header: 3 cycles before the leaf is in its register, and 10 behind that.
  function automatic int header_latency(int levels, int ext_from, int ext_latency);
    return 3 + lpm_latency(levels, ext_from, ext_latency) + 10;
  endfunction

  // Number of set bits of a byte. Written as logic, as synthesis makes one deep tree of all that is
  // added.
  function automatic logic [3:0] count_byte(logic [7:0] bits);
    logic [1:0][2:0] half;
    logic carry_0, carry_1;
    for (int i = 0; i < 2; i++) begin
      logic [3:0] nibble;
      nibble = bits[4*i+:4];
      half[i][0] = ^nibble;
      half[i][2] = &nibble;
      half[i][1] = !half[i][2] && (nibble[0] & nibble[1] | nibble[2] & nibble[3] |
          (nibble[0] | nibble[1]) & (nibble[2] | nibble[3]));
    end
    carry_0 = half[0][0] & half[1][0];
    carry_1 = half[0][1] & half[1][1] | carry_0 & (half[0][1] ^ half[1][1]);
    return {
      half[0][2] & half[1][2] | carry_1 & (half[0][2] ^ half[1][2]),
      half[0][2] ^ half[1][2] ^ carry_1,
      half[0][1] ^ half[1][1] ^ carry_0,
      half[0][0] ^ half[1][0]
    };
  endfunction

  // Cycles from `wr_valid_i` to `wr_refused_o`. The memories have the entry one cycle later.
  localparam int LPM_WRITE_LATENCY = 4;

endpackage
