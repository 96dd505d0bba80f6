#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <tuple>

#include "configuration.cuh"
#include "format.cuh"

namespace slidesparse::hopper {
namespace {

// The search space of candidates.
constexpr int kTokens[] = {8, 16, 32, 64, 128, 256};
constexpr int kStrips[] = {1, 2, 3, 4, 5};
constexpr int kMulticast[] = {1, 2, 4};
constexpr int kSplits[] = {1, 2, 3, 4, 5, 6, 8};
constexpr int kResident[] = {1, 2, 3};
constexpr int kMinUsefulStages = 3;

constexpr int kSmBytes = 228 << 10;      // shared memory of an SM
constexpr int kMaxCtaBytes = 227 << 10;  // that a CTA may have
constexpr int kReservedBytes = 1 << 10;  // that CUDA reserves for each CTA

// The model, fitted on an H200 (INT8, Qwen2.5-7B's layers at 2:4 and 6:8) to 1280 products of 256
// to 8192 tokens and to 400 of fewer, of earlier forms of the kernels.  On 967 problems as
// `slidesparse tune` timed them (five models' layers, INT8 and FP8, 2:4 to 8:10) the best
// prediction takes 4% longer than the best of sixteen candidates in the mean and 16% in the worst
// twentieth with 256 tokens and more, 8% and 25% with fewer.  A new fit to half of them did no
// better on the others. kPartialsUs was not fitted: docs/kernels-notebook.md measured it.
constexpr double kMemoryRate = 4.2e6, kCacheRate = 8.0e6;  // bytes a us
constexpr double kPortBytes = 128, kClock = 2000.0;        // bytes a cycle; cycles a us
constexpr double kL2Bytes = 23e6;                          // of activations that stay in L2
constexpr double kEnoughSms = 116;                         // that together saturate the memory
constexpr double kSharpness = 3.6;  // exponent of the norm that combines times: infinity is max
// Relative cost of each further CTA of a multicast group, whose CTAs wait for each other.
constexpr double kSplitKMulticast = 0.06, kStreamKMulticast = 0.07;
constexpr double kStartUs = 5.0, kSplitUs = 1.2, kStreamUs = 0.8, kPartialsUs = 5.0;
// Microseconds for each strip of 64 tokens of a tile.
constexpr double kExchangeUs = 0.53, kOutputUs = 0.04, kSharedTileUs = 1.7, kWholeTileUs = 0.15;

// The number of tiles, counting those of a multicast group as one.
std::int64_t TilesOf(const Configuration& c, int n, int m) {
  return std::int64_t{CeilDiv(StripsOf(n), c.strips * c.multicast)} * CeilDiv(m, c.tokens);
}

// The time that does not depend on K': launch and prologue, reduction and epilogue of a tile.
double FixedUs(const Configuration& c, std::int64_t tiles, int sms) {
  const double tile = static_cast<double>(c.tokens) * c.strips / 64;
  if (c.stream_k) {  // shared tiles go through memory
    if (tiles * c.multicast < sms) return kStartUs + kPartialsUs + kSharedTileUs * tile;
    return kStartUs + kStreamUs + kWholeTileUs * tile;
  }
  const double exchange =
      c.splits > 1 ? kSplitUs + kExchangeUs * tile * (c.splits - 1) / c.splits : 0.0;
  return kStartUs + exchange + kOutputUs * tile;
}

// A roofline: the time is about the longest of those that memory, L2, shared memory and tensor
// cores take.  A wgmma takes one cycle for two tokens, at least 8 cycles, and multiplies 64 columns
// of a strip if it is sparse, 32 if it is dense.  Each strip reads all activations of its CTA from
// shared memory.  The constants were fitted to products of 2:4 blocks alone.
double PredictUs(const Configuration& c, int n, int columns, int m, double dense, double block,
                 int sms, int clusters) {
  const double strips = StripsOf(n), k_blocks = BlocksOf(columns);
  const std::int64_t tiles = TilesOf(c, n, m);
  double ctas, stages, fill = 1.0;  // of an SM, over all its CTAs; the filled share of waves
  if (c.stream_k) {
    ctas = static_cast<double>(clusters) * c.Cluster();
    stages = static_cast<double>(tiles) * c.multicast * k_blocks / std::min<double>(ctas, sms);
  } else {
    const std::int64_t count = tiles * c.Cluster(), waves = CeilDiv<std::int64_t>(tiles, clusters);
    ctas = static_cast<double>(count);
    if (waves > 1) fill = ctas / (static_cast<double>(waves) * sms * c.resident);
    stages = static_cast<double>(CeilDiv<std::int64_t>(count, sms)) * k_blocks / c.splits;
  }
  const double rate = std::min(1.0, std::min<double>(ctas, sms) / kEnoughSms) * fill;
  const double weight = strips * k_blocks * block;
  const double activations = static_cast<double>(tiles) * k_blocks * kBlockColumns *
                             std::min(c.tokens, m) * std::sqrt(c.multicast);
  const double read = weight * CeilDiv(m, c.tokens) + activations;
  // CTAs of shared tiles read other columns than their neighbours at the same time: from memory, as
  // far as L2 does not hold the activations.
  const double shared =
      c.stream_k ? 1 - static_cast<double>(std::max<std::int64_t>(0, tiles / clusters - 1)) *
                           clusters / static_cast<double>(tiles)
                 : 0.0;
  const double missed =
      read * shared * std::max(0.0, 1 - kL2Bytes / (m * k_blocks * kBlockColumns));
  // Bytes of a stage through the shared-memory port: all reads, and writes at half their size.
  const double moved = c.tokens * kBlockColumns * (c.strips + 0.5) + 1.5 * c.strips * block;
  const double times[] = {
      (weight + m * (k_blocks * kBlockColumns + 2.0 * n) + missed) / kMemoryRate / rate,
      read / kCacheRate / rate,
      stages * moved / kPortBytes / kClock,
      stages * 2 * (1 + dense) * c.strips * std::max(c.tokens / 2.0, 8.0) / kClock,
  };
  double sum = 0.0;
  for (double time : times) sum += std::pow(time, kSharpness);
  const double multicast =
      1 + (c.stream_k ? kStreamKMulticast : kSplitKMulticast) * (c.multicast - 1);
  return std::pow(sum, 1 / kSharpness) * multicast + FixedUs(c, tiles, sms);
}

// Reads a positive number without leading zeros, and advances `text` past it.
bool ReadNumber(const char*& text, int* number) {
  if (*text < '1' || *text > '9') return false;
  for (*number = 0; *text >= '0' && *text <= '9'; ++text) {
    if (*number > 9999) return false;
    *number = 10 * *number + (*text - '0');
  }
  return true;
}

bool ReadWord(const char*& text, const char* word) {
  const char* at = text;
  while (*word != '\0') {
    if (*at++ != *word++) return false;
  }
  text = at;
  return true;
}

}  // namespace

int Configuration::SharedBytes() const {
  return std::min(kMaxCtaBytes, kSmBytes / resident - kReservedBytes);
}

std::string ToText(const Configuration& c) {
  const auto text = [](int number) { return std::to_string(number); };
  const std::string tile = text(c.strips) + "x" + text(c.tokens) + "/" + text(c.multicast);
  return (c.stream_k ? "stream:" + tile : "split:" + tile + "x" + text(c.splits)) + "/" +
         text(c.resident);
}

bool Parse(const std::string& text, Configuration* c) {
  const char* at = text.c_str();
  c->stream_k = ReadWord(at, "stream:");
  c->splits = 1;
  return (c->stream_k || ReadWord(at, "split:")) && ReadNumber(at, &c->strips) &&
         ReadWord(at, "x") && ReadNumber(at, &c->tokens) && ReadWord(at, "/") &&
         ReadNumber(at, &c->multicast) &&
         (c->stream_k || (ReadWord(at, "x") && ReadNumber(at, &c->splits))) && ReadWord(at, "/") &&
         ReadNumber(at, &c->resident) && *at == '\0';
}

std::vector<Candidate> FindCandidates(int n, int columns, int m, double dense, double block,
                                      int most, int sms,
                                      const std::function<Fit(const Configuration&)>& fits) {
  std::vector<Candidate> found;
  const auto consider = [&](const Configuration& c) {
    const Fit fit = fits(c);
    const int others = sms * (c.resident - 1);
    if (fit.stages < kMinUsefulStages || fit.clusters * c.Cluster() <= others) return;  // no room
    if (!c.stream_k && TilesOf(c, n, m) * c.Cluster() <= others) return;  // too few CTAs
    found.push_back({PredictUs(c, n, columns, m, dense, block, sms, fit.clusters), c});
  };
  int widest = 0;  // the smallest tile that holds m tokens, else the largest tile
  for (int tokens : kTokens) {
    if (widest < m) widest = tokens;
  }
  const int narrowest = m <= 64 ? widest : widest / 4;
  for (int tokens : kTokens) {
    if (tokens < narrowest || tokens > widest) continue;
    for (int multicast : kMulticast) {
      for (int strips : kStrips) {
        if (strips > 1 && (strips - 1) * multicast >= StripsOf(n)) continue;  // an idle strip
        for (int resident : kResident) {
          consider({true, strips, tokens, multicast, 1, resident});
          for (int splits : kSplits) {
            if (splits <= BlocksOf(columns) && multicast * splits <= kMaxClusterSize) {
              consider({false, strips, tokens, multicast, splits, resident});
            }
          }
        }
      }
    }
  }
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    const auto order = [](const Candidate& one) {
      const Configuration& c = one.configuration;
      return std::make_tuple(one.us, c.stream_k, c.strips, c.tokens, c.multicast, c.splits,
                             c.resident);
    };
    return order(a) < order(b);
  });
  if (static_cast<int>(found.size()) > most) found.resize(std::max(most, 0));
  return found;
}

}  // namespace slidesparse::hopper
