// Runs a fuzz target without libFuzzer: inputs by a seed, some of them earlier ones with a few bytes changed.
//
//     planner_fuzz RUNS SEED

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

namespace {

constexpr std::size_t BYTES_MAX = 400;
constexpr std::size_t CORPUS_MAX = 64;

class Inputs {
public:
    explicit Inputs(std::uint64_t seed) : _random(seed) {}

    std::vector<std::uint8_t> next() {
        std::vector<std::uint8_t> input = _corpus.empty() || below(2) == 0 ? fresh() : changed();
        if (_corpus.size() < CORPUS_MAX) {
            _corpus.push_back(input);
        } else {
            _corpus[below(CORPUS_MAX)] = input;
        }
        return input;
    }

private:
    std::size_t below(std::size_t bound) { return static_cast<std::size_t>(_random() % bound); }

    std::uint8_t byte() {
        constexpr std::uint8_t EDGES[] = {0, 1, 0x7F, 0x80, 0xFF};
        return below(4) == 0 ? EDGES[below(sizeof EDGES)] : static_cast<std::uint8_t>(below(256));
    }

    std::vector<std::uint8_t> fresh() {
        std::vector<std::uint8_t> input(1 + below(BYTES_MAX));
        for (std::uint8_t& value : input) value = byte();
        return input;
    }

    std::vector<std::uint8_t> changed() {
        std::vector<std::uint8_t> input = _corpus[below(_corpus.size())];
        for (std::size_t left = 1 + below(4); left > 0; --left) input[below(input.size())] = byte();
        if (below(4) == 0) input.resize(1 + below(input.size()));
        return input;
    }

    std::mt19937_64 _random;
    std::vector<std::vector<std::uint8_t>> _corpus;
};

}  // namespace

int main(int count, char** words) {
    const long runs = count > 1 ? std::atol(words[1]) : 100'000;
    const long seed = count > 2 ? std::atol(words[2]) : 1;
    Inputs inputs(static_cast<std::uint64_t>(seed));
    for (long run = 0; run < runs; ++run) {
        const std::vector<std::uint8_t> input = inputs.next();
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::printf("planner_fuzz: %ld inputs of seed %ld, none refuted it\n", runs, seed);
    return 0;
}
