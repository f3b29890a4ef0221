#include <cstdio>
#include <exception>

#include "expect.hpp"

int main() {
    int failed = 0;
    for (const auto& test : millrace::kvcopy::testing::all_tests()) {
        try {
            test.body();
        } catch (const std::exception& error) {
            std::printf("FAILED %s\n  %s\n", test.name.c_str(), error.what());
            ++failed;
        }
    }
    std::printf("kvcopy: %zu tests, %d failed\n", millrace::kvcopy::testing::all_tests().size(), failed);
    return failed == 0 ? 0 : 1;
}
