// Reads integer fields of Python objects that have them in slots (msgspec Structs), without a lookup per field.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace millrace {

// Fields of one type, in the order of `names`. Slots are read in place; anything else through getattr.
class StructReader {
public:
    explicit StructReader(std::vector<const char*> names);
    ~StructReader();
    StructReader(const StructReader&) = delete;
    StructReader& operator=(const StructReader&) = delete;

    // Value of field `index`; `none` where it is None. Raises what Python raises where it is no integer of 64 bits.
    std::int64_t read(PyObject* object, std::size_t index, std::int64_t none = -1);

private:
    void learn(PyTypeObject* type);

    std::vector<const char*> names_;
    std::vector<std::ptrdiff_t> offsets_;  // 0: no slot
    PyTypeObject* type_ = nullptr;         // owned
};

}  // namespace millrace
