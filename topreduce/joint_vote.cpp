#include "topreduce/joint_vote.h"

#include <string>

namespace topreduce {
namespace {

// Each part has a layout and so a fingerprint of its own; the step tells whether they are together.
constexpr std::uint64_t kJointRun = 0x7368617264;

}  // namespace

void JointVote::enter(std::uint64_t step) {
  if (others_ != nullptr) others_->enter({comm::Place::Kind::step, step});
}

void JointVote::leave() noexcept {
  if (others_ != nullptr) others_->leave();
}

bool JointVote::hold(std::uint64_t step, bool yes, std::optional<tuning::Measurement>& measured,
                     StepStats& running) {
  if (others_ == nullptr) return yes;
  Stopwatch watch(running[Stage::network]);
  const comm::Traffic before = others_->traffic();
  vote_.begin(0, others_->size());
  const StepVote::Ballot ballot{
      .run = kJointRun, .step = step, .finite = yes, .measured = measured};
  running.rounds += vote_.hold(ballot, *others_);
  measured = vote_.measured();
  const comm::Traffic after = others_->traffic();
  running.bytes_inside += after.bytes_sent - before.bytes_sent;
  running.messages_inside += after.messages - before.messages;
  others_->drain();
  return vote_.finite();
}

}  // namespace topreduce
