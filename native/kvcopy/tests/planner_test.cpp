#include "planner.hpp"

#include <random>
#include <set>
#include <stdexcept>
#include <utility>

#include "expect.hpp"
#include "random_plans.hpp"

namespace millrace::kvcopy::testing {

namespace {

constexpr int CASES = 20'000;

Case seeded_case(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    return make_case([&](std::int64_t below) {
        return below <= 1 ? 0 : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below));
    });
}

Planner one_panel() { return Planner({{0, 8, 0, 8, 8}}); }

}  // namespace

TEST(a_plan_copies_what_the_naive_expansion_copies) {
    for (std::uint64_t seed = 0; seed < CASES; ++seed) {
        const Case made = seeded_case(seed);
        EXPECT(copied_by_plan(made, 1 + static_cast<std::int64_t>(seed % 37)) == copied_naively(made));
    }
}

TEST(within_a_panel_no_two_pieces_touch_on_both_sides) {
    for (std::uint64_t seed = 0; seed < CASES; ++seed) {
        Case made = seeded_case(seed);
        if (made.panels.empty()) continue;
        made.panels.resize(1);
        Pieces pieces = Planner(made.panels).plan(made.source, made.target);
        std::set<std::pair<std::int64_t, std::int64_t>> ends;
        for (std::size_t at = 0; at < pieces.count(); ++at) {
            const std::int64_t length = pieces.lengths()[at];
            ends.insert({pieces.source()[at] + length, pieces.target()[at] + length});
        }
        for (std::size_t at = 0; at < pieces.count(); ++at) {
            EXPECT(!ends.contains({pieces.source()[at], pieces.target()[at]}));
        }
    }
}

TEST(a_descending_list_is_one_piece) {
    const std::vector<std::int64_t> source{9, 8, 7}, target{3, 2, 1};
    Pieces pieces = one_panel().plan(source, target);
    EXPECT(pieces.count() == 1);
    EXPECT(pieces.source()[0] == 56 && pieces.target()[0] == 8 && pieces.lengths()[0] == 24);
}

TEST(lists_and_planes_that_cannot_be_are_refused) {
    const std::vector<std::int64_t> none, one{1}, negative{-1}, huge{BLOCK_IDS};
    const Planner planner = one_panel();
    EXPECT_THROWS(std::invalid_argument, planner.plan(one, none));
    EXPECT_THROWS(std::invalid_argument, planner.plan(one, negative));
    EXPECT_THROWS(std::invalid_argument, planner.plan(huge, one));
    EXPECT_THROWS(std::invalid_argument, Planner({{-1, 8, 0, 8, 8}}));
    EXPECT_THROWS(std::invalid_argument, Planner({{0, 8, OFFSET_MAX + 1, 8, 8}}));
    EXPECT_THROWS(std::invalid_argument, Planner({{0, 7, 0, 8, 8}}));
    EXPECT_THROWS(std::invalid_argument, Planner({{0, 8, 0, 8, 0}}));
    EXPECT_THROWS(std::invalid_argument, Planner({{0, STRIDE_MAX + 1, 0, 8, 8}}));
    EXPECT(planner.plan(none, none).count() == 0);
}

TEST(the_largest_ids_and_strides_overflow_nothing) {
    const std::vector<std::int64_t> last{BLOCK_IDS - 1};
    Pieces pieces = Planner({{OFFSET_MAX, STRIDE_MAX, OFFSET_MAX, STRIDE_MAX, STRIDE_MAX}}).plan(last, last);
    EXPECT(pieces.source()[0] == OFFSET_MAX + (BLOCK_IDS - 1) * STRIDE_MAX);
}

}  // namespace millrace::kvcopy::testing
