// Tables of the design that has look-up tables for each VE, as the paper has. The driver computes
// the words of the associative memories, so that writes need no logic.
package replicated_pkg;
  import card_pkg::*;

  // Each entry: `index` on the write bus, and the data, right-aligned.
  typedef enum logic [2:0] {
    VMAC_WORD  = 3'd0,  // {part of the MAC address, value}; one bit per entry
    VMAC_ENTRY = 3'd1,  // entry; vmac_place_t
    ROUTE_BITS = 3'd2,  // entry; one bit per digit of the address: see replicated_tcam
    ROUTE_HOP  = 3'd3,  // entry; route_t
    ARP_WORD   = 3'd4,  // {part of the address, value}; one bit per entry
    ARP_MAC    = 3'd5,  // entry; mac_t
    SOURCE_MAC = 3'd6   // port; mac_t
  } replicated_table_t;

  localparam int ENTRIES = 32;  // routes of a VE, and neighbours of a VE
  localparam int ENTRY_BITS = $clog2(ENTRIES);

  // Ports of a VE are the card's four ports.
  typedef logic [1:0] small_port_t;

  typedef struct packed {
    ve_t         ve;
    small_port_t port;
  } vmac_place_t;

  typedef struct packed {
    logic        valid;
    logic        local_;    // the router's own address
    logic        direct;    // the neighbour is the destination
    small_port_t port;
    logic [31:0] next_hop;
  } route_t;

endpackage
