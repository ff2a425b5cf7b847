// Next hop of a packet: its route's group, its flow's bucket if there are several hops, the hop.
// The choice is that of NexthopGroups::hop_of_flow in crates/ip.
//
// Latency: 6 cycles. One look-up per cycle.
//
// All indices are relative to the VE's part of a table, and checked against it on each write and on
// each look-up.
module card_nexthop
  import card_pkg::*;
#(
    parameter int GROUPS        = 8192,
    parameter int BUCKET_BLOCKS = 64,
    parameter int HOPS          = 8192
) (
    input  logic          clk,
    input  group_index_t  group_i,
    // verilator lint_off UNUSEDSIGNAL
    input  hop_segments_t segments_i,    // without those of ARP
    // verilator lint_on UNUSEDSIGNAL
    input  logic   [31:0] hash_i,
    input  logic   [31:0] seed_i,
    output hop_t          hop_o,
    output logic          found_o,       // `hop_o` exists
    output logic          fault_o,       // an index leads out of the VE's part

    // Write bus; `wr_refused_o` is in the same cycle.
    input  logic          wr_valid_i,
    input  table_t        wr_table_i,
    input  table_index_t  wr_index_i,
    input  hop_t          wr_data_i,     // the widest of the types
    input  hop_segments_t wr_segments_i,
    output logic          wr_refused_o
);

  localparam int GROUP_BITS = $clog2(GROUPS);
  localparam int BUCKET_BITS = $clog2(BUCKET_BLOCKS) + $bits(bucket_t);
  localparam int HOP_BITS = $clog2(HOPS);

  // ---------------------------------------------------------------------------------------------
  // Writes.

  group_t wr_group;
  hop_index_t wr_bucket;
  logic wr_bounds, wr_group_en, wr_bucket_en, wr_hop_en;
  logic [15:0] wr_limit;

  always_comb begin
    wr_group = group_t'(wr_data_i[$bits(group_t)-1:0]);
    wr_bucket = wr_data_i[$bits(hop_index_t)-1:0];
    wr_limit = wr_group.multi ? wr_segments_i.bucket.length : wr_segments_i.hop.length;
    case (wr_table_i)
      TABLE_GROUP:
      wr_bounds = wr_index_i < 32'(wr_segments_i.group.length)
          && (!wr_group.valid || 16'(wr_group.index) < wr_limit);
      TABLE_BUCKET:
      wr_bounds = 32'(wr_index_i[31:8]) < 32'(wr_segments_i.bucket.length)
          && 16'(wr_bucket) < wr_segments_i.hop.length;
      default:
      wr_bounds = wr_index_i < 32'(wr_segments_i.hop.length)
          && (!wr_data_i.valid || !wr_data_i.resolved
              || 16'(wr_data_i.arp) < wr_segments_i.arp.length);
    endcase
    wr_group_en = wr_valid_i && wr_bounds && wr_table_i == TABLE_GROUP;
    wr_bucket_en = wr_valid_i && wr_bounds && wr_table_i == TABLE_BUCKET;
    wr_hop_en = wr_valid_i && wr_bounds && wr_table_i == TABLE_HOP;
    wr_refused_o = wr_valid_i && !wr_bounds
        && wr_table_i inside {TABLE_GROUP, TABLE_BUCKET, TABLE_HOP};
  end

  // ---------------------------------------------------------------------------------------------
  // Cycles 0 and 1: group. Beside it, the bucket: (hash ^ seed) * SPREAD mod 2^32, top eight bits.

  localparam logic [31:0] SPREAD = 32'h9e37_79b1;

  group_t group_read, group_q;
  logic [1:0] group_ok_q;
  range_t [1:0] bucket_range_q;
  range_t [3:0] hop_range_q;

  card_ram #(
      .WIDTH($bits(group_t)),
      .DEPTH(GROUPS)
  ) groups (
      .clk,
      .wr_en_i  (wr_group_en),
      .wr_addr_i(GROUP_BITS'(wr_segments_i.group.base + wr_index_i[15:0])),
      .wr_data_i(wr_group),
      .rd_addr_i(GROUP_BITS'(segments_i.group.base + 16'(group_i))),
      .rd_data_o(group_read)
  );

  logic [31:0] flow;
  // verilator lint_off UNUSEDSIGNAL
  logic [31:0] low_q, product_low;  // the low half only carries nothing into the top
  // verilator lint_on UNUSEDSIGNAL
  logic [1:0][15:0] cross_q;
  bucket_t bucket_q;
  assign flow = hash_i ^ seed_i;
  assign product_low = low_q + {cross_q[0] + cross_q[1], 16'd0};

  always_ff @(posedge clk) begin
    group_q <= group_read;
    group_ok_q <= {group_ok_q[0], 16'(group_i) < segments_i.group.length};
    bucket_range_q <= {bucket_range_q[0], segments_i.bucket};
    hop_range_q <= {hop_range_q[2:0], segments_i.hop};
    low_q <= 32'(flow[15:0]) * 32'(SPREAD[15:0]);
    cross_q[0] <= flow[15:0] * SPREAD[31:16];
    cross_q[1] <= flow[31:16] * SPREAD[15:0];
    bucket_q <= product_low[31:24];
  end

  // ---------------------------------------------------------------------------------------------
  // Cycles 2 and 3: bucket.

  logic [1:0] valid_q, multi_q, fault_q;
  hop_index_t [1:0] index_q;
  hop_index_t bucket_read, bucket_hop_q;

  card_ram #(
      .WIDTH($bits(hop_index_t)),
      .DEPTH(BUCKET_BLOCKS * 256)
  ) buckets (
      .clk,
      .wr_en_i(wr_bucket_en),
      .wr_addr_i(BUCKET_BITS'({wr_segments_i.bucket.base + wr_index_i[23:8], wr_index_i[7:0]})),
      .wr_data_i(wr_bucket),
      .rd_addr_i(BUCKET_BITS'({bucket_range_q[1].base + 16'(group_q.index), bucket_q})),
      .rd_data_o(bucket_read)
  );

  always_ff @(posedge clk) begin
    valid_q[0] <= group_ok_q[1] && group_q.valid;
    multi_q[0] <= group_q.multi;
    index_q[0] <= group_q.index;
    fault_q[0] <= !group_ok_q[1] || (group_q.valid && group_q.multi
        && 16'(group_q.index) >= bucket_range_q[1].length);
    valid_q[1] <= valid_q[0];
    multi_q[1] <= multi_q[0];
    index_q[1] <= index_q[0];
    fault_q[1] <= fault_q[0];
    bucket_hop_q <= bucket_read;
  end

  // ---------------------------------------------------------------------------------------------
  // Cycles 4 and 5: hop.

  hop_index_t hop_index;
  hop_t hop_read;
  logic found_q, late_fault_q;
  assign hop_index = multi_q[1] ? bucket_hop_q : index_q[1];

  card_ram #(
      .WIDTH($bits(hop_t)),
      .DEPTH(HOPS)
  ) hops (
      .clk,
      .wr_en_i  (wr_hop_en),
      .wr_addr_i(HOP_BITS'(wr_segments_i.hop.base + wr_index_i[15:0])),
      .wr_data_i(wr_data_i),
      .rd_addr_i(HOP_BITS'(hop_range_q[3].base + 16'(hop_index))),
      .rd_data_o(hop_read)
  );

  always_ff @(posedge clk) begin
    found_q <= valid_q[1] && !fault_q[1] && 16'(hop_index) < hop_range_q[3].length;
    late_fault_q <= fault_q[1] || (valid_q[1] && 16'(hop_index) >= hop_range_q[3].length);
    hop_o <= hop_read;
    found_o <= found_q && hop_read.valid;
    fault_o <= late_fault_q;
  end

endmodule
