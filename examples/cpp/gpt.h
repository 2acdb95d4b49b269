// A small GPT on bytes: the model of train.cpp.

#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <tp_ext/tp_ext.h>

struct GPTConfig {
  int64_t vocab_size = 256, hidden_size = 48, num_layers = 2, num_heads = 6, ffn_hidden_size = 128;
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(const GPTConfig& c, const tp_ext::ParallelGroup& group)
      : attention_norm(register_module(
            "attention_norm",
            tp_ext::nn::RMSNorm(tp_ext::nn::RMSNormOptions(c.hidden_size).group(group)))),
        attention(register_module(
            "attention", tp_ext::nn::ParallelAttention(
                             tp_ext::nn::ParallelAttentionOptions(c.hidden_size, c.num_heads)
                                 .bias(false)
                                 .rope(10000.0)
                                 .group(group)))),
        mlp_norm(register_module(
            "mlp_norm",
            tp_ext::nn::RMSNorm(tp_ext::nn::RMSNormOptions(c.hidden_size).group(group)))),
        mlp(register_module("mlp", tp_ext::nn::ParallelMLP(tp_ext::nn::ParallelMLPOptions(
                                                               c.hidden_size, c.ffn_hidden_size)
                                                               .activation("swiglu")
                                                               .bias(false)
                                                               .group(group)))) {}

  at::Tensor forward(at::Tensor x) {
    x = x + attention->forward(attention_norm->forward(x));
    return x + mlp->forward(mlp_norm->forward(x));
  }

  tp_ext::nn::RMSNorm attention_norm;
  tp_ext::nn::ParallelAttention attention;
  tp_ext::nn::RMSNorm mlp_norm;
  tp_ext::nn::ParallelMLP mlp;
};
TORCH_MODULE(Block);

struct GPTImpl : torch::nn::Module {
  GPTImpl(const GPTConfig& c, const tp_ext::ParallelGroup& group) {
    embedding = register_module(
        "embedding", tp_ext::nn::VocabParallelEmbedding(
                         tp_ext::nn::VocabParallelEmbeddingOptions(c.vocab_size, c.hidden_size)
                             .init(tp_ext::Normal(0.02))
                             .group(group)));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < c.num_layers; ++i) blocks->push_back(Block(c, group));
    norm = register_module(
        "norm", tp_ext::nn::RMSNorm(tp_ext::nn::RMSNormOptions(c.hidden_size).group(group)));
    head = register_module(
        "head",
        tp_ext::nn::VocabParallelLMHead(
            tp_ext::nn::VocabParallelLMHeadOptions(c.hidden_size, c.vocab_size).group(group)));
  }

  // ids and targets [batch, seq]
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets) {
    at::Tensor x = embedding->forward(ids);
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head->loss(norm->forward(x), targets);
  }

  tp_ext::nn::VocabParallelEmbedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  tp_ext::nn::RMSNorm norm{nullptr};
  tp_ext::nn::VocabParallelLMHead head{nullptr};
};
TORCH_MODULE(GPT);
