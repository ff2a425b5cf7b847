// Macros for proofs of two copies of a module, copy[0].dut and copy[1].dut, whose writes differ.

// A memory of both copies; see card_ram.sv. `mine_read` is true if the address that copy 0 reads
// belongs to the VE whose frames must not change, `mine_row` if the row does. `first_q` is 1 in the
// first cycles, in which both copies have the same contents.
`define PAIR(ram, mine_read, mine_row) \
  always_comb begin \
    assume (copy[0].dut.ram.row == copy[1].dut.ram.row); \
    if (copy[0].dut.ram.rd_addr_i == copy[1].dut.ram.rd_addr_i && (mine_read)) \
      assume (copy[0].dut.ram.other == copy[1].dut.ram.other); \
    if (first_q) assume (copy[0].dut.ram.word_q == copy[1].dut.ram.word_q); \
    else if (mine_row) assert (copy[0].dut.ram.word_q == copy[1].dut.ram.word_q); \
  end

// A memory of which the VE has a part, counted in 2 ** `shift` rows.
`define PAIR_OF_PART(ram, part, shift) \
  `PAIR(ram, \
    (32'(copy[0].dut.ram.rd_addr_i) >> shift) - 32'(part.base) < 32'(part.length), \
    (32'(copy[0].dut.ram.row) >> shift) - 32'(part.base) < 32'(part.length))

// A memory that has 2 ** `shift` rows for each VE.
`define PAIR_OF_VE(ram, shift) \
  `PAIR(ram, copy[0].dut.ram.rd_addr_i >> shift == 32'(own_ve_i), \
    copy[0].dut.ram.row >> shift == 32'(own_ve_i))
