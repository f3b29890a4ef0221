#include "struct_reader.hpp"

// structmember.h went into Python.h with 3.12; both name the same kind of slot.
#include <structmember.h>

namespace millrace {

namespace {

std::int64_t as_int(PyObject* value, std::int64_t none) {
    if (value == Py_None) return none;
    const std::int64_t result = PyLong_AsLongLong(value);
    if (result == -1 && PyErr_Occurred() != nullptr) throw nanobind::python_error();
    return result;
}

// Where the object keeps this attribute; 0 where it is not a plain slot.
std::ptrdiff_t slot_offset(PyTypeObject* type, const char* name) {
    const nanobind::object attribute = nanobind::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
    if (!attribute.is_valid()) {
        PyErr_Clear();
        return 0;
    }
    if (Py_TYPE(attribute.ptr()) != &PyMemberDescr_Type) return 0;
    const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(attribute.ptr())->d_member;
    return member->type == T_OBJECT_EX ? static_cast<std::ptrdiff_t>(member->offset) : 0;
}

}  // namespace

StructReader::StructReader(std::vector<const char*> names) : names_(std::move(names)), offsets_(names_.size()) {}

StructReader::~StructReader() { Py_XDECREF(type_); }

void StructReader::learn(PyTypeObject* type) {
    for (std::size_t index = 0; index < names_.size(); ++index) offsets_[index] = slot_offset(type, names_[index]);
    Py_INCREF(type);
    Py_XDECREF(type_);
    type_ = type;
}

std::int64_t StructReader::read(PyObject* object, std::size_t index, std::int64_t none) {
    if (Py_TYPE(object) != type_) learn(Py_TYPE(object));
    if (offsets_[index] != 0) {
        PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offsets_[index]);
        if (value != nullptr) return as_int(value, none);
    }
    const nanobind::object value = nanobind::steal(PyObject_GetAttrString(object, names_[index]));
    if (!value.is_valid()) throw nanobind::python_error();
    return as_int(value.ptr(), none);
}

}  // namespace millrace
