// Types of the frame path: what surrounds the header pipeline.
package card_frame_pkg;
  import card_pkg::*;

  // Longest frame without its check sequence; the card drops longer ones.
  localparam int MAX_LENGTH = 1714;

  // Cells that are never in use: those on the way out of the free list.
  localparam int SPARE_CELLS = 8;

  // What an output needs to know of a frame besides its bytes.
  typedef struct packed {
    verdict_t verdict;
    logic     group;
    logic     owned;
    ve_t      ve;
    vport_t   vport;
    segment_t segment;
  } frame_meta_t;

  // Frame as a port received it. Its header record carries this as token, for the counters.
  typedef struct packed {
    port_t   port;
    length_t length;  // before padding is cut off
  } ingress_t;

  // Number of cells of a queue: `guarantee` cells are its own, `share` more may come from the pool.
  typedef struct packed {
    logic [15:0] guarantee;
    logic [15:0] share;
  } quota_t;

  typedef logic [7:0] beats_t;

  // A frame in the queues.
  typedef logic [14:0] cell_t;
  typedef struct packed {
    cell_t   at;      // its first cell
    length_t length;
    logic    single;  // one beat
    logic    pooled;  // its cells are the pool's
  } queued_t;

  // Bytes of a cell.
  function automatic int cell_bytes(input int data_bits);
    return data_bits > 512 ? data_bits / 8 : 64;
  endfunction

  // Parts of `bytes` bytes of a frame of `length` bytes: beats or cells.
  function automatic beats_t beats_of(input length_t length, input int bytes);
    return beats_t'((int'(length) + bytes - 1) / bytes);
  endfunction

endpackage
