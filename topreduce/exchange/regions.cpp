#include "topreduce/exchange/regions.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "topreduce/errors.h"
#include "topreduce/state_range.h"

namespace topreduce::exchange {
namespace {

void append(const SparseVector& entries, std::size_t first, std::size_t last, SparseVector& part) {
  const std::size_t before = part.size();
  part.resize(before + last - first);
  std::copy_n(entries.indices.data() + first, last - first, part.indices.data() + before);
  std::copy_n(entries.values.data() + first, last - first, part.values.data() + before);
}

}  // namespace

Regions::Regions(const Layout& layout) {
  for (std::size_t i = 0; i + 1 < kParts; ++i) {
    for (const Parameter& parameter : layout.parameters()) {
      kept_[i].push_back(static_cast<double>(parameter.size * (i + 1) / kParts));
    }
  }
  for (const Parameter& parameter : layout.parameters()) {
    sizes_.push_back(static_cast<double>(parameter.size));
  }
  learnt_ = kept_;
}

void Regions::propose(std::span<const Segment> segments, const SparseVector& entries,
                      Buffer<float>& sums) const {
  make_room(sums, segments.size() * kParts);
  sums.assign(segments.size() * kParts, 0.0f);
  float* out = sums.data();
  std::size_t first = 0;
  for (const Segment& segment : segments) {
    const std::size_t last = end_of_range(entries.indices, first, segment.end());
    const std::size_t count = last - first;
    if (count >= kParts) {
      for (std::size_t i = 1; i < kParts; ++i) {
        const Index place = entries.indices[first + count * i / kParts] - segment.start;
        out[i - 1] =
            static_cast<float>(static_cast<double>(place) / static_cast<double>(segment.size()));
      }
      out[kParts - 1] = 1;
    }
    out += kParts;
    first = last;
  }
}

void Regions::learn(std::span<const Segment> segments, std::span<const float> sums) {
  for (const Segment& segment : segments) {
    const auto voices = static_cast<double>(sums[kParts - 1]);
    const auto size = static_cast<double>(segment.size());
    double before = 0;
    for (std::size_t i = 0; i + 1 < kParts && voices > 0; ++i) {
      const double place = std::floor(static_cast<double>(sums[i]) / voices * size);
      if (!(place >= before && place <= size)) {
        throw WireError("boundaries of regions: " + std::to_string(place) + " follows " +
                        std::to_string(before) + " in a parameter of " + std::to_string(size) +
                        " entries");
      }
      learnt_[i][segment.parameter] = before = place;
    }
    sums = sums.subspan(kParts);
  }
}

std::size_t Regions::bound(const Segment& segment, std::size_t i) const {
  if (i == 0) return 0;
  if (i == kParts) return segment.size();
  return std::min(static_cast<std::size_t>(learnt_[i - 1][segment.parameter]), segment.size());
}

void Regions::map(std::span<const Segment> segments, int ranks, RegionMap& map) const {
  const auto parts = static_cast<std::size_t>(ranks);
  map.pieces.clear();
  map.owned.resize(parts);
  for (auto& pieces : map.owned) pieces.clear();
  for (const Segment& segment : segments) {
    Index begin = segment.start;
    for (std::size_t r = 0; r < parts; ++r) {
      // The end of region r, between two of the known bounds.
      const std::size_t whole = (r + 1) * kParts / parts, rest = (r + 1) * kParts % parts;
      std::size_t end = bound(segment, whole);
      if (rest > 0) end += (bound(segment, whole + 1) - end) * rest / parts;
      const Index next = segment.start + static_cast<Index>(end);
      const std::size_t owner = (r + segment.parameter) % parts;
      map.pieces.push_back({begin, next, owner, segment.parameter});
      map.owned[owner].push_back({begin, next});
      begin = next;
    }
  }
}

void Regions::visit(std::string_view name, StateVisitor& visitor) {
  using Purpose = StateVisitor::Purpose;
  Bounds loaded = kept_;
  const auto name_of = [&](std::size_t i) {
    return std::string(name) + "." + std::to_string(i + 1);
  };
  for (std::size_t i = 0; i < loaded.size(); ++i) visitor.parameters(name_of(i), loaded[i]);
  if (visitor.purpose() == Purpose::save) return;
  for (std::size_t i = 0; i < loaded.size(); ++i) {
    for (std::size_t p = 0; p < sizes_.size(); ++p) {
      // Ascending, or pieces would overlap.
      const double least = i > 0 ? loaded[i - 1][p] : 0;
      expect_in_range(name_of(i), loaded[i][p], {least, sizes_[p], StateRange::Kind::whole});
    }
  }
  if (visitor.purpose() == Purpose::load) kept_ = loaded;
}

void split(const SparseVector& entries, std::span<const Regions::Piece> pieces,
           std::span<SparseVector> outgoing) {
  for (SparseVector& part : outgoing) part.clear();
  for_each_range(entries.indices, pieces, [&](std::size_t p, std::size_t first, std::size_t last) {
    append(entries, first, last, outgoing[pieces[p].owner]);
  });
}

void deal_out(const SparseVector& entries, std::span<const Regions::Piece> pieces,
              std::size_t owner, std::size_t grain, std::span<SparseVector> outgoing) {
  for (SparseVector& part : outgoing) part.clear();
  const std::size_t parts = outgoing.size();
  for_each_range(entries.indices, pieces, [&](std::size_t p, std::size_t first, std::size_t last) {
    const std::size_t grains = (last - first + grain - 1) / grain;
    for (std::size_t r = 0; r < parts; ++r) {
      append(entries, std::min(last, first + grains * r / parts * grain),
             std::min(last, first + grains * (r + 1) / parts * grain),
             outgoing[(owner + pieces[p].parameter + r) % parts]);
    }
  });
}

void count_by_owner(const SparseVector& entries, std::span<const Regions::Piece> pieces,
                    std::span<double> counts) {
  for_each_range(entries.indices, pieces, [&](std::size_t p, std::size_t first, std::size_t last) {
    counts[pieces[p].owner] += static_cast<double>(last - first);
  });
}

}  // namespace topreduce::exchange
