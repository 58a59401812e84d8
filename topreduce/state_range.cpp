#include "topreduce/state_range.h"

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>

namespace topreduce {

void expect_in_range(std::string_view name, double value, const StateRange& range) {
  const bool whole = range.kind == StateRange::Kind::whole;
  if (value >= range.least && value <= range.most && (!whole || value == std::floor(value))) return;
  std::ostringstream text;
  text << "state: " << name << " is " << value << ", expected " << (whole ? "a whole number " : "")
       << "from " << range.least << " to " << range.most;
  throw std::invalid_argument(text.str());
}

void visit_number(StateVisitor& visitor, std::string_view name, double& value,
                  const StateRange& range) {
  double loaded = value;
  visitor.number(name, loaded);
  if (visitor.purpose() == StateVisitor::Purpose::save) return;
  expect_in_range(name, loaded, range);
  if (visitor.purpose() == StateVisitor::Purpose::load) value = loaded;
}

}  // namespace topreduce
