// Adds millrace_native.enginemodel.simulate.
#pragma once

#include <nanobind/nanobind.h>

namespace millrace {

void bind_replica(nanobind::module_& module);

}  // namespace millrace
