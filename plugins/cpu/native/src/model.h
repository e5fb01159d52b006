// A decoder of Llama's form: its sizes, and its weights packed for the kernels.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace chipmesh {

// Memory on its own pages, large ones where the system has them: weights are read front to back once a step.
class Memory {
  public:
    Memory() = default;
    explicit Memory(std::int64_t bytes);
    std::uint8_t* data() const { return data_.get(); }
    std::int64_t bytes() const { return bytes_; }
    float* floats() const { return reinterpret_cast<float*>(data_.get()); }

  private:
    struct Release {
        void operator()(std::uint8_t* p) const;
    };
    std::unique_ptr<std::uint8_t, Release> data_;
    std::int64_t bytes_ = 0;
};

struct Matrix {
    Encoding encoding = kF32;
    std::int64_t outputs = 0, inner = 0, panels = 0, stride = 0;  // stride: bytes of a panel
    bool int8 = false;  // packed for rows in int8
    Memory packed;
    std::vector<float> bias;  // empty, or one for each output of whole panels

    const std::uint8_t* panel(std::int64_t index) const { return packed.data() + index * stride; }
};

// Bytes of a row as stored.
std::int64_t row_bytes(Encoding encoding, std::int64_t inner);
// rows: [outputs][row_bytes]; panels [first, last) of `matrix`, whose sizes and memory are there already.
void pack_panels(Matrix& matrix, const std::uint8_t* rows, std::int64_t first, std::int64_t last);

struct Layer {
    std::vector<float> input_norm, post_norm;
    Matrix qkv, out, gate_up, down;  // gate_up: 16 gates, then their 16 ups, and so on
};

struct Sizes {
    std::int64_t layers, hidden, inner, heads, kv_heads, head_size, vocab, context;
    float eps, scale;
    std::int64_t query() const { return heads * head_size; }
    std::int64_t qkv() const { return (heads + 2 * kv_heads) * head_size; }
};

constexpr bool is_in_blocks(Encoding encoding) { return encoding == kQ8_0 || encoding == kQ4_0 || encoding == kQ4_1; }

struct Model {
    Sizes sizes;
    bool int8;  // products with weights in blocks take rows in int8
    std::vector<Layer> layers;
    std::vector<float> final_norm, cos_sin;  // cos_sin [context][head_size]
    Encoding embedding_encoding = kF32;
    std::vector<std::uint8_t> embedding;  // rows as stored
    Matrix head;
};

}  // namespace chipmesh
