// Fuzz target: whatever the bytes say, a plan copies what the naive expansion copies, or the input is refused.

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "random_plans.hpp"

namespace {

// Reads numbers off the input; zeros when it is used up.
class Input {
public:
    Input(const std::uint8_t* data, std::size_t bytes) : _data(data), _bytes(bytes) {}

    std::int64_t raw() {
        std::uint64_t value = 0;
        for (int byte = 0; byte < 8; ++byte) value = value << 8 | (_at < _bytes ? _data[_at++] : 0);
        return static_cast<std::int64_t>(value);
    }

    std::int64_t below(std::int64_t bound) {
        const std::int64_t value = _at < _bytes ? _data[_at++] : 0;
        return bound <= 1 ? 0 : value % bound;
    }

private:
    const std::uint8_t* _data;
    std::size_t _bytes;
    std::size_t _at = 0;
};

using namespace millrace::kvcopy;

void fuzz_meaning(Input input) {
    const testing::Case made = testing::make_case([&](std::int64_t bound) { return input.below(bound); });
    if (testing::copied_by_plan(made, 1 + input.below(64)) != testing::copied_naively(made)) std::abort();
}

// Any numbers at all: refused, or planned without touching memory that is not its own (the sanitizers watch).
void fuzz_numbers(Input input) {
    try {
        std::vector<Panel> panels;
        for (std::int64_t left = input.below(4); left > 0; --left) {
            panels.push_back({input.raw(), input.raw(), input.raw(), input.raw(), input.raw()});
        }
        std::vector<std::int64_t> source, target;
        for (std::int64_t left = input.below(6); left > 0; --left) source.push_back(input.raw());
        for (std::int64_t left = input.below(6); left > 0; --left) target.push_back(input.raw());
        Pieces pieces = Planner(panels).plan(source, target);
        if (pieces.count() > panels.size() * source.size()) std::abort();
    } catch (const std::invalid_argument&) {
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
    if (bytes == 0) return 0;
    const Input rest(data + 1, bytes - 1);
    if (data[0] % 4 == 0) {
        fuzz_numbers(rest);
    } else {
        fuzz_meaning(rest);
    }
    return 0;
}
