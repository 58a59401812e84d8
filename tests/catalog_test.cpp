// What users write: specs, methods, stages and settings, and what they are told when it is wrong.

#include "topreduce/catalog.h"

#include <set>

#include "cluster.h"
#include "expect_error.h"
#include "topreduce/reducer.h"

namespace topreduce::laws {
namespace {

// ---- specs -------------------------------------------------------------------------------------

TEST(Spec, IsReadAsWritten) {
  const Spec spec =
      parse_spec(" topk : density = 0.01 , select=(carried:gain=0.2,x=(a,b)) ,empty=");
  EXPECT_EQ(spec.name, "topk");
  const std::map<std::string, std::string, std::less<>> expected = {
      {"density", "0.01"}, {"select", "carried:gain=0.2,x=(a,b)"}, {"empty", ""}};
  EXPECT_EQ(spec.settings, expected);
  EXPECT_TRUE(parse_spec("dense").settings.empty());
}

TEST(Spec, SurvivesTheRoundTrip) {
  const char* texts[] = {"dense", "topk:density=0.01",
                         "topk:density=0.01,select=(carried:gain=0.2)", "a:b=(c:d=(e:f=1,g=2),h=3)",
                         "topk:keep_dense=*bias head.*"};
  for (const char* text : texts) {
    EXPECT_EQ(to_string(parse_spec(text)), text);
  }
  for (const char* row : kRows) {
    const Spec full = Reducer(small_model(), row).spec();
    const Spec again = parse_spec(to_string(full));
    EXPECT_EQ(again.name, full.name);
    EXPECT_EQ(again.settings, full.settings);
    EXPECT_EQ(Reducer(small_model(), full).spec().settings, full.settings) << row;
  }
  Reducer limited(small_model(), "topk:density=auto,budget_bytes=1000");
  limited.configure(parse_spec("topk:density=0.2"));  // a budget that waits for the next auto
  EXPECT_EQ(limited.spec().settings.at("budget_bytes"), "1000");
  EXPECT_EQ(Reducer(small_model(), limited.spec()).spec().settings, limited.spec().settings);
}

TEST(Spec, NamesTheMistake) {
  expect_error([] { parse_spec(""); }, {"start with a name"});
  expect_error([] { parse_spec(":density=1"); }, {":density=1", "start with a name"});
  expect_error([] { parse_spec("topk:density"); }, {"'density'", "name=value"});
  expect_error([] { parse_spec("topk:"); }, {"topk:", "name=value"});
  expect_error([] { parse_spec("topk:=3"); }, {"'=3'", "name=value"});
  expect_error([] { parse_spec("topk:density=1,density=2"); }, {"'density'", "twice"});
  expect_error([] { parse_spec("topk:select=(carried"); }, {"'('"});
  expect_error([] { parse_spec("topk:select=carried)"); }, {"')'"});
}

// ---- every entry -------------------------------------------------------------------------------

TEST(Catalog, EveryEntryHasARowInLaws) {
  std::set<std::string> in_rows;
  for (const char* row : rows()) {
    const Reducer reducer(small_model(), row);
    in_rows.insert("method " + reducer.spec().name);
    for (const char* stage : {"feedback", "select", "exchange"}) {
      const std::string& text = reducer.spec().settings.at(stage);
      if (!text.empty()) in_rows.insert(std::string(stage) + " " + parse_spec(text).name);
    }
  }
  const auto expect_rows = [&](const std::string& kind, const auto& entries) {
    for (const auto& entry : entries) {
      const std::string name = kind + " " + std::string(entry.name);
      EXPECT_TRUE(in_rows.contains(name)) << name << " has no row in laws.h";
    }
  };
  expect_rows("method", methods());
  expect_rows("feedback", feedbacks());
  expect_rows("select", selectors());
  expect_rows("exchange", exchanges());
}

TEST(Catalog, DefaultsAreValidAndDescribed) {
  const auto expect_sound = [](std::string_view owner, std::span<const Setting> settings) {
    Spec defaults{std::string(owner), {}};
    for (const Setting& setting : settings) {
      EXPECT_FALSE(setting.meaning.empty()) << owner << " " << setting.name;
      defaults.settings.emplace(setting.name, setting.fallback);
    }
    EXPECT_NO_THROW(Settings(owner, settings, defaults));
  };
  expect_sound("common", common_settings());
  for (const auto& entry : selectors()) expect_sound(entry.name, entry.settings);
  for (const auto& entry : feedbacks()) expect_sound(entry.name, entry.settings);
  for (const auto& entry : exchanges()) expect_sound(entry.name, entry.settings);
  for (const Method& method : methods()) {
    EXPECT_FALSE(method.summary.empty());
    const Reducer reducer(small_model(), method.name);
    EXPECT_EQ(reducer.spec().name, method.name);
  }
}

// A stage's setting may stand with the method or with the stage.
TEST(Catalog, SettingsReachTheirStage) {
  const auto select_of = [](const char* spec) {
    return Reducer(small_model(), spec).spec().settings.at("select");
  };
  EXPECT_EQ(select_of("topk:gain=0.25"), "carried:gain=0.25");
  EXPECT_EQ(select_of("topk:select=(carried:gain=0.25)"), "carried:gain=0.25");
  EXPECT_EQ(select_of("topk:granularity=model"), "topk");
  EXPECT_EQ(select_of("dense:exchange=gather"), select_of("topk"));
  EXPECT_EQ(select_of("topk:exchange=randk"), "");
  EXPECT_EQ(Reducer(small_model(), "dense").spec().settings.at("density"), "1");
}

TEST(Catalog, KeepDenseTakesPatterns) {
  const auto remembered = [](const std::string& pattern) {
    std::string names;
    const Reducer reducer(small_model(), {"topk", {{"keep_dense", pattern}}});
    for (const Parameter& parameter : reducer.remembered().parameters()) {
      names += parameter.name + " ";
    }
    return names;
  };
  EXPECT_EQ(remembered("*bias nothing scale"), "embed.weight block.weight head.weight ");
  EXPECT_EQ(remembered("*e*d* nothing* sc*le block.*"), "");
  EXPECT_EQ(remembered("*.*"), "nothing scale ");
}

// ---- mistakes ----------------------------------------------------------------------------------

void expect_refused(const char* spec, const std::vector<std::string>& words) {
  SCOPED_TRACE(spec);
  expect_error([&] { Reducer reducer(small_model(), spec); }, words);
}

TEST(Catalog, UnknownWordsGetTheNearestAndTheList) {
  expect_refused("topkk", {"unknown method 'topkk'", "did you mean 'topk'?", "auto, dense, topk"});
  expect_refused("tokp", {"did you mean 'topk'?"});
  expect_refused("TopK", {"did you mean 'topk'?"});
  expect_refused("topk:ratio=0.1", {"did you mean 'density'?"});
  expect_refused("topk:density=5%", {"write 0.05"});
  expect_refused("topk:density=150%", {"must be a number in (0, 1]"});
  expect_refused("zzzzz", {"unknown method 'zzzzz'; known: auto, dense, topk, "});
  expect_refused("topk:densty=0.1", {"topk", "'densty'", "did you mean 'density'?", "granularity"});
  expect_refused("topk:feedback=residuals", {"feedback 'residuals'", "'residual'?", "none"});
  expect_refused("topk:select=caried", {"select 'caried'", "did you mean 'carried'?", "topk"});
  expect_refused("topk:exchange=gathre", {"exchange 'gathre'", "known: dense, gather, "});
  expect_refused("topk:select=(carried:gan=1)", {"'gan'", "did you mean 'gain'?"});
  expect_refused("topk:granularity=model,gain=1", {"'gain'"});  // topk itself has no gain
}

TEST(Catalog, ValuesOutOfRangeAreNamedWithTheRange) {
  for (const char* density : {"0", "-1", "1.5", "nan", "inf", "abc", "0.1x", "1e400"}) {
    const std::string given = std::string("density=") + density;
    expect_refused(("topk:" + given).c_str(), {"topk: " + given, "a number in (0, 1]"});
  }
  expect_refused("topk:density=", {"density= must be a number in (0, 1]"});
  expect_refused("topk:seed=-1", {"seed=-1", "a whole number in [0, "});
  expect_refused("topk:warmup_steps=1.5", {"warmup_steps=1.5", "a whole number"});
  expect_refused("topk:ramp_steps=many", {"ramp_steps=many", "a whole number"});
  expect_refused("topk:gain=2", {"gain=2", "[0, 1]"});
  expect_refused("topk:values=fp8", {"values=fp8", "fp32|bf16|fp16"});
  expect_refused("topk:values=bf16|fp16", {"values=bf16|fp16", "fp32|bf16|fp16"});
  expect_refused("topk:granularity=layer", {"granularity=layer", "model|bucket"});
}

TEST(Catalog, StagesThatDoNotFitAreRefused) {
  expect_refused("topk:select=topk", {"select=topk", "granularity=model", "select=carried"});
  expect_refused("randk:select=topk", {"randk", "select=topk", "leave out"});
  expect_refused("dense:select=carried", {"dense", "select=carried", "leave out"});
  expect_refused("dense:density=0.5", {"dense", "density=0.5", "leave out"});
  expect_refused("topk:keep_dense=*bias decoder.*", {"keep_dense", "'decoder.*'"});
  EXPECT_NO_THROW(Reducer(small_model(), "dense:density=1"));
}

TEST(Layout, RefusesWhatCannotBe) {
  expect_error([] { Layout({{"twice", {1}}, {"twice", {2}}}); }, {"layout", "'twice'"});
  const std::size_t huge = std::size_t{1} << 40;
  expect_error([&] { Layout({{"large", {huge, huge}}}); }, {"layout", "'large'"});
  expect_error([&] { Reducer(one_parameter(huge), "dense"); }, {"2^32"});
  // Together they are more than a number can hold, and must not look like few.
  std::vector<Parameter> many;
  for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h"}) {
    many.push_back({name, {(std::size_t{1} << 61) - 1}});
  }
  many.push_back({"last", {18}});
  expect_error([&] { Layout{many}; }, {"layout", "'b'", "too large"});
}

TEST(Layout, AShapeWithAZeroIsEmpty) {
  const std::size_t huge = std::size_t{1} << 40;
  EXPECT_EQ(Layout({{"empty", {huge, huge, 0}}, {"full", {3}}}).size(), 3u);
}

// ---- ranks that differ -------------------------------------------------------------------------

/// Every rank must be told, and see both sides.
void expect_disagreement(const std::function<Reducer(int)>& make,
                         const std::vector<std::string>& words) {
  run_ranks(3, [&](Communicator& comm) {
    Reducer reducer = make(comm.rank());
    expect_error([&] { reducer.agree(comm); }, words);
    expect_error([&] { reducer.begin(comm); }, words);
  });
}

TEST(Agreement, DifferencesAreShownByRank) {
  const auto with = [](const char* common, const char* odd) {
    return [=](int rank) { return Reducer(small_model(), rank == 1 ? odd : common); };
  };
  expect_disagreement(with("topk:density=0.01", "topk:density=0.02"),
                      {"rank 0: density = 0.01", "rank 1: density = 0.02"});
  expect_disagreement(with("topk:seed=1", "topk:seed=2"), {"rank 0: seed = 1", "rank 1: seed = 2"});
  expect_disagreement(with("topk", "randk"), {"rank 0: method topk", "rank 1: method randk"});
  expect_disagreement(with("topk", "topk:gain=0.5"), {"select = carried:gain=0.5"});
  expect_disagreement(with("topk", "topk:values=bf16"), {"values = auto", "values = bf16"});
}

TEST(Agreement, ModelsAreCompared) {
  expect_disagreement(
      [](int rank) {
        const std::size_t width = rank == 2 ? 4 : 3;
        return Reducer(Layout({{"weight", {2, width}}, {"bias", {2}}}), "topk");
      },
      {"rank 0: parameter weight ( 2 3 )", "rank 2: parameter weight ( 2 4 )"});
  expect_disagreement(
      [](int rank) {
        return Reducer(rank == 0 ? one_parameter(2) : Layout({{"only.bias", {2}}, {"more", {}}}),
                       "topk");
      },
      {"rank 0: nothing", "rank 1: parameter more"});
}

TEST(Agreement, ModeAndStepAreCompared) {
  expect_disagreement(
      [](int rank) {
        Reducer reducer(one_parameter(3), "topk");
        if (rank == 1) reducer.set_mode(Reducer::Mode::bypass);
        return reducer;
      },
      {"rank 0: method topk", "rank 1: method topk, bypassed"});
  expect_disagreement(
      [](int rank) {
        Reducer reducer(one_parameter(3), "dense");
        const State state = {{"step", {std::bit_cast<std::uint64_t>(rank == 2 ? 9.0 : 8.0)}}};
        Loader loader(state);
        reducer.visit(loader);
        return reducer;
      },
      {"rank 0: the first step after settings or a state changed, step 8",
       "rank 2: the first step after settings or a state changed, step 9"});
}

TEST(Agreement, EqualRanksAgree) {
  run_ranks(3, [](Communicator& comm) {
    Reducer reducer(small_model(), "topk:density=0.02");
    EXPECT_NO_THROW(reducer.agree(comm));
    constexpr std::size_t kHead = comm::Mailbox::kFrameHead + 5 + 1 + 1 + 5;
    EXPECT_EQ(comm.traffic().bytes_sent, 2 * (kHead + 8)) << "not the text, which grows";
  });
}

}  // namespace
}  // namespace topreduce::laws
