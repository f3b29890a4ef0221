// Python's side of the free-block queue: millrace_native.kvcache. Called from libs/millrace/kvcache/native.py.

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "free_queue.hpp"

namespace nb = nanobind;

namespace millrace::kvcache {

namespace {

constexpr int INTERFACE = 1;

using Ids = std::vector<std::int32_t>;

// Block ids of a list. Read in place: nanobind's own conversion takes ten times as long.
Ids ids_of(nb::list blocks) {
    const auto count = static_cast<std::size_t>(PyList_GET_SIZE(blocks.ptr()));
    Ids ids(count);
    for (std::size_t index = 0; index < count; ++index) {
        const long id = PyLong_AsLong(PyList_GET_ITEM(blocks.ptr(), static_cast<Py_ssize_t>(index)));
        if (id == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
        if (id < 0 || id > INT32_MAX) throw nb::index_error("a block's id has at least 0 and at most 31 bits");
        ids[index] = static_cast<std::int32_t>(id);
    }
    return ids;
}

nb::list list_of(const Ids& ids) {
    PyObject* const list = PyList_New(static_cast<Py_ssize_t>(ids.size()));
    if (list == nullptr) throw nb::python_error();
    const nb::list made = nb::steal<nb::list>(list);
    for (std::size_t index = 0; index < ids.size(); ++index) {
        PyObject* const id = PyLong_FromLong(ids[index]);
        if (id == nullptr) throw nb::python_error();
        PyList_SET_ITEM(list, static_cast<Py_ssize_t>(index), id);
    }
    return made;
}

}  // namespace

NB_MODULE(kvcache, module) {
    module.attr("INTERFACE") = INTERFACE;
    nb::class_<FreeQueue>(module, "FreeQueue")
        .def("__init__",
             [](FreeQueue* place, nb::list order, std::int32_t total) { new (place) FreeQueue(ids_of(order), total); })
        .def("take", [](FreeQueue& queue, std::int32_t count, std::int32_t after, std::int32_t window,
                        std::int32_t hit_window) { return list_of(queue.take(count, after, window, hit_window)); })
        .def("remove", &FreeQueue::remove)
        .def("append", [](FreeQueue& queue, nb::list blocks) { queue.append(ids_of(blocks)); })
        .def("prepend", [](FreeQueue& queue, nb::list blocks) { queue.prepend(ids_of(blocks)); })
        .def("after", [](const FreeQueue& queue, std::int32_t block) { return list_of(queue.after(block)); })
        .def_prop_ro("count", &FreeQueue::count);
}

}  // namespace millrace::kvcache
