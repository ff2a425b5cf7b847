// Context registers: what a virtual environment (VE) and the super page set for each vport.
//
// Latency: 2 cycles. One look-up per cycle, of an ingress and an egress vport at the same time. So
// a frame that leaves by its ingress vport sees one state of it.
module card_context
  import card_pkg::*;
#(
    parameter  int VES     = 32,
    localparam int VE_BITS = VES > 1 ? $clog2(VES) : 1
) (
    input  logic               clk,
    input  logic [VE_BITS-1:0] ve_i,
    input  vport_t             ingress_i,
    input  vport_t             egress_i,
    output context_t           ingress_o,
    output logic               ingress_attached_o,
    output port_t              ingress_port_o,
    output context_t           egress_o,
    output attachment_t        egress_attachment_o,

    // Write bus; `wr_refused_o` is in the same cycle.
    input  logic               wr_valid_i,
    input  table_t             wr_table_i,
    input  logic [VE_BITS-1:0] wr_ve_i,
    input  table_index_t       wr_index_i,
    input  attachment_t        wr_data_i,           // the wider of the types
    output logic               wr_refused_o
);

  localparam int ROWS = VES * 16;
  localparam int ROW_BITS = $clog2(ROWS);

  logic wr_bounds, wr_context, wr_attachment;
  always_comb begin
    wr_bounds = wr_index_i < 32'd16;
    wr_context = wr_valid_i && wr_bounds && wr_table_i == TABLE_CONTEXT;
    wr_attachment = wr_valid_i && wr_bounds && wr_table_i == TABLE_ATTACHMENT;
    wr_refused_o = wr_valid_i && !wr_bounds
        && wr_table_i inside {TABLE_CONTEXT, TABLE_ATTACHMENT};
  end

  logic [ROW_BITS-1:0] wr_row, ingress_row, egress_row;
  assign wr_row = ROW_BITS'({wr_ve_i, wr_index_i[3:0]});
  assign ingress_row = ROW_BITS'({ve_i, ingress_i});
  assign egress_row = ROW_BITS'({ve_i, egress_i});

  context_t ingress, egress;
  attachment_t egress_attachment;
  logic ingress_attached;
  port_t ingress_port;

  card_ram #(
      .WIDTH($bits(context_t)),
      .DEPTH(ROWS)
  ) ingress_contexts (
      .clk,
      .wr_en_i  (wr_context),
      .wr_addr_i(wr_row),
      .wr_data_i(wr_data_i[$bits(context_t)-1:0]),
      .rd_addr_i(ingress_row),
      .rd_data_o(ingress)
  );
  card_ram #(
      .WIDTH($bits(context_t)),
      .DEPTH(ROWS)
  ) egress_contexts (
      .clk,
      .wr_en_i  (wr_context),
      .wr_addr_i(wr_row),
      .wr_data_i(wr_data_i[$bits(context_t)-1:0]),
      .rd_addr_i(egress_row),
      .rd_data_o(egress)
  );
  card_ram #(
      .WIDTH(1 + $bits(port_t)),
      .DEPTH(ROWS)
  ) ingress_attachments (
      .clk,
      .wr_en_i  (wr_attachment),
      .wr_addr_i(wr_row),
      .wr_data_i({wr_data_i.attached, wr_data_i.port}),
      .rd_addr_i(ingress_row),
      .rd_data_o({ingress_attached, ingress_port})
  );
  card_ram #(
      .WIDTH($bits(attachment_t)),
      .DEPTH(ROWS)
  ) egress_attachments (
      .clk,
      .wr_en_i  (wr_attachment),
      .wr_addr_i(wr_row),
      .wr_data_i,
      .rd_addr_i(egress_row),
      .rd_data_o(egress_attachment)
  );

  always_ff @(posedge clk) begin
    ingress_o <= ingress;
    ingress_attached_o <= ingress_attached;
    ingress_port_o <= ingress_port;
    egress_o <= egress;
    egress_attachment_o <= egress_attachment;
  end

endmodule
