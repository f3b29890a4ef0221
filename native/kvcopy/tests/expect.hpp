// As much of a test framework as is needed here: named tests that register themselves, and one expectation.
#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace millrace::kvcopy::testing {

struct Test {
    std::string name;
    std::function<void()> body;
};

inline std::vector<Test>& all_tests() {
    static std::vector<Test> tests;
    return tests;
}

struct Registered {
    Registered(std::string name, std::function<void()> body) {
        all_tests().push_back({std::move(name), std::move(body)});
    }
};

inline void expect(bool holds, const char* what, const char* file, int line) {
    if (holds) return;
    std::ostringstream text;
    text << file << ":" << line << ": not so: " << what;
    throw std::logic_error(text.str());
}

template <typename Raised>
void expect_throws(const std::function<void()>& body, const char* what, const char* file, int line) {
    try {
        body();
    } catch (const Raised&) {
        return;
    }
    expect(false, what, file, line);
}

}  // namespace millrace::kvcopy::testing

#define EXPECT(condition) ::millrace::kvcopy::testing::expect((condition), #condition, __FILE__, __LINE__)
#define EXPECT_THROWS(type, ...)                                                                              \
    ::millrace::kvcopy::testing::expect_throws<type>([&] { __VA_ARGS__; }, "throws " #type ": " #__VA_ARGS__, \
                                                     __FILE__, __LINE__)
#define TEST(name)                                                                        \
    static void name();                                                                   \
    static const ::millrace::kvcopy::testing::Registered registered_##name(#name, &name); \
    static void name()
