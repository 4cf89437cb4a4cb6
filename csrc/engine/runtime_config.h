// How an engine is run: device, memory, limits. Made in Python (cpmcu/config.py).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cpmcu {

constexpr int kMaxSeqs = 256;  // maximum number of sequence slots, and of sequences in one step

struct RuntimeConfig {
  std::string device = "cpu";  // "cpu", "cuda"
  int device_index = 0;        // number of the GPU, or of the first one if there are several ranks
  int num_ranks = 1;           // GPUs, or threads of the CPU back end, that share the model
  // Fraction of the memory that is free at start; above 1: a number of GB.
  double memory_limit = 0.9;
  // Plans the memory of a device of this compute capability (89 for 8.9; 0: the CPU), and neither
  // allocates nor runs. Requires `device` "cpu" and a memory_limit in GB.
  std::optional<int> plans_for;
  int chunk_length = 2048;  // maximum number of tokens of one prefill step
  int max_num_seqs = 8;     // sequence slots, up to kMaxSeqs
  int max_model_len = 0;    // tokens of one sequence; 0: max_position_embeddings, or what fits
  // If max_model_len is 0: buffers are made for sequences of so many tokens; 0: of all positions.
  int sized_for = 0;
  bool cuda_graph = true;
  int num_threads = 0;  // threads of the CPU back end; 0: OMP_NUM_THREADS, or all cores
  // Folders that are searched for libcublasLt before the usual ones.
  std::vector<std::string> cublas_paths;
  // The rule that accepts drafted tokens: target_match, greedy, topp. The last two change the text.
  std::string verify_strategy = "target_match";
  int verify_window = 0;  // only for "topp": verify_window of AcceptTreeParams
};

}  // namespace cpmcu
