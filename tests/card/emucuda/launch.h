// One piece of work on a stream: what it touches is unlocked for its time, and checked for races.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "memory.h"

namespace emu {

using at::Tensor;

struct Launch {
  Launch(std::string name, int card);
  ~Launch();
  void touch(const Tensor& tensor, bool writes);

  const int card, agent;
  const std::string what;

 private:
  void check_order(const Block& block, bool writes) const;
  std::vector<char*> opened_;
};

// CPU tensors over the same bytes as the card's, views and all.
class Aliases {
 public:
  Tensor of(const Tensor& card_tensor);
  // The card's tensor for a result of a CPU kernel: itself, a view of an argument, or a copy in new memory.
  Tensor back(const Tensor& result, Launch& launch);

 private:
  std::map<c10::StorageImpl*, c10::Storage> storages_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // (the card's, the alias)
};

Tensor empty_on(int card, at::IntArrayRef sizes, at::ScalarType dtype);
Tensor empty_on(int card, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
void copy_bytes(const Tensor& to, const Tensor& from);
at::Generator& generator_of(int card);
int card_of(const Tensor& tensor);
extern thread_local std::string doing;

}  // namespace emu
