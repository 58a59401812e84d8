#include "topreduce/reducer.h"

#include <numeric>
#include <stdexcept>
#include <utility>

#include "topreduce/agreement.h"
#include "topreduce/floating.h"
#include "topreduce/reducer/impl.h"

namespace topreduce {

Reducer::Reducer(Layout layout, const Spec& method)
    : impl_(std::make_unique<Impl>(std::move(layout), method)) {}
Reducer::Reducer(Layout layout, std::string_view method)
    : Reducer(std::move(layout), parse_spec(method)) {}
Reducer::~Reducer() = default;
Reducer::Reducer(Reducer&&) noexcept = default;
Reducer& Reducer::operator=(Reducer&&) noexcept = default;

void Reducer::agree(Communicator& comm) {
  impl_->expect_closed("agree");
  impl_->agreed_ranks = 0;
  impl_->prepare_for(comm.size());
  comm.enter({comm::Place::Kind::agree, impl_->step});
  expect_same_text(comm, "step " + std::to_string(impl_->step) + "\n" + impl_->description);
  impl_->agreed_ranks = comm.size();
  impl_->forget_order();
}

void Reducer::commit_with(Communicator* others) {
  impl_->expect_closed("commit_with");
  impl_->joint.join(others);
}

void Reducer::commit_if(std::function<bool()> allows) {
  impl_->expect_closed("commit_if");
  impl_->allows = std::move(allows);
}

void Reducer::begin(Communicator& comm, float loss_scale) {
  const FloatMode mode;
  impl_->expect_closed("begin");
  try {
    impl_->prepare_for(comm.size());
    if (impl_->agreed_ranks != comm.size()) agree(comm);
    impl_->agree_on_order(comm);
    impl_->begin(comm, loss_scale);
  } catch (...) {
    impl_->fail();
  }
}

void Reducer::add(std::span<const std::size_t> parameters, std::span<float> gradient, float most) {
  const FloatMode mode;
  const ProcessorWatch watch(impl_->worked);
  try {
    if (impl_->on_device) {
      throw std::invalid_argument("add: gradients must stay on the device, see on_device");
    }
    impl_->add("add", parameters, gradient, most);
  } catch (...) {
    impl_->fail();
  }
}

void Reducer::lend(std::span<const std::size_t> parameters, std::span<float> gradient, float most) {
  const FloatMode mode;
  const ProcessorWatch watch(impl_->worked);
  try {
    if (impl_->on_device) throw std::invalid_argument("lend: gradients must stay on the device");
    impl_->add("lend", parameters, gradient, most, true);
  } catch (...) {
    impl_->fail();
  }
}

bool Reducer::borrows() const {
  return impl_->mode == Mode::compress && impl_->pipeline.granularity == Granularity::bucket &&
         impl_->pipeline.feedback->settles_early();
}

void Reducer::deliver_to(std::span<const std::size_t> parameters, std::span<float> means) {
  const FloatMode mode;
  const ProcessorWatch watch(impl_->worked);
  try {
    impl_->deliver_to(parameters, means);
  } catch (...) {
    impl_->fail();
  }
}

void Reducer::add_on_device(std::span<const std::size_t> parameters, float most) {
  const FloatMode mode;
  const ProcessorWatch watch(impl_->worked);
  try {
    if (!impl_->on_device) {
      throw std::invalid_argument(
          "add_on_device: gradients must come to main memory, see on_device");
    }
    impl_->add("add_on_device", parameters, {}, most);
  } catch (...) {
    impl_->fail();
  }
}

void Reducer::relocate(std::span<const std::size_t> parameters, std::span<float> gradient) {
  try {
    impl_->relocate(parameters, gradient);
  } catch (...) {
    impl_->fail();
  }
}

void Reducer::use(Device* device) {
  if (impl_->comm != nullptr) throw std::invalid_argument("use: a step is open");
  impl_->move_memory(*impl_->pipeline.feedback, impl_->pipeline, device);
}

double Reducer::pace() const {
  return std::chrono::duration<double>(impl_->pace).count();
}

bool Reducer::progress() {
  if (impl_->comm == nullptr) return false;
  const FloatMode mode;
  const ProcessorWatch watch(impl_->worked);
  try {
    impl_->go_on();
    return !impl_->in_flight.empty();
  } catch (...) {
    impl_->fail();
  }
}

bool Reducer::on_device() const {
  return impl_->on_device;
}

void Reducer::participate(const Participation& participation) {
  impl_->participate(participation);
}

void Reducer::verify(std::uint64_t fingerprint) {
  impl_->expect_open("verify");
  impl_->parameters_seen = fingerprint;
}

const StepStats& Reducer::finish() {
  const FloatMode mode;
  try {
    impl_->finish();
  } catch (...) {
    impl_->fail();
  }
  return impl_->stats;
}

const StepStats& Reducer::average(Communicator& comm, std::span<float> gradient) {
  std::vector<std::size_t>& all = impl_->everything;
  if (all.empty()) {
    all.resize(impl_->layout.count());
    std::iota(all.begin(), all.end(), std::size_t{0});
  }
  const auto before = impl_->finished_at;
  impl_->expect_closed("average");
  begin(comm);
  const FloatMode mode;
  try {
    if (impl_->on_device) {
      throw std::invalid_argument("average: gradients must stay on the device, see on_device");
    }
    impl_->add("average", all, gradient, std::numeric_limits<float>::max());
    impl_->finish();
  } catch (...) {
    impl_->fail();
  }
  // Whoever hands over everything at once has computed since the last step.
  if (before) impl_->timed_since(*before);
  return impl_->stats;
}

void Reducer::abandon(std::string_view why) noexcept {
  impl_->abandon(why);
}

RebuildPlan Reducer::plan_rebuild(Communicator& comm) {
  const FloatMode mode;
  impl_->expect_closed("plan_rebuild");
  return impl_->plan_rebuild(comm);
}

std::span<const float> Reducer::rebuild(Communicator& comm, const RebuildPlan& plan) {
  const FloatMode mode;
  impl_->expect_closed("rebuild");
  return impl_->rebuild(comm, plan);
}

void Reducer::skip_to(std::uint64_t step) {
  if (impl_->comm != nullptr) throw std::invalid_argument("skip_to: a step is open");
  impl_->step = step;
}

void Reducer::configure(const Spec& changes) {
  impl_->configure(changes);
}

void Reducer::set_mode(Mode mode) {
  if (impl_->comm != nullptr) throw std::invalid_argument("set_mode: a step is open");
  impl_->mode = mode;
  impl_->describe_run();
}

Reducer::Mode Reducer::mode() const {
  return impl_->mode;
}
std::vector<std::vector<std::size_t>> Reducer::buckets() const {
  std::vector<std::vector<std::size_t>> all;
  for (std::size_t b = 0; b < impl_->plan.count(); ++b) {
    all.emplace_back(impl_->plan[b].begin(), impl_->plan[b].end());
  }
  return all;
}
const Layout& Reducer::layout() const {
  return impl_->layout;
}
const Layout& Reducer::remembered() const {
  return impl_->pipeline.compressed;
}
const Spec& Reducer::spec() const {
  return impl_->pipeline.spec;
}
const StepStats& Reducer::stats() const {
  return impl_->stats;
}
std::vector<std::size_t> Reducer::unused() const {
  std::vector<std::size_t> numbers;
  for (std::size_t id = 0; id < impl_->layout.count(); ++id) {
    if (!impl_->vote.used(id)) numbers.push_back(id);
  }
  return numbers;
}
std::uint64_t Reducer::step() const {
  return impl_->step;
}

double Reducer::density() const {
  return impl_->next_level().density;
}

std::string Reducer::level() const {
  return tuning::to_word(impl_->next_level());
}

std::string Reducer::reason() const {
  if (impl_->mode == Mode::bypass) return "bypassed";
  if (impl_->controller) return impl_->controller->reason();
  switch (impl_->pipeline.rule) {
    case Pipeline::Rule::replayed: return "as another run chose";
    case Pipeline::Rule::found: return "the search has not begun";
    case Pipeline::Rule::fixed: break;
  }
  const Pipeline& pipeline = impl_->pipeline;
  const std::uint64_t last = pipeline.warmup_steps + pipeline.ramp_steps;
  if (impl_->step >= last || pipeline.choice == Choice::everything) return "as set";
  return (impl_->step < pipeline.warmup_steps ? "warm-up: " : "ramp: ") +
         pipeline.spec.settings.at("density") + " from step " + std::to_string(last);
}

std::string Reducer::choices() const {
  return impl_->choices.text();
}

void Reducer::timed(double computed, double waited) {
  impl_->timed(computed, waited);
}

std::span<const float> Reducer::owed() const {
  return impl_->pipeline.feedback->owed();
}

void Reducer::visit(StateVisitor& visitor) {
  impl_->visit(visitor);
}

}  // namespace topreduce
