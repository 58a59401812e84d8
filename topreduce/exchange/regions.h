#pragma once

#include <array>
#include <vector>

#include "topreduce/compensated_gradient.h"
#include "topreduce/layout.h"
#include "topreduce/sparse_vector.h"
#include "topreduce/state.h"
#include "topreduce/wire/payload.h"

namespace topreduce::exchange {

/// Who adds up which entries. Every parameter is cut into one region per rank:
///
///   parameter 0   | rank 0 | rank 1 |  rank 2  |       one further for the next parameter, so that
///   parameter 1   |  rank 1  | rank 2 | rank 0 |       remainders do not all fall to one rank
///
/// Cutting parameters rather than buckets keeps owners independent of the bucket cut. Regions have
/// equal widths until the ranks have told each other where their entries lie: then they hold about
/// equally many. What is learnt are the places that cut each parameter's entries into kParts equal
/// parts, averaged over the ranks by an all-reduce; between them boundaries are interpolated, so
/// they serve any number of ranks.
class Regions {
 public:
  struct Piece {
    Index begin, end;  ///< in the exchange's numbering
    std::size_t owner, parameter;
  };

  explicit Regions(const Layout& layout);

  /// A step starts: forget what was learnt but not committed.
  void begin() { learnt_ = kept_; }

  /// Replaces `sums` with the places that cut each parameter's entries into equal parts, as shares
  /// of the parameter, and 1 behind them; zeros for a parameter with too few entries.
  void propose(std::span<const Segment> segments, const SparseVector& entries,
               Buffer<float>& sums) const;
  /// Adopts the mean of all ranks' proposals, which are added up in `sums`: for this step and, once
  /// committed, for later ones. Throws WireError for what cannot be a sum of proposals.
  void learn(std::span<const Segment> segments, std::span<const float> sums);

  /// Cuts an exchange into regions.
  void map(std::span<const Segment> segments, int ranks, struct RegionMap& map) const;

  void commit() { kept_ = learnt_; }
  void visit(std::string_view name, StateVisitor& visitor);

 private:
  static constexpr std::size_t kParts = 16;
  // [i][parameter]: where part i + 1 starts within the parameter. Whole numbers.
  using Bounds = std::array<std::vector<double>, kParts - 1>;

  std::size_t bound(const Segment& segment, std::size_t i) const;

  std::vector<double> sizes_;  // of the parameters
  Bounds kept_, learnt_;
};

/// An exchange cut into regions.
struct RegionMap {
  std::vector<Regions::Piece> pieces;           ///< ascending
  std::vector<std::vector<wire::Piece>> owned;  ///< by rank
};

/// Replaces outgoing[r] with the entries in the pieces of rank r.
void split(const SparseVector& entries, std::span<const Regions::Piece> pieces,
           std::span<SparseVector> outgoing);

/// Replaces outgoing[r] with the share of rank r in `entries` of the owner of their pieces: of
/// every piece about equally many, in multiples of `grain`, and each time from another rank on,
/// which does not depend on the bucket cut.
void deal_out(const SparseVector& entries, std::span<const Regions::Piece> pieces,
              std::size_t owner, std::size_t grain, std::span<SparseVector> outgoing);

/// Adds to counts[r] the number of `entries` in the pieces of rank r.
void count_by_owner(const SparseVector& entries, std::span<const Regions::Piece> pieces,
                    std::span<double> counts);

}  // namespace topreduce::exchange
