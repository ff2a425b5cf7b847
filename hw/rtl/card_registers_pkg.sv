// Register map of the card. Generated from hw/registers.toml; see docs/hardware.md.
package card_registers_pkg;

  // Offset in a page.
  typedef logic [15:0] offset_t;

  // verilator lint_off UNUSEDPARAM
  localparam offset_t R_ID = 16'h0000;
  localparam offset_t R_VERSION = 16'h0004;
  localparam offset_t R_DATA_BITS = 16'h0008;
  localparam offset_t R_PORTS = 16'h000c;
  localparam offset_t R_VES = 16'h0010;
  localparam offset_t R_CELLS = 16'h0014;
  localparam offset_t R_VMACS = 16'h0018;
  localparam offset_t R_LEVELS = 16'h001c;
  localparam offset_t R_NODES = 16'h0020;
  localparam offset_t R_LEAVES = 16'h0024;
  localparam offset_t R_GROUPS = 16'h0028;
  localparam offset_t R_BUCKET_BLOCKS = 16'h002c;
  localparam offset_t R_HOPS = 16'h0030;
  localparam offset_t R_ARPS = 16'h0034;
  localparam offset_t R_EPOCH = 16'h0040;
  localparam offset_t R_TARGET = 16'h0044;
  localparam offset_t R_POOL = 16'h0048;
  localparam offset_t R_REFUSED_ADDRESS = 16'h004c;
  localparam offset_t R_CLEAR_COUNTERS = 16'h0050;
  localparam offset_t R_CLEARING = 16'h0054;
  localparam offset_t R_WRITE_DATA_0 = 16'h0100;
  localparam offset_t R_WRITE_DATA_1 = 16'h0104;
  localparam offset_t R_WRITE_DATA_2 = 16'h0108;
  localparam offset_t R_WRITE_DATA_3 = 16'h010c;
  localparam offset_t R_WRITE_DATA_4 = 16'h0110;
  localparam offset_t R_WRITE_DATA_5 = 16'h0114;
  localparam offset_t R_FAULTS = 16'h1000;
  localparam offset_t R_FAULTS_END = 16'h100f;
  localparam offset_t R_EXCESS = 16'h1010;
  localparam offset_t R_EXCESS_END = 16'h101f;
  localparam offset_t R_REFUSED = 16'h1020;
  localparam offset_t R_REFUSED_END = 16'h102f;
  localparam offset_t R_SENT = 16'h1100;
  localparam offset_t R_SENT_END = 16'h117f;
  localparam offset_t R_RECEIVED = 16'h1200;
  localparam offset_t R_RECEIVED_END = 16'h127f;
  localparam offset_t R_OVERSIZE = 16'h1300;
  localparam offset_t R_OVERSIZE_END = 16'h137f;
  localparam offset_t R_VERDICT = 16'h1800;
  localparam offset_t R_VERDICT_END = 16'h1fff;
  localparam offset_t R_COMMIT = 16'h0200;
  localparam offset_t R_COMMIT_END = 16'h024f;
  localparam offset_t R_COMMIT_VMAC = 16'h0200;
  localparam offset_t R_COMMIT_VMAC_STASH = 16'h0204;
  localparam offset_t R_COMMIT_VMAC_SEED = 16'h0208;
  localparam offset_t R_COMMIT_METER = 16'h020c;
  localparam offset_t R_COMMIT_VE_CONTROL = 16'h0210;
  localparam offset_t R_COMMIT_ATTACHMENT = 16'h0214;
  localparam offset_t R_COMMIT_HOP_SEGMENTS = 16'h0218;
  localparam offset_t R_COMMIT_LPM_SEGMENTS = 16'h021c;
  localparam offset_t R_COMMIT_VE_OPTIONS = 16'h0220;
  localparam offset_t R_COMMIT_CONTEXT = 16'h0224;
  localparam offset_t R_COMMIT_OWN_V4 = 16'h0228;
  localparam offset_t R_COMMIT_GROUP = 16'h022c;
  localparam offset_t R_COMMIT_BUCKET = 16'h0230;
  localparam offset_t R_COMMIT_HOP = 16'h0234;
  localparam offset_t R_COMMIT_ARP = 16'h0238;
  localparam offset_t R_COMMIT_LPM_ROOT = 16'h023c;
  localparam offset_t R_COMMIT_LPM_NODE = 16'h0240;
  localparam offset_t R_COMMIT_LPM_LEAF = 16'h0244;
  localparam offset_t R_COMMIT_QUOTA = 16'h0248;
  localparam offset_t R_COMMIT_WEIGHT = 16'h024c;
  localparam logic [31:0] R_ID_RESET = 32'h50645063;
  localparam logic [31:0] R_VERSION_RESET = 32'h1;
  localparam logic [31:0] R_EPOCH_RESET = 32'h0;
  localparam logic [8:0] R_TARGET_RESET = 9'h0;
  localparam logic [15:0] R_POOL_RESET = 16'h0;
  localparam logic [24:0] R_REFUSED_ADDRESS_RESET = 25'h0;
  localparam logic [0:0] R_CLEARING_RESET = 1'h0;
  // verilator lint_on UNUSEDPARAM

  // True if a page has a readable register there.
  function automatic logic can_read(input logic super_page, input offset_t offset);
    logic word;
    word = offset[1:0] == '0;
    case (offset) inside
      R_ID: can_read = super_page;
      R_VERSION: can_read = super_page;
      R_DATA_BITS: can_read = super_page;
      R_PORTS: can_read = super_page;
      R_VES: can_read = super_page;
      R_CELLS: can_read = super_page;
      R_VMACS: can_read = super_page;
      R_LEVELS: can_read = super_page;
      R_NODES: can_read = super_page;
      R_LEAVES: can_read = super_page;
      R_GROUPS: can_read = super_page;
      R_BUCKET_BLOCKS: can_read = super_page;
      R_HOPS: can_read = super_page;
      R_ARPS: can_read = super_page;
      R_EPOCH: can_read = 1'b1;
      R_TARGET: can_read = super_page;
      R_POOL: can_read = super_page;
      R_REFUSED_ADDRESS: can_read = super_page;
      R_CLEARING: can_read = super_page;
      [R_FAULTS : R_FAULTS_END]: can_read = word && !offset[3];
      [R_EXCESS : R_EXCESS_END]: can_read = word && !offset[3];
      [R_REFUSED : R_REFUSED_END]: can_read = word && !offset[3];
      [R_SENT : R_SENT_END]: can_read = word;
      [R_RECEIVED : R_RECEIVED_END]: can_read = super_page && word;
      [R_OVERSIZE : R_OVERSIZE_END]: can_read = super_page && word && !offset[3];
      [R_VERDICT : R_VERDICT_END]: can_read = word;
      default: can_read = 1'b0;
    endcase
  endfunction

  // True if a page has a writable register there.
  function automatic logic can_write(input logic super_page, input offset_t offset);
    case (offset)
      R_TARGET: can_write = super_page;
      R_POOL: can_write = super_page;
      R_CLEAR_COUNTERS: can_write = super_page;
      R_WRITE_DATA_0: can_write = 1'b1;
      R_WRITE_DATA_1: can_write = 1'b1;
      R_WRITE_DATA_2: can_write = 1'b1;
      R_WRITE_DATA_3: can_write = 1'b1;
      R_WRITE_DATA_4: can_write = 1'b1;
      R_WRITE_DATA_5: can_write = 1'b1;
      R_COMMIT_VMAC: can_write = super_page;
      R_COMMIT_VMAC_STASH: can_write = super_page;
      R_COMMIT_VMAC_SEED: can_write = super_page;
      R_COMMIT_METER: can_write = super_page;
      R_COMMIT_VE_CONTROL: can_write = super_page;
      R_COMMIT_ATTACHMENT: can_write = super_page;
      R_COMMIT_HOP_SEGMENTS: can_write = super_page;
      R_COMMIT_LPM_SEGMENTS: can_write = super_page;
      R_COMMIT_VE_OPTIONS: can_write = 1'b1;
      R_COMMIT_CONTEXT: can_write = 1'b1;
      R_COMMIT_OWN_V4: can_write = 1'b1;
      R_COMMIT_GROUP: can_write = 1'b1;
      R_COMMIT_BUCKET: can_write = 1'b1;
      R_COMMIT_HOP: can_write = 1'b1;
      R_COMMIT_ARP: can_write = 1'b1;
      R_COMMIT_LPM_ROOT: can_write = 1'b1;
      R_COMMIT_LPM_NODE: can_write = 1'b1;
      R_COMMIT_LPM_LEAF: can_write = 1'b1;
      R_COMMIT_QUOTA: can_write = super_page;
      R_COMMIT_WEIGHT: can_write = super_page;
      default: can_write = 1'b0;
    endcase
  endfunction

endpackage
