#pragma once

#include <chrono>
#include <string>

#include <nanobind/nanobind.h>

#include "topreduce/comm/communicator.h"

// One file for each C++ folder or header that has a Python face.
void bind_catalog(nanobind::module_& module);
void bind_comm(nanobind::module_& module);
void bind_device(nanobind::module_& module);
void bind_layout(nanobind::module_& module);
void bind_reducer(nanobind::module_& module);
void bind_stats(nanobind::module_& module);
void bind_tuning(nanobind::module_& module);

/// In UTF-8; ValueError for text that has none.
std::string text_of(nanobind::handle text);
/// An object as an error shows it: briefly.
std::string shown(nanobind::handle object);
/// A TypeError: "what, not object".
nanobind::builtin_exception wrong_type(const std::string& what, nanobind::handle object);

/// Until `wake` is called on a communicator with sockets, or time is up; whether it was called.
bool wait_for_wake(topreduce::Communicator& comm, std::chrono::nanoseconds most);
/// The same, or until something comes.
bool wait_for_news(topreduce::Communicator& comm, std::chrono::milliseconds most);
