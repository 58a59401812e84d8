// stages_bench: look + choose and commit + decode of a step as users run it, relative to one bare
// owed += gradient over the same 26 M entries (design: at most 1.3 and 2).

#include "bench/ratios.h"
#include "bench/step.h"

namespace topreduce {
namespace {

using bench::Step;

void add_rows(Step& step) {
  using bench::add_row;
  add_row("owed += gradient", [&] { step.add(); });
  add_row("owed += gradient (A/A)", [&] { step.add(); });
  for (const char* select : {"carried", "topk"}) {
    for (const double density : {0.001, 0.01}) {
      std::shared_ptr<select::Selector> selector = step.make(select);
      for (int i = 0; i < 4; ++i) step.choose(*selector, density);
      add_row("look + choose, " + std::string(select) + " " +
                  std::to_string(density * 100).substr(0, 3) + " %",
              [&step, selector, density] { step.choose(*selector, density); });
    }
  }
  for (const double density : {0.001, 0.01}) {
    add_row("commit + decode, 4 ranks of " + std::to_string(density * 100).substr(0, 3) + " %",
            [&step, result = Step::result(density)] { step.commit(result); });
  }
}

}  // namespace
}  // namespace topreduce

int main(int argc, char** argv) {
  topreduce::bench::Step step;
  topreduce::add_rows(step);
  return topreduce::bench::run(argc, argv, "owed += gradient");
}
