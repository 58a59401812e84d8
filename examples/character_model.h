#pragma once

// A small language model in plain C++: the last characters, embedded side by side, one hidden
// layer, and the odds of every character to come next (Bengio et al., JMLR 3, 2003).
//
//   kContext ids -> embedding -> tanh(x W + b) -> softmax(h U + c)

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

class CharacterModel {
 public:
  static constexpr std::size_t kContext = 8;

  /// The same weights on every rank. `vocabulary`: how many different characters there are.
  explicit CharacterModel(std::size_t vocabulary)
      : vocabulary_(vocabulary), hidden_(kHidden), by_hidden_(kHidden) {
    for (const auto& [name, shape] : shapes()) {
      starts_.push_back(weights_.size());
      const bool matrix = shape.size() == 2;
      const float scale = matrix ? 1 / std::sqrt(static_cast<float>(shape[0])) : 0;
      const std::size_t entries = matrix ? shape[0] * shape[1] : shape[0];
      for (std::size_t i = 0; i < entries; ++i) weights_.push_back(scale * normal_(rng_));
    }
    for (std::size_t i = 0; i < starts_[1]; ++i) weights_[i] = normal_(rng_);  // the embedding
  }

  /// Names and shapes, in the order of `weights` and of gradients.
  std::vector<std::pair<std::string, std::vector<std::size_t>>> shapes() const {
    return {{"embedding", {vocabulary_, kEmbedding}},
            {"hidden.weight", {kInput, kHidden}},
            {"hidden.bias", {kHidden}},
            {"output.weight", {kHidden, vocabulary_}},
            {"output.bias", {vocabulary_}}};
  }

  std::vector<float>& weights() { return weights_; }

  /// The surprise at `window`'s last id after those before it, in nats. Adds its gradient times
  /// `share` to `gradient`, unless that is empty.
  double loss(std::span<const unsigned char> window, float share, std::span<float> gradient) {
    const float* embedding = weights_.data();
    const float* into = embedding + starts_[1];
    const float* out = embedding + starts_[3];
    for (std::size_t i = 0; i < kInput; ++i) {
      input_[i] = embedding[window[i / kEmbedding] * kEmbedding + i % kEmbedding];
    }
    std::copy_n(embedding + starts_[2], kHidden, hidden_.begin());
    for (std::size_t i = 0; i < kInput; ++i) add(input_[i], into + i * kHidden, hidden_);
    for (float& x : hidden_) x = std::tanh(x);
    odds_.assign(embedding + starts_[4], embedding + starts_[4] + vocabulary_);
    for (std::size_t i = 0; i < kHidden; ++i) add(hidden_[i], out + i * vocabulary_, odds_);
    const double surprise = soften(window[kContext]);
    if (!gradient.empty()) back(window, share, gradient);
    return surprise;
  }

 private:
  static constexpr std::size_t kEmbedding = 16, kInput = kContext * kEmbedding, kHidden = 256;

  /// to += factor * from
  static void add(float factor, const float* from, std::span<float> to) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += factor * from[i];
  }

  /// In eight sums, which the compiler can keep in one register.
  static float dot(const float* a, std::span<const float> b) {
    std::array<float, 8> sums{};
    std::size_t i = 0;
    for (; i + 8 <= b.size(); i += 8) {
      for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    }
    float sum = 0;
    for (; i < b.size(); ++i) sum += a[i] * b[i];
    for (const float each : sums) sum += each;
    return sum;
  }

  /// Turns `odds_` into the gradient of the loss before the softmax; returns the loss.
  double soften(std::size_t truth) {
    const float top = *std::max_element(odds_.begin(), odds_.end());
    double sum = 0;
    const double wanted = odds_[truth] - top;
    for (float& x : odds_) sum += x = std::exp(x - top);
    for (float& x : odds_) x /= static_cast<float>(sum);
    odds_[truth] -= 1;
    return std::log(sum) - wanted;
  }

  void back(std::span<const unsigned char> window, float share, std::span<float> gradient) {
    for (float& x : odds_) x *= share;
    add(1, odds_.data(), gradient.subspan(starts_[4]));
    const float* out = weights_.data() + starts_[3];
    for (std::size_t i = 0; i < kHidden; ++i) {
      add(hidden_[i], odds_.data(), gradient.subspan(starts_[3] + i * vocabulary_, vocabulary_));
      const float slope = 1 - hidden_[i] * hidden_[i];
      by_hidden_[i] = slope * dot(out + i * vocabulary_, odds_);
    }
    add(1, by_hidden_.data(), gradient.subspan(starts_[2], kHidden));
    const float* into = weights_.data() + starts_[1];
    for (std::size_t i = 0; i < kInput; ++i) {
      add(input_[i], by_hidden_.data(), gradient.subspan(starts_[1] + i * kHidden, kHidden));
      const std::size_t place = window[i / kEmbedding] * kEmbedding + i % kEmbedding;
      gradient[place] += dot(into + i * kHidden, by_hidden_);
    }
  }

  std::size_t vocabulary_;
  std::mt19937 rng_{1};
  std::normal_distribution<float> normal_;
  std::vector<std::size_t> starts_;  // of each shape in weights_
  std::vector<float> weights_;
  std::array<float, kInput> input_{};
  std::vector<float> hidden_, odds_, by_hidden_;
};
