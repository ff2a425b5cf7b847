// C functions around one Verilated variant of card_lpm, for src/ffi.rs.
//
// Macros from build.rs: MODEL is the variant's class, HEADER its header, NAME(f) the name of
// function f of this variant.

#include <cstdint>
#include <cstring>
#include <memory>

#include "verilated.h"
#include HEADER

extern "C" {

// Inputs of a cycle; the same layout as `LpmIn` in src/ffi.rs.
struct LpmIn {
    uint32_t key[4];  // least significant word first
    uint32_t wr_data[6];
    uint32_t wr_index;
    uint16_t token;
    uint8_t rst;
    uint8_t valid;
    uint8_t ve;
    uint8_t is_v6;
    uint8_t wr_valid;
    uint8_t wr_table;
    uint8_t wr_level;
    uint8_t wr_ve;
};

// Outputs after the clock edge; the same layout as `LpmOut` in src/ffi.rs.
struct LpmOut {
    uint16_t leaf;
    uint16_t token;
    uint8_t valid;
    uint8_t fault;
    uint8_t ve;
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
    instance->model = std::make_unique<MODEL>(&instance->context, "lpm");
    instance->model->clk = 0;
    instance->model->eval();
    return instance;
}

void NAME(free)(void* handle) {
    auto instance = static_cast<Instance*>(handle);
    instance->model->final();
    delete instance;
}

void NAME(step)(void* handle, const LpmIn* in, LpmOut* out) {
    MODEL& model = *static_cast<Instance*>(handle)->model;
    model.rst = in->rst;
    model.valid_i = in->valid;
    model.ve_i = in->ve;
    model.is_v6_i = in->is_v6;
    model.token_i = in->token;
    std::memcpy(&model.key_i[0], in->key, sizeof in->key);
    model.wr_valid_i = in->wr_valid;
    model.wr_table_i = in->wr_table;
    model.wr_level_i = in->wr_level;
    model.wr_ve_i = in->wr_ve;
    model.wr_index_i = in->wr_index;
    std::memcpy(&model.wr_data_i[0], in->wr_data, sizeof in->wr_data);
    model.clk = 0;
    model.eval();
    model.clk = 1;
    model.eval();
    out->leaf = model.leaf_o;
    out->token = model.token_o;
    out->valid = model.valid_o;
    out->fault = model.fault_o;
    out->ve = model.ve_o;
    out->wr_refused = model.wr_refused_o;
}

}  // extern "C"
