// C functions around a Verilated module, for src/ffi.rs.
//
// No exception leaves them: it would end in Rust. The process ends instead.
//
// Macros from build.rs: MODEL is the model's class, HEADER its header, NAME the symbol of its
// functions. INPUTS(X) and OUTPUTS(X) apply X to the ports that src/pins.rs lists, in its order.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "verilated.h"
#include HEADER

extern "C" {

// The same layout as `ModelFunctions` in src/ffi.rs.
struct Functions {
    size_t input_bytes;
    size_t output_bytes;
    void* (*create)(uint32_t seed);
    void (*destroy)(void* model);
    void (*settle)(void* model, const unsigned char* inputs);
    void (*read)(void* model, unsigned char* outputs);
    void (*edge)(void* model);
};
extern const Functions NAME;

}  // extern "C"

namespace {

struct Instance {
    VerilatedContext context;
    std::unique_ptr<MODEL> model;
};

MODEL& model_of(void* handle) {
    return *static_cast<Instance*>(handle)->model;
}

// Memories and registers begin with random contents that depend on `seed`, or with 0 for seed 0.
void* create(uint32_t seed) noexcept {
    auto instance = new Instance;
    instance->context.randReset(seed == 0 ? 0 : 2);
    instance->context.randSeed(static_cast<int>(seed & 0x7fffffff));
    instance->model = std::make_unique<MODEL>(&instance->context, "card");
    instance->model->clk = 0;
    instance->model->eval();
    return instance;
}

void destroy(void* handle) noexcept {
    model_of(handle).final();
    delete static_cast<Instance*>(handle);
}

// Sets the inputs while the clock is low.
void settle(void* handle, const unsigned char* from) noexcept {
    MODEL& model = model_of(handle);
#define SET(port)                                \
    std::memcpy(&model.port, from, sizeof model.port); \
    from += sizeof model.port;
    INPUTS(SET)
    model.clk = 0;
    model.eval();
}

void read(void* handle, unsigned char* to) noexcept {
    MODEL& model = model_of(handle);
#define GET(port)                              \
    std::memcpy(to, &model.port, sizeof model.port); \
    to += sizeof model.port;
    OUTPUTS(GET)
}

// Raises the clock.
void edge(void* handle) noexcept {
    MODEL& model = model_of(handle);
    model.clk = 1;
    model.eval();
}

#define PLUS_SIZE(port) +sizeof(MODEL::port)

}  // namespace

const Functions NAME = {
    0 INPUTS(PLUS_SIZE), 0 OUTPUTS(PLUS_SIZE), create, destroy, settle, read, edge,
};
