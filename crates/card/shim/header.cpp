// C functions around the Verilated card_header, for src/ffi.rs.
//
// Macros from build.rs: MODEL is the model's class, HEADER its header, NAME(f) the name of
// function f of this model.

#include <cstdint>
#include <cstring>
#include <memory>

#include "verilated.h"
#include HEADER

extern "C" {

// Inputs of a cycle; the same layout as `HeaderPins` in src/ffi.rs.
struct HeaderPins {
    uint64_t now;
    uint64_t header[9];  // least significant word first
    uint32_t wr_data[6];
    uint32_t wr_index;
    uint8_t rst;
    uint8_t valid;
    uint8_t wr_valid;
    uint8_t wr_table;
    uint8_t wr_ve;
};

// Outputs after the clock edge; the same layout as `HeaderResultPins` in src/ffi.rs.
struct HeaderResultPins {
    uint64_t header[9];
    uint8_t valid;
    uint8_t fault;
    uint8_t excess;
    uint8_t wr_refused;
};

}  // extern "C"

namespace {

struct Instance {
    VerilatedContext context;
    std::unique_ptr<MODEL> model;
};

}  // namespace

extern "C" {

// Memories and registers begin with random contents that depend on `seed`.
void* NAME(new)(uint32_t seed) {
    auto instance = new Instance;
    instance->context.randReset(2);
    instance->context.randSeed(static_cast<int>(seed & 0x7fffffff));
    instance->model = std::make_unique<MODEL>(&instance->context, "header");
    instance->model->clk = 0;
    instance->model->eval();
    return instance;
}

void NAME(free)(void* handle) {
    auto instance = static_cast<Instance*>(handle);
    instance->model->final();
    delete instance;
}

void NAME(step)(void* handle, const HeaderPins* in, HeaderResultPins* out) {
    MODEL& model = *static_cast<Instance*>(handle)->model;
    static_assert(sizeof model.header_i == sizeof in->header, "566 bits in 18 words");
    static_assert(sizeof model.header_o == sizeof out->header, "572 bits in 18 words");
    model.rst = in->rst;
    model.now_i = in->now;
    model.valid_i = in->valid;
    std::memcpy(&model.header_i[0], in->header, sizeof in->header);
    model.wr_valid_i = in->wr_valid;
    model.wr_table_i = in->wr_table;
    model.wr_ve_i = in->wr_ve;
    model.wr_index_i = in->wr_index;
    std::memcpy(&model.wr_data_i[0], in->wr_data, sizeof in->wr_data);
    model.clk = 0;
    model.eval();
    model.clk = 1;
    model.eval();
    std::memcpy(out->header, &model.header_o[0], sizeof out->header);
    out->valid = model.valid_o;
    out->fault = model.fault_o;
    out->excess = model.excess_o;
    out->wr_refused = model.wr_refused_o;
}

}  // extern "C"
