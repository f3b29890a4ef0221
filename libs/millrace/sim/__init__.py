"""Virtual time: the runtime that drives the same actors as the live one, with a faulty network and checkers."""
