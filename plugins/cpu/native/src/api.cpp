// The C interface; plugins/cpu/native/library.py declares it to Python. Nothing is thrown across it: a call that
// returns a status says 0 for done, 1 for no memory, 2 for arguments that point outside the model or its cache, 3 for
// anything else, as where the system gives no thread.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "kernels.h"
#include "model.h"
#include "step.h"
#include "threads.h"

using namespace chipmesh;

namespace {

enum MatrixName : std::int32_t { kQkv = 0, kOut = 1, kGateUp = 2, kDown = 3, kHead = 4 };
enum VectorName : std::int32_t { kInputNorm = 0, kPostNorm = 1, kFinalNorm = 2, kCosSin = 3 };

struct Program {
    Program(const Sizes& sizes, bool int8, const Kernels& kernels, int threads)
        : model{sizes, int8, std::vector<Layer>(sizes.layers), {}, {}, kF32, {}, {}}, team(threads), step(model, kernels, team) {}
    Model model;
    Team team;
    Step step;
};

Matrix& matrix_of(Program& program, std::int32_t name, std::int64_t layer) {
    if (name == kHead) return program.model.head;
    Layer& own = program.model.layers[layer];
    return name == kQkv ? own.qkv : name == kOut ? own.out : name == kGateUp ? own.gate_up : own.down;
}

std::vector<float>& vector_of(Program& program, std::int32_t name, std::int64_t layer) {
    if (name == kFinalNorm) return program.model.final_norm;
    if (name == kCosSin) return program.model.cos_sin;
    return name == kInputNorm ? program.model.layers[layer].input_norm : program.model.layers[layer].post_norm;
}

template <class Work>
int guarded(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (...) {
        return 3;
    }
}

bool supported(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (std::strcmp(name, "avx2") == 0) return avx2;
    if (std::strcmp(name, "avx512") == 0) return avx512;
    if (std::strcmp(name, "avx512_vnni") == 0) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return std::strcmp(name, "baseline") == 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The kernels of a name, or with "" the best that this processor runs; null where there are none.
const Kernels* chipmesh_find_kernels(const char* name) {
    const Kernels* all[] = {
#if defined(CHIPMESH_HAS_AVX512_VNNI)
        avx512_vnni_kernels(),
#endif
#if defined(CHIPMESH_HAS_AVX512)
        avx512_kernels(),
#endif
#if defined(CHIPMESH_HAS_AVX2)
        avx2_kernels(),
#endif
        baseline_kernels(),
    };
    for (const Kernels* each : all)
        if (supported(each->name) && (*name == '\0' || std::strcmp(name, each->name) == 0)) return each;
    return nullptr;
}

const char* chipmesh_kernels_name(const Kernels* kernels) { return kernels->name; }

// int8: products with weights in blocks take rows in int8.
Program* chipmesh_create(const Sizes* sizes, std::int32_t int8, const Kernels* kernels, std::int32_t threads) {
    Program* made = nullptr;
    (void)guarded([&] { made = new Program(*sizes, int8 != 0, *kernels, threads); });
    return made;
}

void chipmesh_destroy(Program* program) { delete program; }

int chipmesh_set_vector(Program* program, std::int32_t name, std::int64_t layer, const float* values, std::int64_t size) {
    return guarded([&] { vector_of(*program, name, layer).assign(values, values + size); });
}

int chipmesh_set_matrix(Program* program, std::int32_t name, std::int64_t layer, std::int32_t encoding,
                        const std::uint8_t* rows, std::int64_t outputs, std::int64_t inner, const float* bias) {
    return guarded([&] {
        Matrix& m = matrix_of(*program, name, layer);
        m.encoding = static_cast<Encoding>(encoding);
        m.int8 = program->model.int8 && is_in_blocks(m.encoding);
        m.outputs = outputs, m.inner = inner, m.panels = (outputs + kPanel - 1) / kPanel;
        m.stride = panel_bytes(m.encoding, inner);
        m.packed = Memory(m.panels * m.stride);
        if (bias != nullptr) m.bias.assign(bias, bias + outputs);
        Team& team = program->team;
        const Team::Job job = [&](Walk& walk) {
            walk.each(m.panels, [&](std::int64_t panel) { pack_panels(m, rows, panel, panel + 1); });
        };
        team.run(job);
        team.settle();
    });
}

// rows: as stored, one after the other -> out [count][inner].
void chipmesh_decode(const Kernels* kernels, std::int32_t encoding, const std::uint8_t* rows, std::int64_t count,
                     std::int64_t inner, float* out) {
    const auto own = static_cast<Encoding>(encoding);
    for (std::int64_t row = 0; row < count; ++row)
        kernels->decode_row(own, rows + row * row_bytes(own, inner), inner, out + row * inner);
}

int chipmesh_set_embedding(Program* program, std::int32_t encoding, const std::uint8_t* rows, std::int64_t bytes) {
    return guarded([&] {
        program->model.embedding_encoding = static_cast<Encoding>(encoding);
        program->model.embedding.assign(rows, rows + bytes);
    });
}

int chipmesh_run(Program* program, const StepArguments* arguments) {
    bool sound = true;
    const int status = guarded([&] { sound = program->step.run(*arguments); });
    return sound ? status : 2;
}

int chipmesh_start_timing(Program* program, std::int64_t most_runs) {
    return guarded([&] { program->step.start_timing(static_cast<std::size_t>(most_runs)); });
}

// calls, seconds: [kPhases], since start_timing. runs: room for most_runs of then. Returns how many there are.
std::int64_t chipmesh_stop_timing(Program* program, std::int64_t* calls, double* seconds, PhaseRun* runs) {
    const Timing taken = program->step.stop_timing();
    std::copy(taken.calls.begin(), taken.calls.end(), calls);
    std::copy(taken.seconds.begin(), taken.seconds.end(), seconds);
    std::copy(taken.runs.begin(), taken.runs.end(), runs);
    return static_cast<std::int64_t>(taken.runs.size());
}

// For benchmarks: the processor's limits, and one product by itself.

double chipmesh_fma(const Kernels* kernels, std::int64_t turns, float* sink) {
    return static_cast<double>(kernels->fma_limit(turns, sink));
}

double chipmesh_int8(const Kernels* kernels, std::int64_t turns, float* sink) {
    return static_cast<double>(kernels->int8_limit(turns, sink));
}

float chipmesh_read(const Kernels* kernels, const float* values, std::int64_t count) {
    return kernels->read_limit(values, count);
}

// a: rows [rows][inner] in float32, in Blocks where the matrix takes them as they are.
int chipmesh_multiply(Program* program, std::int32_t name, std::int64_t layer, const float* a, std::int64_t rows, float* out) {
    return guarded([&] { program->step.multiply_alone(matrix_of(*program, name, layer), a, rows, out); });
}

}  // extern "C"
#pragma GCC visibility pop
