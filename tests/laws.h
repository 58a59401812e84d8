#pragma once

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "sanitized.h"
#include "tiers.h"
#include "topreduce/layout.h"

// What every law is checked on: rows, models, bucket cuts and gradients.

namespace topreduce::laws {

/// Every entry of catalog.def stands in at least one row (catalog_test.cpp looks). Where tests may
/// take long, every row goes in `release` through the laws of reducer_test.cpp on 1 to 3 ranks and
/// of stats_test.cpp; fewer_rows() go through the others, and through those on more ranks. Else all
/// laws take as few rows as have everything.
inline constexpr const char* kRows[] = {
    "dense",
    "dense:granularity=model",
    "dense:values=bf16",
    "dense:values=bf16,feedback=residual",
    "auto:density=0.05",
    "topk:density=0.05",
    "ok_topk:density=0.2,keep_dense=*bias,granularity=model",
    "topk:density=0.05,values=fp32",
    "topk:density=0.05,values=fp32,granularity=model",
    "topk:density=0.05,values=bf16",
    "topk:density=0.05,values=fp16,granularity=model",
    "topk:density=0.05,feedback=none",
    "topk:density=0.05,feedback=none,granularity=model",
    "topk:density=0.05,values=fp32,keep_dense=*bias",
    "topk:density=0.05,values=fp32,keep_dense=*bias,granularity=model",
    "topk:density=0.05,values=fp32,select=(carried:gain=0.5),granularity=model",
    "topk:density=0.05,values=fp32,warmup_steps=2,ramp_steps=3",
    "randk:density=0.05,values=fp32",
    "randk:density=0.05,values=fp32,granularity=model",
    "randk:density=0.05,feedback=none",
    "randk:density=0.05,values=bf16",
    "randk:density=0.05,values=fp16,granularity=model",
    "arc_topk:density=0.2,values=fp32",
    "arc_topk:density=0.2,values=fp32,ranked=model,granularity=model",
    "arc_topk:density=0.1,values=fp32,stream=signs,sketch=2,width=16,random=0.25,keep_dense=*bias",
    "arc_topk:density=0.2,values=bf16,granularity=model",
    "arc_topk_ef21m:density=0.2,values=fp32,feedback=(ef21m:eta=0.5),granularity=model",
    "arc_topk:density=0.2,values=fp32,feedback=ef21",
    "topk:density=0.05,values=fp32,feedback=ef21",
    "topk:density=0.05,feedback=ef21m,values=bf16,granularity=model",
    "dense:feedback=ef21m",
    "topk_dsa:density=0.05,values=fp32",
    "topk_dsa:density=0.4,values=fp32,granularity=model",
    "topk_dsa:density=0.05,values=bf16",
    "topk_dsa:density=0.4,values=fp16,feedback=none",
    "gtopk:density=0.05,values=fp32",
    "gtopk:density=0.05,values=fp32,granularity=model",
    "gtopk:density=0.05,values=bf16",
    "gtopk:density=0.05,values=fp16,granularity=model",
    "gtopk:density=0.05,feedback=none,keep_dense=*bias",
    "ok_topk:density=0.05,values=fp32",
    "ok_topk:density=0.05,values=fp32,granularity=model",
    "ok_topk:density=0.05,values=bf16,period=3,tau=2,balance=1",
    "ok_topk:density=0.05,values=fp16,granularity=model,period=3,tau=2,balance=1",
    "ok_topk:density=0.05,feedback=none,period=4,keep_dense=*bias",
    "ok_topk:density=0.05,values=fp32,global_ratio=2.5,balance=0,warmup_steps=2,ramp_steps=3",
    "topk:density=0.05,values=fp32,select=(reused:period=4)",
    "randk:density=0.05,feedback=ef21,values=bf16",
    "topk_dsa:density=0.05,values=fp32,feedback=(ef21m:eta=0.5)",
    "gtopk:density=0.05,values=fp32,feedback=ef21,granularity=model",
    "ok_topk:density=0.05,values=fp32,feedback=ef21m,period=3",
    "gaussiank:density=0.05,values=fp32",
    "gaussiank:density=0.05,values=fp32,granularity=model",
    "gaussiank:density=0.05,sides=one,finish=exact,values=bf16",
    "gaussiank:density=0.05,finish=exact,granularity=model,feedback=none",
    "dgc:density=0.05,values=fp32",
    ("dgc:density=0.05,values=fp32,granularity=model,feedback=(momentum:momentum=0.5,form=nesterov,"
     "masking=off)"),
    "dgc:density=0.05,values=bf16,feedback=residual,warmup_steps=2,ramp_steps=3",
    "arc_topk:density=0.2,values=fp32,feedback=momentum",
    "redsync:density=0.05,values=fp32",
    "redsync:density=0.05,values=fp32,search=trimmed,granularity=model",
    "redsync:density=0.05,values=fp32,finish=exact,granularity=model",
    "topk:density=0.4,values=int8",
    "topk:density=0.6,values=int2",
    "topk:density=0.05,values=int4,feedback=ef21m,granularity=model",
    "topk:density=0.2,values=int4,keep_dense=*bias",
    "randk:density=0.3,values=sign",
    "arc_topk:density=0.2,values=int4",
    "dense:values=int2,feedback=residual",
    "topk_dsa:density=0.6,values=int4",
    "topk_dsa:density=0.05,values=sign,granularity=model",
    "gtopk:density=0.2,values=int4",
    "gtopk:density=0.2,values=sign,granularity=model",
    "ok_topk:density=0.2,values=int4,period=3,tau=2,balance=1",
    "ok_topk:density=0.2,values=int2,granularity=model,period=3,tau=2,balance=1",
    "ok_topk:density=0.2,values=sign,period=3",
};
// A sanitizer needs ranks, blocks and steps, not many of them, and each method, stage and format in
// one row or another. Step 7 of integers() is the last special one.
inline const std::vector<int> kRankCounts = kThreadsSanitized && !kLong ? std::vector{3}
                                            : kSanitized                ? std::vector{1, 3}
                                                         : std::vector{1, 2, 3, 5, 8};
inline const std::vector<int> kSomeRanks =  // of what takes long
    kSanitized ? std::vector{3} : std::vector{2, 3};
// Of messages that are lost, one after the other.
inline const std::uint64_t kMessageStep = kSanitized ? 3 : 1;
// Of rows where tests may take long; settings do not change who meets whom.
inline const std::size_t kRowStep = kThreadsSanitized ? 12 : kSanitized ? 6 : 1;
// More than a stretch, and than two samples; for a sanitizer one will do.
inline const std::size_t kMany = kSanitized ? 70'000 : 300'000;
inline const int kLawSteps = kSanitized ? 9 : 20;
inline const int kCutSteps = kSanitized ? 6 : 10;

/// The method of a row with its granularity, and the stages and formats that it names; where data
/// races are looked for only exchanges, which decide on who meets whom. For a sanitizer that may
/// not take long, method and granularity are two things.
inline std::set<std::string> entries_of(const std::string& row) {
  const auto word_at = [&](std::size_t start) {
    return row.substr(start, row.find_first_of(":,)", start) - start);
  };
  const bool whole = row.find("granularity=model") != std::string::npos;
  const std::string granularity = whole ? " model" : " bucket";
  std::set<std::string> entries = {word_at(0) + granularity};
  // But topk selects in another way where it sees the whole model.
  if (kSanitized && !kLong && word_at(0) != "topk") entries = {word_at(0), granularity};
  // What selects otherwise than its method does not stand for it.
  if (row.find("select=") != std::string::npos) entries.clear();
  for (const std::string stage : {"exchange=", "feedback=", "select=", "values="}) {
    if (kThreadsSanitized && stage != "exchange=") break;
    const std::size_t found = row.find(stage);
    if (found == std::string::npos) continue;
    const std::size_t start = found + stage.size();
    entries.insert(word_at(row[start] == '(' ? start + 1 : start));
  }
  return entries;
}

/// Every `step`-th row, and those with what none of them has.
inline std::vector<const char*> many_rows(std::size_t step) {
  std::vector<const char*> chosen;
  std::set<std::string> seen;
  for (std::size_t i = 0; i < std::size(kRows); i += step) {
    chosen.push_back(kRows[i]);
    seen.merge(entries_of(kRows[i]));
  }
  for (std::size_t i = 0; i < std::size(kRows); ++i) {
    const auto entries = entries_of(kRows[i]);
    if (std::includes(seen.begin(), seen.end(), entries.begin(), entries.end())) continue;
    chosen.push_back(kRows[i]);
    seen.insert(entries.begin(), entries.end());
  }
  return chosen;
}

/// As few rows as have everything: again and again the one with most that is new.
inline std::vector<const char*> few_rows() {
  std::vector<std::set<std::string>> left;
  for (const char* row : kRows) left.push_back(entries_of(row));
  std::vector<const char*> chosen;
  while (true) {
    const auto best = std::ranges::max_element(left, {}, &std::set<std::string>::size);
    if (best->empty()) return chosen;
    chosen.push_back(kRows[best - left.begin()]);
    const std::set<std::string> taken = *best;
    for (auto& entries : left) {
      std::erase_if(entries, [&](const std::string& entry) { return taken.contains(entry); });
    }
  }
}

/// The rows that this build checks.
inline std::vector<const char*> rows() {
  return kLong ? many_rows(kRowStep) : few_rows();
}

/// For what takes long: each method in buckets and as a whole, each stage and each format, as far
/// as there is such a row; in not all combinations.
inline std::vector<const char*> fewer_rows() {
  return kLong ? many_rows(2 * kRowStep) : few_rows();
}

/// A row, and on how many ranks.
using RowOnRanks = std::tuple<const char*, int>;
inline std::vector<RowOnRanks> rows_on_ranks() {
  std::vector<RowOnRanks> chosen;
  for (const int ranks : kRankCounts) {
    for (const char* row : ranks > 3 ? fewer_rows() : rows()) chosen.emplace_back(row, ranks);
  }
  return chosen;
}

/// A row as part of a test's name.
inline std::string name_of(std::string row) {
  for (char& letter : row) {
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
  }
  return row;
}

// ---- models ------------------------------------------------------------------------------------

/// Matrices, biases, a scalar, and empty parameters between and behind them.
inline Layout small_model() {
  return Layout({{"embed.weight", {13, 7}},
                 {"embed.bias", {7}},
                 {"nothing", {0, 4}},
                 {"block.weight", {20, 11}},
                 {"block.bias", {11}},
                 {"scale", {}},
                 {"head.weight", {5, 30}},
                 {"head.bias", {5}},
                 {"nothing.bias", {0}}});
}

inline Layout one_parameter(std::size_t n) {
  return Layout({{"only.bias", {n}}});
}

// ---- bucket cuts -------------------------------------------------------------------------------

/// Buckets in the order they come; each lists parameters in the order its gradient holds them.
using Cut = std::vector<std::vector<std::size_t>>;

inline Cut one_bucket(const Layout& layout) {
  Cut cut(1);
  cut[0].resize(layout.count());
  std::iota(cut[0].begin(), cut[0].end(), std::size_t{0});
  return cut;
}

inline Cut three_buckets(const Layout& layout) {
  Cut cut(3);
  for (std::size_t id = 0; id < layout.count(); ++id) cut[id * 3 / layout.count()].push_back(id);
  return cut;
}

inline Cut per_parameter(const Layout& layout) {
  Cut cut;
  for (std::size_t id = 0; id < layout.count(); ++id) cut.push_back({id});
  return cut;
}

/// As a backward pass brings them: the last parameter first; two buckets that interleave.
inline Cut reversed(const Layout& layout) {
  Cut cut(2);
  for (std::size_t id = layout.count(); id-- > 0;) cut[id % 2].push_back(id);
  return cut;
}

inline std::vector<Cut> all_cuts(const Layout& layout) {
  return {one_bucket(layout), three_buckets(layout), per_parameter(layout), reversed(layout)};
}

// ---- gradients ---------------------------------------------------------------------------------

using Floats = std::vector<float>;

inline std::mt19937 rng_of(int rank, int step) {
  return std::mt19937(static_cast<unsigned>(1000 * step + rank + 1));
}

/// Whole numbers from -8 to 8: every order of summation is exact. Step 4 is all zero, step 7
/// nearly.
inline Floats integers(int rank, int step, std::size_t n) {
  auto rng = rng_of(rank, step);
  Floats gradient(n);
  if (step == 4) return gradient;
  const unsigned one_in = step == 7 ? 100 : 1;
  for (float& x : gradient) {
    const auto draw = rng();
    if (draw / 17 % one_in == 0) x = static_cast<float>(static_cast<int>(draw % 17) - 8);
  }
  return gradient;
}

/// Like real gradients: heavy tails, and every parameter has a scale of its own.
inline Floats heavy_tailed(int rank, int step, const Layout& layout) {
  auto rng = rng_of(rank, step);
  std::normal_distribution<float> normal;
  Floats gradient;
  for (std::size_t id = 0; id < layout.count(); ++id) {
    const float scale = std::pow(2.0f, static_cast<float>(id % 5) - 2);
    for (std::size_t i = 0; i < layout[id].size; ++i) {
      gradient.push_back(scale * normal(rng) * std::exp(0.7f * normal(rng)));
    }
  }
  return gradient;
}

}  // namespace topreduce::laws
