#include "model.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace chipmesh {

namespace {

constexpr std::int64_t kLargePage = 2 << 20;

// One block of 32 inner values of one column, from its row as stored to its places in the panel.
void place_q8(const std::uint8_t* block, std::uint8_t* out, int column) {
    std::memcpy(out + 2 * column, block, 2);
    for (int i = 0; i < kBlock; ++i) out[64 + i * kPanel + column] = block[2 + i];
}

// values: 16 bytes of which byte i holds values i and 16 + i.
void place_nibbles(const std::uint8_t* values, std::uint8_t* out, int column) {
    for (int word = 0; word < kBlock / 8; ++word) {
        std::uint32_t packed = 0;
        for (int i = 0; i < 8; ++i) {
            const int at = 8 * word + i;
            packed |= static_cast<std::uint32_t>(at < 16 ? values[at] & 15 : values[at - 16] >> 4) << (4 * i);
        }
        std::memcpy(out + (word * kPanel + column) * 4, &packed, 4);
    }
}

// Inner value i of a column among its half's fours.
constexpr int byte_of(int i, int column) { return i / 4 * 64 + column % 16 * 4 + i % 4; }

void place_q8_bytes(const std::uint8_t* values, std::uint8_t* out, int column) {
    for (int i = 0; i < kBlock; ++i) out[column / 16 * 512 + byte_of(i, column)] = values[i] ^ 0x80;
}

void place_nibble_bytes(const std::uint8_t* values, std::uint8_t* out, int column) {
    for (int i = 0; i < kBlock; ++i) {
        const int value = i < 16 ? values[i] & 15 : values[i - 16] >> 4;
        // Fours in pairs: the first below, the second above.
        out[column / 16 * 256 + byte_of(i / 8 * 4 + i % 4, column)] |= value << (i % 8 < 4 ? 0 : 4);
    }
}

void place_for_int8(Encoding encoding, const std::uint8_t* block, std::uint8_t* out, int column) {
    std::memcpy(out + 2 * column, block, 2);
    if (encoding == kQ8_0) return place_q8_bytes(block + 2, out + 64, column);
    if (encoding == kQ4_0) return place_nibble_bytes(block + 2, out + 64, column);
    std::memcpy(out + 64 + 2 * column, block + 2, 2);
    place_nibble_bytes(block + 4, out + 128, column);
}

void place_q4_0(const std::uint8_t* block, std::uint8_t* out, int column) {
    std::memcpy(out + 2 * column, block, 2);
    place_nibbles(block + 2, out + 64, column);
}

void place_q4_1(const std::uint8_t* block, std::uint8_t* out, int column) {
    std::memcpy(out + 2 * column, block, 2);
    std::memcpy(out + 64 + 2 * column, block + 2, 2);
    place_nibbles(block + 4, out + 128, column);
}

void pack_column(const Matrix& m, const std::uint8_t* row, std::uint8_t* panel, int column) {
    const std::int64_t blocks = m.inner / kBlock, from = row_bytes(m.encoding, kBlock), to = m.stride / blocks;
    const int value = m.encoding == kF32 ? 4 : 2;
    for (std::int64_t b = 0; b < blocks; ++b, row += from, panel += to) {
        if (m.int8) {
            place_for_int8(m.encoding, row, panel, column);
            continue;
        }
        switch (m.encoding) {
            case kQ8_0: place_q8(row, panel, column); break;
            case kQ4_0: place_q4_0(row, panel, column); break;
            case kQ4_1: place_q4_1(row, panel, column); break;
            default:
                for (int i = 0; i < kBlock; ++i)
                    std::memcpy(panel + (i * kPanel + column) * value, row + i * value, value);
        }
    }
}

}  // namespace

Memory::Memory(std::int64_t bytes) : bytes_(bytes) {
    const std::int64_t whole = (bytes + kLargePage - 1) / kLargePage * kLargePage;
    void* p = nullptr;
    if (bytes >= kLargePage ? posix_memalign(&p, kLargePage, whole) : posix_memalign(&p, 64, (bytes + 63) / 64 * 64))
        throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    // Advice: where it is not taken, pages are small ones.
    if (bytes >= kLargePage) (void)madvise(p, whole, MADV_HUGEPAGE);
#endif
    data_.reset(static_cast<std::uint8_t*>(p));
    std::memset(p, 0, bytes);
}

void Memory::Release::operator()(std::uint8_t* p) const { std::free(p); }

std::int64_t row_bytes(Encoding encoding, std::int64_t inner) {
    switch (encoding) {
        case kF32: return inner * 4;
        case kBF16:
        case kF16: return inner * 2;
        case kQ8_0: return inner / kBlock * 34;
        case kQ4_0: return inner / kBlock * 18;
        case kQ4_1: return inner / kBlock * 20;
        default: return 0;
    }
}

void pack_panels(Matrix& m, const std::uint8_t* rows, std::int64_t first, std::int64_t last) {
    const std::int64_t size = row_bytes(m.encoding, m.inner);
    for (std::int64_t p = first; p < last; ++p)
        for (int column = 0; column < kPanel && p * kPanel + column < m.outputs; ++column)
            pack_column(m, rows + (p * kPanel + column) * size, m.packed.data() + p * m.stride, column);
}

}  // namespace chipmesh
