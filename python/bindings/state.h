#pragma once

#include <span>
#include <vector>

#include <nanobind/nanobind.h>

#include "topreduce/reducer.h"

/// A NumPy array of its own.
nanobind::object copy_of(std::span<const float> values, const std::vector<std::size_t>& shape);

/// Everything that the next step depends on, by parameter name; copies.
nanobind::dict save_state(topreduce::Reducer& reducer);

/// Takes it over again; nanobind::value_error, and no change, if it does not fit.
void load_state(topreduce::Reducer& reducer, const nanobind::object& state);
