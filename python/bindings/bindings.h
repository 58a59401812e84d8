#pragma once

#include <nanobind/nanobind.h>

// One file for each C++ folder or header that has a Python face.
void bind_catalog(nanobind::module_& module);
void bind_comm(nanobind::module_& module);
void bind_device(nanobind::module_& module);
void bind_layout(nanobind::module_& module);
void bind_reducer(nanobind::module_& module);
void bind_stats(nanobind::module_& module);
void bind_tuning(nanobind::module_& module);
