// What changes between steps: settings, the order of buckets, the state.

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "topreduce/agreement.h"
#include "topreduce/fingerprint.h"
#include "topreduce/reducer/impl.h"
#include "topreduce/state_range.h"
#include "topreduce/version.h"
#include "topreduce/wire/little_endian.h"

namespace topreduce {
namespace {

// Limits of a search that is not made would be ignored. `given`: in one call. One that gives all of
// them is the spec of a Reducer, which holds limits in any case.
void expect_no_idle_limits(const Spec& given, const Pipeline& pipeline) {
  if (pipeline.rule != Pipeline::Rule::fixed) return;
  constexpr const char* kLimits[] = {"overhead", "ramp_overhead", "min_density", "max_density",
                                     "budget_bytes"};
  std::string limits;
  std::size_t count = 0;
  for (const char* limit : kLimits) {
    if (!given.settings.contains(limit)) continue;
    limits += (limits.empty() ? "" : " and ") + std::string(limit);
    ++count;
  }
  if (count == 0 || count == std::size(kLimits)) return;
  throw std::invalid_argument(
      limits + ": for density=auto only, and density=" + pipeline.spec.settings.at("density") +
      " is fixed; leave out one of the two");
}

}  // namespace

Reducer::Impl::Impl(Layout whole, const Spec& method)
    : layout(std::move(whole)), given(method), pipeline(layout, method) {
  // Without a density this may be a spec for `attach`, which takes auto.
  const bool sends_everything = pipeline.choice == Choice::everything;
  if (given.settings.contains("density") || sends_everything)
    expect_no_idle_limits(given, pipeline);
  describe_run();
  added.assign(layout.count(), 0);
  held.resize(layout.count());
  forget_order();
}

// Settings changed: the ranks must agree anew.
void Reducer::Impl::describe_run() {
  Spec shown = pipeline.spec;
  shown.settings.erase("threads");  // each rank's own affair
  if (mode == Mode::bypass) shown.name += ", bypassed";
  description = "topreduce " + std::string(version()) + "\n" + describe(layout, shown);
  run = Fingerprint().add(description).value();
  agreed_ranks = 0;
}

// The method or the device changes: moves what is owed to where it must live. If it cannot,
// nothing has changed.
void Reducer::Impl::move_memory(feedback::Feedback& memory, const Pipeline& next, Device* wanted) {
  Device* const home = wanted != nullptr && next.works_on(*wanted) ? wanted : nullptr;
  on_device = memory.move_to(home) && home != nullptr;
  device = wanted;
}

// Others may join who have seen no step: all start as they do.
void Reducer::Impl::forget_order() {
  order = reverse_order(layout);
  order_is = Order::reversed;
  plan_buckets();
}

void Reducer::Impl::agree_on_order(Communicator& communicator) {
  if (order_is != Order::observed || pipeline.granularity == Granularity::model) return;
  order_bytes.resize(order.size() * sizeof(std::uint32_t));
  for (std::size_t i = 0; i < order.size(); ++i) {
    wire::store(order_bytes.data() + i * sizeof(std::uint32_t),
                static_cast<std::uint32_t>(order[i]));
  }
  communicator.enter({comm::Place::Kind::order, step});
  communicator.broadcast(order_bytes, 0);
  std::vector<std::size_t> heard(order.size());
  for (std::size_t i = 0; i < heard.size(); ++i) {
    heard[i] = wire::load<std::uint32_t>(order_bytes.data() + i * sizeof(std::uint32_t));
  }
  if (!is_order(heard, layout.count())) {
    throw WireError(communicator.mailbox().title(communicator.rank()) + ", step " +
                    std::to_string(step) +
                    ", the order of buckets: rank 0 sent no order of the parameters");
  }
  order = std::move(heard);
  order_is = Order::agreed;
  plan_buckets();
}

void Reducer::Impl::plan_buckets() {
  plan = BucketPlan(layout, order, pipeline.bucket_entries);
}

void Reducer::Impl::configure(const Spec& changes) {
  if (comm != nullptr) throw std::invalid_argument("configure: a step is open");
  Spec wanted = given;
  if (!changes.name.empty()) wanted.name = changes.name;
  for (const auto& [name, value] : changes.settings) wanted.settings[name] = value;
  Pipeline next(layout, with_exchange(wanted, prepared_ranks));
  expect_no_idle_limits(changes, next);
  const Spec &before = pipeline.spec, &after = next.spec;
  const auto same = [&](std::string_view name) {
    const auto a = before.settings.find(name), b = after.settings.find(name);
    return a != before.settings.end() && b != after.settings.end() && a->second == b->second;
  };
  if (!same("keep_dense") || !same("feedback")) {
    throw std::invalid_argument(
        "configure: feedback and keep_dense decide what is owed; they stay "
        "as they are once a run has begun");
  }
  // An estimate is kept in another form if the ranks choose alone; it owes nothing and starts anew.
  const bool form_changes = (next.choice == Choice::alone) != (pipeline.choice == Choice::alone);
  const bool keeps_memory = !(form_changes && next.feedback->is_estimate());
  // A device may refuse: so this comes before anything changes.
  move_memory(keeps_memory ? *pipeline.feedback : *next.feedback, next, device);
  if (keeps_memory) next.feedback = std::move(pipeline.feedback);
  if (same("threads")) next.threads = std::move(pipeline.threads);
  if (same("select")) next.selector = std::move(pipeline.selector);
  if (same("exchange")) next.exchange = std::move(pipeline.exchange);
  doubt.reset();
  rebuilding.reset();
  const bool same_density = same("density") && same("overhead") && same("min_density") &&
                            same("max_density") && same("budget_bytes");
  pipeline = std::move(next);
  plan_buckets();
  given = std::move(wanted);
  const bool own_affair =
      changes.name.empty() && changes.settings.size() == 1 && changes.settings.contains("threads");
  if (own_affair) return;
  describe_run();
  if (controller) coming = {controller->level(), same_density && controller->settled()};
  start_search();
}

void Reducer::Impl::visit(StateVisitor& visitor) {
  if (comm != nullptr) throw std::invalid_argument("state: a step is open");
  const auto purpose = visitor.purpose();
  if (in_parts && purpose == StateVisitor::Purpose::save) {
    throw std::runtime_error("state: a commit or a load was broken off; load a state first");
  }
  in_parts = in_parts || purpose == StateVisitor::Purpose::load;
  if (purpose == StateVisitor::Purpose::load) {
    doubt.reset();
    rebuilding.reset();
  }
  auto number = static_cast<double>(step);
  visit_number(visitor, "step", number, state_range::kStep);
  step = static_cast<std::uint64_t>(number);
  pipeline.feedback->visit(visitor);
  if (pipeline.selector) pipeline.selector->visit(visitor);
  pipeline.exchange->visit(visitor);
  visit_density(visitor);
  if (purpose == StateVisitor::Purpose::load) in_parts = false;
}

}  // namespace topreduce
