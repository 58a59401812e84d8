#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace topreduce::laws {

/// `call` must throw std::invalid_argument whose message holds every one of `words`.
template <class Call>
void expect_error(Call&& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one that names " << words.front();
  } catch (const std::invalid_argument& error) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is not in: " << error.what();
    }
  }
}

}  // namespace topreduce::laws
